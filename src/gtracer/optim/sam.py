"""SAM and ASAM, the paper's baseline, on the two-pass scheme."""

from __future__ import annotations

import torch
from torch import nn

from gtracer import checks, tensors
from gtracer.optim.clip import Clip
from gtracer.optim.partwise import PartwiseOptimizer
from gtracer.optim.trial import Plan, Slice
from gtracer.penalty import Passes
from gtracer.tensors import Tensors


def sharpness_change(gradients: Tensors, displacement: Tensors) -> Passes:
    """∇L(w + e) − ∇L(w): what SAM adds to the gradient."""
    ahead = yield displacement
    torch._foreach_sub_(ahead, gradients)
    return ahead


class SAM(PartwiseOptimizer):
    """Sharpness-aware minimisation (Foret et al. 2021) on any torch optimiser: steps with ∇L(w + ρ ∇L/‖∇L‖).

    >>> model = nn.Linear(2, 1)
    >>> opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05)
    >>> loss = opt.step(lambda: model(torch.ones(4, 2)).square().mean())

    Args:
        base_optimizer: Makes the update.
        rho: ρ, radius of the neighbourhood. May be set per group.
        adaptive: ASAM (Kwon et al. 2021): the neighbourhood is measured in units of |w| + η.
        eta: ASAM's η.
        interval, model, nonfinite, clip: As for `Tracer`.
    """

    def __init__(
        self,
        base_optimizer: torch.optim.Optimizer,
        *,
        rho: float = 0.05,
        adaptive: bool = False,
        eta: float = 0.01,
        interval: int = 1,
        model: nn.Module | None = None,
        nonfinite: str = "raise",
        clip: Clip | None = None,
    ) -> None:
        checks.flag("adaptive", adaptive)
        checks.number("eta", eta, low=0)
        self.adaptive, self.eta = adaptive, eta
        super().__init__(base_optimizer, {"rho": rho}, interval=interval, model=model, nonfinite=nonfinite, clip=clip)

    _settings = (*PartwiseOptimizer._settings, "adaptive", "eta")

    def _plan(self, slices: list[Slice], due: bool) -> Plan:
        if not due:
            return Plan(None)
        params = [p for part in slices for p in part.params]
        gradients = [g for part in slices for g in part.gradients]
        # ASAM's ball is ‖e / T‖ ≤ ρ with T = |w| + η, so e = ρ T² ∇L / ‖T ∇L‖; SAM has T = 1.
        steps = self._stretched(params, gradients)
        length = tensors.norm(steps)
        rhos = [part.signed_rho for part in slices for _ in part.params]
        displacement = list(torch._foreach_mul(self._stretched(params, steps), rhos))
        tensors.scale_(displacement, torch.where(length > 0, 1 / length, 0.0))
        if self._may_overflow:
            tensors.finite_(displacement)
        return Plan(sharpness_change(gradients, displacement))

    def _stretched(self, params: Tensors, xs: Tensors) -> Tensors:
        """T x."""
        return [x * (p.abs() + self.eta) for p, x in zip(params, xs, strict=True)] if self.adaptive else xs
