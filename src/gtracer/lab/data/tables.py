"""Tables of numbers and categories, with values that may be missing: scikit-learn's preprocessing."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from pydantic import TypeAdapter
from torch import Tensor

from gtracer.lab.data import rows
from gtracer.lab.data.task import TEST_SHARE, Found, Split, Task, stratified
from gtracer.lab.errors import LabError, one_line, shown
from gtracer.lab.schema import Words

MOST = 100  # values of a category that have an input each; those that are rarer share one


@dataclass(frozen=True)
class Columns:
    """Numbers and categories as one vector, by a ColumnTransformer that was fitted on training data.

    Attributes:
        numbers: Columns of them: missing ones are the median and are marked, all are standardised.
        categories: Columns of them: an input for each value, also for a missing one; none for a value never seen.
        label: Column with the class.
        transformer: scikit-learn's.
    """

    numbers: tuple[Words, ...]
    categories: tuple[Words, ...]
    label: Words
    transformer: Any

    def __call__(self, frame: Any, path: Path) -> Tensor:
        for name in (*self.numbers, *self.categories):
            if name not in frame:
                has = shown(", ".join(map(str, frame)))
                raise LabError(f"{path} has no column {shown(name)}, which the model was trained with: it has {has}")
        for name in self.numbers:
            _refuse_words(frame[name], path)
        try:
            made = self.transformer.transform(_as_wanted(frame, self.numbers, self.categories))
        except (ValueError, TypeError, AttributeError) as error:  # of another model, or no transformer at all
            raise LabError(f"{path} cannot be prepared as for the model: {one_line(error)}") from error
        return torch.tensor(made, dtype=torch.float32)

    def read(self, path: Path) -> Found:
        """A file; or of a folder that is split, its test data."""
        source = path if rows.is_file(path) else rows.parts(path)["test"]
        frame = _frame(source)
        labelled = self.label in frame and not frame[self.label].isna().any()
        labels = _labels(frame[self.label]) if labelled else None
        return Found(self(frame, source), [f"row {number}" for number in range(1, len(frame) + 1)], labels)

    def described(self) -> dict[str, Any]:
        from skops import io

        packed = base64.b64encode(io.dumps(self.transformer)).decode()
        columns = {"numbers": list(self.numbers), "categories": list(self.categories), "label": self.label}
        return {"kind": "columns", **columns, "skops": packed}

    @classmethod
    def of(cls, described: dict[str, Any]) -> Columns:
        """Unlike a pickle what skops reads runs no code: it makes scikit-learn's and numpy's own objects alone."""
        _required("skops")
        from skops import io

        made = io.loads(base64.b64decode(described["skops"]), trusted=["numpy.dtype"])
        return TypeAdapter(cls).validate_python(described | {"transformer": made})


def local(path: Path, label: str, drop: tuple[str, ...], seed: int) -> Task:
    """A folder with `train` and `test` (or `val`) files, or one file of which a seeded fifth is for testing."""
    sources = {"": path} if rows.is_file(path) else rows.parts(path)
    frames = {part: _frame(source) for part, source in sources.items()}
    for part, frame in frames.items():
        _check(sources[part], frame, label, drop)
    kinds = _kinds(frames["" if "" in frames else "train"].drop(columns=[label, *drop]), path, label)
    given = {part: _labels(frame[label]) for part, frame in frames.items()}
    names = sorted({name for found in given.values() for name in found})
    if len(names) < 2:
        raise LabError(f"{path} has {len(names)} classes in column {label!r}, two at least are needed")
    places = {name: place for place, name in enumerate(names)}
    labels = {part: torch.tensor([places[name] for name in found]) for part, found in given.items()}
    ids = {part: [f"{sources[part].name}: row {n}" for n in range(1, len(found) + 1)] for part, found in given.items()}
    if "" in frames:
        _refuse_lonely(path, given[""])
        for part, chosen in zip(("train", "test"), stratified(labels[""], TEST_SHARE, seed), strict=True):
            frames[part], labels[part] = frames[""].iloc[chosen.tolist()], labels[""][chosen]
            ids[part] = [ids[""][i] for i in chosen.tolist()]
        del frames[""]
    elif unseen := sorted(set().union(*given.values()) - set(given["train"])):
        raise LabError(f"{path}: class {shown(unseen[0])} has no rows for training, only others")
    fitted = _fitted(frames["train"], kinds, label)
    parts = {
        part: Split.clean(fitted(frame, sources.get(part, path)), labels[part], ids[part])
        for part, frame in frames.items()
    }
    train, test, held_out = parts["train"], parts["test"], parts.get("holdout")
    return Task(
        "vector", len(names), train, test, held_out, tuple(names), fitted, is_stratified=True, notes=kinds.notes
    )


@dataclass(frozen=True)
class _Kinds:
    """Which columns hold what; and in words, also which ones are left out."""

    numbers: tuple[str, ...]
    categories: tuple[str, ...]
    notes: tuple[str, ...]


def _kinds(frame: Any, path: Path, label: str) -> _Kinds:
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    constant = [name for name in frame if frame[name].nunique(dropna=False) < 2]
    rest = [name for name in frame if name not in constant]
    numbers = tuple(name for name in rest if is_numeric_dtype(frame[name]) and not is_bool_dtype(frame[name]))
    words = [name for name in rest if name not in numbers]
    unique = [name for name in words if frame[name].nunique() == frame[name].count()]
    categories = tuple(name for name in words if name not in unique)
    if not numbers and not categories:
        raise LabError(
            f"{path} has no column 'text': name one of {shown(', '.join([*map(str, frame), label]))} with "
            "--text-columns; for a table it has no column with numbers, or with words that come more than once"
        )
    notes = [f"{path}: a table, {len(numbers)} columns of numbers and {len(categories)} of categories, to {label!r}"]
    notes += [f"{path}: column {shown(name)} has one value alone and is left out" for name in constant]
    hint = "is left out (texts: --text-columns)"
    notes += [f"{path}: column {shown(name)} has other words in each row and {hint}" for name in unique]
    return _Kinds(numbers, categories, tuple(notes))


def _fitted(frame: Any, kinds: _Kinds, label: str) -> Columns:
    """What suits these rows."""
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    numbers, categories = kinds.numbers, kinds.categories
    standard = make_pipeline(SimpleImputer(strategy="median", add_indicator=True), StandardScaler())
    one_hot = OneHotEncoder(handle_unknown="ignore", max_categories=MOST, sparse_output=False)
    transformer = ColumnTransformer([("numbers", standard, list(numbers)), ("categories", one_hot, list(categories))])
    transformer.fit(_as_wanted(frame, numbers, categories))
    return Columns(numbers, categories, label, transformer)


def _as_wanted(frame: Any, numbers: tuple[str, ...], categories: tuple[str, ...]) -> Any:
    """Numbers as floats, which is what has a NaN; categories as words, a missing one as none."""
    import pandas

    columns = {name: frame[name].astype("float32") for name in numbers}
    columns |= {name: frame[name].astype(object).where(frame[name].notna(), "").map(str) for name in categories}
    return pandas.DataFrame(columns, index=frame.index)


def _frame(path: Path) -> Any:
    """A file's rows."""
    _required("pandas")
    from pandas.api.types import is_numeric_dtype

    frame = _read(path)
    for name, column in frame.items():
        if is_numeric_dtype(column) and _is_infinite(column):
            raise LabError(f"{path}: column {shown(name)} holds infinity, or more than 1e38: leave such cells empty")
        nested = [value for value in column if isinstance(value, list | dict)] if column.dtype == object else []
        if nested:
            raise LabError(f"{path}: column {shown(name)} holds {shown(nested[0])}, which is no number and no word")
    return frame


