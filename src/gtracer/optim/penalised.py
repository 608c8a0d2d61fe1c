"""The penalised gradient ∇[L + ρT] of every TRACER optimiser; where f is kept is left to the subclass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gtracer import checks, tensors
from gtracer.curvature import (
    FIRST_GRADIENT,
    Estimator,
    Evaluation,
    MicroBatch,
    Recording,
    SecondDerivatives,
    chosen,
    gradient_magnitude,
    has_finite_difference,
    initial_average,
    inverse,
    per_example,
)
from gtracer.optim.amortised import PREVIOUS, AmortisedOptimizer, check_lean, check_reuse
from gtracer.optim.clip import Clip
from gtracer.optim.compiler import compiled
from gtracer.optim.directions import TINY, Directions
from gtracer.optim.parts import split
from gtracer.optim.partwise import Parts, PartwiseOptimizer
from gtracer.optim.stack import Stack, flat, mean_product
from gtracer.optim.trial import Plan, Slice, Trial
from gtracer.penalty import (
    RADIUS,
    aimed,
    check_group,
    check_loss,
    differentiated,
    exact,
    example_difference,
    finite_difference,
)
from gtracer.scopes import Buffers, frozen_statistics, replayed_random
from gtracer.tensors import Tensors


class TracerOptimizer(AmortisedOptimizer):
    """The penalised gradient ∇[L + ρT]; where f is kept is left to the subclass."""

    def __init__(
        self,
        base: torch.optim.Optimizer,
        defaults: dict[str, Any],
        *,
        f0: str | float = FIRST_GRADIENT,
        curvature: Estimator = gradient_magnitude,
        average: Estimator | None = None,
        engine: str | None = None,
        radius: float = RADIUS,
        difference: str = "forward",
        interval: int = 1,
        preconditioned: bool = False,
        eta: float | None = None,
        scale_free: bool = False,
        reuse: float | str | None = None,
        share: float = 1.0,
        lean: bool = False,
        model: nn.Module | None = None,
        nonfinite: str = "raise",
        clip: Clip | None = None,
        compiled: bool = False,
    ) -> None:
        checks.flag("compiled", compiled)
        self.compiled = compiled
        if engine is not None:
            checks.choice("engine", engine, ["finite-difference", "exact"])
        checks.number("radius", radius, low=0, open_low=True)
        checks.choice("difference", difference, ["forward", "central"])
        checks.flag("preconditioned", preconditioned)
        if eta is not None:
            checks.number("eta", eta, low=0, open_low=True)
        checks.kind("model", model, (nn.Module, type(None)))
        self.curvature = chosen(curvature, average, model)
        self.engine, self.radius, self.difference = self._suitable(engine, model), radius, difference
        checks.flag("scale_free", scale_free)
        self.preconditioned, self.eta, self.scale_free = preconditioned, eta, scale_free
        check_reuse(reuse, share, interval, self._is_plain)
        check_lean(lean, self._is_plain and difference == "forward" and reuse != PREVIOUS)
        self.reuse, self.share, self.lean = reuse, share, lean
        defaults = {**defaults, "f0": f0}
        super().__init__(base, defaults, interval=interval, model=model, nonfinite=nonfinite, clip=clip)

    _settings = (*PartwiseOptimizer._settings, "curvature", "engine", "radius", "difference", "preconditioned", "eta")
    _settings = (*_settings, "scale_free", "reuse", "share", "lean", "compiled")

    @property
    def _is_plain(self) -> bool:
        """Whether it is the paper's: the squared gradient of the batch, by first-order passes."""
        return self.curvature.is_default and self.engine == "finite-difference"

    def _forget(self) -> None:
        super()._forget()
        self._evaluation: Evaluation | None = None  # of the first pass, until the plan is made
        self._directions = Directions()  # of this step's weights, with scale_free
        self._measured: dict[Tensor, Tensor] | None = None  # F for the average, from a first pass in parts

    def _suitable(self, engine: str | None, model: nn.Module | None) -> str:
        """The engine for the estimators; refused where the one asked for cannot be."""
        possible = has_finite_difference(self.curvature.numerator, model)
        if engine == "finite-difference" and not possible:
            raise ValueError(
                f"engine = 'finite-difference' is for squared gradients (per example: of Linear, Conv2d, Embedding, "
                f"LayerNorm, GroupNorm), and curvature = {self.curvature.numerator!r} is differentiated exactly here: "
                "leave engine out"
            )
        whole = self.curvature.numerator is gradient_magnitude
        if engine == "exact" and whole and self.curvature.parts is not None:
            raise ValueError(
                f"engine = 'exact' needs the whole batch's graph, and average = {self.curvature.average!r} takes it in "
                "parts: use engine='finite-difference', or micro_batch as curvature too"
            )
        return engine or ("finite-difference" if possible else "exact")

    @staticmethod
    def _squares(estimator: Estimator) -> bool:
        """Whether F is the square of a gradient (of a batch or micro-batch), so that ∇T is 2 H u."""
        return estimator is gradient_magnitude or isinstance(estimator, MicroBatch)

    def _average(self, part: Slice) -> Tensors:
        """f of these parameters, before this step's update: from the state, or f₀."""
        if all(map(self.trained, part.params)):
            return list(self.average_of(part.group, part.params))
        fresh = {p: F.detach() for p, F in zip(part.params, part.measured, strict=True) if not self.trained(p)}
        known = [p for p in part.params if p not in fresh]
        f = dict(zip(known, self.average_of(part.group, known), strict=True)) if known else {}
        f |= zip(fresh, initial_average(list(fresh.values()), part.knobs["f0"]), strict=True)
        return [f[p] for p in part.params]

    def _damped(self, part: Slice) -> tuple[Tensors, float]:
        f, delta = self._average(part), part.knobs["delta"]
        if not self.scale_free:
            return f, delta
        return self._directions.damped(part, f, self.state), min(delta, TINY)

    def _conclude(self, trial: Trial) -> None:
        self._directions.turn_(trial.params, trial.penalty)
        super()._conclude(trial)

    def _run(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same arithmetic, compiled where asked for."""
        return compiled(function) if self.compiled else function

    def _plan(self, slices: list[Slice], due: bool) -> Plan:
        at, self._evaluation = self._evaluation, None
        self._directions = Directions()
        F = self._measure(slices, at)
        if F is None or at is None:
            return self._plan_of_squares(slices, due)
        return self._plan_of(F, at, slices, due)

    def _measure(self, slices: list[Slice], at: Evaluation | None) -> dict[Tensor, Tensor] | None:
        """Note the curvature for the average in the slices; give the numerator's, where it is no squared gradient."""
        measured, self._measured = self._measured, None
        F: dict[Tensor, Tensor] | None = None
        if at is not None:
            with torch.enable_grad():
                numerator, average = self.curvature.numerator, self.curvature.average
                if not self._squares(numerator):
                    F = dict(zip(at.params, numerator(at), strict=True))
                if average == numerator:
                    measured = F
                elif not self._squares(average):
                    measured = dict(zip(at.params, average(at), strict=True))
        if measured is not None:
            for part in slices:
                # A Hessian's diagonal may be negative, f must not be.
                part.curvature = torch._foreach_abs([measured[p].detach() for p in part.params])
        return F

    def _plan_of(self, F: dict[Tensor, Tensor], at: Evaluation, slices: list[Slice], due: bool) -> Plan:
        """For any estimator: T is differentiated as it stands, or example by example."""
        ratio: Tensor | None = None
        weights: list[Tensor] = []
        for part in slices:
            weight = inverse(*self._damped(part))
            here = tensors.dot([F[p].detach() for p in part.params], weight)
            ratio = here if ratio is None else ratio + here.to(ratio.device)
            weights += torch._foreach_mul(weight, part.signed_rho)
        params = [p for part in slices for p in part.params]
        if not due:
            return Plan(None, ratio)
        if self.engine == "exact":
            return Plan(differentiated(params, [F[p] for p in params], weights), ratio)
        gradients = [g for part in slices for g in part.gradients]
        # mean_i ‖u_i‖² with u_i = weights ∘ g_i
        length = tensors.dot([F[p] for p in params], torch._foreach_mul(weights, weights)).sqrt()
        shifts = at.shifts(dict(zip(params, weights, strict=True)))
        central = self.difference == "central"
        return Plan(example_difference(gradients, shifts, length, radius=self.radius, central=central), ratio)

    def _plan_of_squares(self, slices: list[Slice], due: bool) -> Plan:
        u, ratio = self._aim(slices)
        if not due:
            return Plan(None, ratio)
        params = [p for part in slices for p in part.params]
        gradients = self._compared(slices)
        central, again = self.difference == "central", (lambda: self._aim(slices)[0]) if self.lean else None
        if self.engine == "exact":
            return Plan(exact(params, gradients, u), ratio)
        own: dict[str, Any] = {"run": self._run, "again": again, "safely": self._may_overflow}
        return Plan(finite_difference(params, gradients, u, radius=self.radius, central=central, **own), ratio)

    def _aim(self, slices: list[Slice]) -> tuple[Tensors, Tensor | None]:
        """u of these gradients, and T."""
        ratio: Tensor | None = None
        u: list[Tensor] = []
        for part in slices:
            g = [x.detach() for x in part.gradients]
            rho = torch.tensor(part.signed_rho, dtype=g[0].dtype) if self.compiled else part.signed_rho
            here, T = self._run(aimed)(g, *self._damped(part), rho)
            ratio = T if ratio is None else ratio + T.to(ratio.device)
            u += here
        return u, ratio

    @property
    def _first_pass_is_its_own(self) -> bool:
        """Whether more is wanted of the loss than its gradient."""
        squared = self._squares(self.curvature.average) and self._squares(self.curvature.numerator)
        return self.engine == "exact" or not squared

    def _sum_over(self, closure: Callable[..., Any], parts: Parts) -> Callable[[], Tensor]:
        """The whole batch's loss in one graph."""
        if not self.curvature.is_default:
            raise RuntimeError(
                f"batches with {self.curvature}, which looks into one pass over the whole batch: hand it over as one, "
                "step(closure, x, y), or use penalty='each'"
            )
        return lambda: sum((share * closure(*part) for share, part in parts), torch.zeros(()))

    def _first_pass(self, closure: Callable[[], Any]) -> Any:
        if not self._first_pass_is_its_own:
            return super()._first_pass(closure)
        if self._processes_are_joined() and not self._each:
            raise RuntimeError(
                f"engine={self.engine!r} with curvature={self.curvature.numerator!r} on several processes "
                "differentiates past DistributedDataParallel, which then averages nothing: use penalty='each', or the "
                "finite difference of gradient_magnitude"
            )
        if self._scaler is not None:
            raise RuntimeError(
                f"a GradScaler with engine={self.engine!r} and curvature={self.curvature.numerator!r}, which "
                "differentiate the loss as it is: use torch.bfloat16, or the finite difference of gradient_magnitude"
            )
        params = self._clear_gradients()
        recording = Recording(self.model) if self.model is not None and self.curvature.needs_layers else None
        with torch.enable_grad():
            with recording or nullcontext(), SecondDerivatives(self._run):
                loss = closure()
            if any(p.grad is not None for p in params):
                raise RuntimeError(
                    f"engine={self.engine!r} with curvature={self.curvature.numerator!r} differentiates the loss "
                    "itself: let the closure return the loss without calling backward()"
                )
            check_loss(loss, "step(closure)")
            twice = self.engine == "exact" and self.second_pass_due
            examples = self.engine != "exact" and self.second_pass_due and self.curvature.numerator == per_example
            wanted = [p for p in params if p.requires_grad]
            at = Evaluation(loss, wanted, recording, differentiable=twice, by_examples=examples)
        if not at.params:
            raise RuntimeError("step(closure): the loss depends on none of the optimiser's parameters")
        for p, g in zip(at.params, at.gradients, strict=True):
            p.grad = g
        self._evaluation = at
        return loss.detach()  # its graph goes with the evaluation

    def _make_passes(self, closure: Callable[..., Any], batch: tuple[Any, ...]) -> tuple[Any, Trial]:
        if self.curvature.parts is None:
            if self._parts is not None and not self._each and self._first_pass_is_its_own:
                closure, batch = self._sum_over(closure, self._parts), ()
                self._parts = None
            return super()._make_passes(closure, batch)
        if self._parts is not None or self._each:
            raise RuntimeError(
                f"batches or penalty = 'each' with micro_batch({self.curvature.parts}), which takes the batch in parts "
                "itself: hand the whole batch to step(closure, x, y), or leave micro_batch out"
            )
        parts = split(batch, self.curvature.parts)
        if self.curvature.numerator is gradient_magnitude:
            self._measured = {}
            return super()._make_passes(partial(self._evaluate_parts, closure, parts), ())
        if self.curvature.vectorised and self.engine != "exact" and parts[-1][0] == parts[0][0]:
            return self._make_stacked_passes(closure, batch, len(parts))
        return self._make_passes_of_each(closure, parts, own_curvature=self.curvature.average is not gradient_magnitude)

    def _make_stacked_passes(
        self, closure: Callable[..., Any], batch: tuple[Any, ...], count: int
    ) -> tuple[Any, Trial]:
        """The passes of all micro-batches at once."""
        assert self.model is not None
        params = [p for p in self._params() if p.requires_grad]
        self._directions = Directions()
        stack = Stack(self.model, closure, params, batch, count)
        losses, slopes = stack.gradients()
        self._note_draws()
        squares = slopes.square().mean(0)
        own = self.curvature.average is not gradient_magnitude
        at = dict(zip(params, zip(stack.pieces(slopes.mean(0)), stack.pieces(squares), strict=True), strict=True))
        slices = []
        for group in self.param_groups:
            used = [p for p in group["params"] if p in at]
            F = [at[p][1] for p in used] if own else None
            slices.append(Slice(group, self.knobs(group), used, [at[p][0] for p in used], F))
        inverses = [inverse(*self._damped(part)) for part in slices]
        trial = Trial(slices, Plan(None, squares @ flat([x for part in inverses for x in part])), losses.mean())
        if self.second_pass_due:
            rhos = [torch._foreach_mul(x, part.signed_rho) for x, part in zip(inverses, slices, strict=True)]
            weights = flat([x for part in rhos for x in part])
            with frozen_statistics(Buffers(self.model)), replayed_random(self._random, self._devices()):
                central = self.difference == "central"
                trial.penalty = stack.pieces(mean_product(stack, slopes, weights, self.radius, central))
        self._conclude(trial)
        return trial.loss, trial

    def _note_part(self, share: float) -> None:
        super()._note_part(share)
        if self._measured is not None:  # F for the average is the mean of the parts' squared gradients
            for p in self._params():
                if p.grad is not None:
                    self._measured[p] = share * p.grad**2 + self._measured.get(p, 0)

    def perturbed(self, scaler: torch.amp.GradScaler | None = None) -> Any:
        if not self._is_plain or self.share < 1:
            raise RuntimeError(
                "perturbed() is the second pass of the finite difference with curvature=gradient_magnitude over the "
                "whole batch: otherwise use step(closure), or a TracerPenalty on the loss with any optimiser"
            )
        return super().perturbed(scaler)

    def _passes_made(self) -> Trial:
        if not self.curvature.is_default and not self._is_empty_step():
            raise RuntimeError(f"step() without a closure: {self.curvature} makes its own passes, use step(closure)")
        return super()._passes_made()

    perturbed.__doc__ = PartwiseOptimizer.perturbed.__doc__

    def _check_group(self, group: dict[str, Any]) -> None:
        check_group(self.knobs(group))

    def _check_parameter(self, label: str, p: Tensor) -> None:
        if self.compiled and tensors.is_sharded(p):
            raise ValueError(f"{label} is sharded (DTensor), and compiled = True is for whole tensors: leave it out")
        if self.engine != "exact" or p.is_complex():
            super()._check_parameter(label, p)
        elif p.dtype == torch.float16:
            raise ValueError(f"{label} is {p.dtype}, in which squared gradients underflow: use float32 or bfloat16")

    def _apply(self, trial: Trial) -> None:
        for part in trial.slices:
            self._complete_total(part)
        super()._apply(trial)

    def _complete_total(self, part: Slice) -> None:
        """Add what Algorithm 1 leaves out of the derivation, where asked for: the prior's pull, the preconditioner."""
        if self.eta is None and not self.preconditioned:
            return
        total: Tensors = [p.grad for p in part.params if p.grad is not None]
        if self.eta is not None:
            total = torch._foreach_add(total, part.params, alpha=part.signed_rho / self.eta)
        if self.preconditioned:  # f before its update, as in T
            total = torch._foreach_mul(total, inverse(*self._damped(part)))
        for p, gradient in zip(part.params, total, strict=True):
            p.grad = gradient

    def _clipped_update(self, trial: Trial) -> None:
        super()._clipped_update(trial)
        self._directions.note(self.state)  # as with f: not before the base's first step

    def _update(self, trial: Trial) -> None:
        super()._update(trial)
        if self.stats is not None:
            self.stats.count_damped = self._damped_share

    @torch.no_grad()
    def _damped_share(self) -> Tensor:
        """Share of the coordinates where δ > f, now."""
        below, size = torch.zeros(()), 0
        for group in self.param_groups:
            for f in self.average_of(group, [p for p in group["params"] if self.trained(p)]):
                below = below + (f < self.knobs(group)["delta"]).sum().cpu()
                size += f.numel()
        return below / size
