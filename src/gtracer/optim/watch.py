"""What a caller's code does with gradients between the passes, where it would make T, f and the penalty wrong."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from gtracer import tensors
from gtracer.optim import processes
from gtracer.optim.stats import Verdict
from gtracer.scopes import is_capturing
from gtracer.tensors import Tensors

CLIPPED = (
    "the gradient of each pass was clipped by itself, before the optimiser saw it: T, f and the penalty would be those "
    "of clipped gradients. Let the optimiser clip their total, clip=gtracer.Clip(norm=…), and leave it out of the "
    "closure (clip_grad_norm_, Lightning's gradient_clip_val, skorch's GradientNormClipping)"
)
FEWER = (
    "the pass inside perturbed() called backward() {again} times, the first pass {first} times: where these are micro-"
    "batches, all of them have to run again, or the penalty is that of the last ones alone"
)
WATCHED = 4  # parameters, the smallest: clipping shows in any of them


class Clipping:
    """Whether the caller clips the gradients of each pass: that is seen in the first steps that have two of them.

    Args:
        asked: Whether it matters to the method.

    Attributes:
        asked: Whether it is still to be seen.
    """

    def __init__(self, asked: bool) -> None:
        self.asked = asked
        self._unclipped: Verdict | None = None  # of the last step, where the caller writes into gradients

    def watch(self, params: Tensors, model: Any) -> Watch | None:
        """Look at what the caller's code does from here on, where that can tell."""
        # Of several processes each writes the mean into what backward() has left.
        if is_capturing() or processes.count(model) > 1:
            return None
        self._hear()
        return Watch(params)

    def heed(self, watch: Watch) -> None:
        """Refuse gradients that were clipped pass by pass; where nobody writes into them, look no further."""
        watch.remove()
        watch.compare_counts()
        if watch.has_compared and watch.has_written:
            waits, self._unclipped = self._unclipped is None, watch.verdict()
            if waits:
                self._hear()
        else:
            self.asked = False

    def _hear(self) -> None:
        """What was found in the last step; only in the first somebody waits for it."""
        if self._unclipped is not None and not self._unclipped.is_healthy:
            self._unclipped = None
            raise RuntimeError(CLIPPED)


class Watch:
    """Sees what is written into gradients after `backward()`, in the first pass and in the second.

    What is linear is none of its business: a mean over processes or micro-batches, a mask, a constant scale. Clipping
    multiplies either pass by another number, or cuts single values off.

    Args:
        params: The optimiser's; a few small ones are watched.
    """

    def __init__(self, params: Tensors) -> None:
        known = [p for p in params if p.requires_grad and p.numel() > 1 and not tensors.is_sharded(p)]
        self._params = sorted(known, key=Tensor.numel)[:WATCHED]
        self._found: dict[int, tuple[Tensor, int, Tensor]] = {}  # after backward()
        self._passes: list[dict[int, tuple[Tensor, Tensor]]] = []  # gradients as backward() and the caller left them
        self.has_written = False  # anybody
        self._backwards: dict[int, int] = {}  # that have reached a parameter in the pass under way
        self._counts: list[dict[int, int]] = []  # in each pass
        self._hooks = [p.register_post_accumulate_grad_hook(self._note) for p in self._params]  # type: ignore[no-untyped-call]

    def _note(self, p: Tensor) -> None:
        self._backwards[id(p)] = self._backwards.get(id(p), 0) + 1
        if p.grad is not None:
            self._found[id(p)] = p.grad, p.grad._version, p.grad.detach().clone()

    def look(self) -> None:
        """At the end of a pass."""
        seen = {}
        for p in self._params:
            if id(p) in self._found and p.grad is not None:
                left, version, gradient = self._found.pop(id(p))
                self.has_written |= p.grad is not left or p.grad._version != version
                seen[id(p)] = gradient, p.grad.detach().clone()
        self._passes.append(seen)
        self._counts.append(self._backwards)
        self._backwards = {}

    def remove(self) -> None:
        """Look no further."""
        for hook in self._hooks:
            hook.remove()

    def compare_counts(self) -> None:
        """Warn of a second pass over fewer micro-batches: all parameters have been reached less often."""
        if len(self._counts) > 1:
            first, again = self._counts[0], self._counts[1]
            pairs = [(first[i], again[i]) for i in first.keys() & again.keys()]
            if pairs and all(n > m > 0 for n, m in pairs):
                warnings.warn(FEWER.format(first=pairs[0][0], again=pairs[0][1]), stacklevel=5)

    @property
    def has_compared(self) -> bool:
        """Whether it has seen two passes through a caller's hands."""
        return sum(map(bool, self._passes)) > 1

    def verdict(self) -> Verdict | None:
        """Whether nobody has clipped, on its way from the device; None where nothing can tell."""
        clipped = []
        for p in self._params:
            pairs = [seen[id(p)] for seen in self._passes if id(p) in seen]
            if len(pairs) > 1:
                found = [_scaled(*pair) for pair in pairs]
                factors = torch.stack([factor for factor, _, _ in found])
                alike = torch.stack([scaled for _, scaled, _ in found]).all()
                differ = factors.max() - factors.min() > 1e-5 * factors.max()
                by_norm = alike & differ & (factors.min() < 1 - 1e-5) & (factors.max() <= 1 + 1e-5)
                clipped.append(by_norm | torch.stack([cut for _, _, cut in found]).any())
        return Verdict((~torch.stack(clipped).any()).float()) if clipped else None


def _scaled(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The factor between two gradients; whether there is one; and whether values were cut off instead."""
    factor = (before * after).sum() / before.square().sum()
    scaled = (after - factor * before).norm() <= 1e-4 * after.norm()
    most = after.abs().max()
    cut = ~scaled & (after == before.clamp(-most, most)).all() & (most < before.abs().max())
    return factor, scaled, cut


class Probe:
    """Whether a closure goes on adding to gradients that a step is about to forget: those of the caller's own passes.

    Args:
        p: A parameter with a gradient.
    """

    def __init__(self, p: Tensor) -> None:
        self._p, self._old = p, p.grad
        self._mark = torch.zeros_like(p)

    @classmethod
    def of(cls, params: Tensors) -> Probe | None:
        """In one of those that have a gradient, if any."""
        found = next((p for p in params if p.grad is not None and not tensors.is_sharded(p)), None)
        return None if found is None or is_capturing() else cls(found)

    def lay(self) -> None:
        """Before the first pass."""
        self._p.grad, self._version = self._mark, self._mark._version

    def check(self) -> None:
        """After it: refuse what would drop the gradients of the passes before."""
        if self._p.grad is not self._mark:
            return  # the closure clears them itself
        if self._mark._version == self._version:
            self._p.grad = None  # it has made no backward pass
        elif self._old is not None and bool((self._old != 0).any()):
            raise RuntimeError(
                "step(closure) after backward(), with a closure that adds to the gradients: the passes before would be "
                "dropped, and the step be that of the last micro-batch. Hand them over together, step(closure, "
                "batches=[…]) (Lightning with accumulate_grad_batches: manual_step), or let the closure call "
                "zero_grad()"
            )


def is_scaler_s_step() -> bool:
    """Whether a GradScaler has called the step: it has divided the gradients by its scale."""
    frame = sys._getframe(1)
    for _ in range(13):  # torch, schedulers and hosts wrap step()
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code is GradScaler._maybe_opt_step.__code__:
            return True
    return False
