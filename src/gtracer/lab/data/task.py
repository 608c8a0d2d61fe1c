"""What a task is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gtracer.lab.data.labels import Target
from gtracer.lab.data.streams import Items
from gtracer.lab.errors import LabError

Texts = list[tuple[str, ...]]
TEST_SHARE = 0.2  # of data of one's own that is not split
Inputs = Tensor | Texts | Items


@dataclass(frozen=True)
class Split:
    """Examples and their labels. `labels` are those to train on; `truth` those that are right, as far as is known."""

    inputs: Inputs
    labels: Tensor
    truth: Tensor
    ids: Sequence[str] = ()  # files or numbers of rows, where the examples are the user's own

    @classmethod
    def clean(cls, inputs: Inputs, labels: Tensor, ids: Sequence[str] = ()) -> Split:
        return cls(inputs, labels, labels, ids)

    def labelled(self, labels: Tensor) -> Split:
        """The same with other labels, in which no noise was made."""
        return Split.clean(self.inputs, labels, self.ids)

    def rows(self, chosen: Tensor) -> Split:
        """These examples only, in this order."""
        ids = [self.ids[i] for i in chosen.tolist()] if self.ids else ()
        return Split(_chosen(self.inputs, chosen), self.labels[chosen], self.truth[chosen], ids)


@dataclass(frozen=True)
class Found:
    """Examples that a file or folder holds, ready for a model; with their labels' names where it has any."""

    inputs: Inputs
    ids: Sequence[str]
    labels: Sequence[str] | None = None


class Preprocessing(Protocol):
    """From files to what a model takes; fitted on training data alone, and kept with the model."""

    def read(self, path: Path) -> Found:
        """What there is, whether it has labels or not."""

    def described(self) -> dict[str, Any]:
        """Plain values, for JSON, from which it can be made again."""


@dataclass(frozen=True)
class Task:
    """Training and test data. Images are float, channels first, normalised; vectors float; texts tuples of strings."""

    kind: str  # "vector", "image" or "text"
    classes: int
    train: Split
    test: Split
    holdout: Split | None = None  # out of the training data, with the labels that it had there
    names: tuple[str, ...] = ()  # of the classes, where they have other names than their numbers
    preprocessing: Preprocessing | None = None
    is_stratified: bool = False  # whether what is held out is a share of each class
    notes: tuple[str, ...] = ()  # what the user should know
    target: Target | None = None  # where labels are real numbers; there are no classes then

    @property
    def outputs(self) -> int:
        """How many numbers a model gives for an example."""
        return self.classes if self.target is None else 1

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.names or tuple(map(str, range(self.classes)))

    def without_examples(self) -> Task:
        """What is known of it, without the memory that its examples take."""
        nothing = Split.clean([], torch.zeros(0, dtype=torch.int64))
        return replace(self, train=nothing, test=nothing, holdout=None)

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
        """The same task with a seeded share of the training data held out; of each class, where it is stratified."""
        if self.is_stratified:
            rest, held_out = stratified(self.train.truth, share, seed)  # or label noise would change who it is
            if not len(held_out):
                what = "no class has two training examples" if self.target is None else "there is one training example"
                raise LabError(f"holdout = {share}: {what}, one of which could be held out; without: --holdout 0")
            return replace(self, train=self.train.rows(rest), holdout=self.train.rows(held_out))
        order = _shuffled(len(self.train.labels), -1 - seed)
        held = round(share * len(order))
        if not 0 < held < len(order):
            raise LabError(f"holdout = {share} keeps {held} of {len(order)} training examples: both sides need some")
        return replace(self, train=self.train.rows(order[held:]), holdout=self.train.rows(order[:held]))


def stratified(labels: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Rows in a random order, cut in two: a share of each class, but at least one example and never all, is second.

    Of real numbers likewise of each tenth of them, from the smallest to the largest.

    >>> first, second = stratified(torch.tensor([0] * 8 + [1] * 2), 0.25, seed=0)
    >>> sorted(first.tolist())[-1] >= 8, sorted(second.tolist())[-1] >= 8, len(second)
    (True, True, 3)
    """
    order = _shuffled(len(labels), -1 - seed)
    if labels.is_floating_point():
        labels = _tenths(labels, share)
    by_class = order[labels[order].argsort(stable=True)]
    counts = torch.bincount(labels)
    place = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[by_class]]
    wanted = (share * counts).round().clamp(min=1).minimum(counts - 1)
    is_second = torch.empty(len(labels), dtype=torch.bool)
    is_second[by_class] = place < wanted[labels[by_class]]
    return order[~is_second[order]], order[is_second[order]]


def _tenths(numbers: Tensor, share: float) -> Tensor:
    """Of each the part of the range that it lies in, in equal parts by count: ten, or fewer where they are small."""
    parts = max(1, min(10, int(len(numbers) * min(share, 1 - share))))
    place = torch.empty(len(numbers), dtype=torch.int64)
    place[numbers.argsort(stable=True)] = torch.arange(len(numbers))
    return place * parts // max(1, len(numbers))


def sampled(n: int, most: int) -> Tensor:
    """At most so many of n rows, at random, and the same ones whatever a run's seed is."""
    return _shuffled(n, -2_000_000_011)[:most]


def _chosen(inputs: Inputs, rows: Tensor) -> Inputs:
    if isinstance(inputs, Tensor):
        return inputs[rows]
    return inputs.rows(rows) if isinstance(inputs, Items) else [inputs[i] for i in rows.tolist()]


def _shuffled(n: int, seed: int) -> Tensor:
    """By a seed that nothing else draws from: with the label noise's own, just the mislabelled ones would be held out.

    Negative, since torch looks at the lower 32 bits alone: a large number could be a small one again.
    """
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))
