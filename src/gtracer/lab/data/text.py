"""BoolQ, WiC and RTE from SuperGLUE's files, and any local csv or jsonl of texts and labels."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from gtracer.lab import files
from gtracer.lab.data.download import Source, ensure
from gtracer.lab.data.task import Split, Task, Texts
from gtracer.lab.errors import LabError

Row = dict[str, Any]
FORMATS = (".csv", ".jsonl")
SUPERGLUE = "https://dl.fbaipublicfiles.com/glue/superglue/data/v2"
# Of the files inside the archives, whose own bytes are not promised anywhere.
CHECKSUMS = {
    "BoolQ/train.jsonl": "5a0cc1d6cb971a7a177b74bde27b8355de4b0f0e4d86d0a8435ec92cfeb63ba6",
    "BoolQ/val.jsonl": "0c86a5045886e5795fe9052003873f7d94b88ed3028a33007c51d99e44fd66d9",
    "RTE/train.jsonl": "fdfb03443abe3ec0424b7fc5d1a8863361719bc061338b7a63e56b94d615f201",
    "RTE/val.jsonl": "ab990507bf5f35dc176cba7770a72bfa2c50a88ed72b8cc95cfbf9db95ab1af1",
    "WiC/train.jsonl": "ce301970aaf361ade6c1d218fe15c50b185b14a4bcb618c5785a8484a46f9943",
    "WiC/val.jsonl": "9f7207c88beba42cbc139de4c62ce05b23bffc189b3d561594b160e0c3920c0b",
}


def boolq(folder: Path) -> Task:
    """Yes/no questions about a passage."""
    return _superglue(folder, "BoolQ", lambda row: (row["question"], row["passage"]), {False: 0, True: 1})


def rte(folder: Path) -> Task:
    """Does the premise entail the hypothesis?"""
    labels = {"entailment": 0, "not_entailment": 1}
    return _superglue(folder, "RTE", lambda row: (row["premise"], row["hypothesis"]), labels)


def wic(folder: Path) -> Task:
    """Is the marked word used in the same sense in both sentences?"""

    def marked(row: Row) -> tuple[str, ...]:
        return tuple(_mark(row[f"sentence{i}"], row[f"start{i}"], row[f"end{i}"]) for i in (1, 2))

    return _superglue(folder, "WiC", marked, {False: 0, True: 1})


def _mark(sentence: str, start: int, end: int) -> str:
    """Put the word in quotation marks.

    >>> _mark("Run rogue.", 0, 3)
    '"Run" rogue.'
    """
    return f'{sentence[:start]}"{sentence[start:end]}"{sentence[end:]}'


def _superglue(folder: Path, name: str, texts: Callable[[Row], tuple[str, ...]], labels: dict[Any, int]) -> Task:
    wanted = {file: f"sha256:{CHECKSUMS[file]}" for file in (f"{name}/train.jsonl", f"{name}/val.jsonl")}
    paths = ensure(folder, list(wanted), [Source(f"{SUPERGLUE}/{name}.zip")], wanted)
    train, test = (_split(path, _rows(path), texts, "label", labels) for path in paths)
    return Task("text", len(labels), train, test)


def local(path: Path, columns: tuple[str, ...], label: str, seed: int) -> Task:
    """A folder with `train` and `test` (or `val`) files, or one file of which a seeded fifth is for testing."""
    sources = _pair(path) if path.is_dir() else [path]
    rows = [_rows(source) for source in sources]
    for source, found in zip(sources, rows, strict=True):
        if not found:
            raise LabError(f"{source} is empty: it has no row with a text and its class")
    names = sorted({str(row[label]) for found in rows for row in found if label in row})
    classes = {name: i for i, name in enumerate(names)}
    if len(classes) < 2:
        raise LabError(f"{path} has {len(classes)} classes in column {label!r}, two at least are needed")

    def texts(row: Row) -> tuple[str, ...]:
        return tuple(str(row[column]) for column in columns)

    splits = [_split(source, found, texts, label, classes, str) for source, found in zip(sources, rows, strict=True)]
    if len(splits) == 1:
        order = torch.randperm(len(rows[0]), generator=torch.Generator().manual_seed(seed))
        cut = len(order) * 4 // 5
        splits = [splits[0].rows(order[:cut]), splits[0].rows(order[cut:])]
    return Task("text", len(classes), *splits)


def _pair(folder: Path) -> list[Path]:
    """Its files for training and testing."""
    files_of = {p.stem: p for p in sorted(folder.iterdir()) if p.suffix in FORMATS}
    test_name = next((name for name in ("test", "val", "validation", "dev") if name in files_of), None)
    if "train" not in files_of or test_name is None:
        raise LabError(f"{folder} needs a train and a test (or val) file of {' or '.join(FORMATS)}")
    return [files_of["train"], files_of[test_name]]


def _split(
    path: Path,
    rows: list[Row],
    texts: Callable[[Row], tuple[str, ...]],
    label: str,
    classes: dict[Any, int],
    key: Callable[[Any], Any] = lambda value: value,
) -> Split:
    """Check every row and take out its texts and its class."""
    inputs: Texts = []
    labels = []
    for number, row in enumerate(rows, start=1):
        try:
            inputs.append(texts(row))
            labels.append(classes[key(row[label])])
        except KeyError as error:
            known = label in row and key(row[label]) not in classes
            problem = f"has the unknown label {row[label]!r}" if known else f"has no {error}"
            raise LabError(f"{path}: row {number} {problem}; it has {', '.join(row)}") from error
    return Split.clean(inputs, torch.tensor(labels, dtype=torch.int64))


def _rows(path: Path) -> list[Row]:
    """Each with the values that it has: what is null or left out is as if its column were not there."""
    try:
        text = files.read(path).decode("utf-8-sig")
        found = _csv_rows(path, text) if path.suffix == ".csv" else _json_lines(path, text)
        return [{name: value for name, value in row.items() if value is not None} for row in found]
    except (UnicodeDecodeError, csv.Error) as error:
        raise LabError(f"{path} is damaged: {error}") from error


def _csv_rows(path: Path, text: str) -> Iterable[Row]:
    reader = csv.DictReader(io.StringIO(text))
    for number, row in enumerate(reader, start=1):
        if None in row:
            raise LabError(
                f"{path}: row {number} has more values than the {len(row) - 1} columns: a text with a comma belongs in "
                "quotation marks"
            )
        yield row


def _json_lines(path: Path, text: str) -> Iterable[Row]:
    # splitlines() would also split at U+2028, which a text may hold.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise LabError(f"{path} is damaged: line {number} is not JSON ({error})") from error
            if not isinstance(row, dict):
                raise LabError(f"{path} is damaged: line {number} is not an object")
            yield row
