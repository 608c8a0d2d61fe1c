"""How many trials does `gtracer tune` need, with the range of ρ from short branches and without?

    python studies/tune_finder.py --out runs/tune-finder --searches 3

Digits with 50% label noise, a small net, 50 epochs, three tenths of the training data held out; δ and β are
searched too, as by default. For each search: the trial that first comes within half a point of the best held-out
accuracy that either way has found in all of its trials, and the test accuracy of the best of the first trials.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from gtracer.lab.config import Config
from gtracer.lab.results.record import Record
from gtracer.lab.sweeps import tune
from runs import in_turn

BASE = Config(label_noise=0.5, epochs=50, width=64, batch_size=64, holdout=0.3)
NEAR = 0.005
FIRST = (1, 4, 8)


def searched(seed: int, finder: bool, trials: int, folder: Path) -> list[dict[str, float]]:
    """The trials of one search, in their order."""
    config = replace(BASE, seed=seed)
    console = Console(quiet=True)
    ranges, first = tune.ranges(config, []), {}
    if finder:
        ranges, first = tune.narrowed(ranges, config, tune.found(config, folder, console))
    tune.tune(config, ranges, trials, 1, folder, in_turn, console, first=first)
    records = [Record.read(path.parent) for path in folder.glob("*/record.json")]
    records.sort(key=lambda record: (folder / record.config.identity.folder / "record.json").stat().st_mtime)
    rows = [(record.config.rho, record.curves) for record in records if record.failure is None]
    return [
        {"rho": rho, "held_out": curves["holdout_accuracy"][-1], "test": curves["test_accuracy"][-1]}
        for rho, curves in rows
    ]


def summary(with_finder: list[dict[str, float]], without: list[dict[str, float]]) -> dict[str, Any]:
    best = max(row["held_out"] for row in with_finder + without)
    found: dict[str, Any] = {"best": best}
    for name, rows in (("finder", with_finder), ("plain", without)):
        near = [i for i, row in enumerate(rows, 1) if row["held_out"] >= best - NEAR]
        found[name] = {"trials": near[0] if near else None}
        for count in FIRST:
            found[name][f"test of the best of {count}"] = max(rows[:count], key=lambda row: row["held_out"])["test"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the searches")
    parser.add_argument("--searches", type=int, default=3)
    parser.add_argument("--trials", type=int, default=14)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(asked.searches):
        both = [searched(seed, finder, asked.trials, asked.out / f"{seed}-{finder}") for finder in (True, False)]
        print(json.dumps({"search": seed} | summary(*both)), flush=True)


if __name__ == "__main__":
    main()
