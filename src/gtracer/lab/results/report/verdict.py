"""What came out, in sentences; and a caution where it may be chance."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass

from gtracer.lab.results.report.tables import probability
from gtracer.lab.results.statistics import Estimate, Result, Results, chance

FEW_RUNS = 5
FEW_EXAMPLES = 500  # of test data: one of them is a fifth of a point
FEW_NUMBERS = "a single outlier can move R² by points"
LIKELY = 0.05  # p from which on a difference is called one that may be chance


@dataclass(frozen=True)
class Score:
    """A method's finished runs: by what it is chosen, and what that is worth on test data; in per cent, by seed."""

    result: Result
    judged: float
    test: dict[int, float]

    @property
    def label(self) -> str:
        return self.result.point.label

    @property
    def estimate(self) -> Estimate:
        return Estimate.of(list(self.test.values()))

    @property
    def worth(self) -> str:
        """The estimate in words."""
        other = " and ".join(sorted(self.result.metrics - {"accuracy"}))
        return f"{other} of {self.estimate} %" if other else f"{self.estimate} %"


def sentences(results: Results) -> list[str]:
    """The first says all in one; where there are several settings, one for each follows."""
    settings = [setting for setting in results.study.settings if scores(results, setting)]
    if not settings:
        return ["Nothing has finished yet."]
    if len(settings) == 1:
        where = f"{settings[0]}: " if len(results.study.settings) > 1 and settings[0] else ""
        return [where + _sentence(results, settings[0])]
    return [_count(results, settings), *(f"{setting}: {_sentence(results, setting)}" for setting in settings)]


def scores(results: Results, setting: str) -> list[Score]:
    """The best first: by held-out data where all have some, else by test data at the last epoch."""
    there = [result for result in results.within(setting) if result.finished]
    made = [Score(r, statistics.mean(by.values()), by) for r in there for by in [r.by_seed()]]
    if _holds_out(there):
        made = [Score(r, statistics.mean(r.held_out()), r.chosen()) for r in there]
    return sorted(made, key=lambda score: -score.judged)


def _holds_out(there: list[Result]) -> bool:
    return all(len(result.chosen()) == len(result.finished) for result in there)


def _sentence(results: Results, setting: str) -> str:
    found = scores(results, setting)
    best, others = found[0], found[1:]
    held_out = _holds_out([score.result for score in found])
    at = "at each run's best epoch by held-out data" if held_out else "at the last epoch"
    if not others:
        return f"{best.label} reaches {best.worth} on test data {at}."
    by = " by held-out data" if held_out else ""
    if all(round(score.estimate.mean - best.estimate.mean, 1) == 0 for score in others):
        level = " and ".join(score.label for score in found) if len(found) < 4 else f"All {len(found)} methods"
        return f"{level} are level, with {best.worth} on test data {at}."
    at = "at each run's best epoch by it" if held_out else at
    methods = [score for score in others if score.result.point.method != best.result.point.method]
    second = max(methods or others, key=lambda score: score.estimate.mean)  # its own variants come after other methods
    equal = [score.label for score in others if held_out and score.judged == best.judged]
    first = f"level with {' and '.join(equal)}" if equal else "best"
    return f"{best.label} is {first}{by}, with {best.worth} on test data {at}, {_against(best, second)}."


def _against(best: Score, second: Score) -> str:
    pairs = [best.test[seed] - second.test[seed] for seed in best.test if seed in second.test]
    difference = statistics.mean(pairs) if pairs else best.estimate.mean - second.estimate.mean
    far = f"{abs(difference):.1f} points {'above' if difference > 0 else 'below'} {second.label}"
    if round(difference, 1) == 0:
        return f"level with {second.label}"
    p = chance(pairs)
    if p is None:
        return f"{far}, which {'one seed' if len(pairs) < 2 else f'{len(pairs)} seeds'} cannot tell from chance"
    return f"{far} ({probability(p)})" if p < LIKELY else f"{far}, which may be chance ({probability(p)})"


def _count(results: Results, settings: list[str]) -> str:
    best = Counter(scores(results, setting)[0].result.point.method for setting in settings)
    (first, times), *others = best.most_common()
    rest = "".join(f", {method} in {n}" for method, n in others)
    return f"{first} is best in {times} of {len(settings)} settings{rest}."


def cautions(results: Results) -> list[str]:
    """What to keep in mind before these numbers are believed."""
    found = [result for result in results.all if result.records]
    counts = sorted({len(result.finished) for result in found if result.finished})
    said = []
    if counts and counts[0] < FEW_RUNS:
        few = [n for n in counts if n < FEW_RUNS]
        runs = f"{few[0]} run" + "s" * (few[0] != 1) if len(few) == 1 else f"{few[0]} to {few[-1]} runs"
        cells = "each cell" if len(counts) == 1 else "some cells"
        tell = "differences of a point or two can be chance" if len(found) > 1 else "another seed gives another number"
        said.append(f"{runs} in {cells}: {tell}. {FEW_RUNS} seeds or more tell.")
    sizes = [int(n) for result in found for n in result.resolved.get("test_examples", []) if isinstance(n, int)]
    if sizes and 0 < min(sizes) < FEW_EXAMPLES:
        one = f"one of them is {100 / min(sizes):.1f} points" if results.metric == "accuracy" else FEW_NUMBERS
        said.append(f"{min(sizes)} test examples: {one}.")
    if lost := sum(result.diverged for result in found):
        said.append(f"{lost} run{'s' * (lost != 1)} diverged, and {'is' if lost == 1 else 'are'} in no mean.")
    return said
