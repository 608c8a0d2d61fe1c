"""What each example contributes to the gradient of one layer's parameters, formed only where it must be.

With a the layer's input and b the gradient at its output, example i contributes c_i to a parameter's gradient: to a
weight the outer product of b_i and a_i, summed over positions. A `Layer` gives Σ_i c_i², with the graph of a and b, and
what the layer puts out when each example moves its own parameters along its own c_i.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from gtracer.curvature import products
from gtracer.curvature.products import Convolution, MovedWeights, Outer, Sequence, SquaredOuter, UnfoldedConvolution
from gtracer.curvature.recording import INSTEAD, Call


class Layer(ABC):
    """A layer with a fast path, at one call of it.

    Args:
        layer: The module.
        a: Its input.
        b: The gradient at its output.
    """

    def __init__(self, layer: Any, a: Tensor, b: Tensor) -> None:
        if not torch.is_grad_enabled():  # nobody will differentiate: let the graph go
            a, b = a.detach(), b.detach()
        self.layer, self.a, self.b = layer, a, b

    @abstractmethod
    def squares(self, name: str) -> Tensor:
        """Σ_i c_i² of a parameter."""

    @abstractmethod
    def gradient(self, name: str) -> Tensor:
        """Σ_i c_i of a parameter."""

    @abstractmethod
    def moved(self, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        """The output for x when example i has moved each named parameter by weights ∘ c_i, with the graph of x."""


class Product(Layer):
    """A layer whose weight is multiplied with the input."""

    outer: Outer
    inner: tuple[int, ...]  # axes of an example's positions

    def squares(self, name: str) -> Tensor:
        if name == "bias":
            return self.b.sum(self.inner).square().sum(0)
        if not torch.is_grad_enabled():
            return self.outer.squares()
        squares: Tensor = SquaredOuter.apply(self.a, self.b, self.outer.layer)  # type: ignore[no-untyped-call]
        return squares

    def gradient(self, name: str) -> Tensor:
        return self.b.sum((0, *self.inner)) if name == "bias" else self.outer.sum()

    def moved(self, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        W, bias = self.layer.weight, self.layer.bias
        D = weights.get("weight", torch.zeros_like(W))
        # The precision in which the layer itself would compute, so that the two passes differ by the move alone.
        mixed = torch.is_autocast_enabled(x.device.type)
        x = x.to(torch.get_autocast_dtype(x.device.type) if mixed else W.dtype)
        total: Tensor = MovedWeights.apply(x, W, D, self.outer)  # type: ignore[no-untyped-call]
        if bias is not None:
            own = weights["bias"] * self.b.sum(self.inner) if "bias" in weights else 0
            total = total + (bias + own).reshape(-1, len(bias), *[1] * len(self.inner))
        return total


class Linear(Product):
    """A linear layer, with or without axes between the examples and the features."""

    inner = (2,)

    def __init__(self, layer: Any, a: Tensor, b: Tensor) -> None:
        a, b = (_features_first(x.to(layer.weight.dtype)) for x in (a, b))
        super().__init__(layer, a, b)
        self.outer = Outer(a.detach(), b.detach(), Sequence())

    def squares(self, name: str) -> Tensor:
        if name == "weight" and self.a.shape[2] == 1:  # (b aᵀ)² = b² (a²)ᵀ: no contribution is ever formed
            squares: Tensor = torch.mm(self.b[..., 0].square().T, self.a[..., 0].square())
            return squares
        return super().squares(name)

    def moved(self, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        if self.a.shape[2] > 1:
            return super().moved(_features_first(x), weights).mT.reshape(*x.shape[:-1], -1)
        a, b = self.outer.a[..., 0], self.outer.b[..., 0]
        total: Tensor = functional.linear(x, self.layer.weight, self.layer.bias)
        if "weight" in weights:  # (D ∘ b aᵀ) x = b ∘ D (a ∘ x)
            total = total + (b * ((a * x.reshape(a.shape)) @ weights["weight"].T)).reshape(total.shape)
        if "bias" in weights:
            total = total + (weights["bias"] * b).reshape(total.shape)
        return total


class Conv2d(Product):
    """A convolution with zero padding."""

    inner = (2, 3)

    def __init__(self, layer: Any, a: Tensor, b: Tensor) -> None:
        super().__init__(layer, a.to(layer.weight.dtype), b.to(layer.weight.dtype))
        kind = UnfoldedConvolution if self._by_matrices() else Convolution
        slide = kind(layer.stride, layer.padding, layer.dilation, layer.groups, layer.kernel_size, a.shape[2:])
        self.outer = Outer(self.a.detach(), self.b.detach(), slide)

    def _by_matrices(self) -> bool:
        """Where matrices are faster than a convolution with a group for each example, as measured."""
        few_positions = self.b.shape[2:].numel() <= self.b.shape[1]
        return bool(few_positions != self.b.is_cuda)


class Embedding(Layer):
    """A look-up. A word's gradients add up over an example before they are squared."""

    def __init__(self, layer: Any, a: Tensor, b: Tensor) -> None:
        words, slopes = a.reshape(len(a), -1), b.reshape(len(a), -1, b.shape[-1]).to(layer.weight.dtype)
        if layer.padding_idx is not None:
            slopes = slopes * (words != layer.padding_idx)[..., None]
        super().__init__(layer, words, slopes)
        same = (words[:, :, None] == words[:, None, :]).to(slopes.dtype)
        # At each position the whole of its word, and how often the example has that.
        self.sums, self.count = same @ self.b, same.sum(2, keepdim=True)

    def squares(self, name: str) -> Tensor:
        return self._by_word(self.sums.square() / self.count)

    def gradient(self, name: str) -> Tensor:
        return self._by_word(self.b)

    def _by_word(self, x: Tensor) -> Tensor:
        return torch.index_add(torch.zeros_like(self.layer.weight), 0, self.a.flatten(), x.flatten(0, 1))

    def moved(self, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        own = weights["weight"][self.a] * self.sums.detach()
        plain: Tensor = functional.embedding(x, self.layer.weight, self.layer.padding_idx)
        return plain + own.reshape(-1, *plain.shape[1:])


class Norm(Layer):
    """A normalisation within each example, with a scale and an offset."""

    inner: list[int]  # axes over which an example's contributions are summed
    shape: tuple[int, ...]  # of a parameter, to be multiplied with an input

    def __init__(self, layer: Any, a: Tensor, b: Tensor) -> None:
        super().__init__(layer, a, b)
        self._contributions: dict[str, Tensor] = {}

    def normal(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def contributions(self, name: str) -> Tensor:
        if name not in self._contributions:
            each = self.b if name == "bias" else self.b * self.normal(self.a)
            self._contributions[name] = each.sum(self.inner, keepdim=True) if self.inner else each
        return self._contributions[name]

    def gradient(self, name: str) -> Tensor:
        return self.contributions(name).sum(0).reshape(getattr(self.layer, name).shape)

    def squares(self, name: str) -> Tensor:
        return self.contributions(name).square().sum(0).reshape(getattr(self.layer, name).shape)

    def moved(self, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
        params: dict[str, Tensor] = {}
        for name, p in self.layer.named_parameters():
            params[name] = p.reshape(self.shape)
            if name in weights:
                params[name] = params[name] + weights[name].reshape(self.shape) * self.contributions(name).detach()
        return self.apply(x, params.get("weight"), params.get("bias"))

    def apply(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The layer with a scale and an offset for each example."""
        total = self.normal(x) if weight is None else self.normal(x) * weight
        return total if bias is None else total + bias


class LayerNorm(Norm):
    def __init__(self, layer: Any, a: Tensor, b: Tensor) -> None:
        super().__init__(layer, a, b)
        self.inner = list(range(1, a.ndim - len(layer.normalized_shape)))
        self.shape = tuple(layer.normalized_shape)

    def normal(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.layer.normalized_shape, eps=self.layer.eps)


class GroupNorm(Norm):
    """With the examples' groups as those of one image, torch's fused kernels have a scale for every example."""

    def __init__(self, layer: Any, a: Tensor, b: Tensor) -> None:
        super().__init__(layer, a, b)
        self.inner = list(range(2, a.ndim))
        self.shape = (a.shape[1], *[1] * (a.ndim - 2))

    def normal(self, x: Tensor) -> Tensor:
        return functional.group_norm(x, self.layer.num_groups, eps=self.layer.eps)

    def contributions(self, name: str) -> Tensor:
        if torch.is_grad_enabled():  # torch's fused backward has no derivative
            return super().contributions(name)
        if not self._contributions:
            both = zip(("weight", "bias"), self._fused_contributions(), strict=True)
            self._contributions = {each: value.reshape(len(self.a), *self.shape) for each, value in both}
        return self._contributions[name]

    def _fused_contributions(self) -> tuple[Tensor, Tensor]:
        n, channels = self.a.shape[:2]
        sizes = (1, n * channels, self.a[0, 0].numel(), n * self.layer.num_groups)
        a, b = self.a.contiguous(), self.b.contiguous()
        _, mean, rstd = torch.native_group_norm(a, None, None, *sizes, self.layer.eps)
        ones = torch.ones(sizes[1], dtype=a.dtype, device=a.device)
        _, weight, bias = torch.ops.aten.native_group_norm_backward(b, a, mean, rstd, ones, *sizes, [False, True, True])
        return weight, bias

    def apply(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        own = [None if p is None else p.expand(len(x), *self.shape).reshape(-1) for p in (weight, bias)]
        groups = len(x) * self.layer.num_groups
        joined = x.reshape(1, -1, *x.shape[2:])
        return functional.group_norm(joined, groups, own[0], own[1], self.layer.eps).reshape(x.shape)


def _features_first(x: Tensor) -> Tensor:
    """Examples × features × positions."""
    return x.reshape(len(x), -1, x.shape[-1]).mT


FAST: dict[type[nn.Module], type[Layer]] = {
    nn.Linear: Linear,
    nn.Conv2d: Conv2d,
    nn.Embedding: Embedding,
    nn.LayerNorm: LayerNorm,
    nn.GroupNorm: GroupNorm,
}


def fast_path(layer: Any, name: str) -> type[Layer] | None:
    """How a layer's contributions are had fast, if they are; a subclass has it where it computes the same."""
    for kind, path in FAST.items():
        if isinstance(layer, kind) and type(layer).forward is kind.forward:
            if kind is nn.Conv2d and (layer.padding_mode != "zeros" or isinstance(layer.padding, str)):
                return None
            if kind is nn.Embedding and (layer.max_norm is not None or layer.scale_grad_by_freq):
                raise ValueError(
                    f"layer {name!r} (Embedding) has max_norm or scale_grad_by_freq, which mix the examples of a "
                    f"batch: leave them out, or {INSTEAD}"
                )
            return path
    return None


def layer_at(call: Call, cotangents: list[Tensor | None], examples: int) -> Layer | None:
    """The layer at this call, where it has a fast path; refused where its batch is not the first axis.

    Args:
        call: The layer's call.
        cotangents: The gradient at each of its outputs; None where the loss does not depend on it.
        examples: How many the batch has.
    """
    _check_batch(call, cotangents, examples)
    path = path_of(call)
    return None if path is None or cotangents[0] is None else path(call.layer, call.inputs[0], cotangents[0])


def path_of(call: Call) -> type[Layer] | None:
    """The fast path of a call: that of its layer, if it was called with its input alone."""
    return fast_path(call.layer, call.name) if len(call.inputs) == 1 and not call.keywords else None


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


# Any other layer: torch.func, example by example, a chunk at a time.


def vectorised_squares(
    call: Call, cotangents: list[Tensor | None], wanted: set[str], examples: int
) -> dict[str, Tensor]:
    """Σ_i c_i² of the wanted parameters of any layer, by its name in it."""
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
    over_batch = vmap(contribution, chunk_size=max(1, products.ROOM // each), randomness="error")
    try:
        found = over_batch([leaves[i] for i in split], list(slopes_of))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise ValueError(
            f"{_label(call)} cannot be taken example by example (in-place statistics, random numbers inside, or an "
            f"operation without a batching rule): {INSTEAD}. torch said: {str(error).strip().splitlines()[0]}"
        ) from error
    return {name: c.square().sum(0) for name, c in found.items()}
