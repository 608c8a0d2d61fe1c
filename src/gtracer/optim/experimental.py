"""What did not earn its place: see `gtracer.experimental`, where users find it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gtracer import checks, tensors
from gtracer.curvature import VectorisedMicroBatch, loss_gradient
from gtracer.optim.auto import look_at_held_out_data
from gtracer.optim.engines import RADIUS, direction
from gtracer.optim.evaluate import Call, Evaluator, First, one_pass, pass_in_parts
from gtracer.optim.parts import Parts, examples_of, rows_of
from gtracer.optim.reuse import State, keep
from gtracer.optim.stack import Stack, flat, mean_product
from gtracer.optim.step import Slice, Step
from gtracer.optim.transforms import Damped
from gtracer.scopes import Buffers, displaced, frozen_statistics, replayed_random
from gtracer.tensors import Tensors

if TYPE_CHECKING:
    from gtracer.optim.optimizer import TwoPassOptimizer
    from gtracer.optim.step import Surroundings

AHEAD = "ahead"  # in the state: ∇L / (f + δ) of the last step


@dataclass(frozen=True)
class PartialBatch:
    """A finite difference whose second pass sees a share of the batch: ρ∇T ≈ 2 H_share u, with the whole batch's u.

    Pass the batch to the step, `opt.step(closure, x, y)`, which cuts it.

    Attributes:
        share: Share of the batch, its first examples.
        radius, central: As for `FiniteDifference`.
    """

    share: float
    radius: float = RADIUS
    central: bool = False

    is_exact = False
    needs_closure = "an engine that cuts the batch makes its own passes"

    def __post_init__(self) -> None:
        checks.number("share", self.share, low=0, high=1, open_low=True)
        checks.number("radius", self.radius, low=0, open_low=True)
        checks.flag("central", self.central)

    def evaluator(self, call: Call, around: Surroundings, due: bool) -> Evaluator:
        """The first pass over both parts of the batch, the second over one."""
        closure, scaler = call.closure, call.scaler
        assert closure is not None
        if not due:
            one = partial(one_pass, call.loss_of_batch, around, scaler)
            return Evaluator(around, False, one, one)
        if call.parts is not None or call.each:
            raise RuntimeError(f"share = {self.share} with batches or penalty = 'each': hand over one whole batch")
        parts = cut(call.batch, self.share)

        def first() -> First:
            some: dict[Tensor, Tensor] = {}

            def note(share: float) -> None:
                if not some:  # the first part's
                    some.update({p: p.grad.clone() for p in around.params if p.grad is not None})

            returned = pass_in_parts(closure, parts, around, scaler, note)
            return First(returned, compared=some)

        again = partial(one_pass, partial(closure, *parts[0][1]), around, scaler)
        return Evaluator(around, True, first, again, self.central)


def cut(batch: tuple[Any, ...], share: float) -> Parts:
    """The first examples of a batch, about so large a share of it but one at least, and the rest, if any.

    >>> cut((torch.arange(5),), 0.4)
    [(0.4, (tensor([0, 1]),)), (0.6, (tensor([2, 3, 4]),))]
    """
    count = examples_of(batch, f"share = {share}")
    first = max(1, round(share * count))
    parts = [(first / count, slice(0, first)), (1 - first / count, slice(first, count))]
    return [(size, tuple(rows_of(x, rows) for x in batch)) for size, rows in parts if size]


@dataclass(frozen=True)
class PreviousStep:
    """One pass in all, at w + 2u with u = ρ∇L/(f + δ) of the previous step: ∇L(w + 2u) ≈ ∇L + 2Hu = ∇L + ρ∇T."""

    always = True

    def first_pass(self, slices: Iterable[Slice], state: State) -> AbstractContextManager[None]:
        known = [(part, p) for part in slices for p in part.params if AHEAD in state.get(p, {})]
        steps = [2 * part.signed_rho * state[p][AHEAD] for part, p in known]
        return displaced([p for _, p in known], steps) if known else nullcontext()

    def recall(self, step: Step, state: State, since: int) -> Tensors | None:
        return None

    def note(self, step: Step, state: State, damped: Callable[[Step, Slice], tuple[Tensors, float]]) -> None:
        for part in step.slices:
            part.gradients = tensors.clone(part.gradients)  # torch's update may write into them

        def direct(step: Step) -> None:  # with f after its update
            found = [v for part in step.slices for v in direction(part.gradients, *damped(step, part))]
            keep(state, AHEAD, step.params, dict(zip(step.params, found, strict=True)))

        step.after.append(direct)


@dataclass(frozen=True)
class Ridge:
    """The ridge of a Gaussian prior of variance η on the weights: adds ρ/η · w, which Algorithm 1 leaves out."""

    eta: float

    def __post_init__(self) -> None:
        checks.number("eta", self.eta, low=0, open_low=True)

    def __call__(self, step: Step, damped: Damped) -> None:
        total = iter(step.total)
        pulled: list[Tensor] = []
        for part in step.slices:
            own = [next(total) for _ in part.params]
            pulled += torch._foreach_add(own, part.params, alpha=part.signed_rho / self.eta)
        step.total = pulled


@dataclass(frozen=True)
class Precondition:
    """∇L + ρ∇T divided by f + δ, with f before its update, as in T."""

    preconditions = True

    def __call__(self, step: Step, damped: Damped) -> None:
        weights = [x for part in step.slices for x in tensors.inverse(*damped(part))]
        step.total = torch._foreach_mul(step.total, weights)


def stacked_step(opt: TwoPassOptimizer, call: Call, around: Surroundings, count: int, own_curvature: bool) -> Step:
    """The passes of all micro-batches at once, of a `vectorised_micro_batch`."""
    assert opt.model is not None
    assert call.closure is not None
    params = [p for p in around.params if p.requires_grad]
    if any(p.requires_grad for p in around.others):
        raise RuntimeError(
            f"{opt.method.curvature.numerator!r} differentiates by the optimiser's own parameters alone, and others in "  # type: ignore[attr-defined]
            "model= want a gradient too: use micro_batch"
        )
    stack = Stack(opt.model, call.closure, params, call.batch, count)
    with around.signals.opened():
        losses, slopes = stack.gradients()
    squares = slopes.square().mean(0)
    pairs = zip(stack.pieces(slopes.mean(0)), stack.pieces(squares), strict=True)
    at = dict(zip(params, pairs, strict=True))
    slices = []
    for group in opt.param_groups:
        used = [p for p in group["params"] if p in at]
        F = [at[p][1] for p in used] if own_curvature else None
        if used:
            slices.append(Slice(group, opt.hyperparameters(group), used, [at[p][0] for p in used], F))
    step = Step(slices, losses.mean().detach(), due=opt.second_pass_due)
    if opt.sets_rho and opt.controller is not None:
        step.most = opt.controller.limit(opt)
        step.factor = None if opt._place is None else opt.controller.factor(opt._place)
        look_at_held_out_data(opt, step, around)
    inverses = [tensors.inverse(*opt._damped(step, part)) for part in slices]
    step.trace_ratio = squares @ flat([x for part in inverses for x in part])
    if step.due:
        engine: Any = opt.method.engine  # type: ignore[attr-defined]
        rhos = [torch._foreach_mul(x, part.signed_rho) for x, part in zip(inverses, slices, strict=True)]
        weights = flat([x for part in rhos for x in part])
        with frozen_statistics(Buffers(opt.model)), replayed_random(around.random, around.devices):
            step.penalty = stack.pieces(mean_product(stack, slopes, weights, engine.radius, engine.central))
            step.renewed = True
    return step


def vectorised_micro_batch(m: int) -> VectorisedMicroBatch:
    """`micro_batch(m)`, with all micro-batches in one pass, by `torch.func.vmap` over as many copies of the weights.

    For small models on a GPU, which spend their time launching kernels. It needs `model=` and a closure that vmap
    supports. If m does not divide the batch, the micro-batches run one after the other.
    """
    checks.count("m", m)
    return VectorisedMicroBatch(m)


__all__ = [
    "PartialBatch",
    "Precondition",
    "PreviousStep",
    "Ridge",
    "VectorisedMicroBatch",
    "loss_gradient",
    "vectorised_micro_batch",
]
