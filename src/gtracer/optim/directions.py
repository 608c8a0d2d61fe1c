"""Weights of which the network sees only the direction: those of a unit before batch norm.

Such a row w of a weight tensor has L(cw) = L(w), so ∇L ⟂ w, ∇L ~ 1/‖w‖ and F ~ 1/‖w‖². Two things follow where nothing
keeps rows short: a constant δ outgrows f, and the penalty fades; and −∇T has a part along w, which lowers T by
making rows longer, not by making anything flatter. In coordinates of the direction, w/‖w‖ in units of the length
‖w₀‖ that the row had at first, both are gone: F/(f + δ) becomes F/(f + δ ‖w₀‖²/‖w‖²), whose gradient has no part
along w.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gtracer.tensors import Tensors

# Of a chance cosine, 1/√n. ResNet-20 in bfloat16: at most 0.04 before a norm, 0.6 at least in the last layer.
NEARLY_NONE = 0.2


def squared_lengths(p: Tensor) -> Tensor:
    """‖w‖² of the rows."""
    return _by_rows(p, p)


def damping(delta: float, params: Tensors, gradients: Tensors, first: dict[Tensor, Tensor]) -> list[Tensor | float]:
    """What is added to f: δ ‖w₀‖²/‖w‖² for rows of which only the direction counts, δ for all others.

    Args:
        delta: δ.
        params: The weights.
        gradients: ∇L.
        first: ‖w₀‖² of the rows, where a step has been made before.
    """
    found: list[Tensor | float] = []
    for p, g in zip(params, gradients, strict=True):
        if p in first:
            shorter = first[p] / _by_rows(p, p)
            found.append(delta * torch.where(_is_free(p, g) & shorter.isfinite(), shorter, 1.0))
        else:
            found.append(delta)
    return found


def turn_(penalty: Tensors, params: Tensors, gradients: Tensors) -> None:
    """Take from the penalty's gradient what it has along such rows."""
    for h, p, g in zip(penalty, params, gradients, strict=True):
        if p.ndim > 1:
            along = _by_rows(h, p) / _by_rows(p, p)
            h.sub_(p * torch.where(_is_free(p, g) & along.isfinite(), along, 0.0))


def _is_free(p: Tensor, g: Tensor) -> Tensor:
    """Whether the gradient stands upright on the rows: then the loss depends on no row's length."""
    lengths = (_by_rows(p, p) * _by_rows(g, g)).sqrt()
    cosines = torch.where(lengths > 0, _by_rows(p, g).abs() / lengths, 0.0)
    return torch.lt(cosines.mean(), NEARLY_NONE * p[0].numel() ** -0.5)


def _by_rows(x: Tensor, y: Tensor) -> Tensor:
    """Inner products of rows, in a shape that can be multiplied with them."""
    return (x * y).sum(tuple(range(1, x.ndim)), keepdim=True)
