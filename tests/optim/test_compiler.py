"""`implementation="compiled"` keeps no copy of the weights: the same steps, with nothing compiled here."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer import AdamWTracer, FiniteDifference, SGDTracer, Tracer, curvature
from gtracer.experimental import PreviousStep
from gtracer.lab.benchmarks.measurement import peak
from gtracer.scopes import moved
from support.problems import relative_error

MAKERS = {
    "sgd": lambda p, **k: SGDTracer(p, lr=0.1, momentum=0.9, rho=0.02, delta=0.05, **k),
    "adamw": lambda p, **k: AdamWTracer(p, lr=0.01, rho=0.02, delta=0.05, capturable=True, **k),
    "rmsprop": lambda p, **k: Tracer(torch.optim.RMSprop(p, lr=0.01), rho=0.02, delta=0.05, **k),
}
LEAN = {"implementation": "compiled"}
every_optimiser = pytest.mark.parametrize("name", MAKERS)


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    monkeypatch.setattr("gtracer.optim.compiler.compiled", lambda function: function)


def with_closure(opt, loss_of):
    opt.step(loss_of)


def with_perturbed(opt, loss_of):
    opt.zero_grad()
    loss_of().backward()
    with opt.perturbed():
        loss_of().backward()
    opt.step()


def trained(name, style=with_closure, dtype=torch.float64, steps=8, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.SiLU(), nn.Flatten(), nn.Linear(16, 3))
    model = model.to(dtype)
    x, y = torch.randn(steps, 8, 2, 4, 4, dtype=dtype), torch.randint(3, (steps, 8))
    opt = MAKERS[name](model.parameters(), model=model, **options)
    for i in range(steps):
        style(opt, lambda i=i: cross_entropy(model(x[i]), y[i]))
    return [*model.state_dict().values()], opt


@every_optimiser
@pytest.mark.parametrize("style", [with_closure, with_perturbed])
@pytest.mark.parametrize("options", [{}, {"scale_free": True}, {"interval": 3}, {"f0": 1.0}], ids=str)
def test_the_same_trajectory_to_rounding(name, style, options):
    lean, _ = trained(name, style, **LEAN, **options)
    kept, _ = trained(name, style, **options)
    assert relative_error(lean, kept) < 1e-12
    assert not all(torch.equal(a, b) for a, b in zip(lean, kept, strict=True))  # so it is another way


@every_optimiser
def test_rounding_does_not_grow(name):
    lean, _ = trained(name, dtype=torch.float32, steps=100, **LEAN)
    kept, _ = trained(name, dtype=torch.float32, steps=100)
    reference, _ = trained(name, steps=100)
    assert relative_error(lean, reference) < 3 * relative_error(kept, reference) + 1e-5


@every_optimiser
def test_a_second_pass_that_fails_leaves_the_weights_within_a_rounding(name):
    model = nn.Linear(50, 20)
    opt = MAKERS[name](model.parameters(), **LEAN)
    x, calls = torch.randn(30, 50), []

    def closure():
        calls.append(1)
        if len(calls) == 4:
            raise ValueError("in the second pass")
        return model(x).square().mean()

    opt.step(closure)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="in the second pass"):
        opt.step(closure)
    for p, old in zip(model.parameters(), before, strict=True):
        assert ((p - old).abs() <= 2**-23 * old.abs().clamp_min(0.05)).all()  # 0.05: no coordinate moved further
    opt.step(closure)


@pytest.mark.parametrize(("nonfinite", "passes_seen"), [("skip", 0), ("raise", 0), ("ignore", 1)])
def test_statistics_after_a_second_pass_that_fails(nonfinite, passes_seen):
    norm = nn.BatchNorm1d(3)
    opt = SGDTracer(norm.parameters(), lr=0.1, rho=0.003, **LEAN, model=norm, nonfinite=nonfinite)
    calls = []

    def closure():
        calls.append(1)
        loss = norm(torch.randn(8, 3)).square().mean()
        if len(calls) == 2:
            raise ValueError("in the second pass")
        return loss

    with pytest.raises(ValueError, match="in the second pass"):
        opt.step(closure)
    assert norm.num_batches_tracked == passes_seen


def test_an_overflow_leaves_no_statistics_in_a_lean_step():
    norm = nn.BatchNorm1d(3)
    opt = SGDTracer(norm.parameters(), lr=0.1, rho=0.003, **LEAN, model=norm, nonfinite="skip")
    opt.step(lambda: norm(torch.full((8, 3), torch.inf)).square().mean())
    assert torch.equal(norm.running_mean, torch.zeros(3))


@pytest.mark.parametrize(
    ("make", "plain", "copies"),
    [
        (lambda p: SGDTracer(p, momentum=0.9, rho=0.003, **LEAN), lambda p: torch.optim.SGD(p, momentum=0.9), 2),
        (lambda p: SGDTracer(p, momentum=0.9, rho=0.003), lambda p: torch.optim.SGD(p, momentum=0.9), 4),
        (lambda p: AdamWTracer(p, rho=0.003, **LEAN), torch.optim.AdamW, 1),
    ],
    ids=["sgd, lean", "sgd", "adamw, lean"],
)
def test_copies_of_the_weights(make, plain, copies):
    """At the peak, which is where the activations are: f and the first gradient; for Adam, whose f is its own, one."""
    width, x = 256, torch.randn(4096, 256)

    def highest(maker, step):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        opt = maker(model.parameters())
        return peak(lambda: step(opt, lambda: model(x).square().mean()), torch.device("cpu"), first=2)

    def once(opt, loss_of):
        opt.zero_grad()
        loss_of().backward()
        opt.step()

    weights = 4 * 2 * width * (width + 1)
    assert (highest(make, with_closure) - highest(plain, once)) / weights == pytest.approx(copies, abs=0.1)


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "exact"},
        {"engine": FiniteDifference(central=True)},
        {"reuse": PreviousStep()},
        {"curvature": curvature.micro_batch(2)},
    ],
    ids=["exact", "central", "previous", "micro-batches"],
)
def test_where_nothing_can_be_computed_again_the_weights_are_copied(options):
    """Bit for bit the steps of the other implementation."""
    torch.manual_seed(0)
    start, x = torch.randn(4, 3).double(), torch.randn(6, 4).double()
    found = []
    for own in ({}, LEAN):
        w = nn.Parameter(start.clone())
        opt = SGDTracer([w], lr=0.1, rho=0.02, **options, **own)
        for _ in range(3):
            opt.step(lambda x, w=w: (x @ w).tanh().square().mean(), x)
        found.append(w.detach())
    assert torch.equal(*found)


def test_weights_come_back_after_an_error_in_the_scope():
    w, inside = torch.tensor([1.0, -2.0]), []

    def interrupted():
        with moved([w], [torch.ones(2)], lambda: [torch.ones(2)]):
            inside.append(w.clone())
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert torch.equal(inside[0], torch.tensor([2.0, -1.0]))
    assert torch.equal(w, torch.tensor([1.0, -2.0]))
