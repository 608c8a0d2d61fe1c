"""The penalty ρT as a term of the loss, for any optimiser."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from gtracer import checks, tensors
from gtracer.curvature import (
    FIRST_GRADIENT,
    Estimator,
    Evaluation,
    Recording,
    chosen,
    gradient_magnitude,
    initial_average,
    trace_ratio,
    update_average_,
)
from gtracer.tensors import Tensors

RHO = 3e-3  # for training from scratch, with δ ≫ f: docs/explanation/defaults.md
RHO_FINE_TUNING = 6e-5  # for encoders that were trained before, which learn next to nothing with half of RHO: there too
RHO_ADAPTERS = 2e-4  # for adapters beside frozen weights: there too
BETA = 0.1
DELTA = 1e-2

NONFINITE = ("raise", "skip", "ignore")


class TracerPenalty:
    """Adds ρT to a loss, exactly, for any optimiser and any trainer that calls `backward()` for you.

    >>> w = torch.nn.Parameter(torch.tensor([2.0]))
    >>> penalty = TracerPenalty([w], rho=0.5, delta=1.0, f0=3.0)
    >>> penalty((w**2).sum() / 2)  # L + ρ g²/(f + δ) = 2 + 0.5 · 4/4
    tensor(2.5000, grad_fn=<AddBackward0>)

    Args:
        params: Tensors, or groups (dicts with `params` and any of `rho`, `beta`, `delta`, `f0`).
        rho: ρ, strength of the penalty.
        beta: β, the rate at which f follows the squared gradient.
        delta: δ, damping of the ratio.
        f0: f₀, `"first-gradient"` or a number.
        curvature: The estimator F of `gtracer.curvature` (default: the squared gradient). With `micro_batch(m)` the
            penalty is called with the vector of the examples' losses.
        average: Another estimator for f (default: the same).
        model: The model, if an estimator looks into its layers. Every pass with gradients is recorded until the next
            call.
        nonfinite: What to do about a NaN or infinite loss or T: `"raise"`; `"skip"`, which leaves f alone and
            returns the loss for the trainer to judge; `"ignore"`, which does not check (and so never waits for the
            device).

    Attributes:
        trace_ratio: T of the last call, summed over the groups; None before the first.
        param_groups: As an optimiser's; `RhoScheduler` sets their `rho`.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        rho: float = RHO,
        beta: float = BETA,
        delta: float = DELTA,
        f0: str | float = FIRST_GRADIENT,
        curvature: Estimator = gradient_magnitude,
        average: Estimator | None = None,
        model: nn.Module | None = None,
        nonfinite: str = "raise",
    ) -> None:
        listed = checks.parameters(params)
        groups = listed if isinstance(listed[0], dict) else [{"params": listed}]
        defaults = {"rho": rho, "beta": beta, "delta": delta, "f0": f0}
        self.param_groups: list[dict[str, Any]] = [defaults | group for group in groups]
        for group in self.param_groups:
            group["params"] = [p[1] if isinstance(p, tuple) else p for p in group["params"]]
            checks.hyperparameters(group)
        checks.choice("nonfinite", nonfinite, NONFINITE)
        checks.kind("model", model, (nn.Module, type(None)))
        self.nonfinite = nonfinite
        self.curvature = chosen(curvature, average, model)
        self._recording = Recording(model) if model is not None and self.curvature.needs_layers else None
        if self._recording:
            self._recording.start()
        self.state: dict[Tensor, Tensor] = {}
        self.trace_ratio: Tensor | None = None  # T of the last call, summed over the groups

    def __call__(self, loss: Tensor) -> Tensor:
        """Return L + ρT with its graph, then let f follow F.

        Under `torch.no_grad()` (evaluation) the loss comes back as it is.
        """
        if not torch.is_grad_enabled():
            return loss
        losses, loss = self._checked(loss)
        if not self.state and any(group["rho"] > 0 for group in self.param_groups):  # before the first
            _check_twice_differentiable(loss)
        penalised, total, updates = loss, torch.zeros_like(loss, requires_grad=False), []
        for group, params, F, measured in self._measured(loss, losses):
            f = self._average(group, params, measured)
            # Algorithm 1 uses f before its update.
            ratio = trace_ratio(F, f, group["delta"])
            if group["rho"] > 0:
                penalised = penalised + group["rho"] * ratio
            total = total + ratio.detach()
            updates.append((params, f, measured, group["beta"]))
        self.trace_ratio = total
        if self.nonfinite == "ignore" or torch.isfinite(penalised + total):
            for params, f, measured, beta in updates:
                update_average_(f, measured, beta)
                self.state.update(zip(params, f, strict=True))
        elif self.nonfinite == "raise":
            raise FloatingPointError(
                f"the loss is {loss.item():g} and its trace ratio T is {total.item():g}: f was left as it was. "
                "Lower the learning rate or rho, or pass nonfinite='skip' to go on"
            )
        return penalised

    def _checked(self, loss: Tensor) -> tuple[Tensor | None, Tensor]:
        """The examples' losses, where they are wanted, and their mean."""
        if self.curvature.parts is None:
            checks.loss(loss, "TracerPenalty")
            return None, loss
        if not isinstance(loss, Tensor) or loss.ndim != 1 or not loss.requires_grad:
            raise RuntimeError(
                f"TracerPenalty with micro_batch({self.curvature.parts}) needs the vector of the examples' losses with "
                f"its graph (reduction='none'), got {loss!r}"
            )
        return loss, loss.mean()

    def _measured(self, loss: Tensor, losses: Tensor | None) -> list[tuple[dict[str, Any], Tensors, Tensors, Tensors]]:
        """Each group with those of its parameters that the loss depends on, their F with graph, and the average's."""
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        strong = any(group["rho"] > 0 for group in self.param_groups)
        recording = self._recording
        if recording:
            recording.stop()  # an estimator may call layers again
        try:
            at = Evaluation(loss, params, recording, differentiable=strong, losses=losses)
            both = {p: pair for p, *pair in zip(at.params, *self.curvature.measure(at), strict=True)}
        finally:
            if recording:
                recording.forget()
                recording.start()
        slices: list[tuple[dict[str, Any], Tensors, Tensors, Tensors]] = []
        for group in self.param_groups:
            checks.hyperparameters(group)
            used = [p for p in group["params"] if p in both]
            if used:
                slices.append((group, used, [both[p][0] for p in used], [both[p][1] for p in used]))
        return slices

    def _average(self, group: dict[str, Any], params: Tensors, measured: Tensors) -> Tensors:
        return [
            self.state[p] if p in self.state else initial_average([F], group["f0"])[0]
            for p, F in zip(params, measured, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """f, in the order of the parameters, and the groups' hyper-parameters."""
        return {
            "f": [[self.state.get(p) for p in group["params"]] for group in self.param_groups],
            "param_groups": [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict()` returned. The state of other parameters is refused."""
        theirs = [[None if f is None else tuple(f.shape) for f in group] for group in state_dict["f"]]
        ours = [[tuple(p.shape) for p in group["params"]] for group in self.param_groups]
        same = len(theirs) == len(ours) and all(
            len(t) == len(o) and all(a is None or a == b for a, b in zip(t, o, strict=True))
            for t, o in zip(theirs, ours, strict=True)
        )
        if not same:
            raise ValueError(f"state_dict holds f for parameters of shapes {theirs}, but this penalty has {ours}")
        self.state.clear()
        for group, numbers, fs in zip(self.param_groups, state_dict["param_groups"], state_dict["f"], strict=True):
            group.update(numbers)
            for p, f in zip(group["params"], fs, strict=True):
                if f is not None:
                    self.state[p] = f.to(p, copy=True)


def _check_twice_differentiable(loss: Tensor) -> None:
    """Refuse what cannot be differentiated twice, or cannot and does not say so."""
    names = {type(node).__name__ for node in tensors.nodes(loss)}
    if attention := sorted(name for name in names if name.startswith(("ScaledDotProduct", "FlashAttn"))):
        raise RuntimeError(
            f"TracerPenalty differentiates the loss twice, and fused attention ({attention[0]}) cannot be: call "
            "model.set_attn_implementation('eager') on a model of transformers, or wrap the forward pass in "
            "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH). A second pass "
            "(TracerTrainer, AdamWTracer) takes any attention"
        )
