"""The model that a run leaves for use: the best epoch's weights by held-out data, and the last's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from gtracer.lab import files
from gtracer.lab.errors import LabError, one_line
from gtracer.lab.models import saved
from gtracer.lab.results.record import Record
from gtracer.lab.training.run import Run

SPLITS = "splits.json"  # which example is in which part, where they are the user's own

UNTESTED = "what was to test may have been trained on; train anew, or evaluate on data of its own"


def describe(run: Run, record: Record, folder: Path) -> None:
    """Write all but the weights."""
    if record.epochs or run.step:
        require_same_data(folder, run.splits)
    saved.Description.of(run.config, run.task, run.built, record.environment["versions"]).write(folder)
    run.built.save(folder / saved.PARTS)
    if any(run.splits.values()):
        files.write(folder / SPLITS, (json.dumps(run.splits, indent=1, ensure_ascii=False) + "\n").encode())


def require_same_data(folder: Path, splits: Mapping[str, Sequence[str]], so: str = UNTESTED) -> None:
    """Refuse data of which other examples are in these parts than when the run began; `so` says what follows."""
    if not files.exists(folder / SPLITS):
        return
    path = folder / SPLITS
    try:
        was = json.loads(files.read(path))
        changed = [name for name, ids in splits.items() if was[name] != list(ids)]
    except (ValueError, KeyError, TypeError) as error:
        raise LabError(f"{path} is damaged ({one_line(error)}): train the model again") from error
    if changed:
        then, now = len(was[changed[0]]), len(splits[changed[0]])
        counts = f"other examples in {changed[0]}" if then == now else f"{then} examples in {changed[0]}, now {now}"
        raise LabError(f"the data has changed since {folder} began ({path}: {counts}): {so}")


def keep(run: Run, record: Record, folder: Path) -> None:
    """Write the weights after an epoch, where it is the best one so far by held-out data, or the last."""
    with run.kept():
        if best_epoch(record) == record.epochs and (record.holds_out or record.finished):
            saved.write_weights(run.model, folder / saved.WEIGHTS, record.epochs)
        if record.holds_out and record.finished:
            saved.write_weights(run.model, folder / saved.LAST, record.epochs)


def best_epoch(record: Record) -> int:
    """By held-out data, the first of equals; without any, the last one: test data chooses nothing."""
    if not record.holds_out:
        return record.epochs
    scores = record.held_out()
    return 1 + max(range(record.epochs), key=scores.__getitem__)
