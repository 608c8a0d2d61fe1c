"""What a task is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

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


@dataclass(frozen=True)
class Task:
    """Training and test data. Images are float, channels first, normalised; vectors float; texts tuples of strings."""

    kind: str  # "vector", "image" or "text"
    classes: int
    train: Split
    test: Split

    def with_labels(self, labels: Tensor) -> Task:
        """The same task with other labels to train on."""
        return replace(self, train=replace(self.train, labels=labels))
