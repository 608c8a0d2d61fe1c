"""`gtracer sharpness`: how sharp the minimum is that a run has found, on the data that it was trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from gtracer.lab import data
from gtracer.lab.data.task import Split
from gtracer.lab.errors import LabError, one_line
from gtracer.lab.inference.trained import Trained
from gtracer.sharpness import Sharpness, SplitLoss, classification, measure

EXAMPLES = 1000
SPLITS = ("train", "test")


@dataclass(frozen=True)
class Subject:
    """What is measured: a model, its loss and the batches that this is the mean over.

    Attributes:
        name: For tables and figures.
        model: In any mode.
        loss_of: Of a batch.
        batches: To be read several times.
        facts: What a table shows beside the measures, such as the accuracy on test data.
    """

    name: str
    model: nn.Module
    loss_of: Callable[[Any], Any]
    batches: Any
    facts: dict[str, float]

    def measured(self, **options: Any) -> Sharpness:
        """Refusals are errors of the lab, in one line."""
        try:
            return measure(self.model, self.loss_of, self.batches, **options)
        except (ValueError, FloatingPointError) as error:
            raise LabError(f"{self.name}: {one_line(error)}") from error


def subject(
    trained: Trained, examples: int = EXAMPLES, batch_size: int | None = None, split: str = "train", folder: Any = None
) -> Subject:
    """A trained model with examples of its own data, a random choice that is the same for every model of that data.

    Args:
        trained: The model.
        examples: At most so many.
        batch_size: By default the one that it was trained with.
        split: "train", with the labels that it was trained on, or "test", with the true ones.
        folder: Of the task's official files.
    """
    task = data.load(replace(trained.config, data=folder))
    part = task.train if split == "train" else task.test
    labels = part.labels if split == "train" else part.truth
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:examples]
    chosen = part.rows(order)
    rows = torch.split(torch.arange(len(order)), batch_size or trained.config.batch_size)
    batches = _batches(trained, chosen, labels[order], list(rows))
    return Subject(trained.folder.name, trained.model, _loss(trained), batches, {})


def _batches(trained: Trained, chosen: Split, labels: Any, rows: list[Any]) -> list[Any]:
    batch = trained.built.batches(chosen, trained.device)
    here = [part.to(trained.device) for part in rows]
    return [
        (batch(part, batch.width(part)), labels[its].to(trained.device)) for part, its in zip(here, rows, strict=True)
    ]


def _loss(trained: Trained) -> SplitLoss:
    return classification(trained.model)
