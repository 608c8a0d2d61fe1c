"""Loops of the caller's own, which make the passes themselves: `perturbed()`, then `step()` alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gtracer import tensors
from gtracer.optim import refusals
from gtracer.optim.auto import look_at_held_out_data
from gtracer.optim.evaluate import First, begun
from gtracer.optim.methods import TraceRatio
from gtracer.optim.others import seen_in_calls
from gtracer.optim.scaler import scale, unscale
from gtracer.optim.step import (
    Course,
    Step,
    Surroundings,
    all_or_nothing,
    displaced_pass,
    drive,
    gradients_ahead,
    surroundings_of,
)
from gtracer.optim.watch import Watch, is_scaler_s_step
from gtracer.scopes import RandomState, Signals, passes_again, uninterrupted
from gtracer.tensors import Tensors

if TYPE_CHECKING:
    from gtracer.optim.optimizer import TwoPassOptimizer


class Loop:
    """What a call of the caller's leaves for the next one: `zero_grad`, `perturbed`, `step`.

    Attributes:
        mark: Where the random numbers of a step without closure begin.
        pending: The step whose passes are being made by the caller.
        busy: Whether the optimiser is making passes, so that a closure which calls it is told apart from others.
        watch: Of gradients in the caller's hands, in the first steps.
        loss: Of the first pass, where the caller has told it.
    """

    def __init__(self, mark: RandomState) -> None:
        self.mark = mark
        self.pending: Pending | None = None
        self.busy = False
        self.watch: Watch | None = None
        self.loss: Tensor | None = None

    def take(self) -> Pending | None:
        """The step under way, which is then nobody's."""
        pending, self.pending = self.pending, None
        return pending

    def drop_abandoned(self) -> None:
        """Forget a step that a scaler has skipped."""
        if self.pending is not None and self.pending.is_abandoned:
            self.pending = None

    def take_watch(self) -> Watch | None:
        """The watch, which then looks no further."""
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.remove()
        return watch


class Pending:
    """A step between its first pass and `step()`."""

    def __init__(self, step: Step, course: Course, *, is_scaled: bool, joint: Step | None = None) -> None:
        self.step, self.course, self.is_scaled = step, course, is_scaled
        self.joint = joint  # where several optimisers share the passes
        self.leave()

    def leave(self) -> None:
        """Let others see the gradients that there are now."""
        self._left = [p.grad for p in self.step.params]

    @property
    def is_made(self) -> bool:
        """Whether its displaced passes are made, of which there were some."""
        return self.step.due and self.course.place is None

    @property
    def is_abandoned(self) -> bool:
        """Whether other gradients are in the place of those that it left: a scaler has skipped it."""
        pairs = zip(self.step.params, self._left, strict=True)
        return any(p.grad is not None and p.grad is not left for p, left in pairs)


@contextmanager
def second_pass(
    opt: TwoPassOptimizer, scaler: torch.amp.GradScaler | None, loss: Tensor | None = None
) -> Iterator[None]:
    """Weights displaced for the caller's second pass; after the last one the total is left in `.grad`."""
    refusals.check_scope(opt, scaler)
    caller = opt._caller
    loop = caller.loop
    with uninterrupted() as signals, torch.no_grad():
        around = surroundings_of(opt, signals, several=True)
        entered = RandomState(around.devices)
        if loop.watch is not None:
            loop.watch.look()
        with all_or_nothing(around):
            if opt.second_pass_due:
                caller.note_draws(around.random)
            pending = loop.pending or _begun(opt, around, scaler, loss)
            step, course = pending.step, pending.course
            others_found = _others(opt, around, loss)
            with displaced_pass(step.params, course.place, around), others_found:
                with callers_pass(signals, around, entered):
                    yield
                if loop.watch is not None:
                    loop.watch.look()
                if scaler is not None:
                    unscale(around.params, scaler)
            if course.place is not None:
                course.proceed(gradients_ahead(step.params, keep=opt.is_central))
            tensors.forget(around.params)
            if course.place is None:
                step.penalty, step.renewed = course.found, course.found is not None
                opt._conclude(step)
                if (watch := loop.take_watch()) is not None:
                    caller.clipping.heed(watch)
                hand_over(step, scaler)
        pending.leave()
        loop.pending = pending


