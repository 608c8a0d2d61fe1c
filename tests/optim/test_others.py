"""Parameters that another optimiser owns are left the gradient of one pass: that of the loss at the step's weights."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer import SAM, AdamWTracer, FiniteDifference, SGDTracer, Tracer
from gtracer.curvature import micro_batch, per_example

MAKERS = {
    "sgd": lambda p, **k: SGDTracer(p, lr=0.1, rho=0.3, **k),
    "central": lambda p, **k: SGDTracer(p, lr=0.1, rho=0.3, engine=FiniteDifference(central=True), **k),
    "compiled": lambda p, **k: SGDTracer(p, lr=0.1, rho=0.3, engine="exact", **k),
    "adamw": lambda p, **k: AdamWTracer(p, lr=0.01, rho=0.3, **k),
    "rmsprop": lambda p, **k: Tracer(torch.optim.RMSprop(p, lr=0.01), rho=0.3, **k),
    "sam": lambda p, **k: SAM(torch.optim.SGD(p, lr=0.1), rho=0.3, **k),
    "not due": lambda p, **k: SGDTracer(p, lr=0.1, rho=0.0, **k),
}
PASSES = {name: make for name, make in MAKERS.items() if name != "compiled"}
MAKERS["exact"] = MAKERS.pop("compiled")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.body(x))


class Setting:
    """A body and a head of its own optimiser, and the head's gradients written down by hand."""

    def __init__(self, apart=False, before=0.0):
        torch.manual_seed(0)
        self.net = Net().double()
        if before:
            for p in self.net.head.parameters():
                p.grad = torch.full_like(p, before)
        self.x, self.y = torch.randn(12, 4).double(), torch.randint(3, (12,))
        self.model = self.net.body if apart else self.net

    def loss(self, x=None, y=None):
        return cross_entropy(self.net(self.x if x is None else x), self.y if y is None else y)

    def expected(self, **batch):
        state = torch.get_rng_state()
        found = torch.autograd.grad(self.loss(**batch), list(self.net.head.parameters()))
        torch.set_rng_state(state)
        return list(found)

    @property
    def head(self):
        return [p.grad for p in self.net.head.parameters()]


models = pytest.mark.parametrize("given", ["model", "body alone", "none"])


def options(setting, given):
    return {"model": {"model": setting.net, "body alone": setting.net.body, "none": None}[given]}


@models
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("before", [0.0, 2.0])
def test_by_a_closure_that_returns_the_loss(make, given, before):
    """What was there before is added to, as torch does."""
    setting = Setting(before=before)
    opt, expected = make(setting.net.body.parameters(), **options(setting, given)), setting.expected()
    opt.step(setting.loss)
    torch.testing.assert_close(setting.head, [g + before for g in expected])


