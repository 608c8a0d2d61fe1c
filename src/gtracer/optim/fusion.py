"""Whether the two kernels make a step: `why_not_fused` alone decides; and what they have found on the device."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from gtracer.optim import kernels, masters
from gtracer.optim.methods import Method, TraceRatio
from gtracer.optim.reuse import Decayed, Reuse
from gtracer.optim.rules import AdamRule, Rule, TorchRule
from gtracer.optim.stats import NonFiniteError, Verdict
from gtracer.optim.step import COUNT, Step
from gtracer.optim.transforms import Transform
from gtracer.tensors import Tensors

if TYPE_CHECKING:
    from gtracer.optim.evaluate import Call
    from gtracer.optim.kernels import TwoKernels
    from gtracer.optim.optimizer import TwoPassOptimizer

IMPLEMENTATIONS = ("auto", "foreach", "compiled", "fused")
AT_REST = "ρ = 0: the base optimiser makes the step itself"


class Fusion:
    """What is known of an optimiser's steps by the two kernels.

    Attributes:
        obstacle: Why the last step on a GPU was not theirs, if it was not.
        verdicts: On the last steps, on their way from the device.
    """

    def __init__(self) -> None:
        self.obstacle: str | None = None
        self.verdicts: list[Verdict] = []
        self._seen: defaultdict[int, kernels.Seen] = defaultdict(kernels.Seen)  # of each group

    def takes(self, opt: TwoPassOptimizer, call: Call, params: Tensors) -> bool:
        """Whether a step is to be theirs, as far as is known before its gradients are there."""
        if opt.implementation not in ("auto", "fused") or call.closure is None:
            return False
        params = [p for p in params if p.requires_grad]
        self.obstacle = why_not_fused(opt.method, opt.rule, opt.transforms, opt.reuse, call, params)
        if self.obstacle is not None and opt.implementation == "fused" and any(map(rho_of, opt.param_groups)):
            raise RuntimeError(f"implementation = 'fused' cannot make this step: {self.obstacle}. Use 'auto'")
        return self.obstacle is None

    def kernels(self, step: Step, method: Method, rule: Rule, transforms: tuple[Transform, ...]) -> TwoKernels | None:
        """Those of a step, once its gradients are there."""
        if not (isinstance(method, TraceRatio) and step.slices):
            return None
        found = kernels.TwoKernels.of(step, method, rule, transforms, self._seen)
        if found is None:
            self.obstacle = "a gradient or a state does not lie in memory as the kernels read it"
        return found

    def hear(self, opt: TwoPassOptimizer, *, waits: bool = True) -> None:
        """What they have found in the last steps; only `nonfinite="raise"` tells, and waits for it if need be."""
        if not self.verdicts:
            return
        tells = opt.nonfinite == "raise"
        heard = [verdict for verdict in self.verdicts if (waits and tells) or verdict.is_there]
        self.verdicts = [verdict for verdict in self.verdicts if verdict not in heard]
        failed = sum(not verdict.is_healthy for verdict in heard)
        for group in opt.param_groups:
            group[COUNT] -= failed  # they were counted and not made
        if failed and tells:
            what = (opt.stats.nonfinite() if opt.stats else "") or "a gradient is not finite"
            raise NonFiniteError(
                f"in the last step {what}: the update was not made. Lower the learning rate or rho, or pass "
                "nonfinite='skip' to go on without such steps"
            )


def why_not_fused(
    method: Method,
    rule: Rule,
    transforms: tuple[Transform, ...] = (),
    reuse: Reuse | None = None,
    call: Call | None = None,
    params: Tensors = (),
) -> str | None:
    """Why the two kernels cannot make a step, in words; None where they can.

    Args:
        method, rule, transforms, reuse: The optimiser's own.
        call: What its `step` was handed.
        params: What it updates. What the kernels read besides lies as these do, but for odd gradients.
    """
    base, groups = rule.base, rule.base.param_groups
    reasons = {
        "SAM's step is torch's kernels": not isinstance(method, TraceRatio),
        f"no kernel makes {type(base).__name__}'s update": not _has_kernel(rule),
        "its curvature or engine takes other passes": isinstance(method, TraceRatio) and not method.is_plain,
        "a central difference displaces the weights twice": method.central,
        "scale_free=True": getattr(method, "scale_free", False),
        "an experimental engine makes other passes": method.needs_closure is not None,
        f"reuse={reuse!r}": reuse is not None and not isinstance(reuse, Decayed),
        "only clipping by the norm of the total is in them": not all(map(_is_one_factor, transforms)),
        "maximize=True": any(group.get("maximize") for group in groups),
        "dampening": any(group.get("momentum") and group.get("dampening") for group in groups),
        "weight decay that is coupled to Adam": _couples_decay(rule),
        "a loop with perturbed() leaves its gradient for others to read": call is not None and call.closure is None,
        "batches= or penalty='each'": call is not None and (call.parts is not None or call.each),
        "a GradScaler looks at the gradient first": call is not None and call.scaler is not None,
        "Triton is not installed": not has_triton(),
        "they are for float32 weights, or bfloat16, on one GPU, contiguous and in one piece": not kernels.readable(
            params
        ),
        "reuse of a penalty with weights in bfloat16": reuse is not None and any(map(masters.is_narrow, params)),
        AT_REST: not any(rho_of(group) for group in groups),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def rho_of(group: dict[str, Any]) -> float:
    """ρ of a group, whose name is another where the base optimiser has a `rho` of its own."""
    found: float = group.get("gtracer_rho", group.get("rho", 0.0))
    return found


def _has_kernel(rule: Rule) -> bool:
    if isinstance(rule, AdamRule):
        return True
    base: Any = rule.base
    hooked = base._optimizer_step_pre_hooks or base._optimizer_step_post_hooks
    return isinstance(rule, TorchRule) and type(base) is torch.optim.SGD and not hooked


def _couples_decay(rule: Rule) -> bool:
    coupled = isinstance(rule, AdamRule) and not rule.decoupled
    return coupled and any(group["weight_decay"] for group in rule.base.param_groups)


def _is_one_factor(transform: Transform) -> bool:
    """Whether all it does is to scale the total."""
    return bool(getattr(transform, "is_one_factor", False))


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None
