"""`gtracer bench steps`: what a step costs beside the optimisers that people use, as ratios measured in one run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gtracer.lab.benchmarks import measurement
from gtracer.lab.benchmarks.measurement import Step
from gtracer.lab.errors import unknown
from gtracer.lab.models import network
from gtracer.lab.models.transformer import CLASSES, Transformer
from gtracer.optim import SAM, AdamWTracer, SGDTracer
from gtracer.penalty import RHO

TWICE = ("resnet20", "cnn", "transformer")  # small enough to be differentiated twice
MODELS = (*TWICE, "wrn-28-10", "encoder-110m")
PEERS = {"pytorch_optimizer": "pytorch_optimizer", "ivon": "ivon-opt", "schedulefree": "schedulefree"}
SGD, ADAMW, EXACT = "SGD", "AdamW", "SGD-TRACER, exact"
LR = 1e-5  # nothing is learnt, and nothing diverges
EVERY = 8  # steps between two second passes, in the row that has an interval; steps of a measurement, in all

Stepper = Callable[..., Any]  # makes a step: is given the loss and the batch
Loss = Callable[..., Tensor]  # of the batch, or of a part of it


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        base: The row that it is compared with.
        make: From a model to a function that makes one step, given how to compute the loss.
        graph: The same where it is measured as a CUDA graph too, without what it costs to start kernels.
    """

    base: str
    make: Callable[[nn.Module], Stepper]
    graph: Callable[[nn.Module], Stepper] | None = None


def rows(device: torch.device, *, twice: bool) -> dict[str, Row]:
    """What is compared; peers where installed, the exact engine where the model can be differentiated `twice`."""
    momentum: dict[str, Any] = {"lr": LR, "momentum": 0.9}
    on_gpu = device.type == "cuda"
    fused: dict[str, Any] = {"fused": True} if on_gpu else {}
    rarely: dict[str, Any] = {"interval": EVERY, "reuse": 0.9}

    def sgd_tracer(**options: Any) -> Callable[[nn.Module], Stepper]:
        return lambda model: _ours(SGDTracer(model.parameters(), **momentum, **{"rho": RHO} | options, model=model))

    def adamw_tracer(**options: Any) -> Callable[[nn.Module], Stepper]:
        return lambda model: _ours(AdamWTracer(model.parameters(), LR, rho=RHO, model=model, **options))

    def sgd(**options: Any) -> Callable[[nn.Module], Stepper]:
        return lambda model: _plain(torch.optim.SGD(model.parameters(), **momentum, **options))

    def adamw(**options: Any) -> Callable[[nn.Module], Stepper]:
        return lambda model: _plain(torch.optim.AdamW(model.parameters(), LR, **options))

    compared = {
        SGD: Row(SGD, sgd(**fused), graph=sgd(**fused)),
        "SGD, foreach": Row(SGD, sgd(foreach=True)),
        "SGD-SAM": Row(SGD, lambda model: _ours(_sam(torch.optim.SGD(model.parameters(), **momentum, **fused), model))),
        "SGD-TRACER": Row(SGD, sgd_tracer(), graph=sgd_tracer()),
        "SGD-TRACER, ρ auto": Row(SGD, lambda model: _ours(_under_way(model, **momentum))),
        f"SGD-TRACER, every {EVERY}th, reused": Row(SGD, sgd_tracer(**rarely), graph=sgd_tracer(**rarely)),
        ADAMW: Row(ADAMW, adamw(**fused), graph=adamw(**fused, capturable=on_gpu)),  # counted on the device there
        "AdamW, foreach": Row(ADAMW, adamw(foreach=True)),
        "AdamW-TRACER": Row(ADAMW, adamw_tracer(), graph=adamw_tracer(capturable=on_gpu)),
    }
    other = "foreach" if on_gpu else "compiled"  # on a GPU to compile an encoder's tensors takes minutes
    compared[f"SGD-TRACER, {other}"] = Row(SGD, sgd_tracer(implementation=other))
    compared[f"AdamW-TRACER, {other}"] = Row(ADAMW, adamw_tracer(implementation=other))
    if twice:
        exact, compiled = {"engine": "exact"}, {"engine": "exact", "implementation": "compiled"}
        compared[EXACT] = Row(SGD, sgd_tracer(**exact), graph=sgd_tracer(**exact))
        compared[f"{EXACT}, compiled"] = Row(SGD, sgd_tracer(**compiled), graph=sgd_tracer(**compiled))
    return compared | _peers(momentum)


