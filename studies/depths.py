"""Does a ρ carry over? SAM and SGD-TRACER tuned for a net of one depth, used on nets of every other depth.

    python studies/depths.py

Digits with 50% label noise, batch-norm nets of 2 to 6 hidden layers. For each method and depth ρ is chosen,
among seven values each, by the accuracy on held-out data whose labels are as noisy (three seeds); each choice is then
used on all data and on every depth (five other seeds). The table has the depth that ρ was tuned for in rows, the depth
that it was used on in columns.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from gtracer.lab import files
from gtracer.lab.config import Config
from runs import last_rows

DEPTHS = (2, 3, 4, 5, 6)
# The seven values of docs/explanation/defaults.md; TRACER's with δ = 0.01.
GRIDS = {"sam": (0.05, 0.1, 0.2, 0.5, 1.0, 1.5, 2.0), "sgd-tracer": (0.001, 0.003, 0.005, 0.008, 0.012, 0.016, 0.02)}
TUNING_SEEDS, SEEDS = (100, 101, 102), (0, 1, 2, 3, 4)


def config(method: str, depth: int, rho: float, seed: int, epochs: int, holdout: float) -> Config:
    """One run of the demo's problem."""
    return Config(
        model="mlp-bn",
        label_noise=0.5,
        optimizer=method,
        depth=depth,
        rho=rho,
        seed=seed,
        epochs=epochs,
        holdout=holdout,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="for the result")
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--out", type=Path, default=Path("runs/depths"))
    chosen = parser.parse_args()
    pairs = [(method, depth) for method in GRIDS for depth in chosen.depths]
    trials = {
        (method, depth, rho, seed): config(method, depth, rho, seed, chosen.epochs, 0.1)
        for method, depth in pairs
        for rho in GRIDS[method]
        for seed in TUNING_SEEDS[: chosen.seeds]
    }
    tuned = last_rows(trials, chosen.out / "tuning", chosen.workers)
    held = {
        cell[:3]: statistics.mean(tuned[other]["holdout_accuracy"] for other in trials if other[:3] == cell[:3])
        for cell in trials
    }
    best = {pair: max(GRIDS[pair[0]], key=lambda rho, pair=pair: held[(*pair, rho)]) for pair in pairs}
    finals = {
        (method, used, best[method, depth], seed): config(method, used, best[method, depth], seed, chosen.epochs, 0.0)
        for method, depth in pairs
        for used in chosen.depths
        for seed in SEEDS[: chosen.seeds]
    }
    last = last_rows(finals, chosen.out / "final", chosen.workers)
    cells, elsewhere = {}, {}
    for method in GRIDS:
        for depth in chosen.depths:
            for used in chosen.depths:
                values = [
                    last[cell]["test_accuracy"] for cell in finals if cell[:3] == (method, used, best[method, depth])
                ]
                cells[f"{method} tuned {depth} used {used}"] = values
        # One number a seed: the mean over all pairs of different depths.
        others = [cells[f"{method} tuned {d} used {u}"] for d in chosen.depths for u in chosen.depths if d != u]
        elsewhere[method] = [statistics.mean(seed) for seed in zip(*others, strict=True)]
    result = {
        "epochs": chosen.epochs,
        "rho": {f"{method} {depth}": rho for (method, depth), rho in best.items()},
        "accuracy": cells,
        "elsewhere": elsewhere,
    }
    files.write(chosen.out / "result.json", (json.dumps(result, indent=1) + "\n").encode())
    print(table(result, chosen.depths))


def table(result: dict, depths: list[int]) -> str:
    """The result in Markdown."""
    lines = [
        "| tuned for | ρ | " + " | ".join(f"used on {d}" for d in depths) + " |",
        "| --- " * (len(depths) + 2) + "|",
    ]
    for method in GRIDS:
        for depth in depths:
            row = [_mean(result["accuracy"][f"{method} tuned {depth} used {used}"]) for used in depths]
            lines.append(f"| {method}, {depth} layers | {result['rho'][f'{method} {depth}']:g} | {' | '.join(row)} |")
    lines += [f"{method}, on depths that it was not tuned for: {_mean(v)}" for method, v in result["elsewhere"].items()]
    return "\n".join(lines)


def _mean(values: list[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{100 * statistics.mean(values):.1f} ± {100 * error:.1f}"


if __name__ == "__main__":
    main()
