"""Algebra on lists of tensors: a weight vector, leaf by leaf, through torch's foreach kernels.

Names ending in an underscore work in place, as in torch. Scalars stay 0-dimensional tensors on
the device, so nothing here waits for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

# What the foreach kernels take and give.
Tensors = list[Tensor] | tuple[Tensor, ...]


def norm(xs: Tensors) -> Tensor:
    """Euclidean norm of the whole list.

    >>> norm([torch.tensor([3.0]), torch.tensor([[4.0]])])
    tensor(5.)
    """
    if not xs:
        return torch.zeros(())
    home = xs[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(home) for n in torch._foreach_norm(xs)]))
    return total


def dot(xs: Tensors, ys: Tensors) -> Tensor:
    """Inner product of two lists.

    >>> dot([torch.tensor([1.0, 2.0])], [torch.tensor([3.0, -1.0])])
    tensor(1.)
    """
    if not xs:
        return torch.zeros(())
    home = xs[0].device
    terms = [torch.dot(x.reshape(-1), y.reshape(-1)) for x, y in zip(xs, ys, strict=True)]
    return torch.stack([term.to(home) for term in terms]).sum()


def scale_(xs: Tensors, factor: Tensor) -> None:
    """Multiply every tensor by one 0-dimensional tensor, which may live on another device."""
    if all(x.device == factor.device for x in xs):
        if xs:
            torch._foreach_mul_(xs, factor)
    else:
        for x in xs:
            x.mul_(factor.to(x.device))


def clone(xs: Tensors) -> Tensors:
    """Copies that share nothing with the originals."""
    return [x.detach().clone() for x in xs]


def copy_(targets: Tensors, sources: Tensors) -> None:
    """Overwrite the targets, bit for bit."""
    if targets:
        torch._foreach_copy_(targets, sources)
