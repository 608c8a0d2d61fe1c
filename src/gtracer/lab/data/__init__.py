"""Tasks: what is to be learnt. `load` gives the data of a configuration, with its label noise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gtracer.lab import files
from gtracer.lab.config import Config
from gtracer.lab.data import digits, pictures, rows, text, vision
from gtracer.lab.data.label_noise import mislabelled
from gtracer.lab.data.task import Preprocessing, Split, Task
from gtracer.lab.errors import LabError, unknown

__all__ = ["TASKS", "Split", "Task", "check", "is_text", "load", "preprocessing"]

TASKS: dict[str, Callable[[Config], Task]] = {
    "digits": lambda config: digits.load(config.seed),
    "fashion-mnist": lambda config: vision.fashion_mnist(folder(config)),
    "cifar10": lambda config: vision.cifar10(folder(config)),
    "cifar100": lambda config: vision.cifar100(folder(config)),
    "boolq": lambda config: text.boolq(folder(config)),
    "wic": lambda config: text.wic(folder(config)),
    "rte": lambda config: text.rte(folder(config)),
}

TEXTS = ("boolq", "wic", "rte")


def is_text(name: str) -> bool:
    """Whether the task is one of texts, for which an encoder is fine-tuned; everything else is learnt from nothing."""
    return name in TEXTS or name not in TASKS


def folder(config: Config) -> Path:
    """Where the task's files are, or are to be downloaded to."""
    return files.expanded(config.data) if config.data else Path.home() / ".cache" / "gtracer"


def check(name: str) -> None:
    """Refuse what is neither a task's name nor a file or folder of texts."""
    if name in TASKS:
        return
    path = files.expanded(name)
    there = files.exists(path)
    if not there and (path.suffix in rows.FORMATS or "/" in name):
        raise LabError(f"cannot read {name}: there is no such file or folder of texts")
    if not there or (path.suffix not in rows.FORMATS and not path.is_dir()):
        raise unknown("task", name, TASKS)


def load(config: Config) -> Task:
    """The task's data, or a share of it; a seeded share of the training labels is wrong, of the examples held out."""
    check(config.task)
    if config.task in TASKS:
        task = TASKS[config.task](config)
    else:
        columns = tuple(config.text_columns.split(","))
        task = text.local(files.expanded(config.task), columns, config.label_column, config.seed)
    for name, split in (("training", task.train), ("test", task.test)):
        if not len(split.labels):
            raise LabError(f"task {config.task!r} has an empty {name} split")
    if config.train_share < 1:
        task = task.narrowed(config.train_share, config.seed)
    task = task.with_labels(mislabelled(task.train.labels, config.label_noise, task.classes, config.seed))
    return task.holding_out(config.holdout, config.seed) if config.holdout else task


def preprocessing(described: dict[str, Any]) -> Preprocessing:
    """One that was fitted before, from its `described()`."""
    kinds: dict[str, Callable[[dict[str, Any]], Preprocessing]] = {
        "pictures": pictures.Pictures.of,
        "texts": text.TextColumns.of,
    }
    return kinds[described["kind"]](described)
