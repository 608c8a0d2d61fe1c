"""TRACER on any torch optimiser, and on SGD (Algorithm 1): signatures, and what they are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gtracer import checks
from gtracer.curvature import FIRST_GRADIENT, Choice, Estimator, chosen, gradient_magnitude, has_finite_difference
from gtracer.optim.auto import AUTO, controller_of
from gtracer.optim.documentation import documented
from gtracer.optim.engines import Engine, Exact, FiniteDifference
from gtracer.optim.keywords import checked_keywords
from gtracer.optim.methods import TraceRatio
from gtracer.optim.optimizer import TwoPassOptimizer
from gtracer.optim.refusals import check_base
from gtracer.optim.reuse import Decayed, Reuse, reuse_of
from gtracer.optim.rules import TorchRule
from gtracer.optim.transforms import Clip, Transform, transforms_of
from gtracer.penalty import BETA, DELTA

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


@documented
class Tracer(TwoPassOptimizer):
    """TRACER for any torch optimiser: it is fed ∇[L + ρT] instead of ∇L.

    >>> model = torch.nn.Linear(2, 1)
    >>> opt = Tracer(torch.optim.RMSprop(model.parameters(), lr=1e-3), rho=0.003)
    >>> loss = opt.step(lambda: model(torch.ones(4, 2)).square().mean())

    Args:
        base_optimizer: Makes the update. Its groups, state and schedulers stay valid.
        {rho}
        {beta}
        {delta}
        {shared}
    """

    @checked_keywords
    def __init__(
        self,
        base_optimizer: torch.optim.Optimizer,
        *,
        rho: float | Literal["auto"] = AUTO,  # ρ, Algorithm 1
        beta: float = BETA,  # β
        delta: float = DELTA,  # δ
        f0: float | str = FIRST_GRADIENT,  # f₀
        curvature: Estimator = gradient_magnitude,
        average: Estimator | None = None,
        engine: Engine | str | None = None,
        interval: int = 1,
        reuse: float | Reuse | None = None,
        scale_free: bool = False,
        clip: Clip | None = None,
        transforms: Sequence[Transform] = (),
        model: nn.Module | None = None,
        nonfinite: str = "raise",
        implementation: str = "auto",
        master_weights: bool = True,
        steps_per_epoch: int | None = None,
        held_out: Callable[[], Tensor] | None = None,
    ) -> None:
        check_base(base_optimizer, TwoPassOptimizer)
        checks.kind("model", model, (nn.Module, type(None)))
        checks.count("interval", interval)
        checks.flag("master_weights", master_weights)
        method = trace_ratio_of(curvature, average, engine, scale_free, model, implementation, reuse)
        super().__init__(
            {"rho": rho, "beta": beta, "delta": delta, "f0": f0},
            method=method,
            rule=TorchRule(base_optimizer, master_weights=master_weights),
            transforms=transforms_of(clip, transforms),
            controller=controller_of(held_out, steps_per_epoch),
            interval=interval,
            reuse=reuse_of(reuse, interval),
            model=model,
            nonfinite=nonfinite,
            implementation=implementation,
        )


@documented
class SGDTracer(TwoPassOptimizer):
    """SGD-TRACER, Algorithm 1: torch's SGD on L + ρT.

    Args:
        params: Parameters or groups, as for `torch.optim.SGD`.
        lr, momentum, dampening, weight_decay, nesterov, maximize, foreach, fused: As for `torch.optim.SGD`.
        {rho}
        {beta}
        {delta}
        {shared}
    """

    @checked_keywords
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
        fused: bool | None = None,
        rho: float | Literal["auto"] = AUTO,
        beta: float = BETA,
        delta: float = DELTA,
        f0: float | str = FIRST_GRADIENT,
        curvature: Estimator = gradient_magnitude,
        average: Estimator | None = None,
        engine: Engine | str | None = None,
        interval: int = 1,
        reuse: float | Reuse | None = None,
        scale_free: bool = False,
        clip: Clip | None = None,
        transforms: Sequence[Transform] = (),
        model: nn.Module | None = None,
        nonfinite: str = "raise",
        implementation: str = "auto",
        master_weights: bool = True,
        steps_per_epoch: int | None = None,
        held_out: Callable[[], Tensor] | None = None,
    ) -> None:
        checks.learning_rate(lr)
        checks.number("momentum", momentum, low=0)
        checks.number("dampening", dampening)
        checks.number("weight_decay", weight_decay, low=0)
        checks.flag("nesterov", nesterov)
        checks.flag("maximize", maximize)
        checks.kind("foreach", foreach, (bool, type(None)))
        checks.kind("fused", fused, (bool, type(None)))
        checks.kind("model", model, (nn.Module, type(None)))
        checks.count("interval", interval)
        checks.flag("master_weights", master_weights)
        base = torch.optim.SGD(
            checks.parameters(params),
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
        )
        method = trace_ratio_of(curvature, average, engine, scale_free, model, implementation, reuse)
        super().__init__(
            {"rho": rho, "beta": beta, "delta": delta, "f0": f0},
            method=method,
            rule=TorchRule(base, master_weights=master_weights),
            transforms=transforms_of(clip, transforms),
            controller=controller_of(held_out, steps_per_epoch),
            interval=interval,
            reuse=reuse_of(reuse, interval),
            model=model,
            nonfinite=nonfinite,
            implementation=implementation,
        )


def trace_ratio_of(
    curvature: Estimator,
    average: Estimator | None,
    engine: Engine | str | None,
    scale_free: bool,
    model: nn.Module | None,
    implementation: str,
    reuse: float | Reuse | None,
) -> TraceRatio:
    """What is added to the gradient, from what the user asked for."""
    checks.flag("scale_free", scale_free)
    choice = chosen(curvature, average, model)
    found = engine_of(engine, choice, model)
    plain = choice.is_default and not found.is_exact
    compile = implementation == "compiled"
    if not plain and (getattr(found, "needs_closure", None) or hasattr(reuse, "always")):
        raise ValueError(
            f"engine = {found!r}, reuse = {reuse!r} go with curvature=gradient_magnitude and "
            f"engine='finite-difference', got {choice}"
        )
    if getattr(found, "needs_closure", None) and hasattr(reuse, "always"):
        raise ValueError(f"engine = {found!r} is of the second pass, and reuse = {reuse!r} makes none")
    # Without a copy of the weights their displacement has to be computed again, from what is kept anyway.
    lean = compile and plain and not found.central and (reuse is None or isinstance(reuse, float | int | Decayed))
    return TraceRatio(choice, found, scale_free, lean=lean, compile=compile)


def engine_of(engine: Engine | str | None, choice: Choice, model: nn.Module | None) -> Engine:
    """The engine for the estimators; refused where the one asked for cannot be."""
    if isinstance(engine, str):
        checks.choice("engine", engine, ["finite-difference", "exact"])
    elif engine is not None and not hasattr(engine, "is_exact"):
        raise ValueError(f"engine must be FiniteDifference(...), Exact() or one of their names, got {engine!r}")
    possible = has_finite_difference(choice.numerator, model)
    exact = engine == "exact" or isinstance(engine, Exact)
    if engine is not None and not exact and not possible:
        raise ValueError(
            f"engine = {engine!r} is for squared gradients (per example: of Linear, Conv2d, Embedding, "
            f"LayerNorm, GroupNorm), and curvature = {choice.numerator!r} is differentiated exactly here: "
            "leave engine out"
        )
    if exact and choice.numerator is gradient_magnitude and choice.parts is not None:
        raise ValueError(
            f"engine = 'exact' needs the whole batch's graph, and average = {choice.average!r} takes it in "
            "parts: use engine='finite-difference', or micro_batch as curvature too"
        )
    if isinstance(engine, str) or engine is None:
        return Exact() if exact or not possible else FiniteDifference()
    return engine
