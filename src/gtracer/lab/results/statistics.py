"""What records say about a study: means, standard errors, comparisons. It can be read without torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gtracer.lab import files
from gtracer.lab.config import Config
from gtracer.lab.errors import LabError
from gtracer.lab.results import archive, record
from gtracer.lab.results.record import Record
from gtracer.lab.sweeps import study
from gtracer.lab.sweeps.study import Point, Study

TEST = "paired t-test, two-sided, not corrected for the number of comparisons"


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its standard error; no error from a single seed.

    >>> print(Estimate.of([1.0, 2.0, 3.0]), Estimate.of([4.25]), Estimate.of([1.0, 2.0, 3.0]).deviation)
    2.0 ± 0.6 4.2 1.0
    """

    mean: float
    error: float | None
    n: int

    @classmethod
    def of(cls, values: list[float]) -> Estimate:
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(statistics.mean(values), error, len(values))

    @property
    def deviation(self) -> float | None:
        """Over seeds: what one more run would scatter by, where the error is what the mean would."""
        return None if self.error is None else self.error * math.sqrt(self.n)

    def __str__(self) -> str:
        return f"{self.mean:.1f}" if self.error is None else f"{self.mean:.1f} ± {self.error:.1f}"


@dataclass(frozen=True)
class Result:
    """A point of the study with the records there are of it."""

    point: Point
    records: tuple[Record, ...]  # in any state, by seed
    paper: tuple[float, float] | None

    @cached_property
    def finished(self) -> list[Record]:
        return [record for record in self.records if record.finished]

    @property
    def metrics(self) -> set[str]:
        """What its runs are judged by, in words."""
        return {record.METRICS[run.metric] for run in self.records if run.test}

    @property
    def diverged(self) -> int:
        return sum(record.failure is not None for record in self.records)

    @property
    def state(self) -> str:
        """What is to be said of it beside its numbers: nothing where every seed was run to its end.

        A mean over the runs that did not diverge would flatter the method: it is always said how many did.
        """
        wanted = len(self.point.seeds)
        counts = {
            "diverged": self.diverged,
            "unfinished": len(self.records) - len(self.finished) - self.diverged,
            "not run": wanted - len(self.records),
        }
        return ", ".join(what if n == wanted else f"{n} of {wanted} {what}" for what, n in counts.items() if n)

    def last(self, curve: str | None = None) -> list[float]:
        """The last epoch's values in per cent, a number for each finished run that has the curve; else of test data."""
        if curve is None:
            return [100 * r.test[-1] for r in self.finished]
        return [100 * r.curves[curve][-1] for r in self.finished if curve in r.curves]

    def by_seed(self) -> dict[int, float]:
        """The accuracy, or R², at the last epoch, in per cent, of each finished run."""
        return {r.config.seed: 100 * r.test[-1] for r in self.finished}

    def best(self) -> list[float]:
        return [100 * max(r.test) for r in self.finished]

    def chosen(self) -> dict[int, float]:
        """By seed, the same at the epoch that is best by held-out data, the first of equals; where some is."""
        return {
            r.config.seed: 100 * r.test[scores.index(max(scores))]
            for r in self.finished
            if r.holds_out
            for scores in [r.held_out()]
        }

    def held_out(self) -> list[float]:
        """The score on held-out data at that epoch, the higher the better."""
        return [max(r.held_out()) for r in self.finished if r.holds_out]

    def estimate(self, values: list[float]) -> Estimate | None:
        return Estimate.of(values) if values else None

    @property
    def accuracy(self) -> Estimate | None:
        return self.estimate(self.last())

    @property
    def seconds(self) -> float | None:
        """An epoch's time, the median over all epochs of the finished runs that had their device to themselves.

        In parallel a run's clock shows its neighbours' steps too.
        """
        alone = [r for r in self.finished if "runs_side_by_side" not in r.environment.get("hardware", {})]
        times = [second for r in alone for second in r.seconds]
        return statistics.median(times) if times else None

    @property
    def resolved(self) -> dict[str, list[Any]]:
        """What its options came to: of each the values that its records tell of, most often one."""
        resolved = [record.resolved for record in self.records]
        names = dict.fromkeys(name for one in resolved for name in one)
        return {name: list({str(one[name]): one[name] for one in resolved if name in one}.values()) for name in names}

    @property
    def machine(self) -> set[str]:
        """Where the runs were made, as far as it decides their speed."""
        return {str(sorted(r.environment.get("hardware", {}).items())) for r in self.finished}

    @property
    def kernels(self) -> set[str]:
        """What computed the network: each kind draws other dropout masks and rounds otherwise."""
        return {r.config.kernels for r in self.finished}

    @property
    def is_tracer(self) -> bool:
        return self.point.config.optimizer.endswith("-tracer")


