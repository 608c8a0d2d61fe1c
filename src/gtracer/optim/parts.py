"""A batch taken in micro-batches: split it, and put the parts' passes together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from gtracer.optim.trial import Plan, Slice, Trial
from gtracer.tensors import Tensors


def split(batch: tuple[Any, ...], size: int) -> list[tuple[float, tuple[Any, ...]]]:
    """Micro-batches of `size` examples, each with its share of the batch; the last may be smaller.

    >>> split((torch.arange(3),), 2)
    [(0.6666666666666666, (tensor([0, 1]),)), (0.3333333333333333, (tensor([2]),))]
    """
    count = _examples(batch, f"micro_batch({size})")
    starts = range(0, count, size)
    return [(min(size, count - i) / count, tuple(_rows(x, slice(i, i + size)) for x in batch)) for i in starts]


def cut(batch: tuple[Any, ...], share: float) -> list[tuple[float, tuple[Any, ...]]]:
    """The first examples of a batch, about so large a share of it but one at least, and the rest, if any.

    >>> cut((torch.arange(5),), 0.4)
    [(0.4, (tensor([0, 1]),)), (0.6, (tensor([2, 3, 4]),))]
    """
    count = _examples(batch, f"share = {share}")
    first = max(1, round(share * count))
    parts = [(first / count, slice(0, first)), (1 - first / count, slice(first, count))]
    return [(size, tuple(_rows(x, rows) for x in batch)) for size, rows in parts if size]


def _examples(batch: tuple[Any, ...], who: str) -> int:
    """How many examples a batch has; refused where that cannot be told."""
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


def shared(batches: Sequence[Any]) -> list[tuple[float, tuple[Any, ...]]]:
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


def gradients_of(params: Tensors) -> Tensors:
    """Theirs, which the next pass leaves alone."""
    return kept([p.grad for p in params if p.grad is not None])


def kept(gradients: Tensors) -> Tensors:
    """Gradients that the next pass leaves alone: one in a bucket of DistributedDataParallel is copied out of it."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return gradients
    return [g.clone() if g._base is not None and not g.requires_grad else g for g in gradients]


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


def mean_over_processes(
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


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ()
    return [x for item in items for x in _tensors(item)]


def _rows(tree: Any, rows: slice) -> Any:
    """The same rows of every tensor in tuples, lists and mappings; anything else is for the whole batch."""
    if isinstance(tree, Tensor):
        return tree[rows]
    if isinstance(tree, Mapping):
        return {key: _rows(item, rows) for key, item in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([_rows(item, rows) for item in tree])
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

    def add(self, trial: Trial, share: float) -> None:
        """Take up one micro-batch's passes."""
        if trial.loss is not None:
            self._loss = share * trial.loss.detach() + (0 if self._loss is None else self._loss)
        if trial.trace_ratio is not None:
            self._ratio = share * trial.trace_ratio + (0 if self._ratio is None else self._ratio)
        self._penalised |= trial.penalty is not None
        measured = [F for part in trial.slices for F in part.measured]
        penalty: list[Tensor | None] = [None] * len(trial.params) if trial.penalty is None else [*trial.penalty]
        for p, g, change, F in zip(trial.params, trial.gradients, penalty, measured, strict=True):
            mean = self._means.setdefault(p, Means(*(torch.zeros_like(p) for _ in range(3))))
            mean.gradient.add_(g, alpha=share)
            mean.curvature.add_(F, alpha=share)
            if change is not None:
                mean.penalty.add_(change, alpha=share)

    def join_processes(self, params: Tensors, group: Any) -> None:
        """Take the means over all processes, each of which has pooled parts of its own."""
        rows = {p: [mean.gradient, mean.penalty, mean.curvature] for p, mean in self._means.items()}
        joined, ratio = mean_over_processes(rows, params, group, self._ratio)
        self._means = {p: Means(*row) for p, row in joined.items()}
        self._ratio = None if self._ratio is None else ratio

    def trial(self, slices: list[Slice], *, own_curvature: bool) -> Trial:
        """One trial for the batch, its penalty there already.

        Args:
            slices: Groups with their parameters; the gradients are filled in.
            own_curvature: Whether f is to follow the parts' mean curvature, not the batch's squared gradient.
        """
        for part in slices:
            part.params = [p for p in part.params if p in self._means]
            part.gradients = [self._means[p].gradient for p in part.params]
            part.curvature = [self._means[p].curvature for p in part.params] if own_curvature else None
        slices = [part for part in slices if part.params]
        trial = Trial(slices, Plan(None, self._ratio), self._loss)
        if self._penalised:
            trial.penalty = [self._means[p].penalty for p in trial.params]
        return trial
