"""`gtracer find-label-errors`: training examples by how likely their label is wrong, as csv and as a page."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy
import torch
from jinja2 import Environment
from rich.console import Console
from torch import Tensor
from torch.utils.data import ConcatDataset

from gtracer.lab import files
from gtracer.lab.data.pictures import Pictures
from gtracer.lab.data.tables import Columns
from gtracer.lab.data.task import Split, Task
from gtracer.lab.errors import Interrupted, LabError, shown
from gtracer.lab.inference.trained import Trained, load
from gtracer.lab.results.record import NAME, Record
from gtracer.lab.sweeps.launchers.local import Event, Job
from gtracer.lab.training.callbacks import ProgressBar
from gtracer.lab.training.trainer import train
from gtracer.lab.training.weights import best_epoch, require_same_data

TABLE, PAGE = "label-errors.csv", "label-errors.html"
MARK = "data.sha256"  # in the folder of a model that is trained here, what it was trained on
Engine = Callable[[list[Job]], Iterable[Event]]  # trains runs, and tells what becomes of them
CLEANED = "cleaned"  # folder of the model that is trained without the flagged examples
SHOWN = 200  # examples of the page
PAIRS = 5  # of classes that are taken for each other most
CELLS = 12  # of a table's row
SIDE = 112  # pixels of a thumbnail
OTHERS = "the model has not seen what it would be asked about as training data; train anew"
MEMORISED = 0.98  # share of labels given back, from which on a model that has seen them tells little


@dataclass(frozen=True)
class Suspects:
    """Training examples, and those held out of them, with their labels; the most doubtful first.

    Attributes:
        task: The run's data.
        classes: Their names.
        order: Rows, by the probability of the given label; first come the task's training data, then what is held out.
        quality: That probability, of each row.
        flagged: Whether cleanlab takes the label for wrong, of each row.
        suggested: The most probable class, of each row.
    """

    task: Task
    classes: tuple[str, ...]
    order: list[int]
    quality: Any
    flagged: Any
    suggested: list[int]

    @cached_property
    def labels(self) -> Tensor:
        return torch.cat([part.labels for part in _parts(self.task)])

    @property
    def agreement(self) -> float:
        """The share of labels to train on that are suggested themselves."""
        trained = len(self.task.train.labels)
        return float((self.labels == torch.tensor(self.suggested))[:trained].double().mean())

    def rows(self) -> list[dict[str, Any]]:
        """As they stand in the csv."""
        labels = self.labels.tolist()
        parts = [part for split, part in _named(self.task) for _ in split.labels]
        ids = [name for split in _parts(self.task) for name in split.ids] or range(len(labels))
        return [
            {
                "example": str(ids[i]),
                "part": parts[i],
                "label": self.classes[labels[i]],
                "suggested": self.classes[self.suggested[i]],
                "probability of label": f"{self.quality[i]:.6g}",
                "wrong": "yes" if self.flagged[i] else "no",
            }
            for i in self.order
        ]

    def pairs(self) -> list[tuple[str, str, int]]:
        """The labels that are flagged most often, what is suggested instead, and how often; of those more than once."""
        labels = self.labels.tolist()
        counts = Counter((labels[i], self.suggested[i]) for i in numpy.flatnonzero(self.flagged))
        return [(self.classes[a], self.classes[b], n) for (a, b), n in counts.most_common(PAIRS) if n > 1]

    def against_truth(self) -> dict[str, float] | None:
        """How well they were found, where label noise was made and so is known; None elsewhere."""
        from sklearn.metrics import precision_score, recall_score, roc_auc_score

        wrong = (self.labels != torch.cat([part.truth for part in _parts(self.task)])).numpy()
        if not wrong.any() or wrong.all():
            return None
        return {
            "auc": float(roc_auc_score(wrong, -self.quality)),
            "precision": float(precision_score(wrong, self.flagged, zero_division=0.0)),
            "recall": float(recall_score(wrong, self.flagged)),
        }

    def cleaned(self) -> Task:
        """The run's data without the flagged examples."""
        left = torch.from_numpy(~self.flagged)
        trained = len(self.task.train.labels)
        if not left[:trained].any():
            raise LabError(f"all {trained} training examples are flagged: nothing is left to train on")
        held_out = self.task.holdout
        if held_out is not None:
            held_out = held_out.rows(left[trained:].nonzero().flatten())
        return replace(
            self.task,
            train=self.task.train.rows(left[:trained].nonzero().flatten()),
            holdout=held_out if held_out is not None and len(held_out.labels) else None,
            notes=(*self.task.notes, f"{int(self.flagged.sum())} examples with labels that are likely wrong left out"),
        )


def _parts(task: Task) -> list[Split]:
    return [split for split, _ in _named(task)]


def _named(task: Task) -> list[tuple[Split, str]]:
    """What is judged: all labels that had a part in the run's training, also in choosing its epoch."""
    return [(task.train, "training"), *([] if task.holdout is None else [(task.holdout, "held out")])]


