"""Weights in bfloat16: against loops written out by hand, in which the update is torch's own on float32 copies."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer import (
    SAM,
    AdamWTracer,
    Clip,
    FiniteDifference,
    NonFiniteError,
    SGDTracer,
    Tracer,
    joint_step,
)
from gtracer.optim.masters import REST, joined, split
from gtracer.optim.refusals import check_capture
from gtracer.tensors import displace_, norm
from support.optimizers import every_optimiser

RADIUS, RHO, DELTA, BETA = 0.05, 0.01, 0.05, 0.1
TRACER = {"rho": RHO, "delta": DELTA}
BASES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-4),
}
OURS = {
    "sgd": lambda p, **own: SGDTracer(p, lr=1e-3, momentum=0.9, weight_decay=0.01, **own),
    "adamw": lambda p, **own: AdamWTracer(p, lr=1e-5, **own),
    "rmsprop": lambda p, **own: Tracer(torch.optim.RMSprop(p, lr=1e-4), **own),
}
each_base = pytest.mark.parametrize("name", BASES)


def network(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 3)).bfloat16().to(dtype)  # the same numbers in all


def batch(i, dtype=torch.bfloat16):
    draw = torch.Generator().manual_seed(i)
    return torch.randn(12, 5, generator=draw).bfloat16().to(dtype), torch.randint(3, (12,), generator=draw)


def loss_of(model, i):
    x, y = batch(i, next(model.parameters()).dtype)
    return lambda: cross_entropy(model(x).float(), y)


def trained(opt, model, steps):
    for i in steps:
        opt.step(loss_of(model, i))
    return opt


def masters(opt):
    return [joined(p, opt.state[p][REST]) for group in opt.param_groups for p in group["params"]]


def everything(model, opt):
    state = [v.clone() for p in model.parameters() for v in opt.state[p].values() if torch.is_tensor(v)]
    return [p.detach().clone() for p in model.parameters()] + state


def distance(found, expected):
    return norm([a.float() - b.float() for a, b in zip(found, expected, strict=True)])


def slopes(model, i):
    return [g.float() for g in torch.autograd.grad(loss_of(model, i)(), list(model.parameters()))]


class ByHand:
    """Algorithm 1 in float32, over passes of a model in bfloat16."""

    def __init__(self, name, rho, f_is_adams=False):
        self.model, self.rho, self.f = network(), rho, None
        self.weights = [p.detach().float() for p in self.model.parameters()]
        self.base, self.f_is_adams = BASES[name](self.weights), f_is_adams

    def place(self, values):
        with torch.no_grad():
            for p, value in zip(self.model.parameters(), values, strict=True):
                p.copy_(value)

    def step(self, i):
        now = [p.detach().clone() for p in self.model.parameters()]
        g = slopes(self.model, i)
        total = list(g)
        f = [x * x for x in g] if self.f is None else self.f
        if self.rho:
            u = [self.rho * x / (y + DELTA) for x, y in zip(g, f, strict=True)]
            there = [p.clone() for p in now]
            displace_(there, [x * (RADIUS / norm(u)) for x in u], seed=i)
            self.place(there)
            ahead = slopes(self.model, i)
            self.place(now)
            total = [x + 2 * norm(u) / RADIUS * (y - x) for x, y in zip(g, ahead, strict=True)]
        for w, x in zip(self.weights, total, strict=True):
            w.grad = x
        self.base.step()
        self.place([split(w)[0] for w in self.weights])
        if self.f_is_adams:
            own = [self.base.state[w] for w in self.weights]
            self.f = [x["exp_avg_sq"] / (1 - 0.999 ** float(x["step"])) for x in own]
        else:
            self.f = [(1 - BETA) * y + BETA * x * x for x, y in zip(g, f, strict=True)]


def test_a_weight_and_its_rest_are_float32():
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=draw).int()
    ties = (torch.arange(-200, 200, dtype=torch.int32) << 16) + 2**15
    whole = torch.cat([bits, ties]).view(torch.float32)
    whole = torch.cat([whole[whole.abs() < 3e38], torch.tensor([0.0, -0.0, 1.0, -1.0])])
    weight, rest = split(whole)
    assert rest.dtype == torch.int16
    assert torch.equal(joined(weight, rest).view(torch.int32), whole.view(torch.int32))
    away = (weight.double() - whole.double()).abs()
    assert (away <= (whole.bfloat16().double() - whole.double()).abs()).all()  # it is a nearest one


def test_a_displacement_is_right_on_average_and_to_the_nearest_it_is_lost():
    """Of a hundredth of what lies between two numbers in bfloat16."""
    size, gap = 200_000, 2.0**-8
    for sign in (1, -1):
        w = torch.full((size,), sign * 0.75, dtype=torch.bfloat16)
        e = torch.full((size,), gap / 100)
        assert torch.equal((w.float() + e).bfloat16(), w)
        there = w.clone()
        displace_([there], [e], seed=1)
        moved = there.float() - w.float()
        assert set(moved.unique().tolist()) == {0.0, gap}
        assert abs(moved.mean() / e[0] - 1) < 5 / (size / 100) ** 0.5  # five standard errors
        again, other = w.clone(), w.clone()
        displace_([again], [e], seed=1)
        displace_([other], [e], seed=2)
        assert torch.equal(there, again)
        assert not torch.equal(there, other)


@each_base
def test_at_rho_0_it_is_torchs_optimiser_of_float32_weights(name):
    hand, model = ByHand(name, 0.0), network()
    opt = trained(OURS[name](model.parameters(), rho=0.0, delta=DELTA), model, range(8))
    for i in range(8):
        hand.step(i)
    assert all(map(torch.equal, masters(opt), hand.weights))
    assert all(map(torch.equal, model.parameters(), hand.model.parameters()))
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


@each_base
def test_the_step_is_algorithm_1(name):
    hand, model = ByHand(name, RHO, f_is_adams=name == "adamw"), network()
    start = [w.clone() for w in hand.weights]
    opt = trained(OURS[name](model.parameters(), **TRACER), model, range(8))
    for i in range(8):
        hand.step(i)
    moved = distance(hand.weights, start)
    assert distance(masters(opt), hand.weights) < 2e-3 * moved
    twin = network()
    plain = trained(OURS[name](twin.parameters(), rho=0.0, delta=DELTA), twin, range(8))
    assert distance(masters(plain), hand.weights) > 2e-2 * moved  # the penalty counts for more than that


@pytest.mark.parametrize("name", [*BASES, "sam", "central", "exact"])
def test_as_far_from_float32_as_bfloat16_computes(name):
    """Twenty steps, many of which are too small to move a weight that is rounded to the nearest each time."""
    makers = OURS | {
        "sam": lambda p, rho, delta: SAM(torch.optim.SGD(p, lr=1e-3), rho=0.05),
        "central": lambda p, **own: SGDTracer(p, lr=1e-3, engine=FiniteDifference(central=True), **own),
        "exact": lambda p, **own: SGDTracer(p, lr=1e-3, engine="exact", **own),
    }
    low, high = network(), network(torch.float32)
    start = [p.detach().clone() for p in high.parameters()]
    opts = [trained(makers[name](m.parameters(), **TRACER), m, range(20)) for m in (low, high)]
    moved = distance(list(high.parameters()), start)
    assert distance(masters(opts[0]), list(high.parameters())) < 0.1 * moved
    if name != "sam":
        assert opts[0].stats.penalty_ratio == pytest.approx(opts[1].stats.penalty_ratio, rel=0.2)
        assert opts[0].stats.trace_ratio == pytest.approx(opts[1].stats.trace_ratio, rel=0.05)


@each_base
@pytest.mark.parametrize("rho", [RHO, "auto"])
def test_saved_and_loaded_it_goes_on_to_the_same_bits(name, rho):
    model = network()
    opt = trained(OURS[name](model.parameters(), rho=rho, delta=DELTA), model, range(25))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    saved, fresh = torch.load(file), network()
    fresh.load_state_dict(saved["model"])
    other = OURS[name](fresh.parameters(), rho=rho, delta=DELTA)
    other.load_state_dict(saved["opt"])
    dtypes = {key: v.dtype for key, v in other.state[fresh[0].weight].items()}
    assert dtypes.pop(REST) == torch.int16
    assert set(dtypes.values()) == {torch.float32}
    assert all(p.dtype == torch.bfloat16 for p in fresh.parameters())
    for net, one in ((model, opt), (fresh, other)):
        trained(one, net, range(25, 32))
    assert all(map(torch.equal, everything(model, opt), everything(fresh, other)))


def test_copied_and_pickled_it_goes_on_to_the_same_bits():
    model = network()
    opt = trained(OURS["adamw"](model.parameters(), **TRACER), model, range(3))
    for twin, other in (copy.deepcopy((model, opt)), pickle.loads(pickle.dumps((model, opt)))):
        trained(other, twin, range(3, 6))
        ours = copy.deepcopy((model, opt))
        trained(ours[1], ours[0], range(3, 6))
        assert all(map(torch.equal, everything(*ours), everything(twin, other)))


@each_base
@pytest.mark.parametrize("where", ["first", "second", "update"])
def test_a_step_that_fails_leaves_all_as_it_was(name, where, monkeypatch):
    model = network()
    opt = trained(OURS[name](model.parameters(), **TRACER), model, range(3))
    before, calls = everything(model, opt), []

    def closure():
        calls.append(None)
        return loss_of(model, 3)() * (float("nan") if len(calls) == {"first": 1, "second": 2}.get(where) else 1)

    if where == "update":
        rule, error = type(opt.rule), RuntimeError
        monkeypatch.setattr(rule, "update", lambda self, step: (_ for _ in ()).throw(RuntimeError("update")))
    else:
        error = NonFiniteError
    with pytest.raises(error):
        opt.step(closure)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert all(map(torch.equal, before, everything(model, opt)))


@each_base
def test_in_a_loop_with_perturbed_it_makes_the_steps_of_a_closure(name):
    """And the total can be clipped in between, before it is rounded."""
    model, twin = network(), network()
    opt, other = OURS[name](model.parameters(), **TRACER, clip=Clip(norm=0.1)), OURS[name](twin.parameters(), **TRACER)
    for i in range(4):
        opt.step(loss_of(model, i))
        other.zero_grad(set_to_none=i % 2 == 0)
        loss_of(twin, i)().backward()
        with other.perturbed():
            loss_of(twin, i)().backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        other.step()
    assert distance(masters(opt), masters(other)) < 1e-6 * distance(masters(opt), list(network().parameters()))


@pytest.mark.parametrize("penalty", ["whole", "each"])
def test_micro_batches(penalty):
    low, high = network(), network(torch.float32)
    start, found = [p.detach().clone() for p in high.parameters()], []
    for model in (low, high):
        opt = OURS["sgd"](model.parameters(), **TRACER)
        for i in range(6):
            x, y = batch(i, next(model.parameters()).dtype)
            parts = list(zip(x.split(4), y.split(4), strict=True))
            opt.step(lambda x, y, m=model: cross_entropy(m(x).float(), y), batches=parts, penalty=penalty)
        found = masters(opt) if model is low else found
    expected = [p.detach() for p in high.parameters()]
    assert distance(found, expected) < 0.05 * distance(expected, start)


def test_a_gradient_scaler():
    model, twin = network(), network()
    scaler, opts = (
        torch.amp.GradScaler("cpu", init_scale=4.0),
        [OURS["sgd"](m.parameters(), **TRACER) for m in (model, twin)],
    )
    for i in range(3):
        opts[0].step(loss_of(model, i), scaler=scaler)
        scaler.update()
        opts[1].step(loss_of(twin, i))
    assert all(map(torch.equal, masters(opts[0]), masters(opts[1])))  # a power of two


def test_two_optimisers_one_of_them_of_float32_weights():
    def joint(dtype):
        model = network(dtype)
        model[2].float()
        body, head = OURS["sgd"](model[0].parameters(), **TRACER), OURS["adamw"](model[2].parameters(), **TRACER)
        for i in range(6):
            x, y = batch(i, dtype)
            joint_step([body, head], lambda x=x, y=y: cross_entropy(model[2](torch.tanh(model[0](x)).float()), y))
        found = masters(body) if dtype == torch.bfloat16 else list(model[0].parameters())
        return [w.detach() for w in found], [p.detach() for p in model[2].parameters()]

    (low, own), (high, expected), start = joint(torch.bfloat16), joint(torch.float32), network()
    assert distance(low, high) < 0.05 * distance(high, list(start[0].parameters()))
    assert distance(own, expected) < 0.05 * distance(expected, list(start[2].parameters()))


def test_random_numbers_are_left_as_with_float32():
    states = []
    for dtype in (torch.bfloat16, torch.float32):
        model = network(dtype)
        trained(OURS["sgd"](model.parameters(), **TRACER), model, range(2))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_whoever_writes_into_the_weights_moves_the_masters():
    model = network()
    opt = trained(OURS["sgd"](model.parameters(), **TRACER), model, range(3))
    with torch.no_grad():
        model[0].weight.fill_(0.5)
    trained(opt, model, range(3, 4))
    assert (masters(opt)[0] - 0.5).abs().max() < 0.02


def test_what_is_frozen_has_no_master():
    model = network()
    model[0].requires_grad_(False)
    before = [p.clone() for p in model[0].parameters()]
    opt = trained(OURS["adamw"](model.parameters(), **TRACER), model, range(3))
    assert set(opt.state) == set(model[2].parameters())
    assert all(map(torch.equal, before, model[0].parameters()))


@every_optimiser
def test_weights_made_bfloat16_afterwards(maker):
    """From there on the update is of masters that start from them."""
    model = nn.Linear(2, 2)
    opt = maker(model.parameters())
    opt.step(lambda: model(torch.ones(1, 2)).square().mean())
    model.bfloat16()
    opt.step(lambda: model(torch.ones(1, 2, dtype=torch.bfloat16)).float().square().mean())
    assert opt.state[model.weight][REST].any()


@pytest.mark.parametrize(
    ("own", "what"),
    [
        ({"implementation": "compiled"}, "'compiled' keeps no copy .* use 'auto'"),
        ({"scale_free": True}, "leave it out"),
        ({"curvature": "per example"}, "use engine='exact'"),
    ],
)
def test_what_is_refused_names_the_way_out(own, what):
    from gtracer.curvature import per_example

    own = {"curvature": per_example} if "curvature" in own else own
    with pytest.raises(ValueError, match=f"torch.bfloat16.*{what}.*keep the weights in float32"):
        SGDTracer(network().parameters(), rho=0.1, **own, model=None if "implementation" in own else network())


def test_a_state_that_was_made_in_bfloat16_is_widened():
    """By Adagrad before its first step; and that of a plain optimiser, whose average would stand still."""
    model = network()
    opt = trained(Tracer(torch.optim.Adagrad(model.parameters(), lr=1e-3), **TRACER), model, range(1))
    assert opt.state[model[0].weight]["sum"].dtype == torch.float32
    plain = torch.optim.AdamW(model.parameters())
    plain.zero_grad()
    loss_of(model, 1)().backward()
    plain.step()
    wrapped = trained(Tracer(plain, **TRACER), model, range(1, 2))
    loaded = OURS["adamw"](model.parameters(), **TRACER)
    loaded.load_state_dict(plain.state_dict())
    for opt in (wrapped, loaded):
        assert opt.state[model[0].weight]["exp_avg_sq"].dtype == torch.float32


def test_who_listens_to_gradients_goes_on_hearing_them():
    """As DistributedDataParallel does, also after an update and a checkpoint."""
    model, heard = network(), []
    p = model[0].weight
    listener = p.expand_as(p).grad_fn.next_functions[0][0]
    listener.register_prehook(lambda gradients: heard.append(gradients[0].dtype))
    opt = trained(OURS["sgd"](model.parameters(), **TRACER), model, range(2))
    opt.load_state_dict(opt.state_dict())
    trained(opt, model, range(2, 4))
    assert heard == [torch.bfloat16] * 8


def test_the_total_is_not_rounded_before_the_update():
    """A penalty of a thousandth of the gradient is less than half of what lies between two numbers in bfloat16."""
    model = network()
    opt = OURS["sgd"](model.parameters(), rho=1e-5, delta=DELTA)
    opt.step(loss_of(model, 0))
    alone = slopes(network(), 0)
    added = [p.grad - g for p, g in zip(model.parameters(), alone, strict=True)]
    assert 0 < opt.stats.penalty_ratio < 2e-3
    assert norm(added) / norm(alone) == pytest.approx(opt.stats.penalty_ratio, rel=1e-3)


def test_it_cannot_be_captured():
    opt = trained(OURS["sgd"]((model := network()).parameters(), **TRACER, nonfinite="ignore"), model, range(1))
    with pytest.raises(RuntimeError, match="weights in bfloat16 .* keep them in float32"):
        check_capture(opt)
