"""A step whose passes look at the parts of the batch one by one: each part's both passes, and the means of them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gtracer.curvature import VectorisedMicroBatch, gradient_magnitude
from gtracer.optim import processes
from gtracer.optim.evaluate import Call, Evaluator, evaluator_of, first_in_parts, pass_in_parts, penalised
from gtracer.optim.methods import TraceRatio
from gtracer.optim.others import PooledGradients
from gtracer.optim.parts import Parts, split
from gtracer.optim.step import Slice, Step
from gtracer.scopes import Buffers, PooledStatistics, RandomState, frozen_statistics
from gtracer.tensors import Tensors

if TYPE_CHECKING:
    from gtracer.optim.optimizer import TwoPassOptimizer
    from gtracer.optim.rules import Rule
    from gtracer.optim.step import Surroundings


def in_parts(opt: TwoPassOptimizer, call: Call, around: Surroundings) -> Step:
    """A step whose passes look at the parts of the batch one by one."""
    size = opt.method.parts
    if size is not None:
        return _of_micro_batches(opt, call, around, size)
    if call.parts is None and processes.count(opt.model) == 1:  # one part is the whole
        return penalised(opt, evaluator_of(opt.method, call, around, opt.model, opt.second_pass_due), call)
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
        return penalised(opt, Evaluator(around, opt.second_pass_due, first, again, opt.is_central), call)
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
            last = penalised(opt, evaluator, alone, start=start)
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


@dataclass
class Means:
    """A parameter's means over the parts."""

    gradient: Tensor
    penalty: Tensor
    curvature: Tensor


class Pool:
    """The passes of the micro-batches, taken together: means weighted by their shares."""

    def __init__(self) -> None:
        self._means: dict[Tensor, Means] = {}
        self._loss: Tensor | None = None
        self._ratio: Tensor | None = None
        self._penalised = False

    def add(self, step: Step, share: float) -> None:
        """Take up one micro-batch's passes."""
        if step.loss is not None:
            self._loss = share * step.loss.detach() + (0 if self._loss is None else self._loss)
        if step.trace_ratio is not None:
            self._ratio = share * step.trace_ratio + (0 if self._ratio is None else self._ratio)
        self._penalised |= step.penalty is not None
        measured = [F for part in step.slices for F in part.measured]
        penalty: list[Tensor | None] = [None] * len(step.params) if step.penalty is None else [*step.penalty]
        for p, g, change, F in zip(step.params, step.gradients, penalty, measured, strict=True):
            mean = self._means.setdefault(p, Means(*(torch.zeros_like(g) for _ in range(3))))
            mean.gradient.add_(g, alpha=share)
            mean.curvature.add_(F, alpha=share)
            if change is not None:
                mean.penalty.add_(change, alpha=share)

    def join_processes(self, params: Tensors, group: Any) -> None:
        """Take the means over all processes, each of which has pooled parts of its own."""
        rows = {p: [mean.gradient, mean.penalty, mean.curvature] for p, mean in self._means.items()}
        joined, ratio = processes.mean(rows, params, group, self._ratio)
        self._means = {p: Means(*row) for p, row in joined.items()}
        self._ratio = None if self._ratio is None else ratio

    @property
    def curvature(self) -> dict[Tensor, Tensor]:
        """The mean F of every parameter."""
        return {p: mean.curvature for p, mean in self._means.items()}

    def step(self, slices: list[Slice], *, own_curvature: bool) -> Step:
        """One step for the batch, its penalty there already.

        Args:
            slices: Groups with their parameters; the gradients are filled in.
            own_curvature: Whether f is to follow the parts' mean curvature, not the batch's squared gradient.
        """
        for part in slices:
            part.params = [p for p in part.params if p in self._means]
            part.gradients = [self._means[p].gradient for p in part.params]
            part.curvature = [self._means[p].curvature for p in part.params] if own_curvature else None
        step = Step([part for part in slices if part.params], self._loss, trace_ratio=self._ratio)
        if self._penalised:
            step.penalty, step.renewed = [self._means[p].penalty for p in step.params], True
        return step