def find(
    trained: Trained,
    folds: int,
    out: Path,
    data_folder: str | None = None,
    console: Console | None = None,
    engine: Engine | None = None,
) -> Suspects:
    """By cleanlab's confident learning, on the probabilities that the model gives to its training examples.

    Args:
        trained: The model.
        folds: Into how many parts the training data is cut, each judged by a model that is trained on the others; 1:
            the model itself judges all of it, which is for those that do not memorise. What is held out it has not
            seen, and judges in any case.
        out: Folder for csv and page, and for the models of the folds.
        data_folder: Of the task's official files.
        console: Is told how far the folds are.
        engine: Trains the folds in parallel, as those of a sweep.
    """
    filter_, rank = _cleanlab()
    task = trained.task(data_folder)
    if task.class_names != trained.classes:
        other = min({*task.class_names} ^ {*trained.classes}, default="in another order")
        raise LabError(f"{trained.config.task} has other classes than the model ({shown(other)}): train on it again")
    if task.train.labels.is_floating_point():
        raise LabError(f"find-label-errors is for classes: {trained.config.task} has real numbers as labels")
    names = ("train", "holdout")
    require_same_data(trained.folder, {name: part.ids for name, part in zip(names, _parts(task), strict=False)}, OTHERS)
    crossed = partial(_crossed, trained, task, folds, out, console, engine)
    judged = [trained.probabilities(task.train) if folds == 1 else crossed()]
    judged += [trained.probabilities(part) for part in _parts(task)[1:]]
    labels = torch.cat([part.labels for part in _parts(task)]).numpy()
    p = torch.cat(judged).double().numpy()
    if not numpy.isfinite(p).all():
        raise LabError(f"{trained.folder}: the model gives probabilities that are no numbers: train it again")
    p = p / p.sum(1, keepdims=True)
    quality = rank.get_label_quality_scores(labels, p, method="self_confidence")
    flagged = filter_.find_label_issues(labels, p, n_jobs=1)
    order = numpy.argsort(quality, kind="stable").tolist()
    found = Suspects(task, trained.classes, order, quality, flagged, p.argmax(1).tolist())
    _write(found, trained, out)
    return found


def retrain(found: Suspects, trained: Trained, out: Path, console: Console | None = None) -> tuple[Record, Path]:
    """Train on what is left without the flagged examples, as the run was; the record, and the model's folder."""
    job = retraining(found, trained, out)
    _train([job], console, None)
    return Record.read(job.folder), job.folder


def retraining(found: Suspects, trained: Trained, out: Path) -> Job:
    """The run that trains on what is left, for whoever has several to train in parallel."""
    return _again(trained, out / CLEANED, found.cleaned())


def _again(trained: Trained, place: Path, task: Task) -> Job:
    """As the run was, on other data. The record may be there; not one of before labels were mended."""
    config = replace(trained.config, device=str(trained.device))
    mark = _checksum(task).encode()
    if files.exists(place / MARK) and files.read(place / MARK) != mark:
        shutil.rmtree(place)
    elif files.exists(place / NAME) and not files.exists(place / MARK):
        raise LabError(f"{place} holds another run: choose another --out, or remove it")
    files.write(place / MARK, mark)
    return Job(config, place, model=True, task=task)


def _train(jobs: list[Job], console: Console | None, engine: Engine | None) -> None:
    """In turn, or as the engine does it."""
    if engine is not None:
        for failure in [event.failure for event in engine(jobs) if event.failure is not None]:
            raise LabError(failure)
        return
    try:
        for config, place, model, task in jobs:
            shown_to = console or Console(quiet=True)
            if task is not None:
                shown_to.out(f"{place}: {len(task.train.labels)} training examples", highlight=False)
            with ProgressBar(shown_to, config.epochs) as bar:
                train(config, place, [bar], resume=None, model=model, task=task)
    except Interrupted as error:  # gtracer train --resume would go on with all of the data
        raise Interrupted("what was under way is saved; give the same command again to go on") from error


def _checksum(task: Task) -> str:
    """Of what is trained on: which examples, and their labels."""
    made = hashlib.sha256()
    for part in _parts(task):
        made.update(part.labels.numpy().tobytes() + json.dumps(list(part.ids)).encode())
        if isinstance(part.inputs, Tensor):
            made.update(part.inputs.cpu().contiguous().numpy().tobytes())
        elif isinstance(part.inputs, list):
            made.update(json.dumps(part.inputs).encode())
    return made.hexdigest()


def _cleanlab() -> tuple[Any, Any]:
    try:
        from cleanlab import filter as filter_
        from cleanlab import rank
    except ModuleNotFoundError as error:
        raise LabError(f"find-label-errors needs {error.name}: pip install 'gtracer-optim[labels]'") from error
    return filter_, rank


