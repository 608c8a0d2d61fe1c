"""What is used in the steps between two penalties: nothing, or the last ρ∇T again."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gtracer import checks
from gtracer.optim.step import Slice, Step
from gtracer.tensors import Tensors

LAST = "last_penalty"  # in the state: ρ∇T of the last step that made a second pass
State = dict[Tensor, dict[str, Any]]


class Reuse(Protocol):
    """What `reuse` may be, other than None."""

    always: bool  # whether no step makes a second pass

    def first_pass(self, slices: Iterable[Slice], state: State) -> AbstractContextManager[None]:
        """Where the first pass is made."""

    def recall(self, step: Step, state: State, since: int) -> Tensors | None:
        """ρ∇T for a step without a second pass, so many steps after one."""

    def note(self, step: Step, state: State, damped: Any) -> None:
        """Keep what later steps want of this one, whose total is there and not clipped yet."""


@dataclass(frozen=True)
class Decayed:
    """The last ρ∇T again, less of it every step."""

    decay: float

    always = False

    def first_pass(self, slices: Iterable[Slice], state: State) -> AbstractContextManager[None]:
        return nullcontext()

    def recall(self, step: Step, state: State, since: int) -> Tensors | None:
        if not step.params or any(LAST not in state.get(p, {}) for p in step.params):
            return None
        return torch._foreach_mul([state[p][LAST] for p in step.params], self.decay**since)

    def note(self, step: Step, state: State, damped: Any) -> None:
        found: dict[Tensor, Tensor] = {}
        if step.renewed:
            found = dict(zip(step.params, torch._foreach_sub(step.total, step.gradients), strict=True))
        step.after.append(lambda step: keep(state, LAST, step.params, found))


def keep(state: State, name: str, params: Tensors, values: dict[Tensor, Tensor]) -> None:
    """Write into the state; where there is a tensor already into that, in which a captured step looks again.

    Without a value only a place is made, for what a checkpoint holds.
    """
    for p in params:
        if name not in state[p]:
            state[p][name] = values[p] if p in values else torch.zeros_like(p)
        elif p in values:
            state[p][name].copy_(values[p])


def reuse_of(reuse: Any, interval: int) -> Reuse | None:
    """From what the user asked for."""
    if reuse is None:
        return None
    if hasattr(reuse, "recall"):
        if interval != 1:
            raise ValueError(f"reuse = {reuse!r} makes one pass in every step: leave interval = {interval} out")
        own: Reuse = reuse
        return own
    checks.number("reuse", reuse, low=0, high=1)
    if interval == 1:
        raise ValueError(f"reuse = {reuse} is for the steps between two penalties: set interval to 2 or more")
    return Decayed(reuse)
