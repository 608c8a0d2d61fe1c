"""Does TRACER find flatter minima, by which measure, and does flatness go with accuracy?

    python studies/flatness.py --problems "digits, clean" "digits, 50% noise" --out runs/sharpness
    python studies/flatness.py --problems "cifar100, setting 1" "cifar100, setting 4" "resnet32, 20% noise" \
        "resnet32, 60% noise" --data DIR --device cuda --out runs/sharpness-gpu

SGD, SAM, SGD-TRACER, scale-free SGD-TRACER and SGD-TRACER with the penalty of every 8th step; ρ is the best of some
values by held-out data, or what searches before have chosen. Every model of the last epoch is measured on a thousand of
the examples that it was trained on, with the labels that it was trained on. What the folder holds is not made again;
results.jsonl in it has a line for each model. The tables are means ± standard errors over seeds, and Spearman's rank
correlation of each measure with the accuracy on test data over all models of a problem, and over all but SGD's. Each
problem's figure has the loss of the first seed's models along a random direction and along the top eigenvector.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from scipy.stats import spearmanr

import gtracer
from gtracer.lab.config import Config
from gtracer.lab.inference.sharpness import subject
from gtracer.lab.results import provenance
from gtracer.lab.training.trainer import train
from gtracer.sharpness import Settings, eigenvectors, line
from gtracer.sharpness.result import TEXTS
from runs import last_rows

TRACER = {"optimizer": "sgd-tracer", "delta": 0.01}
METHODS: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": "sgd"},
    "SAM": {"optimizer": "sam"},
    "TRACER": TRACER,
    "TRACER, scale-free": TRACER | {"scale_free": True},
    "TRACER, every 8th step": TRACER | {"interval": 8, "reuse": 1.0},
}
SAM_RHOS, TRACER_RHOS = (0.2, 0.5, 1.0), (0.0005, 0.002, 0.005)
TUNING_SEED = 100


@dataclass(frozen=True)
class Problem:
    """Data, a network and how it is trained; where ρ has been searched before, what was chosen."""

    options: dict[str, Any]
    chosen: dict[str, float] = field(default_factory=dict)
    sam: tuple[float, ...] = SAM_RHOS
    tracer: tuple[float, ...] = TRACER_RHOS

    def rhos(self, method: str) -> tuple[float, ...]:
        if method == "SGD":
            return (0.0,)
        if method in self.chosen:
            return (self.chosen[method],)
        return self.sam if method == "SAM" else self.tracer

    def config(self, method: str, rho: float, **more: Any) -> Config:
        own = {} if method == "SGD" else {"rho": rho}
        return Config(**self.options | METHODS[method] | own | more)


DIGITS = {"task": "digits", "model": "mlp-bn", "lr": 0.02, "batch_size": 128, "epochs": 50, "device": "cpu"}
FASHION = {"task": "fashion-mnist", "model": "mlp-bn", "lr": 0.02, "batch_size": 128, "epochs": 30, "train_share": 0.1}
CIFAR = {"task": "cifar100", "model": "resnet20", "lr": 0.1, "batch_size": 128, "epochs": 200, "warmup": 0.05}
CIFAR |= {"precision": "bf16", "device": "cuda"}
LONG = CIFAR | {
    "model": "resnet32",
    "batch_size": 256,
    "epochs": 160,
    "warmup": 0.0,
    "weight_decay": 5e-4,
    "augment": True,
}
WIDE = (0.0005, 0.001, 0.002)
PROBLEMS = {
    "digits, clean": Problem(DIGITS),
    # ρ of SAM and TRACER by the searches of studies/depths.py and, on CIFAR, studies/cifar100; the others' by held-out
    # data here.
    "digits, 50% noise": Problem(
        DIGITS | {"label_noise": 0.5}, {"SAM": 1.0, "TRACER": 0.005}, tracer=(0.0025, 0.005, 0.01)
    ),
    "fashion, clean": Problem(FASHION),
    "fashion, 50% noise": Problem(FASHION | {"label_noise": 0.5}),
    "cifar100, setting 1": Problem(
        CIFAR | {"label_noise": 0.5}, {"SAM": 0.9, "TRACER": 0.016}, tracer=(0.004, 0.008, 0.016)
    ),
    "cifar100, setting 4": Problem(
        CIFAR | {"weight_decay": 5e-4, "augment": True}, {"SAM": 0.2, "TRACER": 0.001}, tracer=WIDE
    ),
    "resnet32, 20% noise": Problem(LONG | {"label_noise": 0.2}, {"SAM": 0.2, "TRACER": 0.001}, tracer=WIDE),
    "resnet32, 60% noise": Problem(LONG | {"label_noise": 0.6}, {"SAM": 0.2, "TRACER": 0.001}, tracer=WIDE),
}


def tuned(
    problem: Problem, methods: list[str], folder: Path, workers: int, changes: dict[str, Any]
) -> dict[str, float]:
    """ρ of each method: the best by data that was held out, its labels as noisy as the rest."""
    choices = {m: problem.rhos(m) for m in methods}
    asked = {
        (method, rho): problem.config(method, rho, holdout=0.1, seed=TUNING_SEED, **changes)
        for method, rhos in choices.items()
        if len(rhos) > 1
        for rho in rhos
    }
    rows = last_rows(asked, folder, workers) if asked else {}
    return {
        method: max(rhos, key=lambda rho: rows[method, rho]["holdout_accuracy"]) if len(rhos) > 1 else rhos[0]
        for method, rhos in choices.items()
    }


def measured(config: Config, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Train the run, unless it is there, and measure its model."""
    record = train(config, folder, [], resume=None, model=True)
    found = subject(gtracer.load(folder, device=config.device), folder=config.data, examples=options.pop("examples"))
    sharpness = found.measured(progress=False, **options)
    measures = {row.name: [row.value, row.error] for row in sharpness.rows()}
    where = {"run": folder.name, "commit": provenance.commit(), "settings": dict(sharpness.settings)}
    return {"last": record.summary()["last"], "measures": measures} | where


