"""The record of a run: what was asked, where it ran, what came out. It can be read without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from gtracer.lab import files
from gtracer.lab.config import Config
from gtracer.lab.errors import LabError, one_line, shown
from gtracer.lab.results import archive
from gtracer.lab.schema import STRICT, AtLeastZero, problems

FORMAT = 1
NAME = "record.json"
METRICS = {"accuracy": "accuracy", "r2": "R²"}  # by which a run is judged: of classes, of real numbers


class Environment(TypedDict, total=False):
    __pydantic_config__ = STRICT | {"extra": "allow"}  # type: ignore[misc]
    commit: str | None
    versions: dict[str, Any]
    hardware: dict[str, Any]


class Evaluation(TypedDict, total=False):
    """What the last epoch's model made of the test data."""

    __pydantic_config__ = STRICT | {"extra": "ignore"}  # type: ignore[misc]
    classes: list[str]
    confusion: list[list[Annotated[int, Field(ge=0)]]]
    confused: list[Annotated[list[str | Annotated[int, Field(ge=0)]], Field(min_length=3, max_length=3)]]
    bins: list[Annotated[list[float], Field(min_length=3, max_length=3)]]


class Content(TypedDict):
    """What a record's file holds beside the configuration. Older ones have less."""

    __pydantic_config__ = STRICT | {"extra": "ignore"}  # type: ignore[misc]
    environment: Environment
    curves: dict[str, list[float | None]]
    seconds: list[AtLeastZero]
    peak_memory: Annotated[int, Field(ge=0, lt=2**63)]
    notes: NotRequired[list[str]]
    failure: NotRequired[str | None]
    resolved: NotRequired[dict[str, Any]]
    evaluation: NotRequired[Evaluation]


CONTENT = TypeAdapter(Content)


