"""The average f of a diagonal curvature F, and the trace ratio of the two.

Pure arithmetic on lists of tensors. δ is `delta`, β is `beta`, F and f keep the paper's letters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gtracer import tensors
from gtracer.tensors import Tensors

FIRST_GRADIENT = "first-gradient"
"""f₀: the first F."""


def squares(g: Tensors) -> Tensors:
    """g², coordinate by coordinate."""
    return torch._foreach_mul(g, g)


def initial_average(F: Tensors, f0: str | float) -> Tensors:
    """f₀ of Algorithm 1, which the paper leaves open: the first F (the squared gradient there), or a constant."""
    return [F_.clone() if isinstance(f0, str) else torch.full_like(F_, f0) for F_ in F]


def update_average_(f: Tensors, F: Tensors, beta: float) -> None:
    """f ← (1 − β) f + β F, in place (Algorithm 1, last line).

    >>> f = [torch.tensor([1.0])]
    >>> update_average_(f, [torch.tensor([3.0])], beta=0.5)
    >>> f
    [tensor([2.])]
    """
    torch._foreach_lerp_(f, F, beta)


def trace_ratio(F: Tensors, f: Tensors, delta: float) -> Tensor:
    """T = Σ_j F_j / (f_j + δ), with the graph of F; f is a constant.

    >>> trace_ratio([torch.tensor([1.0, 6.0])], [torch.tensor([1.0, 2.0])], delta=1.0)
    tensor(2.5000)
    """
    # Where δ = 0, a coordinate that never had a gradient gets 0.
    return tensors.dot(F, tensors.inverse(f, delta))
