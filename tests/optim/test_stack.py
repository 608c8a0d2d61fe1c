"""Micro-batches that are vectorised: the numbers of one after the other."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer import FiniteDifference, SGDTracer
from gtracer import curvature as c
from gtracer.experimental import vectorised_micro_batch
from support.networks import make, mlp
from support.problems import relative_error


@pytest.mark.parametrize("central", [False, True])
def test_vectorised_micro_batches_are_the_same(central):
    """Batch norm, dropout and a penalty for each group; over several steps, statistics included."""

    def run(vectorised):
        torch.manual_seed(0)
        layers = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
        model = nn.Sequential(*layers).double()
        x, y = torch.randn(12, 4).double(), torch.randint(3, (12,))
        groups = [{"params": model[0].parameters()}, {"params": [*model[1:].parameters()], "rho": 0.03, "delta": 0.2}]
        curvature = (vectorised_micro_batch if vectorised else c.micro_batch)(4)
        engine = FiniteDifference(central=central)
        opt = SGDTracer(groups, lr=0.1, rho=0.01, f0=0.1, curvature=curvature, model=model, engine=engine)
        losses = [opt.step(lambda x, y: cross_entropy(model(x), y), x, y).item() for _ in range(3)]
        return [*model.state_dict().values(), torch.tensor([*losses, opt.stats.trace_ratio]).double()]

    assert relative_error(run(True), run(False)) < 1e-9


def test_vectorised_micro_batches_replay_their_dropout():
    """Against the exact engine, which makes one pass: other masks in the second would show."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    x, y = torch.randn(8, 4).double(), torch.randint(3, (8,))
    curvature = vectorised_micro_batch(2)
    sizes = []
    for radius in (1e-4, 1e-5):
        opt = SGDTracer(
            model.parameters(), lr=0.0, rho=0.05, curvature=curvature, model=model, engine=FiniteDifference(radius)
        )
        torch.manual_seed(3)
        opt.step(lambda x, y: cross_entropy(model(x), y), x, y)
        sizes.append(opt.stats.penalty_ratio)
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-2)


def test_vectorised_micro_batches_that_do_not_divide_the_batch():
    results = []
    for vectorised in (True, False):
        made = make(mlp)
        curvature = (vectorised_micro_batch if vectorised else c.micro_batch)(2)
        opt = SGDTracer(made.params, lr=0.05, rho=0.01, curvature=curvature, model=made.model)
        opt.step(made.loss_of, made.x, made.y)
        results.append(made.params)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_vectorised_micro_batches_of_any_number():
    """49 times 1/49 is not 1: all 49 are to be taken at once, in one call of the closure for each pass."""
    model, calls = nn.Linear(2, 2), []

    def closure(x):
        calls.append(x.shape)
        return model(x).square().mean()

    opt = SGDTracer(model.parameters(), lr=0.1, rho=0.003, curvature=vectorised_micro_batch(1), model=model)
    opt.step(closure, torch.randn(49, 2))
    assert len(calls) == 2


def test_stacked_weights_must_be_the_models():
    model, extra = nn.Linear(4, 3), nn.Parameter(torch.ones(3))
    opt = SGDTracer([*model.parameters(), extra], lr=0.1, curvature=vectorised_micro_batch(2), model=model)
    with pytest.raises(ValueError, match=r"shape \(3,\) is not in model="):
        opt.step(lambda x: (model(x) * extra).square().mean(), torch.randn(4, 4))
