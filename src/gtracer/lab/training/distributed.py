"""The processes that train one run together: which one this is, and what they tell each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

Thing = TypeVar("Thing")


class ProcessGroup:
    """One process by itself; or, under `torchrun`, one of several, each with a share of every batch."""

    def __init__(self, device: torch.device, rank: int = 0, world: int = 1) -> None:
        self.device, self.rank, self.world = device, rank, world

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes and prints."""
        return self.rank == 0

    def share(self, rows: Tensor) -> tuple[Tensor, int]:
        """This process's rows, as many as every other's; how many of them count (the last may be a padding row)."""
        if self.world == 1:
            return rows, len(rows)
        each = -(-len(rows) // self.world)
        mine = rows[self.rank :: self.world]
        return torch.cat([mine, rows[: each - len(mine)]]), len(mine)

    def joined(self, parts: Tensor) -> Tensor:
        """What all have of a `share`, in the order of the rows (with the padding at the end)."""
        if self.world == 1:
            return parts
        found = [torch.empty_like(parts) for _ in range(self.world)]
        distributed.all_gather(found, parts.contiguous())
        return torch.stack(found, dim=1).flatten(0, 1)

    def wrapped(self, model: nn.Module) -> nn.Module:
        """The model with gradients that are the mean over all processes."""
        if self.world == 1:
            return model
        return nn.parallel.DistributedDataParallel(model)

    def mean(self, value: Tensor) -> Tensor:
        if self.world == 1:
            return value
        total = value.detach().clone()
        distributed.all_reduce(total)
        return total / self.world

    def any(self, flag: bool) -> bool:
        """Whether it is so in any of them."""
        return flag if self.world == 1 else bool(self.mean(torch.tensor(float(flag), device=self.device)) > 0)

    def as_first(self, tensors: Iterator[Tensor]) -> None:
        """Make all have what the first has."""
        if self.world > 1:
            for tensor in tensors:
                distributed.broadcast(tensor, 0)

    def all(self, thing: Thing) -> list[Thing]:
        """What each of them has."""
        if self.world == 1:
            return [thing]
        found: list[Any] = [None] * self.world
        distributed.all_gather_object(found, thing)
        return found

    def from_first(self, make: Callable[[], Thing]) -> Thing:
        """What the first makes, or the error it gets."""
        if self.world == 1:
            return make()
        made: Any = None
        if self.is_first:
            try:
                made = make()
            except Exception as error:
                made = error
        message = [made]
        distributed.broadcast_object_list(message, 0)
        if isinstance(message[0], Exception):
            raise message[0]
        return message[0]  # type: ignore[no-any-return]


@contextmanager
def joined(device: torch.device) -> Iterator[ProcessGroup]:
    """The others that `torchrun` has started, for as long as they work together."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield ProcessGroup(device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield ProcessGroup(device, distributed.get_rank(), world)
        distributed.barrier()  # who leaves first takes the connections with him
    finally:
        distributed.destroy_process_group()
