"""`gtracer train`: from a configuration to a record, through interrupts and resumes."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from gtracer.lab import files
from gtracer.lab.config import Config
from gtracer.lab.data.task import Task
from gtracer.lab.errors import DivergedError, Interrupted, LabError
from gtracer.lab.results import provenance
from gtracer.lab.results.record import NAME, Record
from gtracer.lab.training import checkpoint, evaluation, resolution, sharpness, weights
from gtracer.lab.training.callbacks import Callback
from gtracer.lab.training.device import device_of
from gtracer.lab.training.distributed import joined
from gtracer.lab.training.interrupts import stop_on_interrupt
from gtracer.lab.training.run import Run
from gtracer.lab.training.steps import Eager, Steps

Progress = float | dict[str, float] | None  # the loss of a step; the row of an epoch; neither, where it only pauses


def train(
    config: Config,
    folder: Path,
    callbacks: list[Callback],
    *,
    resume: bool | None = False,
    model: bool = False,
    task: Task | None = None,
) -> Record:
    """Train, or go on training, and leave record and checkpoint in the folder. A finished run is not run again.

    Args:
        config: The run.
        folder: Its own.
        callbacks: Are told how it goes.
        resume: Go on with what the folder holds; None: if it holds any.
        model: Leave the model in the folder too, for use.
        task: The run's data, where that is not just what the configuration says.

    Raises:
        LabError: Where the folder holds another run, or something outside the program is wrong.
        DivergedError: Where the loss is not finite any more; the record says so, and it is not run again.
        Interrupted: On Ctrl-C, after saving.
    """
    with joined(device_of(config.device)) as processes, ExitStack() as lock:
        found = processes.from_first(lambda: claimed(folder, config, resume, lock))
        if found is not None and found.finished:
            return found
        steps = Eager(Run(config, processes, task))
        lock.callback(steps.run.part)
        record = begun(steps, folder, found)
        with stop_on_interrupt() as stopped, closing(fit(steps, record, folder, model=model)) as progress:
            for news in progress:
                for callback in callbacks:
                    if isinstance(news, dict):
                        callback.epoch(steps.run, news)
                    elif news is not None:
                        callback.step(steps.run, news)
                if not isinstance(news, dict) and processes.any(stopped()):
                    progress.close()
                    steps.save(folder, record.results())
                    raise Interrupted(f"go on with gtracer train --resume {folder}")
        return record


def fit(
    steps: Steps, record: Record, folder: Path, save_seconds: float = 0.0, *, model: bool = False
) -> Generator[Progress]:
    """The training loop, whoever makes the steps: to the last epoch, with record and checkpoint on the way.

    Args:
        steps: Makes them, and holds the run.
        record: Is filled, epoch by epoch.
        folder: Of the run.
        save_seconds: How long after one checkpoint the next is written, at the end of an epoch.
        model: Leave the model too.
    """
    run = steps.run
    # Before the first epoch is spent on a folder that cannot be written.
    run.processes.from_first(lambda: record.write(folder))
    if model:
        run.processes.from_first(lambda: weights.describe(run, record, folder))
    saved = time.monotonic()
    try:
        while run.epoch < run.config.epochs:
            row = yield from _epoch(steps)
            row |= sharpness.row(run)
            record.add(row, run.seconds)
            record.peak_memory = max(record.peak_memory, provenance.peak_memory(run.device))
            run.seconds = 0.0
            if record.finished:
                record.evaluation = evaluation.of(run)
            if model:  # before the checkpoint: a run that is killed in between makes this epoch, and its weights, again
                run.processes.from_first(lambda: weights.keep(run, record, folder))
            if time.monotonic() - saved >= save_seconds:
                # With the results: should the power fail between the two files, they are taken from the checkpoint.
                steps.save(folder, record.results())
                run.processes.from_first(lambda: record.write(folder))
                saved = time.monotonic()
            yield row
    except DivergedError as error:
        record.failure = str(error)
        if run.processes.is_first:
            record.write(folder)
        raise
    if run.processes.is_first:
        record.write(folder)
        (folder / checkpoint.NAME).unlink(missing_ok=True)


def _epoch(steps: Steps) -> Generator[Progress, None, dict[str, float]]:
    start = time.perf_counter()
    try:
        yield from steps.rest_of_epoch()
        return (yield from steps.finish_epoch())
    finally:
        steps.run.seconds += time.perf_counter() - start


def claimed(folder: Path, config: Config, resume: bool | None, lock: ExitStack) -> Record | None:
    """What the folder holds of this run, read under the folder's lock: until then another process may change it.

    A finished run needs no lock: it is read from folders too that cannot be written.
    """
    record = record_in(folder, config, resume)
    if record is not None and record.finished:
        return record
    lock.enter_context(files.locked(folder, "run"))
    record = record_in(folder, config, resume)
    if record is None:  # whose checkpoint it is nobody knows; a run that is killed early would go on from it
        with suppress(OSError):
            (folder / checkpoint.NAME).unlink(missing_ok=True)
    return record


def begun(steps: Steps, folder: Path, found: Record | None, in_parallel: int = 1) -> Record:
    """Load the checkpoint of what was found, or start from the first epoch with a record that says so.

    Epochs without a checkpoint cannot be gone on from, and must not be counted beside those that are made now.
    """
    run = steps.run
    if found is not None and run.processes.from_first((folder / checkpoint.NAME).exists):
        found.take(steps.load(folder))
        return found
    lost = 0 if found is None else found.epochs
    again = [f"started over: there was no checkpoint of the {lost} epochs made before"] if lost else []
    environment = provenance.describe(run.device, run.processes.world, in_parallel)
    return Record(run.config, environment, notes=[*run.notes, *again], resolved=resolution.of(run))


def record_in(folder: Path, config: Config, resume: bool | None) -> Record | None:
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
    if not record.finished and resume is False:
        raise LabError(f"{folder} holds this run, unfinished: go on with gtracer train --resume {folder}")
    if not record.finished and config.kernels != theirs["kernels"]:
        record.notes.append(f"kernels {theirs['kernels']} at first, {config.kernels} later")
    return record
