"""Tables of numbers and categories, with values that may be missing: scikit-learn's preprocessing."""

from __future__ import annotations

import base64
import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from pydantic import TypeAdapter
from torch import Tensor

from gtracer.lab import files
from gtracer.lab.data import rows
from gtracer.lab.data.labels import Target, encoded
from gtracer.lab.data.task import TEST_SHARE, Found, Split, Task, stratified
from gtracer.lab.errors import LabError, one_line, shown
from gtracer.lab.schema import Words

LARGEST = 1e100  # whose square is a number too
WORDS = 0.1  # share of a column of numbers that may be words, which count as missing
COUNTER = 10  # rows, from which on whole numbers without a gap only count them
DATE = r"\d{4}-\d{2}-\d{2}(?:$|[T ]\d{2}:\d{2})"
DIFFERENT = 0.8  # share of a column's rows
MOST = 100  # values of a category that have an input each; those that are rarer share one


@dataclass(frozen=True)
class Columns:
    """Numbers and categories as one vector, by a ColumnTransformer that was fitted on training data.

    Attributes:
        numbers: Columns of them: missing ones are the median and are marked, all are standardised.
        categories: Columns of them: an input for each value, also for a missing one; none for a value never seen.
        label: Column with the class, or the number to predict.
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
        if not len(frame):
            return torch.zeros(0, 0)
        try:
            made = self.transformer.transform(_as_wanted(frame, self.numbers, self.categories, path))
        except (ValueError, TypeError, AttributeError) as error:  # of another model, or no transformer at all
            raise LabError(f"{path} cannot be prepared as for the model: {one_line(error)}") from error
        return torch.tensor(made, dtype=torch.float32)

    def read(self, path: Path) -> Found:
        """A file; or of a folder that is split, its test data."""
        source = path if rows.is_file(path) else rows.parts(path)["test"]
        frame, _ = _frame(source, self.label)
        labelled = self.label in frame and not frame[self.label].isna().any()
        labels = _names(frame[self.label]) if labelled else None
        return Found(self(frame, source), [f"row {number}" for number in range(1, len(frame) + 1)], labels)

    def described(self) -> dict[str, Any]:
        from skops import io as skops

        packed = base64.b64encode(skops.dumps(self.transformer)).decode()
        columns = {"numbers": list(self.numbers), "categories": list(self.categories), "label": self.label}
        return {"kind": "columns", **columns, "skops": packed}

    @classmethod
    def of(cls, described: dict[str, Any]) -> Columns:
        """Unlike a pickle what skops reads runs no code: it makes scikit-learn's and numpy's own objects alone."""
        _required("skops")
        from skops import io as skops

        made = skops.loads(base64.b64decode(described["skops"]), trusted=["numpy.dtype"])
        return TypeAdapter(cls).validate_python(described | {"transformer": made})


def local(path: Path, label: str, drop: tuple[str, ...], seed: int, loss: str | None = None) -> Task:
    """A folder with `train` and `test` (or `val`) files, or one file of which a seeded fifth is for testing."""
    sources = {"": path} if rows.is_file(path) else rows.parts(path)
    read = {part: _frame(source, label) for part, source in sources.items()}
    frames = {part: frame for part, (frame, _) in read.items()}
    for part, frame in frames.items():
        _check(sources[part], frame, label, drop)
    first = next(iter(frames))
    labels, names = encoded({part: _names(frame[label]) for part, frame in frames.items()}, sources, label, loss)
    kinds = _kinds(frames[first].drop(columns=[label, *drop]), path, label)
    ids = {part: [f"{sources[part].name}: row {n}" for n in range(1, len(found) + 1)] for part, found in frames.items()}
    if "" in frames:
        for part, chosen in zip(("train", "test"), stratified(labels[""], TEST_SHARE, seed), strict=True):
            frames[part], labels[part] = frames[""].iloc[chosen.tolist()], labels[""][chosen]
            ids[part] = [ids[""][i] for i in chosen.tolist()]
        del frames[""]
    target = None if names else replace(Target.fitted(f"{path}: {label!r}", labels["train"]), name=label)
    fitted = _fitted(frames["train"], kinds, label, path)

    if target is not None:
        labels = {part: target.standardised(found) for part, found in labels.items()}
    parts = {
        part: Split.clean(fitted(frame, sources.get(part, path)), labels[part], ids[part])
        for part, frame in frames.items()
    }
    notes = (*kinds.notes, *read[first][1])
    train, test, held_out = parts["train"], parts["test"], parts.get("holdout")
    return Task("vector", len(names), train, test, held_out, names, fitted, True, notes, target)


@dataclass(frozen=True)
class _Kinds:
    """Which columns hold what; and in words, also which ones are left out."""

    numbers: tuple[str, ...]
    categories: tuple[str, ...]
    notes: tuple[str, ...]


def _kinds(frame: Any, path: Path, label: str) -> _Kinds:
    nested = [name for name in frame if not _is_plain(frame[name])]
    rest = [name for name in frame if name not in nested]
    constant = [name for name in rest if frame[name].nunique(dropna=False) < 2]
    rest = [name for name in rest if name not in constant]
    counters = [name for name in rest if _only_counts(frame[name])]
    numeric = tuple(name for name in rest if _is_number(frame[name]) and name not in counters)
    words = [name for name in rest if name not in numeric and name not in counters]
    unique = [name for name in words if frame[name].nunique() == frame[name].count()]
    categories = tuple(name for name in words if name not in unique)
    if not numeric and not categories:
        raise LabError(
            f"{path} has no column 'text': name one of {shown(', '.join([*map(str, frame), label]))} with "
            "--text-columns; for a table it has no column with numbers (that do more than count the rows), or with "
            "words that come more than once"
        )
    notes = [f"{path}: a table, {len(numeric)} columns of numbers and {len(categories)} of categories, to {label!r}"]
    if texts := [name for name in categories if _is_like_texts(frame[name])]:
        notes.append(f"{path}: {_columns(texts)} other words in most rows; texts are named with --text-columns")
    left = {
        "one value alone": constant,
        "other words in each row (texts: --text-columns)": unique,
        "the numbers of the rows": counters,
        "lists or mappings": nested,
    }
    for what, names in left.items():
        if names:
            notes.append(f"{path}: {_columns(names)} {what} and {'is' if len(names) == 1 else 'are'} left out")
    return _Kinds(numeric, categories, tuple(notes))


def _is_like_texts(column: Any) -> bool:
    """Whether most rows have words of their own, and several: a category would come more often."""
    there = column.dropna().astype(str)
    return bool(column.nunique() > DIFFERENT * len(there) and there.str.contains(r"\S\s+\S").mean() > DIFFERENT)


def _columns(names: Sequence[str]) -> str:
    """As they are said.

    >>> _columns(["a"]), _columns(list("abc")), _columns(list("abcde"))
    ("column 'a' has", "columns 'a', 'b', 'c' have", "columns 'a', 'b', 'c' and 2 others have")
    """
    some = ", ".join(map(shown, names[:3])) + (f" and {len(names) - 3} others" if len(names) > 3 else "")
    return f"column {some} has" if len(names) == 1 else f"columns {some} have"


def _is_number(column: Any) -> bool:
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    return bool(is_numeric_dtype(column) and not is_bool_dtype(column))


def _is_plain(column: Any) -> bool:
    """Whether its values can be told apart as values: lists cannot."""
    if column.dtype != object:
        return True
    try:
        hash(tuple(column.dropna().tolist()))
    except TypeError:
        return False
    return True


def _only_counts(column: Any) -> bool:
    """Whether it is the rows' own number, in whatever order: nothing to learn from, and all there is to memorise."""
    if column.dtype.kind not in "iu" or len(column) < COUNTER:
        return False
    return bool(column.is_unique and column.max() - column.min() == len(column) - 1)


