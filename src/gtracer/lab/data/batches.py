"""How a split's examples are handed to a model; augmentation of images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from gtracer.lab.data.streams import Items, read_ahead


class Batch(Protocol):
    """From rows of a split to what the model takes. Texts have a width, which images have not."""

    def __call__(self, rows: Tensor, width: int | None = None) -> Any: ...

    def width(self, rows: Tensor) -> int | None:
        """How wide a batch of these rows is."""

    def sorted(self, rows: Tensor) -> Tensor:
        """These rows in the order that is cheapest to go through."""

    def grouped(self, rows: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """These rows, which come in random order, in batches that are cheap."""


def each(batch: Batch, parts: Sequence[tuple[Tensor, int | None]]) -> Iterator[Any]:
    """Batch after batch of these rows and widths; read ahead, where they are on no device yet."""
    if isinstance(batch, Examples) and isinstance(batch.x, Items):
        return read_ahead(batch.x, [rows for rows, _ in parts], batch.device)
    return (batch(*part) for part in parts)


class Examples:
    """Examples of one shape: any batch of them is as good as another."""

    def __init__(self, x: Tensor | Items, device: torch.device) -> None:
        self.x, self.device = x.to(device) if isinstance(x, Tensor) else x, device

    def __call__(self, rows: Tensor, width: int | None = None) -> Tensor:
        if isinstance(self.x, Tensor):
            return self.x[rows]
        return self.x.finish(self.x.gathered(rows.tolist()).to(self.device))

    def width(self, rows: Tensor) -> None:
        return None

    def sorted(self, rows: Tensor) -> Tensor:
        return rows

    def grouped(self, rows: Tensor, size: int, generator: torch.Generator) -> Tensor:
        return rows


def cropped_and_flipped(x: Tensor, generator: torch.Generator | None = None, padding: int = 4) -> Tensor:
    """Each image shifted by up to `padding` pixels and, half of them, mirrored."""
    n, _, height, width = x.shape
    padded = functional.pad(x, (padding,) * 4)
    down, right = torch.randint(0, 2 * padding + 1, (2, n, 1), generator=generator, device=x.device)
    columns = right + torch.arange(width, device=x.device)
    mirrored = torch.rand(n, 1, generator=generator, device=x.device) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    rows = down + torch.arange(height, device=x.device)
    image = torch.arange(n, device=x.device)[:, None, None]
    return padded[image, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
