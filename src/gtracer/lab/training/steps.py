"""How the steps of a run are made: one by one as here, or as CUDA graphs (`captured.Captured`)."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gtracer.lab.training import checkpoint
from gtracer.lab.training.run import IGNORED, Run
from gtracer.optim import NonFiniteError, TwoPassOptimizer


class Steps(Protocol):
    """What the training loop asks for. None among what is yielded is a pause: others may use the device meanwhile."""

    run: Run

    def rest_of_epoch(self) -> Iterator[float | None]:
        """Make the steps that are left of this epoch; after each its loss, where it is known so soon."""

    def finish_epoch(self) -> Generator[None, None, dict[str, float]]:
        """Evaluate, and go on to the next epoch. Returns the epoch's row of the record."""

    def save(self, folder: Path, results: dict[str, Any]) -> None:
        """Write the checkpoint, with the results so far."""

    def load(self, folder: Path) -> dict[str, Any]:
        """Go on where `save` left off; gives the results it was handed."""


class Eager:
    """Steps one by one, each of which waits for the device."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def rest_of_epoch(self) -> Iterator[float]:
        run = self.run
        run.model.train()
        batches = torch.split(run.order(), run.sizes)[run.step :]
        shares = [run.processes.share(rows) for rows in batches]
        made = run.batches([mine for mine, _ in shares])
        for rows, (mine, counted), (inputs, labels) in zip(batches, shares, made, strict=True):
            if counted < len(mine):  # padding rows, excluded from the loss
                ignored = math.nan if labels.is_floating_point() else IGNORED
                labels = torch.cat([labels[:counted], torch.full_like(labels[counted:], ignored)])
            yield self._make(inputs, labels, len(rows))

    def _make(self, inputs: Any, labels: Tensor, of: int) -> float:
        run = self.run
        try:
            loss = float(run.processes.mean(run.update(inputs, labels, of)))
        except NonFiniteError:
            loss = math.nan
        except RuntimeError as error:
            if "without overflow" not in str(error):
                raise
            loss = math.nan  # torch refuses a product of hyper-parameters that no 32 bits hold
        run.require_finite(loss)
        if run.average is not None:
            run.average.update()
        run.schedule.step()
        if run.rho_schedule is not None:
            run.rho_schedule.step()
        run.step += 1
        run.sums["train_loss"] += loss
        if isinstance(run.optimizer, TwoPassOptimizer) and run.optimizer.stats is not None:
            run.sums["trace_ratio"] += run.optimizer.stats.trace_ratio
            run.sums["penalty_ratio"] += run.optimizer.stats.penalty_ratio
        return loss

    def finish_epoch(self) -> Generator[None, None, dict[str, float]]:
        yield from ()
        return self.run.row({name: value.item() for name, value in self.run.measured().items()})

    def save(self, folder: Path, results: dict[str, Any]) -> None:
        checkpoint.save(self.run, folder, results)

    def load(self, folder: Path) -> dict[str, Any]:
        return checkpoint.load(self.run, folder)
