"""Adam-TRACER: one second-moment buffer is both f and the preconditioner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from gtracer import checks
from gtracer.curvature import squares
from gtracer.optim.clip import OF
from gtracer.optim.fused import FusedTracer, launchable
from gtracer.optim.options import Options
from gtracer.optim.tracer import Params
from gtracer.optim.trial import Slice, Trial
from gtracer.penalty import DELTA, RHO
from gtracer.tensors import Tensors

if TYPE_CHECKING:
    from gtracer.optim.launches import Launched


def adam_update_(
    params: Tensors,
    total: Tensors,  # ∇[L + ρT], feeds the first moment
    F: Tensors,  # (∇L)² or another estimate of the curvature, feeds the second
    exp_avg: Tensors,
    exp_avg_sq: Tensors,
    steps: Sequence[float] | Tensors,  # counting this one; as tensors they, and lr, may change in a replay
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Adam's update with a source for each moment, in place. With F the square of `total` it is torch's Adam."""
    torch._foreach_lerp_(exp_avg, total, 1 - beta1)
    torch._foreach_mul_(exp_avg_sq, beta2)
    torch._foreach_add_(exp_avg_sq, F, alpha=1 - beta2)
    denominator = torch._foreach_sqrt(exp_avg_sq)
    torch._foreach_div_(denominator, [(1 - beta2**t) ** 0.5 for t in steps])
    torch._foreach_add_(denominator, eps)
    sizes: list[Any] = [-lr / (1 - beta1**t) for t in steps]
    if isinstance(sizes[0], Tensor):  # addcdiv takes numbers only
        torch._foreach_div_(denominator, sizes)
        sizes = [1.0] * len(sizes)
    torch._foreach_addcdiv_(params, exp_avg, denominator, sizes)


def adam_average(v: Tensors, counts: Sequence[float] | Tensors, beta2: float, f0: str | float) -> Tensors:
    """f from Adam's second moment, which starts at zero, after so many steps.

    With the first gradient as f₀ that start is divided out, as in Adam's own denominator; a number f₀ is what an
    average started there would still hold.
    """
    start: list[Any] = [beta2**t for t in counts]
    if isinstance(f0, str):
        return torch._foreach_div(v, [1 - weight for weight in start])
    return torch._foreach_add(v, [f0 * weight for weight in start])


