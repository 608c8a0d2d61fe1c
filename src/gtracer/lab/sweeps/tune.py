"""`gtracer tune`: ρ, δ and β by Optuna, on held-out training data whose labels are as noisy as the rest.

Where ρ is to be looked for is found by short branches of a run (`find`), before the first trial.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gtracer.finder import RhoCurve
from gtracer.lab import data, files
from gtracer.lab.config import Config, numeric
from gtracer.lab.errors import LabError, unknown
from gtracer.lab.models import was_trained_before
from gtracer.lab.results.record import Record
from gtracer.lab.sweeps.find import HOLDOUT, find
from gtracer.lab.sweeps.sweep import Engine, check, run_missing
from gtracer.lab.training import effects
from gtracer.penalty import BETA, DELTA

BATCH = 4  # trials asked for at a time: the same search, whatever the number of processes
FIRST_SEED = 1000  # far from those that results are reported for
BEST = "best.yaml"
# What matters of ρ and δ is their ratio (docs/explanation/defaults.md), so that is searched.
RATIO = "rho/delta"
TRACER = {RATIO: (0.03, 3.0), "delta": (1e-3, 1e-1), "beta": (0.01, 0.5)}
SAM = {"rho": (0.01, 2.0)}
# An encoder that was trained before wants less of either (docs/results/benchmarks.md, "SuperGLUE").
TRACER_OF_TEXTS = TRACER | {RATIO: (5e-4, 0.05)}
SAM_OF_TEXTS = {"rho": (1e-3, 0.1)}
EDGE = 0.05  # of the range, on its logarithm
# Times the ρ that branches recommend: what is best in the end lies there or above (docs/how-to/choosing-rho.md).
BELOW, ABOVE = 1 / 3, 10
SHOWN = 10  # trials in the table
LEAST = 1e-9  # score of a run that did not diverge


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
    """Values that were tried, and the accuracy on held-out data, a number for each seed.

    Attributes:
        values: By name.
        scores: On held-out data.
        tests: On test data, which nothing is chosen by.
    """

    values: dict[str, float]
    scores: list[float]
    tests: list[float]

    @property
    def score(self) -> float:
        return statistics.mean(self.scores)

    def error(self, examples: int) -> float:
        """Standard error of the score: what so many held-out examples allow, or what seeds scatter by, if more.

        R², which is no share of examples, comes with none: seeds alone tell then.

        >>> round(Trial({}, [0.5], []).error(100), 3), round(Trial({}, [0.4, 0.6], []).error(100), 3)
        (0.05, 0.1)
        """
        counted = math.sqrt(self.score * (1 - self.score) / (examples * len(self.scores))) if examples else 0.0
        n = len(self.scores)
        return max(counted, statistics.stdev(self.scores) / math.sqrt(n) if n > 1 else 0.0)


def ranges(config: Config, given: list[Range]) -> list[Range]:
    """What is to be searched: what was given, and the optimiser's own hyper-parameters that were not set."""
    found = {item.name: item for item in given}
    if len(found) < len(given):
        twice = next(item.name for item in given if found[item.name] is not item)
        raise LabError(f"{twice} is searched twice: leave one --search {twice} out")
    if RATIO in found and ("rho" in found or config.rho is not None):
        raise LabError(f"{RATIO} is searched, and ρ comes from it: leave rho out")
    tracer, sam = (TRACER_OF_TEXTS, SAM_OF_TEXTS) if was_trained_before(config) else (TRACER, SAM)
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


def wants_range(searched: list[Range], given: list[Range]) -> bool:
    """Whether ρ is searched, and nobody has said where."""
    return any(item.name in (RATIO, "rho") and item not in given for item in searched)


def found(config: Config, folder: Path, console: Console) -> RhoCurve:
    """The curve of ρ by which the range is narrowed: that of the folder, where it has one."""
    console.out("finding where to look for ρ, by short branches", highlight=False)
    curve = find(replace(config, seed=FIRST_SEED), folder)
    console.out(curve.reason, highlight=False)
    return curve


def narrowed(searched: list[Range], config: Config, curve: RhoCurve) -> tuple[list[Range], dict[str, float]]:
    """The ranges with ρ's around what branches recommend, and the values to begin with; as they are if it is 0."""
    place = next((i for i, item in enumerate(searched) if item.name in (RATIO, "rho")), None)
    if place is None or curve.rho == 0:
        return searched, {}
    by = (config.delta or DELTA) if searched[place].name == RATIO else 1.0
    high = min([curve.rho * ABOVE, *(rho for rho in curve.collapsed if rho > curve.rho)])
    low = curve.rho * BELOW
    name = searched[place].name
    ranges = list(searched)
    ranges[place] = Range(name, *(float(f"{end / by:.3g}") for end in (low, high)))
    first = {name: float(f"{curve.rho / by:.3g}")}
    first |= {item.name: _first(item, config) for item in searched if item.name != name}
    return ranges, first


