"""Output distributions of losses, and losses that have none."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, l1_loss, mse_loss

from gtracer import curvature as c
from gtracer import variational
from gtracer.curvature.likelihood import Bernoulli, Categorical, Gaussian, likelihood_of
from support.estimates import evaluate, refusal
from support.networks import make, mlp
from support.problems import relative_error


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(), Bernoulli()])
def test_factors_multiply_to_the_curvature_of_the_loss(likelihood):
    torch.manual_seed(0)
    z = torch.randn(1, 3).double()
    label = torch.tensor([1]) if isinstance(likelihood, Categorical) else torch.tensor([[1.0, 0, 1]]).double()
    loss = {Categorical: cross_entropy, Gaussian: mse_loss}.get(
        type(likelihood), nn.functional.binary_cross_entropy_with_logits
    )
    true = variational.hessian_of(lambda v: loss(v[None], label))(z[0])
    assert torch.allclose(sum(torch.outer(s[0], s[0]) for s in likelihood.factors(z)), true, atol=1e-12)


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(), Bernoulli()])
def test_slopes_of_drawn_labels_have_the_curvature_for_their_second_moment(likelihood):
    z = torch.tensor([[0.5, -1.0, 0.3]]).double()
    slopes = likelihood.slope(z.expand(100_000, 3), None)
    true = sum(torch.outer(s[0], s[0]) for s in likelihood.factors(z))
    assert torch.allclose(slopes.T @ slopes / len(slopes), true, rtol=0, atol=0.02 * true.max().item())
    assert torch.allclose(slopes.mean(0), torch.zeros(3).double(), rtol=0, atol=0.01)


@pytest.mark.parametrize(("temperature", "moves"), [(None, 2 / 3), (1.0, 0.0)])
def test_a_gaussian_label_moves_with_the_outputs_where_it_carries_a_gradient(temperature, moves):
    """(z − y)/σ² with σ² = C/2; for y = z + σν the outputs cancel."""
    z = torch.randn(5, 3).double().requires_grad_()
    (slope,) = torch.autograd.grad(Gaussian().slope(z, temperature).sum(), z)
    assert torch.allclose(slope, torch.full_like(z, moves), atol=1e-12)


def test_gumbel_softmax_carries_the_gradient_through_the_drawing():
    """Labels held constant forget how the probabilities move; the relaxation does not.

    Two classes, one input x = 1: F = p(1 − p) for each of the two weights.
    """
    model = nn.Linear(1, 2, bias=False).double()
    nn.init.constant_(model.weight, 0.0)
    model.weight.data[0] = 1.0
    x, y = torch.ones(100_000, 1).double(), torch.zeros(100_000, dtype=torch.long)

    def slope(estimator):
        torch.manual_seed(0)
        with c.Recording(model) as recording:
            loss = cross_entropy(model(x), y)
        F = estimator(c.Evaluation(loss, [model.weight], recording, differentiable=True))[0]
        return torch.autograd.grad(F.sum(), model.weight)[0][0, 0].item()

    p = 1 / (1 + math.exp(-1))
    true = 2 * p * (1 - p) * (1 - 2 * p)  # d/dw of 2 p(1 − p)
    # The label constant: E[2 (p − y)] p(1 − p) · 2 = 0.
    assert abs(slope(c.gauss_newton(exact_up_to=0))) < 0.02
    assert slope(c.gauss_newton()) == pytest.approx(true, rel=1e-9)
    # The relaxation's bias goes with its temperature.
    off = [abs(slope(c.monte_carlo_fisher(temperature=t)) / true - 1) for t in (1.0, 0.3, 0.1)]
    assert off[0] > off[1] > off[2]
    assert off[2] < 0.2


@pytest.mark.parametrize(
    ("loss", "name"), [(l1_loss, "l1_loss"), (nn.HingeEmbeddingLoss(), "HingeEmbeddingLoss"), ("mse", "str")]
)
def test_losses_without_output_distribution_are_refused_by_name(loss, name):
    for estimator in (c.monte_carlo_fisher, c.gauss_newton):
        with pytest.raises(ValueError, match=rf"{name} has no known output distribution.*per_example"):
            estimator(loss)


def test_weighted_losses_are_refused_and_smoothed_ones_taken():
    with pytest.raises(ValueError, match="CrossEntropyLoss with weight"):
        c.gauss_newton(nn.CrossEntropyLoss(weight=torch.ones(3)))
    with pytest.raises(ValueError, match="reduction of the loss"):
        c.gauss_newton(nn.MSELoss(reduction="sum"))
    assert isinstance(likelihood_of(nn.CrossEntropyLoss(label_smoothing=0.1)), Categorical)


def test_outputs_with_positions_are_refused():
    message = refusal(nn.Linear(4, 3), c.gauss_newton(mse_loss), torch.randn(3, 5, 4), mse_loss, torch.zeros(3, 5, 3))
    assert "the model gives (3, 5, 3) for 3 examples" in message


def test_an_output_that_is_no_tensor_is_refused():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x):
            return self.inner(x), x

    message = refusal(Pair(), c.gauss_newton(), torch.randn(3, 4), lambda pair, y: cross_entropy(pair[0], y))
    assert "the model gives a tuple" in message


def test_logits_are_found_in_an_object():
    """As Hugging Face's models give it."""

    class Output:
        def __init__(self, logits):
            self.logits = logits

    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return Output(self.inner(x))

    made = make(mlp)
    plain = evaluate(made, c.gauss_newton())
    model = Wrapped(made.model)
    with c.Recording(model) as recording:
        loss = cross_entropy(model(made.x).logits, made.y)
    assert relative_error(c.gauss_newton()(c.Evaluation(loss, made.params, recording)), plain) < 1e-12


@pytest.mark.parametrize("loss", [["a", "list"], None])
def test_what_is_no_loss_at_all_is_refused(loss):
    with pytest.raises(ValueError, match="no known output distribution"):
        c.gauss_newton(loss)
