"""What a ρ that sets itself learns of in a run: the loss of held-out examples, batch after batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gtracer.lab.data.task import Split

if TYPE_CHECKING:
    from gtracer.lab.training.run import Run

FEWEST = 50  # examples; the loss of fewer says little, and batch norm takes none of one


class HeldOut:
    """Gives the loss of one batch of them, in training mode and augmented as those that are trained on are.

    Which batch is decided by how many steps have been made: there is no state to save.

    Args:
        run: Whose model, and whose way to a loss.
        split: The examples.
        every: Steps from one call to the next.
        steps: How many steps have been made, as a tensor that a captured step counts on; None: the run's own count.
    """

    def __init__(self, run: Run, split: Split, every: int, steps: Tensor | None = None) -> None:
        self._run, self._every, self._steps = run, every, steps
        assert run.holdout is not None
        self._batch, count = run.holdout.batch, len(split.labels)
        own = torch.Generator().manual_seed(run.config.seed)
        self._order = torch.randperm(count, generator=own).to(run.device)
        self._labels = split.labels.to(run.device)
        self._next = torch.arange(min(run.config.batch_size, count), device=run.device)
        self._width = self._batch.width(torch.arange(count))  # one for all: a graph has one

    def __call__(self) -> Tensor:
        made = self._run.steps if self._steps is None else self._steps
        rows = self._order[(made // self._every * len(self._next) + self._next) % len(self._order)]
        run = self._run
        with run.precision():
            outputs = run.trained(run.augmented(self._batch(rows, self._width))).float()
        return run.loss(outputs, self._labels[rows])