def _peers(momentum: dict[str, Any]) -> dict[str, Row]:
    def sam(model: nn.Module) -> Stepper:
        made = import_module("pytorch_optimizer").SAM(model.parameters(), torch.optim.SGD, **momentum)

        def step(loss_of: Loss, *_: Tensor) -> None:
            loss_of().backward()  # type: ignore[no-untyped-call]
            made.step(lambda: loss_of().backward())  # type: ignore[no-untyped-call]
            made.zero_grad()

        return step

    def ivon(model: nn.Module) -> Stepper:
        made = import_module("ivon").IVON(model.parameters(), lr=0.1, ess=50_000)

        def step(loss_of: Loss, *_: Tensor) -> None:
            with made.sampled_params(train=True):
                made.zero_grad()
                loss_of().backward()  # type: ignore[no-untyped-call]
            made.step()

        return step

    def schedule_free(model: nn.Module) -> Stepper:
        made = import_module("schedulefree").AdamWScheduleFree(model.parameters())
        made.train()
        return _plain(made)

    known = {
        "pytorch_optimizer": ("SAM of pytorch_optimizer", Row(SGD, sam)),
        "ivon": ("IVON", Row(ADAMW, ivon)),
        "schedulefree": ("AdamW, schedule-free", Row(ADAMW, schedule_free)),
    }
    return dict(named for module, named in known.items() if find_spec(module))


def _plain(opt: torch.optim.Optimizer) -> Stepper:
    def step(loss_of: Loss, *_: Tensor) -> None:
        opt.zero_grad()
        loss_of().backward()  # type: ignore[no-untyped-call]
        opt.step()

    return step


def _sam(base: torch.optim.Optimizer, model: nn.Module) -> SAM:
    return SAM(base, rho=0.05, model=model)


def _under_way(model: nn.Module, **own: Any) -> SGDTracer:
    """With a ρ that sets itself, and is no longer zero."""
    opt = SGDTracer(model.parameters(), **own, model=model, steps_per_epoch=100)
    opt.steps = 1000
    return opt


def _ours(opt: Any) -> Stepper:
    def step(loss_of: Loss, *batch: Tensor) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            opt.prepare_capture()
        opt.step(loss_of, *batch)

    return step


class Given:
    """In the place of the passes: gradients that are there already, others in every second call.

    So small that ρ∇T, which may be written into the second, is smaller than it: else they would grow from step to step.
    """

    def __init__(self, net: nn.Module) -> None:
        first = [(p, 1e-6 * torch.randn_like(p)) for p in net.parameters()]
        self._sets = [first, [(p, 1.001 * gradient) for p, gradient in first]]

    def __call__(self, *_: Tensor) -> Given:
        self._sets.reverse()
        for p, gradient in self._sets[0]:
            p.grad = gradient
        return self

    def backward(self) -> None:
        """There is nothing to go back through."""


def build(
    row: Row, name: str, batch: int, device: torch.device, precision: str, *, passes: bool = True
) -> tuple[Step, nn.Module]:
    """A training step of the model, or what it does besides its passes; and the model."""
    torch.manual_seed(0)
    with device:
        net, shape, words = _net(name)
        x = torch.randint(words, (batch, *shape)) if words else torch.randn(batch, *shape)
        y = torch.randint(CLASSES, (batch,))

    def loss_of(x: Tensor = x, y: Tensor = y) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            return cross_entropy(net(x), y)

    step, loss = row.make(net), loss_of if passes else Given(net)
    return lambda: step(loss, x, y), net


def _net(name: str) -> tuple[nn.Module, tuple[int, ...], int]:
    """The model, the shape of an example, and how many words there are in it."""
    if name == "encoder-110m":
        return Transformer(30_522, 256, 768, 12, heads=12, twice=False), (256,), 30_522
    if name == "transformer":
        return Transformer(), (32,), 1000
    image = (3, 32, 32)
    return _cnn() if name == "cnn" else network(name, image, CLASSES), image, 0


