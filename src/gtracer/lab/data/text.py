"""BoolQ, WiC and RTE from SuperGLUE's files, and any local csv or jsonl of texts and labels."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from gtracer.lab import files
from gtracer.lab.data.download import Source, ensure
from gtracer.lab.data.task import Split, Task
from gtracer.lab.errors import LabError, one_line, shown
from gtracer.lab.schema import STRICT, Place, Scalar, Words, problems

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
    kinds = {"question": Words, "passage": Words}
    return _superglue(folder, "BoolQ", kinds, lambda row: (row["question"], row["passage"]), {False: 0, True: 1})


def rte(folder: Path) -> Task:
    """Does the premise entail the hypothesis?"""
    kinds, labels = {"premise": Words, "hypothesis": Words}, {"entailment": 0, "not_entailment": 1}
    return _superglue(folder, "RTE", kinds, lambda row: (row["premise"], row["hypothesis"]), labels)


def wic(folder: Path) -> Task:
    """Is the marked word used in the same sense in both sentences?"""

    def marked(row: Row) -> tuple[str, ...]:
        return tuple(_mark(row[f"sentence{i}"], row[f"start{i}"], row[f"end{i}"]) for i in (1, 2))

    kinds = {
        f"{name}{i}": kind for i in (1, 2) for name, kind in (("sentence", Words), ("start", Place), ("end", Place))
    }
    return _superglue(folder, "WiC", kinds, marked, {False: 0, True: 1})


def _mark(sentence: str, start: int, end: int) -> str:
    """Put the word in quotation marks.

    >>> _mark("Run rogue.", 0, 3)
    '"Run" rogue.'
    """
    return f'{sentence[:start]}"{sentence[start:end]}"{sentence[end:]}'


def _superglue(
    folder: Path, name: str, kinds: dict[str, Any], texts: Callable[[Row], tuple[str, ...]], labels: dict[Any, int]
) -> Task:
    wanted = {file: f"sha256:{CHECKSUMS[file]}" for file in (f"{name}/train.jsonl", f"{name}/val.jsonl")}
    paths = ensure(folder, list(wanted), [Source(f"{SUPERGLUE}/{name}.zip")], wanted)
    train, test = (_split(path, _rows(path, kinds | {"label": Scalar}), texts, "label", labels) for path in paths)
    return Task("text", len(labels), train, test)


def local(path: Path, columns: tuple[str, ...], label: str, seed: int) -> Task:
    """A folder with `train` and `test` (or `val`) files, or one file of which a seeded fifth is for testing."""
    sources = _pair(path) if path.is_dir() else [path]
    options = dict.fromkeys(columns, "--text-columns") | {label: "--label-column"}
    rows = [_rows(source, dict.fromkeys(options, Scalar), options) for source in sources]
    names = sorted({str(row[label]) for found in rows for row in found})
    classes = {name: i for i, name in enumerate(names)}
    if len(classes) < 2:
        raise LabError(f"{path} has {len(classes)} classes in column {label!r}, two at least are needed")

    def texts(row: Row) -> tuple[str, ...]:
        return tuple(str(row[column]) for column in columns)

    splits = [_split(source, found, texts, label, classes) for source, found in zip(sources, rows, strict=True)]
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
    path: Path, rows: list[Row], texts: Callable[[Row], tuple[str, ...]], label: str, classes: dict[Any, int]
) -> Split:
    """Take out of every row its texts and its class, which may go by its name."""
    labels = []
    for number, row in enumerate(rows, start=1):
        key = row[label] if row[label] in classes else str(row[label])
        if key not in classes:
            known = ", ".join(map(str, classes))
            raise LabError(f"{path}: row {number} has the unknown label {shown(row[label])}: it is none of {known}")
        labels.append(classes[key])
    return Split.clean([texts(row) for row in rows], torch.tensor(labels, dtype=torch.int64))


def _rows(path: Path, kinds: dict[str, Any], options: dict[str, str] | None = None) -> list[Row]:
    """All of them, checked.

    Args:
        path: Of the file.
        kinds: What each column must hold. What is null or left out is as if its column were not there.
        options: Of the command line, which choose the columns.
    """
    try:
        text = files.read(path).decode("utf-8-sig")
        found = list(_csv_rows(path, text) if path.suffix == ".csv" else _json_lines(path, text))
    except (UnicodeDecodeError, csv.Error) as error:
        raise LabError(f"{path} is damaged: {one_line(error)}") from error
    if options and not found:
        raise LabError(f"{path} is empty: it has no row with a text and its class")
    there = dict.fromkeys(name for row in found for name in row)
    for name, option in (options or {}).items():
        if name not in there:
            columns = shown(", ".join(there))
            raise LabError(f"{path} has no column {shown(name)}: name one of {columns} with {option}")
    kind = TypedDict("Row", kinds)  # type: ignore[misc]
    kind.__pydantic_config__ = STRICT | {"extra": "ignore"}  # type: ignore[attr-defined]
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    return [_checked(path, number, row, adapter) for number, row in enumerate(found, start=1)]


def _checked(path: Path, number: int, row: Row, adapter: TypeAdapter[Any]) -> Row:
    try:
        checked: Row = adapter.validate_python({name: value for name, value in row.items() if value is not None})
        return checked
    except ValidationError as error:
        missing = [shown(e["loc"][0]) for e in error.errors() if e["type"] == "missing"]
        there = [name for name, value in row.items() if value is not None]
        problem = f"has no {missing[0]}; it has {', '.join(there)}" if missing else f"is wrong: {problems(error)}"
        raise LabError(f"{path}: row {number} {problem}") from error


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
            except (ValueError, RecursionError) as error:
                raise LabError(f"{path} is damaged: line {number} is not JSON ({one_line(error)})") from error
            if not isinstance(row, dict):
                raise LabError(f"{path} is damaged: line {number} is not an object")
            yield row
