"""Data sets from Python: MODULE:FUNCTION, which gives torch Datasets of inputs and labels."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gtracer.lab.data.streams import Items
from gtracer.lab.data.task import TEST_SHARE, Split, Task, stratified
from gtracer.lab.errors import LabError, located, one_line, shown


def is_named(name: str) -> bool:
    """Whether it is MODULE:FUNCTION."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) is not None


def function(name: str, *arguments: str) -> Callable[..., Any]:
    """The function of that name, of a module of this folder or an installed one, which is to take these arguments."""
    module, _, word = name.partition(":")
    try:
        with _here():
            found = getattr(importlib.import_module(module), word)
    except Exception as error:  # whatever the module's own lines raise
        raise LabError(f"{name} cannot be imported: {one_line(error)}") from error
    if not callable(found):
        raise LabError(f"{name} is no function, but {type(found).__name__}")
    try:
        inspect.signature(found).bind(**dict.fromkeys(arguments))
    except (TypeError, ValueError) as error:
        wanted = ", ".join(arguments) or "no arguments"
        raise LabError(f"{name} is called with {wanted}, which it does not take: {one_line(error)}") from error
    return found  # type: ignore[no-any-return]


def called(name: str, **arguments: Any) -> Any:
    """What the function of that name gives."""
    wanted = function(name, *arguments)
    try:
        return wanted(**arguments)
    except Exception as error:  # the user's own, of any class
        raise LabError(f"{name} fails: {located(error)}") from error


@contextmanager
def _here() -> Any:
    """With modules of the present folder, which a command, unlike python -m, does not look at."""
    place = str(Path.cwd())
    sys.path.insert(0, place)
    try:
        yield
    finally:
        sys.path.remove(place)


def local(name: str, seed: int) -> Task:
    """One Dataset, of which a seeded fifth is for testing; or two, to train and test; or three, the second held out."""
    given = called(name)
    sets = list(given) if isinstance(given, tuple | list) else [given]
    if not 1 <= len(sets) <= 3 or not all(hasattr(each, "__getitem__") and _has_length(each) for each in sets):
        raise LabError(f"{name} must give one, two or three torch Datasets with a length, got {shown(given)}")
    found = [_split(name, each) for each in sets]
    if len(found) == 1:
        rest, test = stratified(found[0].labels, TEST_SHARE, seed)
        found = [found[0].rows(rest), found[0].rows(test)]
    classes = 1 + max(int(split.labels.max()) for split in found)
    held_out = _loaded(found[1]) if len(found) == 3 else None
    train, test_split = _loaded(found[0]), _loaded(found[-1])
    assert not isinstance(train.inputs, list)
    shape = tuple(train.inputs.shape[1:])
    where = "read for each batch" if isinstance(train.inputs, Items) else "kept in memory"
    note = f"{name}: {len(train.labels)} training examples of shape {shape} in {classes} classes, {where}"
    kind = "image" if len(shape) == 3 else "vector"
    return Task(kind, classes, train, test_split, held_out, is_stratified=True, notes=(note,))


def _has_length(dataset: Any) -> bool:
    try:
        return len(dataset) >= 0
    except Exception:  # it has none, or its own code fails
        return False


def _split(name: str, dataset: Any) -> Split:
    if not len(dataset):
        raise LabError(f"{name} gives a Dataset without examples")
    labels = _labels(name, dataset)
    return Split.clean(Items(dataset), labels, [str(place) for place in range(len(labels))])


def _labels(name: str, dataset: Any) -> Tensor:
    """By the attribute that torchvision's have, or else item by item."""
    given: Sequence[Any] | Tensor | None = getattr(dataset, "targets", None)
    try:
        found = torch.as_tensor([dataset[i][1] for i in range(len(dataset))] if given is None else given)
    except Exception as error:  # a Dataset's own, of any class
        raise LabError(f"{name}: examples must be pairs of an input and a class: {located(error)}") from error
    if found.is_floating_point() or found.shape != (len(dataset),) or found.min() < 0:
        raise LabError(f"{name}: labels must be whole numbers from 0, one for each example, got {shown(found[:3])}")
    return found.long()


def _loaded(split: Split) -> Split:
    """In memory, where it is little."""
    assert isinstance(split.inputs, Items)
    return Split(split.inputs.loaded(), split.labels, split.truth, split.ids)
