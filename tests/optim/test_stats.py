"""What the user sees after a step, against values computed by hand."""

import math

import pytest
import torch

from gtracer import SAM, AdamTracer, SGDTracer
from gtracer.optim.stats import Stats
from support.optimizers import every_optimiser
from support.problems import Problem, Vector, make, spd, tanh_mlp
from support.twin import penalised_gradient

A = spd(3)


def quadratic():
    model = Vector([1.0, -2.0, 0.5]).double()
    return Problem(model, lambda i: model.w @ A @ model.w / 2)


@pytest.mark.parametrize("loss", [None, 1.5])
@pytest.mark.parametrize("squared", [False, True])
def test_numbers_are_the_same_from_norms_and_from_their_squares(squared, loss):
    """∇L = (3, 4) and ρ∇T = (−6, 8), on the device and as read."""
    g, h = torch.tensor([3.0, 4.0]), torch.tensor([-6.0, 8.0])
    told = None if loss is None else torch.tensor(loss)
    if squared:
        rest = torch.stack([h.square().sum(), (g + h).square().sum()])
        stats = Stats.of_squares(told, torch.tensor([7.0, 0.25, 25.0]), rest)
    else:
        stats = Stats(told, torch.tensor(0.25), g.norm(), h.norm(), (g + h).norm())
    known = [math.nan if loss is None else loss, 0.25]
    assert stats.read() == pytest.approx([*known, 5.0, 10.0, 153**0.5], nan_ok=True)
    assert stats.on_device().tolist() == pytest.approx([*known, 2.0], nan_ok=True)
    assert stats.penalty[0].item() == pytest.approx(14 / 50)


def test_closed_form():
    """All of it on L = ½ wᵀAw with f = 0.4, δ = 0.1."""
    problem = quadratic()
    w = problem.model.w.detach().clone()
    opt = SGDTracer([problem.model.w], lr=0.1, rho=0.3, beta=0.0, delta=0.1, f0=0.4)
    opt.step(lambda: problem.loss_of(0))
    g = A @ w
    penalty = 0.3 * 2 * A @ (g / 0.5)
    assert opt.stats.loss == pytest.approx((w @ g / 2).item())
    assert opt.stats.trace_ratio == pytest.approx((g @ g / 0.5).item())
    assert opt.stats.gradient_norm == pytest.approx(g.norm().item())
    assert opt.stats.penalty_ratio == pytest.approx((penalty.norm() / g.norm()).item())
    assert opt.stats.cosine == pytest.approx((g @ penalty / g.norm() / penalty.norm()).item())
    assert opt.stats.damped_share == 0.0
    assert opt.stats.rho == 0.3
    assert set(opt.stats.as_dict()) == {
        "loss", "trace_ratio", "gradient_norm", "penalty_ratio", "cosine", "damped_share", "rho",
    }  # fmt: skip
    assert "trace_ratio=" in repr(opt.stats)


def test_trace_ratio_against_the_twin():
    made, twins = make(tanh_mlp), make(tanh_mlp)
    opt = AdamTracer(made.model.parameters(), lr=0.01, rho=0.0, delta=0.05)
    params = list(twins.model.parameters())
    g, _, f = penalised_gradient(twins.loss_of(0), params, None, 0.0, 0.05)
    opt.step(lambda: made.loss_of(0))
    assert opt.stats.trace_ratio == pytest.approx(
        sum((x**2 / (y + 0.05)).sum().item() for x, y in zip(g, f, strict=True))
    )


@pytest.mark.parametrize("cls", [SGDTracer, AdamTracer])
def test_share_of_damped_coordinates(cls):
    """f is g² after the first step, in SGD by f₀, in Adam by its bias correction: 1, 4, 9 against δ = 5."""
    model = Vector([1.0, 2.0, 3.0]).double()
    opt = cls([model.w], rho=0.0, delta=5.0)
    opt.step(lambda: (model.w**2).sum() / 2)
    assert opt.stats.damped_share == pytest.approx(2 / 3)


def test_sam():
    problem = quadratic()
    w = problem.model.w.detach().clone()
    opt = SAM(torch.optim.SGD([problem.model.w], 0.1), rho=0.2)
    opt.step(lambda: problem.loss_of(0))
    g = A @ w
    change = A @ (0.2 * g / g.norm())
    assert opt.stats.penalty_ratio == pytest.approx((change.norm() / g.norm()).item())
    assert math.isnan(opt.stats.trace_ratio)
    assert math.isnan(opt.stats.damped_share)


@every_optimiser
def test_a_step_without_penalty(maker):
    made = make(tanh_mlp)
    opt = maker(made.model.parameters())
    assert opt.stats is None
    for group in opt.param_groups:
        group["rho"] = 0.0
    opt.step(lambda: made.loss_of(0))
    assert opt.stats.penalty_ratio == 0
    assert math.isnan(opt.stats.cosine)
    assert opt.stats.gradient_norm > 0


@every_optimiser
def test_a_loop_without_closure_tells_no_loss(maker):
    made = make(tanh_mlp)
    opt = maker(made.model.parameters())
    opt.zero_grad()
    made.loss_of(0).backward()
    for _ in range(2 if opt.is_central else 1):
        with opt.perturbed():
            made.loss_of(0).backward()
    opt.step()
    assert math.isnan(opt.stats.loss)
    assert opt.stats.penalty_ratio > 0
