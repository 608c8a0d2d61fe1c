"""Who is told how a run goes: a progress bar on the terminal, TensorBoard."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gtracer.lab.errors import LabError
from gtracer.lab.training.run import Run
from gtracer.optim import TwoPassOptimizer

QUIET_SECONDS = 10.0


class Callback(Protocol):
    """Is told what happens."""

    def step(self, run: Run, loss: float) -> None: ...

    def epoch(self, run: Run, row: dict[str, float]) -> None: ...


class ProgressBar:
    """A progress bar over the epochs of a run, with accuracy, loss, T and the time left.

    Where the output is no terminal (a log file), a line every so many seconds takes its place.
    """

    def __init__(self, console: Console, epochs: int) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("epochs"),
            TimeRemainingColumn(compact=True),
        )
        self._console = console
        self._progress = Progress(
            *columns, console=console, transient=True, expand=True, disable=not console.is_terminal
        )
        self._reported = time.monotonic()
        self._task = self._progress.add_task("", total=epochs)
        self._score = ""
        self._noted = 0

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, run: Run, loss: float) -> None:
        for note in run.notes[self._noted :]:
            self._console.out(note, highlight=False)
        self._noted = len(run.notes)
        stats = (
            run.optimizer.stats
            if isinstance(run.optimizer, TwoPassOptimizer) and run.optimizer.rule.keeps_average
            else None
        )
        ratio = "" if stats is None else f"  T {stats.trace_ratio:.3g}"
        line = f"{self._score}loss {loss:.3f}{ratio}"
        self._progress.update(self._task, description=line, completed=run.epoch + run.step / run.steps_an_epoch)
        if not self._console.is_terminal and time.monotonic() - self._reported > QUIET_SECONDS:
            self._reported = time.monotonic()
            self._console.out(f"epoch {run.epoch + 1}/{run.config.epochs}  {line}", highlight=False)

    def epoch(self, run: Run, row: dict[str, float]) -> None:
        score = f"accuracy {row['test_accuracy']:.1%}" if "test_accuracy" in row else f"R² {row['test_r2']:.3f}"
        self._score = f"{score}  "


class TensorBoard:
    """Every epoch's row as scalars."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise LabError(f"--tensorboard needs {error.name}: pip install 'gtracer-optim[tensorboard]'") from error
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def step(self, run: Run, loss: float) -> None:
        pass

    def epoch(self, run: Run, row: dict[str, float]) -> None:
        for name, value in row.items():
            if math.isfinite(value):  # what is not measured in every epoch is NaN in the others
                self._writer.add_scalar(name, value, run.epoch)
        self._writer.flush()
