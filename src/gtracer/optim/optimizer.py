"""The scheme that TRACER and SAM share: a gradient, further gradients at displaced weights, one update.

What varies is handed over at construction, as small frozen objects: what is added to the gradient (`methods`), the
update and where f is kept (`rules`), what is used between two penalties (`reuse`), what is done to the total before the
update (`transforms`). What a call brings is an argument. Everything that can go wrong between the passes is handled
here, once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from gtracer import checks, scopes, tensors
from gtracer.curvature import gradient_magnitude
from gtracer.optim import directions, executors, posterior, processes
from gtracer.optim.evaluate import (
    Call,
    Evaluator,
    First,
    Surroundings,
    all_or_nothing,
    devices_of,
    displaced_pass,
    first_in_parts,
    first_with_graph,
    gradients_ahead,
    one_pass,
    pass_in_parts,
    scale,
    unscale,
)
from gtracer.optim.executors import TwoKernels, source_of
from gtracer.optim.methods import Method, TraceRatio, note_curvature
from gtracer.optim.parts import Parts, Pool, kept, split
from gtracer.optim.reuse import LAST, Reuse
from gtracer.optim.rules import Rule
from gtracer.optim.stats import Stats, Verdict
from gtracer.optim.step import COUNT, Course, Slice, Step, combine, drive
from gtracer.optim.transforms import Transform
from gtracer.penalty import NONFINITE
from gtracer.scopes import (
    Buffers,
    Copies,
    PooledStatistics,
    RandomState,
    Uninterrupted,
    frozen_statistics,
    is_capturing,
)
from gtracer.tensors import Tensors


class NonFiniteError(FloatingPointError):
    """A loss or gradient was NaN or infinite; nothing was updated.

    Args:
        message: What was not finite.
        loss: The step's, as the closure gave it.
    """

    def __init__(self, message: str, loss: Any = None) -> None:
        super().__init__(message)
        self.loss = loss


class Pending:
    """A step whose passes a loop of the caller's own makes: between `perturbed()` and `step()`."""

    def __init__(self, step: Step, course: Course) -> None:
        self.step, self.course = step, course
        self.leave()

    def leave(self) -> None:
        """Let others see the gradients that there are now."""
        self._left = [p.grad for p in self.step.params]

    @property
    def is_abandoned(self) -> bool:
        """Whether other gradients are in the place of those that it left: a scaler has skipped it."""
        return any(
            p.grad is not None and p.grad is not left for p, left in zip(self.step.params, self._left, strict=True)
        )


class Held:
    """What a GradScaler takes for an optimiser: it looks at the gradients and makes the update, or does not."""

    def __init__(self, optimizer: TwoPassOptimizer) -> None:
        self._optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def step(self, update: Callable[[], None]) -> None:
        update()


