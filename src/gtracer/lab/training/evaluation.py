"""What a run's model makes of the test data at the end, for the record: confusions and calibration, as plain values."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from gtracer.lab.training.run import Run

BINS = 15  # of how sure the model is, as in `gtracer.calibration`
MOST = 20  # classes that a record has a matrix of
PAIRS = 10  # of more classes, those that were taken for each other most often


def of(run: Run) -> dict[str, Any]:
    """As `Record.evaluation` says; nothing where there are no classes."""
    if run.test.labels.is_floating_point():
        return {}
    sure, predicted, labels = run.tested()
    names = [name.encode(errors="replace").decode() for name in run.task.class_names]  # a file's can hold any byte
    return {"bins": _bins(sure, predicted == labels), **_confusions(labels, predicted, names)}


def _bins(sure: Tensor, right: Tensor) -> list[list[float]]:
    """Those that are not empty: how many examples, how sure on average, which share is right."""
    place = (sure * BINS).long().clamp(max=BINS - 1)
    counts, sums, hits = (
        torch.bincount(place, weights, minlength=BINS).tolist() for weights in (None, sure.double(), right.double())
    )
    return [[n, round(total / n, 6), round(hit / n, 6)] for n, total, hit in zip(counts, sums, hits, strict=True) if n]


def _confusions(labels: Tensor, predicted: Tensor, names: list[str]) -> dict[str, Any]:
    classes = len(names)
    if classes <= MOST:
        counts = torch.bincount(labels * classes + predicted, minlength=classes**2).reshape(classes, classes)
        return {"classes": names, "confusion": counts.tolist()}
    wrong = labels != predicted
    pairs = Counter(zip(labels[wrong].tolist(), predicted[wrong].tolist(), strict=True))
    return {"confused": [[names[a], names[b], n] for (a, b), n in pairs.most_common(PAIRS)]}
