"""Dense matrices of second derivatives, by differentiating each coordinate."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call
from torch.nn.functional import cross_entropy

Batches = list[tuple[Tensor, Tensor]]


def batches(shape: tuple[int, ...] = (5,), sizes: tuple[int, ...] = (8, 8, 3), classes: int = 3) -> Batches:
    """The last one smaller."""
    return [(torch.randn(n, *shape, dtype=torch.float64), torch.randint(classes, (n,))) for n in sizes]


def flat(tensors) -> Tensor:
    return torch.cat([x.detach().reshape(-1) for x in tensors])


def matrices(model: nn.Module, given: Batches, loss=cross_entropy) -> tuple[Tensor, Tensor]:
    """The Hessian and the Gauss-Newton matrix of the mean loss, in evaluation mode."""
    was, x, y = model.training, *(torch.cat(part) for part in zip(*given, strict=True))
    model.eval()
    names = {name: p.shape for name, p in model.named_parameters()}
    point = flat(model.parameters())

    def outputs(w: Tensor) -> Tensor:
        parts = torch.split(w, [shape.numel() for shape in names.values()])
        named = {name: part.view(shape) for (name, shape), part in zip(names.items(), parts, strict=True)}
        return functional_call(model, named, (x,))

    H = hessian(lambda w: loss(outputs(w), y), point)
    at = outputs(point).detach()
    J, inner = jacobian(outputs, point), hessian(lambda z: loss(z, y), at)
    count = at.numel()
    G = J.reshape(count, -1).T @ inner.reshape(count, count) @ J.reshape(count, -1)
    model.train(was)
    return H.detach(), G.detach()
