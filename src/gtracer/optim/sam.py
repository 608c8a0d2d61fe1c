"""SAM and ASAM, the paper's baseline, on the two-pass scheme."""

from __future__ import annotations

import torch
from torch import nn

from gtracer import checks
from gtracer.optim.keywords import checked_keywords
from gtracer.optim.methods import Sharpness
from gtracer.optim.optimizer import TwoPassOptimizer
from gtracer.optim.refusals import check_base
from gtracer.optim.rules import TorchRule
from gtracer.optim.transforms import Clip, transforms_of


class SAM(TwoPassOptimizer):
    """Sharpness-aware minimisation (Foret et al. 2021) on any torch optimiser: steps with ∇L(w + ρ ∇L/‖∇L‖).

    >>> model = nn.Linear(2, 1)
    >>> opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05)
    >>> loss = opt.step(lambda: model(torch.ones(4, 2)).square().mean())

    Args:
        base_optimizer: Makes the update. Its groups, state and schedulers stay valid.
        rho: ρ, radius of the neighbourhood. May be set per group.
        adaptive: ASAM (Kwon et al. 2021): the neighbourhood is measured in units of |w| + η.
        eta: ASAM's η.
        interval: Number of steps from one second pass to the next.
        model: If given, the displaced pass leaves its batch-norm statistics and other buffers unchanged.
        nonfinite: What to do if the loss or a gradient is NaN or infinite: `"raise"`, `"skip"` the step, or `"ignore"`,
            which does not check. The first two wait for one number from the device.
        clip: Limits for the gradient that makes the update, such as `Clip(norm=1.0)`.
    """

    @checked_keywords
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
        check_base(base_optimizer, TwoPassOptimizer)
        checks.flag("adaptive", adaptive)
        checks.number("eta", eta, low=0)
        super().__init__(
            {"rho": rho},
            method=Sharpness(adaptive, eta),
            rule=TorchRule(base_optimizer, keeps_average=False),
            transforms=transforms_of(clip),
            interval=interval,
            model=model,
            nonfinite=nonfinite,
        )
