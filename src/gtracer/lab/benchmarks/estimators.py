"""`gtracer bench estimators`: what a step costs, estimator by estimator, as ratios measured in one run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from gtracer import curvature
from gtracer.curvature import Estimator, Evaluation
from gtracer.experimental import vectorised_micro_batch
from gtracer.lab.benchmarks import measurement
from gtracer.lab.benchmarks.measurement import Step
from gtracer.lab.errors import unknown
from gtracer.lab.models import network
from gtracer.lab.models.transformer import CLASSES, Transformer
from gtracer.optim import SGDTracer

MODELS = ("resnet20", "resnet20-gn", "transformer")
BASE, EXACT = "gradient_magnitude", "gradient_magnitude, exact"


def naive_per_example(model: nn.Module, x: Tensor, y: Tensor) -> Estimator:
    """The mean of squared gradients as torch.func gives it, all gradients held at once: what the fast paths are for."""
    params: dict[str, Tensor] = dict(model.named_parameters())

    def loss(weights: dict[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, weights, (row[None],)), label[None])

    def estimator(at: Evaluation) -> list[Tensor]:
        slopes = vmap(grad(loss), (None, 0, 0))(params, x, y)
        return [slopes[name].square().mean(0) for name in params]

    return estimator


def choices(model: str, micro: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """The optimiser's options for each row of the table."""
    rows: dict[str, dict[str, Any]] = {
        "SGD": {"rho": 0.0},
        BASE: {},
        EXACT: {"engine": "exact"},
        f"micro_batch({micro})": {"curvature": curvature.micro_batch(micro)},
    }
    if device.type == "cuda":
        rows[f"micro_batch({micro}), vectorised"] = {"curvature": vectorised_micro_batch(micro)}
    if model == "resnet20":  # batch norm: no gradient per example
        return rows | {"hutchinson, in f alone": {"average": curvature.hutchinson()}}
    rows |= {
        "per_example": {"curvature": curvature.per_example},
        "per_example, naive vmap": {"curvature": naive_per_example},
        "per_example, in f alone": {"average": curvature.per_example},
        "monte_carlo_fisher": {"curvature": curvature.monte_carlo_fisher()},
        "gauss_newton, sampled": {"curvature": curvature.gauss_newton(exact_up_to=0)},
    }
    if model == "transformer":  # torch's third derivative of layer norm is wrong
        return rows | {"hutchinson, in f alone": {"average": curvature.hutchinson()}}
    return rows | {"hutchinson": {"curvature": curvature.hutchinson()}}


def build(model: str, options: dict[str, Any], batch: int, device: torch.device) -> Step:
    """A training step of the model with these options."""
    torch.manual_seed(0)
    if model == "transformer":
        net: nn.Module = Transformer().to(device)
        x = torch.randint(1000, (batch, 32), device=device)
    else:
        net = network(model, (3, 32, 32), CLASSES).to(device)
        x = torch.randn(batch, 3, 32, 32, device=device)
    y = torch.randint(CLASSES, (batch,), device=device)
    if options.get("curvature") is naive_per_example:
        options = options | {"curvature": naive_per_example(net, x, y)}
    opt = SGDTracer(net.parameters(), lr=1e-3, momentum=0.9, model=net, nonfinite="ignore", **options)
    return lambda: opt.step(lambda x, y: cross_entropy(net(x), y), x, y)


def estimators(
    *, model: str, batch_size: int, micro_batch: int, rounds: int, device: str, out: Path | None, console: Console
) -> dict[str, Any]:
    """Time and memory of a step with every estimator, against the gradient magnitude's; printed and written."""
    if model not in MODELS:
        raise unknown("model", model, MODELS)
    place = measurement.place_of(device)
    rows = choices(model, micro_batch, place)
    seconds = {}
    modes: dict[str, Callable[[Step], Step]] = {"eager": lambda step: step}
    if place.type == "cuda":
        modes["CUDA graph"] = measurement.captured
    for mode, made in modes.items():
        steps = {row: made(build(model, options, batch_size, place)) for row, options in rows.items()}
        seconds[mode] = measurement.seconds_of(steps, rounds, place)
    built = {row: build(model, options, batch_size, place) for row, options in rows.items()}
    memory = {row: measurement.peak(built.pop(row), place) for row in rows}
    result = measurement.result_of(
        "estimators",
        place,
        model=model,
        batch_size=batch_size,
        micro_batch=micro_batch,
        rounds=rounds,
        seconds=seconds,
        peak_memory=memory,
    )
    measurement.publish(result, [_table(result, mode, times) for mode, times in seconds.items()], out, console)
    return result


def _table(result: dict[str, Any], mode: str, seconds: dict[str, list[float]]) -> Table:
    what = (result["model"], f"batch {result['batch_size']}", mode, f"{result['rounds']} rounds")
    table = measurement.table_of(
        measurement.title(result, *what),
        ("curvature", "ms", "lowest – highest", "÷ FD", "÷ exact", "MB"),
        caption="÷ FD, ÷ exact: over the gradient magnitude's step with either engine. MB: peak over what is kept.",
    )
    base, exact = (statistics.median(seconds[name]) for name in (BASE, EXACT))
    for name, times in seconds.items():
        middle = statistics.median(times)
        spread = f"{min(times) * 1e3:.1f} – {max(times) * 1e3:.1f}"
        ratios = f"{middle / base:.2f}", f"{middle / exact:.2f}"
        table.add_row(name, f"{middle * 1e3:.1f}", spread, *ratios, f"{result['peak_memory'][name] / 1e6:.0f}")
    return table
