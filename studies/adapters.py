"""Which ρ do adapters want? LoRA on all-MiniLM-L6-v2 beside fine-tuning all of it, with clean and with noisy labels.

    python studies/adapters.py --model DIR --data DIR --device cuda --parallel 6 --out runs/adapters

BoolQ and RTE with 0 and 40% label noise. Adapters have rank 8 and scale 2 on queries and values, as PEFT's default for
BERT, with its first weights; they and the head are trained by AdamW-TRACER, clipped to a norm of 1, as by
`presets.adapters()`. A fifth of the training data is held out, with labels as noisy. results.jsonl in the folder has a
line for each run; runs that it holds are not made again. The table is of the last epoch: mean ± standard error.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gtracer import AdamWTracer, Clip
from gtracer.lab.benchmarks.fine_tuning import Adapted
from gtracer.lab.data import text
from gtracer.lab.data.label_noise import mislabelled
from gtracer.lab.data.task import Split
from gtracer.lab.models import encoders

TASKS = {"BoolQ": text.boolq, "RTE": text.rte}
METHODS = {"LoRA": 5e-4, "all weights": 2e-5}  # learning rates
RHOS = {"LoRA": (0.0, 6e-5, 2e-4, 6e-4, 2e-3), "all weights": (0.0, 6e-5)}
RANK, BATCH, MAX_LENGTH, HELD_OUT = 8, 32, 256, 0.2
READ = 10  # steps from one look at ‖ρ∇T‖/‖∇L‖ to the next


@dataclass(frozen=True)
class Run:
    """One training."""

    task: str
    noise: float
    method: str
    rho: float
    seed: int


def trained(run: Run, *, model: str, data: Path, device: str, epochs: int, examples: int | None) -> dict[str, Any]:
    """The last epoch's accuracies in percent, and the mean of ‖ρ∇T‖/‖∇L‖."""
    torch.set_num_threads(1)
    here = torch.device(device)
    torch.manual_seed(run.seed)
    built = encoders.build(model, 2, MAX_LENGTH)
    net = adapted(built.model, run.method).to(here).train()
    train, held_out, test = splits(run, data, examples)
    read = {name: built.batches(split, here) for name, split in (("held out", held_out), ("test", test))}
    batches, labels = built.batches(train, here), train.labels.to(here)

    params = [p for p in net.parameters() if p.requires_grad]
    opt = AdamWTracer(params, lr=METHODS[run.method], weight_decay=0.01, rho=run.rho, clip=Clip(norm=1.0), model=net)
    steps = epochs * math.ceil(len(labels) / BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, partial(warmed_up, steps=steps))
    half = partial(torch.autocast, here.type, torch.bfloat16, enabled=here.type == "cuda")

    def loss_of(rows: Tensor, width: int) -> Tensor:
        with half():
            logits = net(batches(rows, width))
        return cross_entropy(logits.float(), labels[rows.to(here)])

    ratios: list[float] = []
    order = torch.Generator().manual_seed(run.seed)
    for _ in range(epochs):
        shuffled = batches.grouped(torch.randperm(len(labels), generator=order), BATCH, order)
        for rows in shuffled.split(BATCH):
            opt.step(loss_of, rows, batches.width(rows))
            schedule.step()
            if opt.steps % READ == 1:  # it waits for the device
                ratios.append(opt.stats.penalty_ratio)
    net.eval()
    pairs = {"held out": held_out, "test": test}
    found = {name: accuracy(net, read[name], split.labels, half) for name, split in pairs.items()}
    return asdict(run) | found | {"ratio": statistics.mean(ratios), "weights": sum(map(Tensor.numel, params))}


def adapted(net: nn.Module, method: str) -> nn.Module:
    """Only adapters and head are trained; or all of it."""
    if method == "LoRA":
        net.requires_grad_(False)
        for block in list(net.modules()):
            for name, layer in list(block.named_children()):
                if name in ("query", "value"):
                    made = Adapted(layer, RANK, torch.float32)
                    nn.init.kaiming_uniform_(made.down, a=math.sqrt(5))
                    setattr(block, name, made)
                elif name == "classifier":
                    layer.requires_grad_(True)
    return net


