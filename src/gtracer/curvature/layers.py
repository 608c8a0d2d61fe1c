"""Σ_i c_i² for one layer, where c_i is what example i contributes to the gradient of the layer's parameters.

With a the layer's input and b the gradient at its output, a weight's c_i is the outer product of b_i and a_i, summed
over positions. The fast paths never hold c_i for the whole batch; all results carry the graph of a and b.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn import functional
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
    if a.shape[1] == 1:  # (b aᵀ)² = b² (a²)ᵀ: no contribution is ever formed
        squares: Tensor = torch.mm(b[:, 0].square().T, a[:, 0].square())
        return squares
    squares = SquaredOuter.apply(a.mT, b.mT, None)  # type: ignore[no-untyped-call]
    return squares[0]


def _conv(layer: Any, a: Tensor, b: Any) -> Parts:
    a, b = a.to(layer.weight.dtype), b.to(layer.weight.dtype)
    window = Window(layer.kernel_size, layer.dilation, layer.padding, layer.stride, tuple(a.shape[2:]), layer.groups)

    def weight() -> Tensor:
        squares: Tensor = SquaredOuter.apply(a, b.flatten(2), window)  # type: ignore[no-untyped-call]
        return squares.reshape(layer.weight.shape)

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


class Window(NamedTuple):
    """How a convolution slides."""

    kernel: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    size: tuple[int, ...]  # of the image
    groups: int

    def columns(self, a: Tensor) -> Tensor:
        """Examples × channels × height × width to examples × groups × (channels · kernel) × positions."""
        wide = functional.unfold(a, self.kernel, self.dilation, self.padding, self.stride)
        return wide.reshape(len(a), self.groups, -1, wide.shape[-1])

    def image(self, columns: Tensor) -> Tensor:
        """The transpose of `columns`."""
        wide = columns.flatten(1, 2)
        return functional.fold(wide, self.size, self.kernel, self.dilation, self.padding, self.stride)


class SquaredOuter(torch.autograd.Function):
    """Σ_i (b_i a_iᵀ)², for b_i of outputs × positions and a_i of inputs × positions, a few examples at a time.

    Autograd would keep every b_i a_iᵀ, and a convolution's unfolded input; here they are made again in the
    backward pass. With G_i = b_i a_iᵀ and D the gradient of the sum: 2(D ∘ G_i) a_i to b_i, 2(D ∘ G_i)ᵀ b_i to a_i.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, window: Window | None) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.window = window
        total: Tensor | None = None
        for columns, slopes in _chunks(a, b, window):
            outer = slopes @ columns.mT
            squares = torch.linalg.vector_norm(outer, dim=0).square_()
            total = squares if total is None else total.add_(squares)
        assert total is not None
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *D: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        window: Window | None = ctx.window
        to_a, to_b = [], []
        for columns, slopes in _chunks(a, b, window):
            weighted = (slopes @ columns.mT).mul_(2 * D[0])
            to_b.append((weighted @ columns).reshape(len(slopes), *b.shape[1:]))
            back = weighted.mT @ slopes
            to_a.append(window.image(back) if window else back[:, 0])
        return torch.cat(to_a), torch.cat(to_b), None


def _chunks(a: Tensor, b: Tensor, window: Window | None) -> Any:
    """Pairs of examples × groups × features × positions, for the inputs and for the gradients."""
    groups = window.groups if window else 1
    features = a[0].numel() // a.shape[2:].numel() * (torch.Size(window.kernel).numel() if window else 1)
    each = features * b.shape[-1] + features // groups * b.shape[1]
    for a_, b_ in zip(*(torch.split(x, max(1, ROOM // each)) for x in (a, b)), strict=True):
        yield window.columns(a_) if window else a_[:, None], b_.reshape(len(b_), groups, -1, b_.shape[-1])


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