@dataclass(frozen=True)
class Comparison:
    """A method against the best of the others in the same setting, over the seeds that both have finished.

    A seed gives both the same weights to start from, order of the data and label noise.
    """

    against: str
    difference: float  # in points of per cent
    p: float | None  # none where they share one seed only, or differ by the same for each


class Results:
    """A study's points with their records, and what they say of each other."""

    def __init__(self, of: Study, records: Iterable[Record], folders: Mapping[Config, Path] | None = None) -> None:
        """Group them.

        Args:
            of: The study.
            records: Of any runs; those that it does not ask for are counted alone.
            folders: Where the runs lie, by `Config.identity`.
        """
        self.study, records = of, list(records)
        self.folders = folders or {}
        self.given = len(records)
        by_cell = {r.config.identity: r for r in records}
        self.all = [self._result(point, by_cell) for point in of.points()]

    def _result(self, point: Point, by_cell: dict[Config, Record]) -> Result:
        cells = [config.identity for config in point.configs()]
        found = tuple(by_cell[cell] for cell in cells if cell in by_cell)
        paper = self.study.of_paper(point)
        return Result(point, found, None if paper is None else (paper[0], paper[1]))

    @property
    def metric(self) -> str:
        """What the runs are judged by, in words."""
        return " and ".join(sorted(set[str]().union(*(result.metrics for result in self.all)) or {"accuracy"}))

    def within(self, setting: str) -> list[Result]:
        return [result for result in self.all if result.point.setting == setting]

    def baseline(self, setting: str) -> Result | None:
        """The best of the methods other than TRACER, by its mean at the last epoch."""
        others = [(r.accuracy.mean, r) for r in self.within(setting) if not r.is_tracer and r.accuracy]
        return max(others, key=lambda pair: pair[0])[1] if others else None

    def comparison(self, result: Result) -> Comparison | None:
        """TRACER against the best baseline; nothing for a baseline itself."""
        best = self.baseline(result.point.setting)
        if not result.is_tracer or best is None:
            return None
        ours, theirs = result.by_seed(), best.by_seed()
        differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
        return Comparison(best.point.label, statistics.mean(differences), chance(differences)) if differences else None

    def note(self, result: Result) -> str:
        """Its state; and with which kernels it was run, where those that it is compared with had others."""
        differ = len(set[str]().union(*(other.kernels for other in self.within(result.point.setting)))) > 1
        used = f"kernels {' and '.join(sorted(result.kernels))}" if differ and result.kernels else ""
        return ", ".join(part for part in (result.state, used) if part)

    def relative_cost(self, result: Result) -> float | None:
        """An epoch's time over that of the setting's first method, where both were run on equal machines."""
        first = self.within(result.point.setting)[0]
        if result.seconds is None or first.seconds is None or len(result.machine | first.machine) > 1:
            return None
        return result.seconds / first.seconds


def chance(differences: list[float]) -> float | None:
    """The probability of so large a mean, in either direction, were there no difference: a t-test."""
    if len(differences) < 2 or statistics.stdev(differences) < 1e-9:  # nothing but rounding
        return None
    from scipy.stats import ttest_1samp

    return float(ttest_1samp(differences, 0.0).pvalue)


def read(path: Path, of: Study | None = None) -> tuple[Results, list[str]]:
    """The records of a folder or an archive, under a study: a given one, that which made them, or one made up.

    The last is of what the records differ in. With it comes a line for each record that cannot be read: the others are
    reported without it.
    """
    if not (files.is_folder(path) or archive.is_packed(path)):
        raise LabError(f"{path} is no folder and no archive: give what gtracer sweep, train or records pack wrote")
    records: list[Record] = []
    problems: list[str] = []
    folders: dict[Config, Path] = {}
    for folder, found in Record.read_all(path):
        if isinstance(found, LabError):
            problems.append(str(found))
        else:
            records.append(found)
            folders[found.config.identity] = folder
    of = of or Study.beside(path)
    if of is None and not records:
        raise LabError("; ".join([f"{path} holds no readable {record.NAME}: there is nothing to report", *problems]))
    return Results(of or implied(records), records, folders), problems


def implied(records: list[Record]) -> Study:
    """A study whose methods are the records' different configurations, told apart by what they differ in."""
    configs = list(dict.fromkeys(replace(r.config.identity, seed=0) for r in records))
    mappings = [config.to_mapping() for config in configs]
    differing = [k for k in mappings[0] if k != "optimizer" and any(m[k] != mappings[0][k] for m in mappings)]
    methods = {_label(mapping, differing): mapping for mapping in mappings}
    seeds = sorted({r.config.seed for r in records})
    title = ", ".join(sorted({r.config.task for r in records}))
    return Study.from_mapping({"title": title, "seeds": seeds, "methods": methods})


def _label(mapping: dict[str, Any], differing: list[str]) -> str:
    options = [f"{study.SYMBOLS.get(k, k)} {mapping[k]}" for k in differing if mapping[k] is not None]
    return ", ".join([mapping["optimizer"], *options])
