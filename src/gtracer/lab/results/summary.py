"""A study's results as a table on the terminal."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from gtracer.lab.results.statistics import Estimate, Result, Results


def table(results: Results) -> Table:
    """A row for each point: mean ± standard error over its seeds, in per cent.

    The study's own words are `Text`: in plain strings rich would take brackets for markup and :x: for an emoji.
    """
    metric = results.metric[:1].upper() + results.metric[1:]
    made = Table(
        title=Text(results.study.title, style="table.title"),
        caption=f"{metric} on test data in %, mean ± standard error over seeds.",
        padding=(0, 0, 0, 1),
    )
    several = len(results.study.settings) > 1
    memorised = any(result.last("memorised") for result in results.all)
    shown = [("", True), ("n", True), ("last epoch", True), ("best epoch", True), ("memorised", memorised)]
    shown += [("paper", bool(results.study.paper)), ("", any(map(results.note, results.all)))]
    for heading, is_shown in shown:
        if is_shown:
            made.add_column(heading, justify="right" if heading else "left", no_wrap=heading == "")
    for setting in results.study.settings:
        if several:
            made.add_section()
            made.add_row(Text(setting, style="bold"))
        for result in results.within(setting):
            cells = zip([*_cells(result), results.note(result)], shown, strict=True)
            made.add_row(*(Text(text) for text, (_, is_shown) in cells if is_shown))
    return made


def _cells(result: Result) -> list[str]:
    estimates = (result.last(), result.best(), result.last("memorised"))
    last, best, memorised = (str(Estimate.of(values)) if values else "" for values in estimates)
    paper = "" if result.paper is None else f"{result.paper[0]:.1f} ± {result.paper[1]:.1f}"
    return [result.point.label, str(len(result.finished)), last, best, memorised, paper]