def _fitted(frame: Any, kinds: _Kinds, label: str, path: Path) -> Columns:
    """What suits these rows."""
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    numeric, categories = kinds.numbers, kinds.categories
    median = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)
    standard = make_pipeline(median, StandardScaler())
    one_hot = OneHotEncoder(handle_unknown="ignore", max_categories=MOST, sparse_output=False)
    transformer = ColumnTransformer([("numbers", standard, list(numeric)), ("categories", one_hot, list(categories))])
    transformer.fit(_as_wanted(frame, numeric, categories, path))
    return Columns(numeric, categories, label, transformer)


def _as_wanted(frame: Any, numeric: tuple[str, ...], categories: tuple[str, ...], path: Path) -> Any:
    """Numbers as floats, which is what has a NaN; categories as words, a missing one as none."""
    import pandas

    columns = {name: frame[name].astype("float64") for name in numeric}
    for name, column in columns.items():
        if (column.abs() > LARGEST).any():
            worst = column[column.abs() > LARGEST].iloc[0]
            what = "infinity" if numpy.isinf(worst) else f"{worst:g}, too large to compute with"
            raise LabError(f"{path}: column {shown(name)} holds {what}: leave such cells empty")
    columns |= {name: frame[name].astype(object).where(frame[name].notna(), "").map(_as_word) for name in categories}
    return pandas.DataFrame(columns, index=frame.index)


