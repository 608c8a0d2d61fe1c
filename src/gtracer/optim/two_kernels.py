"""Adam-TRACER's arithmetic in as few readings of memory as there can be: one kernel before the second pass, one behind.

Before: direction and displacement, from the gradient and v. Behind: the weights come back, ρ∇T, Adam's update and v.
Between them no direction, no old weights and no ρ∇T are kept: what displaced the weights is computed again. The
lengths, which the displacement needs first, are one reading more. On a GPU they are launched by `launches`; elsewhere
torch.compile makes kernels of these functions, written tensor by tensor for it: of foreach's lists it would keep every
intermediate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gtracer.optim.trial import Slice
from gtracer.penalty import Passes, Runner
from gtracer.tensors import Tensors


class Numbers(NamedTuple):
    """What is compiled into the kernels: they are made anew where it changes."""

    f0: str | float
    delta: float
    beta1: float
    beta2: float
    eps: float
    decay: float  # decoupled


def _towards(g: Tensor, v: Tensor, count: Tensor, by: Numbers) -> Tensor:
    """∇L / (f + δ), with f as in `adam_average`; before the first step it is f₀."""
    start = by.beta2**count
    f0 = by.f0
    f = torch.where(count > 0, v / (1 - start), g.square()) if isinstance(f0, str) else v + f0 * start
    return g / (f + by.delta) if by.delta else torch.where(f == 0, 0.0, g / f)


def reach(g: Tensors, v: Tensors, counts: Tensors, rho: Tensor, by: Numbers) -> Tensor:
    """Sums of u², of (∇L)²/(f + δ) and of (∇L)²."""
    sums = []
    for gradient, moment, count in zip(g, v, counts, strict=True):
        x = _towards(gradient, moment, count, by)
        sums.append(torch.stack([(rho * x).square().sum(), (gradient * x).sum(), gradient.square().sum()]))
    return torch.stack(sums).sum(0)


def displace_(params: Tensors, g: Tensors, v: Tensors, counts: Tensors, step: Tensor, by: Numbers) -> None:
    """Add ∇L/(f + δ) times the step to the weights; where that is no number, nothing."""
    for p, gradient, moment, count in zip(params, g, v, counts, strict=True):
        p.add_(torch.nan_to_num(step * _towards(gradient, moment, count, by), 0.0, 0.0, 0.0))


def finish_(
    params: Tensors,
    g: Tensors,
    ahead: Tensors,
    exp_avg: Tensors,
    v: Tensors,
    counts: Tensors,
    step: Tensor,
    factor: Tensor,
    lr: float | Tensor,
    by: Numbers,
) -> Tensor:
    """Undo the displacement and make Adam's update with ∇L + ρ∇T, as in `adam_update_`.

    Gives the sums of (ρ∇T)² and of (∇L + ρ∇T)².
    """
    sums = []
    for p, gradient, there, m, moment, count in zip(params, g, ahead, exp_avg, v, counts, strict=True):
        w = p - torch.nan_to_num(step * _towards(gradient, moment, count, by), 0.0, 0.0, 0.0)
        penalty = factor * (there - gradient)
        total = gradient + penalty
        sums.append(torch.stack([penalty.square().sum(), total.square().sum()]))
        first = torch.lerp(m, total, 1 - by.beta1)
        second = by.beta2 * moment + (1 - by.beta2) * gradient.square()
        denominator = second.sqrt() / (1 - by.beta2 ** (count + 1)) ** 0.5 + by.eps
        p.copy_(w * (1 - lr * by.decay) - lr / (1 - by.beta1 ** (count + 1)) * first / denominator)
        m.copy_(first)
        moment.copy_(second)
    return torch.stack(sums).sum(0)


def adam_state(p: Tensor, *, capturable: bool) -> dict[str, Tensor]:
    """Adam's state before the first step; a `capturable` one counts on the device."""
    count = torch.zeros((), device=p.device if capturable else "cpu")
    return {"step": count, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


class Part:
    """A slice, with all that the kernels read."""

    def __init__(self, part: Slice, state: dict[Tensor, dict[str, Any]], run: Runner) -> None:
        self._run = run
        group, knobs = part.group, part.knobs
        self.params, self.g = part.params, part.gradients
        self.state = [state.get(p) or adam_state(p, capturable=True) for p in part.params]
        self.exp_avg, self.v, self.counts = (
            [known[name] for known in self.state] for name in ("exp_avg", "exp_avg_sq", "step")
        )
        self.rho = torch.tensor(part.signed_rho, dtype=part.gradients[0].dtype)
        self.lr = group["lr"]
        beta1, beta2 = group["betas"]
        self.by = Numbers(knobs["f0"], knobs["delta"], beta1, beta2, group["eps"], group["weight_decay"])

    def reach(self) -> Tensor:
        """As the function does it."""
        return self._run(reach)(self.g, self.v, self.counts, self.rho, self.by)  # type: ignore[no-any-return]

    def displace_(self, scale: Tensor) -> None:
        """By u times the scale."""
        self._run(displace_)(self.params, self.g, self.v, self.counts, scale * self.rho, self.by)

    def finish_(self, ahead: Tensors, scale: Tensor, factor: Tensor) -> Tensor:
        """As the function does it."""
        lists = (self.params, self.g, ahead, self.exp_avg, self.v, self.counts)
        return self._run(finish_)(*lists, scale * self.rho, factor, self.lr, self.by)  # type: ignore[no-any-return]

    @property
    def is_launchable(self) -> bool:
        """Whether each of the functions can be one launch for all tensors: see `launches`."""
        device, tensors = self.params[0].device, [*self.params, *self.g, *self.exp_avg, *self.v, *self.counts]
        if device.type != "cuda" or not _has_triton():
            return False
        alike = {t.dtype for t in tensors} == {torch.float32} and {t.device for t in tensors} == {device}
        return alike and all(map(Tensor.is_contiguous, tensors))


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def part_of(part: Slice, state: dict[Tensor, dict[str, Any]], run: Runner) -> Part:
    """The slice, to be launched where it can be, else `run`."""
    made = Part(part, state, run)
    if not made.is_launchable:
        return made
    from gtracer.optim.launches import Launched

    return Launched(made)


class TwoKernels:
    """A step under way, from the first gradient to the update."""

    def __init__(self, slices: list[Slice], state: dict[Tensor, dict[str, Any]], radius: float, run: Runner) -> None:
        self._parts, self._state = [part_of(part, state, run) for part in slices], state
        squared_length, self.ratio, squared_size = torch.stack([part.reach() for part in self._parts]).sum(0)
        length = squared_length.sqrt()
        self.size = squared_size.sqrt()
        self._scale = torch.where(length > 0, radius / length, 0.0)
        self._factor = 2 * length / radius
        self._ahead: Tensors = ()

    def passes(self) -> Passes:
        """The one further pass, behind which the weights stay displaced."""
        self._ahead = yield self._displaced()
        return self._ahead

    @contextmanager
    def _displaced(self) -> Iterator[None]:
        self._displace(self._scale)
        try:
            yield
        except BaseException:
            self._displace(-self._scale)
            raise

    def _displace(self, scale: Tensor) -> None:
        for part in self._parts:
            part.displace_(scale)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Make the update; gives ‖ρ∇T‖ and ‖∇L + ρ∇T‖."""
        rest, sums = list(self._ahead), []
        for part in self._parts:
            ahead, rest = rest[: len(part.params)], rest[len(part.params) :]
            sums.append(part.finish_(ahead, self._scale, self._factor))
            torch._foreach_add_(part.counts, 1)
            self._state.update(zip(part.params, part.state, strict=True))
        change, total = torch.stack(sums).sum(0).sqrt()
        return change, total
