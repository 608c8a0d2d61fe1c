"""`gtracer bench scaling`: whether what TRACER costs grows with the net or the batch faster than SGD's step does."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from gtracer.lab.benchmarks import measurement, optimizers

WIDTHS = ("wrn-16-1", "wrn-16-2", "wrn-16-4", "wrn-16-8")
DEPTHS = ("resnet20", "resnet32", "resnet56", "resnet110")
BATCHES = (0.25, 1, 4, 8)  # times the size that was asked for
COMPARED = (optimizers.SGD, "SGD-TRACER")


class Case(NamedTuple):
    """A net and a batch, and what it is an instance of."""

    family: str
    model: str
    batch_size: int


def cases(batch_size: int) -> list[Case]:
    """Nets eight times as wide and five times as deep, batches 32 times as large."""
    nets = {"width": WIDTHS, "depth": DEPTHS}
    grown = [Case(family, model, batch_size) for family, models in nets.items() for model in models]
    return grown + [Case("batch", DEPTHS[0], max(1, int(batch_size * times))) for times in BATCHES]


def scaling(*, batch_size: int, rounds: int, device: str, precision: str, out: Path | None, console: Console) -> None:
    """Time of a step of SGD-TRACER over SGD's, size by size; printed and written."""
    place = measurement.place_of(device)
    rows = {name: row for name, row in optimizers.rows(place, twice=False).items() if name in COMPARED}
    found: list[dict[str, Any]] = []
    for case in cases(batch_size):
        steps = {
            name: optimizers.build(row, case.model, case.batch_size, place, precision)[0] for name, row in rows.items()
        }
        found.append({**case._asdict(), "seconds": measurement.seconds_of(steps, rounds, place, optimizers.EVERY)})
        if place.type == "cuda":  # and without what it costs to start kernels
            graphs = {name: measurement.captured(step) for name, step in steps.items()}
            found[-1]["graphs"] = measurement.seconds_of(graphs, rounds, place, optimizers.EVERY)
            del steps, graphs
            torch.cuda.empty_cache()
    result = measurement.result_of("scaling", place, precision=precision, rounds=rounds, cases=found)
    measurement.publish(result, [_table(result)], out, console)


def _table(result: dict[str, Any]) -> Table:
    by_graph = ["as CUDA graphs"] if "graphs" in result["cases"][0] else []
    columns = ("what grows", "net", "batch", "SGD, ms", "SGD-TRACER, ms", "ratio", *by_graph)
    what = (result["precision"], f"{result['rounds']} rounds")
    table = measurement.table_of(measurement.title(result, *what), columns, left=2)
    last = None
    for case in result["cases"]:
        if last not in (None, case["family"]):
            table.add_section()
        last = case["family"]
        plain, ours = _medians(case["seconds"])
        numbers = [f"{plain:.1f}", f"{ours:.1f}", f"{ours / plain:.2f}"]
        if by_graph:
            plain, ours = _medians(case["graphs"])
            numbers.append(f"{ours / plain:.2f}")
        table.add_row(last, case["model"], str(case["batch_size"]), *numbers)
    return table


def _medians(seconds: dict[str, list[float]]) -> tuple[float, float]:
    """Milliseconds of SGD's step and of SGD-TRACER's."""
    plain, ours = (statistics.median(seconds[name]) * 1e3 for name in COMPARED)
    return plain, ours
