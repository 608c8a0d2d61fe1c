"""Algebra on lists of tensors: a weight vector, leaf by leaf, through torch's foreach kernels.

Names ending in an underscore work in place, as in torch. Scalars stay 0-dimensional tensors on
the device, so nothing here waits for it. Tensors that are sharded over processes (DTensor) are worked on
shard by shard; a scalar is then the sum over all of them, the same on every process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, distributed

# What the foreach kernels take and give.
Tensors = list[Tensor] | tuple[Tensor, ...]

SMALL = 2**16  # numbers; of larger tensors each takes its kernel longer than the start of one


def norm(xs: Tensors) -> Tensor:
    """Euclidean norm of the whole list.

    >>> norm([torch.tensor([3.0]), torch.tensor([[4.0]])])
    tensor(5.)
    """
    if not xs:
        return torch.zeros(())
    norms = torch._foreach_norm(local(xs))
    if any(map(is_sharded, xs)):
        return _sum(xs, torch._foreach_mul(norms, norms)).sqrt()
    elsewhere = len({n.get_device() for n in norms}) > 1
    together = torch.stack([n.to(norms[0].device) for n in norms] if elsewhere else norms)
    total: Tensor = torch.linalg.vector_norm(together)
    return total


def dot(xs: Tensors, ys: Tensors) -> Tensor:
    """Inner product of two lists.

    >>> dot([torch.tensor([1.0, 2.0])], [torch.tensor([3.0, -1.0])])
    tensor(1.)
    """
    if not xs:
        return torch.zeros(())
    return _sum(xs, [torch.dot(x.reshape(-1), y.reshape(-1)) for x, y in zip(local(xs), local(ys), strict=True)])


def aligned(xs: Tensors, ys: Tensors) -> Tensor:
    """Inner product of two lists that agree in every sign, with few kernels even for many tensors.

    >>> aligned([torch.tensor([1.0, -2.0])], [torch.tensor([3.0, -1.0])])
    tensor(5.)
    """
    if not xs:
        return torch.zeros(())
    pairs = list(zip(local(xs), local(ys), strict=True))
    small = [i for i, (x, _) in enumerate(pairs) if x.numel() < SMALL]
    products = torch._foreach_mul([pairs[i][0] for i in small], [pairs[i][1] for i in small]) if small else ()
    found = dict(zip(small, torch._foreach_norm(products, 1) if small else (), strict=True))
    terms = [found[i] if i in found else torch.dot(x.reshape(-1), y.reshape(-1)) for i, (x, y) in enumerate(pairs)]
    return _sum(xs, terms)


def inverse(xs: Tensors, delta: float) -> Tensors:
    """1/(x + δ), coordinate by coordinate.

    With δ = 0 a coordinate that is 0 stays 0, as in a pseudo-inverse.

    >>> inverse([torch.tensor([0.0, 4.0])], 0.0)
    [tensor([0.0000, 0.2500])]
    """
    result = torch._foreach_add(xs, delta)
    torch._foreach_reciprocal_(result)
    if delta == 0:
        return [torch.where(x == 0, torch.zeros_like(r), r) for x, r in zip(xs, result, strict=True)]
    return list(result)


def scale_(xs: Tensors, factor: Tensor) -> None:
    """Multiply every tensor by one 0-dimensional tensor, which may be on another device."""
    xs = local(xs)
    if all(x.device == factor.device for x in xs):
        if xs:
            torch._foreach_mul_(xs, factor)
    else:
        for x in xs:
            x.mul_(factor.to(x.device))


def shorten_(xs: Tensors, length: float, *, safely: bool = False) -> Tensor:
    """Scale the whole list to this norm, unless it is zero; return the norm that it had.

    >>> e = [torch.tensor([3.0, 4.0])]
    >>> shorten_(e, 0.5), e
    (tensor(5.), [tensor([0.3000, 0.4000])])
    """
    found = norm(xs)
    # 0/0 would turn a vanished gradient into NaN; its penalty is 0.
    scale_(xs, torch.where(found > 0, length / found, 0.0))
    if safely:
        finite_(xs)
    return found


def subtract_(xs: Tensors, ys: Tensors, factor: Tensor) -> None:
    """xs ← factor · (xs − ys)."""
    torch._foreach_sub_(xs, ys)
    scale_(xs, factor)


def finite_(xs: Tensors) -> None:
    """Replace infinities and NaN by zero, in place."""
    for x in local(xs):
        x.nan_to_num_(0.0, 0.0, 0.0)


def clone(xs: Tensors) -> Tensors:
    """Copies that share nothing with the originals."""
    xs = [x.detach() for x in xs]
    made = [torch.empty_like(x) for x in xs]
    copy_(made, xs)
    return made


def copy_(targets: Tensors, sources: Tensors) -> None:
    """Overwrite the targets, bit for bit."""
    for some, others in paired(targets, sources):
        torch._foreach_copy_(some, others)


def paired(targets: Tensors, sources: Tensors) -> list[tuple[Tensors, Tensors]]:
    """Targets and sources in lists of one type and device each, which go through one kernel."""
    targets, sources = local(targets), local(sources)
    if len({(x.dtype, x.device) for x in targets}) == 1:
        return [(targets, sources)]
    alike: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        some, others = alike.setdefault((target.dtype, target.device), ([], []))
        some.append(target)
        others.append(source)
    return list(alike.values())


def wide(xs: Tensors) -> Tensors:
    """The same with bfloat16 tensors in float32, because sums in bfloat16 lose small terms.

    >>> wide([torch.ones(1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.float64)])
    [tensor([1.]), tensor([1.], dtype=torch.float64)]
    """
    return [x.float() if x.dtype == torch.bfloat16 else x for x in xs]


def displace_(xs: Tensors, ys: Tensors, seed: int = 0) -> None:
    """xs ← xs + ys; bfloat16 tensors are rounded stochastically, so that they are correct on average.

    Rounding to nearest would lose all of a small y. The random numbers are those of `seed` alone.
    """
    if all(x.dtype != torch.bfloat16 for x in xs):
        torch._foreach_add_(xs, ys)
        return
    chance = Chance(seed)
    for x, y in zip(xs, ys, strict=True):
        if x.dtype != torch.bfloat16:
            x.add_(y)
        else:
            x.copy_(chance.rounded(x.float().add_(y)))


class Chance:
    """Rounds float32 to bfloat16 stochastically: correct on average, with generators of its own."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._draws: dict[torch.device, torch.Generator] = {}

    def rounded(self, x: Tensor) -> Tensor:
        """`x` in bfloat16; overwrites `x`."""
        if x.device not in self._draws:
            self._draws[x.device] = torch.Generator(x.device).manual_seed(self._seed)
        bits = x.view(torch.int32)
        # It carries into the bits that stay as often as those that go are large.
        bits += torch.randint(2**16, bits.shape, generator=self._draws[x.device], device=x.device, dtype=torch.int32)
        bits &= -(2**16)
        return bits.view(torch.float32).bfloat16()


