"""Tasks: what is to be learnt. `load` gives the data of a configuration, with its label noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gtracer.lab import files
from gtracer.lab.config import REAL, Config
from gtracer.lab.data import digits, pictures, python, rows, tables, text, vision
from gtracer.lab.data.label_noise import mislabelled
from gtracer.lab.data.task import Preprocessing, Split, Task
from gtracer.lab.errors import LabError, unknown

__all__ = ["TASKS", "Split", "Task", "check", "is_text", "kind", "load", "preprocessing"]

TASKS: dict[str, Callable[[Config], Task]] = {
    "digits": lambda config: digits.load(config.seed),
    "fashion-mnist": lambda config: vision.fashion_mnist(folder(config)),
    "cifar10": lambda config: vision.cifar10(folder(config)),
    "cifar100": lambda config: vision.cifar100(folder(config)),
    "boolq": lambda config: text.boolq(folder(config)),
    "wic": lambda config: text.wic(folder(config)),
    "rte": lambda config: text.rte(folder(config)),
}
TIMM = "timm/"  # before a name of theirs
TEXTS = ("boolq", "wic", "rte")
# The user's own, by what it is found to be.
OWN: dict[str, Callable[[Config], Task]] = {
    "text": lambda config: text.local(
        files.expanded(config.task),
        tuple(name.strip() for name in config.text_columns.split(",")),
        config.label_column,
        config.seed,
        config.loss,
    ),
    "image": lambda config: pictures.local(
        files.expanded(config.task), config.image_size, config.seed, _as_trained(config)
    ),
    "table": lambda config: tables.local(
        files.expanded(config.task),
        config.label_column,
        tuple(name.strip() for name in config.drop.split(",")) if config.drop else (),
        config.seed,
        config.loss,
    ),
    "python": lambda config: python.local(config.task, config.seed, config.loss),
}


def _as_trained(config: Config) -> pictures.Pictures | None:
    """The size and normalisation that a model of timm's was trained with; None where it begins anew."""
    name = config.model or ""
    if not name.startswith(TIMM) or not (config.pretrained or config.weights is not None):
        return None
    try:
        from timm import get_pretrained_cfg
    except Exception:  # whoever builds the model says why
        return pictures.Pictures.of_imagenet()
    known = get_pretrained_cfg(name.removeprefix(TIMM))
    if known is None or len(known.mean) != 3:
        return pictures.Pictures.of_imagenet()
    mean, deviation = (tuple(255 * share for share in each) for each in (known.mean, known.std))
    return pictures.Pictures(known.input_size[1:], mean, deviation)


def kind(name: str, text_columns: str = Config.text_columns) -> str:
    """What there is to learn from: "vector", "image", "text", "table", or "python", which may be anything.

    A file with the columns that are to be read as texts holds texts; any other is a table, if none was named.
    """
    if name in TASKS:
        return "text" if name in TEXTS else "vector" if name == "digits" else "image"
    path = files.expanded(name)
    if not files.exists(path):
        return "python" if python.is_named(name) else "text"
    if path.is_dir() and not rows.is_file(path) and pictures.are_in(path):
        return "image"
    if path.is_dir() and not rows.is_file(path) and any(map(pictures.is_picture, path.iterdir())):
        raise LabError(f"{path} holds images, but in no folders: they belong into one for each class")
    source = path if path.is_file() or rows.is_file(path) else rows.parts(path)["train"]
    if text_columns != Config.text_columns or not rows.is_file(source):
        return "text"
    found = rows.columns(source)
    return "text" if Config.text_columns in found or not found else "table"


def is_text(name: str, text_columns: str = Config.text_columns) -> bool:
    """Whether the task is one of texts, for which an encoder is fine-tuned."""
    return kind(name, text_columns) == "text"


def folder(config: Config) -> Path:
    """Where the task's files are, or are to be downloaded to."""
    return files.expanded(config.data) if config.data else Path.home() / ".cache" / "gtracer"


def check(name: str) -> None:
    """Refuse what is neither a task's name, nor MODULE:FUNCTION, nor a file or folder."""
    if name in TASKS:
        return
    path = files.expanded(name)
    there = files.exists(path)
    if not there and (rows.is_one_of(path, rows.FORMATS) or "/" in name):
        raise LabError(f"cannot read {name}: there is no such file or folder of texts, images or tables")
    if not there and python.is_named(name):
        python.function(name)
    elif not there or not (rows.is_one_of(path, rows.FORMATS) or files.is_folder(path)):
        nowhere = "" if there else "; there is no file or folder of that name"
        raise LabError(f"{unknown('task', name, TASKS)}{nowhere}")


def load(config: Config) -> Task:
    """The task's data, or a share of it; a seeded share of the training labels is noisy, of the examples held out."""
    check(config.task)
    task = (TASKS.get(config.task) or OWN[kind(config.task, config.text_columns)])(config)
    for name, split in (("training", task.train), ("test", task.test)):
        if not len(split.labels):
            raise LabError(f"task {config.task!r} has an empty {name} split")
    _check_loss(config, task)
    if config.train_share < 1:
        task = task.narrowed(config.train_share, config.seed)
    if config.task not in TASKS:
        more = f"; {config.label_noise:.0%} of those to train on are changed" if config.label_noise else ""
        noted = f"labels are taken as they are, and may be wrong: results are against them{more}"
        task = replace(task, notes=(*task.notes, noted))
    if config.label_noise:
        task = task.with_labels(mislabelled(task.train.labels, config.label_noise, task.classes, config.seed))
    return task.holding_out(config.holdout, config.seed) if config.holdout and task.holdout is None else task


def _check_loss(config: Config, task: Task) -> None:
    """Refuse what is for labels of another kind."""
    if task.target is None:
        if config.loss in REAL:
            raise LabError(
                f"loss = {config.loss!r} is for real numbers, task {config.task!r} has {task.classes} classes"
            )
        return
    for name in ("label_noise", "label_smoothing", "class_weights"):
        if value := getattr(config, name):
            raise LabError(
                f"{name} = {value!r} is for classes, the labels here are real numbers ({task.target.name}); classes "
                "nevertheless: --loss cross-entropy"
            )
    for name in ("curvature", "average"):
        if (value := getattr(config, name)) in ("monte-carlo-fisher", "gauss-newton"):
            raise LabError(f"{name} = {value!r} is of the cross-entropy, the labels here are real numbers")


def preprocessing(described: dict[str, Any]) -> Preprocessing:
    """One that was fitted before, from its `described()`."""
    kinds: dict[str, Callable[[dict[str, Any]], Preprocessing]] = {
        "pictures": pictures.Pictures.of,
        "texts": text.TextColumns.of,
        "columns": tables.Columns.of,
    }
    return kinds[described["kind"]](described)
