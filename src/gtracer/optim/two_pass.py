"""The scheme that TRACER and SAM share: a gradient, further gradients at displaced weights, one update.

A subclass says which displaced passes it wants and what they add to the gradient (`_plan`), and what
it learns from the gradient of the loss (`_learn`). Everything that can go wrong between the passes
is handled here, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gtracer import checks, scopes, tensors
from gtracer.optim.parts import gradients_of, kept
from gtracer.optim.stats import Stats
from gtracer.optim.trial import Plan, Slice, Trial, used_of
from gtracer.penalty import NONFINITE, check_loss
from gtracer.scopes import Copies, RandomState, displaced, frozen_statistics, is_capturing, replayed_random
from gtracer.tensors import Tensors

STEP = "gtracer_step"  # in the groups, so that state_dict has it


class NonFiniteError(FloatingPointError):
    """A loss or gradient was NaN or infinite; nothing was updated."""


class TwoPassOptimizer(torch.optim.Optimizer):
    """A torch optimiser that is fed gradients corrected by gradients at displaced weights.

    It shares `param_groups` and `state` with the optimiser it wraps, so learning-rate schedulers,
    `state_dict` and checkpoints see one optimiser.

    Args:
        base: The optimiser that makes the update.
        defaults: What this scheme adds to every parameter group.
        interval: Make the displaced pass only every so many steps.
        model: Where batch-norm statistics and other buffers live. With it, a displaced pass leaves them alone.
        nonfinite: What to do about a NaN or infinite loss or gradient: `"raise"`; `"skip"` the step; `"ignore"`,
            which does not look and so never waits for the device.
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        defaults: dict[str, Any],
        *,
        interval: int = 1,
        model: nn.Module | None = None,
        nonfinite: str = "raise",
    ) -> None:
        checks.kind("base_optimizer", base, torch.optim.Optimizer, ", such as torch.optim.SGD(model.parameters())")
        if isinstance(base, TwoPassOptimizer | torch.optim.LBFGS):
            raise ValueError(
                f"base_optimizer must make one update from one gradient, got {type(base).__name__}: wrap the plain "
                "optimiser instead (for LBFGS, add a TracerPenalty to the loss)"
            )
        if any(STEP in group for group in base.param_groups):
            raise ValueError(f"base_optimizer is wrapped already, got {type(base).__name__}: make a new one to wrap")
        checks.count("interval", interval)
        checks.kind("model", model, (nn.Module, type(None)))
        checks.choice("nonfinite", nonfinite, NONFINITE)
        self.base = base
        self.interval = interval
        self.model = model
        self.nonfinite = nonfinite
        # Adadelta has a `rho` of its own; ours then goes by `gtracer_rho` in the groups.
        self._keys = {name: f"gtracer_{name}" if name in base.defaults else name for name in defaults}
        ours = {self._keys[name]: value for name, value in defaults.items()}
        everything = {**base.defaults, **ours, STEP: 0}
        for group in base.param_groups:  # all of them before the first is touched
            self._completed(group, everything)
        super().__init__(base.param_groups, everything)
        self.param_groups, self.state = base.param_groups, base.state
        self._forget()

    def _forget(self) -> None:
        self.stats: Stats | None = None
        self._trial: Trial | None = None
        self._busy = False
        self._copies = Copies()
        self._random = RandomState(self._devices())
        self._draws: bool | None = None  # whether a pass draws random numbers, once a step has shown it

    # What a subclass provides.

    def _plan(self, slices: list[Slice], due: bool) -> Plan:
        """The displaced passes of this step; their result is what is added to the gradient."""
        raise NotImplementedError

    def _learn(self, slices: list[Slice]) -> None:
        """Take up the gradient of the loss after the update."""

    def _check_group(self, group: dict[str, Any]) -> None:
        """Refuse a group with a value out of range."""
        checks.number("rho", self.knobs(group)["rho"], low=0)

    def _check_parameter(self, label: str, p: Tensor) -> None:
        """Refuse a parameter that the scheme cannot handle."""
        if p.is_complex():
            raise ValueError(f"{label} is complex ({p.dtype}): squared gradients and sharpness are defined for reals")
        if p.is_floating_point() and torch.finfo(p.dtype).bits < 32:
            raise ValueError(
                f"{label} is {p.dtype}, whose rounding swallows the displacement of the second pass: keep the weights "
                "in float32 and let torch.autocast compute in low precision"
            )

    # The optimiser's own surface.

    def knobs(self, group: dict[str, Any]) -> dict[str, Any]:
        """What this scheme keeps in a group (`rho` and so on), by its plain name."""
        return {name: group[key] for name, key in self._keys.items()}

    @property
    def rho_key(self) -> str:
        """What ρ is called in the groups: `rho`, unless the base optimiser has one of its own."""
        return self._keys["rho"]

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

    def _completed(self, group: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
        """The group with the defaults for what it leaves out, checked."""
        complete = defaults | group
        self._check_group(complete)
        for label, p in checks.labelled(complete):
            self._check_parameter(label, p)
        return complete

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. It also marks where the random numbers of a step begin: see `perturbed`."""
        super().zero_grad(set_to_none)
        if not self._busy:
            self._trial = None
            self._random = RandomState(self._devices())

    @property
    def second_pass_due(self) -> bool:
        """Whether this step wants a displaced pass (ρ > 0 somewhere, and `interval` has come round)."""
        strong = any(group[self.rho_key] > 0 for group in self.param_groups)
        return strong and self.param_groups[0][STEP] % self.interval == 0

    @torch.no_grad()
    def step(self, closure: Callable[..., Any] | None = None, *batch: Any) -> Any:
        """Make one step; return the plain loss at the old weights."""
        if self._busy:
            raise RuntimeError(
                "step() inside perturbed() or inside a closure: leave it first, the weights are displaced"
            )
        if closure is not None and self._trial is not None:
            raise RuntimeError("step(closure) after perturbed(): the passes are made already, call step() alone")
        for group in self.param_groups:
            self._check_group(group)
        if is_capturing():
            self._check_capture()
        random = RandomState(self._devices())
        if closure is not None:
            self._random = random
        loss = None
        try:
            with self._all_or_nothing(random, anew=self.lean and closure is not None):
                if closure is None:
                    trial = self._passes_made()
                else:
                    loss, trial = self._make_passes(closure, batch)
                self.stats = trial.stats
                self._require_finite(trial)
        except NonFiniteError:
            if self.nonfinite == "raise":
                raise
        else:
            self._update(trial)
        return loss.detach() if isinstance(loss, Tensor) else loss

    @contextmanager
    def perturbed(self) -> Iterator[None]:
        """Weights displaced for the second pass, in loops that cannot hand over a closure."""
        if self._busy:
            raise RuntimeError("perturbed() inside perturbed() or inside a closure: the weights are displaced already")
        self._drop_abandoned()
        if self._trial is not None and self._trial.penalised and self._trial.displacement is None:
            raise RuntimeError("perturbed() again before step(): the passes of this step are made already")
        entered = RandomState(self._devices())
        with self._all_or_nothing(entered), torch.no_grad():
            trial = self._trial or self._begin(None)
            if not trial.params:
                raise RuntimeError("perturbed() before backward(): no parameter of the optimiser has a gradient")
            with self._displaced_pass(trial):
                with torch.enable_grad():
                    yield
                if all(p.grad is None for p in trial.params):
                    raise RuntimeError("perturbed() without a backward(): run the same loss again inside the scope")
                if RandomState(self._devices()) not in (entered, self._random):
                    raise RuntimeError(
                        "the pass inside perturbed() drew other random numbers than the first: call the optimiser's "
                        "zero_grad() right before the first forward pass, it marks where they begin"
                    )
            if trial.displacement is None:
                self._conclude(trial)
        self._trial = trial
        trial.leave()

    def _drop_abandoned(self) -> None:
        """Forget a step that was begun and never made: a scaler skipped it, and the next gradients are there."""
        if self._trial is not None and self._trial.is_abandoned:
            self._trial = None

    # The passes.

    def _make_passes(self, closure: Callable[..., Any], batch: tuple[Any, ...]) -> tuple[Any, Trial]:
        loss, trial = self._passes_over(partial(closure, *batch))
        self._conclude(trial)
        return loss, trial

    def _passes_over(self, closure: Callable[[], Any]) -> tuple[Any, Trial]:
        """The first pass and those that the trial then wants, over one batch."""
        loss = self._first_pass(closure)
        self._note_draws()
        trial = self._begin(loss)
        while trial.displacement is not None:
            with self._displaced_pass(trial):
                self._evaluate(closure)
        return loss, trial

    def _note_draws(self) -> None:
        if not is_capturing():
            self._draws = RandomState(self._devices()) != self._random

    def _check_capture(self) -> None:
        """Refuse to be captured as a CUDA graph where the replay would not be the same step."""
        redrawn = bool(self._draws) and (self.is_central or scopes.twin_of_capture.get() is None)
        reasons = {
            "make a step first, so that all state exists": self._draws is None,
            "its passes draw random numbers (dropout), which a graph draws anew": redrawn,
            f"interval = {self.interval} counts steps outside of the graph, set it to 1": self.interval != self.phases,
            f"nonfinite = {self.nonfinite!r} looks at the numbers, set it to 'ignore'": self.nonfinite != "ignore",
            f"{type(self).__name__} counts steps outside of the graph, pass capturable=True": not self._capturable,
        }
        if found := [reason for reason, holds in reasons.items() if holds]:
            raise RuntimeError(f"step() cannot be captured as a CUDA graph: {'; '.join(found)}")

    @property
    def is_central(self) -> bool:
        """Whether a due step makes two displaced passes, one to either side."""
        return getattr(self, "difference", "") == "central"

    def _passes_made(self) -> Trial:
        """The passes that a loop without closure has made before `step()`."""
        trial, self._trial = self._trial, None
        if trial is None:
            if self.second_pass_due and not self._is_empty_step():
                raise RuntimeError(
                    "step() without the second pass: pass a closure, step(closure), or run the loss once more under "
                    "`with opt.perturbed():` before step()"
                )
            trial = self._begin(None, due=False)
            self._conclude(trial)
        elif trial.displacement is not None:
            raise RuntimeError("step() after one of two passes: difference='central' needs a second perturbed() scope")
        return trial

    def _is_empty_step(self) -> bool:
        """Whether all gradients are zero: so torch.distributed.checkpoint lets an optimiser make its state."""
        gradients = [p.grad for p in self._params() if p.grad is not None]
        return bool(gradients) and bool(tensors.norm(gradients) == 0)  # the same on all processes

    def _first_pass(self, closure: Callable[[], Any]) -> Any:
        """Evaluate the loss and leave its gradients in `.grad`."""
        return self._evaluate(closure)

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        params = self._clear_gradients()
        with torch.enable_grad():
            loss = closure()
            if all(p.grad is None for p in params):
                check_loss(loss, "step(closure)")
                self._backward(loss)
        if all(p.grad is None for p in params):
            raise RuntimeError("step(closure): the loss depends on none of the optimiser's parameters")
        return loss

    def _backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def _begin(self, loss: Any, due: bool = True) -> Trial:
        """Collect the gradients of the first pass and plan the others."""
        used = [(group, used_of(group, self._check_parameter)) for group in self.param_groups]
        slices = [Slice(group, self.knobs(group), params, gradients_of(params)) for group, params in used if params]
        due = due and self.second_pass_due and bool(slices)
        return Trial(slices, self._plan(slices, due), loss)

    @contextmanager
    def _displaced_pass(self, trial: Trial) -> Iterator[None]:
        """One further pass, where the trial wants it; its gradients are handed to the trial."""
        self._clear_gradients()
        place = trial.displacement or nullcontext()
        if isinstance(place, list | tuple):
            place = displaced(trial.params, place)
        statistics = frozen_statistics(self._copies.of(self.model, "of the first pass"))
        with place, statistics, replayed_random(self._random, self._devices()):
            if isinstance(trial.displacement, list):
                trial.displacement.clear()  # it is in the weights: a copy of them less while the pass is made
            yield
        if trial.displacement is not None:
            # A parameter that drops out of the loss at the displaced weights has gradient zero there.
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trial.params]
            trial.proceed(kept(gradients) if self.is_central else gradients)
        # One that enters the loss only there has no gradient in this step.
        self._clear_gradients()

    def _conclude(self, trial: Trial) -> None:
        trial.conclude()

    @contextmanager
    def _all_or_nothing(self, random: RandomState, anew: bool = False) -> Iterator[None]:
        """On any error put back what the passes have changed: random numbers, statistics, gradients (unless `anew`)."""
        params = self._clear_gradients() if anew else self._params()
        gradients = [p.grad for p in params]
        # The device waits for this copy: in a lean step nothing but a closure that fails could want it, and what fails
        # in a capture has changed nothing yet.
        wanted = not (is_capturing() or (anew and self.nonfinite == "ignore"))
        buffers = self._copies.of(self.model if wanted else None, "of the step")
        self._busy = True
        try:
            yield
        except BaseException:
            for p, gradient in zip(params, gradients, strict=True):
                p.grad = gradient
            buffers.restore()
            random.restore()
            raise
        finally:
            self._busy = False

    def _require_finite(self, trial: Trial) -> None:
        if self.nonfinite != "ignore" and (what := self._nonfinite(trial)):
            raise NonFiniteError(
                f"{what}: the step was not made, weights and state are as they were. Lower the learning rate or rho, "
                "or pass nonfinite='skip' to go on without such steps"
            )

    def _nonfinite(self, trial: Trial) -> str:
        return "" if trial.stats is None else trial.stats.nonfinite()

    # The update.

    def _update(self, trial: Trial) -> None:
        self._apply(trial)
        self._learn(trial.slices)
        for group in self.param_groups:
            group[STEP] += 1

    def _apply(self, trial: Trial) -> None:
        sgd = isinstance(self.base, torch.optim.SGD) and is_capturing()
        if sgd and any(torch.is_tensor(group["lr"]) and not group.get("fused") for group in self.param_groups):
            raise RuntimeError("step() cannot be captured as a CUDA graph: SGD reads a tensor lr back, pass fused=True")
        self.base.step()

    def _params(self) -> Tensors:
        return [p for group in self.param_groups for p in group["params"]]

    def _devices(self) -> set[torch.device]:
        return {p.device for p in self._params()}

    def _clear_gradients(self) -> Tensors:
        params = self._params()
        for p in params:
            p.grad = None
        return params

    lean, _capturable = False, True
    phases = 1  # graphs that whoever captures makes of a step, one for each place in an interval
    _settings: tuple[str, ...] = ("base", "interval", "model", "nonfinite", "_keys")

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: getattr(self, name) for name in self._settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a checkpoint of the plain optimiser knows nothing of ours
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        # `load_state_dict` makes new containers: share them again, and let the base migrate old formats.
        self.base.__setstate__({"state": self.state, "param_groups": self.param_groups})
        self._forget()