def leave(params: Tensors, gradients: Tensors) -> None:
    """Put gradients where optimisers look for them. Those of bfloat16 weights may be float32."""
    for p, gradient in zip(params, gradients, strict=True):
        if p.dtype != gradient.dtype:
            p.grad_dtype = None  # any
        p.grad = gradient


def forget(params: Tensors) -> None:
    """Remove their gradients."""
    for p in params:
        p.grad = None


def kept(gradients: Tensors) -> Tensors:
    """Gradients that the next pass does not overwrite: those in DistributedDataParallel's buckets are copied."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return gradients
    return [g.clone() if g._base is not None and not g.requires_grad else g for g in gradients]


def leaves(x: Tensor, besides: Tensors = ()) -> list[Tensor]:
    """The leaf tensors that `x` depends on, once each.

    >>> w = torch.ones(2, requires_grad=True)
    >>> leaves((w * w).sum())
    [tensor([1., 1.], requires_grad=True)]
    """
    known, found = set(map(id, besides)), []
    for node in nodes(x):
        leaf: Tensor | None = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            found.append(leaf)
    return found


def nodes(x: Tensor) -> Iterator[Any]:
    """The nodes of the graph of x, once each."""
    seen, ahead = set(), [x.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            ahead += [following for following, _ in node.next_functions]


def is_sharded(x: Tensor) -> bool:
    """Whether it is a DTensor. Recognised by what it can do, because importing the class takes long."""
    return hasattr(x, "to_local")


def local(xs: Tensors) -> Tensors:
    """This process's part of each tensor: the tensor itself, or its shard, which shares its memory."""
    return [x.to_local() if hasattr(x, "to_local") else x for x in xs]


def whole(x: Tensor) -> Tensor:
    """The tensor itself, or all of it if it is sharded."""
    return x.full_tensor() if is_sharded(x) else x  # type: ignore[attr-defined]


def _sum(xs: Tensors, terms: Tensors) -> Tensor:
    """Of 0-dimensional terms, one for each x; where x is sharded, over all processes that have a shard."""
    home = terms[0].device
    groups: dict[Any, list[Tensor]] = {}
    for x, term in zip(xs, terms, strict=True):
        layout = (x.device_mesh, x.placements) if is_sharded(x) else None  # type: ignore[attr-defined]
        groups.setdefault(layout, []).append(term.to(home))
    sums = [_over_shards(torch.stack(group).sum(), layout) for layout, group in groups.items()]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _over_shards(total: Tensor, layout: Any) -> Tensor:
    if layout is None:
        return total
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh, placements = layout
    parts = [Partial() if place.is_shard() else Replicate() for place in placements]
    return DTensor.from_local(total, mesh, parts).full_tensor()
