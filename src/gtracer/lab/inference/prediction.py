"""`gtracer predict`: the classes of examples and their probabilities, or the numbers, as csv."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from gtracer.lab import files
from gtracer.lab.data.task import Found
from gtracer.lab.inference.trained import Trained

MOST = 1000  # classes that have a column each


def predict(trained: Trained, path: Path, out: Path) -> int:
    """Write a row for each example: what it is, the label that it has, if any, and what is predicted.

    That is a class, with probabilities (of more than a thousand classes the predicted one's alone), or a real number.
    Gives the number of rows.
    """
    found = trained.read(path)
    names, answers = _numbers(trained, found) if trained.target else _classes(trained, found)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["example", *([] if found.labels is None else ["label"]), "predicted", *names])
    for i, (example, cells) in enumerate(zip(found.ids, answers, strict=True)):
        table.writerow([example, *([] if found.labels is None else [found.labels[i]]), *cells])
    files.write(out, text.getvalue().encode(errors="replace"))
    return len(found.ids)


def _numbers(trained: Trained, found: Found) -> tuple[list[str], Iterator[list[str]]]:
    return [], ([f"{number:.9g}"] for number in trained.numbers(found).tolist())


def _classes(trained: Trained, found: Found) -> tuple[list[str], Iterator[list[str]]]:
    """Names of the columns of probabilities, and of each example the class and these."""
    probabilities = trained.probabilities(found)
    every = len(trained.classes) <= MOST
    best = probabilities.max(1)
    shares = probabilities if every else best.values[:, None]
    rows = (
        [trained.classes[place], *(f"{share:.6g}" for share in row.tolist())]
        for place, row in zip(best.indices.tolist(), shares, strict=True)
    )
    return list(trained.classes) if every else ["probability"], rows
