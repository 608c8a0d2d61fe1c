"""`gtracer tune`: ρ, δ and β by Optuna, on held-out training data whose labels are as wrong as the rest."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from gtracer.lab import files
from gtracer.lab.config import Config, numeric
from gtracer.lab.data import is_text
from gtracer.lab.errors import LabError, unknown
from gtracer.lab.results.record import Record
from gtracer.lab.sweeps.sweep import Engine, check, run_missing
from gtracer.lab.training import effects

HOLDOUT = 0.1
BATCH = 4  # trials asked for at a time: the same search, whatever the number of processes
FIRST_SEED = 1000  # far from those that results are reported for
BEST = "best.yaml"
# What matters of ρ and δ is their ratio (docs/algorithm.md), so that is searched.
RATIO = "rho/delta"
TRACER = {RATIO: (0.03, 3.0), "delta": (1e-3, 1e-1), "beta": (0.01, 0.5)}
SAM = {"rho": (0.01, 2.0)}
# An encoder that was trained before wants less of either (docs/results.md, "SuperGLUE").
TRACER_OF_TEXTS = TRACER | {RATIO: (5e-4, 0.05)}
SAM_OF_TEXTS = {"rho": (1e-3, 0.1)}
EDGE = 0.05  # of the range, on its logarithm


@dataclass(frozen=True)
class Range:
    """An option, and between which values it is searched, on a logarithmic scale."""

    name: str
    low: float
    high: float

    @classmethod
    def parse(cls, text: str) -> Range:
        """From NAME=LOW:HIGH.

        >>> Range.parse("rho/delta=0.1:2")
        Range(name='rho/delta', low=0.1, high=2.0)
        """
        name, _, ends = text.partition("=")
        known = [RATIO, *numeric()]
        if name not in known:
            raise unknown("option to search", name, known)
        try:
            low, high = map(float, ends.split(":"))
        except ValueError as error:
            raise LabError(f"a range is NAME=LOW:HIGH, got {text!r}") from error
        if not 0 < low < high < math.inf:
            raise LabError(f"a range is searched on a logarithmic scale: 0 < LOW < HIGH, got {text!r}")
        return cls(name, low, high)

    def edge(self, value: float) -> str | None:
        """Which end of the range the value lies at, if any.

        >>> Range("rho", 0.1, 10.0).edge(9.5), Range("rho", 0.1, 10.0).edge(1.0)
        ('upper', None)
        """
        place = math.log(value / self.low) / math.log(self.high / self.low)
        return "lower" if place < EDGE else "upper" if place > 1 - EDGE else None


@dataclass(frozen=True)
class Trial:
    """Values that were tried, and the share of held-out labels they got right, a number for each seed."""

    values: dict[str, float]
    scores: list[float]

    @property
    def score(self) -> float:
        return statistics.mean(self.scores)


def ranges(config: Config, given: list[Range]) -> list[Range]:
    """What is to be searched: what was given, and the optimiser's own knobs that were not set."""
    found = {item.name: item for item in given}
    tracer, sam = (TRACER_OF_TEXTS, SAM_OF_TEXTS) if is_text(config.task) else (TRACER, SAM)
    own = tracer if config.optimizer.endswith("-tracer") else sam if config.optimizer.endswith("sam") else {}
    for name, (low, high) in own.items():
        fixed = getattr(config, "rho" if name == RATIO else name) is not None
        elsewhere = name == RATIO and "rho" in found
        unused = name == "beta" and config.optimizer.startswith("adam")  # Adam's own second moment is f
        if not (fixed or elsewhere or unused):
            found.setdefault(name, Range(name, low, high))
    if not found:
        raise LabError(f"nothing to search for {config.optimizer!r}: give a range, such as --search lr=0.001:1")
    return list(found.values())


def check_ranges(config: Config, searched: list[Range]) -> None:
    """Refuse a range of values that cannot be, or change nothing."""
    for end in ("low", "high"):
        tried = configured(config, {item.name: getattr(item, end) for item in searched})
        effects.check(tried, {name: getattr(tried, name) for item in searched for name in item.name.split("/")})


