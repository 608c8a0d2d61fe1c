"""Runs of a study that is a script: those that are missing, by the runner of `gtracer sweep`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from gtracer.lab.config import Config
from gtracer.lab.results.record import Record
from gtracer.lab.sweeps.launchers.local import Local
from gtracer.lab.sweeps.sweep import run_missing

Key = TypeVar("Key")


def last_rows(configs: Mapping[Key, Config], folder: Path, workers: int) -> dict[Key, dict[str, float]]:
    """The last epoch of each; one that diverged has learnt nothing. Runs that the folder holds are not made again."""
    records = run_missing(configs.values(), folder, Local(workers), Console())
    return {key: _last(records[config.identity]) for key, config in configs.items()}


def _last(record: Record) -> dict[str, float]:
    if record.failure is not None:
        return {"test_accuracy": 0.0, "holdout_accuracy": 0.0, "diverged": 1.0}
    last: dict[str, float] = record.summary()["last"]
    return last
