"""One step under way: which gradients are there, and which are still wanted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gtracer import checks, tensors
from gtracer.curvature import squares
from gtracer.optim.stats import Stats
from gtracer.penalty import Passes
from gtracer.tensors import Tensors


@dataclass
class Slice:
    """Those parameters of a group that have a gradient, and their gradients of the loss."""

    group: dict[str, Any]
    knobs: dict[str, Any]  # the group's ρ, β, δ, f₀
    params: Tensors
    gradients: Tensors
    curvature: Tensors | None = None  # F for the average, where it is not the squared gradient

    @property
    def measured(self) -> Tensors:
        """F for the average f."""
        return squares(self.gradients) if self.curvature is None else self.curvature

    @property
    def signed_rho(self) -> float:
        """ρ; negative where torch's `maximize` will flip the sign of the total."""
        return signed_rho(self.group, self.knobs)


def used_of(group: dict[str, Any], check: Callable[[str, Tensor], None]) -> Tensors:
    """Those parameters of a group that have a gradient; what is out of the ordinary about them is checked."""
    used: list[Any] = [p for p in group["params"] if p.grad is not None]
    # There are many of them, and almost always nothing is.
    whole = all(p.dtype == torch.float32 and type(p) in (nn.Parameter, Tensor) for p in used)
    if whole and all(p.grad.layout == torch.strided for p in used):
        return used
    for label, p in checks.labelled(group):
        if p.grad is not None:
            check(label, p)
            if p.grad.layout != torch.strided:
                raise RuntimeError(f"{label} has a sparse gradient: use dense ones (Embedding(sparse=False))")
    return used


def signed_rho(group: dict[str, Any], knobs: dict[str, Any]) -> float:
    """ρ of a group; negative where torch's `maximize` will flip the sign of the total."""
    rho: float = knobs["rho"]
    return -rho if group.get("maximize") else rho


@dataclass
class Plan:
    """What a subclass wants of a step: further passes (or none), and T for the record."""

    passes: Passes | None
    trace_ratio: Tensor | None = None


class Trial:
    """A step under way: the passes made so far and where the next one is wanted."""

    def __init__(self, slices: list[Slice], plan: Plan, loss: Any) -> None:
        # The engine may need the gradients' graph, nobody after it does.
        for part in slices:
            part.gradients = [g.detach() if g.requires_grad else g for g in part.gradients]
        self.slices = slices
        self.params = [p for part in slices for p in part.params]
        self.gradients = [g for part in slices for g in part.gradients]
        # A closure that calls backward() itself may return what it likes.
        self.loss = torch.as_tensor(loss) if isinstance(loss, Tensor | float) else None
        self.trace_ratio = plan.trace_ratio
        self.displacement: Tensors | AbstractContextManager[None] | None = None
        self.penalty: Tensors | None = None
        self.stats: Stats | None = None
        self.penalised = plan.passes is not None
        self.renewed = False  # whether the penalty is this step's own
        self._left: list[Tensor | None] = [p.grad for p in self.params]
        self._passes = plan.passes
        if self._passes is not None:
            self.proceed(None)

    def proceed(self, gradients: Tensors | None) -> None:
        """Hand over the gradients of the pass that was wanted (at first none was)."""
        assert self._passes is not None
        try:
            self.displacement = self._passes.send(gradients)  # type: ignore[arg-type]
        except StopIteration as finished:
            self.displacement, self.penalty, self._passes = None, finished.value, None

    def leave(self) -> None:
        """Let others see the gradients that there are now."""
        self._left = [p.grad for p in self.params]

    @property
    def is_abandoned(self) -> bool:
        """Whether other gradients are in the place of those that it left."""
        return any(p.grad is not left for p, left in zip(self.params, self._left, strict=True))

    def conclude(self) -> None:
        """Add the penalty to the gradients and put the sum where the base optimiser looks for it."""
        total: Tensors = self.gradients
        norms = [tensors.norm(self.gradients)]
        if self.penalty is not None:
            total, self.penalty = self.penalty, None
            norms.append(tensors.norm(total))
            torch._foreach_add_(total, self.gradients)
            norms.append(tensors.norm(total))
        self.stats = Stats(self.loss, self.trace_ratio, *norms)
        for p, gradient in zip(self.params, total, strict=True):
            p.grad = gradient