@dataclass
class Record:
    """One run. Everything in `config` and `curves` is the same for the same seed on the same machine.

    Attributes:
        config: What was asked.
        environment: Commit, versions, hardware.
        curves: One number an epoch: test_accuracy, test_loss, train_loss, memorised and recovered (of the wrongly
            labelled training examples, or the first 5,000 of them, the share given back with the wrong and with the
            true label; absent without label noise), holdout_accuracy (against labels as noisy as those to train on;
            absent without a holdout), trace_ratio, penalty_ratio, rho, lr. Accuracies are shares of one. Where
            labels are real numbers test_r2 and test_rmse, in the labels' unit, take the place of test_accuracy, and so
            do holdout_r2 and holdout_rmse; losses are of labels with mean 0 and deviation 1. With
            option `sharpness` also sharpness_top, sharpness_trace, sharpness_adaptive, sharpness_gradient and
            sharpness_trace_ratio; NaN where they were not measured.
        seconds: One number an epoch.
        peak_memory: In bytes, of the whole run.
        notes: What there was to say about model and data, such as how many texts were cut.
        failure: Why it ended before its last epoch: it diverged, and would again.
        resolved: What the configuration came to: ρ, δ, the model and the like as they were where nothing was asked.
            Older records have none.
        evaluation: What the last epoch's model made of the test data. `bins` are, by how sure it was of its prediction,
            how many examples there are, how sure on average, and which share was right; `confusion` is how often a
            class (row) was taken for a class (column), with their names as `classes`; of many classes `confused` has
            the pairs that came most often, and how often. Older records have none.
    """

    config: Config
    environment: dict[str, Any]
    curves: dict[str, list[float]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    peak_memory: int = 0
    notes: list[str] = field(default_factory=list)
    failure: str | None = None
    resolved: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)

    @property
    def epochs(self) -> int:
        """How many epochs are in it."""
        return len(self.seconds)

    @property
    def finished(self) -> bool:
        return self.epochs == self.config.epochs

    @property
    def metric(self) -> str:
        """What it is judged by: accuracy, or where labels are real numbers r2."""
        return next((name for name in METRICS if f"test_{name}" in self.curves), "accuracy")

    @property
    def test(self) -> list[float]:
        """That of the test data, epoch by epoch."""
        return self.curves.get(f"test_{self.metric}", [])

    @property
    def holds_out(self) -> bool:
        """Whether there is held-out data to choose an epoch by."""
        return f"holdout_{self.metric}" in self.curves

    def held_out(self) -> list[float]:
        """The score on held-out data by which epochs are chosen, the higher the better.

        Of real numbers the negative error: R², which says the same, there is none of a single example.
        """
        if self.metric == "accuracy":
            return self.curves["holdout_accuracy"]
        return [-error for error in self.curves["holdout_rmse"]]

    def add(self, row: dict[str, float], seconds: float) -> None:
        """Take up one epoch."""
        for name, value in row.items():
            self.curves.setdefault(name, []).append(value)
        self.seconds.append(seconds)

    def results(self) -> dict[str, Any]:
        """What the run has brought so far, for a checkpoint."""
        results = {"curves": self.curves, "seconds": self.seconds, "peak_memory": self.peak_memory}
        return results | {"evaluation": self.evaluation}

    def take(self, results: dict[str, Any]) -> None:
        """Take up a checkpoint's results, which may be an epoch ahead of the file."""
        self.curves, self.seconds, self.peak_memory = (results[key] for key in ("curves", "seconds", "peak_memory"))
        self.evaluation = results.get("evaluation", {})

    def summary(self) -> dict[str, Any]:
        """Last and best epoch (they differ by much under label noise), and the time."""
        scores = self.test
        if not scores:
            return {}
        best = max(range(len(scores)), key=scores.__getitem__)
        last = {name: values[-1] for name, values in self.curves.items()}
        return {
            "last": {"epoch": len(scores), **last},
            "best": {"epoch": best + 1, f"test_{self.metric}": scores[best]},
            "wall_time": sum(self.seconds),
        }

    def write(self, folder: Path) -> None:
        content = {"format": FORMAT, "finished": self.finished, **asdict(self), "summary": self.summary()}
        # Where the data lies is the machine's business: a record is for other machines too.
        content["config"] = self.config.to_mapping() | {"data": None}
        files.write(folder / NAME, (json.dumps(_without_nan(content), indent=1) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Record:
        """From a run's folder; refused in one line where it is damaged or of another format."""
        return cls.parsed(files.read(folder / NAME), folder / NAME)

    @classmethod
    def read_all(cls, path: Path, *, deep: bool = True) -> Iterator[tuple[Path, Record | LabError]]:
        """Of a folder of runs, or an archive of one: each run's folder, and its record or why it cannot be read.

        Args:
            path: Folder or archive.
            deep: Also the runs that lie deeper, such as those of other studies, and archives in the folder.
        """
        for folder, content in archive.contents(path, NAME, deep=deep):
            try:
                yield folder, cls.parsed(content(), folder / NAME)
            except LabError as error:
                yield folder, error

    @classmethod
    def parsed(cls, text: bytes, path: Path) -> Record:
        """From the file's content; the path is for what is said of it."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise LabError(f"{path} is damaged ({one_line(error)}): remove its folder to run it anew") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            found = content.get("format") if isinstance(content, dict) else type(content).__name__
            raise LabError(
                f"{path} has format {shown(found)}, this gtracer reads {FORMAT}: use the version that wrote it"
            )
        try:
            return cls._of(content)
        except LabError as error:
            raise LabError(f"{path} is damaged ({error}): remove its folder to run it anew") from error

    @classmethod
    def _of(cls, content: dict[str, Any]) -> Record:
        """Of a file's content, checked whole."""
        config = Config.from_mapping(_as_meant(content.get("config")))
        try:
            read: Any = CONTENT.validate_python(content)
        except ValidationError as error:
            raise problems(error) from error
        curves = {k: [math.nan if x is None else x for x in v] for k, v in read["curves"].items()}
        epochs = len(read["seconds"])
        uneven = [f"{name} of {len(values)}" for name, values in curves.items() if len(values) != epochs]
        if uneven or epochs > config.epochs or (epochs and not any(f"test_{name}" in curves for name in METRICS)):
            raise LabError(
                f"{epochs} of {config.epochs} epochs, with curves {', '.join(uneven) or shown(list(curves))}"
            )
        named = {name: read[name] for name in ("notes", "failure", "resolved", "evaluation") if name in read}
        return cls(config, read["environment"], curves, read["seconds"], read["peak_memory"], **named)


def _as_meant(values: Any) -> Any:
    """A configuration from before there was a choice of what feeds Adam-TRACER's second moment: the loss did."""
    if not isinstance(values, dict):
        return values
    older = "second_moment" not in values and values.get("optimizer") in ("adam-tracer", "adamw-tracer")
    return values | {"second_moment": "loss"} if older else values


def _without_nan(value: Any) -> Any:
    """NaN is not JSON: null stands for it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    return [_without_nan(v) for v in value] if isinstance(value, list) else value
