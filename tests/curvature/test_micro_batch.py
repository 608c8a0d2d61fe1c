"""F from micro-batches, in the optimiser: against its own penalty, one by one, and in mid-step."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer import FiniteDifference, SGDTracer, TracerPenalty
from gtracer import curvature as c
from support.networks import make, mlp
from support.problems import relative_error


@pytest.mark.parametrize("engine", ["exact", FiniteDifference(1e-4, central=True)])
@pytest.mark.parametrize("m", [1, 2, 5])
def test_micro_batch_optimiser_follows_its_penalty(m, engine):
    """Against the exact penalty on the examples' losses, which shares none of the passes in parts."""
    mine, other = make(mlp), make(mlp)
    options = {"rho": 0.01, "delta": 0.1, "beta": 0.3, "f0": 0.2}
    opt = SGDTracer(mine.params, lr=0.05, **options, curvature=c.micro_batch(m), engine=engine)
    penalty = TracerPenalty(other.params, **options, curvature=c.micro_batch(m))
    sgd = torch.optim.SGD(other.params, lr=0.05)
    for _ in range(4):
        loss = opt.step(mine.loss_of, mine.x, mine.y)
        sgd.zero_grad()
        losses = cross_entropy(other.model(other.x), other.y, reduction="none")
        penalty(losses).backward()
        sgd.step()
        assert loss.item() == pytest.approx(losses.mean().item(), rel=1e-7)
        assert opt.stats.trace_ratio == pytest.approx(penalty.trace_ratio.item(), rel=1e-6)
    assert relative_error(mine.params, other.params) < (1e-10 if engine == "exact" else 1e-7)
    assert relative_error([opt.state[p]["f"] for p in mine.params], [penalty.state[p] for p in other.params]) < 1e-6


def test_a_micro_batch_as_large_as_the_batch_is_the_default():
    """Both terms, and both engines' defaults: bit for bit."""
    results = []
    for curvature in (c.gradient_magnitude, c.micro_batch(100)):
        made = make(mlp)
        opt = SGDTracer(made.params, lr=0.05, rho=0.01, curvature=curvature)
        for _ in range(3):
            opt.step(made.loss_of, made.x, made.y)
        results.append(made.params)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_micro_batches_for_the_average_alone():
    """The penalty is the whole batch's, f follows the parts; per example they are the empirical Fisher's."""
    results = []
    for average in (c.micro_batch(1), c.per_example):
        made = make(mlp)
        opt = SGDTracer(made.params, lr=0.05, rho=0.01, average=average, f0=0.1, model=made.model)
        for _ in range(3):
            opt.step(made.loss_of, made.x, made.y)
        results.append([*made.params, *(opt.state[p]["f"] for p in made.params)])
    assert relative_error(*results) < 1e-9


def test_micro_batches_for_the_numerator_alone():
    made, plain = make(mlp), make(mlp)
    opt = SGDTracer(made.params, lr=0.05, rho=0.01, curvature=c.micro_batch(2), average=c.gradient_magnitude, f0=0.1)
    opt.step(made.loss_of, made.x, made.y)
    g = torch.autograd.grad(plain.loss_of(), plain.params)
    assert relative_error([opt.state[p]["f"] for p in made.params], [0.09 + 0.1 * x**2 for x in g]) < 1e-12


def test_micro_batches_take_batches_of_any_shape():
    """Dictionaries and lists are split, what is no tensor goes to every part."""
    made = make(mlp)
    seen = []

    def closure(batch, reduction):
        seen.append((len(batch["x"]), len(batch["more"][0]), reduction))
        return cross_entropy(made.model(batch["x"]), batch["more"][0], reduction=reduction)

    opt = SGDTracer(made.params, lr=0.05, rho=0.01, curvature=c.micro_batch(2), f0=0.1)
    opt.step(closure, {"x": made.x, "more": [made.y]}, "mean")
    assert seen == [(2, 2, "mean")] * 4 + [(1, 1, "mean")] * 2


def test_batch_norm_statistics_move_once():
    """From the same start by the mean of the micro-batches' moves; the running mean is that of one pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    plain = copy.deepcopy(model)
    x, y = torch.randn(8, 4).double() + 2, torch.randint(3, (8,))
    opt = SGDTracer(model.parameters(), lr=0.05, rho=0.01, curvature=c.micro_batch(2), model=model)
    opt.step(lambda x, y: cross_entropy(model(x), y), x, y)
    plain(x)
    assert torch.allclose(model[0].running_mean, plain[0].running_mean, rtol=1e-12)
    variance = torch.stack([part.var(0) for part in x.split(2)]).mean(0)
    assert torch.allclose(model[0].running_var, 0.9 + 0.1 * variance, rtol=1e-12)
    assert model[0].num_batches_tracked == 1


def test_dropout_masks_agree_between_a_micro_batchs_passes():
    """A linear net with dropout: other masks in the second pass would give another Hessian."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    start = copy.deepcopy(model.state_dict())
    x, y = torch.randn(6, 4).double(), torch.randint(3, (6,))
    results = []
    for engine in ("exact", FiniteDifference(1e-5, central=True)):
        model.load_state_dict(start)
        opt = SGDTracer(model.parameters(), lr=0.1, rho=0.05, curvature=c.micro_batch(2), engine=engine)
        torch.manual_seed(9)
        opt.step(lambda x, y: cross_entropy(model(x), y), x, y)
        results.append([p.detach().clone() for p in model.parameters()])
    assert relative_error(*results) < 1e-7


def test_an_error_in_a_later_micro_batch_leaves_nothing_behind():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    opt = SGDTracer(model.parameters(), lr=0.05, rho=0.01, curvature=c.micro_batch(2), model=model)
    before = copy.deepcopy(model.state_dict())

    def closure(x, y):
        if x[0, 0] > 1:
            raise ZeroDivisionError
        return cross_entropy(model(x), y)

    x = torch.zeros(6, 4)
    x[4] = 2
    with pytest.raises(ZeroDivisionError):
        opt.step(closure, x, torch.zeros(6, dtype=torch.long))
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert not opt.state


def test_micro_batch_needs_the_batch():
    made = make(mlp)
    opt = SGDTracer(made.params, lr=0.1, curvature=c.micro_batch(2))
    with pytest.raises(RuntimeError, match=r"opt\.step\(closure, x, y\)"):
        opt.step(made.loss_of)
    with pytest.raises(RuntimeError, match=r"lengths \[4, 5\]"):
        opt.step(made.loss_of, made.x, made.y[:4])
    with pytest.raises(RuntimeError, match="perturbed"):
        opt.perturbed()
    penalty = TracerPenalty(made.params, curvature=c.micro_batch(2))
    with pytest.raises(RuntimeError, match="vector of the examples' losses"):
        penalty(made.loss_of())
