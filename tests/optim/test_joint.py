"""Several optimisers that share their passes make the step of one optimiser with as many groups."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer import SAM, AdamWTracer, FiniteDifference, NonFiniteError, SGDTracer, Tracer, joint_perturbed, joint_step


class Setting:
    def __init__(self):
        torch.manual_seed(0)
        self.body, self.head = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh()), nn.Linear(6, 3)
        self.net = nn.Sequential(self.body, nn.Dropout(0.2), self.head).double()
        self.x, self.y, self.passes = torch.randn(4, 12, 4).double(), torch.randint(3, (4, 12)), 0
        torch.manual_seed(1)

    def loss(self, x, y):
        self.passes += 1
        return cross_entropy(self.net(x), y)

    @property
    def weights(self):
        return [t.detach().clone() for t in self.net.state_dict().values()]


OWN = {"rho": 0.3, "delta": 0.05}
TRACERS = {
    "forward": {},
    "central": {"engine": FiniteDifference(central=True)},
    "exact": {"engine": "exact"},
    "every second": {"interval": 2, "reuse": 1.0},
    "scale_free": {"scale_free": True},
}


def by_closure(setting, opts, x, y):
    assert joint_step(opts, setting.loss, x, y).grad_fn is None


def in_micro_batches(setting, opts, x, y):
    joint_step(opts, setting.loss, batches=[(x[:4], y[:4]), (x[4:], y[4:])])


def by_scope(setting, opts, x, y):
    for opt in opts:
        opt.zero_grad()
    setting.loss(x, y).backward()
    for _ in range(opts[0].second_pass_due * (1 + opts[0].is_central)):
        with joint_perturbed(opts):
            setting.loss(x, y).backward()
    for opt in opts:
        opt.step()


def with_a_scaler(setting, opts, x, y):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for opt in opts:
        opt.zero_grad()
    scaler.scale(setting.loss(x, y)).backward()
    for _ in range(1 + opts[0].is_central):
        with joint_perturbed(opts, scaler=scaler):
            scaler.scale(setting.loss(x, y)).backward()
    for opt in opts:
        scaler.step(opt)
    scaler.update()


@pytest.mark.parametrize(
    ("step", "name"),
    [
        *((by_closure, name) for name in TRACERS),
        *((by_scope, name) for name in ("forward", "central", "every second", "scale_free")),
        (in_micro_batches, "forward"),
        (in_micro_batches, "central"),
        (with_a_scaler, "forward"),
    ],
)
def test_two_make_the_step_of_one(step, name):
    """With learning rate and ρ of their own."""
    one, two = Setting(), Setting()
    own = OWN | TRACERS[name]
    groups = [{"params": one.body.parameters()}, {"params": one.head.parameters(), "lr": 0.05, "rho": 0.1}]
    opt = SGDTracer(groups, lr=0.1, momentum=0.9, model=one.net, **own)
    body = SGDTracer(two.body.parameters(), lr=0.1, momentum=0.9, model=two.net, **own)
    head = SGDTracer(two.head.parameters(), lr=0.05, momentum=0.9, model=two.net, **(own | {"rho": 0.1}))
    for i, (x, y) in enumerate(zip(one.x, one.y, strict=True)):
        batches = {"batches": [(x[:4], y[:4]), (x[4:], y[4:])]} if step is in_micro_batches else {}
        torch.manual_seed(i)
        opt.step(one.loss, *(() if batches else (x, y)), **batches)
        torch.manual_seed(i)
        step(two, [body, head], x, y)
    torch.testing.assert_close(two.weights, one.weights, rtol=1e-10, atol=1e-12)
    assert two.passes == one.passes
    if step is by_closure:
        assert body.stats.trace_ratio == head.stats.trace_ratio == pytest.approx(opt.stats.trace_ratio)


@pytest.mark.parametrize("step", [by_closure, by_scope])
def test_by_hand(step):
    """SGD-TRACER for the body, RMSprop-TRACER for the head: two ordinary passes, and the rest on paper."""
    setting, twin = Setting(), Setting()
    radius, (body_rho, head_rho) = 0.05, (0.3, 0.1)
    body = SGDTracer(setting.body.parameters(), lr=0.1, rho=body_rho, delta=0.05, f0=1.0, beta=0.1)
    head = Tracer(torch.optim.RMSprop(setting.head.parameters(), lr=0.01), rho=head_rho, delta=0.2, f0=2.0, beta=0.3)
    setting.net.eval()
    twin.net.eval()
    params = [*twin.body.parameters(), *twin.head.parameters()]
    bodies = len(list(twin.body.parameters()))
    f = [torch.full_like(p, 1.0 if i < bodies else 2.0) for i, p in enumerate(params)]
    squares = [torch.zeros_like(p) for p in params]
    for x, y in zip(setting.x, setting.y, strict=True):
        step(setting, [body, head], x, y)
        g = torch.autograd.grad(cross_entropy(twin.net(x), y), params)
        rhos = [body_rho if i < bodies else head_rho for i in range(len(params))]
        deltas = [0.05 if i < bodies else 0.2 for i in range(len(params))]
        u = [r * a / (b + d) for r, a, b, d in zip(rhos, g, f, deltas, strict=True)]
        length = torch.cat([a.flatten() for a in u]).norm()
        with torch.no_grad():
            old = [p.clone() for p in params]
            for p, a in zip(params, u, strict=True):
                p += radius * a / length
        ahead = torch.autograd.grad(cross_entropy(twin.net(x), y), params)
        with torch.no_grad():
            for i, (p, w, a, b) in enumerate(zip(params, old, g, ahead, strict=True)):
                total = a + 2 * length / radius * (b - a)
                if i < bodies:
                    p.copy_(w - 0.1 * total)
                else:
                    squares[i] = 0.99 * squares[i] + 0.01 * total**2
                    p.copy_(w - 0.01 * total / (squares[i].sqrt() + 1e-8))
                beta = 0.1 if i < bodies else 0.3
                f[i] = (1 - beta) * f[i] + beta * a**2
    torch.testing.assert_close(setting.weights, twin.weights, rtol=1e-9, atol=1e-11)


def test_sam_and_adam_and_a_third():
    one, two = Setting(), Setting()
    opt = SAM(torch.optim.SGD(one.net.parameters(), lr=0.1), rho=0.3, model=one.net)
    parts = [two.body[0], two.body[1], two.head]
    opts = [SAM(torch.optim.SGD(part.parameters(), lr=0.1), rho=0.3, model=two.net) for part in parts]
    for i, (x, y) in enumerate(zip(one.x, one.y, strict=True)):
        torch.manual_seed(i)
        opt.step(one.loss, x, y)
        torch.manual_seed(i)
        joint_step(opts, two.loss, x, y)
    torch.testing.assert_close(two.weights, one.weights, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("step", [by_closure, by_scope])
def test_one_whose_rho_is_zero_is_torch_s(step):
    """To the bit, with the gradient of the loss alone; the other's step is that beside torch's own."""
    one, two = Setting(), Setting()
    body, head = AdamWTracer(one.body.parameters(), model=one.net, **OWN), torch.optim.AdamW(one.head.parameters())
    opts = [
        AdamWTracer(two.body.parameters(), model=two.net, **OWN),
        AdamWTracer(two.head.parameters(), model=two.net, rho=0.0),
    ]
    for i, (x, y) in enumerate(zip(one.x, one.y, strict=True)):
        torch.manual_seed(i)
        head.zero_grad()
        body.step(one.loss, x, y)
        head.step()
        torch.manual_seed(i)
        step(two, opts, x, y)
    assert all(map(torch.equal, two.weights, one.weights))


def test_a_third_of_torch_s_finds_the_gradient_of_one_pass():
    setting = Setting()
    setting.net.eval()
    opts = [SGDTracer(part.parameters(), **OWN) for part in (setting.body[0], setting.body[1])]
    x, y = setting.x[0], setting.y[0]
    expected = torch.autograd.grad(setting.loss(x, y), list(setting.head.parameters()))
    for step in (by_closure, by_scope):
        setting.head.zero_grad()
        setting.net.load_state_dict(Setting().net.state_dict())
        step(setting, opts, x, y)
        assert all(map(torch.equal, [p.grad for p in setting.head.parameters()], expected))


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_what_is_not_finite_moves_nobody(nonfinite):
    setting = Setting()
    body, head = (
        SGDTracer(m.parameters(), model=setting.net, nonfinite=nonfinite, **OWN) for m in (setting.body, setting.head)
    )
    before, x, y = setting.weights, setting.x[0], setting.y[0]
    with torch.no_grad():
        bad = x.clone()
        bad[0, 0] = torch.nan
    if nonfinite == "raise":
        with pytest.raises(NonFiniteError, match="made by none"):
            joint_step([body, head], setting.loss, bad, y)
    else:
        joint_step([body, head], setting.loss, bad, y)
    assert all(map(torch.equal, setting.weights, before))
    assert body.steps == head.steps == 0
    joint_step([body, head], setting.loss, x, y)
    assert body.steps == head.steps == 1


def test_nested_scopes_are_refused():
    setting = Setting()
    x, y = setting.x[0], setting.y[0]
    for own in ({"model": setting.net}, {}):
        body, head = (SGDTracer(m.parameters(), **OWN, **own) for m in (setting.body, setting.head))
        setting.net.zero_grad()
        setting.loss(x, y).backward()
        before = [p.grad for p in setting.net.parameters()]
        with pytest.raises(RuntimeError, match="joint_perturbed"), body.perturbed(), head.perturbed():
            setting.loss(x, y).backward()
        assert all(p.grad is old for p, old in zip(setting.net.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda s: [SGDTracer(s.net.parameters(), **OWN)], "two or more"),
        (lambda s: [SGDTracer(s.net.parameters(), **OWN), SGDTracer(s.head.parameters(), **OWN)], "in common"),
        (lambda s: [SGDTracer(s.body.parameters(), **OWN), torch.optim.SGD(s.head.parameters())], "torch's own"),
        (lambda s: [SGDTracer(s.body.parameters(), **OWN), SAM(torch.optim.SGD(s.head.parameters()))], "same passes"),
    ],
)
def test_refusals(make, match):
    setting = Setting()
    with pytest.raises(ValueError, match=match):
        joint_step(make(setting), setting.loss, setting.x[0], setting.y[0])


def test_a_scope_before_backward():
    setting = Setting()
    opts = [SGDTracer(part.parameters(), lr=0.1, **OWN) for part in (setting.body, setting.head)]
    with pytest.raises(RuntimeError, match=r"joint_perturbed\(\) before backward\(\)"), joint_perturbed(opts):
        pass


def test_an_overflow_under_a_scaler_displaces_nothing_to_infinity():
    """Without `model=` nothing else keeps batch norm's statistics finite."""
    setting = Setting()
    opts = [SGDTracer(part.parameters(), lr=0.1, **OWN) for part in (setting.body, setting.head)]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = [p.detach().clone() for p in setting.net.parameters()]
    scaler.scale(setting.loss(setting.x[0], setting.y[0])).backward()
    setting.body[0].weight.grad.fill_(torch.inf)
    with joint_perturbed(opts, scaler=scaler):
        assert all(p.isfinite().all() for p in setting.net.parameters())
        scaler.scale(setting.loss(setting.x[0], setting.y[0])).backward()
    for opt in opts:
        scaler.step(opt)
    assert all(map(torch.equal, setting.net.parameters(), before))
