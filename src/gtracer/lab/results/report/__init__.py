"""A study's report, made of its records alone: a page, figures, tables. It needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gtracer.lab import files
from gtracer.lab.results import statistics
from gtracer.lab.results.report import figures, page, sharpness
from gtracer.lab.results.report.tables import Table
from gtracer.lab.sweeps.study import Study


def write(runs: Path, out: Path, tell: Callable[[str], None] = lambda line: None, study: Study | None = None) -> Path:
    """Write the report and return the page's path.

    Args:
        runs: Folder or archive of the records, and with them study.json if a study made them.
        out: For `index.html`, `figures/` and `tables/`.
        tell: Called with a line for each record that cannot be read.
        study: Another than the one that made the records.
    """
    found, problems = statistics.read(runs, study)
    for problem in problems:
        tell(problem)
    table, pictures = Table(found), figures.pictures(found)
    for kind, text in {"md": table.markdown(), "tex": table.latex(), "csv": table.csv()}.items():
        files.write(out / "tables" / f"results.{kind}", _bytes(text))
    for picture in pictures:
        files.write(out / "figures" / f"{picture.name}.png", picture.png)
        files.write(out / "figures" / f"{picture.name}.svg", picture.svg)
    measured = sharpness.read(runs, tell)
    if measured is not None:
        files.write(out / "tables" / "sharpness.md", _bytes(measured.markdown()))
    others = found.given - len(page.records(found))
    whole = page.render(found, table, pictures, others, problems, out, measured)
    files.write(out / "index.html", _bytes(whole))
    return out / "index.html"


def _bytes(text: str) -> bytes:
    return text.encode(errors="replace")  # JSON can hold halves of characters
