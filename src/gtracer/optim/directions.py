"""Weights of which the network sees only the direction: those of a unit before batch norm.

Such a row w of a weight tensor has L(cw) = L(w), so ∇L ⟂ w, ∇L ~ 1/‖w‖ and F ~ 1/‖w‖². Two things follow where nothing
keeps rows short: a constant δ outgrows f, and the penalty fades; and −∇T has a part along w, which lowers T by
making rows longer, not by making anything flatter. In coordinates of the direction, w/‖w‖ in units of the length
‖w₀‖ that the row had at first, both are gone: F/(f + δ) becomes F/(f + δ ‖w₀‖²/‖w‖²), whose gradient has no part
along w.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gtracer.optim.trial import Slice
from gtracer.tensors import Tensors

LENGTHS = "first_lengths"  # in the state: ‖w₀‖² of rows

# Of a chance cosine, 1/√n. ResNet-20 in bfloat16: at most 0.04 before a norm, 0.6 at least in the last layer.
NEARLY_NONE = 0.2


class Rows(NamedTuple):
    """The rows of a weight tensor: ‖w‖², and whether the loss depends on no row's length."""

    squares: Tensor
    free: Tensor


def rows_of(p: Tensor, g: Tensor) -> Rows:
    """As the gradient shows: it stands upright on rows whose length does not count."""
    squares = _by_rows(p, p)
    lengths = (squares * _by_rows(g, g)).sqrt()
    cosines = torch.where(lengths > 0, _by_rows(p, g).abs() / lengths, 0.0)
    return Rows(squares, torch.lt(cosines.mean(), NEARLY_NONE * p[0].numel() ** -0.5))


def damping(delta: float, rows: Rows, first: Tensor) -> Tensor:
    """What is added to f: δ ‖w₀‖²/‖w‖² for rows of which only the direction counts, δ for others."""
    shorter = first / rows.squares
    return delta * torch.where(rows.free & shorter.isfinite(), shorter, 1.0)


def turn_(h: Tensor, p: Tensor, rows: Rows) -> None:
    """Take from the penalty's gradient what it has along such rows."""
    along = _by_rows(h, p) / rows.squares
    h.sub_(p * torch.where(rows.free & along.isfinite(), along, 0.0))


class Directions:
    """The rows of a step's weights, looked at once: later the weights may be displaced."""

    def __init__(self) -> None:
        self._rows: dict[Tensor, Rows] = {}

    def damping(self, part: Slice, state: dict[Tensor, dict[str, Any]]) -> list[Tensor | float]:
        """What is added to f of each parameter."""
        delta: float = part.knobs["delta"]
        for p, g in zip(part.params, part.gradients, strict=True):
            if p.ndim > 1 and p not in self._rows:
                self._rows[p] = rows_of(p, g.detach())
        first = {p: state[p][LENGTHS] for p in part.params if LENGTHS in state.get(p, {})}
        return [damping(delta, self._rows[p], first[p]) if p in first else delta for p in part.params]

    def turn_(self, params: Tensors, penalty: Tensors | None) -> None:
        """Take from the penalty's gradient what it has along rows of which only the direction counts."""
        for p, h in zip(params, penalty or (), strict=False):
            if p in self._rows:
                turn_(h, p, self._rows[p])

    def note(self, state: dict[Tensor, dict[str, Any]]) -> None:
        """Keep the lengths that rows had at first."""
        for p, its in self._rows.items():
            state[p].setdefault(LENGTHS, its.squares)


def _by_rows(x: Tensor, y: Tensor) -> Tensor:
    """Inner products of rows, in a shape that can be multiplied with them."""
    return (x * y).sum(tuple(range(1, x.ndim)), keepdim=True)