def adam_state(p: Tensor, *, capturable: bool) -> dict[str, Tensor]:
    """Adam's state before the first step; a `capturable` one counts on the device."""
    count = torch.zeros((), device=p.device if capturable else "cpu")
    return {"step": count, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


class AdamTracer(FusedTracer):
    """Adam-TRACER: Adam on L + ρT, with Adam's second moment as f, so β = 1 − betas[1].

    A step of Adam's is bounded, whatever the gradients, because its second moment has seen what its first averages. So
    it is fed by ∇[L + ρT] here, and f is the average of that. With another `curvature` (or `average`) than the squared
    gradient, and with `step(penalty="each")`, that estimate feeds it; `Tracer(torch.optim.Adam(…))` has one for each.

    Args:
        params: Parameters or groups, as for `torch.optim.Adam`.
        lr, betas, eps, weight_decay, maximize: As for `torch.optim.Adam`; weight decay is coupled.
        foreach: Taken for torch's sake; the update is foreach always.
        capturable: Keep the count of steps on the device, so that a step can be captured as a CUDA graph. A learning
            rate that is to change in the replays must be a tensor.
        rho: ρ, strength of the penalty. May be set per group, as δ and f₀ may.
        delta: δ, damping of the ratio.
        second_moment: What feeds it: the `"total"`, ∇[L + ρT] (default where F is the squared gradient), or the
            curvature of the `"loss"` alone, as Algorithm 1 has it for f; where ρ∇T is many times ∇L, so are steps then.
        amsgrad: Refused: its running maximum would part the preconditioner from f.
        **options: See `Options`.
    """

    _decoupled = False
    _settings = (*FusedTracer._settings, "second_moment")

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
        rho: float = RHO,
        delta: float = DELTA,
        second_moment: str | None = None,
        **options: Unpack[Options],
    ) -> None:
        checks.learning_rate(lr)
        if second_moment is not None:
            checks.choice("second_moment", second_moment, OF)
        checks.flag("capturable", capturable)
        checks.betas(betas)
        checks.number("eps", eps, low=0)
        checks.number("weight_decay", weight_decay, low=0)
        checks.flag("maximize", maximize)
        checks.kind("foreach", foreach, (bool, type(None)))
        if amsgrad is not False:
            raise ValueError(
                f"amsgrad must be False, got {amsgrad!r}: f and the preconditioner are one buffer here. "
                "Tracer(torch.optim.Adam(..., amsgrad=True)) keeps them apart"
            )
        if options.get("preconditioned"):
            raise ValueError(
                f"preconditioned must be False, got {options['preconditioned']!r}: Adam divides by √f already"
            )
        # The base keeps groups and state in torch's own layout; its arithmetic is `adam_update_`.
        base = torch.optim.Adam(
            checks.parameters(params),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable or options.get("compiled", False),  # numbers would be compiled into it
        )
        super().__init__(base, {"rho": rho, "delta": delta}, **options)
        self.second_moment = second_moment or ("total" if self.curvature.is_default else "loss")
        if self.second_moment == "total" and not self.curvature.is_default:
            raise ValueError(
                f"second_moment = 'total' is for squared gradients, got {self.curvature}: use second_moment='loss', or "
                "leave curvature and average"
            )

    @property
    def _capturable(self) -> bool:  # type: ignore[override]
        return all(group["capturable"] for group in self.param_groups)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if "beta" in group:
            raise ValueError(
                f"beta = {group['beta']!r} has no place here: f is Adam's second moment, set betas instead"
            )
        checks.betas(group["betas"])

    def trained(self, p: Tensor) -> bool:
        return bool(self.state.get(p))

    def average_of(self, group: dict[str, Any], params: Tensors) -> Tensors:
        v = [self.state[p]["exp_avg_sq"] for p in params]
        return adam_average(v, self._steps(group, params), group["betas"][1], self.knobs(group)["f0"])

    def _steps(self, group: dict[str, Any], params: Tensors) -> list[Any]:
        """How many each has made: numbers, or tensors that a captured step goes on counting."""
        counts = [self.state[p]["step"] for p in params]
        return counts if group["capturable"] else [float(count) for count in counts]

    def _launched(self, part: Slice) -> Launched | None:
        group, knobs = part.group, part.knobs
        if group["maximize"] or (group["weight_decay"] and not self._decoupled):
            return None
        known = [self.state.get(p) for p in part.params]
        new = {p: adam_state(p, capturable=True) for p, it in zip(part.params, known, strict=True) if not it}
        state = [it or new[p] for p, it in zip(part.params, known, strict=True)]
        exp_avg, v, counts = ([it[name] for it in state] for name in ("exp_avg", "exp_avg_sq", "step"))
        if not launchable(part.params, part.gradients, exp_avg, v, counts):
            return None
        from gtracer.optim.launches import Launched

        f0 = None if isinstance(knobs["f0"], str) else knobs["f0"]
        own = {"betas": group["betas"], "lr": group["lr"], "eps": group["eps"], "decay": group["weight_decay"]}
        own["whole"] = self.second_moment == "total"
        lists = (part.params, part.gradients, exp_avg, v, counts)
        return Launched(*lists, state=new, rho=knobs["rho"], delta=knobs["delta"], f0=f0, **own)

    def _apply(self, trial: Trial) -> None:
        if self._kernels is not None:
            super()._apply(trial)
            return
        for part in trial.slices:
            self._complete_total(part)
            self._apply_to(part)

    def _apply_to(self, part: Slice) -> None:
        group, params = part.group, part.params
        for p in params:
            if not self.trained(p):
                self.state[p].update(adam_state(p, capturable=group["capturable"]))
        torch._foreach_add_([self.state[p]["step"] for p in params], 1)
        total: Tensors = [p.grad for p in params if p.grad is not None]
        F = part.measured
        lr, decay = group["lr"] if group["capturable"] else float(group["lr"]), group["weight_decay"]
        if group["maximize"]:
            total = torch._foreach_neg(total)
        if decay and self._decoupled:
            torch._foreach_mul_(params, 1 - lr * decay)
        elif decay:
            # Deviation: coupled decay is the gradient of a ridge in the loss, and Adam's buffer holds it too.
            total = torch._foreach_add(total, params, alpha=decay)
            if part.curvature is None:
                sign = -1 if group["maximize"] else 1
                F = squares(torch._foreach_add(part.gradients, params, alpha=sign * decay))
        if self.second_moment == "total" and part.curvature is None:
            # Deviation: f learns of the total, not of ∇L: it bounds the step, and what it bounds it has to have seen.
            F = squares(total)
        self._run(adam_update_)(
            params,
            total,
            F,
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            self._steps(group, params),
            lr=lr,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
        )


class AdamWTracer(AdamTracer):
    """Adam-TRACER with AdamW's decoupled weight decay (default 0.01, as in torch).

    Args: as for `AdamTracer`.
    """

    _decoupled = True

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
