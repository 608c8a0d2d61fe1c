"""`gtracer demo`: what happens to half-wrong labels under SGD, SAM and SGD-TRACER."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gtracer.lab import digits
from gtracer.optim import SAM, SGDTracer

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

NOISE = 0.5
BATCH = 128
LR = 0.02


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


# 0.05 is SAM's usual ρ; SAM's 1 and TRACER's 0.012 are the best of seven each, chosen on other seeds:
# docs/algorithm.md, "Defaults".
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": sgd,
    "SAM, ρ 0.05": lambda model: SAM(sgd(model), rho=0.05, model=model),
    "SAM, ρ 1": lambda model: SAM(sgd(model), rho=1.0, model=model),
    "SGD-TRACER": lambda model: SGDTracer(model.parameters(), lr=LR, momentum=0.9, rho=0.012, delta=0.01, model=model),
}


@dataclass(frozen=True)
class Result:
    """One run. Accuracies in per cent; `memorised` is the share of wrong training labels that the net gives back."""

    last: float
    best: float
    memorised: float
    seconds: float


def train(
    make: MakeOptimizer, seed: int, epochs: int, report: Callable[[float], None] = lambda accuracy: None
) -> Result:
    """Train the batch-norm net on digits with half of the labels wrong, cosine learning rate, no weight decay."""
    data = digits.load(NOISE, seed)
    torch.manual_seed(seed)
    model = digits.batch_norm_mlp()
    opt = make(model)
    batches = -(-len(data.x) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs * batches)
    start, accuracies = time.perf_counter(), []
    for _ in range(epochs):
        model.train()
        for rows in torch.split(torch.randperm(len(data.x)), BATCH):
            step(opt, lambda rows=rows: cross_entropy(model(data.x[rows]), data.y[rows]))  # type: ignore[misc]
            schedule.step()
        accuracies.append(percent_right(model, data.x_test, data.y_test))
        report(accuracies[-1])
    wrong = data.y != data.y_clean
    memorised = percent_right(model, data.x[wrong], data.y[wrong])
    return Result(accuracies[-1], max(accuracies), memorised, time.perf_counter() - start)


def step(opt: torch.optim.Optimizer, loss_of: Callable[[], Tensor]) -> None:
    """One step with a closure that torch's own optimisers understand too."""

    def closure() -> float:
        opt.zero_grad()
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    opt.step(closure)


@torch.no_grad()
def percent_right(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    right: Tensor = model(x).argmax(1) == y
    return right.float().mean().item() * 100


def run(seeds: int, epochs: int, console: Console | None = None) -> dict[str, list[Result]]:
    """Train every optimiser with every seed, show progress, print the table."""
    console = console or Console()
    results: dict[str, list[Result]] = {name: [] for name in OPTIMIZERS}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with one_thread(), Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(OPTIMIZERS) * seeds * epochs)
        for seed in range(seeds):
            for name, make in OPTIMIZERS.items():

                def report(accuracy: float, what: str = f"{name}, seed {seed}") -> None:
                    progress.update(task, advance=1, description=f"{what}: {accuracy:.1f}%")

                results[name].append(train(make, seed, epochs, report))
    console.print(table(results, epochs))
    return results


def table(results: dict[str, list[Result]], epochs: int) -> Table:
    """Mean ± standard error over the seeds."""
    n = len(next(iter(results.values())))
    made = Table(
        title=f"Digits with {NOISE:.0%} of the training labels wrong, {epochs} epochs, n = {n}",
        caption="Accuracy on clean test labels in %, mean ± standard error over seeds.",
    )
    for heading in ("", "last epoch", "best epoch", "wrong labels learnt", "s a run"):
        made.add_column(heading, justify="left" if not heading else "right")
    for name, runs in results.items():
        numbers = ([getattr(r, field) for r in runs] for field in ("last", "best", "memorised", "seconds"))
        made.add_row(name, *(mean_and_error(values) for values in numbers))
    return made


def mean_and_error(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values) / len(values) ** 0.5:.1f}"


@contextmanager
def one_thread() -> Iterator[None]:
    """A net this small runs faster on one core; the same number of threads everywhere makes the same numbers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
