"""TRACER on any torch optimiser, and on SGD (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from gtracer import checks, curvature, tensors
from gtracer.optim.trial import Plan, Slice, Trial
from gtracer.optim.two_pass import TwoPassOptimizer
from gtracer.penalty import BETA, DELTA, RADIUS, RHO, check_group, check_loss, direction, exact, finite_difference
from gtracer.tensors import Tensors

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class Options(TypedDict, total=False):
    """What every TRACER optimiser takes besides ρ, β and δ.

    Attributes:
        f0: f₀: `"first-gradient"` (default) or a number. May be set per group.
        engine: `"finite-difference"` (default): first-order passes only. `"exact"`: double backward.
        radius: Length of the finite difference's displacement (default 0.05).
        difference: `"forward"` (default): one further pass. `"central"`: two, with the error squared.
        interval: Penalise every so many steps (default 1).
        preconditioned: Divide the total by f + δ, as the derivation has it before the paper drops it (default False).
        eta: η, variance of a Gaussian prior on the weights: adds its ridge term ρ/η · w (default None, a flat prior).
        model: With it, the displaced pass leaves batch-norm statistics and other buffers alone.
        nonfinite: `"raise"` (default), `"skip"` or `"ignore"` a NaN or infinite loss or gradient. The first two look at
            the numbers, and so wait for the device once a step.
    """

    f0: str | float
    engine: str
    radius: float
    difference: str
    interval: int
    preconditioned: bool
    eta: float | None
    model: nn.Module | None
    nonfinite: str


class TracerOptimizer(TwoPassOptimizer):
    """The penalised gradient ∇[L + ρT]; where f is kept is left to the subclass."""

    def __init__(
        self,
        base: torch.optim.Optimizer,
        defaults: dict[str, Any],
        *,
        f0: str | float = curvature.FIRST_GRADIENT,
        engine: str = "finite-difference",
        radius: float = RADIUS,
        difference: str = "forward",
        interval: int = 1,
        preconditioned: bool = False,
        eta: float | None = None,
        model: nn.Module | None = None,
        nonfinite: str = "raise",
    ) -> None:
        checks.choice("engine", engine, ["finite-difference", "exact"])
        checks.number("radius", radius, low=0, open_low=True)
        checks.choice("difference", difference, ["forward", "central"])
        checks.flag("preconditioned", preconditioned)
        if eta is not None:
            checks.number("eta", eta, low=0, open_low=True)
        self.engine, self.radius, self.difference = engine, radius, difference
        self.preconditioned, self.eta = preconditioned, eta
        super().__init__(base, {**defaults, "f0": f0}, interval=interval, model=model, nonfinite=nonfinite)

    _settings = (*TwoPassOptimizer._settings, "engine", "radius", "difference", "preconditioned", "eta")

    def _trained(self, p: Tensor) -> bool:
        """Whether f of this parameter is in the state."""
        raise NotImplementedError

    def _stored(self, group: dict[str, Any], params: Tensors) -> Tensors:
        """f of parameters that have been trained before."""
        raise NotImplementedError

    def _average(self, part: Slice) -> Tensors:
        """f of these parameters, before this step's update: from the state, or f₀."""
        fresh = {p: g.detach() for p, g in zip(part.params, part.gradients, strict=True) if not self._trained(p)}
        known = [p for p in part.params if p not in fresh]
        f = dict(zip(known, self._stored(part.group, known), strict=True)) if known else {}
        if fresh:
            f |= zip(fresh, curvature.initial_average(list(fresh.values()), part.knobs["f0"]), strict=True)
        return [f[p] for p in part.params]

    def _plan(self, slices: list[Slice], due: bool) -> Plan:
        ratio: Tensor | None = None
        u: list[Tensor] = []
        for part in slices:
            g = [x.detach() for x in part.gradients]
            v = direction(g, self._average(part), part.knobs["delta"])
            here = tensors.dot(g, v)  # Σ g²/(f + δ)
            ratio = here if ratio is None else ratio + here.to(ratio.device)
            if due:
                torch._foreach_mul_(v, part.signed_rho)
                u += v
        if not due:
            return Plan(None, ratio)
        params = [p for part in slices for p in part.params]
        gradients = [g for part in slices for g in part.gradients]
        engine = partial(finite_difference, radius=self.radius, central=self.difference == "central")
        return Plan((exact if self.engine == "exact" else engine)(params, gradients, u), ratio)

    def _first_pass(self, closure: Callable[[], Any]) -> Any:
        if self.engine != "exact":
            return super()._first_pass(closure)
        params = self._clear_gradients()
        with torch.enable_grad():
            loss = closure()
            if any(p.grad is not None for p in params):
                raise RuntimeError(
                    "engine='exact' differentiates the loss itself: let the closure return the loss without calling "
                    "backward(), or use engine='finite-difference'"
                )
            check_loss(loss, "step(closure)")
            inputs = [p for p in params if p.requires_grad]
            found = torch.autograd.grad(loss, inputs, create_graph=self.second_pass_due, allow_unused=True)
        if all(g is None for g in found):
            raise RuntimeError("step(closure): the loss depends on none of the optimiser's parameters")
        for p, g in zip(inputs, found, strict=True):
            p.grad = g
        return loss

    def perturbed(self) -> Any:
        if self.engine == "exact":
            raise RuntimeError(
                "perturbed() is the finite difference's second pass: with engine='exact' use step(closure), or a "
                "TracerPenalty on the loss with any optimiser"
            )
        return super().perturbed()

    perturbed.__doc__ = TwoPassOptimizer.perturbed.__doc__

    def _check_group(self, group: dict[str, Any]) -> None:
        check_group(self.knobs(group))

    def _check_parameter(self, label: str, p: Tensor) -> None:
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
            total = torch._foreach_mul(total, curvature.inverse(self._average(part), part.knobs["delta"]))
        for p, gradient in zip(part.params, total, strict=True):
            p.grad = gradient

    def _update(self, trial: Trial) -> None:
        super()._update(trial)
        if self.stats is not None:
            self.stats.count_damped = self._damped_share

    @torch.no_grad()
    def _damped_share(self) -> Tensor:
        """Share of the coordinates where δ > f, now."""
        below, size = torch.zeros(()), 0
        for group in self.param_groups:
            for f in self._stored(group, [p for p in group["params"] if self._trained(p)]):
                below = below + (f < self.knobs(group)["delta"]).sum().cpu()
                size += f.numel()
        return below / size


