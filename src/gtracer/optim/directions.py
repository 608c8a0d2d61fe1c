"""Weights of which the network sees only the direction: those of a unit before batch norm.

Such a row w of a weight tensor has L(cw) = L(w), so ∇L ⟂ w, ∇L ~ 1/‖w‖ and F ~ 1/‖w‖². Two things follow where nothing
keeps rows short: a constant δ outgrows f, and the penalty fades; and −∇T has a part along w, which lowers T by
making rows longer, not by making anything flatter. In coordinates of the direction, w/‖w‖ in units of the length
‖w₀‖ that the row had at first, both are gone: F/(f + δ) becomes F/(f + δ ‖w₀‖²/‖w‖²), whose gradient has no part
along w.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gtracer import tensors
from gtracer.optim.trial import Slice
from gtracer.tensors import Tensors

LENGTHS = "first_lengths"  # in the state: ‖w₀‖² of rows

# Of a chance cosine, 1/√n. ResNet-20 in bfloat16: at most 0.04 before a norm, 0.6 at least in the last layer.
NEARLY_NONE = 0.2
TINY = 1e-30  # under a quotient, for rows of zeros


class Rows(NamedTuple):
    """The rows of weight tensors: ‖w‖², and for each tensor 1 where the loss depends on no row's length, else 0."""

    squares: Tensors
    free: Tensors


def rows_of(params: Tensors, gradients: Tensors) -> Rows:
    """As the gradient shows: it stands upright on rows whose length does not count."""
    squares = _by_rows(params, params)
    lengths = torch._foreach_mul(squares, _by_rows(gradients, gradients))
    torch._foreach_sqrt_(lengths)
    torch._foreach_clamp_min_(lengths, TINY)
    cosines = torch._foreach_abs(_by_rows(params, gradients))
    torch._foreach_div_(cosines, lengths)
    free = [tensors.whole(c.mean()) for c in cosines]
    torch._foreach_neg_(free)
    torch._foreach_add_(free, [NEARLY_NONE * math.prod(p.shape[1:]) ** -0.5 for p in params])
    torch._foreach_sign_(free)
    torch._foreach_clamp_min_(free, 0.0)
    return Rows(squares, free)


def damping(delta: float, rows: Rows, first: Tensors) -> Tensors:
    """What is added to f: δ ‖w₀‖²/‖w‖² for rows of which only the direction counts, δ for others."""
    factors = torch._foreach_div(first, torch._foreach_clamp_min(rows.squares, TINY))
    torch._foreach_sub_(factors, 1.0)
    torch._foreach_mul_(factors, rows.free)
    torch._foreach_add_(factors, 1.0)
    torch._foreach_mul_(factors, delta)
    return factors


def turn_(h: Tensors, params: Tensors, rows: Rows) -> None:
    """Take from the penalty's gradient what it has along such rows."""
    along = torch._foreach_div(_by_rows(h, params), torch._foreach_clamp_min(rows.squares, TINY))
    torch._foreach_mul_(along, rows.free)
    torch._foreach_sub_(h, [p * a for p, a in zip(params, along, strict=True)])


class Directions:
    """The rows of a step's weights, looked at once: later the weights may be displaced."""

    def __init__(self) -> None:
        self._seen: dict[Tensor, tuple[Tensor, Tensor]] = {}

    def damped(self, part: Slice, f: Tensors, state: dict[Tensor, dict[str, Any]]) -> Tensors:
        """f and what is added to it."""
        delta: float = part.knobs["delta"]
        wide = {p: g.detach() for p, g in zip(part.params, part.gradients, strict=True) if p.ndim > 1}
        if any(p not in self._seen for p in wide):
            self._seen |= zip(wide, zip(*rows_of(list(wide), list(wide.values())), strict=True), strict=True)
        rows = self._rows(list(wide))
        first = [state.get(p, {}).get(LENGTHS, now) for p, now in zip(wide, rows.squares, strict=True)]
        own = dict(zip(wide, damping(delta, rows, first) if wide else (), strict=True))
        damped = dict(zip(part.params, f, strict=True))
        rest = [p for p in damped if p not in own]
        plain = torch._foreach_add([damped[p] for p in rest], delta) if rest else ()
        damped |= zip(rest, plain, strict=True)
        return [damped[p] + own[p] if p in own else damped[p] for p in part.params]

    def turn_(self, params: Tensors, penalty: Tensors | None) -> None:
        """Take from the penalty's gradient what it has along rows of which only the direction counts."""
        wide = [(p, h) for p, h in zip(params, penalty or (), strict=False) if p in self._seen]
        if wide:
            params = [p for p, _ in wide]
            turn_([h for _, h in wide], params, self._rows(params))

    def note(self, state: dict[Tensor, dict[str, Any]]) -> None:
        """Keep the lengths that rows had at first."""
        for p, (squares, _) in self._seen.items():
            state[p].setdefault(LENGTHS, squares)

    def _rows(self, params: Tensors) -> Rows:
        return Rows([self._seen[p][0] for p in params], [self._seen[p][1] for p in params])


def _by_rows(xs: Tensors, ys: Tensors) -> Tensors:
    """Inner products of rows, in a shape that can be multiplied with them."""
    products = torch._foreach_mul(xs, ys)
    return [x.sum(tuple(range(1, x.ndim)), keepdim=True) for x in products]
