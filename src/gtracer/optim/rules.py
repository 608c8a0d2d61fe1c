"""The update, and where f is kept: in any torch optimiser's state beside its own, or as Adam's second moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from gtracer import checks, tensors
from gtracer.curvature import initial_average
from gtracer.optim.engines import Runner, as_it_is
from gtracer.optim.step import Slice, Step
from gtracer.tensors import Tensors


class Rule(Protocol):
    """How weights and f follow from a step."""

    @property
    def base(self) -> torch.optim.Optimizer:
        """The optimiser whose groups and state these are."""

    @property
    def keeps_average(self) -> bool:
        """Whether there is an f."""

    @property
    def master_weights(self) -> bool:
        """Whether weights in bfloat16 have float32 masters; otherwise they and the state are rounded by chance."""

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph of the update goes on counting steps."""

    def check_group(self, group: dict[str, Any]) -> None:
        """Refuse what the update cannot do."""

    def check_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Refuse a state that it cannot go on from."""

    def is_trained(self, p: Tensor) -> bool:
        """Whether f of this parameter is in the state."""

    def average_of(self, group: dict[str, Any], hyper: dict[str, Any], params: Tensors) -> Tensors:
        """f of parameters that have been trained before."""

    def average(self, part: Slice) -> Tensors:
        """f of a slice before this step's update: from the state, or f₀."""

    def update(self, step: Step) -> None:
        """Move the weights, then let f follow."""


def average_at_first(rule: Rule, part: Slice) -> Tensors:
    """f where some of it is not in the state yet, and is f₀."""
    source = part.measured if part.start is None else part.start
    fresh = {p: F.detach() for p, F in zip(part.params, source, strict=True) if not rule.is_trained(p)}
    known = [p for p in part.params if p not in fresh]
    f = dict(zip(known, rule.average_of(part.group, part.hyper, known), strict=True)) if known else {}
    f |= zip(fresh, initial_average(list(fresh.values()), part.hyper["f0"]), strict=True)
    return [f[p] for p in part.params]


@dataclass(frozen=True)
class TorchRule:
    """The base optimiser's own update, and f beside its state, as Algorithm 1 has it.

    Attributes:
        base: The optimiser.
        keeps_average: Whether there is an f.
        master_weights: Of weights in bfloat16: whether they have float32 masters.
    """

    base: torch.optim.Optimizer
    keeps_average: bool = True
    master_weights: bool = True

    is_capturable = True

    def check_group(self, group: dict[str, Any]) -> None:
        pass

    def check_checkpoint(self, state_dict: dict[str, Any]) -> None:
        pass

    def is_trained(self, p: Tensor) -> bool:
        return "f" in self.base.state.get(p, {})

    def average_of(self, group: dict[str, Any], hyper: dict[str, Any], params: Tensors) -> Tensors:
        return tensors.wide([self.base.state[p]["f"] for p in params])

    def average(self, part: Slice) -> Tensors:
        if part.f is None:
            known = [self.base.state.get(p, {}).get("f") for p in part.params]
            part.f = average_at_first(self, part) if any(f is None for f in known) else tensors.wide(known)
        return part.f

    def update(self, step: Step) -> None:
        slices = step.slices if self.keeps_average else ()
        for part in slices:  # now: torch's may write into the gradient
            part.curvature = part.measured
        self.base.step()
        for part in slices:
            f = self.average(part)
            torch._foreach_lerp_(f, part.measured, part.hyper["beta"])  # f ← (1 − β) f + β F
            # Not before the base optimiser's first step: many initialise a state only while it is empty.
            for p, average in zip(part.params, f, strict=True):
                self.base.state[p]["f"] = average


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


def adam_state(p: Tensor, *, capturable: bool, low: bool = False) -> dict[str, Tensor]:
    """Adam's state before the first step; a `capturable` one counts on the device, a `low` one is in bfloat16."""
    count = torch.zeros((), device=p.device if capturable else "cpu")
    dtype = torch.float32 if p.dtype == torch.bfloat16 and not low else p.dtype
    return {"step": count, "exp_avg": torch.zeros_like(p, dtype=dtype), "exp_avg_sq": torch.zeros_like(p, dtype=dtype)}


def refuse_amsgrad(amsgrad: Any) -> NoReturn:
    """Its running maximum would part the preconditioner from f."""
    raise ValueError(
        f"amsgrad must be False, got {amsgrad!r}: f and the preconditioner are one buffer here. "
        "Tracer(torch.optim.Adam(..., amsgrad=True)) keeps them apart"
    )


