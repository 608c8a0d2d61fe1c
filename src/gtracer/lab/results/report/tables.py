"""The table of a study: its rows once, as plain data, and from them Markdown, LaTeX, CSV and the page."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gtracer.lab.results.statistics import TEST, Comparison, Estimate, Result, Results
from gtracer.lab.sweeps.study import SYMBOLS

NONE = "–"


@dataclass(frozen=True)
class Row:
    """A method in a setting, and all that the records say of it. Accuracies are in per cent."""

    setting: str
    method: str
    n: int
    last: Estimate | None
    chosen: Estimate | None
    best: Estimate | None
    paper: Estimate | None
    comparison: Comparison | None
    memorised: Estimate | None
    seconds: float | None
    cost: float | None
    resolved: str
    state: str

    @classmethod
    def of(cls, result: Result, among: Results) -> Row:
        return cls(
            setting=result.point.setting,
            method=result.point.label,
            n=len(result.finished),
            last=result.accuracy,
            chosen=result.estimate(list(result.chosen().values())),
            best=result.estimate(result.best()),
            paper=None if result.paper is None else Estimate(*result.paper, n=0),
            comparison=among.comparison(result),
            memorised=result.estimate(result.last("memorised")),
            seconds=result.seconds,
            cost=among.relative_cost(result),
            resolved=as_run(result),
            state=among.note(result),
        )


@dataclass(frozen=True)
class Column:
    """A heading, what stands below it, and by what its rows are sorted (nothing: at the end)."""

    heading: str
    text: Callable[[Row], str]
    value: Callable[[Row], float | str | None]
    numeric: bool = True
    note: str = ""
    best: Callable[[list[float]], float] | None = None  # of a setting's values
    on_page: bool = True


COLUMNS = (
    Column("Setting", lambda row: row.setting, lambda row: row.setting, numeric=False),
    Column("Method", lambda row: row.method, lambda row: row.method, numeric=False),
    Column("n", lambda row: str(row.n), lambda row: row.n, note="n: finished runs, each with a seed of its own."),
    Column(
        "Last epoch, %",
        lambda row: _estimate(row.last) or row.state or NONE,
        lambda row: _mean(row.last),
        note="Last epoch: {metric} on the test set, mean ± standard error over the n runs; no error of a single one.",
        best=max,
    ),
    Column(
        "Deviation",
        lambda row: _points(_deviation(row.last)),
        lambda row: _deviation(row.last),
        note="Deviation: the standard deviation over the n runs, in points.",
    ),
    Column(
        "By held-out, %",
        lambda row: _estimate(row.chosen),
        lambda row: _mean(row.chosen),
        note="By held-out: the same at each run's best epoch on held-out data, which is the model to use.",
        best=max,
    ),
    Column(
        "Best epoch, %",
        lambda row: _estimate(row.best),
        lambda row: _mean(row.best),
        note="Best epoch: each run's best on the test set itself, so it flatters; the last epoch is the result.",
        best=max,
    ),
    Column("Paper, %", lambda row: _estimate(row.paper), lambda row: _mean(row.paper)),
    Column(
        "TRACER − best baseline",
        lambda row: _comparison(row.comparison),
        lambda row: None if row.comparison is None else row.comparison.difference,
        note="TRACER − best baseline: difference in points at the last epoch to the best of the other methods in the "
        f"same setting, over the seeds that both have finished; p: {TEST}.",
    ),
    Column(
        "Memorised, %",
        lambda row: _estimate(row.memorised),
        lambda row: _mean(row.memorised),
        note="Memorised: share of the mislabelled training examples (of the first 5,000, in runs "
        "with more) that are given back with the wrong label, at the last epoch.",
        best=min,
    ),
    Column(
        "Seconds per epoch",
        lambda row: "" if row.seconds is None else f"{row.seconds:.3g}",
        lambda row: row.seconds,
        note="Seconds per epoch: median over all epochs of the finished runs, less those made in parallel in one "
        "process.",
    ),
    Column(
        "Relative cost",
        lambda row: "" if row.cost is None else f"{row.cost:.2f}×",
        lambda row: row.cost,
        note="Relative cost: an epoch's time over that of the setting's first method, where their machines are equal.",
    ),
    Column(
        "As run",
        lambda row: row.resolved,
        lambda row: row.resolved or None,
        numeric=False,
        note="As run: what the optimiser had at the start, also where the study leaves it open.",
        on_page=False,  # there its configuration says so
    ),
    Column("Note", lambda row: _note(row) or "", lambda row: _note(row), numeric=False),
)


class Table:
    """Rows in the study's order, and the columns that have something to say of them."""

    def __init__(self, results: Results) -> None:
        self.title = results.study.title
        self.metric = results.metric
        self.rows = [Row.of(result, results) for result in results.all]
        silent = {"Setting"} if len(results.study.settings) == 1 else set()
        self.columns = [c for c in COLUMNS if c.heading not in silent and any(c.text(row) for row in self.rows)]
        self._best = {column.heading: _best(column, self.rows) for column in self.columns}

    @property
    def on_page(self) -> list[Column]:
        return [column for column in self.columns if column.on_page]

    def notes(self, columns: list[Column]) -> list[str]:
        bold = (
            ["Bold: the best mean of its setting, and those that print the same."] if any(self._best.values()) else []
        )
        return [*(column.note.replace("{metric}", self.metric) for column in columns if column.note), *bold]

    def is_best(self, row: Row, column: Column) -> bool:
        """Whether no other row of the setting has a better mean, as it is printed."""
        value = column.value(row)
        return isinstance(value, float) and self._best[column.heading].get(row.setting) == _points(value)

    def _lines(self, escaped: Callable[[str], str], bold: str) -> list[list[str]]:
        """The cells as text, the best of them within `bold`."""
        return [
            [
                bold % escaped(text) if self.is_best(row, column) else escaped(text)
                for column in self.columns
                for text in [column.text(row) or NONE]
            ]
            for row in self.rows
        ]

    def markdown(self) -> str:
        rule = ["---:" if column.numeric else "---" for column in self.columns]
        headings = [_markdown(column.heading) for column in self.columns]
        table = [f"| {' | '.join(line)} |" for line in [headings, rule, *self._lines(_markdown, "**%s**")]]
        title = [f"**{_markdown(self.title)}**", ""] if self.title else []
        return "\n".join([*title, *table, "", *(f"- {_markdown(note)}" for note in self.notes(self.columns))]) + "\n"

    def latex(self) -> str:
        """A tabular that needs no package."""
        kinds = "".join("r" if column.numeric else "l" for column in self.columns)
        headings = [_latex(column.heading) for column in self.columns]
        lines = [" & ".join(line) + r" \\" for line in [headings, *self._lines(_latex, r"\textbf{%s}")]]
        rule = r"\hline"
        parts = [rf"\begin{{tabular}}{{{kinds}}}", rule, lines[0], rule, *lines[1:], rule, r"\end{tabular}"]
        return "\n".join(parts) + "\n"

    def csv(self) -> str:
        """All numbers to ten digits, also where the other tables leave a column out."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(CSV)
        values = [[get(row) for get in CSV.values()] for row in self.rows]
        writer.writerows([f"{value:.10g}" if isinstance(value, float) else value for value in row] for row in values)
        return out.getvalue()


def _best(column: Column, rows: list[Row]) -> dict[str, str]:
    """Of each setting whose values differ as they are printed, the best."""
    if column.best is None:
        return {}
    values: dict[str, list[float]] = {}
    for row in rows:
        if isinstance(value := column.value(row), float):
            values.setdefault(row.setting, []).append(value)
    return {
        setting: _points(column.best(found)) for setting, found in values.items() if len({*map(_points, found)}) > 1
    }


CSV: dict[str, Callable[[Row], float | str | None]] = {
    "setting": lambda row: row.setting,
    "method": lambda row: row.method,
    "n": lambda row: row.n,
    "last": lambda row: _mean(row.last),
    "last_error": lambda row: _error(row.last),
    "last_deviation": lambda row: _deviation(row.last),
    "by_held_out": lambda row: _mean(row.chosen),
    "by_held_out_error": lambda row: _error(row.chosen),
    "best": lambda row: _mean(row.best),
    "best_error": lambda row: _error(row.best),
    "paper": lambda row: _mean(row.paper),
    "paper_error": lambda row: _error(row.paper),
    "difference": lambda row: None if row.comparison is None else row.comparison.difference,
    "against": lambda row: None if row.comparison is None else row.comparison.against,
    "p": lambda row: None if row.comparison is None else row.comparison.p,
    "memorised": lambda row: _mean(row.memorised),
    "memorised_error": lambda row: _error(row.memorised),
    "seconds": lambda row: row.seconds,
    "relative_cost": lambda row: row.cost,
    "state": lambda row: row.state,
    "as_run": lambda row: row.resolved,
}


AS_RUN = ("rho", "delta", "beta", "eta", "f0", "radius", "clip")


def as_run(result: Result) -> str:
    """The hyper-parameters that its records tell of, where there are any."""
    resolved = {name: [value for value in result.resolved.get(name, []) if value is not None] for name in AS_RUN}
    values = {name: " or ".join(map(_value, found)) for name, found in resolved.items() if found}
    return ", ".join(f"{SYMBOLS.get(name, name)} {value}" for name, value in values.items())


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _note(row: Row) -> str | None:
    """What is not said in place of the accuracy already."""
    return row.state or None if row.last else None


def _mean(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.mean


def _error(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.error


def _deviation(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.deviation


def _points(number: float | None) -> str:
    return "" if number is None else f"{number:.1f}"


def _estimate(estimate: Estimate | None) -> str:
    return "" if estimate is None else str(estimate)


def _comparison(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    chance = "" if comparison.p is None else f" ({probability(comparison.p)})"
    return f"{comparison.difference:+.1f}{chance}\nagainst {comparison.against}".replace("-", "−", 1)


def probability(p: float) -> str:
    """As it is printed.

    >>> probability(0.0123), probability(0.0001)
    ('p = 0.012', 'p < 0.001')
    """
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def _markdown(text: str) -> str:
    r"""As text that no Markdown reader takes for markup.

    >>> print(_markdown("a|b <i> x_y"))
    a\|b &lt;i&gt; x\_y
    """
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


# What LaTeX takes for a command, and signs that its plain fonts lack.
LATEX = {c: rf"\{c}" for c in "&%$#_{}"} | {c: f"${c}$" for c in "<>|"}
LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", '"': "''", "–": "--"}
LATEX |= {"±": r"$\pm$", "×": r"$\times$", "−": "$-$", "ρ": r"$\rho$", "δ": r"$\delta$", "β": r"$\beta$"}
LATEX |= {"η": r"$\eta$", "₀": "$_0$", "…": r"\ldots{}"}


def _latex(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in " ".join(text.split()))
