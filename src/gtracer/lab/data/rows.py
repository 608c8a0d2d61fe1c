"""Rows of files: csv, jsonl, parquet, or a data set that Hugging Face's `datasets` has saved."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gtracer.lab import files
from gtracer.lab.errors import LabError, one_line, shown

Row = dict[str, Any]
SEPARATED = (".csv", ".tsv")
FORMATS = (*SEPARATED, ".jsonl", ".parquet")
SAVED = "state.json"  # in the folder of Hugging Face's, one for each split
# What a split goes by; of several names the first that is there.
TRAIN, HELD_OUT, TEST = ("train", "training"), ("val", "valid", "validation", "dev"), ("test",)


def is_file(path: Path) -> bool:
    """Whether it is one that `read` takes, by its name, or by what lies in its folder."""
    return is_one_of(path, FORMATS) or (path / SAVED).is_file()


def is_one_of(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Whether its name ends so, in capitals or not."""
    return path.suffix.lower() in suffixes


def parts(folder: Path) -> dict[str, Path]:
    """The splits of a folder: `train` and `test`, and `holdout` where there is a third.

    Validation data stands in for test data where there is none.
    """
    found = parts_of({p.stem if p.is_file() else p.name: p for p in sorted(folder.iterdir()) if is_file(p)})
    if not found:
        raise LabError(f"{folder} needs a train and a test (or val) file of {', '.join(FORMATS)}")
    return found


def parts_of(there: dict[str, Path]) -> dict[str, Path]:
    """Of files or folders by their names, in capitals or not, those that are splits; none, where there are not two."""
    there = {name.lower(): path for name, path in there.items()}
    train, held_out, test = (
        next((there[name] for name in names if name in there), None) for names in (TRAIN, HELD_OUT, TEST)
    )
    if train is None or not (test or held_out):
        return {}
    found = {"train": train, "test": test or held_out, "holdout": held_out if test else None}
    return {name: path for name, path in found.items() if path is not None}


def columns(path: Path) -> list[str]:
    """The names of a file's columns."""
    if is_one_of(path, SEPARATED):
        return header(path)[0]
    if is_one_of(path, (".parquet",)):
        return list(of_arrow(path, lambda arrow: arrow.parquet.read_schema(path).names))
    return list(dict.fromkeys(name for row in read(path) for name in row))


def header(path: Path) -> tuple[list[str], str]:
    """The names of a csv file's columns, refused where one stands twice; and what separates them.

    That is comma, semicolon, tab or bar: what is there most often, not within quotation marks.
    """
    text = _text(path)
    first = text.partition("\n")[0]
    bare = re.sub('"[^"]*"', "", first)
    separator = max(",;\t|", key=bare.count)
    with _reading(path):
        found = next(csv.reader(io.StringIO(text if first.count('"') % 2 else first), delimiter=separator), [])
    names = [name.strip() for name in found]
    if twice := next((name for name in names if name and names.count(name) > 1), None):
        raise LabError(f"{path} has {names.count(twice)} columns of the name {shown(twice)}: rename them")
    return names, separator


def read(path: Path) -> list[Row]:
    """All rows. What is null or left out is None, or not there."""
    if is_one_of(path, (".parquet",)):
        return list(of_arrow(path, lambda arrow: arrow.parquet.read_table(path).to_pylist()))
    if (path / SAVED).is_file():
        return _saved(path)
    text = _text(path)
    with _reading(path):
        return list(_csv_rows(path, text) if is_one_of(path, SEPARATED) else _json_lines(path, text))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """With texts of any length in a csv file; what is wrong with it is said in a line."""
    limit = csv.field_size_limit(2**31 - 1)
    try:
        yield
    except csv.Error as error:
        raise LabError(f"{path} is damaged: {one_line(error)}") from error
    finally:
        csv.field_size_limit(limit)


def _text(path: Path) -> str:
    try:
        return files.read(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise LabError(f"{path} is damaged or not UTF-8: {one_line(error)}: save it as UTF-8") from error


def of_arrow(path: Path, get: Any) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise LabError(f"{path} needs {error.name}: pip install 'gtracer-optim[tables]'") from error
    try:
        return get(pyarrow)
    except (OSError, pyarrow.ArrowException) as error:
        raise LabError(f"{path} is damaged: {one_line(error)}") from error


def _saved(folder: Path) -> list[Row]:
    """Of a data set in the layout of `Dataset.save_to_disk`; classes by their names, where it has some."""
    try:
        names = [each["filename"] for each in json.loads(files.read(folder / SAVED))["_data_files"]]
        info = json.loads(files.read(folder / "dataset_info.json"))
        kinds = {name: kind["names"] for name, kind in info["features"].items() if "names" in kind}
    except (ValueError, KeyError, TypeError) as error:
        raise LabError(f"{folder} is damaged: {one_line(error)}") from error

    def rows(arrow: Any) -> Iterator[Row]:
        for name in names:
            with arrow.memory_map(str(folder / name)) as file:
                yield from arrow.ipc.open_stream(file).read_all().to_pylist()

    found = of_arrow(folder, lambda arrow: list(rows(arrow)))
    return [{k: kinds[k][v] if k in kinds and v is not None else v for k, v in row.items()} for row in found]


def _csv_rows(path: Path, text: str) -> Iterable[Row]:
    names, separator = header(path)
    reader = csv.DictReader(io.StringIO(text, newline=""), names, delimiter=separator)
    next(reader, None)  # the header itself
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
                if "\\u" in line:  # halves of a character, which JSON can hold, are no text
                    json.dumps(row, ensure_ascii=False).encode()
            except (ValueError, RecursionError) as error:
                raise LabError(f"{path} is damaged: line {number} is not JSON ({one_line(error)})") from error
            if not isinstance(row, dict):
                raise LabError(f"{path} is damaged: line {number} is not an object")
            yield row
