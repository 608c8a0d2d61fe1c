"""Σ_i c_i² for one layer, where c_i is what example i contributes to the gradient of the layer's parameters.

With a the layer's input and b the gradient at its output, a weight's c_i is the outer product of b_i and a_i, summed
over positions. The fast paths never hold c_i for the whole batch; all results carry the graph of a and b.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn import functional
from torch.nn.grad import conv2d_input, conv2d_weight
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from gtracer.curvature.recording import INSTEAD, Call

Squares = dict[str, Tensor]  # by the parameter's name in its layer
ROOM = 2**24  # numbers that a chunk of examples may take


def squared_contributions(call: Call, cotangents: list[Tensor | None], wanted: set[str], examples: int) -> Squares:
    """Σ_i c_i² of the wanted parameters of a layer.

    Args:
        call: The layer's call.
        cotangents: The gradient at each of its outputs; None where the loss does not depend on it.
        wanted: Names of parameters, within the layer.
        examples: How many the batch has.
    """
    _check_batch(call, cotangents, examples)
    fast = _fast_path(call)
    if fast is None:
        return _vectorised(call, cotangents, wanted, examples)
    parts = fast(call.layer, call.inputs[0], cotangents[0])
    return {name: parts[name]() for name in wanted}


def _check_batch(call: Call, cotangents: list[Tensor | None], examples: int) -> None:
    for x in [*tree_leaves(call.inputs), *cotangents]:
        if isinstance(x, Tensor):
            if x.ndim == 0 or len(x) != examples:
                raise ValueError(
                    f"{_label(call)} was given a tensor of shape {tuple(x.shape)} where the batch has {examples} "
                    f"examples: gradients per example need the batch as first axis (batch_first=True). Or {INSTEAD}"
                )
            return  # others may be weights, masks or states


def _label(call: Call) -> str:
    return f"layer {call.name!r} ({type(call.layer).__name__})"


# The fast paths: from a layer, its input and the gradient at its output to Σ_i c_i², parameter by parameter.

Parts = dict[str, Callable[[], Tensor]]


def _linear(layer: Any, a: Tensor, b: Any) -> Parts:
    a, b = (_positions(x.to(layer.weight.dtype)) for x in (a, b))
    return {"weight": lambda: _linear_weight(a, b), "bias": lambda: _summed(b, 1)}


def _linear_weight(a: Tensor, b: Tensor) -> Tensor:
    squares: Tensor
    if a.shape[1] == 1:  # (b aᵀ)² = b² (a²)ᵀ: no contribution is ever formed
        squares = torch.mm(b[:, 0].square().T, a[:, 0].square())
    else:
        squares = SquaredOuter.apply(a.mT, b.mT, Sequence())  # type: ignore[no-untyped-call]
    return squares


def _conv(layer: Any, a: Tensor, b: Any) -> Parts:
    a, b = a.to(layer.weight.dtype), b.to(layer.weight.dtype)
    positions = b.shape[2:].numel()
    kind = Convolution if positions > layer.out_channels else UnfoldedConvolution
    slide = kind(layer.stride, layer.padding, layer.dilation, layer.groups, layer.kernel_size, tuple(a.shape[2:]))

    def weight() -> Tensor:
        squares: Tensor = SquaredOuter.apply(a, b, slide)  # type: ignore[no-untyped-call]
        return squares

    return {"weight": weight, "bias": lambda: _summed(b, 2, 3)}


def _embedding(layer: Any, index: Tensor, b: Any) -> Parts:
    def weight() -> Tensor:
        rows, size = layer.num_embeddings, layer.embedding_dim
        words, slopes = index.reshape(len(index), -1), b.reshape(-1, size).to(layer.weight.dtype)
        example = torch.arange(len(words), device=words.device)[:, None]
        # One sum for each word of each example, since a word's gradients add up before they are squared.
        pairs, place = torch.unique((example * rows + words).flatten(), return_inverse=True)
        sums = slopes.new_zeros(len(pairs), size).index_add(0, place, slopes)
        word = pairs % rows
        squares = sums.square()
        if layer.padding_idx is not None:
            squares = squares * (word != layer.padding_idx)[:, None]
        return torch.index_add(squares.new_zeros(rows, size), 0, word, squares)

    return {"weight": weight}


def _layer_norm(layer: Any, a: Tensor, b: Any) -> Parts:
    normal = functional.layer_norm(a, layer.normalized_shape, eps=layer.eps)
    inner = range(1, a.ndim - len(layer.normalized_shape))
    return {"weight": lambda: _summed(b * normal, *inner), "bias": lambda: _summed(b, *inner)}


def _group_norm(layer: Any, a: Tensor, b: Any) -> Parts:
    normal = functional.group_norm(a, layer.num_groups, eps=layer.eps)
    inner = range(2, a.ndim)
    return {"weight": lambda: _summed(b * normal, *inner), "bias": lambda: _summed(b, *inner)}


def _positions(x: Tensor) -> Tensor:
    """Examples × positions × features."""
    return x.reshape(len(x), -1, x.shape[-1])


def _summed(contributions: Tensor, *axes: int) -> Tensor:
    """Summed over an example's positions, squared, summed over the examples."""
    whole = contributions.sum(list(axes)) if axes else contributions
    return whole.square().sum(0)


