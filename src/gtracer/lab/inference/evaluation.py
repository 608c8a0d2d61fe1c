"""`gtracer evaluate`: accuracy, class by class, confusions, and how far probabilities can be believed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from rich.table import Table
from rich.text import Text
from torch import Tensor

from gtracer.calibration import BINS, calibration
from gtracer.lab import files
from gtracer.lab.config import REAL
from gtracer.lab.data.labels import numbers
from gtracer.lab.errors import LabError, shown
from gtracer.lab.inference import figure
from gtracer.lab.inference.residuals import NAME, Residuals
from gtracer.lab.inference.trained import Trained
from gtracer.lab.training.weights import require_same_data

SHOWN = 30  # classes in the table and the picture
MOST = 1000  # classes that a confusion matrix has


@dataclass(frozen=True)
class Evaluation:
    """What a model made of labelled examples.

    Attributes:
        classes: Their names.
        labels: As they were given.
        probabilities: A row for each example.
    """

    classes: tuple[str, ...]
    labels: Tensor
    probabilities: Tensor

    @property
    def predicted(self) -> Tensor:
        return self.probabilities.argmax(1)

    @property
    def are_many(self) -> bool:
        """Whether there are too many classes for a matrix of them."""
        return len(self.classes) > MOST

    def confusion(self) -> Any:
        """How often a label (row) was taken for a class (column)."""
        from sklearn.metrics import confusion_matrix

        return confusion_matrix(self.labels, self.predicted, labels=range(len(self.classes)))

    def of_classes(self) -> list[dict[str, Any]]:
        """Precision, recall and F1 of each class; None where there is nothing to divide by."""
        from sklearn.metrics import precision_recall_fscore_support

        found = precision_recall_fscore_support(
            self.labels, self.predicted, labels=range(len(self.classes)), zero_division=numpy.nan
        )
        rows = zip(self.classes, *(each.tolist() for each in found), strict=True)
        names = ("class", "precision", "recall", "f1", "examples")
        return [{k: None if v != v else v for k, v in zip(names, row, strict=True)} for row in rows]

    def summary(self) -> dict[str, Any]:
        """In plain values, for JSON."""
        accuracy = (self.predicted == self.labels).double().mean().item()
        errors = calibration(self.probabilities, self.labels)
        whole = {"examples": len(self.labels), "accuracy": accuracy, **errors, "classes": self.of_classes()}
        return whole if self.are_many else whole | {"confusion": self.confusion().tolist()}

    def table(self) -> Table:
        """The classes that do worst, at most thirty."""
        rows = sorted(self.of_classes(), key=lambda row: 1.0 if row["recall"] is None else row["recall"])
        rest = len(rows) - SHOWN
        made = Table(caption=f"and {rest} classes with more recall: {NAME}" if rest > 0 else None)
        for name in ("class", "precision", "recall", "F1", "examples"):
            made.add_column(name, justify="left" if name == "class" else "right")
        for row in rows[:SHOWN]:
            shares = ("" if row[k] is None else f"{row[k]:.1%}" for k in ("precision", "recall", "f1"))
            made.add_row(Text(row["class"]), *shares, str(row["examples"]))
        return made

    def in_a_line(self) -> str:
        """What came out, in a line."""
        summary = self.summary()
        return (
            f"accuracy {summary['accuracy']:.2%} of {summary['examples']} examples, "
            f"negative log-likelihood {summary['nll']:.3f}, calibration error {summary['ece']:.1%}"
        )

    def write(self, folder: Path) -> None:
        """The summary as JSON, and the two pictures."""
        content = json.dumps(self.summary(), indent=1, ensure_ascii=False) + "\n"
        files.write(folder / NAME, content.encode())
        if not self.are_many:
            figure.write(folder / "confusion.png", self._draw_confusion)
        figure.write(folder / "calibration.png", self._draw_calibration)

    def _draw_confusion(self, drawn: Any) -> None:
        axes = drawn.subplots()
        counts = self.confusion()
        image = axes.imshow(counts / numpy.maximum(counts.sum(1, keepdims=True), 1), cmap="Blues", vmin=0, vmax=1)
        drawn.colorbar(image, label="share of the label's examples")
        axes.set(xlabel="predicted", ylabel="label", title="Confusion")
        if len(self.classes) <= SHOWN:
            names = list(map(figure.name, self.classes))
            axes.set_xticks(range(len(names)), names, rotation=90)
            axes.set_yticks(range(len(names)), names)
        if len(self.classes) <= 10:
            for (row, column), count in numpy.ndenumerate(counts):
                dark = count > counts[row].sum() / 2
                axes.text(column, row, count, ha="center", va="center", color="white" if dark else "black")

    def _draw_calibration(self, drawn: Any) -> None:
        from sklearn.calibration import calibration_curve

        sure = self.probabilities.max(1).values.double().clamp(0, 1)  # rounding can bring it above 1
        right = self.predicted == self.labels
        above, below = drawn.subplots(2, sharex=True, height_ratios=(3, 1))
        share, mean = calibration_curve(right.long(), sure, n_bins=BINS)
        above.plot([0, 1], [0, 1], color="grey", linewidth=1)
        above.plot(mean, share, marker="o")
        above.set(ylabel="accuracy", title="Calibration", ylim=(0, 1), xlim=(0, 1))
        below.hist(sure, bins=BINS, range=(0, 1))
        below.set(xlabel="predicted probability", ylabel="examples")


def evaluate(trained: Trained, path: Path | None, data_folder: str | None = None) -> Evaluation | Residuals:
    """On a file or folder with labels, or on the test data that the run itself had."""
    target = trained.target
    if path is None:
        test = trained.task(data_folder).test
        require_same_data(trained.folder, {"test": test.ids})
        if target is not None:
            return Residuals(target.name, target.restored(test.truth), trained.numbers(test))
        return Evaluation(trained.classes, test.truth, trained.probabilities(test))
    if data_folder is not None:
        raise LabError(f"--data {data_folder} has no effect: {path} is evaluated on, not the run's own test data")
    found = trained.read(path)
    if not len(found.ids):
        raise LabError(f"{path} has no examples")
    if found.labels is None:
        raise LabError(f"{path} has no labels to compare with, or not for every example: use gtracer predict")
    if target is not None:
        wanted = numbers(found.labels, REAL[0], f"{path}: column {shown(target.name)}")
        assert wanted is not None
        return Residuals(target.name, wanted, trained.numbers(found))
    labels = trained.index(list(found.labels))
    return Evaluation(trained.classes, labels, trained.probabilities(found))
