"""The page: everything in one file, nothing fetched from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import os
from collections import Counter
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from gtracer.lab import files
from gtracer.lab.results.record import NAME, Record
from gtracer.lab.results.report import verdict
from gtracer.lab.results.report.configuration import configuration
from gtracer.lab.results.report.figures import Picture
from gtracer.lab.results.report.sharpness import Measured
from gtracer.lab.results.report.svg import inlined
from gtracer.lab.results.report.tables import NONE, Table
from gtracer.lab.results.statistics import Results

HERE = Path(__file__).parent
CONFUSED = 8  # pairs of classes


def render(
    results: Results,
    table: Table,
    pictures: list[Picture],
    others: int,
    problems: list[str],
    out: Path,
    measured: Measured | None = None,
) -> str:
    """The page as HTML, for the folder `out`. Every string of a study or a record goes through Jinja's escaping."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = (HERE / "page.js").read_text(encoding="utf-8")
    figures = {f"figure-{index}": picture for index, picture in enumerate(pictures)}
    return environment.get_template("page.html").render(
        study=results.study,
        facts=_facts(results),
        verdict=verdict.sentences(results),
        cautions=verdict.cautions(results),
        confused=_confused(results),
        configuration=configuration(results),
        runs=_runs(results, out),
        columns=table.on_page,
        rows=[
            [
                (column, column.text(row) or NONE, column.value(row), table.is_best(row, column))
                for column in table.on_page
            ]
            for row in table.rows
        ],
        notes=table.notes(table.on_page),
        sections=_sections(figures, several=len(results.study.settings) > 1),
        charts={name: _chart(name, picture) for name, picture in figures.items()},
        provenance=_provenance(results, others),
        problems=problems,
        measured=measured,
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        # The browser runs this script and no other, whatever a label may hold.
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _facts(results: Results) -> list[str]:
    wanted = len(results.study.configs())
    finished = sum(record.finished for record in records(results))
    seeds = {len(result.point.seeds) for result in results.all}
    counts = {"method": len(results.study.methods), "setting": len(results.study.settings), "seed": max(seeds)}
    facts = [f"{count} {what}{'s' * (count != 1)}" for what, count in counts.items()]
    if len(seeds) > 1:
        facts[2] = f"up to {facts[2]}"
    if len(results.study.settings) == 1:
        facts[1] = next(iter(results.study.settings))
    return [*filter(None, facts), f"{finished} of {wanted} runs finished"]


def _sections(figures: dict[str, Picture], several: bool) -> list[tuple[str, list[tuple[str, Picture, Markup]]]]:
    """The figures under their headings; those of a single setting stand together."""
    grouped = groupby(figures.items(), key=lambda pair: pair[1].heading if several else "Figures")
    return [(heading, [(name, p, Markup(_drawn(name, p))) for name, p in group]) for heading, group in grouped]


def _drawn(name: str, picture: Picture) -> str:
    return inlined(picture.svg, name, f"{picture.heading}. {picture.setting}".strip(". "))


def _chart(name: str, picture: Picture) -> dict[str, Any]:
    """What the page says where the mouse is: for every line its name, and for its vertices what they are."""
    lines = [
        {"id": f"{name}-series-{index}", "name": series.name, "points": series.points}
        for index, series in enumerate(picture.series)
    ]
    return {"by": picture.by, "series": lines}


def records(results: Results) -> list[Record]:
    """The study's records, each once, although two of its cells may share one."""
    return list({id(record): record for result in results.all for record in result.records}.values())


def _confused(results: Results) -> list[tuple[str, str]]:
    """Where there are too many classes for matrices: what was taken for what most often, over a method's runs."""
    lines = []
    for result in results.all:
        counts: Counter[tuple[str, str]] = Counter()
        for record in result.finished:
            confused = record.evaluation.get("confused", [])
            counts.update({(str(a), str(b)): n for a, b, n in confused if isinstance(n, int)})
        if counts:
            where = f"{result.point.setting}: " if len(results.study.settings) > 1 else ""
            pairs = (f"{label} for {taken} ({n})" for (taken, label), n in counts.most_common(CONFUSED))
            lines.append((where + result.point.label, ", ".join(pairs)))
    return lines


PAGES = {
    "label errors": "label-errors/label-errors.html",
    "confusion": "evaluation/confusion.png",
    "residuals": "evaluation/residuals.png",
}


def _runs(results: Results, out: Path) -> list[dict[str, Any]]:
    """Every run there is: what it was, what came out, and where it lies."""
    made = []
    for result in results.all:
        for record in result.records:
            folder = results.folders.get(record.config.identity)
            state = "diverged" if record.failure is not None else "" if record.finished else "unfinished"
            made.append(
                {
                    "setting": result.point.setting,
                    "method": result.point.label,
                    "seed": record.config.seed,
                    "score": f"{100 * record.test[-1]:.1f}" if record.test else NONE,
                    "state": state or f"{record.epochs} epochs",
                    "name": "" if folder is None else folder.name,
                    "links": [] if folder is None else _links(folder, out),
                }
            )
    return made


def _links(folder: Path, out: Path) -> list[tuple[str, str]]:
    """What there is of a run, by what it is called; nothing of one in an archive."""
    places = {"record": NAME} | PAGES
    return [(what, _href(folder / path, out)) for what, path in places.items() if files.exists(folder / path)]


def _href(path: Path, out: Path) -> str:
    """As seen from the page."""
    try:
        return quote(Path(os.path.relpath(path, out)).as_posix())
    except ValueError:  # on another drive
        return path.resolve().as_uri()


def _provenance(results: Results, others: int) -> list[tuple[str, list[str]]]:
    """Where the numbers come from: what was seen, and in how many records."""
    found = records(results)
    environments = [record.environment for record in found]
    failed = sum(record.failure is not None for record in found)
    states = Counter(finished=sum(record.finished for record in found), diverged=failed)
    states["unfinished"] = len(found) - states.total()
    count = f"{len(found)}: " + ", ".join(f"{n} {state}" for state, n in states.items() if n) if found else "none"
    more = [f"{others} more in the folder that the study does not ask for"] if others else []
    models = [_model(record.resolved) for record in found if record.resolved]
    return [
        ("Records", [count, *more]),
        *([("Models", _seen(models))] if models else []),
        ("Commits", _seen(e.get("commit") or "unknown" for e in environments)),
        ("Versions", _seen(_pairs(e.get("versions")) for e in environments)),
        ("Hardware", _seen(_pairs(e.get("hardware")) for e in environments)),
    ]


def _model(resolved: dict[str, Any]) -> str:
    """What was trained, on how much, with what: as built."""
    parts = [str(resolved.get("model") or "unknown")]
    counts = {"parameters": "parameters", "examples": "training examples", "batches": "batches an epoch"}
    parts += [f"{resolved[name]} {what}" for name, what in counts.items() if name in resolved]
    parts += [f"{name} {resolved[name]}" for name in ("kernels", "precision", "device") if name in resolved]
    return ", ".join(parts)


def _pairs(values: Any) -> str:
    if not isinstance(values, dict):
        return "unknown"
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _seen(values: Iterable[Any]) -> list[str]:
    counts = Counter(map(str, values))
    if len(counts) <= 1:
        return list(counts) or [NONE]
    return [f"{value} ({n} record{'s' * (n != 1)})" for value, n in counts.most_common()]
