"""Several processes that train one model: what each has found alone, and the mean of all."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from gtracer.tensors import Tensors


def is_wrapped(model: Any) -> bool:
    """Whether the model joins gradients by itself."""
    return isinstance(model, DistributedDataParallel)


def group_of(model: Any) -> Any:
    """The processes that train the model; None for all there are."""
    return model.process_group if is_wrapped(model) else None


def count(model: Any) -> int:
    """How many they are."""
    several = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size(group_of(model)) if several else 1


def are_joined(model: Any) -> bool:
    """Whether others train the same weights; unless a model says otherwise, they do."""
    return count(model) > 1 and (model is None or is_wrapped(model))


def mean_of(number: Tensor, model: Any) -> Tensor:
    """Of a number that each process has one of."""
    if not are_joined(model):
        return number
    total = number.clone()
    distributed.all_reduce(total, group=group_of(model))
    return total / count(model)


def by_itself(model: Any) -> AbstractContextManager[Any]:
    """Where gradients are this process's own."""
    if count(model) == 1:
        return nullcontext()
    if not isinstance(model, DistributedDataParallel):
        raise RuntimeError(
            f"penalty = 'each' on {count(model)} processes needs model=, the DistributedDataParallel module, to "
            f"keep their gradients apart; got model = {type(model).__name__}"
        )
    if model.static_graph:
        raise RuntimeError(
            "static_graph=True of DistributedDataParallel with batches or penalty = 'each': it cannot keep "
            "gradients apart, leave it out"
        )
    return model.no_sync()


def as_first(model: Any) -> None:
    """Give all processes the first one's statistics, as DistributedDataParallel does only where it joins gradients."""
    if not (isinstance(model, DistributedDataParallel) and model.broadcast_buffers):
        return
    named = model.module.named_buffers()
    shared = [b for name, b in named if name not in model.parameters_to_ignore]
    for dtype in dict.fromkeys(b.dtype for b in shared):  # in the same order everywhere
        buffers = [b for b in shared if b.dtype == dtype]
        flat = torch.cat([b.reshape(-1) for b in buffers])
        distributed.broadcast(flat, group=model.process_group, group_src=0)
        pieces = torch.split(flat, [b.numel() for b in buffers])
        for b, piece in zip(buffers, pieces, strict=True):
            b.copy_(piece.view_as(b))


def mean(
    found: dict[Tensor, list[Tensor]], params: Tensors, group: Any, number: Tensor | None = None
) -> tuple[dict[Tensor, list[Tensor]], Tensor]:
    """Of what each process found for each parameter, and of a number, by one exchange.

    A process that found nothing for a parameter counts as zero.
    """
    params = [p for p in params if p.requires_grad]
    width = max((len(row) for row in found.values()), default=1)
    rows = [found.get(p) or [torch.zeros_like(p)] * width for p in params]
    seen = torch.tensor([float(p in found) for p in params], device=params[0].device, dtype=params[0].dtype)
    number = torch.zeros_like(seen[:1]) if number is None else number.reshape(1).to(seen)
    flat = torch.cat([number, seen, *(x.reshape(-1) for row in rows for x in row)])
    distributed.all_reduce(flat, group=group)
    flat /= distributed.get_world_size(group)
    number, seen, *pieces = torch.split(flat, [1, len(params), *(x.numel() for row in rows for x in row)])
    columns = iter(pieces)
    means = {p: [next(columns).view(p.shape).to(p.dtype) for _ in range(width)] for p in params}
    return {p: means[p] for p, share in zip(params, seen.tolist(), strict=True) if share > 0}, number[0]