def _first(item: Range, config: Config) -> float:
    """An optimiser's own default, where it lies in the range; else the middle."""
    default = {"delta": DELTA, "beta": BETA}.get(item.name) or getattr(config, item.name)
    return default if default and item.low <= default <= item.high else math.sqrt(item.low * item.high)


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
    config: Config,
    searched: list[Range],
    trials: int,
    seeds: int,
    folder: Path,
    engine: Engine,
    console: Console,
    *,
    first: dict[str, float] | None = None,
    show_test: bool = False,
) -> Config:
    """Search; print the best trials; leave the best configuration in `best.yaml`.

    The search asks for the same values when it is started again, so the records are all it needs to go on.

    Args:
        config: The run.
        searched: What is varied, and where.
        trials: How many values are tried.
        seeds: Runs of each.
        folder: Of the trials.
        engine: Makes the runs.
        console: Is told what comes of it.
        first: The values of the first trial, if there are any to begin with.
        show_test: Whether the table has the accuracy on test data; nothing is chosen by it.

    Returns:
        The best configuration, to be trained on all data.
    """
    optuna = _optuna()
    base = config if config.holdout else replace(config, holdout=HOLDOUT)
    check(base)
    search = _search(optuna, searched, trials, config.seed, first or {})
    made: list[Trial] = []
    with files.locked(folder, "search"):
        while len(made) < trials:
            asked = [search.ask() for _ in range(min(BATCH, trials - len(made)))]
            tried = [{item.name: _suggested(trial, item) for item in searched} for trial in asked]
            records = run_missing(
                [cell for values in tried for cell in _cells(base, values, seeds)], folder, engine, console
            )
            for trial, values in zip(asked, tried, strict=True):
                own = [records[cell.identity] for cell in _cells(base, values, seeds)]
                made.append(Trial(values, [_score(record) for record in own], [_test(record) for record in own]))
                search.tell(trial, made[-1].score)
            console.out(_line(made[-len(asked) :], len(made), trials), highlight=False)
        best = max(made, key=lambda trial: trial.score)
        if best.score == 0:
            raise LabError(f"every one of {trials} trials diverged: lower lr, or the ranges")
        chosen = replace(configured(config, best.values), holdout=0.0)
        chosen.write(folder / BEST)
    examples, metric = _held_out(base)
    console.print(_table(made, examples, metric, show_test))
    for line in _conclusion(best, made, searched, folder, examples):
        console.out(line, highlight=False)
    return chosen


def _search(optuna: Any, searched: list[Range], trials: int, seed: int, first: dict[str, float]) -> Any:
    """After the first values half of the trials is spread evenly over the ranges: drawn at random they leave gaps."""
    from scipy.stats.qmc import LatinHypercube

    spread = -(-trials // 2)
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=spread)
    search = optuna.create_study(direction="maximize", sampler=sampler)
    if first:
        search.enqueue_trial(first)
        spread -= 1
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
    if record.failure is not None:
        return 0.0
    found = record.curves[f"holdout_{record.metric}"][-1]
    return max(found, LEAST) if record.metric == "r2" else found  # also of one worse than who always says the mean


def _test(record: Record) -> float:
    return 0.0 if record.failure is not None else record.test[-1]


def _held_out(base: Config) -> tuple[int, str]:
    """How many examples are held out, where they are counted; and what is measured on them."""
    task = data.load(base)
    if task.target is not None:
        return 0, "R²"
    return 0 if task.holdout is None else len(task.holdout.labels), "accuracy"


def _table(made: list[Trial], examples: int, metric: str, show_test: bool) -> Table:
    """The best trials, by their score on held-out data."""
    best = sorted(made, key=lambda trial: -trial.score)[:SHOWN]
    table = Table()
    names = list(best[0].values)
    for name in [*names, f"held-out {metric}", *([f"test {metric}"] if show_test else [])]:
        table.add_column(name, justify="right")
    for trial in best:
        cells = [f"{trial.values[name]:g}" for name in names]
        cells.append(f"{100 * trial.score:.1f} ± {100 * trial.error(examples):.1f}")
        table.add_row(*cells, *([f"{100 * statistics.mean(trial.tests):.1f}"] if show_test else []))
    return table


def _line(fresh: list[Trial], done: int, trials: int) -> str:
    best = max(fresh, key=lambda trial: trial.score)
    return f"{done}/{trials} trials, best of these {best.score:.1%}: {_shown(best.values)}"


def _conclusion(best: Trial, made: list[Trial], searched: list[Range], folder: Path, examples: int) -> list[str]:
    error = best.error(examples)
    level = sum(trial.score >= best.score - error for trial in made) - 1
    on = f"{examples} held-out examples" if examples else "held-out examples"
    lines = [
        f"best of {len(made)}: {best.score:.2%} ± {error:.2%} on {on} (labels as noisy as the "
        f"rest), {_shown(best.values)}; {level} others are within that error"
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