def configured(config: Config, values: dict[str, float]) -> Config:
    """The configuration with these values; ρ from its ratio to δ."""
    plain: dict[str, Any] = {name: value for name, value in values.items() if name != RATIO}
    if RATIO in values:
        delta = plain.get("delta", config.delta)
        if delta is None:
            raise LabError(f"{RATIO} is searched, so δ must be searched or set: --delta 0.01")
        plain["rho"] = float(f"{values[RATIO] * delta:.3g}")
    return replace(config, **plain)


def tune(
    config: Config, searched: list[Range], trials: int, seeds: int, folder: Path, engine: Engine, console: Console
) -> Config:
    """Search; print the best trials; leave the best configuration in `best.yaml`. The test set is not looked at.

    The search asks for the same values when it is started again, so the records are all it needs to go on.

    Returns:
        The best configuration, to be trained on all data.
    """
    optuna = _optuna()
    base = config if config.holdout else replace(config, holdout=HOLDOUT)
    check(base)
    search = _search(optuna, searched, trials, config.seed)
    made: list[Trial] = []
    with files.locked(folder, "search"):
        while len(made) < trials:
            asked = [search.ask() for _ in range(min(BATCH, trials - len(made)))]
            tried = [{item.name: _suggested(trial, item) for item in searched} for trial in asked]
            records = run_missing(
                [cell for values in tried for cell in _cells(base, values, seeds)], folder, engine, console
            )
            for trial, values in zip(asked, tried, strict=True):
                made.append(Trial(values, [_score(records[cell.identity]) for cell in _cells(base, values, seeds)]))
                search.tell(trial, made[-1].score)
            console.out(_line(made[-len(asked) :], len(made), trials), highlight=False)
        best = max(made, key=lambda trial: trial.score)
        if best.score == 0:
            raise LabError(f"every one of {trials} trials diverged: lower lr, or the ranges")
        chosen = replace(configured(config, best.values), holdout=0.0)
        chosen.write(folder / BEST)
    for line in _told(best, made, searched, folder):
        console.out(line, highlight=False)
    return chosen


def _search(optuna: Any, searched: list[Range], trials: int, seed: int) -> Any:
    """The first half of the trials is spread evenly over the ranges: as many drawn at random leave gaps."""
    from scipy.stats.qmc import LatinHypercube

    spread = -(-trials // 2)
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=spread)
    search = optuna.create_study(direction="maximize", sampler=sampler)
    for places in LatinHypercube(len(searched), scramble=False, rng=seed).random(spread):
        pairs = zip(searched, places.tolist(), strict=True)
        search.enqueue_trial({item.name: item.low * (item.high / item.low) ** place for item, place in pairs})
    return search


def _suggested(trial: Any, item: Range) -> float:
    return float(f"{trial.suggest_float(item.name, item.low, item.high, log=True):.3g}")


def _cells(base: Config, values: dict[str, float], seeds: int) -> list[Config]:
    return [replace(configured(base, values), seed=FIRST_SEED + i) for i in range(seeds)]


def _score(record: Record) -> float:
    """The last epoch's, not the best's: the best is chosen by looking. A run that diverged got nothing right."""
    return 0.0 if record.failure is not None else record.curves["holdout_accuracy"][-1]


def _line(fresh: list[Trial], done: int, trials: int) -> str:
    best = max(fresh, key=lambda trial: trial.score)
    return f"{done}/{trials} trials, best of these {best.score:.1%}: {_shown(best.values)}"


def _told(best: Trial, made: list[Trial], searched: list[Range], folder: Path) -> list[str]:
    lines = [
        f"best of {len(made)}: {best.score:.2%} of the held-out labels (as wrong as the rest), {_shown(best.values)}"
    ]
    for item in searched:
        value, tried = best.values[item.name], [trial.values[item.name] for trial in made]
        if side := item.edge(value):
            lines.append(
                f"{item.name} = {value:g} lies at the {side} edge of its range ({item.low:g} to {item.high:g}): "
                f"search beyond it, --search {item.name}=LOW:HIGH"
            )
        elif len(made) > 2 and value in (min(tried), max(tried)):
            end = "lowest" if value == min(tried) else "highest"
            lines.append(f"{item.name} = {value:g} is the {end} of those tried: more trials may find a better one")
    return [*lines, f"train with it: gtracer train --config {folder / BEST}"]


def _shown(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


def _optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise LabError(f"gtracer tune needs {error.name}: pip install 'gtracer-optim[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
