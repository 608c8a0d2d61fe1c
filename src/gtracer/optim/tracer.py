"""TRACER on any torch optimiser, and on SGD (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from gtracer import checks
from gtracer.curvature import update_average_
from gtracer.optim.fused import FusedTracer, launchable
from gtracer.optim.options import Options
from gtracer.optim.trial import Slice
from gtracer.penalty import BETA, DELTA, RHO
from gtracer.tensors import Tensors

if TYPE_CHECKING:
    from gtracer.optim.launches import Launched

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class Tracer(FusedTracer):
    """TRACER for any torch optimiser: it is fed ∇[L + ρT] instead of ∇L.

    >>> model = torch.nn.Linear(2, 1)
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

    def trained(self, p: Tensor) -> bool:
        return "f" in self.state.get(p, {})

    def average_of(self, group: dict[str, Any], params: Tensors) -> Tensors:
        return [self.state[p]["f"] for p in params]

    def _learn(self, slices: list[Slice]) -> None:
        if self._kernels is not None:
            super()._learn(slices)
            return
        for part in slices:
            f = self._average(part)
            self._run(update_average_)(f, part.measured, part.knobs["beta"])
            # Not before the base optimiser's first step: many initialise a state only while it is empty.
            for p, average in zip(part.params, f, strict=True):
                self.state[p]["f"] = average


class SGDTracer(Tracer):
    """SGD-TRACER, Algorithm 1: torch's SGD on L + ρT.

    Args:
        params: Parameters or groups, as for `torch.optim.SGD`.
        lr, momentum, dampening, weight_decay, nesterov, maximize, foreach, fused: As for `torch.optim.SGD`.
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
        fused: bool | None = None,
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
        checks.kind("fused", fused, (bool, type(None)))
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
        super().__init__(base, rho=rho, beta=beta, delta=delta, **options)

    def _launched(self, part: Slice) -> Launched | None:
        group, knobs, params = part.group, part.knobs, part.params
        momentum = group["momentum"]
        if group["maximize"] or (momentum and group["dampening"]):
            return None
        f, momenta = self._average(part), [self._momentum_of(p) for p in params] if momentum else None
        if not launchable(params, part.gradients, f, momenta or ()):
            return None
        from gtracer.optim.launches import Launched

        state = {p: {"f": x} for p, x in zip(params, f, strict=True) if not self.trained(p)}
        for p, m in zip(params, momenta or (), strict=False):
            if self.state.get(p, {}).get("momentum_buffer") is not m:
                state.setdefault(p, {})["momentum_buffer"] = m
        own = {"lr": group["lr"], "decay": group["weight_decay"], "nesterov": group["nesterov"]}
        betas = (momentum, 1 - knobs["beta"])
        return Launched(
            params, part.gradients, momenta, f, state=state, rho=knobs["rho"], delta=knobs["delta"], betas=betas, **own
        )

    def _momentum_of(self, p: Tensor) -> Tensor:
        """SGD's; with nothing behind it, its first one is the gradient alone."""
        found: Tensor | None = self.state.get(p, {}).get("momentum_buffer")
        return torch.zeros_like(p) if found is None else found
