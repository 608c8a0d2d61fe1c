"""`gtracer bench fine-tuning`: a step on a language model in bfloat16, of all weights and of LoRA adapters."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import linear

from gtracer.lab.benchmarks import measurement
from gtracer.lab.errors import LabError, unknown
from gtracer.optim import AdamWTracer
from gtracer.penalty import RHO_FINE_TUNING

LR, RANK, SAM_RADIUS = 1e-5, 16, 0.05
BACK_TO_BACK = 4  # steps of a measurement, as in training
FULL, AUTOCAST, LORA, LORA_LOW = "AdamW", "AdamW, float32 weights", "LoRA, AdamW", "LoRA in bfloat16, AdamW"

# Width, layers, heads, width of the perceptrons, vocabulary, tokens of a text.
MODELS = {
    "llama-134m": (768, 12, 12, 2048, 32_000, 512),
    "llama-1b": (2048, 22, 16, 5632, 32_000, 512),
    "llama-tiny": (32, 2, 2, 64, 100, 16),
}
Stepper = Callable[[Callable[[], Tensor]], Any]  # makes a step, given how to compute the loss


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        base: The row that it is compared with.
        make: From the trained weights and the model to what makes a step.
        weights: What the model's weights are.
        adapters: What those of the adapters are, if there are any; only they are trained.
    """

    base: str
    make: Callable[[list[Tensor], nn.Module], Stepper]
    weights: torch.dtype = torch.bfloat16
    adapters: torch.dtype | None = None