def _as_word(value: Any) -> str:
    """Whole numbers without a point, also where pandas took them for real ones."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _frame(path: Path, label: str) -> tuple[Any, list[str]]:
    """A file's rows, dates as days; and what was made of words among numbers, in words."""
    _required("pandas")
    frame, notes = _read(path, label), []
    for name in frame:
        if name != label:
            found, words = _as_numbers(frame[name], is_text=rows.is_one_of(path, rows.SEPARATED))
            if len(words):
                uncounted = f"{len(words)} of its values count as missing: no numbers, such as {shown(words.iloc[0])}"
                notes.append(f"{path}: column {shown(name)} has numbers; {uncounted}")
            frame[name] = found
    return frame, notes


def _as_numbers(column: Any, *, is_text: bool) -> tuple[Any, Any]:
    """The column as numbers, where it holds some, or dates; and the words among them, which are missing then.

    Args:
        column: Of a table.
        is_text: Whether its words may be numbers, as those of a csv file are.
    """
    import pandas
    from pandas.api.types import is_bool_dtype, is_datetime64_any_dtype, is_numeric_dtype, is_timedelta64_dtype

    none = column.iloc[:0]
    if is_datetime64_any_dtype(column):
        utc = pandas.to_datetime(column, utc=True)
        return (utc - pandas.Timestamp(0, tz="UTC")) / pandas.Timedelta(days=1), none
    if is_timedelta64_dtype(column):
        return column / pandas.Timedelta(days=1), none
    if is_numeric_dtype(column) or is_bool_dtype(column) or not _is_plain(column):
        return column, none
    there = column[column.notna()]
    if not len(there) or isinstance(column.dtype, pandas.CategoricalDtype):
        return column, none
    is_word = there.map(lambda value: isinstance(value, str))
    if is_word.all() and there.str.match(DATE).all():
        found = pandas.to_datetime(column, errors="coerce", utc=True, format="ISO8601")
        if found.notna().sum() == len(there):
            return _as_numbers(found, is_text=is_text)
    if there.map(lambda value: isinstance(value, bool)).any() or (is_word.any() and not is_text):
        return column, none
    found = pandas.to_numeric(column, errors="coerce")
    words = there[found[there.index].isna()]
    return (found, words) if len(words) <= WORDS * len(there) else (column, none)


def _read(path: Path, label: str) -> Any:
    """As pandas reads it; the labels of a csv file as they stand there."""
    import pandas

    if rows.is_one_of(path, (".parquet",)):
        return rows.of_arrow(path, lambda arrow: arrow.parquet.read_table(path).to_pandas(ignore_metadata=True))
    if not rows.is_one_of(path, rows.SEPARATED):
        return pandas.DataFrame(rows.read(path))
    names, separator = rows.header(path)
    text = files.read(path).decode("utf-8-sig")
    comma = separator != "," and _has_decimal_commas(text, separator)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)  # that values at the end of rows are lost
            frame = pandas.read_csv(
                io.StringIO(text),
                sep=separator,
                decimal="," if comma else ".",
                skipinitialspace=True,
                low_memory=False,
                dtype={label: str},
                index_col=False,  # else it takes the first column for one, where rows have more values than columns
            )
    except pandas.errors.ParserWarning as error:
        raise LabError(f"{path} is damaged: its rows have more values than the {len(names)} columns") from error
    except ValueError as error:  # pandas' own are ValueErrors
        raise LabError(f"{path} is damaged: {one_line(error)}") from error
    frame.columns = frame.columns.str.strip()
    if comma and label in frame:
        frame[label] = frame[label].str.replace(r"^(-?\d+),(\d+)$", r"\1.\2", regex=True)
    return frame


def _has_decimal_commas(text: str, separator: str) -> bool:
    edge = re.escape(separator)
    return re.search(rf'(?:^|{edge})"?-?\d+,\d+"?(?:$|{edge})', text, re.MULTILINE) is not None


def _check(path: Path, frame: Any, label: str, drop: tuple[str, ...]) -> None:
    for name, option in {label: "--label-column", **dict.fromkeys(drop, "--drop")}.items():
        if name not in frame:
            columns = shown(", ".join(map(str, frame)))
            raise LabError(f"{path} has no column {shown(name)}: name one of {columns} with {option}")
    if not len(frame):
        raise LabError(f"{path} is empty: it has no row with a label")
    missing = numpy.flatnonzero(frame[label].isna())
    if len(missing):
        unlabelled = f"{len(missing)} rows have no label (nothing, NA, None and the like), such as row {missing[0] + 1}"
        raise LabError(f"{path}: {unlabelled}: remove them, or name that class otherwise")
    if not _is_plain(frame[label]):
        raise LabError(f"{path}: column {shown(label)} holds lists or mappings, which are no labels")


def _names(column: Any) -> list[str]:
    """Labels as text: whole numbers without a point, also where pandas, or who wrote the file, took them for real."""
    return [re.sub(r"^(-?(?:0|[1-9]\d*))\.0+$", r"\1", str(value)) for value in column.tolist()]


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
