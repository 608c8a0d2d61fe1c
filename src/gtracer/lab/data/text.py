"""BoolQ, WiC and RTE from SuperGLUE's files, and any file of texts and labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from gtracer.lab.data import rows
from gtracer.lab.data.download import Source, ensure
from gtracer.lab.data.labels import Target, encoded
from gtracer.lab.data.rows import Row
from gtracer.lab.data.task import TEST_SHARE, Found, Split, Task, stratified
from gtracer.lab.errors import LabError, shown
from gtracer.lab.schema import STRICT, Place, Scalar, Words, problems

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


@dataclass(frozen=True)
class TextColumns:
    """Texts to classify, as they are: what makes tokens of them belongs to the model.

    Attributes:
        columns: One, or two that are read as a pair.
        label: Column with the class, where there is one.
    """

    columns: tuple[Words, ...]
    label: Words = "label"

    def read(self, path: Path) -> Found:
        """A file; or of a folder that is split, its test data."""
        source = path if rows.is_file(path) else rows.parts(path)["test"]
        found = rows.read(source)
        labelled = bool(found) and all(row.get(self.label) is not None for row in found)
        wanted = dict.fromkeys(self.columns, "") | ({self.label: ""} if labelled else {})
        checked = _checked_rows(source, found, dict.fromkeys(wanted, Scalar), wanted)
        texts = [self.texts(row) for row in checked]
        labels = [str(row[self.label]) for row in checked] if labelled else None
        return Found(texts, [f"row {number}" for number in range(1, len(texts) + 1)], labels)

    def texts(self, row: Row) -> tuple[str, ...]:
        return tuple(str(row[column]) for column in self.columns)

    def described(self) -> dict[str, Any]:
        return {"kind": "texts", "columns": list(self.columns), "label": self.label}

    @classmethod
    def of(cls, described: dict[str, Any]) -> TextColumns:
        return TypeAdapter(cls).validate_python(described)


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
    columns = tuple(column for column, kind in kinds.items() if kind is Words)
    return Task("text", len(labels), train, test, names=tuple(map(str, labels)), preprocessing=TextColumns(columns))


def local(path: Path, columns: tuple[str, ...], label: str, seed: int, loss: str | None = None) -> Task:
    """A folder with `train` and `test` (or `val`) files, or one file of which a seeded fifth is for testing."""
    sources = {"": path} if rows.is_file(path) else rows.parts(path)
    options = dict.fromkeys(columns, "--text-columns") | {label: "--label-column"}
    read = {part: _rows(source, dict.fromkeys(options, Scalar), options) for part, source in sources.items()}
    labels, names = encoded({part: [row[label] for row in found] for part, found in read.items()}, sources, label, loss)
    preprocessing = TextColumns(columns, label)
    splits = {}
    for part, found in read.items():
        ids = [f"{sources[part].name}: row {number}" for number in range(1, len(found) + 1)]
        splits[part] = Split.clean([preprocessing.texts(row) for row in found], labels[part], ids)
    if "" in splits:
        both = stratified(labels[""], TEST_SHARE, seed)
        splits = {part: splits[""].rows(chosen) for part, chosen in zip(("train", "test"), both, strict=True)}
    target = None if names else replace(Target.fitted(f"{path}: {label!r}", splits["train"].labels), name=label)
    if target is not None:
        splits = {part: each.labelled(target.standardised(each.labels)) for part, each in splits.items()}
    to = f"in {len(names)} classes" if names else f"with real numbers to predict ({label!r})"
    note = f"{path}: {len(splits['train'].labels)} texts {to}"
    train, test, held_out = splits["train"], splits["test"], splits.get("holdout")
    return Task("text", len(names), train, test, held_out, names, preprocessing, True, (note,), target)


def _split(
    path: Path, found: list[Row], texts: Callable[[Row], tuple[str, ...]], label: str, classes: dict[Any, int]
) -> Split:
    """Take out of every row its texts and its class, which may go by its name."""
    labels = []
    for number, row in enumerate(found, start=1):
        key = row[label] if row[label] in classes else str(row[label])
        if key not in classes:
            known = ", ".join(map(str, classes))
            raise LabError(f"{path}: row {number} has the unknown label {shown(row[label])}: it is none of {known}")
        labels.append(classes[key])
    ids = [f"{path.name}: row {number}" for number in range(1, len(found) + 1)]
    return Split.clean([texts(row) for row in found], torch.tensor(labels, dtype=torch.int64), ids)


def _rows(path: Path, kinds: dict[str, Any], options: dict[str, str] | None = None) -> list[Row]:
    """All of a file's rows, checked."""
    return _checked_rows(path, rows.read(path), kinds, options or {})


def _checked_rows(path: Path, found: list[Row], kinds: dict[str, Any], options: dict[str, str]) -> list[Row]:
    """Those rows, checked.

    Args:
        path: Of the file.
        found: In it.
        kinds: What each column must hold. What is null or left out is as if its column were not there.
        options: Of the command line, which choose the columns; without a name, the run has chosen it.
    """
    if options and not found:
        raise LabError(f"{path} is empty: it has no row with a text and its class")
    there = dict.fromkeys(name for row in found for name in row)
    for name, option in options.items():
        if name not in there:
            columns = shown(", ".join(there))
            hint = f"name one of {columns} with {option}" if option else f"it has {columns}"
            raise LabError(f"{path} has no column {shown(name)}: {hint}")
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
