"""`gtracer bench throughput`: how long an epoch takes when runs share a device."""

from __future__ import annotations

import pickle
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from gtracer.lab import files
from gtracer.lab.benchmarks import measurement
from gtracer.lab.config import Config
from gtracer.lab.training.captured import Captured

WIDTHS = (1, 2, 4, 8)
METHODS: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": "sgd"},
    "SAM": {"optimizer": "sam", "rho": 0.1},
    "SGD-TRACER": {"optimizer": "sgd-tracer", "rho": 0.001, "delta": 0.01},
}
EPOCH = 50_000  # examples, as CIFAR has


def throughput(
    *,
    model: str,
    batch_size: int,
    rounds: int,
    device: str,
    precision: str,
    kernels: str,
    out: Path | None,
    console: Console,
    steps: int = 40,
    widths: tuple[int, ...] = WIDTHS,
) -> dict[str, Any]:
    """Seconds of an epoch, for each run, with so many in parallel; printed and written.

    Measured on rounds of `steps` steps over made-up images; evaluation is not in it.
    """
    place = measurement.place_of(device)
    cells = [(method, width) for method in METHODS for width in widths]
    seconds: dict[str, dict[str, list[float]]] = {method: {} for method in METHODS}
    with tempfile.TemporaryDirectory() as folder:
        _make_up(Path(folder), steps * batch_size)
        for method, width in track(cells, description="measured", transient=True, console=console):
            config = Config(task="cifar100", data=folder, model=model, lr=0.01, batch_size=batch_size, device=device)
            config = replace(config, precision=precision, kernels=kernels)
            runs = [Captured(_of(config, method, seed, rounds)) for seed in range(width)]
            a_step = [taken / steps / width for taken in _rounds(runs, rounds, place)]
            seconds[method][str(width)] = [each * EPOCH / batch_size for each in a_step]
    result = measurement.result_of(
        "throughput",
        place,
        model=model,
        batch_size=batch_size,
        precision=precision,
        kernels=kernels,
        rounds=rounds,
        steps=steps,
        seconds_per_epoch_and_run=seconds,
    )
    measurement.publish(result, [_table(result, widths)], out, console)
    return result


def _of(config: Config, method: str, seed: int, rounds: int) -> Config:
    return Config.from_mapping(config.to_mapping() | METHODS[method] | {"seed": seed, "epochs": rounds + 2})


def _rounds(runs: list[Captured], rounds: int, place: torch.device) -> list[float]:
    """Seconds of each round, in which every run makes an epoch of its small data, all of them in turns."""
    taken = []
    for turn in range(rounds + 2):
        start = time.perf_counter()
        lives = [run.rest_of_epoch() for run in runs]
        while lives:
            lives = [life for life in lives if next(life, "ended") != "ended"]
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        if turn >= 2:  # in the first two, graphs are recorded
            taken.append(time.perf_counter() - start)
        for run in runs:
            run.run.epoch, run.run.step = run.run.epoch + 1, 0
    return taken


def _make_up(folder: Path, examples: int) -> None:
    """Noise in the layout of CIFAR-100's files."""
    generator = np.random.default_rng(0)
    for name, n in (("train", examples), ("test", 100)):
        images, labels = generator.integers(0, 256, (n, 3072), dtype=np.uint8), [i % 100 for i in range(n)]
        content = pickle.dumps({"data": images, "fine_labels": labels})
        files.write(folder / "cifar-100-python" / name, content)


def _table(result: dict[str, Any], widths: tuple[int, ...]) -> Table:
    what = (result["model"], f"batch {result['batch_size']}", result["precision"], f"{result['kernels']} kernels")
    table = measurement.table_of(
        measurement.title(result, *what),
        ("in parallel", *map(str, widths)),
        caption=f"Seconds of an epoch of {EPOCH} examples for each run, median of {result['rounds']} rounds; after it, "
        "how many times as fast as alone.",
    )
    for method, times in result["seconds_per_epoch_and_run"].items():
        middle = {width: statistics.median(times[str(width)]) for width in widths}
        alone = middle[widths[0]]
        table.add_row(method, *(f"{middle[width]:.3f} ({alone / middle[width]:.2f}×)" for width in widths))
    return table
