"""The optimisers with an estimator of one's choice, for numerator and average."""

import pickle

import pytest
import torch
from torch import nn

from gtracer import AdamTracer, AdamWTracer, FiniteDifference, SGDTracer, Tracer, TracerPenalty
from gtracer import curvature as c
from gtracer.experimental import vectorised_micro_batch
from support.estimates import example_squares
from support.networks import make, mlp
from support.problems import relative_error


def twin_step(made, numerator, average, *, lr, rho, delta, beta, f):
    """w ← w − lr ∇[L + ρ⟨F, 1/(f + δ)⟩] and f ← (1 − β)f + β|F'|, straight from the estimators."""
    torch.manual_seed(5)
    with c.Recording(made.model) as recording:
        loss = made.loss_of()
    at = c.Evaluation(loss, made.params, recording, differentiable=True)
    F = numerator(at)
    measured = [x.detach().abs() for x in (F if average == numerator else average(at))]
    f = [x.clone() for x in measured] if f is None else f
    T = sum((x / (y + delta)).sum() for x, y in zip(F, f, strict=True))
    total = torch.autograd.grad(loss + rho * T, made.params)
    with torch.no_grad():
        for p, g in zip(made.params, total, strict=True):
            p -= lr * g
    return [(1 - beta) * y + beta * x for x, y in zip(measured, f, strict=True)]


PAIRS = [
    (c.per_example, c.per_example),
    (c.per_example, c.gradient_magnitude),
    (c.gradient_magnitude, c.per_example),
    (c.gauss_newton(), c.gauss_newton()),
    (c.gradient_magnitude, c.gauss_newton()),
    (c.hutchinson(), c.gradient_magnitude),
    (c.hutchinson(), c.hutchinson()),
    (c.gradient_magnitude, c.hutchinson()),
    (c.monte_carlo_fisher(), c.monte_carlo_fisher()),
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " ".join(getattr(x, "__name__", repr(x))[:14] for x in pair))
def test_optimiser_follows_the_twin(pair):
    """Numerator and average each by its own estimator, step by step."""
    numerator, average = pair
    options = {"lr": 0.05, "rho": 0.01, "delta": 0.1, "beta": 0.3}
    mine, other = make(mlp), make(mlp)
    opt = SGDTracer(mine.params, **options, curvature=numerator, average=average, engine="exact", model=mine.model)
    f = None
    for _ in range(4):
        torch.manual_seed(5)
        opt.step(mine.loss_of)
        f = twin_step(other, numerator, average, **options, f=f)
        assert relative_error(mine.params, other.params) < 1e-10
    assert relative_error([opt.state[p]["f"] for p in mine.params], f) < 1e-9


@pytest.mark.parametrize(
    "average", [c.per_example, c.gauss_newton(), c.hutchinson()], ids=lambda e: repr(e).partition("(")[0]
)
def test_average_works_with_the_finite_difference(average):
    """Against the exact engine: the numerator differs by the difference's error, f not at all at first."""
    results = []
    for engine in (FiniteDifference(1e-5, central=True), "exact"):
        made = make(mlp)
        options = {"average": average, "engine": engine, "model": made.model}
        opt = SGDTracer(made.params, lr=0.05, rho=0.01, **options)
        for _ in range(3):
            torch.manual_seed(5)
            opt.step(made.loss_of)
        results.append(made.params)
    assert relative_error(*results) < 1e-6


@pytest.mark.parametrize("kind", [AdamTracer, AdamWTracer])
def test_adams_second_moment_is_fed_by_the_average(kind):
    made, plain = make(mlp), make(mlp)
    opt = kind(made.params, lr=0.01, rho=0.01, curvature=c.per_example, model=made.model)
    opt.step(made.loss_of)
    for p, F in zip(made.params, example_squares(plain), strict=True):
        assert torch.allclose(opt.state[p]["exp_avg_sq"], 0.001 * F, rtol=1e-9)
    # f is that moment, with its start at zero divided out.
    found = opt.average_of(opt.param_groups[0], made.params)
    assert relative_error(found, example_squares(plain)) < 1e-9


