"""Accelerate: the second pass of a loop, over all micro-batches of a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from gtracer.optim import TwoPassOptimizer
from gtracer.optim.loops import tell_loss


class Passes:
    """Makes the passes of a loop of Accelerate's, in place of its forward pass and `accelerator.backward`.

        passes = Passes(accelerator, model, optimizer)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = passes(loss_of, batch)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    The micro-batches of a step are kept, and where gradients are synchronised all of them run again at displaced
    weights, with the same random numbers. Accumulation, mixed precision, several processes and `clip_grad_norm_`
    (after the call: of the total gradient) are Accelerate's.

    Args:
        accelerator: Which has prepared both.
        model: As `prepare` gave it. Its statistics see the first pass alone.
        optimizer: As `prepare` gave it, an optimiser of gtracer inside.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
        opt = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(opt, TwoPassOptimizer):
            raise ValueError(f"optimizer must be one of gtracer, or prepared from one, got {type(opt).__name__}")
        self._accelerator, self._model, self._opt = accelerator, model, opt
        self._window: list[tuple[Callable[..., Tensor], tuple[Any, ...]]] = []
        self._losses: list[Tensor] = []
        if opt.model is None:
            opt.model = model

    def __call__(self, loss_of: Callable[..., Tensor], *batch: Any) -> Tensor:
        """Backward of one micro-batch, and of all again after the last of a step; returns its loss.

        Args:
            loss_of: Computes the loss.
            *batch: What it is called with.
        """
        if not self._window:
            self._opt.zero_grad()  # Accelerate's does nothing between two synchronisations; random numbers begin here
        self._window.append((loss_of, batch))
        loss = loss_of(*batch)
        self._losses.append(loss.detach())
        self._accelerator.backward(loss)
        if self._accelerator.sync_gradients:
            window, self._window = self._window, []
            mean = torch.stack(self._losses).mean()
            self._losses.clear()
            tell_loss(self._opt, mean)
            for _ in range(self._opt.second_pass_due * (1 + self._opt.is_central)):
                with self._opt.perturbed(scaler=self._accelerator.scaler, loss=mean):
                    self._again(window)
        return loss.detach()

    def _again(self, window: list[tuple[Callable[..., Tensor], tuple[Any, ...]]]) -> None:
        for i, (loss_of, batch) in enumerate(window):
            last = i == len(window) - 1
            with nullcontext() if last else self._accelerator.no_sync(self._model):
                self._accelerator.backward(loss_of(*batch))


__all__ = ["Passes"]