def _is_infinite(column: Any) -> bool:
    """As numbers of 32 bits, which the model takes."""
    with numpy.errstate(over="ignore"):
        return bool(numpy.isinf(column.astype("float32")).any())


def _read(path: Path) -> Any:
    import pandas

    if path.suffix != ".csv":
        return pandas.DataFrame(rows.read(path))
    if not path.is_file():
        rows.read(path)  # says why
    try:
        return pandas.read_csv(path, encoding="utf-8-sig", skipinitialspace=True, low_memory=False)
    except (ValueError, OSError) as error:  # pandas' own are ValueErrors
        raise LabError(f"{path} is damaged: {one_line(error)}") from error


def _check(path: Path, frame: Any, label: str, drop: tuple[str, ...]) -> None:
    for name, option in {label: "--label-column", **dict.fromkeys(drop, "--drop")}.items():
        if name not in frame:
            columns = shown(", ".join(map(str, frame)))
            raise LabError(f"{path} has no column {shown(name)}: name one of {columns} with {option}")
    if not len(frame):
        raise LabError(f"{path} is empty: it has no row with a label")
    missing = numpy.flatnonzero(frame[label].isna())
    if len(missing):
        raise LabError(f"{path}: {len(missing)} rows have no label, such as row {missing[0] + 1}: remove them")
    if frame[label].dtype.kind == "f" and (frame[label] % 1 != 0).any():
        number = frame[label][frame[label] % 1 != 0].iloc[0]
        raise LabError(f"{path}: column {shown(label)} holds real numbers, such as {number:g}, and no classes")


def _labels(column: Any) -> list[str]:
    """As text: whole numbers without a point, also where pandas took them for real ones."""
    return [str(int(v) if isinstance(v, float) and v.is_integer() else v) for v in column.tolist()]


def _refuse_lonely(path: Path, labels: list[str]) -> None:
    names, counts = numpy.unique(labels, return_counts=True)
    lonely = names[counts < 2].tolist()
    if lonely:
        others = f", and {len(lonely) - 1} others" if len(lonely) > 1 else ""
        raise LabError(
            f"{path}: class {shown(lonely[0])} has one example{others}: two at least are needed, to train and to test"
        )


def _refuse_words(column: Any, path: Path) -> None:
    """Where numbers are wanted. Python's own are what JSON and parquet bring with missing ones among them."""
    import pandas

    wrong = column[pandas.to_numeric(column, errors="coerce").isna() & column.notna()]
    if len(wrong):
        raise LabError(
            f"{path}: column {shown(column.name)} holds {shown(wrong.iloc[0])}, where the model was trained on numbers"
        )


def _required(package: str) -> None:
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise LabError(f"a table needs {package}: pip install 'gtracer-optim[tables]'")
