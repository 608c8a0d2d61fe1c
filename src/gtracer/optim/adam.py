"""Adam-TRACER: one second-moment buffer is both f and the preconditioner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gtracer import checks
from gtracer.curvature import FIRST_GRADIENT, Estimator, gradient_magnitude, loss_gradient
from gtracer.optim.auto import AUTO, controller_of
from gtracer.optim.compiler import runner
from gtracer.optim.documentation import documented
from gtracer.optim.engines import Engine
from gtracer.optim.keywords import checked_keywords
from gtracer.optim.optimizer import TwoPassOptimizer
from gtracer.optim.reuse import Reuse, reuse_of
from gtracer.optim.rules import AdamRule, refuse_amsgrad
from gtracer.optim.tracer import Params, trace_ratio_of
from gtracer.optim.transforms import Clip, Transform, transforms_of
from gtracer.penalty import DELTA


@documented
class AdamTracer(TwoPassOptimizer):
    """Adam-TRACER: Adam on L + ρT, with Adam's second moment as f, so β = 1 − betas[1].

    Adam's steps are bounded, whatever the gradients, because its second moment has seen what its first moment averages.
    Here ∇[L + ρT] therefore feeds the second moment, and f is its average. With another `curvature` (or `average`) than
    the squared gradient, and with `step(penalty="each")`, that estimate feeds it instead. `Tracer(torch.optim.Adam(…))`
    keeps f and the second moment apart.

    Args:
        params: Parameters or groups, as for `torch.optim.Adam`.
        lr, betas, eps, weight_decay, maximize: As for `torch.optim.Adam`; weight decay is coupled.
        amsgrad: Refused: its running maximum would separate the preconditioner from f.
        foreach, fused: As for torch, which makes the step at ρ = 0. Other steps always use foreach, or the two
            kernels of `implementation`.
        capturable: Keep the count of steps on the device, so that a step can be captured as a CUDA graph. A learning
            rate that is to change in the replays must be a tensor.
        {rho}
        {delta}
        {shared}
    """

    @checked_keywords
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
        rho: float | Literal["auto"] = AUTO,
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
        adam: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        adam |= {"maximize": maximize, "foreach": foreach, "capturable": capturable, "fused": fused}
        own = (average, curvature, implementation, transforms, master_weights)
        rule = adam_rule(torch.optim.Adam, params, adam, *own)
        super().__init__(
            {"rho": rho, "delta": delta, "f0": f0},
            method=trace_ratio_of(curvature, _estimated(average), engine, scale_free, model, implementation, reuse),
            rule=rule,
            transforms=transforms_of(clip, transforms),
            controller=controller_of(held_out, steps_per_epoch),
            interval=interval,
            reuse=reuse_of(reuse, interval),
            model=model,
            nonfinite=nonfinite,
            implementation=implementation,
        )


@documented
class AdamWTracer(TwoPassOptimizer):
    """Adam-TRACER with AdamW's decoupled weight decay (default 0.01, as in torch); else as `AdamTracer`.

    Args:
        params: Parameters or groups, as for `torch.optim.AdamW`.
        lr, betas, eps, weight_decay, maximize: As for `torch.optim.AdamW`.
        amsgrad: Refused: its running maximum would separate the preconditioner from f.
        foreach, fused: As for torch, which makes the step at ρ = 0. Other steps always use foreach, or the two
            kernels of `implementation`.
        capturable: Keep the count of steps on the device, so that a step can be captured as a CUDA graph. A learning
            rate that is to change in the replays must be a tensor.
        {rho}
        {delta}
        {shared}
    """

    @checked_keywords
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
        rho: float | Literal["auto"] = AUTO,
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
        adam: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        adam |= {"maximize": maximize, "foreach": foreach, "capturable": capturable, "fused": fused}
        rule = adam_rule(
            torch.optim.AdamW, params, adam, average, curvature, implementation, transforms, master_weights
        )
        super().__init__(
            {"rho": rho, "delta": delta, "f0": f0},
            method=trace_ratio_of(curvature, _estimated(average), engine, scale_free, model, implementation, reuse),
            rule=rule,
            transforms=transforms_of(clip, transforms),
            controller=controller_of(held_out, steps_per_epoch),
            interval=interval,
            reuse=reuse_of(reuse, interval),
            model=model,
            nonfinite=nonfinite,
            implementation=implementation,
        )


def adam_rule(
    base: type[torch.optim.Adam],
    params: Params,
    adam: dict[str, Any],
    average: Estimator | None,
    curvature: Estimator,
    implementation: str,
    transforms: Sequence[Transform],
    master_weights: bool,
) -> AdamRule:
    """The update, from torch's arguments and what feeds the second moment."""
    checks.learning_rate(adam["lr"])
    checks.flag("capturable", adam["capturable"])
    checks.flag("master_weights", master_weights)
    checks.betas(adam["betas"])
    checks.number("eps", adam["eps"], low=0)
    checks.number("weight_decay", adam["weight_decay"], low=0)
    checks.flag("maximize", adam["maximize"])
    checks.kind("foreach", adam["foreach"], (bool, type(None)))
    checks.kind("fused", adam["fused"], (bool, type(None)))
    if adam["amsgrad"] is not False:
        refuse_amsgrad(adam["amsgrad"])
    if any(getattr(transform, "preconditions", False) for transform in transforms):
        raise ValueError(f"transforms = {list(transforms)!r}: Adam divides by √f already, leave Precondition() out")
    compile = implementation == "compiled"
    if compile:  # numbers would be compiled into it
        adam = adam | {"capturable": True}
    made = base(checks.parameters(params), **adam)
    plain = curvature is gradient_magnitude and average in (None, gradient_magnitude)
    return AdamRule(
        made, decoupled=base is torch.optim.AdamW, of_total=plain, run=runner(compile), master_weights=master_weights
    )


def _estimated(average: Estimator | None) -> Estimator | None:
    """`loss_gradient` says what feeds the second moment: to the passes it is the squared gradient."""
    return gradient_magnitude if average is loss_gradient else average