@contextmanager
def callers_pass(signals: Signals, around: Surroundings, entered: RandomState) -> Iterator[None]:
    """Where the caller makes the pass, which has to be one, and over the same random numbers."""
    with torch.enable_grad(), signals.opened():
        yield
    refusals.check_pass_in_scope(around, entered)


def _others(opt: TwoPassOptimizer, around: Surroundings, loss: Tensor | None) -> AbstractContextManager[None]:
    """Look for parameters of other optimisers: by the model, by the loss, or else by what the first scope calls."""
    if loss is not None:
        around.others += tensors.leaves(loss, besides=[*around.params, *around.others])
    elif opt.model is None and opt._caller.others.seen is None:
        return _found_once(opt, around)
    return nullcontext()


@contextmanager
def _found_once(opt: TwoPassOptimizer, around: Surroundings) -> Iterator[None]:
    with seen_in_calls(around):
        yield
    opt._caller.others.note(around)


def _begun(
    opt: TwoPassOptimizer, around: Surroundings, scaler: torch.amp.GradScaler | None, loss: Tensor | None
) -> Pending:
    """A step from the gradients that the caller's own first pass has left."""
    if scaler is not None:
        unscale(around.params, scaler)
    step = begun(opt, First(loss), due=opt.second_pass_due)
    if (outer := passes_again.get()) is not None:
        refusals.check_apart(around.params, outer.others)
    if not step.slices:
        raise RuntimeError("perturbed() before backward(): no parameter of the optimiser has a gradient")
    look_at_held_out_data(opt, step, around)
    course = Course(opt.method.passes(step, opt.rule, safely=scaler is not None and opt.model is None))
    course.proceed()
    return Pending(step, course, is_scaled=scaler is not None)


def hand_over(step: Step, scaler: torch.amp.GradScaler | None) -> None:
    """Leave the total where the caller's loop may clip it; what f is to learn from stays as it is."""
    if scaler is not None:
        scale(step.params, scaler)
    elif any(total is g for total, g in zip(step.total, step.gradients, strict=True)):
        step.total = tensors.clone(step.total)


def closure_of(closure: partial[Any]) -> Callable[..., Any] | None:
    """None where a loop has made its passes: Lightning hands a closure to every step, there one that does nothing."""
    inner: Any = closure
    while isinstance(inner, partial) and inner.args:  # around it are its hooks before a step
        inner = inner.args[-1]
    if getattr(inner, "__name__", None) != "do_nothing_closure":
        return closure
    closure()
    return None


def tell_loss(opt: TwoPassOptimizer, loss: Tensor) -> None:
    """Let a step without closure know its loss, also where it has no second pass."""
    opt._caller.loop.loss = loss


def passes_made(opt: TwoPassOptimizer) -> Step:
    """The passes that the caller has made before `step()`."""
    loop = opt._caller.loop
    pending, (loss, loop.loss) = loop.take(), (loop.loss, None)
    if pending is None:
        refusals.check_step_alone(opt)
        step = begun(opt, First(loss), due=False)
        drive(opt.method.passes(step, opt.rule, safely=False), _no_pass)
        return step
    if isinstance(opt.method, TraceRatio) and not pending.is_scaled and is_scaler_s_step():
        raise RuntimeError(
            "scaler.step(opt) after perturbed() without scaler=: the gradients were scaled where they should not be, "
            "so that ρ, δ and f meant something else. Write perturbed(scaler=scaler)"
        )
    if pending.course.place is not None:
        raise RuntimeError("step() after one of two passes: a central difference needs a second perturbed() scope")
    pending.step.drop_parameters_without_gradient()
    return pending.step


def _no_pass(place: Any) -> Tensors:
    raise AssertionError("no displaced pass was due")
