"""How all benchmarks measure, and what they leave: steps taken in turn, memory, a table, a JSON file."""

from __future__ import annotations

import gc
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text
from torch.profiler import ProfilerActivity, profile

from gtracer.lab import files
from gtracer.lab.results import provenance
from gtracer.lab.training.cuda_graph import capture
from gtracer.lab.training.device import device_of

Step = Callable[[], Any]


def place_of(device: str) -> torch.device:
    """The device, with the fastest kernel for each shape, for every row alike."""
    torch.backends.cudnn.benchmark = True
    return device_of(device)


def captured(step: Step, times: int = 1) -> Step:
    """So many steps as one CUDA graph, after a few on a stream of their own."""

    def replay() -> Step:
        graph.replay()
        return step  # the graph holds addresses alone: what lies there must stay

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3 * times):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph, _ = capture(lambda: [step() for _ in range(times)])
    return replay


def seconds_of(steps: dict[str, Step], rounds: int, device: torch.device, times: int = 1) -> dict[str, list[float]]:
    """Seconds of each step, in turn in every round, so that all see the same machine."""
    seconds: dict[str, list[float]] = {}
    for seconds in in_turn(steps, rounds, device, times):  # noqa: B007
        pass
    return seconds


def in_turn(
    steps: dict[str, Step], rounds: int, device: torch.device, times: int = 1
) -> Iterator[dict[str, list[float]]]:
    """The same as it comes, round by round.

    Args:
        steps: What is measured.
        rounds: How many measurements are made of each; two before them warm up.
        device: Where.
        times: A measurement is the mean of so many steps: back to back on a GPU, as in training; on a CPU, which other
            processes slow down at times, the rows take turns step by step.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    turns, back_to_back = (1, times) if device.type == "cuda" else (times, 1)
    for turn in track(range(-2, rounds), description="rounds", transient=True):
        taken = dict.fromkeys(steps, 0.0)
        for _ in range(turns):
            for name, step in steps.items():
                _finish(device)
                start = time.perf_counter()
                for _ in range(back_to_back):
                    step()
                _finish(device)
                taken[name] += time.perf_counter() - start
        if turn >= 0:
            for name, total in taken.items():
                seconds[name].append(total / times)
            yield seconds


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak(step: Step, device: torch.device, *, first: int = 0) -> int:
    """Bytes that a step asks torch for, at their highest, beyond what was there before it.

    As asked for: what the GPU's allocator rounds them up to depends on the blocks that it has lying about.

    Args:
        step: Makes it.
        device: Where.
        first: Look at so many first steps, in which an optimiser allocates its state too; 0: at one later step.
    """
    if not first:
        step()  # the optimiser's state is there then
    gc.collect()  # what others left would be freed, and counted, in between
    if device.type == "cuda":
        _finish(device)
        before: int = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats(device)
        for _ in range(first or 1):
            step()
        _finish(device)
        highest: int = torch.cuda.memory_stats(device)["requested_bytes.all.peak"]
        return highest - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        for _ in range(first or 1):
            step()
    changes = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    highest = max(itertools.accumulate((event.nbytes() for event in changes), initial=0))
    return highest


def result_of(bench: str, place: torch.device, **numbers: Any) -> dict[str, Any]:
    """What a benchmark has found, and where."""
    return {"bench": bench, **provenance.describe(place), **numbers}


def title(result: dict[str, Any], *words: str) -> str:
    """What was measured, and on which machine."""
    hardware = result["hardware"]
    return ", ".join([*words, hardware.get("gpu", f"{hardware['threads']} threads of a CPU")])


def table_of(title: str, columns: Sequence[str], left: int = 1, caption: str | None = None) -> Table:
    """An empty table, whose first columns hold names and the others numbers."""
    table = Table(title=Text(title, style="table.title"), caption=caption)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < left else "right", no_wrap=True)
    return table


def publish(result: dict[str, Any], tables: Sequence[Table], out: Path | None, console: Console) -> None:
    """Print the tables; write all numbers, if so wished."""
    for table in tables:
        console.print(table)
    write(result, out)


def write(result: dict[str, Any], out: Path | None) -> None:
    """All numbers as JSON, if so wished."""
    if out is not None:
        files.write(out, (json.dumps(result, indent=1) + "\n").encode())
