"""Examples that are read when they are wanted, by torch's DataLoader: there may be more than memory holds."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from gtracer.lab.errors import LabError, raised

IN_MEMORY = 1 << 30  # bytes of a data set that is kept on the device as a whole
MOST_WORKERS = 8
READ_AT_ONCE = 64  # examples
FEW = 1000  # examples, below which they are not worth other processes, and a bar that shows how far reading is


def _as_it_is(batch: Tensor) -> Tensor:
    return batch


class Items:
    """Some examples of a Dataset, which gives an input or a pair of input and label."""

    def __init__(
        self,
        dataset: Any,
        chosen: Sequence[int] | None = None,
        *,
        name: str | None = None,
        finish: Callable[[Tensor], Tensor] = _as_it_is,
    ) -> None:
        """Make it.

        Args:
            dataset: Gives examples of one shape, by their numbers.
            chosen: Which of them; all, if nothing is said.
            name: Of the user's own, which may raise anything, or give what is no number.
            finish: What is still to be done to a batch, where the model computes: bytes are a quarter to hand over.
        """
        self.dataset, self.name, self.finish = dataset, name, finish
        self.chosen = range(len(dataset)) if chosen is None else chosen

    def __len__(self) -> int:
        return len(self.chosen)

    def rows(self, chosen: Tensor) -> Items:
        """These examples only, in this order."""
        return Items(self.dataset, [self.chosen[i] for i in chosen.tolist()], name=self.name, finish=self.finish)

    def __getitem__(self, place: int) -> Tensor:
        return self.finish(self._read(place)[None])[0]

    def _read(self, place: int) -> Tensor:
        number = self.chosen[place]
        if self.name is None:
            found: Tensor = self.dataset[number]
            return found
        try:
            item = self.dataset[number]
            found = torch.as_tensor(item[0] if isinstance(item, tuple | list) else item).float()
        except LabError:
            raise
        except Exception as error:  # of the user's own code
            raise LabError(f"{self.name}: example {number} cannot be read: {raised(error)}") from error
        if not found.isfinite().all():
            raise LabError(f"{self.name}: example {number} holds NaN or infinity")
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        """As a tensor of all of them would have it."""
        return (len(self), *self[0].shape)

    @property
    def dtype(self) -> torch.dtype:
        """Likewise."""
        return self[0].dtype

    def gathered(self, rows: Iterable[int]) -> Tensor:
        """These as one tensor, to be finished."""
        found = [self._read(row) for row in rows]
        shapes = {tuple(each.shape): None for each in found}
        if len(shapes) > 1:
            pair = " and ".join(map(str, list(shapes)[:2]))
            raise LabError(f"{self.name}: examples have shapes {pair}, all must have the same")
        whole: Tensor = default_collate(found)  # in a process that reads ahead, in memory that it shares already
        return whole

    def loaded(self) -> Tensor | Items:
        """All of them as one tensor, where they are few enough."""
        first = self[0]
        if first.numel() * first.element_size() * len(self) > IN_MEMORY:
            return self
        if len(self) < FEW:
            return self.finish(self.gathered(range(len(self))))
        parts = torch.split(torch.arange(len(self)), READ_AT_ONCE)
        console = Console(stderr=True)
        read = read_ahead(self, parts, torch.device("cpu"))
        bar = track(read, "reading", len(parts), transient=True, disable=not console.is_terminal, console=console)
        return torch.cat(list(bar))


def read_ahead(items: Items, parts: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Batch after batch of these rows, which other processes read while the device computes."""
    loader = DataLoader(
        _Batches(items),
        sampler=[rows.tolist() for rows in parts],
        batch_size=None,
        num_workers=workers(len(parts)),
        worker_init_fn=_leave_interrupts,
        pin_memory=device.type == "cuda",
        generator=torch.Generator().manual_seed(0),  # or it would draw from everybody's
    )
    for batch in loader:
        if isinstance(batch, LabError):
            raise batch
        yield items.finish(batch.to(device, non_blocking=True))


class _Batches(Dataset[Any]):
    """Whole batches, by their rows; what is wrong with one comes instead of it, as no traceback of a worker."""

    def __init__(self, items: Items) -> None:
        self.items = items

    def __getitem__(self, rows: list[int]) -> Tensor | LabError:
        try:
            return self.items.gathered(rows)
        except LabError as error:
            return error


def workers(batches: int) -> int:
    """How many processes read: one for each core, none for a single batch, or where there may be none."""
    if batches < 2 or multiprocessing.current_process().daemon:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_WORKERS, cores)


def _leave_interrupts(worker: int) -> None:
    """Ctrl-C is the run's: it finishes the step, for which this process still reads, and ends it then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
