"""Who is told how a run goes: a progress bar on the terminal, TensorBoard."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gtracer.lab.errors import LabError
from gtracer.lab.run import Run
from gtracer.optim.tracer import TracerOptimizer

QUIET_SECONDS = 10.0


class Bar:
    """A progress bar over one or several runs, with accuracy, loss, T and the time left.

    Where the output is no terminal (a log file), a line every so many seconds takes its place.
    """

    def __init__(self, console: Console, epochs: int, title: str = "") -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("epochs"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.title = title
        self._console = console
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._told = time.monotonic()
        self._task = self._progress.add_task(title, total=epochs)
        self._accuracy = float("nan")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, run: Run, loss: float) -> None:
        stats = run.optimizer.stats if isinstance(run.optimizer, TracerOptimizer) else None
        ratio = "" if stats is None else f"  T {stats.trace_ratio:.3g}"
        told = "" if self._accuracy != self._accuracy else f"  accuracy {self._accuracy:.1%}"
        line = f"{self.title}{told}  loss {loss:.3f}{ratio}"
        self._progress.update(self._task, description=line)
        if not self._console.is_terminal and time.monotonic() - self._told > QUIET_SECONDS:
            self._told = time.monotonic()
            self._console.print(f"epoch {run.epoch + 1}/{run.config.epochs}  {line}", highlight=False, soft_wrap=True)

    def epoch(self, run: Run, row: dict[str, float]) -> None:
        self._accuracy = row["test_accuracy"]
        self._progress.advance(self._task)

    def skip(self, epochs: int) -> None:
        """Epochs that an earlier session has made."""
        self._progress.advance(self._task, epochs)


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
            self._writer.add_scalar(name, value, run.epoch)
        self._writer.flush()