class Tracer(TracerOptimizer):
    """TRACER for any torch optimiser: it is fed ∇[L + ρT] instead of ∇L.

    >>> model = nn.Linear(2, 1)
    >>> opt = Tracer(torch.optim.RMSprop(model.parameters(), lr=1e-3), rho=0.003)
    >>> loss = opt.step(lambda: model(torch.ones(4, 2)).square().mean())

    Args:
        base_optimizer: Makes the update. Its groups, state and schedulers stay in force.
        rho: ρ, strength of the penalty. May be set per group, as β, δ and f₀ may.
        beta: β, how fast f follows the squared gradient.
        delta: δ, damping of the ratio.
        **options: See `Options`.
    """

    def __init__(
        self,
        base_optimizer: torch.optim.Optimizer,
        *,
        rho: float = RHO,  # ρ, Algorithm 1
        beta: float = BETA,  # β
        delta: float = DELTA,  # δ
        **options: Unpack[Options],
    ) -> None:
        super().__init__(base_optimizer, {"rho": rho, "beta": beta, "delta": delta}, **options)

    def _trained(self, p: Tensor) -> bool:
        return "f" in self.state.get(p, {})

    def _stored(self, group: dict[str, Any], params: Tensors) -> Tensors:
        return [self.state[p]["f"] for p in params]

    def _learn(self, slices: list[Slice]) -> None:
        for part in slices:
            f = self._average(part)
            curvature.update_average_(f, curvature.gradient_magnitude(part.gradients), part.knobs["beta"])
            # Not before the base optimiser's first step: many initialise a state only while it is empty.
            for p, average in zip(part.params, f, strict=True):
                self.state[p]["f"] = average


class SGDTracer(Tracer):
    """SGD-TRACER, Algorithm 1: torch's SGD on L + ρT.

    Args:
        params: Parameters or groups, as for `torch.optim.SGD`.
        lr, momentum, dampening, weight_decay, nesterov, maximize, foreach: As for `torch.optim.SGD`.
        rho: ρ, strength of the penalty. May be set per group, as β, δ and f₀ may.
        beta: β, how fast f follows the squared gradient.
        delta: δ, damping of the ratio.
        **options: See `Options`.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        rho: float = RHO,
        beta: float = BETA,
        delta: float = DELTA,
        **options: Unpack[Options],
    ) -> None:
        checks.learning_rate(lr)
        checks.number("momentum", momentum, low=0)
        checks.number("dampening", dampening)
        checks.number("weight_decay", weight_decay, low=0)
        checks.flag("nesterov", nesterov)
        checks.flag("maximize", maximize)
        checks.kind("foreach", foreach, (bool, type(None)))
        base = torch.optim.SGD(
            checks.parameters(params),
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
            foreach=foreach,
        )
        super().__init__(base, rho=rho, beta=beta, delta=delta, **options)
