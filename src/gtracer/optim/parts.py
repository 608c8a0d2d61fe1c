"""A batch taken in micro-batches: how it is split, and what share of the examples each has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

Parts = list[tuple[float, tuple[Any, ...]]]  # shares of a batch and their examples


def split(batch: tuple[Any, ...], size: int) -> Parts:
    """Micro-batches of `size` examples, each with its share of the batch; the last may be smaller.

    >>> import torch
    >>> split((torch.arange(3),), 2)
    [(0.6666666666666666, (tensor([0, 1]),)), (0.3333333333333333, (tensor([2]),))]
    """
    count = examples_of(batch, f"micro_batch({size})")
    starts = range(0, count, size)
    return [(min(size, count - i) / count, tuple(rows_of(x, slice(i, i + size)) for x in batch)) for i in starts]


def examples_of(batch: tuple[Any, ...], who: str) -> int:
    """How many examples a batch has; refused where that is unknown."""
    sizes = {len(x) if x.ndim else 0 for x in _tensors(batch)}
    if not sizes:
        raise RuntimeError(
            f"{who} splits the batch: hand it to step, opt.step(closure, x, y), and closure(x, y) will be called on "
            "parts of it"
        )
    if len(sizes) > 1 or 0 in sizes:
        raise RuntimeError(
            f"{who} splits every tensor of the batch along its first axis, which must be the examples: got lengths "
            f"{sorted(sizes)}"
        )
    return sizes.pop()


def shared(batches: Sequence[Any]) -> Parts:
    """Micro-batches, each with its share of all examples: counted along the first axis of its tensors.

    >>> import torch
    >>> shared([torch.zeros(1, 5), (torch.zeros(3, 5), torch.zeros(3))])[1][0]
    0.75
    """
    # A DataLoader gives lists.
    listed = [tuple(batch) if isinstance(batch, tuple | list) else (batch,) for batch in batches]
    if not listed:
        raise ValueError("batches must hold at least one batch, got none")
    counts = []
    for batch in listed:
        sizes = {len(x) for x in _tensors(batch) if x.ndim}
        if len(sizes) > 1 or 0 in sizes:
            raise ValueError(f"a batch's tensors must be as long as each other, got lengths {sorted(sizes)}")
        counts.append(sizes.pop() if sizes else 1)
    return [(count / sum(counts), batch) for count, batch in zip(counts, listed, strict=True)]


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ()
    return [x for item in items for x in _tensors(item)]


def rows_of(tree: Any, rows: slice) -> Any:
    """The same rows of every tensor in tuples, lists and mappings; anything else is for the whole batch."""
    if isinstance(tree, Tensor):
        return tree[rows]
    if isinstance(tree, Mapping):
        return {key: rows_of(item, rows) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([rows_of(item, rows) for item in tree])
    return tree
