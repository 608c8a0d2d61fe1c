"""Gradients under a GradScaler, and what it takes for an optimiser."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gtracer import tensors
from gtracer.tensors import Tensors

if TYPE_CHECKING:
    from gtracer.optim.optimizer import TwoPassOptimizer


class Held:
    """What a GradScaler takes for an optimiser: it looks at the gradients and makes the update, or does not."""

    def __init__(self, optimizer: TwoPassOptimizer) -> None:
        self._optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def step(self, update: Callable[[], None]) -> None:
        update()


def scale(params: Tensors, scaler: torch.amp.GradScaler) -> None:
    """Put scaled gradients in the place of the gradients."""
    _multiply(params, scaler.scale)


def unscale(params: Tensors, scaler: torch.amp.GradScaler) -> None:
    """And the other way round."""
    _multiply(params, lambda one: 1 / scaler.scale(one))


def _multiply(params: Tensors, factor: Callable[[Tensor], Tensor]) -> None:
    """The factor is made on the device, and not waited for."""
    if found := [p for p in params if p.grad is not None]:
        gradients = tensors.clone([p.grad for p in found if p.grad is not None])
        tensors.scale_(gradients, factor(torch.ones((), device=found[0].device)))
        for p, gradient in zip(found, gradients, strict=True):
            p.grad = gradient
