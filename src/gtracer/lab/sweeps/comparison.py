"""`gtracer compare`: an optimiser, SAM and TRACER on one's own data, chosen by held-out data, and the report."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gtracer.lab.config import Config
from gtracer.lab.errors import DivergedError, LabError
from gtracer.lab.results import report
from gtracer.lab.results.statistics import Estimate
from gtracer.lab.sweeps import sweep
from gtracer.lab.sweeps.study import Study
from gtracer.lab.training import optimizers
from gtracer.lab.training.callbacks import ProgressBar
from gtracer.lab.training.trainer import train
from gtracer.lab.training.weights import best_epoch

HOLDOUT = 0.1
FEW = 5  # runs, below which a difference has to be large to be told from chance


@dataclass(frozen=True)
class Outcome:
    """A method's runs: accuracies, or R², in per cent at the epoch that is best by held-out data, run by run."""

    method: str
    held_out: list[float]
    test: list[float]
    scores: list[float]  # on held-out data, the higher the better
    folders: list[Path]
    diverged: int
    metric: str = "accuracy"

    @property
    def score(self) -> float:
        return statistics.mean(self.scores) if self.scores else float("-inf")

    @property
    def best_run(self) -> Path:
        """The one to use: the best by held-out data."""
        return self.folders[max(range(len(self.scores)), key=self.scores.__getitem__)]


def study(config: Config, seeds: int, asked: dict[str, Any]) -> Study:
    """Three methods that differ in the optimiser alone, with one setting: all other options as asked."""
    base, _ = optimizers.parsed(config.optimizer)
    if "holdout" in asked and not config.holdout:
        raise LabError("holdout must be above 0: methods are compared by held-out data. Leave it out")
    common = {"holdout": config.holdout or HOLDOUT} | asked
    methods = {name: {"optimizer": optimizer} for name, optimizer in _methods(base).items()}
    left = {name: value for name, value in common.items() if name not in ("optimizer", "seed")}
    title = f"{Path(config.task).stem}: {', '.join(methods)}"
    about = "Accuracy, or R² of real numbers, on test labels as they are; they may be noisy."
    return Study.from_mapping({"title": title, "about": about, "base": left, "seeds": seeds, "methods": methods})


def _methods(base: str) -> dict[str, str]:
    name = optimizers.BASES[base].__name__
    return {name: base, f"{name} + SAM": f"{base}-sam", f"{name} + TRACER": f"{base}-tracer"}


def compare(wanted: Study, folder: Path, console: Console, tell: Callable[[str], None]) -> list[Outcome]:
    """Train what is missing, one after the other, and say what came out. Each run leaves its model.

    Args:
        wanted: What `study` gives.
        folder: Of the runs; the report goes to `report` there.
        console: Is told how it goes.
        tell: Is told of records that cannot be read.
    """
    for config in wanted.configs():
        sweep.check(config)
    sweep.check_effects(wanted)
    wanted.write(folder)
    there = sweep.RunsFolder.of(folder)
    outcomes = [_outcome(point.method, point.configs(), there, console) for point in wanted.points()]
    console.print(_table(outcomes))
    page = report.write(folder, folder / "report", tell)
    console.out(_sentence(outcomes), highlight=False)
    console.out(f"Report with curves: {page}", highlight=False)
    return outcomes


def _outcome(method: str, configs: list[Config], there: sweep.RunsFolder, console: Console) -> Outcome:
    outcome = Outcome(method, [], [], [], [], 0)
    for config in configs:
        place = there.place(config)
        console.out(f"{method}, seed {config.seed}", highlight=False)
        try:
            with ProgressBar(console, config.epochs) as bar:
                record = train(config, place, [bar], resume=None, model=True)
        except DivergedError:
            outcome = replace(outcome, diverged=outcome.diverged + 1)
            continue
        epoch = best_epoch(record) - 1
        outcome = replace(outcome, metric=record.metric)
        outcome.held_out.append(100 * record.curves[f"holdout_{record.metric}"][epoch])
        outcome.test.append(100 * record.test[epoch])
        outcome.scores.append(record.held_out()[epoch])
        outcome.folders.append(place)
    return outcome


def _table(outcomes: list[Outcome]) -> Table:
    what = "Accuracy" if {outcome.metric for outcome in outcomes} == {"accuracy"} else "R²"
    made = Table(caption=f"{what} in %, at each run's best epoch by held-out data; mean ± standard error over seeds.")
    for heading in ("", "n", "held-out", "test", "diverged"):
        made.add_column(heading, justify="right" if heading else "left")
    for outcome in outcomes:
        cells = (str(Estimate.of(values)) if values else "" for values in (outcome.held_out, outcome.test))
        made.add_row(Text(outcome.method), str(len(outcome.test)), *cells, str(outcome.diverged or ""))
    return made


def _sentence(outcomes: list[Outcome]) -> str:
    """What came out: the choice is by held-out data alone, and test data says what it is worth."""
    best = max(outcomes, key=lambda outcome: outcome.score)
    if not best.scores:
        raise LabError("all runs diverged: lower --lr")
    of = "R² of " if best.metric == "r2" else ""
    level = [o.method for o in outcomes if o is not best and o.score == best.score]
    first = f"level with {' and '.join(level)}" if level else "best"
    found = f"{best.method} is {first} by held-out data, with {of}{Estimate.of(best.test)}% on test data"
    others = ", ".join(f"{o.method} {Estimate.of(o.test)}%" for o in outcomes if o is not best and o.test)
    n = len(best.test)
    few = f" n = {n} is few: --seeds {FEW} or more." if n < FEW else ""
    return f"{found} ({others}).{few} Its model: {best.best_run}"
