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
    """Micro-batches side by side: every tensor of the batch as micro-batches × examples.

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

    def gradients(self, displacements: Tensors | None = None) -> tuple[Tensor, Tensors]:
        """Each micro-batch's loss, and its gradient at the weights or at weights of its own; stacked.

        The model's statistics have moved by the mean of the micro-batches' moves.
        """
        weights = self._params if displacements is None else torch._foreach_add(displacements, self._params)
        buffers = {name: torch.stack([b] * self._count) for name, b in self._called.named_buffers()}

        def loss(weights: list[Tensor], buffers: dict[str, Tensor], batch: tuple[Any, ...]) -> Tensor:
            found: Tensor = functional_call(
                self._called, {**dict(zip(self._names, weights, strict=True)), **buffers}, batch
            )
            return found

        axes = (None if displacements is None else 0, 0, self._axes)
        over_parts = vmap(grad_and_value(loss), axes, randomness="different")
        slopes, losses = over_parts(list(weights), buffers, self._batch)
        for name, buffer in self._called.named_buffers():
            moved = buffers[name]
            if buffer.is_floating_point() or buffer.is_complex():
                buffer.add_((moved - buffer).mean(0))
            else:
                buffer.copy_(moved[0])
        return losses, slopes


def differences(stack: Stack, slopes: Tensors, directions: Tensors, radius: float, central: bool) -> Tensors:
    """The mean over micro-batches of 2 H_k u_k, each from gradients `radius` away along its own u_k."""
    size = torch.stack([torch.linalg.vector_norm(u.flatten(1), dim=1) for u in directions])
    length = torch.linalg.vector_norm(size, dim=0)
    scale = torch.where(length > 0, radius / length, 0.0)  # a vanished gradient has no penalty
    displacements = [u * _along(scale, u) for u in directions]
    ahead = stack.gradients(displacements)[1]
    behind = stack.gradients(torch._foreach_neg(displacements))[1] if central else slopes
    factor = length / radius if central else 2 * length / radius
    return [((a - b) * _along(factor, a)).mean(0) for a, b in zip(ahead, behind, strict=True)]


def _along(factors: Tensor, like: Tensor) -> Tensor:
    """A factor for each micro-batch, to be multiplied with a stack."""
    return factors.reshape(-1, *[1] * (like.ndim - 1))
