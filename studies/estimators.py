"""Does a better estimate of the curvature help? Every estimator on data with 50% label noise.

For each method ρ is chosen by the accuracy on held-out data whose labels are as noisy as the rest (the same number of
values for each, two seeds that the result does not use); then it is trained on all data with five other seeds.

    python studies/estimators.py --task digits --batch-size 512 --epochs 200 --out runs/estimators-digits-512

Finished runs are not run again. The result is OUT/result.json and a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from gtracer.lab import files
from gtracer.lab.config import Config
from runs import last_rows

TRACER = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
SAM = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 1.0, 2.0, 5.0)
ESTIMATORS = ("gradient-magnitude", "micro-batch-32", "per-example", "monte-carlo-fisher", "gauss-newton", "hutchinson")
METHODS = {"SGD": (0.0,), "SAM": SAM, **dict.fromkeys(ESTIMATORS, TRACER)}
# Six of them, around what the eleven on digits and on all of Fashion-MNIST left to choose from.
NARROW = {"SAM": (0.02, 0.5), "gradient-magnitude": (1e-4, 3e-2), "micro-batch-32": (3e-5, 1e-2)}
OTHERS = (3e-6, 1e-3)
TUNING_SEEDS, SEEDS = (100, 101), (0, 1, 2, 3, 4)


def config(base: dict, method: str, rho: float, seed: int, holdout: float) -> Config:
    """One run."""
    own = {"SGD": {"optimizer": "sgd"}, "SAM": {"optimizer": "sam", "rho": rho}}.get(
        method, {"optimizer": "sgd-tracer", "curvature": method, "rho": rho}
    )
    return Config(model="mlp", label_noise=0.5, lr=0.1, seed=seed, holdout=holdout, device="cpu", **base, **own)


def table(result: dict) -> str:
    """The result in Markdown."""
    lines = ["| F | ρ chosen | test accuracy, last epoch | memorised |", "| --- | --- | --- | --- |"]
    for method, row in result["methods"].items():
        edge = " (edge of the range)" if row["edge"] else ""
        rho = "–" if method == "SGD" else f"{row['rho']:g}{edge}"
        learnt = f"{row['memorised']:.0%}"
        lines.append(f"| {method} | {rho} | {row['mean']:.1%} ± {row['error']:.1%} | {learnt} |".replace("%", ""))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="digits")
    parser.add_argument("--data", default=None)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="for the result")
    parser.add_argument("--tuning-seeds", type=int, default=len(TUNING_SEEDS), help="for the choice of ρ")
    parser.add_argument("--holdout", type=float, default=0.1, help="share of the data that ρ is chosen on")
    parser.add_argument("--train-share", type=float, default=1.0, help="share of the training data that is used")
    parser.add_argument("--narrow", action="store_true", help="six values of ρ instead of eleven")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--out", type=Path, default=Path("runs/estimators"))
    chosen = parser.parse_args()
    base = {name: getattr(chosen, name) for name in ("task", "data", "batch_size", "epochs", "train_share")}
    grids = {method: METHODS[method] for method in chosen.methods}
    if chosen.narrow:
        for method in grids.keys() - {"SGD"}:
            low, high = NARROW.get(method, OTHERS)
            grids[method] = tuple(rho for rho in grids[method] if low <= rho <= high)
    trials = {
        (method, rho, seed): config(base, method, rho, seed, chosen.holdout)
        for method, grid in grids.items()
        for rho in grid
        for seed in TUNING_SEEDS[: chosen.tuning_seeds]
    }
    tuned = last_rows(trials, chosen.out / "tuning", chosen.workers)
    mean = {
        cell[:2]: statistics.mean(tuned[other]["holdout_accuracy"] for other in trials if other[:2] == cell[:2])
        for cell in trials
    }
    best = {method: max(grid, key=lambda rho, m=method: mean[m, rho]) for method, grid in grids.items()}
    finals = {
        (method, rho, seed): config(base, method, rho, seed, 0.0)
        for method, rho in best.items()
        for seed in SEEDS[: chosen.seeds]
    }
    last = last_rows(finals, chosen.out / "final", chosen.workers)
    methods = {}
    for method, rho in best.items():
        rows = [last[cell] for cell in finals if cell[0] == method]
        accuracy = [row["test_accuracy"] for row in rows]
        spread = statistics.stdev(accuracy) / len(accuracy) ** 0.5 if len(accuracy) > 1 else 0.0
        methods[method] = {
            "rho": rho,
            "edge": len(grids[method]) > 1 and rho in (grids[method][0], grids[method][-1]),
            "mean": statistics.mean(accuracy),
            "error": spread,
            "accuracies": accuracy,
            "memorised": statistics.mean(row.get("memorised", 0.0) for row in rows),
            "holdout": {str(r): mean[method, r] for r in grids[method]},
            "tuning_test": {
                str(r): [tuned[cell]["test_accuracy"] for cell in trials if cell[:2] == (method, r)]
                for r in grids[method]
            },
        }
    tuning = {"holdout": chosen.holdout, "seeds": TUNING_SEEDS[: chosen.tuning_seeds]}
    result = {"config": finals[next(iter(finals))].to_mapping() | {"data": None}, "tuning": tuning, "methods": methods}
    files.write(chosen.out / "result.json", (json.dumps(result, indent=1) + "\n").encode())
    print(table(result))


if __name__ == "__main__":
    main()
