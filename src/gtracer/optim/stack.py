"""All micro-batches of a batch in one pass: the closure, vectorised over them, with weights for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._pytree import tree_map

from gtracer.tensors import Tensors


class _Called(nn.Module):
    """A closure as the forward pass of a module, so that its model's weights can be exchanged."""

    def __init__(self, model: nn.Module, closure: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self._closure = model, closure

    def forward(self, *batch: Any) -> Any:
        return self._closure(*batch)


class Stack:
    """Micro-batches stacked: every tensor of the batch as micro-batches × examples.

    Args:
        model: Whose weights the closure uses.
        closure: From a micro-batch to its loss, without calling backward().
        params: What to differentiate by.
        batch: Tensors, alone or in tuples, lists and mappings; anything else goes to every micro-batch.
        count: Number of micro-batches.
    """

    def __init__(
        self, model: nn.Module, closure: Callable[..., Any], params: Tensors, batch: tuple[Any, ...], count: int
    ) -> None:
        self._called, self._count = _Called(model, closure), count
        names: dict[Tensor, str] = {p: name for name, p in self._called.named_parameters()}
        if missing := [p for p in params if p not in names]:
            raise ValueError(
                f"a parameter of shape {tuple(missing[0].shape)} is not in model=, whose weights are stacked"
            )
        self._names = [names[p] for p in params]
        self._params = [p.detach() for p in params]
        plain = tuple(dict(x) if isinstance(x, Mapping) else x for x in batch)
        self._batch = tree_map(lambda x: torch.unflatten(x, 0, (count, -1)) if isinstance(x, Tensor) else x, plain)
        self._axes = tree_map(lambda x: 0 if isinstance(x, Tensor) else None, self._batch)

    def gradients(self, displacements: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Each micro-batch's loss, and its gradient at the weights or at weights of its own: a row each.

        The model's statistics have moved by the mean of the micro-batches' moves.
        """
        buffers = {name: b.expand(self._count, *b.shape).clone() for name, b in self._called.named_buffers()}

        def loss(weights: list[Tensor], buffers: dict[str, Tensor], batch: tuple[Any, ...]) -> Tensor:
            values = {**dict(zip(self._names, weights, strict=True)), **buffers}
            found: Tensor = functional_call(self._called, values, batch)
            return found

        weights = self._params if displacements is None else self.pieces(displacements + flat(self._params))
        axes = (None if displacements is None else 0, 0, self._axes)
        slopes, losses = vmap(grad_and_value(loss), axes, randomness="different")(list(weights), buffers, self._batch)
        for name, buffer in self._called.named_buffers():
            moved = buffers[name]
            if buffer.is_floating_point() or buffer.is_complex():
                buffer.add_((moved - buffer).mean(0))
            else:
                buffer.copy_(moved[0])
        return losses, torch.cat([x.reshape(self._count, -1) for x in slopes], 1)

    def pieces(self, rows: Tensor) -> Tensors:
        """A vector of all parameters, or a row of such for each micro-batch, cut into their shapes."""
        parts = torch.split(rows, [p.numel() for p in self._params], -1)
        pairs = zip(parts, self._params, strict=True)
        return [part.reshape((*rows.shape[:-1], *p.shape)).to(p.dtype) for part, p in pairs]


def flat(xs: Tensors) -> Tensor:
    """All of a list in one vector: one kernel for what would be one for each parameter."""
    return torch.cat([x.reshape(-1) for x in xs])


def mean_product(stack: Stack, slopes: Tensor, weights: Tensor, radius: float, central: bool) -> Tensor:
    """The mean over micro-batches of 2 H_k u_k, u_k = weights ∘ slope, from gradients `radius` away along each u_k."""
    directions = slopes * weights
    length = torch.linalg.vector_norm(directions, dim=1, keepdim=True)
    directions *= torch.where(length > 0, radius / length, 0.0)  # a vanished gradient has no penalty
    ahead = stack.gradients(directions)[1]
    behind = stack.gradients(-directions)[1] if central else slopes
    change: Tensor = (ahead - behind) * (length / radius if central else 2 * length / radius)
    return change.mean(0)