def test_any_torch_optimiser_takes_an_estimator():
    made, other = make(mlp), make(mlp)
    base = torch.optim.RMSprop(made.params, lr=0.01)
    opt = Tracer(base, rho=0.01, curvature=c.per_example, engine="exact", model=made.model)
    penalty = TracerPenalty(other.params, rho=0.01, curvature=c.per_example, model=other.model)
    plain = torch.optim.RMSprop(other.params, lr=0.01)
    for _ in range(3):
        opt.step(made.loss_of)
        plain.zero_grad()
        penalty(other.loss_of()).backward()
        plain.step()
    assert relative_error(made.params, other.params) < 1e-10


def test_an_estimator_of_ones_own():
    """Any function of an evaluation will do: here the weights' size, whose penalty is a ridge."""

    def ridge(at):
        return [p**2 for p in at.params]

    made, other = make(mlp), make(mlp)
    opt = SGDTracer(made.params, lr=0.1, rho=0.5, delta=1.0, f0=0.0, curvature=ridge)
    opt.step(made.loss_of)
    plain = torch.optim.SGD(other.params, lr=0.1, weight_decay=1.0)  # ρ∇(w²/δ) = 2ρ w
    other.loss_of().backward()
    plain.step()
    assert relative_error(made.params, other.params) < 1e-12


def test_at_rho_zero_the_estimator_changes_nothing():
    made, other = make(mlp), make(mlp)
    opt = SGDTracer(made.params, lr=0.1, momentum=0.9, rho=0.0, curvature=c.per_example, model=made.model)
    plain = torch.optim.SGD(other.params, lr=0.1, momentum=0.9)
    for _ in range(3):
        opt.step(made.loss_of)
        plain.zero_grad()
        other.loss_of().backward()
        plain.step()
    assert all(torch.equal(a, b) for a, b in zip(made.params, other.params, strict=True))
    assert "f" in opt.state[made.params[0]]


@pytest.mark.parametrize(
    "estimator",
    [c.per_example, c.micro_batch(3), c.gauss_newton(), c.hutchinson()],
    ids=lambda e: repr(e).partition("(")[0],
)
def test_an_optimiser_with_an_estimator_can_be_pickled(estimator):
    made = make(mlp)
    opt = SGDTracer(made.params, lr=0.1, curvature=estimator, model=made.model)
    assert pickle.loads(pickle.dumps(opt)).method == opt.method


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"curvature": c.hutchinson}, r"hutchinson is to be called first: curvature=hutchinson\(\.\.\.\)"),
        ({"curvature": "per_example"}, "curvature must be an estimator"),
        ({"average": 3}, "average must be an estimator"),
        ({"curvature": c.per_example}, "pass model="),
        ({"curvature": c.micro_batch(2), "average": c.micro_batch(3)}, "choose one size"),
        ({"curvature": vectorised_micro_batch(2)}, "needs model="),
        ({"curvature": c.hutchinson(), "engine": "finite-difference"}, "leave engine out"),
        ({"average": c.micro_batch(3), "engine": "exact"}, "takes it in parts"),
    ],
)
def test_choices_that_cannot_be(options, match):
    with pytest.raises(ValueError, match=match):
        SGDTracer([nn.Parameter(torch.ones(2))], lr=0.1, **options)


@pytest.mark.parametrize("rho", [0.0, 0.01])
@pytest.mark.parametrize(
    "options",
    [
        {"average": c.per_example},
        {"curvature": c.micro_batch(2), "average": c.gradient_magnitude},
        {"average": c.micro_batch(2)},
    ],
    ids=["average", "numerator", "micro-batches"],
)
def test_loops_without_closure_are_refused(options, rho):
    """Also at ρ = 0, where no second pass is due: f would follow something else."""
    made = make(mlp)
    opt = SGDTracer(made.params, lr=0.1, rho=rho, model=made.model, **options)
    made.loss_of().backward()
    with pytest.raises(RuntimeError, match="curvature"):
        opt.perturbed()
    with pytest.raises(RuntimeError, match="without a closure"):
        opt.step()


def test_a_linear_loss_has_no_curvature():
    w = nn.Parameter(torch.randn(3))
    opt = SGDTracer([w], lr=0.1, curvature=c.hutchinson())
    opt.step(lambda: w.sum())
    assert torch.equal(opt.state[w]["f"], torch.zeros(3))
