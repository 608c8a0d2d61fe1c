"""`gtracer train`: from a configuration to a record, through interrupts and resumes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Protocol

from gtracer.lab import files
from gtracer.lab.config import Config
from gtracer.lab.errors import DivergedError, Interrupted, LabError
from gtracer.lab.results import provenance
from gtracer.lab.results.record import NAME, Record
from gtracer.lab.training import resolution
from gtracer.lab.training.distributed import joined
from gtracer.lab.training.run import CHECKPOINT, Run, device_of


class Watcher(Protocol):
    """Is told what happens: a progress bar, TensorBoard, nobody."""

    def step(self, run: Run, loss: float) -> None: ...

    def epoch(self, run: Run, row: dict[str, float]) -> None: ...


def train(config: Config, folder: Path, watchers: list[Watcher], *, resume: bool = False) -> Record:
    """Train, or go on training, and leave record and checkpoint in the folder. A finished run is not run again.

    Raises:
        LabError: Where the folder holds another run, or something outside the program is wrong.
        DivergedError: Where the loss is not finite any more; the record says so, and it is not run again.
        Interrupted: On Ctrl-C, after saving.
    """
    with joined(device_of(config.device)) as ranks:
        record = ranks.from_first(lambda: record_in(folder, config, resume))
        if record is not None and record.finished:
            return record
        run = Run(config, ranks)
        where = provenance.describe(run.device, ranks.world)
        record = record or Record(config, where, notes=run.notes, resolved=resolution.of(run))
        with files.locked(folder, "run") if ranks.is_first else nullcontext():
            _train(run, record, folder, watchers, resume)
        return record


def _train(run: Run, record: Record, folder: Path, watchers: list[Watcher], resume: bool) -> None:
    if resume and (folder / CHECKPOINT).exists():
        record.take(run.load(folder))
    # Before the first epoch is spent on a folder that cannot be written.
    run.ranks.from_first(lambda: record.write(folder))
    try:
        with stop_on_interrupt() as stopped:
            while run.epoch < run.config.epochs:
                _one_epoch(run, record, folder, watchers, stopped)
    except DivergedError as error:
        record.failure = str(error)
        if run.ranks.is_first:
            record.write(folder)
        raise
    if run.ranks.is_first:
        (folder / CHECKPOINT).unlink(missing_ok=True)


def _one_epoch(run: Run, record: Record, folder: Path, watchers: list[Watcher], stopped: Callable[[], bool]) -> None:
    start = time.perf_counter()
    for loss in run.rest_of_epoch():
        for watcher in watchers:
            watcher.step(run, loss)
        if run.ranks.any(stopped()):
            run.seconds += time.perf_counter() - start
            run.save(folder, record.results())
            raise Interrupted(f"go on with gtracer train --resume {folder}")
    row = run.finish_epoch()
    record.add(row, run.seconds + time.perf_counter() - start)
    record.peak_memory = max(record.peak_memory, provenance.peak_memory(run.device))
    run.seconds = 0.0
    # The checkpoint holds the results too: should the power fail between the two files, they are taken from there.
    run.save(folder, record.results())
    run.ranks.from_first(lambda: record.write(folder))
    for watcher in watchers:
        watcher.epoch(run, row)


def record_in(folder: Path, config: Config, resume: bool) -> Record | None:
    """What the folder holds of this run; refused where it holds another."""
    if not files.exists(folder / NAME):
        if resume:
            raise LabError(f"{folder} holds no {NAME}: there is nothing to resume")
        return None
    record = Record.read(folder)
    theirs = record.config.to_mapping()
    ours = config.to_mapping() | {"data": None, "kernels": theirs["kernels"]}
    other = [f"{name} {theirs[name]!r}, not {ours[name]!r}" for name in ours if ours[name] != theirs[name]]
    if other:
        raise LabError(f"{folder} holds another run ({'; '.join(other)}): choose another folder")
    if record.failure is not None:
        raise DivergedError(record.failure)
    if not record.finished and not resume:
        raise LabError(f"{folder} holds this run, unfinished: go on with gtracer train --resume {folder}")
    if not record.finished and config.kernels != theirs["kernels"]:
        record.notes.append(f"kernels {theirs['kernels']} at first, {config.kernels} later")
    return record


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Let the step under way be finished on the first Ctrl-C; a second one stops at once.

    Not one in the same second: it is the first again, from the terminal and from torchrun.
    """
    seen: float | None = None

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen is not None and time.monotonic() - seen > 1:
            raise KeyboardInterrupt
        seen = seen or time.monotonic()

    if threading.current_thread() is not threading.main_thread():  # only the main thread may catch signals
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: seen is not None
    finally:
        signal.signal(signal.SIGINT, before)
