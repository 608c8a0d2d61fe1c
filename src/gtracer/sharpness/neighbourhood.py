"""The loss around the weights: at random displacements, and at the worst within a ball.

A displacement is s ∘ u with u drawn from a normal distribution, or within a ball. With s = 1 it is plain; with s = |w|
adaptive (Kwon et al., 2021), and then the same whatever a layer is scaled by, as long as the function stays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gtracer.sharpness.lanczos import mean_and_error
from gtracer.sharpness.objective import Objective


def expected(
    objective: Objective, scale: Tensor, sigma: float, samples: int, seed: int
) -> tuple[list[float], list[float]]:
    """L(w + σ s∘ε) − L(w) for normal ε, and the accuracies there, where the loss tells them.

    Each sample is the mean of a draw and its negative, in which the slope at w cancels.
    """
    generator = torch.Generator().manual_seed(seed)
    rises, accuracies = [], []
    for _ in range(samples):
        displacement = objective.random(generator).mul_(scale).mul_(sigma)
        pair = objective.value(displacement), objective.value(-displacement)
        rises.append((pair[0].loss + pair[1].loss) / 2 - (objective.at_weights or 0.0))
        accuracies += [each.accuracy for each in pair if each.accuracy is not None]
    return rises, accuracies


def worst(
    objective: Objective, scale: Tensor, radius: float, steps: int, loss: float, gradient: Tensor, seed: int
) -> float:
    """The largest L(w + s∘u) − L(w) that projected gradient ascent finds in ‖u‖ ≤ radius: a lower bound of it.

    Args:
        objective: The loss.
        scale: s.
        radius: Of the ball; the first point is SAM's.
        steps: Gradients.
        loss: At the weights.
        gradient: There.
        seed: Of the direction that is taken where the gradient is zero.
    """
    slope = scale * gradient
    if not bool(slope.any()):
        slope = scale * objective.random(torch.Generator().manual_seed(seed))
    u, best = _onto(slope, radius), -math.inf
    for _ in range(steps - 1):
        found, g = objective.gradient(scale * u)
        if not math.isfinite(found) or not bool(torch.isfinite(g).all()):
            return math.inf if best == -math.inf or found != found else found - loss
        best = max(best, found)
        # As long as the radius itself: for a quadratic, a power iteration that negative curvature cannot turn round.
        u = _into(u + _onto(scale * g, radius), radius)
    return max(best, objective.value(scale * u).loss) - loss


def worst_of_batches(
    objective: Objective, balls: Sequence[tuple[Tensor, float]], steps: int, seed: int
) -> list[tuple[float, float | None]]:
    """m-sharpness: the mean over batches, of m examples each, of what a batch's own loss can rise by; and its error.

    For each of some balls, that is for each s and radius.
    """
    found: list[list[tuple[float, float]]] = [[] for _ in balls]
    for batch, examples in objective.sweep():
        with objective.aside():
            alone = objective.only(batch)
            loss, gradient = alone.gradient()
            for (scale, radius), pairs in zip(balls, found, strict=True):
                pairs.append((examples, worst(alone, scale, radius, steps, loss, gradient, seed)))
    return [weighted_mean(pairs) for pairs in found]


def weighted_mean(pairs: list[tuple[float, float]]) -> tuple[float, float | None]:
    """Of (weight, value) pairs, with the standard error of a mean over batches whose sizes are these weights.

    >>> weighted_mean([(1.0, 0.0), (1.0, 2.0)])
    (1.0, 1.0)
    """
    total, count = math.fsum(n for n, _ in pairs), len(pairs)
    mean = math.fsum(n * x for n, x in pairs) / total
    if count < 2 or not math.isfinite(mean):
        return mean, None
    equal = mean_and_error([n * (x - mean) * count / total for n, x in pairs])[1]
    return mean, equal


def _onto(x: Tensor, radius: float) -> Tensor:
    """Given this length."""
    length = torch.linalg.vector_norm(x)
    return torch.where(length > 0, x * (radius / length), x)


def _into(x: Tensor, radius: float) -> Tensor:
    """Shortened to this length at most."""
    length = torch.linalg.vector_norm(x)
    return torch.where(length > radius, x * (radius / length), x)
