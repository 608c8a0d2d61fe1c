"""torch.compile for the arithmetic of a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from gtracer.optim.engines import Runner, as_it_is


def runner(compile: bool) -> Runner:
    """What runs the arithmetic: torch.compile, or nothing but Python."""
    return compiled if compile else as_it_is


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Once for all optimisers: torch.compile itself tells their tensors apart.

    Nothing here needs its loops in another order, and torch 2.11 fails where it tries that on a GPU, with tensors of
    many shapes (pytorch/pytorch#176591).
    """
    turning = "loop_ordering_after_fusion"
    options: dict[str, Any] = {turning: False} if turning in torch._inductor.list_options() else {}
    return torch.compile(function, dynamic=False, options=options)
