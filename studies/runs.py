"""Runs of a study that is a script, made as those of `gtracer sweep` are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from gtracer.lab.config import Config
from gtracer.lab.errors import LabError
from gtracer.lab.results.record import Record
from gtracer.lab.sweeps.launchers.local import Event, Job, Local, failure_of
from gtracer.lab.sweeps.sweep import Engine, run_missing

Key = TypeVar("Key")


def last_rows(configs: Mapping[Key, Config], folder: Path, workers: int) -> dict[Key, dict[str, float]]:
    """The last epoch of each; one that diverged has learnt nothing. Runs that the folder holds are not made again."""
    records = run_missing(configs.values(), folder, Local(workers), Console())
    return {key: last_row(records[config.identity]) for key, config in configs.items()}


def in_turn(jobs: Iterable[Job]) -> Iterator[Event]:
    """An engine without other processes: the study itself is several."""
    for job in jobs:
        yield Event(job.config, ended=True, failure=failure_of(job, []))


def make(jobs: list[Job], engine: Engine) -> list[Record]:
    """Train all that are not there yet; their records."""
    for failure in [event.failure for event in engine(jobs) if event.failure is not None]:
        raise LabError(failure)
    return [Record.read(job.folder) for job in jobs]


def last_row(record: Record) -> dict[str, float]:
    """The last epoch; a run that diverged has learnt nothing."""
    if record.failure is not None:
        return {"test_accuracy": 0.0, "holdout_accuracy": 0.0, "diverged": 1.0}
    last: dict[str, float] = record.summary()["last"]
    return last
