"""A PAC-Bayes bound on the error of a network whose weights are drawn from a normal distribution around w."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class PacBayes:
    """With probability `confidence` over the training data, N(w, σ²I) errs on new data less often than `bound`.

    The prior is N(w₀, σ²I), so that KL = ‖w − w₀‖²/2σ². The mean error on the training data is estimated by draws,
    whose own error is told and not in the bound. By Maurer (2004): kl(error, bound) = (KL + log(2√n/(1 − c)))/n.

    Attributes:
        bound: On the share of errors; 1 says nothing.
        error_rate: Of drawn weights on the given data.
        error_of_rate: Its standard error.
        kl: KL of the two distributions.
        sigma: σ.
        confidence: c.
    """

    bound: float
    error_rate: float
    error_of_rate: float | None
    kl: float
    sigma: float
    confidence: float


def pac_bayes(
    error_rate: float, error_of_rate: float | None, squared_distance: float, sigma: float, examples: float, c: float
) -> PacBayes:
    """The bound, from the mean error of drawn weights and ‖w − w₀‖²."""
    kl = squared_distance / (2 * sigma**2)
    room = (kl + math.log(2 * math.sqrt(examples) / (1 - c))) / examples
    return PacBayes(inverse_kl(error_rate, room), error_rate, error_of_rate, kl, sigma, c)


def inverse_kl(q: float, room: float) -> float:
    """The largest p with kl(q, p) ≤ room, of two coins.

    >>> round(inverse_kl(0.0, 0.1), 6) == round(1 - math.exp(-0.1), 6)
    True
    """
    low, high = q, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _kl(q, middle) <= room else (low, middle)
    return high


def _kl(q: float, p: float) -> float:
    if p >= 1:
        return 0.0 if q >= 1 else math.inf
    if p <= 0:
        return 0.0 if q <= 0 else math.inf
    total = q * math.log(q / p) if q > 0 else 0.0
    return total + ((1 - q) * math.log((1 - q) / (1 - p)) if q < 1 else 0.0)
