"""`gtracer demo`: what becomes of half-wrong labels under SGD, SAM and SGD-TRACER."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from gtracer.lab.config import Config
from gtracer.lab.record import Record
from gtracer.lab.train import train
from gtracer.lab.watch import Bar

BASE = Config(task="digits", model="mlp-bn", label_noise=0.5, lr=0.02, momentum=0.9, batch_size=128)
# 0.05 is SAM's usual ρ; SAM's 1 and TRACER's 0.012 are the best of seven each, chosen on other seeds:
# docs/algorithm.md, "Defaults".
OPTIMIZERS = {
    "SGD": replace(BASE, optimizer="sgd"),
    "SAM, ρ 0.05": replace(BASE, optimizer="sam", rho=0.05),
    "SAM, ρ 1": replace(BASE, optimizer="sam", rho=1.0),
    "SGD-TRACER": replace(BASE, optimizer="sgd-tracer", rho=0.012, delta=0.01),
}
Results = dict[str, list[Record]]


def run(seeds: int, epochs: int, folder: Path, console: Console | None = None) -> Results:
    """Train every optimiser with every seed, print the table, draw the plot. What is finished is not run again."""
    console = console or Console()
    results: Results = {name: [] for name in OPTIMIZERS}
    with one_thread(), Bar(console, len(OPTIMIZERS) * seeds * epochs) as bar:
        for seed in range(seeds):
            for name, base in OPTIMIZERS.items():
                config = replace(base, seed=seed, epochs=epochs)
                bar.title = f"{name}, seed {seed}"
                results[name].append(once(config, folder / f"{name.replace(', ρ ', '-')}-{epochs}-{seed}".lower(), bar))
    console.print(table(results))
    console.print(f"Curves: {plot(results, folder / 'demo.png')}")
    return results


def once(config: Config, folder: Path, bar: Bar) -> Record:
    """The run's record: from the folder where it is finished, else trained, or trained on."""
    made = Record.read(folder).epochs if (folder / "record.json").exists() else 0
    bar.skip(made)
    return train(config, folder, [bar], resume=(folder / "record.json").exists())


def table(results: Results) -> Table:
    """Mean ± standard error over the seeds."""
    first = next(iter(results.values()))
    made = Table(
        title=f"Digits with {first[0].config.label_noise:.0%} of the training labels wrong, "
        f"{first[0].config.epochs} epochs, n = {len(first)}",
        caption="Accuracy on clean test labels in %, mean ± standard error over seeds.",
    )
    for heading in ("", "last epoch", "best epoch", "wrong labels learnt", "s a run"):
        made.add_column(heading, justify="left" if not heading else "right")
    for name, records in results.items():
        made.add_row(name, *(mean_and_error(values) for values in columns(records)))
    return made


def columns(records: list[Record]) -> list[list[float]]:
    """Last and best accuracy and memorised share, in per cent, and seconds."""
    accuracies = [r.curves["test_accuracy"] for r in records]
    return [
        [100 * a[-1] for a in accuracies],
        [100 * max(a) for a in accuracies],
        [100 * r.curves["memorised"][-1] for r in records],
        [sum(r.seconds) for r in records],
    ]


def mean_and_error(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values) / len(values) ** 0.5:.1f}"


def plot(results: Results, path: Path) -> Path:
    """Test accuracy and memorised labels by epoch, the mean over seeds with each seed behind it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2)
    shown = {"test_accuracy": "test accuracy, %", "memorised": "wrong labels learnt, %"}
    for axis, (curve, title) in zip(axes, shown.items(), strict=True):
        for index, (name, records) in enumerate(results.items()):
            curves = torch.tensor([r.curves[curve] for r in records]) * 100
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
