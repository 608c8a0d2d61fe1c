"""The scheme that TRACER and SAM share: a gradient, further gradients at displaced weights, one update.

What varies is handed over at construction, as small frozen objects: what is added to the gradient (`methods`), the
update and where f is kept (`rules`), what is used between two penalties (`reuse`), what is done to the total before the
update (`transforms`). What a call brings is an argument. Everything that can go wrong between the passes is handled
here, once.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

from gtracer import checks, tensors
from gtracer.optim import directions, executors, loops, others, posterior, processes, refusals
from gtracer.optim.auto import AUTO, IS_AUTO, LOG_RHO, Controller, held_out_loss, place_of
from gtracer.optim.evaluate import (
    Call,
    Evaluator,
    First,
    Skipped,
    Surroundings,
    all_or_nothing,
    first_with_graph,
    one_pass,
    pass_in_parts,
    scale,
    sum_over,
)
from gtracer.optim.losses import LOOKED, MOST, Losses
from gtracer.optim.methods import Method, TraceRatio, note_curvature
from gtracer.optim.reuse import Reuse
from gtracer.optim.rules import Rule
from gtracer.optim.stats import Stats, Verdict
from gtracer.optim.step import COUNT, Slice, Step, combine, drive
from gtracer.optim.transforms import Clip, Transform
from gtracer.optim.watch import CLIPPED, Probe, Watch
from gtracer.penalty import NONFINITE
from gtracer.scopes import Copies, RandomState, Signals, have_moved, is_capturing, uninterrupted
from gtracer.tensors import Tensors

FUSED_ON = {"cuda"}  # devices on which "auto" looks whether the two kernels can make a step


class NonFiniteError(FloatingPointError):
    """A loss or gradient was NaN or infinite; nothing was updated.

    Args:
        message: What was not finite.
        loss: The step's, as the closure gave it.
    """

    def __init__(self, message: str, loss: Any = None) -> None:
        super().__init__(message)
        self.loss = loss


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
        controller: Sets ρ of the groups whose ρ is "auto".
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
        controller: Controller | None = None,
        model: nn.Module | None = None,
        nonfinite: str = "raise",
        implementation: str = "auto",
    ) -> None:
        checks.count("interval", interval)
        checks.kind("model", model, (nn.Module, type(None)))
        checks.choice("nonfinite", nonfinite, NONFINITE)
        checks.choice("implementation", implementation, executors.IMPLEMENTATIONS)
        base = rule.base
        self.base, self.method, self.rule, self.transforms = base, method, rule, transforms
        self.interval, self.reuse, self.model, self.nonfinite = interval, reuse, model, nonfinite
        self.implementation, self.controller = implementation, controller
        # Adadelta has a `rho` of its own; ours then goes by `gtracer_rho` in the groups.
        self._keys = {name: f"gtracer_{name}" if name in base.defaults else name for name in defaults}
        self.rho_key = self._keys["rho"]  # public: what ρ is called in the groups
        ours = {self._keys[name]: value for name, value in defaults.items()}
        everything = {**base.defaults, **ours, COUNT: 0}
        for group in base.param_groups:  # all of them before the first is touched
            self._completed(group, everything)
        refusals.check_model(model, base)
        super().__init__(base.param_groups, everything)
        self.param_groups, self.state = base.param_groups, base.state
        if implementation == "fused" and (why := self._why_not_fused()) not in (None, executors.AT_REST):
            raise ValueError(f"implementation = 'fused' cannot be: {why}. Use 'auto', which takes the next best")
        self._forget()

    def _forget(self) -> None:
        """Start anew with what is not in the state."""
        # Lightning's and Fabric's wrappers inherit from this class and read the attributes of what they wrap, but what
        # a method writes would stay in the wrapper.
        self._itself = weakref.ref(self)
        self.stats: Stats | None = None
        self.phases = 1  # graphs that whoever captures makes of a step, one for each place in an interval
        self._replays: bool | None = None  # random numbers of Python and NumPy, where the closure draws any
        self._looks = LOOKED  # steps in which the losses of both passes are still compared
        self._doubt: Verdict | None = None  # whether those of the last step fit, where it is not known yet
        self._loop = loops.Loop(RandomState(self._devices(), others=True))
        self._drawn: tuple[RandomState, RandomState] | None = None  # random numbers before and after a first pass
        self._verdicts: list[Verdict] = []  # on the last steps of the two kernels, on their way from the device
        self._unfused: str | None = None  # why the last step on a GPU was not that of the two kernels
        self._copies = Copies()
        self._held = Held(self)
        self._seeks = True  # whether the loss may reach parameters that are neither ours nor the model's
        # Whether it is still to be seen what the caller does with gradients between passes. SAM's direction has no
        # length, and its total is the second gradient: as it is clipped or scaled.
        self._watches = isinstance(self.method, TraceRatio)
        self._watch: Watch | None = None  # of a loop of the caller's own
        self._unclipped: Verdict | None = None  # of the last step, where the caller writes into gradients
        self._small: Tensor | None = None  # the smallest parameter that is trained
        self._left: tuple[Tensor | None, int] = None, 0  # its gradient, as the last step has left it
        self._others: others.Memory | None = None  # what was found of them where no model tells
        self._place = place_of(self)  # of a ρ that lives on the device

    # What everybody may ask.

    def hyperparameters(self, group: dict[str, Any]) -> dict[str, Any]:
        """What this scheme keeps in a group (`rho` and so on), by its plain name."""
        return {name: group[key] for name, key in self._keys.items()}

    @property
    def second_pass_due(self) -> bool:
        """Whether this step wants a displaced pass (ρ > 0 somewhere, and `interval` has come round)."""
        if self.reuse is not None and self.reuse.always:
            return False
        penalised = any(group[self.rho_key] > 0 for group in self.param_groups)
        return penalised and self.param_groups[0][COUNT] % self.interval == 0

    @property
    def steps(self) -> int:
        """How many steps have been made; the replays of a CUDA graph are not counted, but can be told."""
        count: int = self.param_groups[0][COUNT]
        return count

    @steps.setter
    def steps(self, made: int) -> None:
        if isinstance(made, bool) or not isinstance(made, int) or made < 0:
            raise ValueError(f"steps must be a whole number of at least 0, got {made!r}")
        for group in self.param_groups:
            group[COUNT] = made

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps until an example comes back, where that was said; may be set by whoever comes to know it."""
        return None if self.controller is None else self.controller.steps_per_epoch

    @steps_per_epoch.setter
    def steps_per_epoch(self, steps: int | None) -> None:
        if self.controller is not None:
            if steps is not None:
                checks.count("steps_per_epoch", steps)
            self.controller = replace(self.controller, steps_per_epoch=steps)

    def prepare_capture(self) -> None:
        """Allow steps to be captured as CUDA graphs, one graph for each of `interval` steps.

        From then on no step looks whether its numbers are finite: whoever replays has to. A ρ that sets itself lives on
        the device, where `rho_of` reads it; the groups hold the number that is multiplied there.
        """
        self.nonfinite, self.phases = "ignore", self.interval
        if self.controller is not None and self.sets_rho:
            if not all(group.get(IS_AUTO) for group in self.param_groups):
                raise ValueError("rho must be 'auto' or a number in all groups where steps are captured, got both")
            self.controller = replace(self.controller, on_device=True)
            self._place = place_of(self)
            self._rest_on_device()

    def rho_of(self, group: dict[str, Any]) -> float:
        """ρ of a group, as now in force; it waits for the device where ρ lives there."""
        if self._place is None or self.controller is None or not group.get(IS_AUTO):
            rho: float = group[self.rho_key]
            return rho
        log_rho, count = self._place.tolist()
        return self.controller.rho(log_rho, count)

    @property
    def is_central(self) -> bool:
        """Whether a due step makes two displaced passes, one to either side."""
        return self.method.central

    @property
    def clip(self) -> Transform | None:
        """The bounds for the gradient of the update, if there are any."""
        return next((x for x in self.transforms if isinstance(x, Clip)), None)

    @property
    def implementation_used(self) -> str:
        """What makes the steps, and why not something faster."""
        if self.implementation in ("compiled", "foreach"):
            return self.implementation
        why = self._unfused or self._why_not_fused(params=self._params())
        return "fused" if why is None else f"foreach, not fused: {why}"

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
        if (itself := self._itself()) is not self and itself is not None:
            itself.zero_grad(set_to_none)
            return
        super().zero_grad(set_to_none)
        if not self._loop.busy:
            due = self.second_pass_due
            self._loop = loops.Loop(RandomState(self._devices(), others=due and self._replays is not False))
            if due and self._watches:
                self._begin_watch()

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
        with uninterrupted() as signals, torch.no_grad():  # whose way in and out no Ctrl-C may meet
            try:
                step = self._made(call, signals)
            except NonFiniteError as error:
                if self.nonfinite == "raise":
                    raise
                return error.loss
            except Skipped:
                return None
            if call.scaler is None:
                self._apply(step)
            else:
                scale(step.params, call.scaler)
                call.scaler.step(self._held, partial(self._apply, step))  # type: ignore[arg-type]
        return step.returned

    def perturbed(
        self, scaler: torch.amp.GradScaler | None = None, *, loss: Tensor | None = None
    ) -> AbstractContextManager[None]:
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
            loss: Of the first pass, not scaled, for `stats`. With `held_out=` ρ moves only where it is known.
            scaler: Where both passes scale their loss by it. The gradient that is left is scaled too, for
                `scaler.unscale_(opt)` and `scaler.step(opt)` to find it as ever.
        """
        if (itself := self._itself()) is not self and itself is not None:
            return itself.perturbed(scaler, loss=loss)
        self._loop.drop_abandoned()
        refusals.check_scope(self, scaler)
        return loops.second_pass(self, scaler if scaler is not None and scaler.is_enabled() else None, loss)

    # A step, straight on.

    def _made(self, call: Call, signals: Signals) -> Step:
        """All of it but the update."""
        several = call.parts is not None or call.each or self.method.parts is not None
        around = self._surroundings(signals, begins=call.closure is not None, several=several)
        sought = around.seeks
        if call.closure is not None:
            if self._watches and self.second_pass_due:
                refusals.check_scaler()
                around.watch = self._begin_watch()
            small, (left, version) = self._small, self._left
            if small is None or ((g := small.grad) is not None and (g is not left or g._version != version)):
                around.probe = self._probe_of(around.params)
        possible = any(device.type in FUSED_ON for device in around.devices)
        fuse = (possible or self.implementation == "fused") and self._fuses(call, around)
        anew = call.closure is not None and (fuse or bool(getattr(self.method, "lean", False)))
        with self._passes(around, anew=anew):
            if call.closure is None:
                step = loops.passes_made(self)
            elif self.method.parts is None and not call.each:
                step = self._penalised(self._evaluator(call, around), call, fuse=fuse)
            else:
                step = executors.in_parts(self, call, around)
            if step.kernels is None and step.stats is None:
                self._conclude(step)
            if around.watch is not None:
                self._heed(around.watch, step)
            if what := self._nonfinite(step, call, around):
                self.stats = step.stats
                raise NonFiniteError(
                    f"{what}: the step was not made, weights and state are as they were. Lower the learning rate or "
                    "rho, or pass nonfinite='skip' to go on without such steps",
                    step.returned,
                )
        if sought and self.model is not None:  # which may hold all that the loss reaches
            self._seeks = len(around.others) > around.in_model
        elif sought and several:  # known beforehand, they keep what they had
            self._others = others.remembered(around.others)
        if self._drawn is None and not is_capturing():  # a step has been made, whoever drew in it
            self._drawn = around.random, around.random
        return step

    def _penalised(
        self,
        evaluator: Evaluator,
        call: Call,
        *,
        fuse: bool = False,
        start: dict[Tensor, Tensor] | None = None,
    ) -> Step:
        """Both passes over a batch, or over a part of it."""
        with nullcontext() if self.reuse is None else self.reuse.first_pass(self._whole_groups(), self.base.state):
            found = evaluator.first()
        if self._replays is None and evaluator.due and (others := evaluator.around.random.others) is not None:
            self._replays = have_moved(others)
        step = self._begin(found if isinstance(found, First) else First(found), evaluator.due, start)
        if self.controller is not None and self.controller.held_out is not None:
            self._look_at_held_out_data(step, evaluator.around)
        if fuse and isinstance(self.method, TraceRatio) and step.slices:
            step.kernels = executors.TwoKernels.of(step, self.method, self.rule, self.transforms)
            if step.kernels is None:
                self._unfused = "a gradient or a state does not lie in memory as the kernels read it"
        if step.kernels is not None:
            passes = step.kernels.passes() if step.due else None
        else:
            passes = self.method.passes(step, self.rule, safely=call.scaler is not None and self.model is None)
        if step.evaluation is not None:
            step.drop_graph()
        losses = self._losses_of(step, evaluator, call) if self._looks and step.due else None
        step.penalty = drive(passes, partial(evaluator.at if losses is None else losses.at, step.params))
        if losses is not None:
            goes_on, self._doubt = losses.check()
            self._looks *= goes_on
        step.renewed = step.penalty is not None
        if not is_capturing():
            begun = evaluator.around.random
            self._drawn = begun, evaluator.around.drawn or begun
        return step

    def _look_at_held_out_data(self, step: Step, around: Surroundings) -> None:
        """Its loss at the weights of the step, where ρ sets itself and wants it."""
        wanted = self.controller is not None and self.controller.wants_held_out(self.param_groups[0][COUNT])
        if self.controller is not None and wanted and self.sets_rho:
            step.held_out = held_out_loss(self.controller, around)

    def _begin(self, found: First, due: bool, start: dict[Tensor, Tensor] | None = None) -> Step:
        """Collect the gradients of the first pass."""
        slices = []
        for group in self.param_groups:
            if params := _used(group, self.method):
                gradients = tensors.kept([p.grad for p in params if p.grad is not None])
                F = None if start is None else [start[p] for p in params]
                slices.append(Slice(group, self.hyperparameters(group), params, gradients, start=F))
        returned = found.returned.detach() if isinstance(found.returned, Tensor) else found.returned
        step = Step(slices, returned, due=due and bool(slices), evaluation=found.evaluation)
        if self.sets_rho and self.controller is not None:
            step.most = self.controller.most
            step.factor = None if self._place is None else self.controller.factor(self._place)
        if found.measured is not None:
            note_curvature(step, found.measured)
        if found.compared is not None:
            step.compared = [found.compared.get(p, torch.zeros_like(p)) for p in step.params]
        return step

    def _conclude(self, step: Step) -> None:
        """From the passes to the gradient of the update."""
        if step.rows:
            directions.turn_penalty_(step)
            step.after.append(partial(directions.note, self.base.state))
        if self.reuse is not None and step.penalty is None and any(part.hyper["rho"] for part in step.slices):
            step.penalty = self.reuse.recall(step, self.base.state, self.param_groups[0][COUNT] % self.interval)
        combine(step)
        self.stats = step.stats
        if self.reuse is not None:  # before clipping
            self.reuse.note(step, self.base.state, self._damped)

    def _apply(self, step: Step) -> None:
        """Move the weights, and write the state, last."""
        if step.kernels is not None:
            verdict = executors.finish(step, step.kernels, self.base.state)
            self.stats = step.stats
            if verdict is not None:
                self._verdicts.append(verdict)
        else:
            for transform in self.transforms:
                transform(step, partial(self._damped, step))
            if is_capturing():
                refusals.check_capture_of_lr(self.base)
            self.rule.update(step)
            for note in step.after:
                note(step)
        if self.stats is not None:
            self.stats.set_rho = self.param_groups[0][self.rho_key] * (1 if step.factor is None else step.factor)
        if self.controller is not None and self.sets_rho:
            self.controller.note(self, step, self._place)
        for group in self.param_groups:
            group[COUNT] += 1
        if self.stats is not None and self.rule.keeps_average:
            self.stats.count_damped = self._damped_share
        if self._small is None:
            self._small = min(step.params, key=Tensor.numel, default=None)
        if self._small is not None and (left := self._small.grad) is not None:
            self._left = left, left._version

    # What it consists of.

    @contextmanager
    def _passes(self, around: Surroundings, *, anew: bool = False) -> Iterator[None]:
        """Where passes are made: nobody else's step, and all or nothing."""
        # The device waits for the copy of the statistics: in a step that keeps no copies nothing but a closure that
        # fails could want it, and what fails in a capture has changed nothing yet.
        statistics = not (is_capturing() or (anew and self.nonfinite == "ignore"))
        loop = self._loop
        loop.busy = True
        try:
            with all_or_nothing(around, anew=anew, statistics=statistics):
                yield
        finally:
            loop.busy = False
            if self._watch is not None and around.begins:
                self._watch.remove()

    def _losses_of(self, step: Step, evaluator: Evaluator, call: Call) -> Losses | None:
        """Look at the losses of this step, where they can be told from each other."""
        method = self.method
        if not isinstance(method, TraceRatio) or not method.is_plain or call.each or step.compared is not None:
            return None
        if is_capturing() or processes.count(self.model) > 1 or sum(map(Tensor.numel, step.params)) > MOST:
            return None
        self._looks -= 1
        doubted = self._doubt is not None and self._doubt.is_there and not self._doubt.is_healthy
        return Losses(step, evaluator, method.radius, lambda: method._aim(step, self.rule)[0], doubted=doubted)

    def _begin_watch(self) -> Watch | None:
        """Look at what the caller's code does with gradients, until a step of two passes has shown that."""
        if self._watch is not None:
            self._watch.remove()
            self._watch = None
        # Of several processes each writes the mean into what backward() has left.
        if not is_capturing() and processes.count(self.model) == 1:
            self._hear_clipping()
            self._watch = Watch(self._params())
        return self._watch

    def _heed(self, watch: Watch, step: Step) -> None:
        """Refuse gradients that were clipped pass by pass; where nobody writes into them, look no further."""
        watch.remove()
        self._watch = None
        if watch.has_compared and watch.has_written:
            waits, self._unclipped = self._unclipped is None, watch.verdict()
            if waits:
                self._hear_clipping()
        else:
            self._watches = False

    def _hear_clipping(self) -> None:
        """What was found in the last step; only in the first somebody waits for it."""
        if self._unclipped is not None and not self._unclipped.is_healthy:
            self._unclipped = None
            raise RuntimeError(CLIPPED)

    def _probe_of(self, params: Tensors) -> Probe | None:
        """Look at gradients that nobody here has left; they will be forgotten."""
        found = next((p for p in params if p.grad is not None and not tensors.is_sharded(p)), None)
        return None if found is None or is_capturing() else Probe(found)

    def _surroundings(self, signals: Signals, *, begins: bool = False, several: bool = False) -> Surroundings:
        """What passes find; random numbers begin here, or where the loop has marked it."""
        params = [p for group in self.param_groups for p in group["params"]]
        devices = {p.device for p in params}
        due = self.second_pass_due
        start = RandomState(devices, others=due and self._replays is not False) if begins else self._loop.mark
        around = Surroundings(params, devices, self.model, self._copies, start, begins, signals)
        if several or due:  # a step of one pass leaves others what it should
            around.seeks = self._seeks
            if self.model is not None:
                around.others = others.in_model(self.model, params)
                around.in_model = len(around.others)
            elif several:
                around.others = others.recalled(self._others or (), params)
        return around

    def _evaluator(self, call: Call, around: Surroundings, *, due: bool | None = None) -> Evaluator:
        """How this batch's passes are made."""
        due = self.second_pass_due if due is None else due
        method, closure = self.method, call.closure
        assert closure is not None
        if method.needs_graph and isinstance(method, TraceRatio):
            refusals.check_graph(method, self.model, call)
            loss_of = call.loss_of_batch if call.parts is None else partial(sum_over, closure, call.parts, self.model)
            first = partial(first_with_graph, loss_of, around, method, due)
            return Evaluator(around, due, first, partial(one_pass, loss_of, around), self.is_central)
        if (own := getattr(getattr(method, "engine", None), "evaluator", None)) is not None:
            made: Evaluator = own(call, around, due)
            return made
        one: Callable[[], Any] = partial(one_pass, partial(closure, *call.batch), around, call.scaler)
        if call.parts is not None:
            one = partial(pass_in_parts, closure, call.parts, around, call.scaler)
        return Evaluator(around, due, one, one, method.central)

    def _nonfinite(self, step: Step, call: Call, around: Surroundings) -> str:
        """What is NaN or infinite, in words; empty where all is well, or where it is not known yet."""
        if self.nonfinite == "ignore" and step.kernels is None:
            return ""
        # All processes must decide the same, and each has a loss of its own.
        several = distributed.is_available() and distributed.is_initialized() and processes.count(self.model) > 1
        if step.kernels is not None:
            return executors.look(self, step, step.kernels, around, loss=not several)
        if call.scaler is not None or step.stats is None:  # a scaler looks for itself
            return ""
        return step.stats.nonfinite(loss=not several)

    def _damped(self, step: Step, part: Slice) -> tuple[Tensors, float]:
        """f of a slice, and the δ that is still to be added to it."""
        assert isinstance(self.method, TraceRatio)
        return self.method.damped(step, self.rule, part)

    def _whole_groups(self) -> list[Slice]:
        """The groups as slices, whose gradients are still to be filled in."""
        return [Slice(group, self.hyperparameters(group), group["params"], []) for group in self.param_groups]

    def _params(self) -> Tensors:
        return [p for group in self.param_groups for p in group["params"]]

    def _devices(self) -> set[torch.device]:
        return {p.device for p in self._params()}

    def _fuses(self, call: Call, around: Surroundings) -> bool:
        """Whether this step is to be that of the two kernels, as far as can be told before its gradients are there."""
        if self.implementation not in ("auto", "fused") or call.closure is None:
            return False
        self._unfused = self._why_not_fused(call, [p for p in around.params if p.requires_grad])
        penalised = any(group[self.rho_key] > 0 for group in self.param_groups)
        if self._unfused is not None and self.implementation == "fused" and penalised:
            raise RuntimeError(f"implementation = 'fused' cannot make this step: {self._unfused}. Use 'auto'")
        return self._unfused is None

    def _why_not_fused(self, call: Call | None = None, params: Tensors = ()) -> str | None:
        return executors.why_not_fused(self.method, self.rule, self.transforms, self.reuse, call, params)

    def _check_step(self, call: Call) -> None:
        """Refuse a step at the wrong moment, or with hyper-parameters out of range."""
        if self._loop.busy:
            raise RuntimeError(
                "step() inside perturbed() or inside a closure: leave it first, the weights are displaced"
            )
        if call.closure is not None and self._loop.pending is not None:
            raise RuntimeError("step(closure) after perturbed(): the passes are made already, call step() alone")
        for group in self.param_groups:
            checks.hyperparameters(self.hyperparameters(group))
            self.rule.check_group(group)
        if is_capturing():
            refusals.check_capture(self)
        elif self._verdicts:  # whether they have come cannot be asked in a capture
            self._hear_verdicts()

    def _completed(self, group: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
        """The group with the defaults for what it leaves out, checked."""
        complete = self._resolved(defaults | group)
        checks.hyperparameters(self.hyperparameters(complete))
        self.rule.check_group(complete)
        refusals.check_initialised(complete["params"])
        for label, p in checks.labelled(complete):
            if p.requires_grad:  # a frozen one may be of any kind; trained later, it is looked at then
                refusals.check_parameter(self.method, label, p)
        return complete

    def _resolved(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group with a number for a ρ that sets itself."""
        key = self.rho_key
        if group[key] != AUTO:
            return group
        if self.controller is None:
            raise ValueError(
                f"rho = 'auto' is for TRACER, and {type(self).__name__}'s rho is another quantity: pass a number, "
                "such as 0.05, or let gtracer.find_rho find one"
            )
        return group | {key: 0.0, IS_AUTO: True}

    @property
    def sets_rho(self) -> bool:
        """Whether ρ of any group sets itself."""
        return any(group.get(IS_AUTO) for group in self.param_groups)

    def _rest_on_device(self) -> None:
        """Where ρ lives on the device, let the groups hold the number that is multiplied there."""
        for group in self.param_groups:
            if self.controller is not None and self.controller.on_device and group.get(IS_AUTO):
                group[self.rho_key] = self.controller.start

    def _leave_device(self) -> None:
        """Where ρ lives on the device, tell the groups how far it has come."""
        for group in self.param_groups:
            if self._place is not None and group.get(IS_AUTO):
                group[LOG_RHO] = self._place[0].item()

    def _hear_verdicts(self) -> None:
        """What the two kernels have found in the last steps; only `nonfinite="raise"` waits for it."""
        waits = self.nonfinite == "raise"
        heard = [verdict for verdict in self._verdicts if waits or verdict.is_there]
        self._verdicts = [verdict for verdict in self._verdicts if verdict not in heard]
        failed = sum(not verdict.is_healthy for verdict in heard)
        for group in self.param_groups:
            group[COUNT] -= failed  # they were counted and not made
        if failed and waits:
            what = (self.stats.nonfinite() if self.stats else "") or "a gradient is not finite"
            raise NonFiniteError(
                f"in the last step {what}: the update was not made. Lower the learning rate or rho, or pass "
                "nonfinite='skip' to go on without such steps"
            )

    # The posterior whose precision f is.

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

    # Checkpoints and copies.

    def state_dict(self) -> dict[str, Any]:
        """All that there is, in torch's layout."""
        self._hear_verdicts()
        self._leave_device()
        state_dict: dict[str, Any] = super().state_dict()
        for mine, copied in zip(self.param_groups, state_dict["param_groups"], strict=True):
            copied[self.rho_key] = self.rho_of(mine)
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up a checkpoint, of this optimiser or of the plain one that it wraps."""
        self.rule.check_checkpoint(state_dict)
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
        own = (
            "base",
            "method",
            "rule",
            "transforms",
            "interval",
            "reuse",
            "model",
            "nonfinite",
            "implementation",
            "controller",
        )
        self._leave_device()
        return super().__getstate__() | {name: getattr(self, name) for name in (*own, "_keys")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.rho_key = self._keys["rho"]
        for group in self.param_groups:  # a checkpoint of the plain optimiser knows nothing of ours
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            group.update(self._resolved(group))
        self._rest_on_device()
        # `load_state_dict` makes new containers: share them again, and let the base migrate old formats.
        self.base.__setstate__({"state": self.state, "param_groups": self.param_groups})
        self._forget()

    def __repr__(self) -> str:
        hyper = {name: [repr(self.hyperparameters(g)[name]) for g in self.param_groups] for name in self._keys}
        for i, group in enumerate(self.param_groups):
            if group.get(IS_AUTO):
                hyper["rho"][i] = f"'auto' (now {self.rho_of(group):.3g})"
        own = []
        for name, values in hyper.items():
            own.append(f"{name}={values[0] if len(set(values)) == 1 else '[' + ', '.join(values) + ']'}")
        if isinstance(self.method, TraceRatio):
            own.append(f"engine={self.method.engine!r}")
        own += [f"interval={self.interval}", f"implementation={self.implementation!r}"]
        sizes = [len(group["params"]) for group in self.param_groups]
        groups = f"{len(sizes)} group{'s' * (len(sizes) > 1)} of {', '.join(map(str, sizes))} parameters"
        return f"{type(self).__name__}({type(self.base).__name__}, {', '.join(own)}; {groups})"


def _used(group: dict[str, Any], method: Method) -> Tensors:
    """Those parameters of a group that have a gradient; what is out of the ordinary about them is checked."""
    used: list[Any] = [p for p in group["params"] if p.grad is not None]
    # There are many of them, and almost always nothing is.
    whole = all(p.dtype == torch.float32 and type(p) in (nn.Parameter, Tensor) for p in used)
    if whole and all(p.grad.layout == torch.strided for p in used):
        return used
    for label, p in checks.labelled(group):
        if p.grad is not None:
            refusals.check_parameter(method, label, p)
            if p.grad.layout != torch.strided:
                raise RuntimeError(f"{label} has a sparse gradient: use dense ones (Embedding(sparse=False))")
    return used