def made(name: str, asked: argparse.Namespace, tell: Callable[[str], Any]) -> list[dict[str, Any]]:
    """The models of a problem, a row for each; those that are in the file already are not measured again."""
    problem, changes = PROBLEMS[name], {"data": asked.data} | ({"epochs": asked.epochs} if asked.epochs else {})
    changes |= {"device": asked.device} if asked.device else {}
    folder = asked.out / slug(name)
    file = asked.out / "results.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    rows = [row for row in rows if row["problem"] == name]
    rhos = tuned(problem, asked.methods, folder / "tuning", asked.workers, changes)
    for seed in range(asked.seeds):
        for method, rho in rhos.items():
            if any((row["method"], row["seed"]) == (method, seed) for row in rows):
                continue
            config = problem.config(method, rho, seed=seed, **changes)
            options = {"examples": asked.examples, "steps": asked.steps, "top": 3}
            row = {"problem": name, "method": method, "seed": seed, "rho": rho}
            row |= measured(config, folder / config.folder, options)
            with file.open("a") as out:
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
            rows.append(row)
            tell(f"{name}, {method}, seed {seed}: {row['last']['test_accuracy']:.2%}")
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """A column for each method, a row for each measure, and what its rank tells of the accuracy."""
    heads = [f"{m}, ρ {r:g}" if r else m for m, r in {row["method"]: row["rho"] for row in rows}.items()]
    lines = ["| | " + " | ".join(heads) + " | rank correlation | without SGD |", "|" + " --- |" * (len(heads) + 3)]
    others = [row for row in rows if row["method"] != "SGD"]
    lines.append(
        "| test accuracy, % | " + " | ".join(_cells(rows, lambda r: 100 * r["last"]["test_accuracy"])) + " | | |"
    )
    for name, text in TEXTS.items():
        values = [row["measures"].get(name, [math.nan])[0] for row in rows]
        if all(map(math.isfinite, values)):
            cells = [*_cells(rows, lambda r, n=name: r["measures"][n][0]), _rank(rows, name), _rank(others, name)]
            escaped = text.replace("|", r"\|")
            lines.append(f"| {escaped} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _rank(rows: list[dict[str, Any]], name: str) -> str:
    """Spearman's, where there is something to rank."""
    values = [row["measures"][name][0] for row in rows]
    accuracies = [row["last"]["test_accuracy"] for row in rows]
    several = min(len(set(values)), len(set(accuracies))) > 1
    return f"{spearmanr(values, accuracies).statistic:+.2f}" if several else ""


def draw(name: str, rows: list[dict[str, Any]], asked: argparse.Namespace) -> None:
    """The loss of the first seed's models along two directions."""
    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    panels = figure.subplots(1, 2)
    settings = Settings(progress=False)
    for row in (row for row in rows if row["seed"] == 0):
        folder = asked.out / slug(name) / row["run"]
        its = subject(gtracer.load(folder, device=asked.device or "auto"), examples=asked.examples, folder=asked.data)
        given = (its.model, its.loss_of, its.batches)
        _, vectors = eigenvectors(*given, top=1, settings=settings)
        lines = line(*given, settings=settings), line(*given, vectors[0], label="top eigenvector", settings=settings)
        for axes, found in zip(panels, lines, strict=True):
            found.plot(axes, label=row["method"])
    panels[0].set_title(name, loc="left")
    panels[0].legend(frameon=False)
    figure.savefig(asked.out / f"{slug(name)}.svg", metadata={"Date": None})


def slug(name: str) -> str:
    """Of a problem's folder and figure."""
    return name.replace(", ", "-").replace(" ", "-").replace("%", "")


def _cells(rows: list[dict[str, Any]], value: Callable[[dict[str, Any]], float]) -> list[str]:
    cells = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [value(row) for row in rows if row["method"] == method]
        error = f" ± {statistics.stdev(own) / math.sqrt(len(own)):.2g}" if len(own) > 1 else ""
        cells.append(f"{statistics.fmean(own):.3g}{error}")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=["digits, clean", "digits, 50% noise"], choices=list(PROBLEMS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--out", type=Path, required=True, help="folder of runs and results.jsonl")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="fewer than the study's")
    parser.add_argument("--examples", type=int, default=1000, help="to measure on")
    parser.add_argument("--steps", type=int, default=30, help="of Lanczos' method")
    parser.add_argument("--data", help="folder with the tasks' official files")
    parser.add_argument("--device")
    parser.add_argument("--workers", type=int, default=1, help="of the tuning")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    for name in asked.problems:
        rows = made(name, asked, print)
        print(f"\n{name}\n\n{table(rows)}")
        draw(name, rows, asked)


if __name__ == "__main__":
    main()
