"""`gtracer find-rho`: short branches of a run, for each candidate ρ, on held-out training data."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gtracer.finder import Branch, RhoCurve, find_rho
from gtracer.lab import files
from gtracer.lab.config import Config
from gtracer.lab.errors import LabError
from gtracer.lab.training.run import Run
from gtracer.optim import TwoPassOptimizer

HOLDOUT = 0.1
SHARE = 0.2  # of the training that a branch lasts: docs/how-to/choosing-rho.md, "find_rho, measured"
HELD_OUT_BATCHES = 10  # whose scatter is the uncertainty, and so few that each is of some size
CURVE, FIGURE = "rho.json", "rho.png"
Rows = tuple[bool, Tensor]  # whether they are held out, and which they are


def find(config: Config, folder: Path, steps: int | None = None, candidates: list[float] | None = None) -> RhoCurve:
    """Recommend a ρ for this run, and leave the curve in the folder; found once, it is read from there.

    The branches have the run's learning rate, without warm-up or schedule.
    """
    asked = _asked(config, steps, candidates)
    with files.locked(folder, "search"):  # before anything is trained for a folder that cannot be written
        known = read(folder)
        if known is not None and known[1] == asked:
            return known[0]
        curve = _found(config, steps, candidates)
        _write(folder, curve, asked)
        return curve


def _found(config: Config, steps: int | None, candidates: list[float] | None) -> RhoCurve:
    """The branches, trained."""
    run = Run(branched(config))
    if not isinstance(run.optimizer, TwoPassOptimizer):
        raise LabError(
            f"optimizer {config.optimizer!r} has no ρ to find: take {config.optimizer}-tracer or {config.optimizer}-sam"
        )
    count = steps or max(1, round(SHARE * run.steps_an_epoch * config.epochs))
    batches, held_out = _training(run, count), _held_out(run)
    try:
        return find_rho(
            run.model,
            lambda batch: _loss(run, batch),
            batches,
            held_out,
            optimizer=run.optimizer,
            candidates=candidates,
            steps=count,
            chance=_chance(run),
            tell=None,
        )
    except ValueError as error:
        raise LabError(str(error)) from error


def branched(config: Config) -> Config:
    """The run that branches are made of: no schedules, and some data held out."""
    own = {"schedule": "constant", "warmup": 0.0, "rho_warmup": 0.0, "rho": None}
    return replace(config, **own, holdout=config.holdout or HOLDOUT)  # type: ignore[arg-type]


def read(folder: Path) -> tuple[RhoCurve, dict[str, Any]] | None:
    """The curve that the folder holds, and what was asked."""
    path = folder / CURVE
    if not files.exists(path):
        return None
    try:
        found = json.loads(files.read(path))
        numbers = [
            Branch(b["rho"], tuple(math.nan if x is None else x for x in b["held_out"]), _number(b["train"]))
            for b in found["branches"]
        ]
        curve = RhoCurve(
            found["rho"], found["reason"], tuple(numbers), tuple(found["collapsed"]), found["chance"], found["steps"]
        )
        return curve, found["asked"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LabError(f"{path} is damaged ({error}): remove it to start over") from error


def _write(folder: Path, curve: RhoCurve, asked: dict[str, Any]) -> None:
    branches = [
        {
            "rho": branch.rho,
            "held_out": [x if math.isfinite(x) else None for x in branch.held_out],  # JSON knows no NaN
            "train": branch.train if math.isfinite(branch.train) else None,
        }
        for branch in curve.branches
    ]
    outcome = {name: getattr(curve, name) for name in ("rho", "reason", "collapsed", "chance", "steps")}
    text = json.dumps(outcome | {"branches": branches, "asked": asked}, indent=1, ensure_ascii=False)
    files.write(folder / CURVE, (text + "\n").encode())
    curve.plot(folder / FIGURE)


def _asked(config: Config, steps: int | None, candidates: list[float] | None) -> dict[str, Any]:
    """What decides the curve, as it comes back from JSON."""
    return {"config": branched(config).identity.to_mapping(), "steps": steps, "candidates": candidates}


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _training(run: Run, steps: int) -> list[Rows]:
    """The rows of so many steps, epoch by epoch in the run's own order."""
    found: list[Rows] = []
    while len(found) < steps:
        found += [(False, rows) for rows in torch.split(run.order(), run.sizes)]
        run.epoch += 1
    run.epoch = 0
    return found[:steps]


def _held_out(run: Run) -> list[Rows]:
    """Their places among the held-out examples, shuffled: where those lie sorted, neighbours are alike."""
    assert run.holdout is not None
    order = torch.randperm(len(run.holdout.labels), generator=torch.Generator().manual_seed(0))
    return [(True, places) for places in torch.split(order, max(1, math.ceil(len(order) / HELD_OUT_BATCHES)))]


def _loss(run: Run, batch: Rows) -> Tensor:
    is_held_out, rows = batch
    if is_held_out:
        inputs, labels = _held_out_batch(run, rows)
    else:
        inputs, labels = run.batch(rows)
    with run.precision():
        outputs = (run.evaluated if is_held_out else run.trained)(inputs).float()
    return run.plain_loss(outputs, labels) if is_held_out else run.loss(outputs, labels)


def _held_out_batch(run: Run, places: Tensor) -> tuple[Any, Tensor]:
    assert run.holdout is not None
    held_out = run.holdout
    rows = torch.cat([part for part, _ in held_out.parts])[places.to(run.device)]
    return held_out.batch(rows, held_out.batch.width(rows.cpu())), held_out.labels[places.to(run.device)]


def _chance(run: Run) -> float:
    """The loss of who says the labels' frequencies, or their mean, whatever is asked."""
    labels = run.labels.cpu()
    if run.target is not None:
        return float(run.plain_loss(torch.zeros(len(labels), 1), labels))
    shares = torch.bincount(labels).double() / len(labels)
    return float(torch.special.entr(shares).sum())