@dataclass(frozen=True)
class AdamRule:
    """Adam's update with its second moment as f.

    Attributes:
        base: torch's Adam or AdamW. It keeps groups and state in torch's own layout, and makes the steps at ρ = 0; the
            arithmetic of the others is `adam_update_`.
        decoupled: Whether the weight decay is AdamW's.
        of_total: Whether the second moment is fed by ∇[L + ρT], where F is the squared gradient. Else by ∇L.
        run: Runs the arithmetic.
        master_weights: Of weights in bfloat16: whether they have float32 masters.
    """

    base: torch.optim.Adam
    decoupled: bool = False
    of_total: bool = True
    run: Runner = as_it_is
    master_weights: bool = True

    keeps_average = True

    @property
    def is_capturable(self) -> bool:
        return all(group["capturable"] for group in self.base.param_groups)

    def check_group(self, group: dict[str, Any]) -> None:
        if "beta" in group:
            raise ValueError(
                f"beta = {group['beta']!r} has no place here: f is Adam's second moment, set betas instead"
            )
        if group["amsgrad"] is not False:
            refuse_amsgrad(group["amsgrad"])
        checks.betas(group["betas"])

    def check_checkpoint(self, state_dict: dict[str, Any]) -> None:
        for group in state_dict["param_groups"]:
            if group.get("amsgrad", False) is not False:
                refuse_amsgrad(group["amsgrad"])

    def is_trained(self, p: Tensor) -> bool:
        return "exp_avg_sq" in self.base.state.get(p, {})

    def average_of(self, group: dict[str, Any], hyper: dict[str, Any], params: Tensors) -> Tensors:
        # It starts at zero. With the first gradient as f₀ that start is divided out, as in Adam's own denominator; a
        # number f₀ is what an average started there would still hold.
        known, f0 = [self.base.state[p] for p in params], hyper["f0"]
        v = tensors.wide([own["exp_avg_sq"] for own in known])
        start = [group["betas"][1] ** t for t in _counted(group, [own["step"] for own in known])]
        if isinstance(f0, str):
            return torch._foreach_div(v, [1 - weight for weight in start])
        return torch._foreach_add(v, [f0 * weight for weight in start])

    def average(self, part: Slice) -> Tensors:
        if all("exp_avg_sq" in self.base.state.get(p, ()) for p in part.params):
            f = self.average_of(part.group, part.hyper, part.params)
            return list(f)  # as at first: torch.compile sees the kind
        return average_at_first(self, part)

    def update(self, step: Step) -> None:
        if not any(group["rho"] for group in self.base.param_groups) and self._is_torchs(step):
            self.base.step()
        else:
            for part in step.slices:
                self._update(part)

    def _is_torchs(self, step: Step) -> bool:
        """Whether this step, with ρ = 0, is that of torch's Adam, which then makes it itself."""
        plain = self.of_total and self.run is as_it_is and all(part.curvature is None for part in step.slices)
        groups = self.base.param_groups
        # torch counts on a CPU only as Python does.
        return plain and not any(g["capturable"] and any(p.device.type == "cpu" for p in g["params"]) for g in groups)

    def _update(self, part: Slice) -> None:
        group, params, state = part.group, part.params, self.base.state
        known = [state[p] for p in params]
        for p, own in zip(params, known, strict=True):
            if "exp_avg_sq" not in own:
                own.update(adam_state(p, capturable=group["capturable"] or bool(group.get("fused"))))
        counts, exp_avg, exp_avg_sq = ([own[name] for own in known] for name in ("step", "exp_avg", "exp_avg_sq"))
        torch._foreach_add_(counts, 1)
        total: Tensors = [p.grad for p in params if p.grad is not None]
        feeds = self.of_total and part.curvature is None  # whether the total is what the second moment learns of
        lr, decay = group["lr"] if group["capturable"] else float(group["lr"]), group["weight_decay"]
        if group["maximize"]:
            total = torch._foreach_neg(total)
        if decay and self.decoupled:
            torch._foreach_mul_(params, 1 - lr * decay)
        elif decay:
            # Deviation: coupled decay is the gradient of a ridge in the loss, and Adam's buffer holds it too.
            total = torch._foreach_add(total, params, alpha=decay)
        if feeds:
            # Deviation: f learns of the total, not of ∇L: it bounds the step, and what it bounds it has to have seen.
            F: Tensors = torch._foreach_mul(total, total)
        elif part.curvature is None and decay and not self.decoupled:
            sign = -1 if group["maximize"] else 1
            pulled = torch._foreach_add(part.gradients, params, alpha=sign * decay)
            F = torch._foreach_mul(pulled, pulled)
        else:
            F = part.measured
        beta1, beta2 = group["betas"]
        numbers = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": group["eps"]}
        self.run(adam_update_)(params, total, F, exp_avg, exp_avg_sq, _counted(group, counts), **numbers)


def _counted(group: dict[str, Any], counts: Tensors) -> list[Any]:
    """Of steps: numbers, or tensors that a captured step goes on counting."""
    on_device = group["capturable"] or not counts[0].is_cpu
    return list(counts) if on_device else [float(count) for count in counts]
