"""Small batches put together: a GPU computes a thousand examples in little more time than a hundred."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gtracer.sharpness.losses import SplitLoss

LARGE = 1024  # examples in a merged batch on a GPU
OUTPUTS = 1e-2  # to which outputs agree, of their size: bfloat16 and TF32 are coarse, statistics of a batch coarser
LOSS = 1e-4  # to which two means of the same numbers agree


@dataclass
class Merging:
    """Which batches are put together.

    Attributes:
        merge: Puts batches into one; None: never.
        most: Most examples of a merged batch.
    """

    merge: Callable[[Sequence[Any]], Any] | None
    most: float

    def batches(self, each: Iterable[tuple[Any, float]]) -> Iterator[tuple[Any, float]]:
        """Consecutive batches as one, each with the number of its examples."""
        if self.merge is None:
            yield from each
            return
        for group in self.groups(each):
            whole = self.merged(group)
            yield from group if whole is None else [(whole, sum(examples for _, examples in group))]

    def groups(self, each: Iterable[tuple[Any, float]]) -> Iterator[list[tuple[Any, float]]]:
        """Consecutive batches that hold no more than `most` examples in all, or one batch."""
        group: list[tuple[Any, float]] = []
        for batch, examples in each:
            if group and sum(n for _, n in group) + examples > self.most:
                yield group
                group = []
            group.append((batch, examples))
        if group:
            yield group

    def merged(self, group: Sequence[tuple[Any, float]]) -> Any | None:
        """A group as one batch, if it can be one."""
        return None if self.merge is None or len(group) < 2 else self.merge([batch for batch, _ in group])

    def shrink(self, largest: float) -> bool:
        """Merge half as many examples; False if batches were not merged."""
        if self.merge is None or self.most <= largest:
            return False
        self.most /= 2
        return True

    @torch.no_grad()
    def agrees(self, loss_of: SplitLoss, group: Sequence[tuple[Any, float]]) -> bool:
        """Whether the group as one batch has the outputs of its batches, and their mean loss.

        It has not, for example, where a layer normalises by the batch, or where padding counts in the loss.
        """
        whole = self.merged(group)
        if whole is None:
            return True
        parts = [loss_of.outputs_of(batch) for batch, _ in group]
        together, apart = loss_of.outputs_of(whole), torch.cat(parts)
        if together.shape != apart.shape or not _is_close(together, apart, OUTPUTS):
            return False
        examples = sum(n for _, n in group)
        mean = sum(
            loss_of.loss_on(outputs, batch) * (n / examples) for outputs, (batch, n) in zip(parts, group, strict=True)
        )
        return _is_close(loss_of.loss_on(apart, whole), torch.as_tensor(mean), LOSS)


def _is_close(x: Tensor, y: Tensor, tolerance: float) -> bool:
    x, y = (each.detach().cpu().double() for each in (x, y))
    return bool(torch.linalg.vector_norm(x - y) <= tolerance * torch.linalg.vector_norm(y))
