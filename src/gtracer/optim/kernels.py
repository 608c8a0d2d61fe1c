"""A step in two Triton kernels.

They make as few readings of memory as there can be. Before the second pass: direction and displacement, from the
gradient and f. After it: the weights come back, ρ∇T, the update and f. Between them no direction, no old weights and no
ρ∇T are kept: what displaced the weights is computed again. The lengths, which the displacement needs first, are one
reading more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gtracer.optim import masters
from gtracer.optim.masters import REST
from gtracer.optim.methods import TraceRatio
from gtracer.optim.reuse import LAST, Decayed, Reuse
from gtracer.optim.rules import AdamRule, Rule, adam_state
from gtracer.optim.stats import Stats, Verdict
from gtracer.optim.step import COUNT, Passes, Slice, Step, scale_of
from gtracer.optim.transforms import Transform, to_norm
from gtracer.tensors import Tensors

if TYPE_CHECKING:
    from gtracer.optim.optimizer import TwoPassOptimizer
    from gtracer.optim.step import Surroundings
    from gtracer.optim.triton_kernels import Launched

READ = {torch.float32, torch.bfloat16}  # by the two kernels
DTYPE = attrgetter("dtype")


def look(opt: TwoPassOptimizer, step: Step, kernels: TwoKernels, around: Surroundings, *, loss: bool) -> str:
    """What is not finite, in words, if that is known; on the device it is, and nobody waits but in the first step."""
    reuse = opt.reuse if any(part.hyper["rho"] for part in step.slices) else None
    kernels.take(*source_of(step, reuse, opt.base.state, opt.param_groups[0][COUNT] % opt.interval))
    if opt.nonfinite == "ignore":
        return ""
    healthy = kernels.look(step.loss if loss else None)
    if kernels.found_early(healthy) and not healthy:
        kernels.abandon()
        step.stats = Stats.of_squares(step.loss, kernels.reached, None)
        return step.stats.nonfinite(loss=loss) or "the norm of the penalty's gradient is not finite"
    if around.statistics is not None:
        now = around.frozen or around.copies.of(around.model, "of the first pass")
        around.statistics.restore_unless(healthy, now)
    return ""


def finish(step: Step, kernels: TwoKernels, state: dict[Tensor, dict[str, Any]]) -> Verdict | None:
    """Make the update, and write the state, last; gives what the device has found, if it was asked."""
    loss = step.loss.detach().clone() if kernels.loss is None and step.loss is not None else kernels.loss
    step.stats = Stats.of_squares(loss, kernels.reached, kernels.finish())
    for p, new in kernels.new_state():
        state[p].update(new)
    for p, last in zip(step.params, kernels.kept or (), strict=kernels.kept is not None):
        state[p][LAST] = last
    return None if kernels.healthy is None else Verdict(kernels.healthy)


def readable(*lists: Tensors) -> bool:
    """Whether the kernels can read them: whole tensors of float32 or bfloat16, all on one GPU."""
    tensors = [*chain.from_iterable(lists)]
    if not tensors:
        return True
    alike = set(map(DTYPE, tensors)) <= READ and len(set(map(Tensor.get_device, tensors))) == 1
    return alike and tensors[0].is_cuda and all(map(Tensor.is_contiguous, tensors))


class Seen:
    """Weights and state that the kernels can read: to look at each of them takes longer than a small net's kernels.

    They are known as long as they are these very tensors, at these very addresses.
    """

    def __init__(self) -> None:
        self._tensors: Tensors = ()
        self._places: tuple[int, ...] = ()

    def know(self, tensors: Tensors, places: tuple[int, ...]) -> bool:
        """Whether nothing has changed since they were looked at."""
        alike = places == self._places and len(tensors) == len(self._tensors)
        return alike and all(map(is_, tensors, self._tensors))

    def note(self, tensors: Tensors, places: tuple[int, ...]) -> None:
        """They have been."""
        self._tensors, self._places = tensors, places


def launched(rule: Rule, part: Slice, seen: Seen) -> Launched | None:
    """The slice for the kernels, with its state; None where that lies so that they cannot read it."""
    from gtracer.optim.triton_kernels import Launched

    group, hyper, params, state = part.group, part.hyper, part.params, rule.base.state
    numbers: dict[str, Any] = {"rho": hyper["rho"], "delta": hyper["delta"], "seed": group[COUNT]}
    numbers |= {"lr": group["lr"], "decay": group["weight_decay"]}
    known = [state.get(p, {}) for p in params]  # looked up once: a tensor is slow to hash
    narrow = masters.is_narrow(params[0])
    low = narrow and not rule.master_weights
    new: dict[Tensor, dict[str, Tensor]] = {}
    momenta: Any
    f: Any
    if narrow and not low:
        new = {
            p: {REST: torch.zeros_like(p, dtype=torch.int16)}
            for p, own in zip(params, known, strict=True)
            if REST not in own
        }
        numbers["rest"] = [new[p][REST] if p in new else own[REST] for p, own in zip(params, known, strict=True)]
    if isinstance(rule, AdamRule):
        for p, own in zip(params, known, strict=True):
            if "exp_avg_sq" not in own:
                new.setdefault(p, {}).update(adam_state(p, capturable=True, low=low))
        known = [own | new.get(p, {}) for p, own in zip(params, known, strict=True)] if new else known
        momenta, f, counts = ([it[name] for it in known] for name in ("exp_avg", "exp_avg_sq", "step"))
        if any(not count.is_cuda and params[0].is_cuda for count in counts):
            counts = [count.to(params[0].device) for count in counts]
            for p, count in zip(params, counts, strict=True):
                new.setdefault(p, {})["step"] = count
        numbers |= {"betas": group["betas"], "eps": group["eps"], "whole": rule.of_total, "counts": counts}
        numbers["f0"] = None if isinstance(hyper["f0"], str) else hyper["f0"]
    else:
        counts, momentum = [], group["momentum"]
        f = [own.get("f") for own in known]
        momenta = [own.get("momentum_buffer") for own in known] if momentum else []
        if type(None) in set(map(type, (*f, *momenta))):
            given = f, momenta
            f = rule.average(part)
            # Without one before, SGD's first momentum is the gradient alone.
            momenta = [torch.zeros_like(p) if m is None else m for m, p in zip(momenta, params, strict=False)]
            if narrow:
                f, momenta = ([x.to(torch.bfloat16 if low else torch.float32) for x in xs] for xs in (f, momenta))
            for name, before, now in zip(("f", "momentum_buffer"), given, (f, momenta), strict=True):
                for p, x, y in zip(params, before, now, strict=False):
                    if x is None:
                        new.setdefault(p, {})[name] = y
        numbers |= {"betas": (momentum, 1 - hyper["beta"]), "nesterov": group["nesterov"]}
    state_of = torch.bfloat16 if low else torch.float32
    gradients, stay = part.gradients, [*params, *momenta, *f, *counts]
    # torch lets no gradient lie on another device.
    if set(map(DTYPE, gradients)) != {params[0].dtype} or not all(map(Tensor.is_contiguous, gradients)):
        return None
    found = Launched(params, gradients, momenta or None, f, state=new, **numbers)
    if not seen.know(stay, found.places):
        alike = len(set(map(DTYPE, params))) == 1 and set(map(DTYPE, (*momenta, *f))) == {state_of}
        if not alike or not readable(stay):
            return None
        seen.note(stay, found.places)
    return found


class TwoKernels:
    """A step under way, from the first gradient to the update.

    Args:
        parts: What is updated.
        radius: Length of the displacement.
        norm: That ∇L + ρ∇T is clipped to, if it is.
        most: What ‖ρ∇T‖/‖∇L‖ is cut off at, if it is.
        factor: What a new ρ∇T is multiplied by first, if by anything.
    """

    def __init__(
        self,
        parts: list[Launched],
        radius: float,
        norm: float | None = None,
        most: float | Tensor | None = None,
        factor: Tensor | None = None,
    ) -> None:
        self.parts, self._radius, self._norm, self._most, self._factor = parts, radius, norm, most, factor
        self.reached = _sum([part.reach() for part in parts])  # ‖u‖², T and ‖∇L‖²
        self.ahead: Tensors = ()  # gradients at the displaced weights
        self.kept: Tensors | None = None  # where ρ∇T is kept
        self.healthy: Tensor | None = None  # what a look has shown, if there was one
        self.loss: Tensor | None = None  # a copy of the loss, with other numbers after it, where a look has made one
        self._squared: Tensor | None = None

    @classmethod
    def of(
        cls, step: Step, method: TraceRatio, rule: Rule, transforms: tuple[Transform, ...], seen: dict[int, Seen]
    ) -> TwoKernels | None:
        """For a step; None where its tensors lie so that the kernels cannot read them."""
        parts = [launched(rule, part, seen[i]) for i, part in enumerate(step.slices)]
        found = [part for part in parts if part is not None]
        if not found or len(found) < len(parts):
            return None
        norms = [getattr(transform, "norm", None) for transform in transforms]
        return cls(found, method.radius, next(iter(norms), None), step.most, step.factor)

    def passes(self) -> Passes:
        """The one further pass, after which the weights stay displaced."""
        self.ahead = yield self._displaced()
        return self.ahead

    @contextmanager
    def _displaced(self) -> Iterator[None]:
        self._displace()
        try:
            yield
        except BaseException:
            self._displace(back=True)
            raise
        for part in self.parts:
            part.come_back_()

    def _displace(self, *, back: bool = False) -> None:
        for part in self.parts:
            part.displace_(self.reached, self._radius, back=back)

    @property
    def is_new(self) -> bool:
        """Whether there is no state yet."""
        return any(part.state for part in self.parts)

    def found_early(self, healthy: Tensor) -> bool:
        """Whether the verdict is to be waited for before the update: there is no state yet to be left as it was."""
        return self.is_new or not healthy.is_cuda

    def new_state(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """What of the state there was not before."""
        for part in self.parts:
            yield from part.state.items()

    def take(self, source: Tensors, again: float | None, kept: Tensors | None) -> None:
        """Be told what makes ρ∇T.

        Args:
            source: The gradients at the displaced weights; or an old ρ∇T.
            again: In that case the factor to multiply it by.
            kept: Where to keep the new one.
        """
        self.kept, start = kept, 0
        for part in self.parts:
            own = slice(start, start + len(part.params))
            part.take(source[own], again, kept[own] if kept is not None else None)
            start = own.stop

    def look(self, loss: Tensor | None) -> Tensor:
        """Whether all numbers are finite; on the device."""
        losses = [] if loss is None else [loss.detach().reshape(1).to(self.reached)]
        numbers = torch.cat([*losses, self.reached, self._squares()])
        self.loss = numbers if losses else None
        # torch.isfinite is five kernels. What is NaN is not below infinity either.
        self.healthy = torch.linalg.vector_norm(numbers, math.inf) < math.inf
        return self.healthy

    def abandon(self) -> None:
        """Leave the weights where they were."""
        if self.ahead:
            self._displace(back=True)

    def finish(self) -> Tensor:
        """Make the update, unless a look has shown that it must not be; gives ‖ρ∇T‖² and ‖∇L + ρ∇T‖²."""
        limit, shrink = self._limit(), None
        if self._norm is not None:
            penalty, total = self._squares()
            if limit is not None:  # ‖g + s h‖² = ‖g‖² + 2s ⟨g, h⟩ + s² ‖h‖²
                g = self.reached[2]
                total = (g + limit * (total - g - penalty) + limit**2 * penalty).clamp_min(0)
            shrink = to_norm(self._norm, total.sqrt())
        sums = [part.finish_(self.reached, self._radius, limit, shrink, self.healthy) for part in self.parts]
        for part in self.parts:
            part.count_(self.healthy)
        known = self._squared if limit is None else None
        return _sum([blocks.sum(0) for blocks in sums]) if known is None else known

    def _limit(self) -> Tensor | None:
        """What a ρ∇T of this step is to be multiplied by."""
        if (self._most is None and self._factor is None) or not self.ahead:
            return None
        return scale_of(self._factor, self._most, self.reached[2].sqrt(), self._squares()[0].sqrt())

    def _squares(self) -> Tensor:
        """‖ρ∇T‖² and ‖∇L + ρ∇T‖²."""
        if self._squared is None:
            self._squared = _sum([part.total(self.reached, self._radius) for part in self.parts])
        return self._squared


def source_of(
    step: Step, reuse: Reuse | None, state: dict[Tensor, dict[str, Any]], since: int
) -> tuple[Tensors, float | None, Tensors | None]:
    """What makes ρ∇T: this step's second pass, an old one's, or nothing; and where to keep it. As `TwoKernels.take`."""
    kernels, params = step.kernels, step.params
    assert kernels is not None
    if kernels.ahead:
        kept = None
        if reuse is not None:
            kept = [state[p][LAST] if LAST in state.get(p, {}) else torch.zeros_like(p) for p in params]
        return kernels.ahead, None, kept
    if isinstance(reuse, Decayed) and all(LAST in state.get(p, {}) for p in params):
        return [state[p][LAST] for p in params], reuse.decay**since, None
    return params, 0.0, None


def _sum(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(tensors).sum(0)
