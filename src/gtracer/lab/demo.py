"""`gtracer demo`: 50% label noise under SGD, SAM and SGD-TRACER, on the net they were tuned for and a deeper one."""

from __future__ import annotations

import statistics
from pathlib import Path

from rich.console import Console

from gtracer.lab.results import report, summary
from gtracer.lab.results.statistics import Estimate, Results
from gtracer.lab.sweeps import study
from gtracer.lab.sweeps.launchers.local import Local
from gtracer.lab.sweeps.sweep import RunsFolder, sweep


def run(seeds: int, epochs: int, folder: Path, console: Console | None = None) -> Results:
    """Run the study `demo`, print its table, write its report. What is finished is not run again."""
    console = console or Console()
    demo = study.load("demo").changed(seeds=seeds, epochs=epochs)
    sweep(demo, folder, Local(), console)
    results = Results(demo, RunsFolder.of(folder).all())
    console.print(summary.table(results))
    means = "; ".join(f"{method}: {Estimate.of(over_both(results, method))}" for method in demo.methods)
    console.out(f"Last epoch, mean over both nets: {means}", highlight=False)
    page = report.write(folder, folder / "report")
    console.out(f"Report with curves: {page}", highlight=False)
    return results


def over_both(results: Results, method: str) -> list[float]:
    """For each seed the mean of the last epochs in both settings."""
    both = (result.last() for result in results.all if result.point.method == method)
    return [statistics.mean(pair) for pair in zip(*both, strict=True)]
