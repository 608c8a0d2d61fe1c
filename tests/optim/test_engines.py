"""The two engines against a closed form, against each other, and by their order of convergence."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gtracer import FiniteDifference, SGDTracer
from gtracer.curvature import gradient_magnitude, per_example
from gtracer.optim.engines import direction, exact, finite_difference
from support.problems import PROBLEMS, Problem, Vector, make, quadratic, relative_error, spd, tanh_mlp


def run(passes, gradient_at):
    """Drive an engine: hand it the gradient wherever it asks for one."""
    try:
        displacement = next(passes)
        while True:
            displacement = passes.send(gradient_at(displacement))
    except StopIteration as finished:
        return list(finished.value)


def penalty_gradient(problem: Problem, f, delta, engine, **options):
    """2 H v with v = ∇L/(f + δ), by the given engine."""
    params = list(problem.model.parameters())

    def gradient_at(displacement):
        with torch.no_grad():
            saved = [p.clone() for p in params]
            torch._foreach_add_(params, list(displacement))
        with torch.enable_grad():
            g = torch.autograd.grad(problem.loss_of(0), params)
        with torch.no_grad():
            torch._foreach_copy_(params, saved)
        return g

    g = torch.autograd.grad(problem.loss_of(0), params, create_graph=True)
    v = direction([x.detach() for x in g], [torch.full_like(p, f) for p in params], delta)
    with torch.no_grad():
        return run(engine(params, g if engine is exact else [x.detach() for x in g], v, **options), gradient_at)


@pytest.mark.parametrize(
    ("engine", "options"),
    [(exact, {}), (finite_difference, {"radius": 0.3}), (finite_difference, {"radius": 0.3, "central": True})],
)
def test_closed_form_on_a_quadratic(engine, options):
    """L = ½ wᵀAw has ∇T = 2A(Aw/(f + δ)); its Hessian is constant, so any radius is exact."""
    problem, A = make(quadratic), spd(3)
    g = A @ problem.model.w.detach()
    found = penalty_gradient(problem, 0.4, 0.1, engine, **options)
    assert relative_error(found, [2 * A @ (g / 0.5)]) < 1e-13


@pytest.mark.parametrize(("central", "slope"), [(False, 1), (True, 2)])
def test_order_of_the_finite_difference(central, slope):
    radii = [0.1 / 2**k for k in range(6)]
    true = penalty_gradient(make(tanh_mlp), 0.0, 0.05, exact)
    errors = [
        relative_error(penalty_gradient(make(tanh_mlp), 0.0, 0.05, finite_difference, radius=r, central=central), true)
        for r in radii
    ]
    measured = [math.log2(a / b) for a, b in pairwise(errors)]
    assert measured[-1] == pytest.approx(slope, abs=0.05)
    assert all(m == pytest.approx(slope, abs=0.3) for m in measured)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_engines_agree(problem):
    steps = []
    for options in ({"engine": "exact"}, {"engine": FiniteDifference(1e-4, central=True)}):
        made = make(problem)
        opt = SGDTracer(made.model.parameters(), lr=0.1, rho=0.01, model=made.model, **options)
        opt.step(lambda made=made: made.loss_of(0))
        steps.append(made.everything())
    assert relative_error(steps[1], steps[0]) < 1e-7


def test_vanished_gradient_has_no_penalty():
    """At a stationary point the direction has length 0: the penalty is 0, not NaN."""
    model = Vector([0.0, 0.0])
    opt = SGDTracer([model.w], lr=0.1, rho=0.1)
    opt.step(lambda: (model.w**2).sum())
    assert torch.equal(model.w.detach(), torch.zeros(2))
    assert opt.stats.penalty_ratio == 0


@pytest.mark.parametrize("engine", ["finite-difference", "exact"])
def test_without_damping_a_dead_coordinate_stays_out(engine):
    """δ = 0 and a coordinate whose gradient was always 0: 0/0 is 0 there, and the rest is penalised as ever."""
    model = Vector([1.0, 2.0]).double()
    opt = SGDTracer([model.w], lr=0.1, rho=0.1, delta=0.0, engine=engine)
    opt.step(lambda: model.w[0] ** 2 / 2 + 0 * model.w[1])
    assert model.w.tolist() == pytest.approx([1 - 0.1 * (1 + 2 * 0.1), 2.0])  # ∇T = 2 H g/g² = 2
    assert opt.stats.trace_ratio == pytest.approx(1.0)


def test_linear_loss_has_no_curvature():
    model = Vector([1.0, 2.0])
    opt = SGDTracer([model.w], lr=0.5, rho=0.1, engine="exact")
    opt.step(lambda: model.w.sum())
    assert torch.equal(model.w.detach(), torch.tensor([0.5, 1.5]))


def test_exact_engine_explains_a_missing_double_backward():
    """Fused attention has none; the message says so and names two ways out, of which both work."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 3, 8)

    def loss_of():
        return attention(x, x, x, need_weights=False)[0].square().mean()

    with pytest.raises(RuntimeError, match=r"engine='finite-difference'.*SDPBackend\.MATH"):
        SGDTracer(attention.parameters(), rho=0.1, engine="exact").step(loss_of)
    SGDTracer(attention.parameters(), rho=0.1).step(loss_of)
    with sdpa_kernel(SDPBackend.MATH):
        SGDTracer(attention.parameters(), rho=0.1, engine="exact").step(loss_of)