class TwoPassOptimizer(torch.optim.Optimizer):
    """A torch optimiser that is fed gradients corrected by gradients at displaced weights.

    It shares `param_groups` and `state` with the optimiser it wraps, so learning-rate schedulers, `state_dict` and
    checkpoints see one optimiser.

    Args:
        defaults: What this scheme adds to every parameter group.
        method: What is added to the gradient.
        rule: Makes the update; its base is the optimiser that is wrapped.
        transforms: What is done to the total before the update.
        interval: Make the displaced pass only every so many steps.
        reuse: What is used in the steps between.
        model: Where batch-norm statistics and other buffers live. With it, a displaced pass leaves them alone.
        nonfinite: What to do about a NaN or infinite loss or gradient: `"raise"`; `"skip"` the step; `"ignore"`.
        implementation: `"auto"`, `"foreach"`, `"compiled"` or `"fused"`.
    """

    def __init__(
        self,
        defaults: dict[str, Any],
        *,
        method: Method,
        rule: Rule,
        transforms: tuple[Transform, ...] = (),
        interval: int = 1,
        reuse: Reuse | None = None,
        model: nn.Module | None = None,
        nonfinite: str = "raise",
        implementation: str = "auto",
    ) -> None:
        checks.count("interval", interval)
        checks.choice("nonfinite", nonfinite, NONFINITE)
        checks.choice("implementation", implementation, executors.IMPLEMENTATIONS)
        base = rule.base
        self.base, self.method, self.rule, self.transforms = base, method, rule, transforms
        self.interval, self.reuse, self.model, self.nonfinite = interval, reuse, model, nonfinite
        self.implementation = implementation
        # Adadelta has a `rho` of its own; ours then goes by `gtracer_rho` in the groups.
        self._keys = {name: f"gtracer_{name}" if name in base.defaults else name for name in defaults}
        ours = {self._keys[name]: value for name, value in defaults.items()}
        everything = {**base.defaults, **ours, COUNT: 0}
        for group in base.param_groups:  # all of them before the first is touched
            self._completed(group, everything)
        _check_model(model, base)
        super().__init__(base.param_groups, everything)
        self.param_groups, self.state = base.param_groups, base.state
        if implementation == "fused" and (why := self._why_not_fused()):
            raise ValueError(f"implementation = 'fused' cannot be: {why}. Use 'auto', which takes the next best")
        self._forget()

    def _forget(self) -> None:
        """Start anew with what is not in the state."""
        self.stats: Stats | None = None
        self.phases = 1  # graphs that whoever captures makes of a step, one for each place in an interval
        self._pending: Pending | None = None
        self._verdict: Verdict | None = None  # on the last step of the two kernels, until somebody waits for it
        self._unfused: str | None = None  # why the last step on a GPU was not that of the two kernels
        self._busy = False
        self._copies = Copies()
        self._mark = RandomState(self._devices())  # where the random numbers of a step without closure begin
        self._draws: bool | None = None  # whether a pass draws random numbers, once a step has shown it
        self._held = Held(self)

    # The optimiser's own surface.

    def hyperparameters(self, group: dict[str, Any]) -> dict[str, Any]:
        """What this scheme keeps in a group (`rho` and so on), by its plain name."""
        return {name: group[key] for name, key in self._keys.items()}

    @property
    def rho_key(self) -> str:
        """What ρ is called in the groups: `rho`, unless the base optimiser has one of its own."""
        return self._keys["rho"]

    @property
    def clip(self) -> Transform | None:
        """The bounds for the gradient of the update, if there are any."""
        return next(iter(self.transforms), None)

    @property
    def is_central(self) -> bool:
        """Whether a due step makes two displaced passes, one to either side."""
        return self.method.central

    @property
    def implementation_used(self) -> str:
        """What makes the steps, and why not something faster."""
        if self.method_compiles:
            return "compiled"
        why = self._unfused or self._why_not_fused()
        return "fused" if why is None else f"foreach, not fused: {why}"

    @property
    def method_compiles(self) -> bool:
        """Whether the arithmetic goes through torch.compile."""
        return bool(getattr(self.method, "compile", False))

    @property
    def second_pass_due(self) -> bool:
        """Whether this step wants a displaced pass (ρ > 0 somewhere, and `interval` has come round)."""
        if self.reuse is not None and self.reuse.always:
            return False
        return self.is_penalised and self.param_groups[0][COUNT] % self.interval == 0

    @property
    def is_penalised(self) -> bool:
        """Whether ρ > 0 anywhere."""
        return any(group[self.rho_key] > 0 for group in self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, at the start or in mid-training; what it leaves out takes the defaults."""
        checks.kind("param_group", param_group, dict)
        new = all(param_group is not group for group in self.base.param_groups)
        if new:
            self.base.add_param_group(param_group)
        try:
            param_group.update(self._completed(param_group, self.defaults))
        except ValueError:
            if new:
                self.base.param_groups.pop()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. It also marks where the random numbers of a step begin: see `perturbed`."""
        super().zero_grad(set_to_none)
        if not self._busy:
            self._pending = None
            self._mark = RandomState(self._devices())

    @torch.no_grad()
    def step(
        self,
        closure: Callable[..., Any] | None = None,
        *batch: Any,
        batches: Sequence[Any] | None = None,
        penalty: str = "whole",
        scaler: torch.amp.GradScaler | None = None,
    ) -> Any:
        """Make one step; return the plain loss at the old weights.

        Args:
            closure: Computes the loss of one batch and returns it, with or without having called `zero_grad()`
                and `backward()` itself. Without a closure the gradients must be there and, where
                `second_pass_due`, the pass under `perturbed()` must have been made.
            *batch: What to call the closure with, if anything.
            batches: Micro-batches instead: the closure is called with each of them, and the step is that of all of
                them together. Each counts by its number of examples.
            penalty: `"whole"`: of the whole batch, of all micro-batches and all processes. `"each"`: the mean of the
                penalties of its parts, which on several processes takes one exchange of gradients, not two; then
                `model=` must be the `DistributedDataParallel` module.
            scaler: For float16: scales the loss of every pass. An overflow in any of them skips the step. Call
                `scaler.update()` afterwards, as ever.
        """
        call = Call.of(closure, batch, batches, penalty, scaler)
        self._check_step(call)
        with Uninterrupted() as signals:
            try:
                step = self._made(call, signals)
            except NonFiniteError as error:
                if self.nonfinite == "raise":
                    raise
                return error.loss
            self._update(step, call)
        return step.told

    def perturbed(self, scaler: torch.amp.GradScaler | None = None) -> AbstractContextManager[None]:
        """Weights displaced for the second pass, in loops that cannot hand over a closure.

            opt.zero_grad()
            loss_of(batch).backward()
            with opt.perturbed():
                loss_of(batch).backward()
            opt.step()

        Random numbers are replayed from the last `zero_grad()`, so call that right before the first pass. With
        `FiniteDifference(central=True)` two such scopes are needed. In a step that is not `second_pass_due` the scope
        displaces nothing and drops what is computed in it.

        Args:
            scaler: Where both passes scale their loss by it. The gradient that is left is scaled too, for
                `scaler.unscale_(opt)` and `scaler.step(opt)` to find it as ever.
        """
        self._check_perturbed(scaler)
        return self._perturbed(scaler if scaler is not None and scaler.is_enabled() else None)

    @contextmanager
    def _perturbed(self, scaler: torch.amp.GradScaler | None) -> Iterator[None]:
        self._check_perturbed(scaler)
        with Uninterrupted() as signals, torch.no_grad():
            around = self._surroundings(signals)
            entered = RandomState(around.devices)
            with self._passes(around):
                pending = self._pending or self._begun_by_the_caller(around, scaler)
                with displaced_pass(pending.step.params, pending.course.place, around):
                    signals.open()
                    with torch.enable_grad():
                        yield
                    signals.close()
                    self._check_pass_in_scope(around, entered)
                    if scaler is not None:
                        unscale(around.params, scaler)
                if pending.course.place is not None:
                    pending.course.proceed(gradients_ahead(pending.step.params, keep=self.is_central))
                around.clear()
                if pending.course.place is None:
                    self._conclude(pending.step, pending.course.found)
                    self._hand_over(pending.step, scaler)
            pending.leave()
            self._pending = pending

    # The steps of a step.

    def _made(self, call: Call, signals: Uninterrupted) -> Step:
        """All of it but the update."""
        fuse = self._fuses(call)
        anew = call.closure is not None and (fuse or bool(getattr(self.method, "lean", False)))
        around = self._surroundings(signals, begins=call.closure is not None)
        with self._passes(around, anew=anew):
            step = self._passes_made() if call.closure is None else self._make(call, around, fuse)
            self.stats = step.stats
            if what := self._nonfinite(step, call, around):
                raise NonFiniteError(
                    f"{what}: the step was not made, weights and state are as they were. Lower the learning rate or "
                    "rho, or pass nonfinite='skip' to go on without such steps",
                    step.told,
                )
        return step

    def _make(self, call: Call, around: Surroundings, fuse: bool) -> Step:
        """The passes, and what follows from them for the gradient."""
        parts = self.method.parts
        if parts is not None:
            step = self._make_micro_batches(call, around, parts)
        elif call.each and (call.parts is not None or processes.count(self.model) > 1):
            step = self._make_each(call, around, call.parts or [(1.0, call.batch)], own_curvature=True)
        else:
            step = self._penalised(call, around, self._evaluator(call, around), fuse=fuse)
        if step.kernels is None:
            self._conclude(step, step.penalty)
        return step

    def _penalised(
        self,
        call: Call,
        around: Surroundings,
        evaluator: Evaluator,
        *,
        fuse: bool = False,
        start: dict[Tensor, Tensor] | None = None,
    ) -> Step:
        """Both passes over a batch or a part of it."""
        with self._place_of_first_pass():
            found = evaluator.first()
        self._note_draws(around)
        step = self._begin(found, due=evaluator.due)
        if start is not None:
            for part in step.slices:
                part.start = [start[p] for p in part.params]
        if fuse and step.slices:
            step.kernels = self._kernels_for(step)
        if step.kernels is not None:
            passes = step.kernels.passes() if step.due else None
        else:
            passes = self.method.passes(step, self.rule, safely=call.scaler is not None and self.model is None)
        step.drop_graph()
        step.penalty = drive(passes, partial(evaluator.at, step))
        step.renewed = step.penalty is not None
        return step

    def _begin(self, found: First, due: bool) -> Step:
        """Collect the gradients of the first pass."""
        slices = []
        for group in self.param_groups:
            if params := _used(group, self._check_parameter):
                gradients = kept([p.grad for p in params if p.grad is not None])
                slices.append(Slice(group, self.hyperparameters(group), params, gradients))
        step = Step(slices, found.told, due=due and bool(slices), evaluation=found.evaluation)
        if found.measured is not None:
            note_curvature(step, found.measured)
        if found.compared is not None:
            step.compared = [found.compared.get(p, torch.zeros_like(p)) for p in step.params]
        return step

    def _conclude(self, step: Step, penalty: Tensors | None) -> None:
        """From the passes to the gradient of the update."""
        step.penalty, step.renewed = penalty, penalty is not None
        state, count = self.base.state, self.param_groups[0][COUNT]
        if penalty is None and self.reuse is not None and self.is_penalised:
            step.penalty = self.reuse.recall(step, state, count % self.interval)
        self.method.finish(step)
        combine(step)
        if self.reuse is not None:  # before clipping
            self.reuse.note(step, state, partial(self._damped, step))
        if step.rows:
            step.after.append(partial(directions.note, state, step))

    def _update(self, step: Step, call: Call) -> None:
        if call.scaler is None:
            self._apply(step)
        else:
            scale(step.params, call.scaler)
            call.scaler.step(self._held, partial(self._apply, step))  # type: ignore[arg-type]

    def _apply(self, step: Step) -> None:
        """Move the weights, and write the state, last."""
        if step.kernels is not None:
            self._finish_kernels(step, step.kernels)
        else:
            for transform in self.transforms:
                transform(step, partial(self._damped, step))
            if is_capturing():
                self._check_capture_of_lr()
            self.rule.update(step)
            for note in step.after:
                note()
        for group in self.param_groups:
            group[COUNT] += 1
        if self.stats is not None and self.rule.keeps_average:
            self.stats.count_damped = self._damped_share

    def _finish_kernels(self, step: Step, kernels: TwoKernels) -> None:
        sums = kernels.finish()
        self.stats = Stats.of_squares(step.loss, kernels.reached, sums)
        for p, new in kernels.new_state():
            self.base.state[p].update(new)
        if kernels.kept is not None:
            for p, last in zip(step.params, kernels.kept, strict=True):
                self.base.state[p][LAST] = last
        if kernels.healthy is not None and self.nonfinite == "raise":
            self._verdict = Verdict(kernels.healthy)

    def _damped(self, step: Step, part: Slice) -> tuple[Tensors, float]:
        """f of a slice, and the δ that is still to be added to it."""
        assert isinstance(self.method, TraceRatio)
        return self.method.damped(step, self.rule, part)

    # Whose passes they are.

    def _evaluator(self, call: Call, around: Surroundings, *, due: bool | None = None) -> Evaluator:
        """How this batch's passes are made."""
        due = self.second_pass_due if due is None else due
        method, scaler, closure = self.method, call.scaler, call.closure
        assert closure is not None
        if isinstance(method, TraceRatio) and method.needs_graph:
            self._check_graph(call)
            loss_of = call.loss_of_batch if call.parts is None else partial(_sum_over, closure, call.parts)
            first = partial(first_with_graph, loss_of, around, method, due)
            return Evaluator(around, partial(one_pass, loss_of, around), first, due=due, keep=self.is_central)
        own = getattr(getattr(method, "engine", None), "evaluator", None)
        if own is not None:
            made: Evaluator = own(call, around, due)
            return made
        one = partial(one_pass, call.loss_of_batch, around, scaler)
        again = one if call.parts is None else partial(pass_in_parts, closure, call.parts, around, scaler)
        return Evaluator(around, again, due=due, keep=self.is_central)

    def _make_micro_batches(self, call: Call, around: Surroundings, size: int) -> Step:
        """A step with an estimator that takes the batch in parts itself."""
        assert isinstance(self.method, TraceRatio)
        if call.parts is not None or call.each:
            raise RuntimeError(
                f"batches or penalty = 'each' with micro_batch({size}), which takes the batch in parts "
                "itself: hand the whole batch to step(closure, x, y), or leave micro_batch out"
            )
        numerator, average = self.method.curvature.numerator, self.method.curvature.average
        parts = split(call.batch, size)
        if numerator is gradient_magnitude:
            assert call.closure is not None
            first = partial(first_in_parts, call.closure, parts, around, call.scaler)
            again = partial(pass_in_parts, call.closure, parts, around, call.scaler)
            evaluator = Evaluator(around, again, first, due=self.second_pass_due, keep=self.is_central)
            return self._penalised(call, around, evaluator)
        own = average is not gradient_magnitude
        stacked = getattr(numerator, "step", None)
        if stacked is not None and not self.method.engine.is_exact and parts[-1][0] == parts[0][0]:
            made: Step = stacked(self, call, around, len(parts), own)
            return made
        return self._make_each(call, around, parts, own_curvature=own)

    def _make_each(self, call: Call, around: Surroundings, parts: Parts, *, own_curvature: bool) -> Step:
        """Both passes over each part, displaced along its own direction; the means of what they find."""
        with processes.by_itself(self.model) if call.each else nullcontext():
            start = self._start_of_each(call, around, parts, own_curvature)
            pool, last = self._pooled(call, around, parts, start=start)
        if call.each and processes.count(self.model) > 1:
            pool.join_processes(around.params, processes.group_of(self.model))
            processes.as_first(self.model)
        step = pool.step(self._whole_groups(), own_curvature=own_curvature)
        step.rows = last.rows
        return step

    def _pooled(
        self,
        call: Call,
        around: Surroundings,
        parts: Parts,
        *,
        start: dict[Tensor, Tensor] | None = None,
        due: bool | None = None,
    ) -> tuple[Pool, Step]:
        pool, statistics, last = Pool(), PooledStatistics(self.model), Step([])
        for share, part in parts:
            here = replace(around, random=RandomState(around.devices))
            alone = replace(call, batch=part, parts=None)
            with statistics.part(share):
                last = self._penalised(alone, here, self._evaluator(alone, here, due=due), start=start)
            pool.add(last, share)
        statistics.conclude()
        return pool, last

    def _start_of_each(
        self, call: Call, around: Surroundings, parts: Parts, own_curvature: bool
    ) -> dict[Tensor, Tensor] | None:
        """F of the whole batch for f₀, where the first of its parts would be asked for it: passes of the first step."""
        fresh = [g for g in self.param_groups if not all(self.rule.is_trained(p) for p in g["params"])]
        joined = call.each and processes.count(self.model) > 1
        if not self.rule.keeps_average or (len(parts) == 1 and not joined):
            return None
        if not any(isinstance(self.hyperparameters(group)["f0"], str) for group in fresh):
            return None
        begin = RandomState(around.devices)
        with frozen_statistics(Buffers(self.model)):
            pool, _ = self._pooled(call, around, parts, due=False)
        begin.restore()
        if joined:
            pool.join_processes(around.params, processes.group_of(self.model))
        step = pool.step(self._whole_groups(), own_curvature=own_curvature)
        return {p: F for part in step.slices for p, F in zip(part.params, part.measured, strict=True)}

    def _whole_groups(self) -> list[Slice]:
        """The groups as slices, whose gradients are still to be filled in."""
        return [Slice(group, self.hyperparameters(group), group["params"], []) for group in self.param_groups]

    @contextmanager
    def _passes(self, around: Surroundings, *, anew: bool = False) -> Iterator[None]:
        """Where passes are made: nobody else's step, and all or nothing."""
        # The device waits for the copy of the statistics: in a step that keeps no copies nothing but a closure that
        # fails could want it, and what fails in a capture has changed nothing yet.
        statistics = not (is_capturing() or (anew and self.nonfinite == "ignore"))
        self._busy = True
        try:
            with all_or_nothing(around, anew=anew, statistics=statistics):
                yield
        finally:
            self._busy = False

    def _surroundings(self, signals: Uninterrupted, *, begins: bool = False) -> Surroundings:
        """What passes find; random numbers begin here, or where the loop has marked it."""
        params = self._params()
        if begins:
            self._mark = RandomState(devices_of(params))
        return Surroundings(params, self.model, self._copies, self._mark, signals)

    def _place_of_first_pass(self) -> AbstractContextManager[None]:
        if self.reuse is None or not self.reuse.always:
            return nullcontext()
        return self.reuse.first_pass(self._whole_groups(), self.base.state)

    # Loops without closure.

    def _begun_by_the_caller(self, around: Surroundings, scaler: torch.amp.GradScaler | None) -> Pending:
        """A step from the gradients that the caller's own first pass has left."""
        if scaler is not None:
            unscale(around.params, scaler)
        step = self._begin(First(None), due=self.second_pass_due)
        if not step.slices:
            raise RuntimeError("perturbed() before backward(): no parameter of the optimiser has a gradient")
        passes = self.method.passes(step, self.rule, safely=scaler is not None and self.model is None)
        return Pending(step, Course(passes))

    def _hand_over(self, step: Step, scaler: torch.amp.GradScaler | None) -> None:
        """Leave the total where the caller's loop may clip it; what f is to learn from stays."""
        if scaler is not None:
            scale(step.params, scaler)
        elif step.total and step.total[0] is step.gradients[0]:
            step.total = tensors.clone(step.total)

    def _passes_made(self) -> Step:
        """The passes that a loop without closure has made before `step()`."""
        pending, self._pending = self._pending, None
        if pending is None:
            empty = self._is_empty_step()
            if self.method.needs_closure and not empty:
                raise RuntimeError(f"step() without a closure: {self.method.needs_closure}, use step(closure)")
            if self.reuse is not None and self.reuse.always and not empty:
                raise RuntimeError(
                    f"step() without a closure: reuse={self.reuse!r} displaces the weights itself, step(closure)"
                )
            if self.second_pass_due and not empty:
                raise RuntimeError(
                    "step() without the second pass: pass a closure, step(closure), or run the loss once more under "
                    "`with opt.perturbed():` before step()"
                )
            step = self._begin(First(None), due=False)
            self._conclude(step, drive(self.method.passes(step, self.rule, safely=False), _no_pass))
            return step
        if pending.course.place is not None:
            raise RuntimeError("step() after one of two passes: a central difference needs a second perturbed() scope")
        pending.step.drop_parameters_without_gradient()
        return pending.step

    def _is_empty_step(self) -> bool:
        """Whether all gradients are zero: so torch.distributed.checkpoint lets an optimiser make its state."""
        gradients = [p.grad for p in self._params() if p.grad is not None]
        return bool(gradients) and bool(tensors.norm(gradients) == 0)  # the same on all processes

    # Two kernels.

    def _why_not_fused(self, call: Call | None = None, params: Tensors = ()) -> str | None:
        return executors.why_not_fused(self.method, self.rule, self.transforms, self.reuse, call, params)

    def _fuses(self, call: Call) -> bool:
        """Whether this step is to be that of the two kernels, as far as can be told before its gradients are there."""
        if self.implementation not in ("auto", "fused") or call.closure is None:
            return False
        trained = [p for p in self._params() if p.requires_grad]
        if self.implementation == "auto" and not executors.on_gpu(trained):
            return False
        self._unfused = self._why_not_fused(call, trained)
        if self._unfused is not None and self.implementation == "fused" and self.is_penalised:
            raise RuntimeError(f"implementation = 'fused' cannot make this step: {self._unfused}. Use 'auto'")
        return self._unfused is None

    def _kernels_for(self, step: Step) -> TwoKernels | None:
        assert isinstance(self.method, TraceRatio)
        kernels = TwoKernels.of(step, self.method, self.rule, self.transforms)
        if kernels is None:
            self._unfused = "a gradient or a state does not lie in memory as the kernels read it"
        return kernels

    # Numbers that are none.

    def _nonfinite(self, step: Step, call: Call, around: Surroundings) -> str:
        """What is NaN or infinite, in words; empty where all is well, or where it is not known yet."""
        # All processes must decide the same, and each has a loss of its own.
        alone = processes.count(self.model) == 1
        if step.kernels is not None:
            return self._look_at_kernels(step, step.kernels, around, alone)
        if self.nonfinite == "ignore" or call.scaler is not None or step.stats is None:  # a scaler looks for itself
            return ""
        return step.stats.nonfinite(loss=alone)

    def _look_at_kernels(self, step: Step, kernels: TwoKernels, around: Surroundings, alone: bool) -> str:
        """The same on the device: nobody waits, but in the first step, whose state is not there to be left as it was."""
        reuse = self.reuse if self.is_penalised else None
        kernels.take(*source_of(step, reuse, self.base.state, self.param_groups[0][COUNT] % self.interval))
        if self.nonfinite == "ignore":
            return ""
        healthy = kernels.look(step.loss if alone else None)
        if kernels.found_early(healthy) and not healthy:
            kernels.abandon()
            self.stats = Stats.of_squares(step.loss, kernels.reached, None)
            return self.stats.nonfinite(loss=alone) or "the norm of the penalty's gradient is not finite"
        if around.statistics is not None:
            around.statistics.restore_unless(healthy)
        return ""

    def _raise_if_the_last_step_failed(self) -> None:
        """What the two kernels have found, told by the next step at the latest."""
        verdict, self._verdict = self._verdict, None
        if verdict is None or is_capturing() or verdict.is_healthy:
            return
        for group in self.param_groups:
            group[COUNT] -= 1  # it was counted and not made
        what = (self.stats.nonfinite() if self.stats else "") or "a gradient is not finite"
        raise NonFiniteError(
            f"in the last step {what}: it was not made, weights and state are as they were before it. Lower the "
            "learning rate or rho, or pass nonfinite='skip' to go on without such steps"
        )

    # What is refused.

    def _check_step(self, call: Call) -> None:
        if self._busy:
            raise RuntimeError(
                "step() inside perturbed() or inside a closure: leave it first, the weights are displaced"
            )
        if call.closure is not None and self._pending is not None:
            raise RuntimeError("step(closure) after perturbed(): the passes are made already, call step() alone")
        for group in self.param_groups:
            self._check_group(group)
        if self._verdict is not None:
            self._raise_if_the_last_step_failed()
        if is_capturing():
            self._check_capture()

    def _check_group(self, group: dict[str, Any]) -> None:
        self.method.check_group(self.hyperparameters(group))
        self.rule.check_group(group)

    def _completed(self, group: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
        """The group with the defaults for what it leaves out, checked."""
        complete = defaults | group
        self._check_group(complete)
        for label, p in checks.labelled(complete):
            self._check_parameter(label, p)
        return complete

    def _check_parameter(self, label: str, p: Tensor) -> None:
        """Refuse a parameter that the scheme cannot handle."""
        exact = isinstance(self.method, TraceRatio) and self.method.engine.is_exact
        if p.is_complex():
            raise ValueError(f"{label} is complex ({p.dtype}): squared gradients and sharpness are defined for reals")
        if self.method_compiles and tensors.is_sharded(p):
            raise ValueError(
                f"{label} is sharded (DTensor), and implementation = 'compiled' is for whole tensors: leave it out"
            )
        if exact and p.dtype == torch.float16:
            raise ValueError(f"{label} is {p.dtype}, in which squared gradients underflow: use float32 or bfloat16")
        if not exact and p.is_floating_point() and torch.finfo(p.dtype).bits < 32:
            raise ValueError(
                f"{label} is {p.dtype}, whose rounding swallows the displacement of the second pass: keep the weights "
                "in float32 and let torch.autocast compute in low precision"
            )

    def _check_perturbed(self, scaler: torch.amp.GradScaler | None) -> None:
        why = self.method.needs_closure
        if self._busy:
            raise RuntimeError("perturbed() inside perturbed() or inside a closure: the weights are displaced already")
        if why:
            raise RuntimeError(
                f"perturbed() is the second pass of the finite difference with curvature=gradient_magnitude over the "
                f"whole batch, and {why}: use step(closure), or a TracerPenalty on the loss with any optimiser"
            )
        if scaler is not None and scaler._per_optimizer_states[id(self)]["stage"] is OptState.UNSCALED:
            raise RuntimeError(
                "perturbed(scaler=…) after scaler.unscale_(opt): the gradients would be unscaled twice. Call unscale_ "
                "after the scope, before scaler.step(opt)"
            )
        if self._pending is not None and self._pending.is_abandoned:
            self._pending = None
        pending = self._pending
        if pending is not None and pending.course.place is None and pending.step.due:
            raise RuntimeError("perturbed() again before step(): the passes of this step are made already")

    def _check_pass_in_scope(self, around: Surroundings, entered: RandomState) -> None:
        if not around.reached():
            raise RuntimeError("perturbed() without a backward(): run the same loss again inside the scope")
        if RandomState(around.devices) not in (entered, around.random):
            raise RuntimeError(
                "the pass inside perturbed() drew other random numbers than the first: call the optimiser's "
                "zero_grad() right before the first forward pass, it marks where they begin"
            )

    def _check_graph(self, call: Call) -> None:
        """Refuse what cannot be had of a loss that is differentiated as it is."""
        assert isinstance(self.method, TraceRatio)
        which = f"engine={self.method.engine!r} with curvature={self.method.curvature.numerator!r}"
        if call.parts is not None and not self.method.curvature.is_default:
            raise RuntimeError(
                f"batches with {self.method.curvature}, which looks into one pass over the whole batch: hand it over "
                "as one, step(closure, x, y), or use penalty='each'"
            )
        if processes.are_joined(self.model) and not call.each:
            raise RuntimeError(
                f"{which} on several processes differentiates past DistributedDataParallel, which then averages "
                "nothing: use penalty='each', or the finite difference of gradient_magnitude"
            )
        if call.scaler is not None:
            raise RuntimeError(
                f"a GradScaler with {which}, which differentiate the loss as it is: use torch.bfloat16, or the finite "
                "difference of gradient_magnitude"
            )

    def _check_capture(self) -> None:
        """Refuse to be captured as a CUDA graph where the replay would not be the same step."""
        redrawn = bool(self._draws) and (self.is_central or scopes.twin_of_capture.get() is None)
        reasons = {
            "make a step first, so that all state exists": self._draws is None,
            "its passes draw random numbers (dropout), which a graph draws anew": redrawn,
            f"interval = {self.interval} counts steps outside of the graph, set it to 1": self.interval != self.phases,
            f"nonfinite = {self.nonfinite!r} looks at the numbers, set it to 'ignore'": self.nonfinite != "ignore",
            f"{type(self).__name__} counts steps outside of the graph, pass capturable=True": (
                not self.rule.is_capturable
            ),
        }
        if found := [reason for reason, holds in reasons.items() if holds]:
            raise RuntimeError(f"step() cannot be captured as a CUDA graph: {'; '.join(found)}")

    def _check_capture_of_lr(self) -> None:
        sgd = isinstance(self.base, torch.optim.SGD)
        if sgd and any(torch.is_tensor(group["lr"]) and not group.get("fused") for group in self.param_groups):
            raise RuntimeError("step() cannot be captured as a CUDA graph: SGD reads a tensor lr back, pass fused=True")

    # The posterior that f is the precision of.

    def average_of(self, group: dict[str, Any], params: Tensors) -> Tensors:
        """f of parameters that have been trained before."""
        return self.rule.average_of(group, self.hyperparameters(group), params)

    def sampled_weights(self, *, examples: int | None = None, temperature: float = 1.0) -> AbstractContextManager[None]:
        """Weights drawn from the approximate posterior N(w, s (f + δ)⁻¹) for the time of a `with`.

        Args:
            examples: Size of the training set, for Bayes's posterior: s = 1/examples. Without it s is ρ, the
                temperature that the penalty was trained with.
            temperature: A factor on s. Below 1 the posterior is a cold one.
        """
        return posterior.sampled_weights(self, examples, temperature)

    def predict(
        self,
        model: nn.Module,
        x: Any,
        samples: int = 10,
        *,
        examples: int | None = None,
        temperature: float = 1.0,
        activation: Callable[[Tensor], Tensor] = posterior.probabilities,
    ) -> Tensor:
        """The model's prediction for x, averaged over weights drawn from the posterior; in evaluation mode.

        Args:
            model: Whose weights are optimised here.
            x: What it is called with (a mapping: its keyword arguments).
            samples: Number of draws.
            examples, temperature: As for `sampled_weights`.
            activation: From the model's output to what is averaged: by default logits to probabilities.
        """
        return posterior.predict(self, model, x, samples, examples, temperature, activation)

    @torch.no_grad()
    def _damped_share(self) -> Tensor:
        """Share of the coordinates where δ > f, now."""
        below, size = torch.zeros(()), 0
        for group in self.param_groups:
            trained = [p for p in group["params"] if self.rule.is_trained(p)]
            for f in self.average_of(group, trained) if trained else ():
                below = below + (f < self.hyperparameters(group)["delta"]).sum().cpu()
                size += f.numel()
        return below / size

    def _note_draws(self, around: Surroundings) -> None:
        if not is_capturing():
            self._draws = RandomState(around.devices) != around.random

    def _params(self) -> Tensors:
        return [p for group in self.param_groups for p in group["params"]]

    def _devices(self) -> set[torch.device]:
        return devices_of(self._params())

    # Checkpoints and copies.

    def state_dict(self) -> dict[str, Any]:
        """All that there is, in torch's layout."""
        self._raise_if_the_last_step_failed()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a checkpoint, of this optimiser or of the plain one that it wraps."""
        for group in state_dict["param_groups"]:
            self.rule.check_group({"betas": (0.9, 0.999), "amsgrad": False, **_without(group, "beta")})
        plain = not any(COUNT in group for group in state_dict["param_groups"])
        super().load_state_dict(state_dict)
        trained = any(self.rule.is_trained(p) for p in self.state)
        if plain and self.state and self.rule.keeps_average and not trained:
            warnings.warn(
                f"the state_dict is of a plain optimiser and holds no f: it was taken up, and f starts anew in this "
                f"{type(self).__name__}",
                stacklevel=2,
            )

    def __getstate__(self) -> dict[str, Any]:
        own = ("base", "method", "rule", "transforms", "interval", "reuse", "model", "nonfinite", "implementation")
        return super().__getstate__() | {name: getattr(self, name) for name in (*own, "_keys")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a checkpoint of the plain optimiser knows nothing of ours
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        # `load_state_dict` makes new containers: share them again, and let the base migrate old formats.
        self.base.__setstate__({"state": self.state, "param_groups": self.param_groups})
        self._forget()

    def __repr__(self) -> str:
        hyper = {name: [self.hyperparameters(g)[name] for g in self.param_groups] for name in self._keys}
        told = {name: values[0] if all(v == values[0] for v in values) else values for name, values in hyper.items()}
        own = [f"{name}={value!r}" for name, value in told.items()]
        if isinstance(self.method, TraceRatio):
            own.append(f"engine={self.method.engine!r}")
        own += [f"interval={self.interval}", f"implementation={self.implementation!r}"]
        sizes = [len(group["params"]) for group in self.param_groups]
        groups = f"{len(sizes)} group{'s' * (len(sizes) > 1)} of {', '.join(map(str, sizes))} parameters"
        return f"{type(self).__name__}({type(self.base).__name__}, {', '.join(own)}; {groups})"


def _used(group: dict[str, Any], check: Callable[[str, Tensor], None]) -> Tensors:
    """Those parameters of a group that have a gradient; what is out of the ordinary about them is checked."""
    used: list[Any] = [p for p in group["params"] if p.grad is not None]
    # There are many of them, and almost always nothing is.
    whole = all(p.dtype == torch.float32 and type(p) in (nn.Parameter, Tensor) for p in used)
    if whole and all(p.grad.layout == torch.strided for p in used):
        return used
    for label, p in checks.labelled(group):
        if p.grad is not None:
            check(label, p)
            if p.grad.layout != torch.strided:
                raise RuntimeError(f"{label} has a sparse gradient: use dense ones (Embedding(sparse=False))")
    return used


def _sum_over(closure: Callable[..., Any], parts: Parts) -> Tensor:
    """The whole batch's loss in one graph."""
    total: Tensor = sum((share * closure(*part) for share, part in parts), torch.zeros(()))
    return total


def _no_pass(place: Any) -> Tensors:
    raise AssertionError("no displaced pass was due")


def _check_model(model: nn.Module | None, base: torch.optim.Optimizer) -> None:
    """Refuse a model that has nothing to do with the parameters: its statistics would be frozen for nothing."""
    checks.kind("model", model, (nn.Module, type(None)))
    ours = {p for group in base.param_groups for p in group["params"]}
    if model is not None and not any(p in ours for p in model.parameters()):
        raise ValueError(
            f"model = {type(model).__name__} holds none of the optimiser's parameters: pass the model that they belong to"
        )


def _without(group: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in names}


def check_base(base: Any) -> None:
    """Refuse what cannot be wrapped."""
    checks.kind("base_optimizer", base, torch.optim.Optimizer, ", such as torch.optim.SGD(model.parameters())")
    if isinstance(base, TwoPassOptimizer | torch.optim.LBFGS):
        raise ValueError(
            f"base_optimizer must make one update from one gradient, got {type(base).__name__}: wrap the plain "
            "optimiser instead (for LBFGS, add a TracerPenalty to the loss)"
        )
    if any(COUNT in group for group in base.param_groups):
        raise ValueError(f"base_optimizer is wrapped already, got {type(base).__name__}: make a new one to wrap")
