"""Weights for each example: a layer's gradients example by example, and a layer with weights of its own for each.

For a layer along a sequence and for a convolution, a few examples at a time, so that never are all examples' weights
held where they are many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_input, conv2d_weight

ROOM = 2**24  # numbers that a chunk of examples may take


class Sequence:
    """A linear layer along a sequence: inputs are features × positions."""

    def numbers(self, a: Tensor, b: Tensor) -> int:
        """How many an example takes."""
        return a.shape[1] * b.shape[1]

    def outer(self, a: Tensor, b: Tensor) -> Tensor:
        """Each example's gradient of the weight, b aᵀ."""
        return b @ a.mT

    def forward(self, a: Tensor, weights: Tensor) -> Tensor:
        """Each example through weights of its own."""
        return weights @ a

    def backward(self, b: Tensor, weights: Tensor) -> Tensor:
        """The transpose of `forward`."""
        return weights.mT @ b

    def gradient(self, a: Tensor, b: Tensor) -> Tensor:
        """The examples' gradients of a shared weight, summed."""
        return torch.einsum("njp,nkp->jk", b, a)


@dataclass(frozen=True)
class Convolution:
    """The same for a convolution: one with a group for each example."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    kernel: tuple[int, ...]
    image: tuple[int, ...]

    def numbers(self, a: Tensor, b: Tensor) -> int:
        return a.shape[1] // self.groups * b.shape[1] * torch.Size(self.kernel).numel()

    def outer(self, a: Tensor, b: Tensor) -> Tensor:
        shape = (len(b) * b.shape[1], a.shape[1] // self.groups, *self.kernel)
        found = conv2d_weight(_joined(a), shape, _joined(b), *self._slide(len(a)))  # type: ignore[no-untyped-call]
        return torch.reshape(found, (*b.shape[:2], *shape[1:]))

    def forward(self, a: Tensor, weights: Tensor) -> Tensor:
        found = functional.conv2d(_joined(a), weights.flatten(0, 1), None, *self._slide(len(a)))
        return found.reshape(*weights.shape[:2], *found.shape[2:])

    def backward(self, b: Tensor, weights: Tensor) -> Tensor:
        channels = weights.shape[2] * self.groups
        shape = (1, len(b) * channels, *self.image)
        slide = self._slide(len(b))
        found = conv2d_input(shape, weights.flatten(0, 1), _joined(b), *slide)  # type: ignore[no-untyped-call]
        return torch.reshape(found, (len(b), channels, *self.image))

    def gradient(self, a: Tensor, b: Tensor) -> Tensor:
        shape = (b.shape[1], a.shape[1] // self.groups, *self.kernel)
        found: Tensor = conv2d_weight(a, shape, b, *self._slide(1))  # type: ignore[no-untyped-call]
        return found

    def _slide(self, examples: int) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, examples * self.groups


@dataclass(frozen=True)
class UnfoldedConvolution(Convolution):
    """The same through matrices: faster where the channels are many and the positions few."""

    def numbers(self, a: Tensor, b: Tensor) -> int:
        positions = b.shape[2:].numel()
        return a.shape[1] * torch.Size(self.kernel).numel() * (positions + b.shape[1] // self.groups)

    def outer(self, a: Tensor, b: Tensor) -> Tensor:
        found = self._grouped(b) @ self._columns(a).mT
        return found.reshape(*b.shape[:2], a.shape[1] // self.groups, *self.kernel)

    def forward(self, a: Tensor, weights: Tensor) -> Tensor:
        found = self._grouped(weights) @ self._columns(a)
        sizes = [
            (size + 2 * p - d * (k - 1) - 1) // s + 1
            for size, p, d, k, s in zip(self.image, self.padding, self.dilation, self.kernel, self.stride, strict=True)
        ]
        return found.reshape(*weights.shape[:2], *sizes)

    def backward(self, b: Tensor, weights: Tensor) -> Tensor:
        columns = (self._grouped(weights).mT @ self._grouped(b)).flatten(1, 2)
        return functional.fold(columns, self.image, self.kernel, self.dilation, self.padding, self.stride)

    def _columns(self, a: Tensor) -> Tensor:
        """Examples × groups × (channels · kernel) × positions."""
        (rows, columns), (down, right) = self.padding, self.stride
        windows = functional.pad(a, (columns, columns, rows, rows))
        # Views and one copy are three times as fast as functional.unfold.
        for axis, step in ((2, down), (3, right)):
            k, d = self.kernel[axis - 2], self.dilation[axis - 2]
            windows = windows.unfold(axis, d * (k - 1) + 1, step)[..., ::d]
        return windows.permute(0, 1, 4, 5, 2, 3).reshape(len(a), self.groups, -1, windows.shape[2:4].numel())

    def _grouped(self, x: Tensor) -> Tensor:
        """Examples × groups × outputs × the rest."""
        return x.reshape(len(x), self.groups, x.shape[1] // self.groups, -1)


def _joined(x: Tensor) -> Tensor:
    """Examples as channels of one image."""
    return x.reshape(1, -1, *x.shape[2:])


class SquaredOuter(torch.autograd.Function):
    """Σ_i G_i², with G_i = b_i a_iᵀ the gradient of example i, a few examples at a time.

    Autograd would keep every G_i; here they are made again in the backward pass. With D the gradient of the sum,
    b_i gets what a layer with the weights 2 D ∘ G_i makes of a_i, and a_i what it sends back of b_i.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, layer: Sequence | Convolution) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.layer = layer
        total: Tensor | None = None
        for a_, b_ in _chunks(a, b, layer):
            squares = layer.outer(a_, b_).square_().sum(0)
            total = squares if total is None else total.add_(squares)
        assert total is not None
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *D: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        layer: Sequence | Convolution = ctx.layer
        to_a, to_b = [], []
        for a_, b_ in _chunks(a, b, layer):
            weights = layer.outer(a_, b_).mul_(2 * D[0])
            to_b.append(layer.forward(a_, weights))
            to_a.append(layer.backward(b_, weights))
        return torch.cat(to_a), torch.cat(to_b), None


