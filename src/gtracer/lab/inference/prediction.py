"""`gtracer predict`: the classes of examples and their probabilities, as csv."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from gtracer.lab import files
from gtracer.lab.inference.trained import Trained

MOST = 1000  # classes that have a column each


def predict(trained: Trained, path: Path, out: Path) -> int:
    """Write a row for each example: what it is, the label that it has, if any, the class, and probabilities.

    Of more than a thousand classes the predicted one's alone. Gives the number of rows.
    """
    found = trained.read(path)
    probabilities = trained.probabilities(found)
    every = len(trained.classes) <= MOST
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    label = [] if found.labels is None else ["label"]
    table.writerow(["example", *label, "predicted", *(trained.classes if every else ["probability"])])
    best = probabilities.max(1)
    for i, (example, place) in enumerate(zip(found.ids, best.indices.tolist(), strict=True)):
        given = [] if found.labels is None else [found.labels[i]]
        shares = probabilities[i].tolist() if every else [best.values[i].item()]
        table.writerow([example, *given, trained.classes[place], *(f"{share:.6g}" for share in shares)])
    files.write(out, text.getvalue().encode())
    return len(found.ids)
