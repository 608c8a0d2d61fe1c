"""Several optimisers over one model that share their passes: a body by SGD-TRACER and a head by AdamW-TRACER, say.

Together they penalise the sum of their trace ratios, each with its own ρ, f and δ, by one displacement of all weights:
what one optimiser does with several groups. One whose ρ is 0, or whose interval has not come round, is not displaced
and sees the gradient of the loss alone. Steps of their own, one after the other, would make twice the passes, and each
would see the other's weights stand still.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from gtracer import checks, tensors
from gtracer.optim import others, refusals
from gtracer.optim.auto import look_at_held_out_data
from gtracer.optim.evaluate import Call, First, begun, evaluator_of
from gtracer.optim.loops import Pending, callers_pass, hand_over
from gtracer.optim.optimizer import TwoPassOptimizer
from gtracer.optim.scaler import scale, unscale
from gtracer.optim.stats import NonFiniteError
from gtracer.optim.step import (
    Course,
    Passes,
    Slice,
    Step,
    Surroundings,
    all_or_nothing,
    displaced_pass,
    drive,
    gradients_ahead,
    in_model,
)
from gtracer.scopes import Copies, RandomState, Signals, uninterrupted
from gtracer.tensors import Tensors

UNFUSED = "joint passes are torch's kernels"


def joint_step(
    optimizers: Sequence[TwoPassOptimizer],
    closure: Callable[..., Any],
    *batch: Any,
    batches: Sequence[Any] | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Any:
    """Make one step of several optimisers over one model, with shared passes; return the plain loss at the old weights.

    Args:
        optimizers: Of disjoint parameters, with one engine: all TRACER's or all SAM's. ρ, δ, learning rates, updates
            and intervals are their own.
        closure: As for `step`.
        *batch, batches, scaler: As for `step`.
    """
    call = Call.of(closure, batch, batches, "whole", scaler)
    if not callable(closure):
        raise ValueError(
            f"closure must be a function that gives the loss, got {closure!r}: without one there is joint_perturbed"
        )
    team = Team(optimizers)
    for opt in team.optimizers:
        opt._check_step(call)
    with uninterrupted() as signals, torch.no_grad():
        around = team.surroundings(signals, begins=True)
        try:
            returned, steps = _made(team, call, around)
        except NonFiniteError as error:
            if any(opt.nonfinite == "raise" for opt in team.optimizers):
                raise
            return error.loss
        for opt, step in zip(team.optimizers, steps, strict=True):
            if call.scaler is None:
                opt._apply(step)
            else:
                scale(step.params, call.scaler)
                call.scaler.step(opt._held, partial(opt._apply, step))  # type: ignore[arg-type]
    return returned


def _made(team: Team, call: Call, around: Surroundings) -> tuple[Any, list[Step]]:
    """All of it but the updates."""
    lead, due = team.lead, any(opt.second_pass_due for opt in team.optimizers)
    with all_or_nothing(around):
        evaluator = evaluator_of(lead.method, call, around, lead.model, due)
        loss = evaluator.first()
        found = loss if isinstance(loss, First) else First(loss)
        steps = team.begin(found, around)
        joint = team.joint(steps)
        passes = team.displaced(joint, safely=call.scaler is not None and around.model is None)
        team.share(joint, drive(passes, partial(evaluator.at, joint.params)), steps)
        team.check(steps, call, around)
    returned = found.returned.detach() if isinstance(found.returned, Tensor) else found.returned
    return returned, steps


@contextmanager
def joint_perturbed(
    optimizers: Sequence[TwoPassOptimizer],
    scaler: torch.amp.GradScaler | None = None,
    *,
    loss: Tensor | None = None,
) -> Iterator[None]:
    """Displace the weights of several optimisers over one model for the second pass, in loops without a closure.

        loss_of(batch).backward()
        with gtracer.joint_perturbed([body, head]):
            loss_of(batch).backward()
        body.step(), head.step()

    Random numbers are replayed from the first optimiser's last `zero_grad()`.

    Args:
        optimizers: As for `joint_step`.
        scaler, loss: As for `perturbed`.
    """
    scaler = scaler if scaler is not None and scaler.is_enabled() else None
    team = Team(optimizers)
    for opt in team.optimizers:
        opt._caller.loop.drop_abandoned()
        refusals.check_scope(opt, scaler)
    with uninterrupted() as signals, torch.no_grad():
        around = team.surroundings(signals, begins=False)
        entered = RandomState(around.devices)
        with all_or_nothing(around):
            begun = [loop.pending for loop in around.loops if loop.pending is not None]
            if len(begun) < len(team.optimizers):
                begun = team.begun(around, scaler, loss)
            steps, course, joint = [one.step for one in begun], begun[0].course, begun[0].joint
            assert joint is not None
            if loss is not None:
                around.others += tensors.leaves(loss, besides=[*around.params, *around.others])
            seen = others.seen_in_calls(around) if around.model is None and loss is None else nullcontext()
            with displaced_pass(joint.params, course.place, around), seen:
                with callers_pass(signals, around, entered):
                    yield
                if scaler is not None:
                    unscale(around.params, scaler)
            if course.place is not None:
                course.proceed(gradients_ahead(joint.params, keep=team.lead.is_central))
            tensors.forget(around.params)
            if course.place is None:
                team.share(joint, course.found, steps)
                for step in steps:
                    hand_over(step, scaler)
        for loop, one in zip(around.loops, begun, strict=True):
            one.leave()
            loop.pending = one


class Team:
    """Optimisers whose passes are the same: what is each one's own, and what is all of theirs."""

    def __init__(self, optimizers: Sequence[TwoPassOptimizer]) -> None:
        self.optimizers = list(optimizers)
        _check(self.optimizers)
        self.lead = self.optimizers[0]

    def surroundings(self, signals: Signals, *, begins: bool) -> Surroundings:
        """What the passes find, and have to leave."""
        params = [p for opt in self.optimizers for p in opt._params()]
        devices = {p.device for p in params}
        start = RandomState(devices, others=True) if begins else self.lead._caller.loop.mark
        models = list(dict.fromkeys(opt.model for opt in self.optimizers if opt.model is not None))
        model = nn.ModuleList(models) if len(models) > 1 else next(iter(models), None)
        copies = Copies() if len(models) > 1 else self.lead._copies
        loops = [opt._caller.loop for opt in self.optimizers]
        around = Surroundings(params, devices, model, copies, start, begins, signals, loops, seeks=begins)
        around.seed = self.lead.steps
        if model is not None:
            around.others = in_model(model, params)
            around.in_model = len(around.others)
        return around

    def begin(self, found: First, around: Surroundings) -> list[Step]:
        """Everybody's own step, from the gradients of the first pass."""
        steps = [begun(opt, found, opt.second_pass_due) for opt in self.optimizers]
        for opt, step in zip(self.optimizers, steps, strict=True):
            look_at_held_out_data(opt, step, around)
            opt._fusion.obstacle = UNFUSED
            step.random = self.lead._left.random
        return steps

    def begun(self, around: Surroundings, scaler: torch.amp.GradScaler | None, loss: Tensor | None) -> list[Pending]:
        """The same where the caller's own first pass has left them."""
        if scaler is not None:
            unscale(around.params, scaler)
        steps = self.begin(First(loss), around)
        if not all(step.slices for step in steps):
            raise RuntimeError("joint_perturbed() before backward(): no parameter of an optimiser has a gradient")
        joint = self.joint(steps)
        course = Course(self.displaced(joint, safely=scaler is not None and around.model is None))
        course.proceed()
        return [Pending(step, course, is_scaled=scaler is not None, joint=joint) for step in steps]

    def joint(self, steps: list[Step]) -> Step:
        """What the passes are made for: all slices of those that are due."""
        due = [step for step in steps if step.due] or steps
        slices = [part for step in due for part in step.slices]
        return Step(slices, due=any(step.due for step in steps), evaluation=steps[0].evaluation)

    def displaced(self, joint: Step, *, safely: bool) -> Passes | None:
        """The displaced passes of the joint step."""
        owners = {id(p): opt for opt in self.optimizers for p in opt._params()}

        def average(part: Slice) -> Tensors:
            return owners[id(part.params[0])].rule.average(part)

        state = ChainMap(*(opt.base.state for opt in self.optimizers))
        rule: Any = SimpleNamespace(average=average, base=SimpleNamespace(state=state))
        passes = self.lead.method.passes(joint, rule, safely=safely)
        if joint.evaluation is not None:
            joint.drop_graph()
        return passes

    def share(self, joint: Step, penalty: Tensors | None, steps: list[Step]) -> None:
        """Give everybody what is theirs of what the passes have found."""
        found = {} if penalty is None else dict(zip(map(id, joint.params), penalty, strict=True))
        for opt, step in zip(self.optimizers, steps, strict=True):
            step.evaluation, step.trace_ratio = None, joint.trace_ratio
            step.rows = {p: joint.rows[p] for p in step.params if p in joint.rows}
            if step.due and penalty is not None:
                step.penalty, step.renewed = [found[id(p)] for p in step.params], True
            opt._conclude(step)

    def check(self, steps: list[Step], call: Call, around: Surroundings) -> None:
        """Refuse a step for all, if anybody's is not finite."""
        for opt, step in zip(self.optimizers, steps, strict=True):
            if what := opt._nonfinite(step, call, around):
                raise NonFiniteError(
                    f"{what}: the step was made by none, weights and state are as they were. Lower the learning rate "
                    "or rho, or pass nonfinite='skip' to go on without such steps",
                    step.returned,
                )


