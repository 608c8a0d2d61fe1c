"""The scheme that TRACER and SAM share: a gradient, further gradients at displaced weights, one update.

What varies is handed over at construction, as small frozen objects: what is added to the gradient (`methods`), the
update and where f is kept (`rules`), what is used between two penalties (`reuse`), what is done to the total before the
update (`transforms`). What a call brings is an argument. Everything that can go wrong between the passes is handled
here, once.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

from gtracer import checks
from gtracer.optim import directions, groups, kernels, loops, masters, posterior, processes, refusals
from gtracer.optim.auto import IS_AUTO, Controller, place_of
from gtracer.optim.caller import Caller
from gtracer.optim.evaluate import Call, Skipped, evaluator_of, penalised
from gtracer.optim.fusion import AT_REST, IMPLEMENTATIONS, Fusion, why_not_fused
from gtracer.optim.methods import Method, TraceRatio
from gtracer.optim.pool import in_parts
from gtracer.optim.reuse import Reuse
from gtracer.optim.rules import Rule
from gtracer.optim.scaler import Held, scale
from gtracer.optim.stats import NonFiniteError, Stats
from gtracer.optim.step import COUNT, Left, Slice, Step, Surroundings, all_or_nothing, combine, surroundings_of
from gtracer.optim.transforms import Clip, Transform
from gtracer.penalty import NONFINITE
from gtracer.scopes import Copies, Signals, is_capturing, uninterrupted
from gtracer.tensors import Tensors

FUSED_ON = {"cuda"}  # devices on which "auto" looks whether the two kernels can make a step


class TwoPassOptimizer(torch.optim.Optimizer):
    """A torch optimiser whose gradients are corrected by gradients at displaced weights.

    It shares `param_groups` and `state` with the optimiser it wraps, so learning-rate schedulers, `state_dict` and
    checkpoints see one optimiser.

    Args:
        defaults: gtracer's entries in every parameter group.
        method: What is added to the gradient.
        rule: Makes the update; its base is the optimiser that is wrapped.
        transforms: Changes to the total before the update.
        interval: Number of steps from one displaced pass to the next.
        reuse: The penalty in the steps between.
        controller: Sets ρ of the groups whose ρ is "auto".
        model: If given, a displaced pass leaves its batch-norm statistics and other buffers unchanged.
        nonfinite: What to do if the loss or a gradient is NaN or infinite: `"raise"`, `"skip"` or `"ignore"`.
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
        checks.choice("implementation", implementation, IMPLEMENTATIONS)
        base = rule.base
        self.base, self.method, self.rule, self.transforms = base, method, rule, transforms
        self.interval, self.reuse, self.model, self.nonfinite = interval, reuse, model, nonfinite
        self.implementation, self.controller = implementation, controller
        self._keys = groups.names_of(defaults, base.defaults)
        self.rho_key = self._keys["rho"]  # public: what ρ is called in the groups
        ours = {self._keys[name]: value for name, value in defaults.items()}
        everything = {**base.defaults, **ours, COUNT: 0}
        for group in base.param_groups:  # all of them before the first is touched
            groups.completed(self, group, everything)
        refusals.check_model(model, base)
        super().__init__(base.param_groups, everything)
        self.param_groups, self.state = base.param_groups, base.state
        if implementation == "fused":
            why = why_not_fused(method, rule, transforms, reuse)
            if why not in (None, AT_REST):
                raise ValueError(f"implementation = 'fused' cannot be: {why}. Use 'auto', which takes the next best")
        self._forget()

    def _forget(self) -> None:
        """Start anew with what is not in the state."""
        # Lightning's and Fabric's wrappers inherit from this class and read the attributes of what they wrap, but what
        # a method writes would stay in the wrapper.
        self._itself = weakref.ref(self)
        self.stats: Stats | None = None
        self.phases = 1  # graphs that whoever captures makes of a step, one for each place in an interval
        self._caller = Caller(self.method, self._params())
        self._left = Left()  # by the last step
        self._fusion = Fusion()
        self._copies = Copies()
        self._held = Held(self)  # one for good: by it a scaler knows what it has unscaled
        self._place = place_of(self)  # of a ρ that lives on the device

    # What everybody may ask.

    def hyperparameters(self, group: dict[str, Any]) -> dict[str, Any]:
        """gtracer's hyper-parameters of a group (`rho` and so on), by their plain names."""
        return {name: group[key] for name, key in self._keys.items()}

    @property
    def second_pass_due(self) -> bool:
        """Whether this step makes a displaced pass: some ρ is above 0, and `interval` says so."""
        if self.reuse is not None and self.reuse.always:
            return False
        penalised = any(group[self.rho_key] > 0 for group in self.param_groups)
        return penalised and self.param_groups[0][COUNT] % self.interval == 0

    @property
    def steps(self) -> int:
        """Number of steps made. Replays of a CUDA graph are not counted; set it after them."""
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
        """Number of steps in an epoch, or None if not given. It can be set later."""
        return None if self.controller is None else self.controller.steps_per_epoch

    @steps_per_epoch.setter
    def steps_per_epoch(self, steps: int | None) -> None:
        if self.controller is not None:
            if steps is not None:
                checks.count("steps_per_epoch", steps)
            self.controller = replace(self.controller, steps_per_epoch=steps)

    @property
    def held_out(self) -> Callable[[], Tensor] | None:
        """For `rho="auto"`: returns the loss of a held-out batch. It can be set before the first step."""
        return None if self.controller is None else self.controller.held_out

    @held_out.setter
    def held_out(self, loss: Callable[[], Tensor] | None) -> None:
        if self.controller is None:
            raise ValueError(f"held_out is for a rho that sets itself, and {type(self).__name__}'s does not")
        self.controller = replace(self.controller, held_out=loss)

    @property
    def held_out_every(self) -> int:
        """Number of steps from one held-out loss to the next."""
        return 0 if self.controller is None else self.controller.looks_every

    @property
    def looks_at_held_out(self) -> bool:
        """Whether the next step computes the held-out loss."""
        return self.controller is not None and self.sets_rho and self.controller.wants_held_out(self.steps)

    @property
    def is_mid_step(self) -> bool:
        """Whether a step has begun and not ended: in its passes, or between `perturbed()` and `step()`."""
        loop = self._caller.loop
        return loop.busy or loop.pending is not None

    @property
    def notes(self) -> tuple[object, ...]:
        """Mutable objects outside of the state that a step changes."""
        return self._fusion, self._caller, self._caller.clipping, self._caller.losses, self._caller.others

    def prepare_capture(self) -> None:
        """Allow steps to be captured as CUDA graphs, one graph for each of `phases` steps.

        `phases` is the `interval`, or with `held_out=` a multiple of it that contains one held-out loss.

        From then on no step checks that its numbers are finite; the code that replays the graphs has to. With
        `rho="auto"`, ρ is on the device and `rho_of` reads it; the groups hold a factor of it.
        """
        looks = self.held_out is not None and self.sets_rho
        self.nonfinite, self.phases = "ignore", math.lcm(self.interval, self.held_out_every if looks else 1)
        if self.controller is not None and self.sets_rho:
            if not all(group.get(IS_AUTO) for group in self.param_groups):
                raise ValueError("rho must be 'auto' or a number in all groups where steps are captured, got both")
            self.controller = replace(self.controller, on_device=True)
            self._place = place_of(self)
            groups.rest_on_device(self)

    def rho_of(self, group: dict[str, Any]) -> float:
        """The current ρ of a group. It waits for the device if ρ is on it."""
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
        """The limits for the gradient of the update, if any."""
        return next((x for x in self.transforms if isinstance(x, Clip)), None)

    @property
    def implementation_used(self) -> str:
        """The implementation that makes the steps, and why it is not a faster one."""
        if self.implementation in ("compiled", "foreach"):
            return self.implementation
        why = self._fusion.obstacle or why_not_fused(
            self.method, self.rule, self.transforms, self.reuse, params=self._params()
        )
        return "fused" if why is None else f"foreach, not fused: {why}"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, at any time. Missing values take the defaults."""
        checks.kind("param_group", param_group, dict)
        new = all(param_group is not group for group in self.base.param_groups)
        if new:
            self.base.add_param_group(param_group)
        try:
            param_group.update(groups.completed(self, param_group, self.defaults))
        except ValueError:
            if new:
                self.base.param_groups.pop()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and mark where the random numbers of a step begin: see `perturbed`."""
        if (itself := self._itself()) is not self and itself is not None:
            itself.zero_grad(set_to_none)
            return
        super().zero_grad(set_to_none)
        if not self._caller.loop.busy:
            self._caller.begin(self._params(), self.model, due=self.second_pass_due)

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
            closure: Computes the loss of one batch and returns it. It may call `zero_grad()` and `backward()` itself.
                Without a closure, the gradients must exist, and if `second_pass_due`, the pass under `perturbed()` must
                have been made.
            *batch: Arguments for the closure.
            batches: Micro-batches: the closure is called with each of them, and the step is that of all of them
                together. Each counts by its number of examples.
            penalty: `"whole"`: of the whole batch, of all micro-batches and all processes. `"each"`: the mean of the
                penalties of the parts. On several processes this takes one exchange of gradients instead of two, and
                `model=` must be the `DistributedDataParallel` module.
            scaler: For float16: scales the loss of every pass. An overflow in any of them skips the step. Call
                `scaler.update()` afterwards, as usual.
        """
        if isinstance(closure, partial):
            closure = loops.closure_of(closure)
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
        """Displace the weights for the second pass, in loops without a closure.

            opt.zero_grad()
            loss_of(batch).backward()
            with opt.perturbed():
                loss_of(batch).backward()
            opt.step()

        Random numbers are replayed from the last `zero_grad()`, so call it right before the first pass. With
        `FiniteDifference(central=True)` a step needs two such scopes. If a step is not `second_pass_due`, the scope
        displaces nothing and drops the gradients computed in it.

        Args:
            loss: The unscaled loss of the first pass, for `stats`. With `held_out=`, ρ moves only if it is given.
            scaler: The scaler that scales the loss of both passes. The resulting gradient is scaled too, so call
                `scaler.unscale_(opt)` and `scaler.step(opt)` as usual.
        """
        if (itself := self._itself()) is not self and itself is not None:
            return itself.perturbed(scaler, loss=loss)
        self._caller.loop.drop_abandoned()
        enabled = scaler if scaler is not None and scaler.is_enabled() else None
        refusals.check_scope(self, enabled)
        return loops.second_pass(self, enabled, loss)

    # A step, straight on.

    def _made(self, call: Call, signals: Signals) -> Step:
        """All of it but the update."""
        caller, due, called = self._caller, self.second_pass_due, call.closure is not None
        several = call.parts is not None or call.each or self.method.parts is not None
        around = surroundings_of(self, signals, begins=called, several=several)
        fuse = self.implementation == "fused" or any(device.type in FUSED_ON for device in around.devices)
        fuse = fuse and self._fusion.takes(self, call, around.params)
        if called and ((due and caller.clipping.asked) or not self._left.is_untouched):
            caller.look(around, self._left, due=due)
        keeps_no_copy = called and (fuse or bool(getattr(self.method, "lean", False)))
        with all_or_nothing(around, anew=keeps_no_copy, checked=self.nonfinite != "ignore"):
            if not called:
                step = loops.passes_made(self)
            elif call.each or self.method.parts is not None:
                step = in_parts(self, call, around)
            else:
                step = penalised(self, evaluator_of(self.method, call, around, self.model, due), call, fuse=fuse)
            if step.kernels is None and step.stats is None:
                self._conclude(step)
            if around.watch is not None:
                caller.clipping.heed(around.watch)
            if not isinstance(step.returned, Tensor | float) and self.sets_rho:
                caller.miss_loss(self)
            if what := self._nonfinite(step, call, around):
                self.stats = step.stats
                raise NonFiniteError(
                    f"{what}: the step was not made, weights and state are as they were. Lower the learning rate or "
                    "rho, or pass nonfinite='skip' to go on without such steps",
                    step.returned,
                )
        if around.seeks and (several or self.model is not None):
            caller.others.note(around)
        if step.random is None and self._left.random is None and not is_capturing():  # whoever drew in it
            step.random = around.random, around.random
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
            verdict = kernels.finish(step, step.kernels, self.base.state)
            self.stats = step.stats
            if verdict is not None:
                self._fusion.verdicts.append(verdict)
        else:
            for transform in self.transforms:
                transform(step, partial(self._damped, step))
            if is_capturing():
                refusals.check_capture_of_lr(self.base)
            narrow = any(p.dtype == torch.bfloat16 for p in step.params)
            with masters.updated(step, self.rule) if narrow else nullcontext():
                self.rule.update(step)
            for note in step.after:
                note(step)
        if self.stats is not None:
            self.stats.set_rho = self.param_groups[0][self.rho_key] * (1 if step.factor is None else step.factor)
            if self.rule.keeps_average:
                self.stats.count_damped = partial(posterior.damped_share, self)
        if self.controller is not None and self.sets_rho:
            self.controller.note(self, step, self._place)
        for group in self.param_groups:
            group[COUNT] += 1
        self._left = self._left.by(step)

    # What it consists of.

    def _nonfinite(self, step: Step, call: Call, around: Surroundings) -> str:
        """What is NaN or infinite, in words; empty where all is well, or where it is not known yet."""
        if self.nonfinite == "ignore" and step.kernels is None:
            return ""
        # All processes must decide the same, and each has a loss of its own.
        several = distributed.is_available() and distributed.is_initialized() and processes.count(self.model) > 1
        if step.kernels is not None:
            return kernels.look(self, step, step.kernels, around, loss=not several)
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

    def _check_step(self, call: Call) -> None:
        """Refuse a step at the wrong moment, or with hyper-parameters out of range."""
        if self._caller.loop.busy:
            raise RuntimeError(
                "step() inside perturbed() or inside a closure: leave it first, the weights are displaced"
            )
        if call.closure is not None and self._caller.loop.pending is not None:
            raise RuntimeError("step(closure) after perturbed(): the passes are made already, call step() alone")
        for group in self.param_groups:
            checks.hyperparameters(self.hyperparameters(group))
            self.rule.check_group(group)
        if is_capturing():
            refusals.check_capture(self)
        elif self._fusion.verdicts:  # whether they have come cannot be asked in a capture
            # With a closure they are waited for after its first pass, which keeps the device busy meanwhile.
            self._fusion.hear(self, waits=call.closure is None)

    @property
    def sets_rho(self) -> bool:
        """Whether ρ of any group sets itself."""
        return any(group.get(IS_AUTO) for group in self.param_groups)

    # The posterior whose precision f is.

    def average_of(self, group: dict[str, Any], params: Tensors) -> Tensors:
        """f of parameters that have been updated."""
        return self.rule.average_of(group, self.hyperparameters(group), params)

    def sampled_weights(self, *, examples: int | None = None, temperature: float = 1.0) -> AbstractContextManager[None]:
        """Replace the weights by a draw from the approximate posterior N(w, s (f + δ)⁻¹), inside a `with`.

        Args:
            examples: Size of the training set, for Bayes's posterior: s = 1/examples. Without it s is ρ, the
                temperature that the penalty was trained with.
            temperature: A factor for s. Below 1 the posterior is cold.
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
        """Predict x with the model in evaluation mode, averaged over weights drawn from the posterior.

        Args:
            model: The model whose weights this optimiser trains.
            x: The model's input; a mapping holds its keyword arguments.
            samples: Number of draws.
            examples, temperature: As for `sampled_weights`.
            activation: Maps the model's output to what is averaged; by default logits to probabilities.
        """
        return posterior.predict(self, model, x, samples, examples, temperature, activation)

    # Checkpoints and copies.

    def state_dict(self) -> dict[str, Any]:
        """The whole state, in torch's layout."""
        self._fusion.hear(self)
        groups.leave_device(self)
        state_dict: dict[str, Any] = super().state_dict()
        for mine, copied in zip(self.param_groups, state_dict["param_groups"], strict=True):
            copied[self.rho_key] = self.rho_of(mine)
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimiser, or of the plain one that it wraps."""
        self.rule.check_checkpoint(state_dict)
        plain = not any(COUNT in group for group in state_dict["param_groups"])
        super().load_state_dict(state_dict)
        masters.load(self, state_dict)
        trained = any(self.rule.is_trained(p) for p in self.state)
        if plain and self.state and self.rule.keeps_average and not trained:
            warnings.warn(
                f"the state_dict is of a plain optimiser and holds no f: it was taken up, and f starts anew in this "
                f"{type(self).__name__}",
                stacklevel=2,
            )

    def __getstate__(self) -> dict[str, Any]:
        own = ("base", "method", "rule", "transforms", "interval", "reuse", "model", "nonfinite", "implementation")
        groups.leave_device(self)
        return super().__getstate__() | {name: getattr(self, name) for name in (*own, "controller", "_keys")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.rho_key = self._keys["rho"]
        for group in self.param_groups:  # a checkpoint of the plain optimiser knows nothing of ours
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            group.update(groups.resolved(self, group))
        groups.rest_on_device(self)
        # `load_state_dict` makes new containers: share them again, and let the base migrate old formats.
        self.base.__setstate__({"state": self.state, "param_groups": self.param_groups})
        self._forget()

    def __repr__(self) -> str:
        return groups.described(self)
