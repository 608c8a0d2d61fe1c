"""A batch taken in micro-batches: split it, and put the parts' passes together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gtracer.optim import processes
from gtracer.optim.step import Slice, Step
from gtracer.tensors import Tensors

Parts = list[tuple[float, tuple[Any, ...]]]  # shares of a batch and their examples


def split(batch: tuple[Any, ...], size: int) -> Parts:
    """Micro-batches of `size` examples, each with its share of the batch; the last may be smaller.

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


@dataclass
class Means:
    """A parameter's means over the parts."""

    gradient: Tensor
    penalty: Tensor
    curvature: Tensor


class Pool:
    """The passes of the micro-batches, taken together: means weighted by their shares."""

    def __init__(self) -> None:
        self._means: dict[Tensor, Means] = {}
        self._loss: Tensor | None = None
        self._ratio: Tensor | None = None
        self._penalised = False

    def add(self, step: Step, share: float) -> None:
        """Take up one micro-batch's passes."""
        if step.loss is not None:
            self._loss = share * step.loss.detach() + (0 if self._loss is None else self._loss)
        if step.trace_ratio is not None:
            self._ratio = share * step.trace_ratio + (0 if self._ratio is None else self._ratio)
        self._penalised |= step.penalty is not None
        measured = [F for part in step.slices for F in part.measured]
        penalty: list[Tensor | None] = [None] * len(step.params) if step.penalty is None else [*step.penalty]
        for p, g, change, F in zip(step.params, step.gradients, penalty, measured, strict=True):
            mean = self._means.setdefault(p, Means(*(torch.zeros_like(g) for _ in range(3))))
            mean.gradient.add_(g, alpha=share)
            mean.curvature.add_(F, alpha=share)
            if change is not None:
                mean.penalty.add_(change, alpha=share)

    def join_processes(self, params: Tensors, group: Any) -> None:
        """Take the means over all processes, each of which has pooled parts of its own."""
        rows = {p: [mean.gradient, mean.penalty, mean.curvature] for p, mean in self._means.items()}
        joined, ratio = processes.mean(rows, params, group, self._ratio)
        self._means = {p: Means(*row) for p, row in joined.items()}
        self._ratio = None if self._ratio is None else ratio

    @property
    def curvature(self) -> dict[Tensor, Tensor]:
        """The mean F of every parameter."""
        return {p: mean.curvature for p, mean in self._means.items()}

    def step(self, slices: list[Slice], *, own_curvature: bool) -> Step:
        """One step for the batch, its penalty there already.

        Args:
            slices: Groups with their parameters; the gradients are filled in.
            own_curvature: Whether f is to follow the parts' mean curvature, not the batch's squared gradient.
        """
        for part in slices:
            part.params = [p for p in part.params if p in self._means]
            part.gradients = [self._means[p].gradient for p in part.params]
            part.curvature = [self._means[p].curvature for p in part.params] if own_curvature else None
        step = Step([part for part in slices if part.params], self._loss, trace_ratio=self._ratio)
        if self._penalised:
            step.penalty, step.renewed = [self._means[p].penalty for p in step.params], True
        return step
