"""`gtracer bench`: what a step costs, estimator by estimator, as ratios measured side by side in one run."""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from gtracer import curvature
from gtracer.curvature import Estimator, Evaluation
from gtracer.experimental import vectorised_micro_batch
from gtracer.lab import files
from gtracer.lab.errors import unknown
from gtracer.lab.models import network
from gtracer.lab.results import provenance
from gtracer.lab.training.run import device_of
from gtracer.optim import SGDTracer

Step = Callable[[], Any]
MODELS = ("resnet20", "resnet20-gn", "transformer")
CLASSES = 100
BASE, EXACT = "gradient_magnitude", "gradient_magnitude, exact"


class Attention(nn.Module):
    """Self-attention of linear layers; `twice` by the back end that can be differentiated twice."""

    def __init__(self, width: int, heads: int, twice: bool) -> None:
        super().__init__()
        self.heads, self.mixed, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixed(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.MATH) if self.twice else nullcontext():
            mixed = functional.scaled_dot_product_attention(q, k, v)
        found: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


class Transformer(nn.Module):
    """A small classifier of token sequences: layer norm first, learnt positions."""

    def __init__(
        self,
        words: int = 1000,
        length: int = 32,
        width: int = 128,
        layers: int = 2,
        *,
        heads: int = 4,
        twice: bool = True,
    ) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.attentions = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), Attention(width, heads, twice)) for _ in range(layers)
        )
        self.wides = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.out = nn.Linear(width, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.positions(torch.arange(words.shape[1], device=words.device)[None])
        for attention, wide in zip(self.attentions, self.wides, strict=True):
            x = x + attention(x)
            x = x + wide(x)
        found: Tensor = self.out(x.mean(1))
        return found


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


def captured(step: Step) -> Step:
    """The step as a CUDA graph, after a few on a stream of their own."""

    def replay() -> Step:
        graph.replay()
        return step  # the graph holds addresses alone: what lies there must stay

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return replay


def seconds_of(steps: dict[str, Step], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each step, one after the other in every round, so that all see the same machine."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in track(range(rounds + 2), description="rounds", transient=True):
        for name, step in steps.items():
            _finish(device)
            start = time.perf_counter()
            step()
            _finish(device)
            if turn >= 2:  # the first ones warm up
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak(step: Step, device: torch.device, *, state: bool = False) -> int:
    """Bytes that a step asks torch for, at their highest, beyond what was there before it.

    As asked for: what the GPU's allocator rounds them up to depends on the blocks that it has lying about.

    Args:
        step: Makes it.
        device: Where.
        state: The first step ever, in which an optimiser allocates its state too, and the next one.
    """
    if not state:
        step()  # the optimiser's state is there then
    gc.collect()  # what others left would be freed, and counted, in between
    if device.type == "cuda":
        _finish(device)
        before: int = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats(device)
        for _ in range(1 + state):
            step()
        _finish(device)
        highest: int = torch.cuda.memory_stats(device)["requested_bytes.all.peak"]
        return highest - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        for _ in range(1 + state):
            step()
    changes = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    highest = max(itertools.accumulate((event.nbytes() for event in changes), initial=0))
    return highest


def estimators(
    *, model: str, batch_size: int, micro_batch: int, rounds: int, device: str, out: Path | None, console: Console
) -> dict[str, Any]:
    """Time and memory of a step with every estimator, against the gradient magnitude's; printed and written."""
    if model not in MODELS:
        raise unknown("model", model, MODELS)
    place = device_of(device)
    torch.backends.cudnn.benchmark = True  # each shape gets its fastest kernel, for every row alike
    rows = choices(model, micro_batch, place)
    seconds = {}
    modes: dict[str, Callable[[Step], Step]] = {"eager": lambda step: step}
    if place.type == "cuda":
        modes["CUDA graph"] = captured
    for mode, made in modes.items():
        steps = {row: made(build(model, options, batch_size, place)) for row, options in rows.items()}
        seconds[mode] = seconds_of(steps, rounds, place)
    built = {row: build(model, options, batch_size, place) for row, options in rows.items()}
    memory = {row: peak(built.pop(row), place) for row in rows}
    result = {
        "bench": "estimators",
        "model": model,
        "batch_size": batch_size,
        "micro_batch": micro_batch,
        "rounds": rounds,
        **provenance.describe(place),
        "seconds": seconds,
        "peak_memory": memory,
    }
    for mode, times in seconds.items():
        console.print(_table(result, mode, times))
    if out is not None:
        files.write(out, (json.dumps(result, indent=1) + "\n").encode())
    return result


def _table(result: dict[str, Any], mode: str, seconds: dict[str, list[float]]) -> Table:
    hardware = result["hardware"]
    where = hardware.get("gpu", f"{hardware['threads']} threads of a CPU")
    table = Table(
        title=Text(
            f"{result['model']}, batch {result['batch_size']}, {where}, {mode}, {result['rounds']} rounds",
            style="table.title",
        )
    )
    table.caption = "÷ FD, ÷ exact: over the gradient magnitude's step with either engine. MB: peak over what is kept."
    for name in ("curvature", "ms", "lowest – highest", "÷ FD", "÷ exact", "MB"):
        table.add_column(name, justify="left" if name == "curvature" else "right", no_wrap=True)
    base, exact = (statistics.median(seconds[name]) for name in (BASE, EXACT))
    for name, times in seconds.items():
        middle = statistics.median(times)
        spread = f"{min(times) * 1e3:.1f} – {max(times) * 1e3:.1f}"
        ratios = f"{middle / base:.2f}", f"{middle / exact:.2f}"
        table.add_row(name, f"{middle * 1e3:.1f}", spread, *ratios, f"{result['peak_memory'][name] / 1e6:.0f}")
    return table