def _cnn() -> nn.Module:
    """A small convolutional net, such as a first experiment has."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 8 * 8, CLASSES))


def chosen(compared: dict[str, Row], names: Sequence[str]) -> dict[str, Row]:
    """The rows of these names, and those that they are compared with; without names all."""
    for name in names:
        if name not in compared:
            raise unknown("row", name, compared)
    wanted = {name for row in names for name in (row, compared[row].base)}
    return {name: row for name, row in compared.items() if name in wanted or not names}


def steps(
    *,
    model: str,
    batch_size: int,
    rounds: int,
    device: str,
    precision: str,
    out: Path | None,
    console: Console,
    names: Sequence[str] = (),
) -> dict[str, Any]:
    """Time and memory of a step of every optimiser, over its base's; printed and written, as far as it came."""
    if model not in MODELS:
        raise unknown("model", model, MODELS)
    place = measurement.place_of(device)
    compared = chosen(rows(place, twice=model in TWICE), names)
    made = partial(build, name=model, batch=batch_size, device=place, precision=precision)
    result = measurement.result_of(
        "steps",
        place,
        model=model,
        batch_size=batch_size,
        precision=precision,
        rounds=rounds,
        peers={package: metadata.version(package) for module, package in PEERS.items() if find_spec(module)},
        over={name: row.base for name, row in compared.items()},
    )
    try:
        for numbers in _measured(compared, made, rounds, place):
            result |= numbers
            measurement.write(result, out)
    finally:  # also of what is interrupted
        if "seconds" in result:
            console.print(_table(result))
    return result


def _measured(
    compared: dict[str, Row], made: Callable[..., tuple[Step, nn.Module]], rounds: int, place: torch.device
) -> Iterator[dict[str, Any]]:
    """The numbers as they come: whole steps, their memory, CUDA graphs of them, and what they do besides passes."""
    built = {name: made(row)[0] for name, row in compared.items()}
    for seconds in measurement.in_turn(built, rounds, place, EVERY):
        yield {"seconds": seconds}
    built.clear()
    memory = {}
    for name, row in compared.items():
        step, net = made(row)
        memory[name] = measurement.peak(step, place, first=1 + EVERY)
        yield {"peak_memory": memory, "weights": sum(p.numel() * p.element_size() for p in net.parameters())}
        del step, net
    if place.type == "cuda":
        graphs = {name: replace(row, make=row.graph) for name, row in compared.items() if row.graph is not None}
        built = {name: measurement.captured(made(row)[0], EVERY) for name, row in graphs.items()}
        graphs_seconds = measurement.seconds_of(built, rounds, place)
        yield {"graphs": {name: [t / EVERY for t in times] for name, times in graphs_seconds.items()}}
        built.clear()
    bare = {name: row for name, row in compared.items() if EXACT not in name}  # which goes back through a graph
    built = {name: made(row, passes=False)[0] for name, row in bare.items()}
    yield {"arithmetic": measurement.seconds_of(built, rounds, place, EVERY)}


def _table(result: dict[str, Any]) -> Table:
    what = (result["model"], f"batch {result['batch_size']}", result["precision"], f"{result['rounds']} rounds")
    table = measurement.table_of(
        measurement.title(result, *what),
        ("optimiser", "ms", "lowest – highest", "÷ base", "copies", "arithmetic", "graph"),
        caption="÷ base: median over that of the fused SGD or AdamW (on a CPU: torch's default). Copies: peak memory, "
        "state included, over the base's, in copies of the weights. Arithmetic: a step less its passes, over AdamW's. "
        "Graph: ÷ base, each a CUDA graph.",
    )
    over, memory = result["over"], result.get("peak_memory", {})
    middle, own, graphs = (_medians(result.get(column, {})) for column in ("seconds", "arithmetic", "graphs"))
    for name, times in result["seconds"].items():
        base = over[name]
        copies = (memory[name] - memory[base]) / result["weights"] if name in memory else None
        table.add_row(
            name,
            f"{middle[name] * 1e3:.1f}",
            f"{min(times) * 1e3:.1f} – {max(times) * 1e3:.1f}",
            f"{middle[name] / middle[base]:.2f}",
            _cell(copies, "+.1f"),
            _cell(_ratio(own, name, ADAMW), ".1f"),
            _cell(_ratio(graphs, name, base), ".2f"),
        )
    return table


def _medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(times) for name, times in seconds.items()}


def _ratio(times: dict[str, float], name: str, base: str) -> float | None:
    return times[name] / times[base] if name in times and base in times else None


def _cell(number: float | None, form: str) -> str:
    return "–" if number is None else format(number, form)
