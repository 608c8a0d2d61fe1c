"""`gtracer find-label-errors`: training examples by how likely their label is wrong, as csv and as a page."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from jinja2 import Environment
from torch import Tensor

from gtracer.lab import data, files
from gtracer.lab.data.pictures import Pictures
from gtracer.lab.data.task import Split, Task
from gtracer.lab.errors import LabError, shown
from gtracer.lab.inference.trained import Trained, load
from gtracer.lab.training.trainer import train

TABLE, PAGE = "label-errors.csv", "label-errors.html"
SHOWN = 200  # examples of the page
SIDE = 112  # pixels of a thumbnail
MEMORISED = 0.98  # share of labels given back, from which on a model that has seen them tells little


@dataclass(frozen=True)
class Suspects:
    """Training examples with their labels, the most doubtful first.

    Attributes:
        classes: Their names.
        split: The training data, in its own order.
        order: Its rows, by the probability of the given label.
        quality: That probability, of each row.
        flagged: Whether cleanlab takes the label for wrong, of each row.
        suggested: The most probable class, of each row.
    """

    classes: tuple[str, ...]
    split: Split
    order: list[int]
    quality: Any
    flagged: Any
    suggested: list[int]

    @property
    def agreement(self) -> float:
        """The share of labels that are suggested themselves."""
        return float((self.split.labels == torch.tensor(self.suggested)).double().mean())

    def rows(self) -> list[dict[str, Any]]:
        """As they stand in the csv."""
        labels, ids = self.split.labels.tolist(), self.split.ids
        return [
            {
                "example": ids[i] if ids else str(i),
                "label": self.classes[labels[i]],
                "suggested": self.classes[self.suggested[i]],
                "probability of label": f"{self.quality[i]:.6g}",
                "wrong": "yes" if self.flagged[i] else "no",
            }
            for i in self.order
        ]

    def against_truth(self) -> dict[str, float] | None:
        """How well they were found, where label noise was made and so is known; None elsewhere."""
        from sklearn.metrics import precision_score, recall_score, roc_auc_score

        wrong = (self.split.labels != self.split.truth).numpy()
        if not wrong.any() or wrong.all():
            return None
        return {
            "auc": float(roc_auc_score(wrong, -self.quality)),
            "precision": float(precision_score(wrong, self.flagged, zero_division=0.0)),
            "recall": float(recall_score(wrong, self.flagged)),
        }


def find(trained: Trained, folds: int, out: Path, data_folder: str | None = None) -> Suspects:
    """By cleanlab's confident learning, on the probabilities that the model gives to its training examples.

    Args:
        trained: The model.
        folds: Into how many parts the training data is cut, each judged by a model that is trained on the others; 1:
            the model itself judges all of it, which is for those that do not memorise.
        out: Folder for csv and page, and for the models of the folds.
        data_folder: Of the task's official files.
    """
    filter_, rank = _cleanlab()
    task = data.load(replace(trained.config, data=data_folder))
    probabilities = trained.probabilities(task.train) if folds == 1 else _crossed(trained, task, folds, out)
    labels, p = task.train.labels.numpy(), probabilities.double().numpy()
    p = p / p.sum(1, keepdims=True)
    quality = rank.get_label_quality_scores(labels, p, method="self_confidence")
    flagged = filter_.find_label_issues(labels, p, n_jobs=1)
    order = numpy.argsort(quality, kind="stable").tolist()
    found = Suspects(trained.classes, task.train, order, quality, flagged, p.argmax(1).tolist())
    _write(found, task, trained, out)
    return found


def _cleanlab() -> tuple[Any, Any]:
    try:
        from cleanlab import filter as filter_
        from cleanlab import rank
    except ModuleNotFoundError as error:
        raise LabError(f"find-label-errors needs {error.name}: pip install 'gtracer-optim[labels]'") from error
    return filter_, rank


def _crossed(trained: Trained, task: Task, folds: int, out: Path) -> Tensor:
    """Of each example by a model that has not seen it. A fold that is finished is not trained again."""
    from sklearn.model_selection import StratifiedKFold

    counts = torch.bincount(task.train.labels)
    least = int(torch.where(counts > 0, counts, len(task.train.labels)).argmin())
    if counts[least] < folds:
        name = shown(trained.classes[least])
        raise LabError(f"folds = {folds} are more than the {counts[least]} training examples of class {name}")
    found = torch.zeros(len(task.train.labels), len(trained.classes))
    cut = StratifiedKFold(folds, shuffle=True, random_state=trained.config.seed)
    for number, (rest, fold) in enumerate(cut.split(numpy.zeros(len(found)), task.train.labels)):
        place = out / f"fold-{number + 1}-of-{folds}"
        part = replace(task, train=task.train.rows(torch.tensor(rest)))
        train(trained.config, place, [], resume=None, model=True, task=part)
        judge = load(place, device=str(trained.device))
        found[fold] = judge.probabilities(task.train.rows(torch.tensor(fold)))
    return found


def _write(found: Suspects, task: Task, trained: Trained, out: Path) -> None:
    rows, text = found.rows(), io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    files.write(out / TABLE, text.getvalue().encode())
    first = [row | _seen(task, i) for row, i in zip(rows[:SHOWN], found.order, strict=False)]
    page = Environment(autoescape=True).from_string(Path(__file__).with_suffix(".html").read_text())
    about = {"run": trained.folder.name, "count": len(rows), "wrong": int(found.flagged.sum()), "table": TABLE}
    files.write(out / PAGE, page.render(rows=first, **about).encode(errors="replace"))


def _seen(task: Task, row: int) -> dict[str, str]:
    """What an example looks like: an image as a data URL, or a text."""
    inputs = task.train.inputs
    if isinstance(inputs, list):
        return {"text": " / ".join(inputs[row])}
    if not isinstance(task.preprocessing, Pictures):
        return {}
    from PIL import Image

    pixels = task.preprocessing.pixels(inputs[row]).permute(1, 2, 0).squeeze(2).numpy()
    image = Image.fromarray(pixels)
    image.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return {"image": f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"}


def told(found: Suspects, out: Path) -> Sequence[str]:
    """What came out, line by line."""
    wrong, count = int(found.flagged.sum()), len(found.order)
    lines = [f"{wrong} of {count} labels are likely wrong: {out / TABLE}, {out / PAGE}"]
    if found.agreement > MEMORISED:
        lines.append(f"the model gives back {found.agreement:.1%} of the labels, it may have memorised them: --folds 5")
    if truth := found.against_truth():
        lines.append(
            f"against the label noise that was made: area under the ROC {truth['auc']:.3f}, "
            f"precision {truth['precision']:.1%}, recall {truth['recall']:.1%}"
        )
    return lines
