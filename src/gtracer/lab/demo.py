"""`gtracer demo`: half-wrong labels under SGD, SAM and SGD-TRACER, on the net they were tuned for and a deeper one."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from gtracer.lab.config import Config
from gtracer.lab.errors import Interrupted
from gtracer.lab.record import NAME, Record
from gtracer.lab.train import train

BASE = Config(task="digits", model="mlp-bn", label_noise=0.5, lr=0.02, batch_size=128, device="cpu")
# 0.05 is SAM's usual ρ. SAM's 1 and TRACER's 0.005 are the best of seven each for the net with two hidden layers, by
# accuracy on held-out data with wrong labels (studies/depths.py); the deeper net gets them as they are.
OPTIMIZERS = {
    "SGD": replace(BASE, optimizer="sgd"),
    "SAM, ρ 0.05": replace(BASE, optimizer="sam", rho=0.05),
    "SAM, ρ 1": replace(BASE, optimizer="sam", rho=1.0),
    "SGD-TRACER": replace(BASE, optimizer="sgd-tracer", rho=0.005, delta=0.01),
}
TUNED, DEEPER = 2, 5  # hidden layers
Results = dict[tuple[str, int], list[Record]]  # by optimiser and depth


def run(seeds: int, epochs: int, folder: Path, console: Console | None = None) -> Results:
    """Train every optimiser at both depths with every seed; print the table, draw the plot.

    What is finished is not run again, and what was interrupted goes on.
    """
    console = console or Console()
    cells = [(name, depth, seed) for seed in range(seeds) for depth in (TUNED, DEEPER) for name in OPTIMIZERS]
    configs = [replace(OPTIMIZERS[name], depth=depth, seed=seed, epochs=epochs) for name, depth, seed in cells]
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("runs"), TimeElapsedColumn(), TimeRemainingColumn())
    results: Results = {(name, depth): [] for depth in (TUNED, DEEPER) for name in OPTIMIZERS}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        try:
            for cell, record in zip(cells, progress.track(_records(configs, folder), total=len(cells)), strict=True):
                results[cell[:2]].append(record)
        except KeyboardInterrupt as error:
            raise Interrupted("give the same command again to go on") from error
    console.print(table(results))
    means = "; ".join(f"{name}: {mean_and_error(over_both(results, name))}" for name in OPTIMIZERS)
    console.print(f"Last epoch, mean over both nets: {means}", highlight=False, soft_wrap=True)
    console.print(f"Curves: {plot(results, folder / 'demo.png')}", highlight=False, soft_wrap=True)
    return results


def _records(configs: list[Config], folder: Path) -> Iterator[Record]:
    """The runs' records, in order, made on all cores."""
    from joblib import Parallel, delayed

    where = [folder / f"{c.optimizer}-{c.rho}-{c.depth}-{c.epochs}-{c.seed}" for c in configs]
    workers = Parallel(n_jobs=min(os.cpu_count() or 1, len(configs)), return_as="generator")
    made: Iterator[Record] = workers(delayed(once)(*cell) for cell in zip(configs, where, strict=True))
    return made


def once(config: Config, folder: Path) -> Record:
    """The run's record: from the folder where it is finished, else trained, or trained on."""
    with one_thread():
        return train(config, folder, [], resume=(folder / NAME).exists())


def table(results: Results) -> Table:
    """Mean ± standard error over the seeds."""
    config, n = next((records[0].config, len(records)) for records in results.values())
    made = Table(
        padding=(0, 0, 0, 1),
        title=f"Digits with {config.label_noise:.0%} of the training labels wrong, {config.epochs} epochs, n = {n}",
        caption="Accuracy on clean test labels in %, mean ± standard error over seeds; ρ was tuned on the net with "
        f"{TUNED} hidden layers.",
    )
    made.add_column(no_wrap=True)
    for heading in (
        f"{TUNED} layers, last",
        "best epoch",
        f"{DEEPER} layers, last",
        "best epoch",
        "wrong labels learnt",
    ):
        made.add_column(heading, justify="right")
    for name in OPTIMIZERS:
        shallow, deep = (results[name, depth] for depth in (TUNED, DEEPER))
        values = [last(shallow), best(shallow), last(deep), best(deep), last(deep, "memorised")]
        made.add_row(name, *map(mean_and_error, values))
    return made


def last(records: list[Record], curve: str = "test_accuracy") -> list[float]:
    return [100 * record.curves[curve][-1] for record in records]


def over_both(results: Results, name: str) -> list[float]:
    """For each seed the mean of the last epochs at both depths."""
    return [statistics.mean(pair) for pair in zip(*(last(results[name, d]) for d in (TUNED, DEEPER)), strict=True)]


def best(records: list[Record]) -> list[float]:
    return [100 * max(record.curves["test_accuracy"]) for record in records]


def mean_and_error(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values) / len(values) ** 0.5:.1f}"


def plot(results: Results, path: Path) -> Path:
    """Test accuracy by epoch at both depths, and memorised labels: the mean, with each seed behind it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = [
        (TUNED, "test_accuracy", f"test accuracy, %: {TUNED} hidden layers (ρ tuned here)"),
        (DEEPER, "test_accuracy", f"test accuracy, %: {DEEPER} hidden layers, same ρ"),
        (DEEPER, "memorised", f"wrong labels learnt, %: {DEEPER} hidden layers"),
    ]
    axes = figure.subplots(1, len(panels))
    for axis, (depth, curve, title) in zip(axes, panels, strict=True):
        for index, name in enumerate(OPTIMIZERS):
            curves = torch.tensor([record.curves[curve] for record in results[name, depth]]) * 100
            epochs = range(1, curves.shape[1] + 1)
            axis.plot(epochs, curves.T, color=f"C{index}", alpha=0.25, linewidth=0.8)
            axis.plot(epochs, curves.mean(0), color=f"C{index}", label=name)
        axis.set(xlabel="epoch", title=title, ylim=(0, 101))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(loc="lower left", frameon=False)
    figure.savefig(path, dpi=120)
    return path


@contextmanager
def one_thread() -> Iterator[None]:
    """A net this small runs faster on one core; the same number of threads everywhere makes the same numbers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
