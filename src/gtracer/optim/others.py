"""Parameters that the loss reaches and another optimiser owns: a step leaves them the gradient of its first pass."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from gtracer import scopes
from gtracer.optim import processes, refusals
from gtracer.optim.step import Surroundings, put_aside
from gtracer.tensors import Tensors


class Others:
    """What is known of them from the steps before.

    Attributes:
        sought: Whether the loss may reach some that are not known.
        seen: Those that the parts of a batch or a scope have shown, where no model tells; None before that.
    """

    def __init__(self) -> None:
        self.sought = True
        self.seen: Sequence[weakref.ref[Tensor]] | None = None  # which does not keep alive what nobody uses any more

    def recall(self, own: Tensors) -> list[Tensor]:
        """Those that there are still, and that the optimiser has not been given since."""
        known = set(map(id, own))
        return [p for ref in self.seen or () if (p := ref()) is not None and id(p) not in known]

    def note(self, around: Surroundings) -> None:
        """Learn from the passes that were made."""
        if around.model is None:
            self.seen = [weakref.ref(p) for p in around.others]  # known beforehand, they keep what they had
        else:
            self.sought = len(around.others) > around.in_model  # a model may hold all that the loss reaches


@torch.no_grad()
def differentiate(loss: Tensor, others: Tensors) -> None:
    """Add the loss's gradient to theirs, where the optimiser has differentiated by its own parameters alone."""
    wanted = [p for p in others if p.requires_grad]
    if not wanted:
        return
    for p, g in zip(wanted, torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True), strict=True):
        if g is not None:
            p.grad = g if p.grad is None else p.grad + g


class PooledGradients:
    """What passes over the parts of a batch leave to other optimisers, as if it had been one pass over the batch.

    Args:
        around: Of the passes. The first part may tell of parameters that were not known before.
    """

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        around.pooled = self
        self._before = {p: p.grad for p in around.others}
        self._start: dict[Tensor, Tensor | None] = {}
        self._mean: dict[Tensor, Tensor] = {}
        self._cleared: set[Tensor] = set()  # by the closure

    @contextmanager
    def part(self, share: float) -> Iterator[None]:
        """A pass over this share of the batch."""
        self._begin(self._before)
        yield
        for p in self._around.others:
            self._before.setdefault(p, None)  # its gradient is all this pass's, as far as anybody knows
            if p.grad is not self._start.get(p):
                self._cleared.add(p)
            if p.grad is not None:
                gradient = share * p.grad
                self._mean[p] = self._mean[p] + gradient if p in self._mean else gradient  # sparse ones know no 0

    def meet(self, found: Tensors) -> None:
        """Be told of more of them, before the pass has left them anything."""
        self._before |= {p: p.grad for p in found}
        self._begin(found)

    def _begin(self, params: Iterable[Tensor]) -> None:
        for p in params:
            before = self._before[p]
            p.grad = self._start[p] = None if before is None else torch.zeros_like(before)

    def conclude(self, *, joined: bool = False) -> None:
        """Leave the mean, of all processes where each has `joined` parts of its own."""
        model, shared = self._around.model, self._around.others[: self._around.in_model]
        if joined and any(p.requires_grad for p in shared):
            rows = {p: [self._mean[p]] for p in shared if p in self._mean}
            found, _ = processes.mean(rows, shared, processes.group_of(model))
            self._mean |= {p: gradient for p, (gradient,) in found.items()}
        for p, before in self._before.items():
            mean = self._mean.get(p)
            if before is None or p in self._cleared:
                p.grad = mean
            else:
                p.grad = before if mean is None else before + mean

    def forget(self) -> None:
        """Leave what was there before."""
        for p, before in self._before.items():
            p.grad = before


@contextmanager
def seen_in_calls(around: Surroundings) -> Iterator[None]:
    """In loops that tell neither model nor loss: put aside the gradients of every module that this thread calls."""
    thread, known = threading.get_ident(), set(map(id, (*around.params, *around.others)))

    def look(module: nn.Module, args: Any) -> None:
        # torch.compile would trace the hook into the model.
        if not torch.compiler.is_compiling() and threading.get_ident() == thread:
            found: list[Tensor] = [p for p in module.parameters() if id(p) not in known]
            if (inner := scopes.passes_again.get()) is not around:
                refusals.check_apart(inner.params, found)
            known.update(map(id, found))
            around.others.extend(found)
            put_aside(around, found)

    with warnings.catch_warnings():
        # torch.compile's: the hook is called once more for the wrapper, which is where it is wanted.
        warnings.filterwarnings("ignore", "Using `torch.compile", UserWarning)
        hook = register_module_forward_pre_hook(look)
        try:
            yield
        finally:
            hook.remove()
