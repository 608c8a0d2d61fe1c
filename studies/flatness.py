"""Does TRACER find flatter minima, by which measure, and does flatness go with accuracy?

    python studies/flatness.py --problems "digits, clean" "digits, 50% noise" --out runs/sharpness
    python studies/flatness.py --problems "cifar100, 50% noise" --only-seeds 0 --epochs 60 --data DIR --device cuda \
        --kernels fused --parallel 8 --seconds 500 --out runs/sharpness-gpu

SGD, SAM, SGD-TRACER, scale-free SGD-TRACER and SGD-TRACER with the penalty of every 8th step; ρ is the best of some
values by held-out data, or what searches before have chosen. Every model of the last epoch is measured on a thousand of
the examples that it was trained on, with the labels that it was trained on. Models are trained and measured in parts of
`--parallel` at a time; results.jsonl gets a line for each model as soon as it is measured, and models that have a line
are not made again, so a study can be cut anywhere, and made in parts on machines that share nothing but this file. Runs
that the folder holds, such as those of a `gtracer sweep --models`, are not trained again. The tables are means ±
standard errors over seeds, and Spearman's rank correlation of each measure with the accuracy on test data over all
models of a problem, and over all but SGD's. Each problem's figure has the loss of the first seed's models along a
random direction and along the top eigenvector.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from scipy.stats import spearmanr

import gtracer
from gtracer.lab.config import Config
from gtracer.lab.errors import LabError
from gtracer.lab.inference.sharpness import Subject, subject
from gtracer.lab.results import provenance
from gtracer.lab.sweeps.launchers.cuda_graphs import CudaGraphs
from gtracer.lab.sweeps.sweep import Engine, RunsFolder, run_missing
from gtracer.sharpness import Line, Settings, eigenvectors, line
from gtracer.sharpness.result import TEXTS
from runs import in_turn, last_row

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
NOISE, DECAY = {"label_noise": 0.5}, {"weight_decay": 5e-4}


def searched(sam: float, tracer: float, scale_free: float, interval: float) -> dict[str, float]:
    """A ρ for each method."""
    return dict(zip(list(METHODS)[1:], (sam, tracer, scale_free, interval), strict=True))


# On CIFAR ρ is what the searches of studies/cifar100 chose, at 200 epochs of ResNet-20 and 160 of ResNet-32. Where they
# had none, it is carried over: every 8th step has half of TRACER's, scale-free 2.5 times TRACER's with weight decay.
PROBLEMS = {
    "digits, clean": Problem(DIGITS),
    "digits, 50% noise": Problem(DIGITS | NOISE, {"SAM": 1.0, "TRACER": 0.005}, tracer=(0.0025, 0.005, 0.01)),
    "fashion, clean": Problem(FASHION),
    "fashion, 50% noise": Problem(FASHION | NOISE),
    "cifar100, 50% noise": Problem(CIFAR | NOISE, searched(0.9, 0.016, 0.0025, 0.008)),
    "cifar100, 50% noise, weight decay": Problem(CIFAR | NOISE | DECAY, searched(0.5, 0.004, 0.01, 0.002)),
    "cifar100, clean, augmented": Problem(CIFAR | DECAY | {"augment": True}, searched(0.2, 0.001, 0.0025, 0.0005)),
    "resnet32, 20% noise": Problem(LONG | {"label_noise": 0.2}, searched(0.2, 0.001, 0.0025, 0.0005)),
    "resnet32, 60% noise": Problem(LONG | {"label_noise": 0.6}, searched(0.2, 0.001, 0.0025, 0.0005)),
}


def tuned(
    problem: Problem, methods: list[str], folder: Path, engine: Engine, changes: dict[str, Any]
) -> dict[str, float]:
    """ρ of each method: the best by data that was held out, its labels as noisy as the rest."""
    choices = {m: problem.rhos(m) for m in methods}
    asked = {
        (method, rho): problem.config(method, rho, holdout=0.1, seed=TUNING_SEED, **changes)
        for method, rhos in choices.items()
        if len(rhos) > 1
        for rho in rhos
    }
    records = run_missing(asked.values(), folder, engine, Console()) if asked else {}
    held = {key: last_row(records[config.identity])["holdout_accuracy"] for key, config in asked.items()}
    return {
        method: max(rhos, key=lambda rho: held[method, rho]) if len(rhos) > 1 else rhos[0]
        for method, rhos in choices.items()
    }


@dataclass(frozen=True)
class Model:
    """One that is to be measured, and on how many of its examples."""

    key: dict[str, Any]
    folder: Path
    data: str | None
    device: str
    examples: int
    steps: int

    def measured(self) -> dict[str, Any]:
        """Its row, with the lines of the figure where it is of the first seed; or why there is nothing to measure."""
        begun = time.perf_counter()
        try:
            found = subject(gtracer.load(self.folder, device=self.device), folder=self.data, examples=self.examples)
            sharpness = found.measured(progress=False, top=3, steps=self.steps)
        except LabError as error:
            return self.key | {"failure": str(error)}
        measures = {row.name: [row.value, row.error] for row in sharpness.rows()}
        where = {"run": self.folder.name, "commit": provenance.commit(), "settings": dict(sharpness.settings)}
        drawn = {"lines": [each.to_mapping() for each in lines(found, self.steps)]} if self.key["seed"] == 0 else {}
        return self.key | {"measures": measures} | where | drawn | {"seconds": time.perf_counter() - begun}


def lines(of: Subject, steps: int) -> tuple[Line, Line]:
    """The loss along a random direction, and along the top eigenvector."""
    given, settings = (of.model, of.loss_of, of.batches), Settings(progress=False)
    _, vectors = eigenvectors(*given, top=1, steps=steps, settings=settings)
    return line(*given, settings=settings), line(*given, vectors[0], label="top eigenvector", settings=settings)


def processes(count: int) -> Executor | nullcontext[None]:
    """A small network leaves a GPU idle, so several processes may measure; they are started once."""
    if count == 1:
        return nullcontext()
    spawn, threads = multiprocessing.get_context("spawn"), max(1, torch.get_num_threads() // count)
    return ProcessPoolExecutor(count, spawn, torch.set_num_threads, (threads,))


def measured(models: list[Model], pool: Executor | None) -> Iterator[dict[str, Any]]:
    """The rows as they come."""
    if pool is None:
        yield from map(Model.measured, models)
        return
    for done in as_completed([pool.submit(model.measured) for model in models]):
        yield done.result()


Key = tuple[str, int]  # method, seed


@dataclass
class Runs:
    """The runs of a problem, and what is known of them.

    Attributes:
        name: The problem.
        configs: Its runs.
        rhos: ρ of each method.
        rows: Those of results.jsonl.
    """

    name: str
    configs: dict[Key, Config]
    rhos: dict[str, float]
    rows: dict[Key, dict[str, Any]]

    @classmethod
    def of(cls, name: str, asked: argparse.Namespace, engine: Engine) -> Runs:
        problem, changes = PROBLEMS[name], {"data": asked.data, "kernels": asked.kernels}
        changes |= {"epochs": asked.epochs} if asked.epochs else {}
        changes |= {"device": asked.device} if asked.device else {}
        rhos = tuned(problem, asked.methods, asked.out / slug(name) / "tuning", engine, changes)
        configs = {
            (method, seed): problem.config(method, rho, seed=seed, **changes)
            for seed in asked.only_seeds or range(asked.seeds)
            for method, rho in rhos.items()
        }
        rows = {}
        for row in map(json.loads, whole_lines(asked.out / "results.jsonl")):
            key = row["method"], row["seed"]
            is_it = row["problem"] == name and key in configs and row["rho"] == rhos[row["method"]]
            if is_it and row["last"]["epoch"] == configs[key].epochs:
                rows[key] = row
        return cls(name, configs, rhos, {key: rows[key] for key in configs if key in rows})

    def missing(self) -> list[Key]:
        return [key for key in self.configs if key not in self.rows]

    def make(self, keys: Sequence[Key], asked: argparse.Namespace, engine: Engine, pool: Executor | None) -> None:
        """Train these and measure them."""
        folder, begun = asked.out / slug(self.name), time.perf_counter()
        records = run_missing([self.configs[key] for key in keys], folder, engine, Console(), models=True)
        there, models = RunsFolder.of(folder), []
        for method, seed in keys:
            config = self.configs[method, seed]
            record = records[config.identity]
            if record.failure is not None:
                tell(f"{self.name}, {method}, seed {seed}: {record.failure}")
                continue
            key = {"problem": self.name, "method": method, "seed": seed, "rho": self.rhos[method]}
            key["last"] = record.summary()["last"]
            models.append(Model(key, there.place(config), asked.data, config.device, asked.examples, asked.steps))
        tell(f"{self.name}: {len(keys)} trained in {time.perf_counter() - begun:.0f} s")
        for row in measured(models, pool):
            if "failure" in row:
                tell(f"{self.name}, {row['method']}, seed {row['seed']}: {row['failure']}")
                continue
            with (asked.out / "results.jsonl").open("a") as out:
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
            self.rows[row["method"], row["seed"]] = row
            accuracy = f"{row['last']['test_accuracy']:.2%}"
            tell(f"{self.name}, {row['method']}, seed {row['seed']}: {accuracy}, measured in {row['seconds']:.1f} s")

    def in_order(self) -> list[dict[str, Any]]:
        return [self.rows[key] for key in self.configs if key in self.rows]


def whole_lines(file: Path) -> list[str]:
    """The lines of a file, without what was being written when a study was cut."""
    text = file.read_text() if file.exists() else ""
    whole, newline, torn = text.rpartition("\n")
    if torn:
        file.write_text(whole + newline)
    return whole.splitlines()


tell = partial(print, flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """A column for each method, a row for each measure, and what its rank tells of the accuracy."""
    heads = [f"{m}, ρ {r:g}" if r else m for m, r in {row["method"]: row["rho"] for row in rows}.items()]
    epochs, seeds = (max(of) for of in zip(*((row["last"]["epoch"], row["seed"] + 1) for row in rows), strict=True))
    lines = [
        f"| {epochs} epochs, n = {seeds} | " + " | ".join(heads) + " | rank correlation | without SGD |",
        "|" + " --- |" * (len(heads) + 3),
    ]
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
    from matplotlib.figure import Figure  # models can be made where it is not installed

    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    panels = figure.subplots(1, 2)
    for row in (row for row in rows if row["seed"] == 0):
        if "lines" in row:
            drawn = [Line(**each) for each in row["lines"]]
        else:  # a row of an older study
            folder = asked.out / slug(name) / row["run"]
            model = gtracer.load(folder, device=asked.device or "auto")
            drawn = [*lines(subject(model, examples=asked.examples, folder=asked.data), asked.steps)]
        for axes, found in zip(panels, drawn, strict=True):
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
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 on")
    parser.add_argument(
        "--only-seeds", type=int, nargs="+", metavar="SEED", help="these alone, to make a study in parts"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further models after so many")
    parser.add_argument("--epochs", type=int, help="fewer than the study's")
    parser.add_argument("--examples", type=int, default=1000, help="to measure on")
    parser.add_argument("--steps", type=int, default=30, help="of Lanczos' method")
    parser.add_argument("--data", help="folder with the tasks' official files")
    parser.add_argument("--device")
    parser.add_argument("--kernels", default="torch")
    parser.add_argument("--parallel", type=int, metavar="N", help="runs at a time, as CUDA graphs (default: in turn)")
    parser.add_argument("--measuring", type=int, default=1, metavar="N", help="processes that measure")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    engine: Engine = CudaGraphs(asked.parallel) if asked.parallel else in_turn
    begun, at_a_time = time.perf_counter(), asked.parallel or 1
    with processes(asked.measuring) as pool:
        for name in asked.problems:
            runs = Runs.of(name, asked, engine)
            missing = runs.missing()
            while missing and time.perf_counter() - begun < asked.seconds:
                now, missing = missing[:at_a_time], missing[at_a_time:]
                runs.make(now, asked, engine, pool)
            if missing:
                tell(f"{name}: {len(missing)} of {len(runs.configs)} models are left for another time")
            if rows := runs.in_order():
                print(f"\n{name}\n\n{table(rows)}", flush=True)
            if not runs.missing() and any(row["seed"] == 0 for row in rows):
                draw(name, rows, asked)


if __name__ == "__main__":
    main()
