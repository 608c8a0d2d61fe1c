"""Which labels are wrong, and what is it worth to leave them out? SGD's model, TRACER's, and SGD cross-validated.

    python studies/label_errors.py --data DIR --out runs/label-errors
    python studies/label_errors.py --problems cifar100 --data DIR --device cuda --kernels fused --parallel 8 \
        --out runs/label-errors

20% and 50% of the training labels are another class. `gtracer find-label-errors` judges them by each model's own
probabilities (the best epoch's by held-out data, and the last's; TRACER's ρ sets itself, or was tuned), and by
cleanlab's usual way: five SGD models, each asked about the fifth that it has not seen. Area under the ROC, precision
and recall are against the known truth. Then SGD and TRACER train again without the examples that are flagged, and
without those that are wrong, which is the most that there is to gain. Test labels are right. What was made is not made
again: a run of this script that was cut goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gtracer.lab.config import Config
from gtracer.lab.inference import label_errors
from gtracer.lab.inference.label_errors import Suspects
from gtracer.lab.inference.trained import Trained, load
from gtracer.lab.results.record import Record
from gtracer.lab.sweeps.launchers.cuda_graphs import CudaGraphs
from gtracer.lab.sweeps.launchers.local import Job
from gtracer.lab.sweeps.sweep import Engine
from gtracer.lab.training.weights import best_epoch
from runs import in_turn, make

MLP = {"model": "mlp-bn", "lr": 0.02}
RESNET = {"model": "resnet20", "lr": 0.1, "weight_decay": 5e-4, "augment": True, "precision": "bf16"}
PROBLEMS: dict[str, dict[str, Any]] = {
    "digits": {"task": "digits", "epochs": 50, **MLP},
    "a tenth of Fashion-MNIST": {"task": "fashion-mnist", "train_share": 0.1, "epochs": 30, **MLP},
    "cifar100": {"task": "cifar100", "epochs": 60, **RESNET},
}
NOISE = (0.2, 0.5)
TRAINERS = {"SGD": "sgd", "TRACER": "sgd-tracer"}
FOLDS = 5
JUDGES = ("SGD", "TRACER", f"SGD, {FOLDS} folds", "the truth")
TUNED = "TRACER, ρ tuned"
RHO = {"digits": 0.005, "a tenth of Fashion-MNIST": 0.0018}  # of table1-digits and table1-fashion, with δ 0.01
# These judge, but nobody trains on what they leave: whose model, and whether it is the last epoch's.
OTHERS = {
    "SGD, last epoch": ("SGD", True),
    "TRACER, last epoch": ("TRACER", True),
    TUNED: (TUNED, False),
    f"{TUNED}, last epoch": (TUNED, True),
}


@dataclass(frozen=True)
class Cell:
    """A problem with a share of label noise and a seed, and where its runs lie."""

    problem: str
    noise: float
    seed: int
    folder: Path

    @property
    def key(self) -> dict[str, Any]:
        return {"problem": self.problem, "noise": self.noise, "seed": self.seed}

    def config(self, trainer: str, common: dict[str, Any]) -> Config:
        rho = {"rho": RHO[self.problem]} if trainer == TUNED else {}
        optimizer = TRAINERS[trainer.split(",")[0]]
        values = PROBLEMS[self.problem] | common | rho
        return Config(optimizer=optimizer, label_noise=self.noise, holdout=0.1, seed=self.seed, **values)


def rows_of(cell: Cell, common: dict[str, Any], made: set[str], engine: Engine) -> Iterator[dict[str, Any]]:
    """One for training on all, one for each judge; but for those that are `made`."""
    trainers = (*TRAINERS, *([TUNED] if cell.problem in RHO else []))
    jobs = [Job(cell.config(trainer, common), cell.folder / trainer, model=True) for trainer in trainers]
    accuracies = dict(zip(trainers, map(accuracy, make(jobs, engine)), strict=True))
    models = {trainer: load(cell.folder / trainer, device=common["device"]) for trainer in trainers}
    if "none" not in made:
        yield cell.key | {"judge": "none", "accuracy": {trainer: accuracies[trainer] for trainer in TRAINERS}}
    asked = [judge for judge in JUDGES if judge not in made]
    found = {judge: judged(judge, models, cell.folder / judge, common, engine) for judge in asked}
    again = [(judge, trainer) for judge in asked for trainer in TRAINERS]
    jobs = [label_errors.retraining(found[j], models[t], cell.folder / j / t) for j, t in again]
    on_rest = dict(zip(again, map(accuracy, make(jobs, engine)), strict=True))
    for judge in asked:
        accuracy_on_rest = {trainer: on_rest[judge, trainer] for trainer in TRAINERS}
        yield cell.key | {"judge": judge, **scores(found[judge]), "accuracy": accuracy_on_rest}
    for judge, (trainer, last) in OTHERS.items():
        if judge not in made and trainer in models:
            model = load(cell.folder / trainer, device=common["device"], last=last)
            suspects = label_errors.find(model, 1, cell.folder / judge, common["data"])
            own = {"own": accuracies[trainer]["last" if last else "best"]} if trainer == TUNED else {}
            yield cell.key | {"judge": judge, **scores(suspects), **own}


def judged(judge: str, models: dict[str, Trained], out: Path, common: dict[str, Any], engine: Engine) -> Suspects:
    if judge != "the truth":
        folds = FOLDS if judge.endswith("folds") else 1
        return label_errors.find(models[judge.split(",")[0]], folds, out, common["data"], engine=engine)
    found = label_errors.find(models["SGD"], 1, out, common["data"])
    truth = torch.cat([part.truth for part in (found.task.train, found.task.holdout) if part is not None])
    return replace(found, flagged=(found.labels != truth).numpy())


def scores(found: Suspects) -> dict[str, Any]:
    return {"examples": len(found.order), "flagged": int(found.flagged.sum()), **(found.against_truth() or {})}


def accuracy(record: Record) -> dict[str, float]:
    """On test data, at the epoch that is best by held-out data, whose labels are as noisy, and at the last."""
    curve = record.curves["test_accuracy"]
    return {"best": curve[best_epoch(record) - 1], "last": curve[-1]}


def table(rows: list[dict[str, Any]]) -> str:
    """The result in Markdown."""
    found = ("its accuracy, %", "area under the ROC", "precision, %", "recall, %")
    headings = ["", "judged by", *found, *(f"{name} on the rest, %" for name in TRAINERS)]
    lines = ["| " + " | ".join(headings) + " |", "| --- " * len(headings) + "|"]
    for problem, noise in dict.fromkeys((row["problem"], row["noise"]) for row in rows):
        cell = [row for row in rows if (row["problem"], row["noise"]) == (problem, noise)]
        whole = {row["seed"]: row["accuracy"] for row in cell if row["judge"] == "none"}
        for judge in ("none", *OTHERS, *JUDGES):
            mine = [row for row in cell if row["judge"] == judge]
            if mine:
                said = {"none": "all labels kept", "the truth": "the truth: mislabelled left out"}
                name = f"{problem}, {noise:.0%}, n = {len(whole)}"
                lines.append(f"| {name} | {said.get(judge, judge)} | {' | '.join(_cells(judge, mine, whole))} |")
    return "\n".join(lines)


def _cells(judge: str, mine: list[dict[str, Any]], whole: dict[int, Any]) -> list[str]:
    trainer, last = OTHERS.get(judge, (judge, False))
    own = [whole[row["seed"]][trainer]["last" if last else "best"] for row in mine if trainer in TRAINERS]
    cells = [_mean(own or [row["own"] for row in mine if "own" in row])]
    is_judge = judge not in ("none", "the truth")
    cells += [_mean([row["auc"] for row in mine if is_judge], 1, 3)]
    cells += [_mean([row[name] for row in mine if is_judge]) for name in ("precision", "recall")]
    return cells + [_mean([row["accuracy"][name]["best"] for row in mine if "accuracy" in row]) for name in TRAINERS]


def _mean(values: list[float], scale: float = 100, digits: int = 1) -> str:
    if not values:
        return "–"
    error = f" ± {scale * statistics.stdev(values) / math.sqrt(len(values)):.{digits}f}" if len(values) > 1 else ""
    return f"{scale * statistics.mean(values):.{digits}f}{error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS)[:2])
    parser.add_argument("--noise", type=float, nargs="+", default=list(NOISE))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, help="(default: the problem's own)")
    parser.add_argument("--data", help="folder of the official files")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kernels", default="torch")
    parser.add_argument("--parallel", type=int, metavar="N", help="runs at a time, as CUDA graphs (default: in turn)")
    parser.add_argument("--out", type=Path, default=Path("runs/label-errors"), help="for runs, and rows.jsonl")
    asked = parser.parse_args()
    common = {"data": asked.data, "device": asked.device, "kernels": asked.kernels}
    common |= {"epochs": asked.epochs} if asked.epochs else {}
    path = asked.out / "rows.jsonl"
    asked.out.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    engine: Engine = CudaGraphs(asked.parallel) if asked.parallel else in_turn
    for seed in asked.seeds:
        for problem in asked.problems:
            for noise in asked.noise:
                name = f"{problem} {noise:.0%} seed {seed}"
                cell = Cell(problem, noise, seed, asked.out / name.replace(" ", "-").replace("%", ""))
                there = {row["judge"] for row in rows if cell.key.items() <= row.items()}
                made = list(rows_of(cell, common, there, engine))
                rows += made
                with path.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in made)
                if made:
                    print(f"{cell.folder.name}: {len(made)} rows", flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