def _crossed(
    trained: Trained, task: Task, folds: int, out: Path, console: Console | None, engine: Engine | None
) -> Tensor:
    """Of each example by a model that has not seen it. A fold that is finished is not trained again."""
    from sklearn.model_selection import StratifiedKFold

    counts = torch.bincount(task.train.labels)
    least = int(torch.where(counts > 0, counts, len(task.train.labels)).argmin())
    if counts[least] < folds:
        name = shown(trained.classes[least])
        raise LabError(f"folds = {folds} are more than the {counts[least]} training examples of class {name}")
    found = torch.zeros(len(task.train.labels), len(trained.classes))
    cut = StratifiedKFold(folds, shuffle=True, random_state=trained.config.seed)
    parts = list(cut.split(numpy.zeros(len(found)), task.train.labels))
    jobs = [
        _again(
            trained,
            out / f"fold-{number + 1}-of-{folds}",
            replace(task, train=task.train.rows(torch.tensor(rest))),
        )
        for number, (rest, _) in enumerate(parts)
    ]
    _train(jobs, console, engine)
    for job, (_, fold) in zip(jobs, parts, strict=True):
        judge = load(job.folder, device=str(trained.device))
        found[fold] = judge.probabilities(task.train.rows(torch.tensor(fold)))
    return found


def _write(found: Suspects, trained: Trained, out: Path) -> None:
    rows, text = found.rows(), io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    files.write(out / TABLE, text.getvalue().encode(errors="replace"))
    inputs: list[Any] = [part.inputs for part in _parts(found.task)]
    examples: ConcatDataset[Any] = ConcatDataset(inputs)
    seen = [_seen(examples[i], found.task.preprocessing) for i in found.order[:SHOWN]]
    page = Environment(autoescape=True).from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    about = {"run": trained.folder.resolve().name, "task": trained.config.task, "count": len(rows)}
    about |= {"wrong": int(found.flagged.sum()), "table": TABLE, "pairs": found.pairs()}
    first = [row | what for row, what in zip(rows[:SHOWN], seen, strict=True)]
    files.write(out / PAGE, page.render(rows=first, **about).encode(errors="replace"))


def _seen(example: Any, preprocessing: Any) -> dict[str, Any]:
    """What an example looks like: an image as a data URL, a text, or the cells of a row."""
    if isinstance(example, tuple):
        return {"text": " / ".join(example)}
    if isinstance(preprocessing, Columns):
        return {"cells": _cells(example, preprocessing)}
    if isinstance(preprocessing, Pictures):
        return {"image": _thumbnail(preprocessing.pixels(example))}
    if example.ndim == 3 and len(example) in (1, 3):  # an image of one's own data set, normalised in a way of its own
        shown_of = example.cpu().float()
        low, high = shown_of.amin(), shown_of.amax()
        return {"image": _thumbnail(((shown_of - low) / (high - low).clamp(min=1e-12) * 255).to(torch.uint8))}
    return {}


def _thumbnail(pixels: Tensor) -> str:
    from PIL import Image

    image = Image.fromarray(pixels.permute(1, 2, 0).squeeze(2).numpy())
    image.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _cells(example: Tensor, columns: Columns) -> list[tuple[str, str]]:
    """A table's row, back from the vector that was made of it; nothing where a value was missing, or is a rare one."""
    row, fitted = example.cpu().double().numpy()[None], columns.transformer
    made = {}
    if columns.numbers:
        imputer, scaler = (step for _, step in fitted.named_transformers_["numbers"].steps)
        values = scaler.inverse_transform(row[:, fitted.output_indices_["numbers"]])[0]
        kept = numpy.flatnonzero(~numpy.isnan(imputer.statistics_))  # a column without any value gives no input
        marked = () if imputer.indicator_ is None else imputer.indicator_.features_
        missing = {i for i, mark in zip(marked, values[len(kept) :], strict=True) if mark > 0.5}
        numbers = zip(kept, values, strict=False)
        made = {columns.numbers[i]: "" if i in missing else f"{value:.6g}" for i, value in numbers}
    if columns.categories:
        one_hot = fitted.named_transformers_["categories"]
        words = one_hot.inverse_transform(row[:, fitted.output_indices_["categories"]])[0]
        made |= {name: str(word or "") for name, word in zip(columns.categories, words, strict=True)}
    return list(made.items())[:CELLS]


def outcome(found: Suspects, out: Path) -> Sequence[str]:
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


def gain_of(cleaned: Record, place: Path, before: Path) -> str:
    """What training without the flagged examples has brought, at the epochs whose weights are kept."""
    now = cleaned.curves["test_accuracy"][best_epoch(cleaned) - 1]
    record = Record.read(before)
    then = record.curves["test_accuracy"][best_epoch(record) - 1]
    return f"without them: {now:.2%} on test data, {then:.2%} with them (one run each): {place}"
