"""Is the posterior that an optimiser holds of use? Calibration on digits, alone and averaged over draws.

    python studies/posterior.py

Trains an MLP on digits with and without the penalty, with clean labels and with 50% label noise, and prints NLL,
expected calibration error and accuracy on the test set: of the weights alone, and averaged over 50 draws at several
temperatures.
"""

from __future__ import annotations

import argparse
import itertools
import statistics

import torch
from torch.nn.functional import cross_entropy

from gtracer import SGDTracer, curvature
from gtracer.calibration import calibration
from gtracer.lab import data
from gtracer.lab.config import Config
from gtracer.lab.models import network

TEMPERATURES = (0.0, 1e-3, 1e-2, 0.1, 1.0)


def rows(noise: float, rho: float, seed: int, epochs: int) -> dict[float, tuple[float, float, float]]:
    """NLL, ECE and accuracy for every temperature; 0 is the weights alone."""
    task = data.load(Config(label_noise=noise, seed=seed))
    x, y, fresh, truth = task.train.inputs, task.train.labels, task.test.inputs, task.test.labels
    torch.manual_seed(seed)
    model = network("mlp", tuple(x.shape[1:]), task.classes)
    opt = SGDTracer(model.parameters(), lr=0.1, momentum=0.9, rho=rho, curvature=curvature.per_example, model=model)
    for _ in range(epochs):
        for part in torch.randperm(len(y)).split(128):
            opt.step(lambda x, y: cross_entropy(model(x), y), x[part], y[part])
    found = {}
    for temperature in TEMPERATURES:
        draws = 50 if temperature else 1
        p = opt.predict(model, fresh, draws, examples=len(y), temperature=temperature)
        measured = calibration(p, truth)
        found[temperature] = measured["nll"], measured["ece"], (p.argmax(1) == truth).double().mean().item()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=100)
    chosen = parser.parse_args()
    print("| labels | ρ | temperature | NLL | ECE | accuracy |\n| --- | --- | --- | --- | --- | --- |")
    for noise, rho in itertools.product((0.0, 0.5), (0.0, 1e-4)):
        runs = [rows(noise, rho, seed, chosen.epochs) for seed in range(chosen.seeds)]
        for temperature in TEMPERATURES:
            cells = []
            for index, form in enumerate(("{:.3f}", "{:.3f}", "{:.1%}")):
                values = [run[temperature][index] for run in runs]
                error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
                cells.append(f"{form.format(statistics.mean(values))} ± {form.format(error)}".replace("%", ""))
            name = f"{temperature:g}" if temperature else "weights alone"
            print(f"| {noise:.0%} label noise | {rho:g} | {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
