"""Who makes a step other than in one piece, kernel by kernel: every part of the batch by itself, or two Triton kernels.

The two kernels make as few readings of memory as there can be. Before the second pass: direction and displacement, from
the gradient and f. After it: the weights come back, ρ∇T, the update and f. Between them no direction, no old weights
and no ρ∇T are kept: what displaced the weights is computed again. The lengths, which the displacement needs first, are
one reading more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gtracer.curvature import VectorisedMicroBatch, gradient_magnitude
from gtracer.optim import processes
from gtracer.optim.evaluate import Call, Evaluator, Surroundings, evaluator_of, first_in_parts, pass_in_parts
from gtracer.optim.methods import Method, TraceRatio
from gtracer.optim.others import PooledGradients
from gtracer.optim.parts import Parts, Pool, split
from gtracer.optim.reuse import LAST, Decayed, Reuse
from gtracer.optim.rules import AdamRule, Rule, TorchRule, adam_state
from gtracer.optim.stats import NonFiniteError, Stats, Verdict
from gtracer.optim.step import COUNT, Passes, Slice, Step, scale_of
from gtracer.optim.transforms import Transform, to_norm
from gtracer.scopes import Buffers, PooledStatistics, RandomState, frozen_statistics
from gtracer.tensors import Tensors

if TYPE_CHECKING:
    from gtracer.optim.optimizer import TwoPassOptimizer
    from gtracer.optim.triton_kernels import Launched

IMPLEMENTATIONS = ("auto", "foreach", "compiled", "fused")
AT_REST = "ρ = 0: the base optimiser makes the step itself"


# Every part by itself.


def in_parts(opt: TwoPassOptimizer, call: Call, around: Surroundings) -> Step:
    """A step whose passes look at the parts of the batch one by one."""
    size = opt.method.parts
    if size is not None:
        return _of_micro_batches(opt, call, around, size)
    if call.parts is None and processes.count(opt.model) == 1:  # one part is the whole
        return opt._penalised(evaluator_of(opt.method, call, around, opt.model, opt.second_pass_due), call)
    return _of_each(opt, call, around, call.parts or [(1.0, call.batch)], own_curvature=True)


def _of_micro_batches(opt: TwoPassOptimizer, call: Call, around: Surroundings, size: int) -> Step:
    """A step with an estimator that takes the batch in parts itself."""
    assert isinstance(opt.method, TraceRatio)
    if call.parts is not None or call.each:
        raise RuntimeError(
            f"batches or penalty = 'each' with micro_batch({size}), which takes the batch in parts "
            "itself: hand the whole batch to step(closure, x, y), or leave micro_batch out"
        )
    numerator, average = opt.method.curvature.numerator, opt.method.curvature.average
    parts = split(call.batch, size)
    if numerator is gradient_magnitude:
        assert call.closure is not None
        first = partial(first_in_parts, call.closure, parts, around, call.scaler)
        again = partial(pass_in_parts, call.closure, parts, around, call.scaler)
        return opt._penalised(Evaluator(around, opt.second_pass_due, first, again, opt.is_central), call)
    own = average is not gradient_magnitude
    stacked = isinstance(numerator, VectorisedMicroBatch) and not opt.method.engine.is_exact
    if stacked and parts[-1][0] == parts[0][0]:
        from gtracer.optim.experimental import stacked_step  # rarely wanted, and torch.func takes a while to import

        return stacked_step(opt, call, around, len(parts), own)
    return _of_each(opt, call, around, parts, own_curvature=own)


def _of_each(opt: TwoPassOptimizer, call: Call, around: Surroundings, parts: Parts, *, own_curvature: bool) -> Step:
    """Both passes over each part, displaced along its own direction; the means of what they find."""
    with processes.by_itself(opt.model) if call.each else nullcontext():
        start = _start_of_each(opt, call, around, parts, own_curvature)
        pool, last = _pooled(opt, call, around, parts, start=start)
    if call.each and processes.count(opt.model) > 1:
        pool.join_processes(around.params, processes.group_of(opt.model))
        processes.as_first(opt.model)
    step = pool.step(opt._whole_groups(), own_curvature=own_curvature)
    step.rows, step.random = last.rows, last.random
    step.most, step.factor, step.held_out = last.most, last.factor, last.held_out
    return step


def _pooled(
    opt: TwoPassOptimizer,
    call: Call,
    around: Surroundings,
    parts: Parts,
    *,
    start: dict[Tensor, Tensor] | None = None,
    due: bool | None = None,
) -> tuple[Pool, Step]:
    pool, statistics, last = Pool(), PooledStatistics(opt.model), Step([])
    pooled = PooledGradients(around)
    for share, part in parts:
        here = replace(around, random=RandomState(around.devices, others=around.random.others is not None))
        alone = replace(call, batch=part, parts=None)
        with statistics.part(share), pooled.part(share):
            displaced = opt.second_pass_due if due is None else due
            evaluator = evaluator_of(opt.method, alone, here, opt.model, displaced)
            last = opt._penalised(evaluator, alone, start=start)
        pool.add(last, share)
    statistics.conclude()
    if due is False:
        pooled.forget()
    else:
        pooled.conclude(joined=call.each and processes.count(opt.model) > 1)
    return pool, last


def _start_of_each(
    opt: TwoPassOptimizer, call: Call, around: Surroundings, parts: Parts, own_curvature: bool
) -> dict[Tensor, Tensor] | None:
    """F of the whole batch for f₀, where its parts would each be asked for their own: passes of the first step."""
    joined = call.each and processes.count(opt.model) > 1
    if not opt.rule.keeps_average or (len(parts) == 1 and not joined):
        return None
    fresh = [g for g in opt.param_groups if _is_fresh(opt.rule, g["params"])]
    if not any(isinstance(opt.hyperparameters(group)["f0"], str) for group in fresh):
        return None
    begin = RandomState(around.devices, others=around.random.others is not None)
    with frozen_statistics(Buffers(opt.model)):
        pool, _ = _pooled(opt, call, around, parts, due=False)
    begin.restore()
    if joined:
        pool.join_processes(around.params, processes.group_of(opt.model))
    step = pool.step(opt._whole_groups(), own_curvature=own_curvature)
    return {p: F for part in step.slices for p, F in zip(part.params, part.measured, strict=True)}


def _is_fresh(rule: Rule, params: Tensors) -> bool:
    """Whether a group has made no step yet; one with frozen or unused parameters among others has."""
    return any(p.requires_grad for p in params) and not any(map(rule.is_trained, params))


# Two kernels.


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
        around.statistics.restore_unless(healthy)
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


class Fusion:
    """What is known of an optimiser's steps by the two kernels.

    Attributes:
        obstacle: Why the last step on a GPU was not theirs, if it was not.
        verdicts: On the last steps, on their way from the device.
    """

    def __init__(self) -> None:
        self.obstacle: str | None = None
        self.verdicts: list[Verdict] = []

    def takes(self, opt: TwoPassOptimizer, call: Call, params: Tensors) -> bool:
        """Whether a step is to be theirs, as far as is known before its gradients are there."""
        if opt.implementation not in ("auto", "fused") or call.closure is None:
            return False
        self.obstacle = why_not_fused(opt.method, opt.rule, opt.transforms, opt.reuse, call, params)
        if self.obstacle is not None and opt.implementation == "fused" and any(map(rho_of, opt.param_groups)):
            raise RuntimeError(f"implementation = 'fused' cannot make this step: {self.obstacle}. Use 'auto'")
        return self.obstacle is None

    def kernels(
        self, step: Step, method: TraceRatio, rule: Rule, transforms: tuple[Transform, ...]
    ) -> TwoKernels | None:
        """Those of a step, once its gradients are there."""
        found = TwoKernels.of(step, method, rule, transforms)
        if found is None:
            self.obstacle = "a gradient or a state does not lie in memory as the kernels read it"
        return found

    def hear(self, opt: TwoPassOptimizer, *, waits: bool = True) -> None:
        """What they have found in the last steps; only `nonfinite="raise"` tells, and waits for it if need be."""
        tells = opt.nonfinite == "raise"
        heard = [verdict for verdict in self.verdicts if (waits and tells) or verdict.is_there]
        self.verdicts = [verdict for verdict in self.verdicts if verdict not in heard]
        failed = sum(not verdict.is_healthy for verdict in heard)
        for group in opt.param_groups:
            group[COUNT] -= failed  # they were counted and not made
        if failed and tells:
            what = (opt.stats.nonfinite() if opt.stats else "") or "a gradient is not finite"
            raise NonFiniteError(
                f"in the last step {what}: the update was not made. Lower the learning rate or rho, or pass "
                "nonfinite='skip' to go on without such steps"
            )


def why_not_fused(
    method: Method,
    rule: Rule,
    transforms: tuple[Transform, ...] = (),
    reuse: Reuse | None = None,
    call: Call | None = None,
    params: Tensors = (),
) -> str | None:
    """Why the two kernels cannot make a step, in words; None where they can.

    Args:
        method, rule, transforms, reuse: The optimiser's own.
        call: What its `step` was handed.
        params: What it updates. What the kernels read besides lies as these do, but for odd gradients.
    """
    base, groups = rule.base, rule.base.param_groups
    reasons = {
        "SAM's step is torch's kernels": not isinstance(method, TraceRatio),
        f"no kernel makes {type(base).__name__}'s update": not _has_kernel(rule),
        "its curvature or engine takes other passes": isinstance(method, TraceRatio) and not method.is_plain,
        "a central difference displaces the weights twice": method.central,
        "scale_free=True": getattr(method, "scale_free", False),
        "an experimental engine makes other passes": method.needs_closure is not None,
        f"reuse={reuse!r}": not isinstance(reuse, Decayed | None),
        "only clipping by the norm of the total is in them": not all(map(_is_one_factor, transforms)),
        "maximize=True": any(group.get("maximize") for group in groups),
        "dampening": any(group.get("momentum") and group.get("dampening") for group in groups),
        "weight decay that is coupled to Adam": _couples_decay(rule),
        AT_REST: not any(rho_of(group) for group in groups),
        "a loop with perturbed() leaves its gradient for others to read": call is not None and call.closure is None,
        "batches= or penalty='each'": call is not None and (call.parts is not None or call.each),
        "a GradScaler looks at the gradient first": call is not None and call.scaler is not None,
        "Triton is not installed": not has_triton(),
        "they are for float32 weights on one GPU, contiguous and in one piece": not readable(params),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def rho_of(group: dict[str, Any]) -> float:
    """ρ of a group, whose name is another where the base optimiser has a `rho` of its own."""
    found: float = group.get("gtracer_rho", group.get("rho", 0.0))
    return found


def _has_kernel(rule: Rule) -> bool:
    if isinstance(rule, AdamRule):
        return True
    base: Any = rule.base
    hooked = base._optimizer_step_pre_hooks or base._optimizer_step_post_hooks
    return isinstance(rule, TorchRule) and type(base) is torch.optim.SGD and not hooked


def _couples_decay(rule: Rule) -> bool:
    coupled = isinstance(rule, AdamRule) and not rule.decoupled
    return coupled and any(group["weight_decay"] for group in rule.base.param_groups)


def _is_one_factor(transform: Transform) -> bool:
    """Whether all it does is to scale the total."""
    return bool(getattr(transform, "is_one_factor", False))


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def readable(*lists: Tensors) -> bool:
    """Whether the kernels can read them: whole tensors of float32, all on one GPU."""
    tensors = [t for part in lists for t in part]
    if not tensors:
        return True
    alike = {t.dtype for t in tensors} == {torch.float32} and len({t.device for t in tensors}) == 1
    return alike and tensors[0].is_cuda and all(map(Tensor.is_contiguous, tensors))


def launched(rule: Rule, part: Slice) -> Launched | None:
    """The slice for the kernels, with its state; None where that lies so that they cannot read it."""
    from gtracer.optim.triton_kernels import Launched

    group, hyper, params, state = part.group, part.hyper, part.params, rule.base.state
    numbers: dict[str, Any] = {"rho": hyper["rho"], "delta": hyper["delta"]}
    numbers |= {"lr": group["lr"], "decay": group["weight_decay"]}
    if isinstance(rule, AdamRule):
        known = [state.get(p, {}) for p in params]
        new = {}
        if not all("exp_avg_sq" in own for own in known):
            new = {p: adam_state(p, capturable=True) for p in params if not rule.is_trained(p)}
            known = [new.get(p) or state[p] for p in params]
        exp_avg, v, counts = ([it[name] for it in known] for name in ("exp_avg", "exp_avg_sq", "step"))
        if any(not count.is_cuda and params[0].is_cuda for count in counts):
            counts = [count.to(params[0].device) for count in counts]
            for p, count in zip(params, counts, strict=True):
                new.setdefault(p, {})["step"] = count
        if not readable(params, part.gradients, exp_avg, v, counts):
            return None
        numbers |= {"betas": group["betas"], "eps": group["eps"], "whole": rule.of_total}
        numbers["f0"] = None if isinstance(hyper["f0"], str) else hyper["f0"]
        return Launched(params, part.gradients, exp_avg, v, counts, state=new, **numbers)
    momentum = group["momentum"]
    known = [state.get(p, {}) for p in params]  # looked up once: a tensor is slow to hash
    f: Any = [own.get("f") for own in known]
    momenta: Any = [own.get("momentum_buffer") for own in known] if momentum else []
    fresh: dict[Tensor, dict[str, Tensor]] = {}
    if any(x is None for x in (*f, *momenta)):
        given = f, momenta
        f = rule.average(part)
        # Without one before, SGD's first momentum is the gradient alone.
        momenta = [torch.zeros_like(p) if m is None else m for m, p in zip(momenta, params, strict=False)]
        for name, before, now in zip(("f", "momentum_buffer"), given, (f, momenta), strict=True):
            for p, x, y in zip(params, before, now, strict=False):
                if x is None:
                    fresh.setdefault(p, {})[name] = y
    if not readable(params, part.gradients, f, momenta):
        return None
    numbers |= {"betas": (momentum, 1 - hyper["beta"]), "nesterov": group["nesterov"]}
    return Launched(params, part.gradients, momenta or None, f, state=fresh, **numbers)


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
        most: float | None = None,
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
    def of(cls, step: Step, method: TraceRatio, rule: Rule, transforms: tuple[Transform, ...]) -> TwoKernels | None:
        """For a step; None where its tensors lie so that the kernels cannot read them."""
        parts = [launched(rule, part) for part in step.slices]
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
        self._displace(self._radius)
        try:
            yield
        except BaseException:
            self._displace(-self._radius)
            raise

    def _displace(self, radius: float) -> None:
        for part in self.parts:
            part.displace_(self.reached, radius)

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
        """1 where all numbers are finite, else 0; on the device."""
        losses = [] if loss is None else [loss.detach().reshape(1).to(self.reached)]
        numbers = torch.cat([*losses, self.reached, self._squares()])
        self.loss = numbers if losses else None
        # torch.isfinite is five kernels. What is NaN is not below infinity either.
        self.healthy = (torch.linalg.vector_norm(numbers, math.inf) < math.inf).to(self.reached)
        return self.healthy

    def agreement(self, before: Sequence[Tensors | None], stride: int) -> Tensor | None:
        """The cosine of the gradient and that `before`, every `stride`-th number of them, whose place it takes.

        Args:
            before: For each slice of the step; None: it is left out.
            stride: Which numbers.

        Returns:
            The cosine; None where the kernels cannot read what was before.
        """
        pairs = [(part, xs) for part, xs in zip(self.parts, before, strict=True) if xs is not None]
        for part, xs in pairs:
            sizes = [-(-p.numel() // stride) for p in part.params]
            if not readable(part.params, xs) or sizes != [x.numel() for x in xs]:
                return None
        sums = _sum([part.agree_(xs, stride, self.healthy) for part, xs in pairs])
        _, now, then = sums.sqrt().unbind()
        return sums[0] / now / then

    def abandon(self) -> None:
        """Leave the weights where they were."""
        if self.ahead:
            self._displace(-self._radius)

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