@models
@pytest.mark.parametrize("make", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("zeroes", ["the optimiser", "the model"])
def test_by_a_closure_that_calls_backward(make, given, zeroes):
    setting = Setting(before=0.0 if zeroes == "the optimiser" else 2.0)
    opt, expected = make(setting.net.body.parameters(), **options(setting, given)), setting.expected()

    def closure():
        (opt if zeroes == "the optimiser" else setting.net).zero_grad()
        loss = setting.loss()
        loss.backward()
        return loss

    opt.step(closure)
    assert all(map(torch.equal, setting.head, expected))


@pytest.mark.parametrize("given", ["model", "loss", "none"])
@pytest.mark.parametrize("make", PASSES.values(), ids=PASSES)
def test_by_perturbed(make, given):
    """Three steps, with the head trained by SGD."""
    setting = Setting()
    own = {"model": setting.net} if given == "model" else {}
    opt, other = make(setting.net.body.parameters(), **own), torch.optim.SGD(setting.net.head.parameters(), lr=0.5)
    for _ in range(3):
        opt.zero_grad()
        other.zero_grad()
        expected = setting.expected()
        loss = setting.loss()
        loss.backward()
        for _ in range(1 + opt.is_central):
            with opt.perturbed(**({"loss": loss} if given == "loss" else {})):
                setting.loss().backward()
        assert all(map(torch.equal, setting.head, expected))
        opt.step()
        other.step()


def test_a_compiled_model_without_a_word_of_it():
    setting = Setting()
    opt, called = SGDTracer(setting.net.body.parameters(), lr=0.1, rho=0.3), torch.compile(setting.net, backend="eager")
    setting.net.eval()
    expected = setting.expected()
    for _ in range(2):
        setting.net.zero_grad()
        expected = setting.expected()
        cross_entropy(called(setting.x), setting.y).backward()
        with opt.perturbed():
            cross_entropy(called(setting.x), setting.y).backward()
        torch.testing.assert_close(setting.head, expected)
        opt.step()


@pytest.mark.parametrize(
    ("given", "backward", "before"),
    [("model", False, 2.0), ("model", True, 2.0), ("body alone", True, 0.0), ("none", False, 2.0), ("none", True, 0.0)],
)
@pytest.mark.parametrize("penalty", ["whole", "each"])
@pytest.mark.parametrize("name", ["sgd", "central", "sam", "not due"])
def test_of_micro_batches(name, penalty, backward, before, given):
    """Of 3 and 9 examples: that of the whole batch."""
    setting = Setting(before=before)
    setting.net.eval()
    opt, expected = MAKERS[name](setting.net.body.parameters(), **options(setting, given)), setting.expected()

    def closure(x, y):
        loss = setting.loss(x, y)
        if backward:
            opt.zero_grad()
            loss.backward()
        return loss

    parts = [(setting.x[:3], setting.y[:3]), (setting.x[3:], setting.y[3:])]
    opt.step(closure, batches=parts, penalty=penalty)
    torch.testing.assert_close(setting.head, [g + before for g in expected])


@pytest.mark.parametrize(
    ("curvature", "given"), [(micro_batch(4), "model"), (micro_batch(4), "none"), (per_example, "model")]
)
@pytest.mark.parametrize("rho", [0.3, 0.0], ids=["due", "not due"])
def test_with_another_curvature(curvature, given, rho):
    setting = Setting()
    setting.net.eval()
    opt = SGDTracer(setting.net.body.parameters(), rho=rho, curvature=curvature, **options(setting, given))
    expected = setting.expected()
    opt.step(setting.loss, *(() if curvature is per_example else (setting.x, setting.y)))
    torch.testing.assert_close(setting.head, expected)


@pytest.mark.parametrize("loop", [False, True])
def test_scaled_for_the_others_scaler(loop):
    """Ours are unscaled by ourselves, theirs wait for `scaler.step(other)`."""
    setting = Setting()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    opt = SGDTracer(setting.net.body.parameters(), rho=0.3, model=setting.net)
    other = torch.optim.SGD(setting.net.head.parameters(), lr=1.0)
    expected, start = setting.expected(), setting.net.head.weight.detach().clone()
    if loop:
        opt.zero_grad()
        scaler.scale(setting.loss()).backward()
        with opt.perturbed(scaler=scaler):
            scaler.scale(setting.loss()).backward()
        scaler.step(opt)
    else:
        opt.step(setting.loss, scaler=scaler)
    scaler.step(other)
    scaler.update()
    torch.testing.assert_close(setting.net.head.weight.detach(), start - expected[0])


def test_a_leaf_of_nobody_and_an_input():
    """Not only parameters of modules: whatever autograd leaves a gradient with."""
    setting = Setting()
    setting.net.eval()
    scale, x = torch.ones((), dtype=torch.float64, requires_grad=True), setting.x.clone().requires_grad_()
    opt = SGDTracer(setting.net.parameters(), rho=0.3, model=setting.net)

    def loss():
        return scale * setting.loss(x=x)

    expected = torch.autograd.grad(loss(), [scale, x])
    for _ in range(2):
        scale.grad = x.grad = None
        expected = torch.autograd.grad(loss(), [scale, x])
        opt.step(loss)
        assert torch.equal(scale.grad, expected[0])
        assert torch.equal(x.grad, expected[1])


def test_a_head_that_is_unfrozen_later():
    setting = Setting()
    setting.net.head.requires_grad_(False)
    opt = SGDTracer(setting.net.body.parameters(), rho=0.3)
    opt.step(setting.loss)
    assert setting.head == [None, None]
    setting.net.head.requires_grad_(True)
    expected = setting.expected()
    opt.step(setting.loss)
    assert all(map(torch.equal, setting.head, expected))


@pytest.mark.parametrize("fails_in", [1, 2])
def test_a_step_that_fails_leaves_none(fails_in):
    setting, calls = Setting(), []
    opt = SGDTracer(setting.net.body.parameters(), rho=0.3, model=setting.net)

    def closure():
        calls.append(0)
        loss = setting.loss()
        loss.backward()
        if len(calls) == fails_in:
            raise KeyError
        return loss

    with pytest.raises(KeyError):
        opt.step(closure)
    assert setting.head == [None, None]


def test_the_body_trains_as_by_itself():
    """The other's gradients have no part in it: the step is that of a head whose weights are frozen."""
    one, two = Setting(), Setting()
    two.net.load_state_dict(copy.deepcopy(one.net.state_dict()))
    two.net.head.requires_grad_(False)
    for setting in (one, two):
        opt = SGDTracer(setting.net.body.parameters(), rho=0.3, model=setting.net)
        torch.manual_seed(3)
        for _ in range(3):
            opt.step(setting.loss)
    assert torch.equal(one.net.body[0].weight, two.net.body[0].weight)


@pytest.mark.parametrize("given", ["model", "none"])
@pytest.mark.parametrize("way", ["closure", "parts", "scope"])
def test_sparse_gradients(way, given):
    """Of an embedding that SparseAdam trains."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    x, y = torch.randint(9, (12, 2)), torch.randint(3, (12,))
    opt = SGDTracer(net[2].parameters(), lr=0.1, rho=0.3, **({"model": net} if given == "model" else {}))
    other = torch.optim.SparseAdam(net[0].parameters(), lr=0.1)
    for _ in range(2):
        net.zero_grad()
        (expected,) = torch.autograd.grad(cross_entropy(net(x), y), net[0].weight)
        if way == "scope":
            opt.zero_grad()
            cross_entropy(net(x), y).backward()
            with opt.perturbed():
                cross_entropy(net(x), y).backward()
            opt.step()
        elif way == "parts":
            opt.step(lambda x, y: cross_entropy(net(x), y), batches=[(x[:3], y[:3]), (x[3:], y[3:])])
        else:
            opt.step(lambda: cross_entropy(net(x), y))
        torch.testing.assert_close(net[0].weight.grad.to_dense(), expected.to_dense())
        other.step()
