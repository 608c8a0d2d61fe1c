"""What is done to ∇L + ρ∇T between the passes and the update: clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gtracer import checks, tensors
from gtracer.optim.step import Slice, Step
from gtracer.tensors import Tensors

OF = ("total", "loss")
Damped = Callable[[Slice], tuple[Tensors, float]]  # f of a slice, and the δ that is still to be added to it
Transform = Callable[[Step, Damped], None]


def to_norm(most: float, found: Tensor) -> Tensor:
    """What scales a gradient of this norm down to the most that it may have, with 1e-6 as in torch."""
    return torch.clamp(most / (found + 1e-6), max=1.0)


@dataclass(frozen=True)
class Clip:
    """Limits for the gradient that makes the update. T and f use the gradient before clipping.

    Adam-TRACER's second moment is that of the clipped total, as in torch's Adam.

    >>> Clip(norm=1.0)
    Clip(norm=1.0, value=None, of='total')

    Attributes:
        norm: The Euclidean norm over all parameters is scaled down to this, as by torch's `clip_grad_norm_`.
        value: Every coordinate is limited to ± this, as by `clip_grad_value_`; after `norm`, if both are set.
        of: `"total"`: ∇[L + ρT], so that what the base optimiser sees is bounded, as it is with torch's functions.
            `"loss"`: ∇L alone, before ρ∇T is added.
    """

    norm: float | None = None
    value: float | None = None
    of: str = "total"

    def __post_init__(self) -> None:
        for name in ("norm", "value"):
            if getattr(self, name) is not None:
                checks.number(name, getattr(self, name), low=0, open_low=True)
        if self.norm is None and self.value is None:
            raise ValueError("Clip needs norm or value, got neither: Clip(norm=1.0)")
        checks.choice("of", self.of, OF)

    @property
    def is_one_factor(self) -> bool:
        """Whether it only scales the total."""
        return self.value is None and self.of == "total"

    def __call__(self, step: Step, damped: Damped) -> None:
        """Clip what is in `.grad`; the step's own gradients stay, f is to learn from them."""
        total = step.total
        source = step.gradients if self.of == "loss" else total
        clipped = self._clipped(source)
        if self.of == "loss":
            torch._foreach_sub_(clipped, source)  # what it takes away
            torch._foreach_add_(clipped, total)
        step.total = clipped

    def _clipped(self, gradients: Tensors) -> Tensors:
        """Copies within the bounds."""
        found = tensors.clone(gradients)
        if self.norm is not None:
            tensors.scale_(found, to_norm(self.norm, tensors.norm(found)))
        if self.value is not None:
            torch._foreach_clamp_min_(found, -self.value)
            torch._foreach_clamp_max_(found, self.value)
        return found


def transforms_of(clip: Any, transforms: Sequence[Transform] = ()) -> tuple[Transform, ...]:
    """Clipping first, then the others, checked."""
    checks.kind("clip", clip, (Clip, type(None)), ", such as gtracer.Clip(norm=1.0)")
    if not isinstance(transforms, list | tuple) or not all(callable(x) and not isinstance(x, type) for x in transforms):
        raise ValueError(
            f"transforms must be a list of functions of a step, see gtracer.experimental, got {transforms!r}"
        )
    return (*([] if clip is None else [clip]), *transforms)
