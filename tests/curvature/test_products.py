"""The penalty per example by a finite difference, a layer with weights for each example."""

import math

import pytest
import torch
from torch import nn

from gtracer import Exact, FiniteDifference, SGDTracer
from gtracer import curvature as c
from gtracer.curvature import products
from support.estimates import example_squares
from support.networks import attention, conv, encoder, group_norm, make, mlp, regression
from support.problems import relative_error

FAST_CASES = [mlp, regression, conv, group_norm, encoder]


def penalty_of(case, **options):
    """ρ∇T of the first step, by what it adds to the gradient."""
    made = make(case)
    opt = SGDTracer(made.params, lr=0.1, rho=0.02, delta=0.1, curvature=c.per_example, model=made.model, **options)
    opt.step(made.loss_of)
    reference = make(case)
    plain = torch.autograd.grad(reference.loss_of(), reference.params)
    return [p.grad - g for p, g in zip(made.params, plain, strict=True)], opt


@pytest.mark.parametrize("case", FAST_CASES)
@pytest.mark.parametrize("room", [products.ROOM, 1], ids=["whole", "in chunks"])
def test_finite_difference_per_example_converges_to_the_exact_penalty(case, room, monkeypatch):
    """With the order of its error: 1 one way, 2 both ways."""
    monkeypatch.setattr(products, "ROOM", room)
    exact, _ = penalty_of(case, engine="exact")
    for central, order in ((False, 1), (True, 2)):
        radii = (1e-2, 1e-3)
        off = [relative_error(penalty_of(case, engine=FiniteDifference(r, central))[0], exact) for r in radii]
        assert off[1] < 10**-order * 0.05
        # ReLU has no derivative to converge to where it switches.
        assert math.log10(off[0] / off[1]) == pytest.approx(order, abs=0.3) or case is mlp


def test_finite_difference_per_example_is_the_default_where_it_can_be():
    for case, engine in ((mlp, FiniteDifference()), (encoder, FiniteDifference()), (attention, Exact())):
        made = make(case)
        opt = SGDTracer(made.params, lr=0.1, curvature=c.per_example, model=made.model)
        assert opt.method.engine == engine
        opt.step(made.loss_of)
    with pytest.raises(ValueError, match="leave engine out"):
        SGDTracer(made.params, lr=0.1, curvature=c.per_example, model=made.model, engine="finite-difference")


def test_finite_difference_per_example_leaves_no_graph_and_no_hook():
    made = make(conv)
    opt = SGDTracer(made.params, lr=0.1, curvature=c.per_example, model=made.model)
    loss = opt.step(made.loss_of)
    assert not loss.requires_grad
    assert not any(p.grad.requires_grad for p in made.params)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in made.model.modules())


@pytest.mark.parametrize("case", [mlp, conv, group_norm, encoder])
@pytest.mark.parametrize("engine", ["exact", "finite-difference"])
@pytest.mark.parametrize("room", [products.ROOM, 1], ids=["whole", "in chunks"])
def test_per_example_in_mixed_precision(case, engine, room, monkeypatch):
    """bfloat16 has three digits: the penalised gradient agrees with float32's to about two."""
    monkeypatch.setattr(products, "ROOM", room)
    gradients = []
    for mixed in (False, True):
        made = make(case)
        made.model.float()
        made.x = made.x.float() if made.x.is_floating_point() else made.x
        opt = SGDTracer(
            made.params, lr=0.1, rho=0.02, delta=0.1, curvature=c.per_example, engine=engine, model=made.model
        )

        def closure(made=made, mixed=mixed):
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                output = made.model(made.x)
            return made.loss(output.float(), made.y)

        opt.step(closure)
        gradients.append([p.grad for p in made.params])
    assert relative_error(*gradients) < 0.03


def test_gradients_by_examples_are_the_gradients():
    """Also of a weight that the loss has another way to, and where examples are taken in chunks."""
    for case in FAST_CASES:
        for room in (products.ROOM, 1):
            made = make(case)
            with pytest.MonkeyPatch.context() as patch, c.Recording(made.model) as recording:
                patch.setattr(products, "ROOM", room)
                loss = made.loss_of() + made.params[0].square().sum()
                at = c.Evaluation(loss, made.params, recording, by_examples=True)
            assert relative_error(at.gradients, torch.autograd.grad(loss, made.params)) < 1e-12


def test_a_ridge_in_the_closure_is_no_examples_gradient():
    """It is in the gradient, but not in F, with either engine."""
    results = []
    for options in ({"engine": "exact"}, {"engine": FiniteDifference(1e-5, central=True)}):
        made = make(conv)
        opt = SGDTracer(made.params, lr=0.1, rho=0.05, curvature=c.per_example, model=made.model, **options)
        opt.step(lambda made=made: made.loss_of() + sum(p.square().sum() for p in made.params))
        results.append(made.params)
    assert relative_error(*results) < 1e-7
    plain = make(conv)
    assert relative_error([opt.state[p]["f"] for p in made.params], example_squares(plain)) < 1e-9


def test_finite_difference_per_example_with_frozen_weights():
    results = []
    for options in ({"engine": "exact"}, {"engine": FiniteDifference(1e-5, central=True)}):
        made = make(conv)
        made.model[0].weight.requires_grad_(False)
        made.model[2].bias.requires_grad_(False)
        params = [p for p in made.params if p.requires_grad]
        opt = SGDTracer(params, lr=0.1, rho=0.05, curvature=c.per_example, model=made.model, **options)
        opt.step(made.loss_of)
        results.append(params)
    assert relative_error(*results) < 1e-7


def test_a_layer_called_otherwise_has_no_difference_per_example():
    """By keyword: `torch.func` takes it, the finite difference says so."""

    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x):
            return self.inner(input=x)

    model, x = Keyword(), torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"layer 'inner' \(Linear\) has no difference per example: use engine='exact'"):
        SGDTracer(model.parameters(), lr=0.1, rho=0.003, curvature=c.per_example, model=model).step(
            lambda: model(x).square().mean()
        )
    SGDTracer(model.parameters(), lr=0.1, curvature=c.per_example, model=model, engine="exact").step(
        lambda: model(x).square().mean()
    )
