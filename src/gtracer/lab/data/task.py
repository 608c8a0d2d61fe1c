"""What a task is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gtracer.lab.errors import LabError

Texts = list[tuple[str, ...]]


@dataclass(frozen=True)
class Split:
    """Examples and their labels. `labels` are those to train on; `truth` those that are right."""

    inputs: Tensor | Texts
    labels: Tensor
    truth: Tensor

    @classmethod
    def clean(cls, inputs: Tensor | Texts, labels: Tensor) -> Split:
        return cls(inputs, labels, labels)

    def rows(self, chosen: Tensor) -> Split:
        """These examples only, in this order."""
        x = self.inputs
        inputs: Tensor | Texts = x[chosen] if isinstance(x, Tensor) else [x[i] for i in chosen.tolist()]
        return Split(inputs, self.labels[chosen], self.truth[chosen])


@dataclass(frozen=True)
class Task:
    """Training and test data. Images are float, channels first, normalised; vectors float; texts tuples of strings."""

    kind: str  # "vector", "image" or "text"
    classes: int
    train: Split
    test: Split
    holdout: Split | None = None  # out of the training data, with the labels that it had there

    def with_labels(self, labels: Tensor) -> Task:
        """The same task with other labels to train on."""
        return replace(self, train=replace(self.train, labels=labels))

    def narrowed(self, share: float, seed: int) -> Task:
        """The same task with a seeded share of the training data."""
        order = _shuffled(len(self.train.labels), -1_000_000_007 - seed)
        kept = round(share * len(order))
        if not kept:
            raise LabError(f"train_share = {share} leaves 0 of {len(order)} training examples")
        return replace(self, train=self.train.rows(order[:kept]))

    def holding_out(self, share: float, seed: int) -> Task:
        """The same task with a seeded share of the training data held out."""
        order = _shuffled(len(self.train.labels), -1 - seed)
        held = round(share * len(order))
        if not 0 < held < len(order):
            raise LabError(f"holdout = {share} keeps {held} of {len(order)} training examples: both sides need some")
        return replace(self, train=self.train.rows(order[held:]), holdout=self.train.rows(order[:held]))


def _shuffled(n: int, seed: int) -> Tensor:
    """By a seed that nothing else draws from: with the label noise's own, just the mislabelled ones would be held out.

    Negative, since torch looks at the lower 32 bits alone: a large number could be a small one again.
    """
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))