class MovedWeights(torch.autograd.Function):
    """What a layer makes of x when example i has the weights W + D ∘ G_i; differentiated by x and W alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, D: Tensor, outer: Outer) -> Tensor:
        ctx.outer = outer
        weights = outer.moved(W, D, x.dtype)
        ctx.save_for_backward(x, W, D, weights)
        if weights is not None:
            return outer.layer.forward(x, weights)
        parts = outer.beside(x)
        return torch.cat([outer.layer.forward(part, torch.addcmul(W, G, D).to(x.dtype)) for part, G in parts])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, W, D, weights = ctx.saved_tensors
        outer: Outer = ctx.outer
        slope, back, shared = slopes[0].to(x.dtype), None, None
        if ctx.needs_input_grad[0] and weights is not None:
            back = outer.layer.backward(slope, weights)
        elif ctx.needs_input_grad[0]:
            parts = outer.beside(slope)
            back = torch.cat([outer.layer.backward(part, torch.addcmul(W, G, D).to(x.dtype)) for part, G in parts])
        if ctx.needs_input_grad[1]:
            shared = outer.layer.gradient(x, slope).to(W.dtype)
        return back, shared, None, None


class Outer:
    """G_i = b_i a_iᵀ of every example: kept, where there is room, else made again a few at a time."""

    def __init__(self, a: Tensor, b: Tensor, layer: Sequence | Convolution) -> None:
        self.a, self.b, self.layer = a, b, layer
        self._kept: Tensor | None = None

    def beside(self, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The examples of x, a few at a time, each with its G_i."""
        if self._kept is None and len(self.a) * self.layer.numbers(self.a, self.b) <= ROOM:
            self._kept = self.layer.outer(self.a, self.b)
        if self._kept is not None:
            yield x, self._kept
            return
        sizes = [len(a) for a, _ in _chunks(self.a, self.b, self.layer)]
        for part, (a, b) in zip(torch.split(x, sizes), _chunks(self.a, self.b, self.layer), strict=True):
            yield part, self.layer.outer(a, b)

    def moved(self, W: Tensor, D: Tensor, dtype: torch.dtype) -> Tensor | None:
        """W + D ∘ G_i for every example, where they are kept."""
        return None if self._kept is None else torch.addcmul(W, self._kept, D).to(dtype)

    def sum(self) -> Tensor:
        """Σ_i G_i, without a graph."""
        found = [G.sum(0) for _, G in self.beside(self.a)]
        return found[0] if len(found) == 1 else torch.stack(found).sum(0)

    def squares(self) -> Tensor:
        """Σ_i G_i², without a graph."""
        total: Tensor | None = None
        for _, G in self.beside(self.a):
            squares = torch.linalg.vecdot(G, G, dim=0)
            total = squares if total is None else total.add_(squares)
        assert total is not None
        return total


def _chunks(a: Tensor, b: Tensor, layer: Sequence | Convolution) -> Iterator[tuple[Tensor, Tensor]]:
    size = max(1, ROOM // layer.numbers(a, b))
    yield from zip(torch.split(a, size), torch.split(b, size), strict=True)
