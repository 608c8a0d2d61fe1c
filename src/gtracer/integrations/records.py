"""What a host counts once for each batch, held while a pass over that batch is made again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

MANY = 10_000  # entries: no record of a few numbers, but data or a cache
TORCH_S = set(vars(nn.Module()))  # weights, buffers and hooks, which are the optimiser's affair or nobody's


@contextmanager
def held(*owners: Any) -> Iterator[None]:
    """Leave numbers, lists, dictionaries and metrics of these objects as they were, in the same containers.

    Lists are cut to the length that they had. What else an object holds, and what is in files, is not touched.
    """
    restore = [_attributes(owner) for owner in (*owners, *metrics_in(owners))]
    try:
        yield
    finally:
        with torch.no_grad():
            for one in restore:
                one()


def metrics_in(owners: tuple[Any, ...]) -> list[Any]:
    """Metrics of torchmetrics inside of modules."""
    modules = (m for owner in owners if isinstance(owner, nn.Module) for m in owner.modules() if m is not owner)
    return [m for m in modules if _is_metric(m)]


def _is_metric(x: Any) -> bool:
    return hasattr(x, "_defaults") and callable(getattr(x, "update", None)) and callable(getattr(x, "compute", None))


def _attributes(owner: Any) -> Callable[[], Any]:
    there = vars(owner)
    kept = {name: _value(x) for name, x in there.items() if not (isinstance(owner, nn.Module) and name in TORCH_S)}

    def restore() -> Any:
        there.update({name: value() for name, value in kept.items()})
        return owner

    return restore


def _value(x: Any) -> Callable[[], Any]:
    """Gives it as it is now, later."""
    if isinstance(x, Tensor):
        return _tensor(x) if not x.requires_grad and x.is_leaf else lambda: x
    if isinstance(x, dict) and len(x) < MANY:
        return _dictionary(x)
    if isinstance(x, list):
        return _list(x)
    if isinstance(x, set | deque) and len(x) < MANY:
        return _collection(x)
    if _is_metric(x) and not isinstance(x, nn.Module):
        return _attributes(x)
    return lambda: x


def _tensor(x: Tensor) -> Callable[[], Any]:
    if x.numel() > MANY:
        return lambda: x
    saved = x.clone()
    return lambda: x.copy_(saved)


def _dictionary(x: dict[Any, Any]) -> Callable[[], Any]:
    kept = {key: _value(value) for key, value in x.items()}

    def restore() -> Any:
        now = {key: value() for key, value in kept.items()}
        if len(x) != len(now) or any(key not in x or x[key] is not value for key, value in now.items()):
            x.clear()
            x.update(now)
        return x

    return restore


def _list(x: list[Any]) -> Callable[[], Any]:
    length = len(x)

    def restore() -> Any:
        del x[length:]
        return x

    return restore


def _collection(x: Any) -> Callable[[], Any]:
    kept = list(x)

    def restore() -> Any:
        if list(x) != kept:
            x.clear()
            (x.update if isinstance(x, set) else x.extend)(kept)
        return x

    return restore