@cache
def task_of(name: str, data: Path) -> Any:
    return TASKS[name](data)


def splits(run: Run, data: Path, examples: int | None) -> tuple[Split, Split, Split]:
    """To train on, held out, and test; the first two with label noise."""
    task = task_of(run.task, data)
    chosen = torch.randperm(len(task.train.labels), generator=torch.Generator().manual_seed(run.seed))[:examples]
    noisy = task.train.rows(chosen)
    noisy = noisy.labelled(mislabelled(noisy.labels, run.noise, task.classes, run.seed))
    first = round(HELD_OUT * len(chosen))
    rows = torch.arange(len(chosen))
    test = task.test if examples is None else task.test.rows(torch.arange(examples))
    return noisy.rows(rows[first:]), noisy.rows(rows[:first]), test


def warmed_up(step: int, steps: int) -> float:
    """BERT's schedule: up over a tenth of the steps, then down to 0."""
    rise = max(1, steps // 10)
    return min((step + 1) / rise, (steps - step) / max(1, steps - rise))


@torch.no_grad()
def accuracy(net: nn.Module, batches: Any, labels: Tensor, half: Any) -> float:
    right = 0
    for rows in batches.sorted(torch.arange(len(labels))).split(8 * BATCH):
        with half():
            right += (net(batches(rows)).argmax(1).cpu() == labels[rows]).sum().item()
    return 100 * right / len(labels)


def results(runs: list[Run], out: Path, parallel: int, **own: Any) -> list[dict[str, Any]]:
    """Of all runs; those that the folder does not have are made, and written as they come."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "results.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known = {_run(row) for row in rows}
    for row in _made([run for run in runs if run not in known], parallel, **own):
        print(f"{_run(row)}: {row['test']:.1f}", flush=True)
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        rows.append(row)
    by_run = {_run(row): row for row in rows}
    return [by_run[run] for run in runs]


def _made(runs: list[Run], parallel: int, **own: Any) -> Iterator[dict[str, Any]]:
    if parallel == 1:
        yield from (trained(run, **own) for run in runs)
        return
    with ProcessPoolExecutor(parallel, multiprocessing.get_context("spawn")) as pool:
        yield from (done.result() for done in as_completed([pool.submit(trained, run, **own) for run in runs]))


def _run(row: dict[str, Any]) -> Run:
    return Run(*(row[name] for name in Run.__dataclass_fields__))


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each task, noise, method and ρ."""
    yield "| task | label noise | trained | ρ | n | held out | test | ratio |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for key in dict.fromkeys((row["task"], row["noise"], row["method"], row["rho"]) for row in rows):
        task, noise, method, rho = key
        those = [row for row in rows if (row["task"], row["noise"], row["method"], row["rho"]) == key]
        cells = [estimate([row[name] for row in those]) for name in ("held out", "test")]
        ratio = statistics.mean(row["ratio"] for row in those)
        yield f"| {task} | {noise:.0%} | {method} | {rho:g} | {len(those)} | {' | '.join(cells)} | {ratio:.3f} |"


def estimate(values: list[float]) -> str:
    error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder with all-MiniLM-L6-v2")
    parser.add_argument("--data", type=Path, required=True, help="folder with BoolQ and RTE from SuperGLUE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--noise", nargs="+", type=float, default=[0.0, 0.4])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rhos", nargs="+", type=float, help="instead of those of the study")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--examples", type=int, help="of the training and of the test data, to try it out")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--parallel", type=int, default=1, help="runs at the same time")
    chosen = parser.parse_args()
    # The seeds first: a study that is cut has all values of one.
    grid = itertools.product(range(chosen.seeds), chosen.tasks, chosen.noise, chosen.methods)
    runs = [
        Run(task, noise, method, rho, seed) for seed, task, noise, method in grid for rho in chosen.rhos or RHOS[method]
    ]
    own = {name: getattr(chosen, name) for name in ("model", "data", "device", "epochs", "examples")}
    print("\n".join(table(results(runs, chosen.out, chosen.parallel, **own))))


if __name__ == "__main__":
    main()
