"""Does `find_rho` recommend what full training would choose? On problems of `studies/rho_auto.py`.

    python studies/rho_finder.py --out records/rho-finder/runs.jsonl --seeds 1 2

For each problem and seed: a full training with every candidate ρ, without a tenth of the data, which is held out with
its labels as noisy as the rest; and `find_rho` with branches of a twentieth, a tenth and a fifth of that training. Runs
that are in the file already are not made again. The table has accuracy on clean test data at the last epoch (R² of the
regression), in per cent: of ρ = 0, of the ρ that full training chooses by held-out data, and of what is recommended.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gtracer import SAM, AdamTracer, NonFiniteError, SGDTracer, find_rho
from gtracer import finder as finders
from gtracer.optim import TwoPassOptimizer
from rho_auto import BATCH, PROBLEMS, batches, loss_of, noisy, score

HELD_OUT, OF_A_BATCH = 0.1, 10
LENGTHS = (0.05, 0.1, 0.2)  # of a branch, as shares of the training
ALL = [  # and whether under SAM
    ("digits", False),
    ("digits, 50% noise", False),
    ("table, 40% noise", False),
    ("shapes, batch norm", False),
    ("regression with outliers", False),
    ("digits, 50% noise", True),
    ("shapes, batch norm, 40% noise", False),
    ("digits, 50% noise, Adam", False),
    ("digits, 80% noise", False),
    ("shapes, batch norm", True),
]


class Case:
    """A problem with its data, model and optimiser, made anew for every run."""

    def __init__(self, name: str, sam: bool, seed: int) -> None:
        self.problem, self.sam, self.seed = PROBLEMS[name], sam, seed
        x, y, count = self.problem.data(seed)
        labels = noisy(y[:count], self.problem.noise, seed)
        kept = int(count * HELD_OUT)
        self.held_out = x[:kept], labels[:kept]
        self.train = x[kept:count], labels[kept:]
        self.test = x[count:], y[count:]
        self.steps = len(self.train[1]) // BATCH * self.problem.epochs
        torch.manual_seed(seed)
        self.model = self.problem.model()

    def optimizer(self, rho: float) -> TwoPassOptimizer:
        params, lr = self.model.parameters(), self.problem.lr
        if self.sam:
            return SAM(torch.optim.SGD(params, lr, 0.9), rho=rho, model=self.model)
        if self.problem.adam:
            return AdamTracer(params, lr, rho=rho, model=self.model)
        return SGDTracer(params, lr, 0.9, rho=rho, model=self.model)

    def loss_of(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(self.model, *batch)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Of all epochs."""
        x, y = self.train
        for _ in range(self.problem.epochs):
            for rows in batches(len(y)):
                yield x[rows], y[rows]


def trained(name: str, sam: bool, seed: int, rho: float) -> dict[str, Any]:
    """A full training."""
    case = Case(name, sam, seed)
    opt = case.optimizer(rho)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, case.steps)
    found: dict[str, Any] = {"held_out": None, "held_out_loss": None, "test": None}
    try:
        for batch in case.batches():
            opt.step(case.loss_of, batch)
            schedule.step()
    except NonFiniteError:
        return found
    scores = score(case.model, *case.held_out), held_out_loss(case.model, case.held_out), score(case.model, *case.test)
    return dict(zip(found, scores, strict=True))


@torch.no_grad()
def held_out_loss(model: nn.Module, held_out: tuple[Tensor, Tensor]) -> float:
    return float(loss_of(model, *held_out))


def recommended(name: str, sam: bool, seed: int, length: float) -> dict[str, Any]:
    case = Case(name, sam, seed)
    opt = case.optimizer(0.0)
    held_out = list(zip(*(part.split(OF_A_BATCH) for part in case.held_out), strict=True))
    curve = find_rho(
        case.model,
        case.loss_of,
        list(case.batches()),
        held_out,
        optimizer=opt,
        steps=round(length * case.steps),
        tell=None,
    )
    return {"rho": curve.rho, "reason": curve.reason, "collapsed": curve.collapsed, "losses": clean(curve.losses)}


def clean(values: tuple[float, ...]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]  # JSON knows no NaN


def chosen(full: dict[float, dict[str, Any]]) -> float:
    """By held-out accuracy; where that is equal, by the loss."""
    sound = {rho: run for rho, run in full.items() if run["test"] is not None and math.isfinite(run["held_out_loss"])}
    return max(sound, key=lambda rho: (sound[rho]["held_out"], -sound[rho]["held_out_loss"]))


def print_table(runs: list[dict[str, Any]]) -> None:
    heads = ["ρ = 0", "best by full training", *(f"find_rho, {length:.0%}" for length in LENGTHS)]
    print("| | seed | " + " | ".join(heads) + " |\n|" + " --- |" * (2 + len(heads)))
    distances: dict[float, list[tuple[float, float]]] = {length: [] for length in LENGTHS}
    for name, sam, seed in dict.fromkeys((r["problem"], r["sam"], r["seed"]) for r in runs):
        own = [r for r in runs if (r["problem"], r["sam"], r["seed"]) == (name, sam, seed)]
        full = {r["rho"]: r for r in own if r["length"] == 1}
        made = {r["length"]: r["rho"] for r in own if r["length"] < 1}
        best = chosen(full)
        cells = [f"{full[0.0]['test']:.1f}", f"{full[best]['test']:.1f} ({best:g})"]
        for length in LENGTHS:
            test = full[made[length]]["test"]
            cells.append(f"{test:.1f} ({made[length]:g})" if test is not None else f"diverged ({made[length]:g})")
            distances[length].append(((test or 0) - full[best]["test"], (test or 0) - full[0.0]["test"]))
        print(f"| {name}{', SAM' if sam else ''} | {seed} | " + " | ".join(cells) + " |")
    for length, pairs in distances.items():
        against = (f"{statistics.fmean(d):+.1f}, worst {min(d):+.1f}" for d in zip(*pairs, strict=True))
        print(
            f"{length:.0%} of the training, n = {len(pairs)}: against the best, and against ρ = 0: {'; '.join(against)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a file of one run a line, added to")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    runs = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    made = {(r["problem"], r["sam"], r["seed"], r["length"], r["rho"] if r["length"] == 1 else None) for r in runs}
    with asked.out.open("a") as file:
        for seed in asked.seeds:
            for name, sam in ALL:
                rhos = [0.0, *(finders.SAM if sam else finders.TRACER)]
                wanted = [(1, rho) for rho in rhos] + [(length, None) for length in LENGTHS]
                for length, rho in wanted:
                    if (name, sam, seed, length, rho) in made:
                        continue
                    one = trained(name, sam, seed, rho) if rho is not None else recommended(name, sam, seed, length)
                    runs.append({"problem": name, "sam": sam, "seed": seed, "length": length, "rho": rho} | one)
                    file.write(json.dumps(runs[-1], ensure_ascii=False) + "\n")
                    file.flush()
    print_table(runs)


if __name__ == "__main__":
    main()