def _check(optimizers: list[TwoPassOptimizer]) -> None:
    """Refuse what cannot share its passes."""
    for opt in optimizers:
        checks.kind("optimizers", opt, TwoPassOptimizer, " of gtracer; torch's own make no second pass")
    if len(optimizers) < 2:
        raise ValueError(f"optimizers must be two or more, got {len(optimizers)}: one alone makes step(closure)")
    params = [id(p) for opt in optimizers for p in opt._params()]
    if len(params) != len(set(params)):
        raise ValueError("optimizers must have no parameter in common, got one that two of them move")
    lead = optimizers[0]
    for opt in optimizers:
        if opt.method != lead.method:
            raise ValueError(
                f"optimizers must make the same passes, got {lead.method} and {opt.method}: one engine and one "
                "curvature for all"
            )
        if opt.reuse is not None and opt.reuse.always:
            raise ValueError(f"optimizers with reuse={opt.reuse!r} make a pass of their own: leave it out")
        if opt.implementation == "fused":
            raise ValueError("optimizers with implementation = 'fused' cannot share passes: use 'auto'")
    if lead.method.parts is not None or hasattr(getattr(lead.method, "engine", None), "evaluator"):
        raise ValueError(f"optimizers with {lead.method} take the batch in parts themselves, and cannot share passes")
