"""f and T in closed form."""

import math

import pytest
import torch

from gtracer.curvature.average import FIRST_GRADIENT, initial_average, squares, trace_ratio, update_average_

G = [torch.tensor([1.0, -2.0], dtype=torch.float64), torch.tensor([0.0], dtype=torch.float64)]


def test_the_first_average_is_the_first_square_or_a_number():
    F = squares(G)
    assert [x.tolist() for x in F] == [[1.0, 4.0], [0.0]]
    first = initial_average(F, FIRST_GRADIENT)
    torch.testing.assert_close(first, list(F))
    first[0].zero_()
    assert F[0].tolist() == [1.0, 4.0]  # it is a copy
    assert [x.tolist() for x in initial_average(F, 0.3)] == [[0.3, 0.3], [0.3]]


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.8, 1.0])
def test_the_average_after_many_steps(beta):
    """f_t = (1 − β)ᵗ f₀ + (1 − (1 − β)ᵗ) F, where F stays."""
    F = squares(G)
    f = initial_average(F, 5.0)
    for _ in range(7):
        update_average_(f, F, beta)
    left = (1 - beta) ** 7
    torch.testing.assert_close(f, [left * 5.0 + (1 - left) * x for x in F])


def test_the_ratio_and_its_gradient():
    g = [x.clone().requires_grad_() for x in G]
    f = [torch.tensor([0.5, 1.0], dtype=torch.float64), torch.tensor([0.0], dtype=torch.float64)]
    T = trace_ratio(squares(g), f, 0.5)
    assert T.item() == pytest.approx(1 / 1 + 4 / 1.5)
    T.backward()
    torch.testing.assert_close([x.grad for x in g], [2 * x / (y + 0.5) for x, y in zip(G, f, strict=True)])


def test_without_damping_a_weight_that_never_had_a_gradient_counts_nothing():
    assert trace_ratio(squares(G), squares(G), 0.0).item() == 2.0
    assert math.isclose(trace_ratio(squares(G), squares(G), 1.0).item(), 1 / 2 + 4 / 5)
