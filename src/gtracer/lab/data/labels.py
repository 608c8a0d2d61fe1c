"""What labels are: classes by their names, or real numbers to be predicted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gtracer.lab.config import CLASSES, REAL
from gtracer.lab.errors import LabError, shown


@dataclass(frozen=True)
class Target:
    """A real number that a model predicts: its output is (number − mean) / deviation.

    Attributes:
        name: Of the column, where it has one.
        mean: Of the training data's.
        deviation: Likewise.
    """

    name: str
    mean: float
    deviation: float

    @classmethod
    def fitted(cls, name: str, numbers: Tensor) -> Target:
        """What suits these; refused where they are all the same."""
        mean, deviation = numbers.double().mean().item(), numbers.double().std(correction=0).item()
        if not deviation > 1e-12 * abs(mean):
            raise LabError(f"{name} has the same number {mean:g} in all training rows: there is nothing to learn")
        return cls(name, mean, deviation)

    def standardised(self, numbers: Tensor) -> Tensor:
        """As the model is to give them."""
        return ((numbers.double() - self.mean) / self.deviation).float()

    def restored(self, outputs: Tensor) -> Tensor:
        """In their own unit."""
        return outputs.double() * self.deviation + self.mean

    def described(self) -> dict[str, Any]:
        return asdict(self)


def encoded(
    given: dict[str, list[Any]], files: dict[str, Path], column: str, loss: str | None
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The labels of each part: classes by their places among the names, or real numbers, without names.

    Args:
        given: As they were read; of data that is not split, under "".
        files: That they were read from.
        column: Which held them.
        loss: As it was asked for.
    """
    where = {part: f"{file}: column {shown(column)}" for part, file in files.items()}
    first = next(iter(given))
    if first == "" and len(given[first]) < 2:
        raise LabError(f"{files[first]} has one row: two at least are needed, to train and to test")
    if (found := numbers(given[first], loss, where[first])) is not None:
        others = {part: numbers(given[part], REAL[0], where[part]) for part in given if part != first}
        return {first: found} | {part: each for part, each in others.items() if each is not None}, ()
    words = {part: [str(value) for value in values] for part, values in given.items()}
    names = sorted({name for each in words.values() for name in each})
    if len(names) < 2:
        raise LabError(f"{files[first]} has {len(names)} classes in column {column!r}, two at least are needed")
    counts = Counter(words[first])
    if first == "":
        _refuse_lonely(files[first], counts)
    elif unseen := [name for name in names if not counts[name]]:
        raise LabError(f"{files[first].parent}: class {shown(unseen[0])} has no rows for training, only others")
    places = {name: place for place, name in enumerate(names)}
    labels = {part: torch.tensor([places[name] for name in each], dtype=torch.int64) for part, each in words.items()}
    return labels, tuple(names)


def _refuse_lonely(file: Path, counts: Counter[str]) -> None:
    lonely = sorted(name for name, count in counts.items() if count < 2)
    if lonely:
        others = f", and {len(lonely) - 1} others" if len(lonely) > 1 else ""
        hint = (
            "; if they are numbers to predict: --loss mse" if all(_number(name) is not None for name in counts) else ""
        )
        raise LabError(
            f"{file}: class {shown(lonely[0])} has one example{others}: two at least are needed, to train and to test"
            f"{hint}"
        )


def numbers(values: Sequence[Any], loss: str | None, where: str) -> Tensor | None:
    """Labels as the real numbers that they are; None where they are classes.

    They are real where one has a fraction, or the loss says so.

    >>> numbers(["1", "2.5"], None, "f.csv: column 'y'"), numbers(["1", "2"], None, ""), numbers([1, 2], "mse", "")
    (tensor([1.0000, 2.5000], dtype=torch.float64), None, tensor([1., 2.], dtype=torch.float64))
    """
    if loss in CLASSES:
        return None
    found = [_number(value) for value in values]
    for row, number in enumerate(found, start=1):
        if number is None or not math.isfinite(number):
            if loss is None:
                return None
            raise LabError(
                f"{where}, row {row}: {shown(values[row - 1])} is no number, and numbers are to be predicted"
            )
    if loss not in REAL and all(number.is_integer() for number in found if number is not None):
        return None
    return torch.tensor(found, dtype=torch.float64)


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