FAST: dict[type[nn.Module], Callable[[Any, Tensor, Any], Parts]] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv,
    nn.Embedding: _embedding,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
}


def _fast_path(call: Call) -> Callable[[Any, Tensor, Any], Parts] | None:
    """A subclass has one where it computes the same."""
    layer: Any = call.layer
    if len(call.inputs) != 1 or call.keywords:
        return None
    for kind, path in FAST.items():
        if isinstance(layer, kind) and type(layer).forward is kind.forward:
            if kind is nn.Conv2d and (layer.padding_mode != "zeros" or isinstance(layer.padding, str)):
                return None
            if kind is nn.Embedding and (layer.max_norm is not None or layer.scale_grad_by_freq):
                raise ValueError(
                    f"{_label(call)} has max_norm or scale_grad_by_freq, which mix the examples of a batch: leave them "
                    f"out, or {INSTEAD}"
                )
            return path
    return None


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
        columns = functional.unfold(a, self.kernel, self.dilation, self.padding, self.stride)
        return columns.reshape(len(a), self.groups, -1, columns.shape[-1])

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


def _chunks(a: Tensor, b: Tensor, layer: Sequence | Convolution) -> Iterator[tuple[Tensor, Tensor]]:
    size = max(1, ROOM // layer.numbers(a, b))
    yield from zip(torch.split(a, size), torch.split(b, size), strict=True)


# Any other layer: torch.func, example by example, a chunk at a time.


def _vectorised(call: Call, cotangents: list[Tensor | None], wanted: set[str], examples: int) -> Squares:
    params = {name: p for name, p in call.layer.named_parameters() if name in wanted}
    leaves, tree = tree_flatten((call.inputs, call.keywords))
    split = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.ndim and len(x) == examples]
    used, slopes_of = zip(*((i, b) for i, b in enumerate(cotangents) if b is not None), strict=True)

    def contribution(rows: list[Tensor], slopes: list[Tensor]) -> dict[str, Tensor]:
        mine = list(leaves)
        for i, row in zip(split, rows, strict=True):
            mine[i] = row[None]
        inputs, keywords = tree_unflatten(mine, tree)

        def outputs(weights: dict[str, Tensor]) -> list[Tensor]:
            found = tree_leaves(functional_call(call.layer, weights, inputs, keywords))
            return [found[call.places[i]] for i in used]

        result: dict[str, Tensor] = vjp(outputs, params)[1]([b[None] for b in slopes])[0]
        return result

    each = sum(p.numel() for p in params.values())
    over_batch = vmap(contribution, chunk_size=max(1, ROOM // each), randomness="error")
    try:
        found = over_batch([leaves[i] for i in split], list(slopes_of))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise ValueError(
            f"{_label(call)} cannot be taken example by example (in-place statistics, random numbers inside, or an "
            f"operation without a batching rule): {INSTEAD}. torch said: {str(error).strip().splitlines()[0]}"
        ) from error
    return {name: c.square().sum(0) for name, c in found.items()}
