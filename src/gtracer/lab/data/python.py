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
from torch.utils.data import IterableDataset

from gtracer.lab.data.labels import Target, numbers
from gtracer.lab.data.streams import Items
from gtracer.lab.data.task import TEST_SHARE, Split, Task, stratified
from gtracer.lab.errors import LabError, one_line, raised, shown


def is_named(name: str) -> bool:
    """Whether it is MODULE:FUNCTION."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) is not None


def function(name: str, *arguments: str) -> Callable[..., Any]:
    """The function of that name, of a module of this folder or an installed one, which is to take these arguments."""
    module, _, word = name.partition(":")
    try:
        with _here():
            found = getattr(importlib.import_module(module), word)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise LabError(f"{name} cannot be imported: {one_line(error)}") from error
    except Exception as error:  # of the module itself
        raise LabError(f"{name} cannot be imported: {module} raises {raised(error)}") from error
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
    except LabError:
        raise
    except Exception as error:  # the user's own, of any class
        raise LabError(f"{name} raises {raised(error)}") from error


@contextmanager
def _here() -> Any:
    """With modules of the present folder, which a command, unlike python -m, does not look at."""
    place = str(Path.cwd())
    sys.path.insert(0, place)
    try:
        yield
    finally:
        sys.path.remove(place)


def local(name: str, seed: int, loss: str | None = None) -> Task:
    """One Dataset, of which a seeded fifth is for testing; or two, to train and test; or three, the second held out."""
    sets = _sets(name)
    labels = [_labels(name, each) for each in sets]
    real = numbers(torch.cat(labels).tolist(), loss, f"{name}: labels")
    sizes = [len(each) for each in labels]
    found = list(torch.split(real, sizes)) if real is not None else [_classes(name, each) for each in labels]
    splits = [
        Split.clean(Items(dataset, name=name), labels, [str(place) for place in range(len(labels))])
        for dataset, labels in zip(sets, found, strict=True)
    ]
    if len(splits) == 1:
        rest, test = stratified(splits[0].labels, TEST_SHARE, seed)
        splits = [splits[0].rows(rest), splits[0].rows(test)]
    target = None if real is None else Target.fitted(f"labels of {name}", splits[0].labels)
    classes = _count(name, splits) if target is None else 0
    splits = [_loaded(name, split, target) for split in splits]
    train, test_split, held_out = splits[0], splits[-1], splits[1] if len(splits) == 3 else None
    assert not isinstance(train.inputs, list)
    shape = tuple(train.inputs.shape[1:])
    where = "read for each batch" if isinstance(train.inputs, Items) else "kept in memory"
    what = f"in {classes} classes" if target is None else "with real numbers to predict"
    note = f"{name}: {len(train.labels)} training examples of shape {shape} {what}, {where}"
    kind = "image" if len(shape) == 3 else "vector"
    return Task(kind, classes, train, test_split, held_out, is_stratified=True, notes=(note,), target=target)


def _sets(name: str) -> list[Any]:
    """What the function gives, one to three Datasets."""
    given = called(name)
    sets = list(given) if isinstance(given, tuple | list) else [given]
    if not 1 <= len(sets) <= 3 or any(isinstance(each, IterableDataset) or not _is_indexed(each) for each in sets):
        raise LabError(
            f"{name} must give one, two or three torch Datasets with a length and examples by their number (no "
            f"IterableDataset), got {shown(given)}"
        )
    if any(not len(each) for each in sets):
        raise LabError(f"{name} gives a Dataset without examples")
    return sets


def _is_indexed(dataset: Any) -> bool:
    try:
        return len(dataset) >= 0 and hasattr(dataset, "__getitem__") and not isinstance(dataset, str | dict)
    except Exception:  # it has no length, or its own code fails
        return False


def _labels(name: str, dataset: Any) -> Tensor:
    """By the attribute that torchvision's have, or else item by item."""
    given: Sequence[Any] | Tensor | None = getattr(dataset, "targets", None)
    try:
        found = torch.as_tensor([_label(dataset[i]) for i in range(len(dataset))] if given is None else given)
    except Exception as error:  # also the Dataset's own, of any class
        raise LabError(f"{name}: examples must be pairs of an input and a label: {raised(error)}") from error
    if found.shape not in ((len(dataset),), (len(dataset), 1)):
        raise LabError(f"{name}: labels must be a number for each example, got {shown(found[:3])}")
    return found.flatten()


def _label(example: Any) -> Any:
    if not isinstance(example, tuple | list) or len(example) != 2:
        raise TypeError(f"one is of type {type(example).__name__}")
    return example[1]


def _classes(name: str, found: Tensor) -> Tensor:
    if found.dtype == torch.bool:
        return found.long()
    if not found.isfinite().all() or (found != found.long()).any() or found.min() < 0:
        wrong = found[(found != found.long()) | (found < 0)][0].item()
        raise LabError(f"{name}: labels must be whole numbers from 0, or real numbers (--loss mse), got {wrong}")
    return found.long()


def _count(name: str, splits: list[Split]) -> int:
    """How many classes there are; refused where hardly any of the numbers stands for one."""
    highest, examples = max(int(split.labels.max()) for split in splits), sum(len(split.labels) for split in splits)
    if not 0 < highest < examples:
        what = (
            "all are of class 0" if not highest else f"they go up to {highest:,}, and there are {examples:,} examples"
        )
        raise LabError(f"{name}: labels must be numbers of two classes at least, from 0 without gaps: {what}")
    return highest + 1


def _loaded(name: str, split: Split, target: Target | None) -> Split:
    """In memory, where it is little."""
    assert isinstance(split.inputs, Items)
    inputs = split.inputs.loaded()
    if len(inputs.shape) < 2:
        raise LabError(f"{name}: an example must be a tensor with a dimension at least, got a number alone")
    return Split.clean(inputs, split.labels if target is None else target.standardised(split.labels), split.ids)