def test_flash_attention_has_the_penalty_of_plain_attention():
    """On a CPU in float32; the exact engine, which needs the plain one, is the reference."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(4, 12, 16)

    def penalised(backend, **options):
        opt = SGDTracer(attention.parameters(), lr=0.0, rho=0.05, delta=0.01, **options)

        def loss_of():
            with sdpa_kernel(backend):
                return attention(x, x, x, need_weights=False)[0].square().mean()

        opt.step(loss_of)
        return [p.grad.clone() for p in attention.parameters()], opt.stats.penalty_ratio

    flash, share = penalised(SDPBackend.FLASH_ATTENTION, engine=FiniteDifference(0.02))
    exact_one, _ = penalised(SDPBackend.MATH, engine="exact")
    assert share > 0.1
    assert relative_error(flash, exact_one) < 0.01


sizes = st.integers(1, 5)
positive = st.floats(1e-3, 10)


@given(size=sizes, seed=st.integers(0, 100), f=positive, delta=positive, radius=st.floats(1e-2, 10))
def test_any_quadratic(size, seed, f, delta, radius):
    A = spd(size, seed)
    w = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
    model = Vector(w.tolist()).double()
    problem = Problem(model, lambda i: model.w @ A @ model.w / 2)
    true = 2 * A @ (A @ model.w.detach() / (f + delta))
    for engine, options in [(exact, {}), (finite_difference, {"radius": radius})]:
        assert relative_error(penalty_gradient(problem, f, delta, engine, **options), [true]) < 1e-9


@pytest.mark.parametrize("central", [False, True])
def test_examples_that_move_by_themselves_have_this_closed_form(central):
    """l_i = (w x_i)³/3, so g_i = w² x_i³, and both differences are known to the last term, at any radius."""
    torch.manual_seed(0)
    layer = nn.Linear(1, 1, bias=False).double()
    x = torch.randn(5, 1, dtype=torch.float64)
    rho, delta, f0, radius = 0.3, 0.2, 0.5, 0.7
    options = {"curvature": per_example, "engine": FiniteDifference(radius, central), "model": layer}
    opt = SGDTracer(layer.parameters(), lr=0.0, rho=rho, delta=delta, f0=f0, **options)
    opt.step(lambda: (layer(x) ** 3).mean() / 3)
    w, g = layer.weight.item(), layer.weight.item() ** 2 * x**3
    u = rho * g / (f0 + delta)
    error = 0.0 if central else 2 * radius / (u**2).mean().sqrt() * (u**2 * x**3).mean()
    expected = (4 * w * x**3 * u).mean() + error
    assert (layer.weight.grad - g.mean()).item() == pytest.approx(expected.item(), rel=1e-12)
    assert opt.stats.trace_ratio == pytest.approx((g**2).mean().item() / (f0 + delta), rel=1e-12)


@pytest.mark.parametrize("central", [False, True])
@pytest.mark.parametrize("curvature", [gradient_magnitude, per_example])
def test_a_vanished_gradient_has_no_penalty(curvature, central):
    """And not 0/0."""
    layer = nn.Linear(2, 1, bias=False).double()
    options = {"curvature": curvature, "engine": FiniteDifference(central=central), "model": layer}
    opt = SGDTracer(layer.parameters(), lr=0.1, rho=0.3, nonfinite="ignore", **options)
    before = layer.weight.detach().clone()
    opt.step(lambda: layer(torch.zeros(3, 2, dtype=torch.float64)).square().mean())
    assert torch.equal(layer.weight.grad, torch.zeros(1, 2, dtype=torch.float64))
    assert torch.equal(layer.weight.detach(), before)