class Adapted(nn.Module):
    """A linear layer with LoRA's two narrow matrices beside it."""

    def __init__(self, layer: nn.Linear, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        own: dict[str, Any] = {"device": layer.weight.device, "dtype": dtype}
        self.down = nn.Parameter(torch.randn(rank, layer.in_features, **own) / math.sqrt(layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank, **own))

    def forward(self, x: Tensor) -> Tensor:
        own: Tensor = self.layer(x)
        return own + 2 * linear(linear(x, self.down), self.up)


def rows(device: torch.device) -> dict[str, Row]:
    """What is compared: all weights and adapters, each with torch's AdamW, SAM by hand and TRACER."""
    fused: dict[str, Any] = {"fused": True} if device.type == "cuda" else {}

    def adamw(params: list[Tensor], _: nn.Module) -> Stepper:
        opt = torch.optim.AdamW(params, LR, **fused)

        def step(loss_of: Callable[[], Tensor]) -> None:
            opt.zero_grad()
            loss_of().backward()  # type: ignore[no-untyped-call]
            opt.step()

        return step

    def sam(params: list[Tensor], _: nn.Module) -> Stepper:
        opt = torch.optim.AdamW(params, LR, **fused)

        def step(loss_of: Callable[[], Tensor]) -> None:
            opt.zero_grad()
            loss_of().backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                gradients = [p.grad for p in params if p.grad is not None]
                length = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
                kept = [p.clone() for p in params]
                torch._foreach_mul_(gradients, SAM_RADIUS / length)
                torch._foreach_add_(params, gradients)
                del gradients
            opt.zero_grad()
            loss_of().backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                torch._foreach_copy_(params, kept)
            opt.step()

        return step

    def tracer(**own: Any) -> Callable[[list[Tensor], nn.Module], Stepper]:
        return lambda params, model: AdamWTracer(params, LR, rho=RHO_FINE_TUNING, model=model, **own).step

    on_adapters: dict[str, Any] = {"adapters": torch.float32}
    low: dict[str, Any] = {"adapters": torch.bfloat16}
    return {
        FULL: Row(FULL, adamw),
        "AdamW-SAM": Row(FULL, sam),
        "AdamW-TRACER, no masters": Row(FULL, tracer(master_weights=False)),
        "AdamW-TRACER": Row(FULL, tracer()),
        AUTOCAST: Row(AUTOCAST, adamw, torch.float32),
        "AdamW-TRACER, float32 weights": Row(AUTOCAST, tracer(), torch.float32),
        LORA: Row(LORA, adamw, **on_adapters),
        "LoRA, AdamW-SAM": Row(LORA, sam, **on_adapters),
        "LoRA, AdamW-TRACER": Row(LORA, tracer(), **on_adapters),
        LORA_LOW: Row(LORA_LOW, adamw, **low),
        "LoRA in bfloat16, AdamW-TRACER, no masters": Row(LORA_LOW, tracer(master_weights=False), **low),
        "LoRA in bfloat16, AdamW-TRACER": Row(LORA_LOW, tracer(), **low),
    }


def network(name: str, device: torch.device, row: Row) -> nn.Module:
    """A Llama made from a config, with random weights."""
    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        raise LabError("gtracer bench fine-tuning needs transformers: pip install transformers") from None

    width, layers, heads, inner, words, length = MODELS[name]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=words, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    with device:
        model: nn.Module = transformers.LlamaForCausalLM(config).to(row.weights)
    if row.adapters is not None:
        model.requires_grad_(False)
        layers_of = [(block, n, x) for block in model.modules() for n, x in block.named_children()]
        for block, child, layer in layers_of:
            if isinstance(layer, nn.Linear) and child != "lm_head":
                setattr(block, child, Adapted(layer, RANK, row.adapters))
    return model.train()


def build(row: Row, name: str, batch: int, device: torch.device) -> tuple[measurement.Step, list[Tensor]]:
    """Some steps, back to back as in training, and the weights that they train."""
    model = network(name, device, row)
    words, length = MODELS[name][-2:]
    x = torch.randint(words, (batch, length), device=device)
    trained: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    step = row.make(trained, model)
    mixed = torch.float32 in (row.weights, row.adapters)

    def loss_of() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            loss: Tensor = model(input_ids=x, labels=x).loss
        return loss

    def steps() -> None:
        for _ in range(BACK_TO_BACK):
            step(loss_of)

    return steps, trained


def fine_tuning(
    *, model: str, batch_size: int, rounds: int, device: str, out: Path | None, console: Console
) -> dict[str, Any]:
    """Time and memory of a step of every row, over its base's; printed and written."""
    if model not in MODELS:
        raise unknown("model", model, tuple(MODELS))
    place = measurement.place_of(device)
    compared = rows(place)
    memory, trained = {}, {}
    for name, row in compared.items():
        step, params = build(row, model, batch_size, place)
        memory[name] = measurement.peak(step, place, first=2)
        trained[name] = sum(p.numel() * p.element_size() for p in params)
        numbers = sum(p.numel() for p in params)
        del step, params
        console.out(f"{name}: {numbers / 1e6:.1f} million weights trained", highlight=False)
    built = {name: build(row, model, batch_size, place)[0] for name, row in compared.items()}
    seconds = measurement.seconds_of(built, rounds, place)
    result = measurement.result_of(
        "fine-tuning",
        place,
        model=model,
        batch_size=batch_size,
        length=MODELS[model][-1],
        rounds=rounds,
        seconds={name: [t / BACK_TO_BACK for t in times] for name, times in seconds.items()},
        over={name: row.base for name, row in compared.items()},
        peak_memory=memory,
        trained=trained,
    )
    measurement.publish(result, [_table(result)], out, console)
    return result


def _table(result: dict[str, Any]) -> Table:
    what = (result["model"], f"{result['batch_size']} texts of {result['length']}", f"{result['rounds']} rounds")
    table = measurement.table_of(
        measurement.title(result, *what),
        ("optimiser", "ms", "lowest – highest", "÷ base", "MB", "copies"),
        caption="÷ base: median over that of torch's AdamW. MB: peak memory of a step beyond the model, state "
        "included. Copies: what of it is more than the base's, in copies of the base's trained weights.",
    )
    middle = {name: statistics.median(times) for name, times in result["seconds"].items()}
    memory, trained = result["peak_memory"], result["trained"]
    for name, times in result["seconds"].items():
        base = result["over"][name]
        more = (memory[name] - memory[base]) / trained[base]
        spread = f"{min(times) * 1e3:.1f} – {max(times) * 1e3:.1f}"
        cells = (f"{middle[name] / middle[base]:.3f}", f"{memory[name] / 1e6:.0f}", f"{more:+.2f}")
        table.add_row(name, f"{middle[name] * 1e3:.1f}", spread, *cells)
    return table
