"""The penalty ρT: its direction, the two engines that differentiate it, and the loss term for any optimiser.

With F = (∇L)² and f held constant, ∇(ρT) = 2 H u with u = ρ ∇L / (f + δ): one Hessian-vector product.
The two engines compute it. Each is a generator with one signature, `engine(params, gradients,
direction)`: it yields displacements of the weights, is sent the gradient of the loss there, and returns
2 H u. So the caller owns the passes, whether it runs a closure or waits for the user's own backward.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import torch
from torch import Tensor

from gtracer import checks, curvature, tensors
from gtracer.tensors import Tensors

Passes = Generator[Tensors, Tensors, Tensors]

RHO = 3e-3  # ρ/δ ≈ 0.3 with δ ≫ f did best wherever it was measured: docs/algorithm.md, "Defaults"
BETA = 0.1
DELTA = 1e-2
RADIUS = 0.05

NONFINITE = ("raise", "skip", "ignore")


def direction(g: Tensors, f: Tensors, delta: float) -> Tensors:
    """v = ∇L / (f + δ)."""
    v = curvature.inverse(f, delta)
    torch._foreach_mul_(v, g)
    return v


def exact(params: Tensors, gradients: Tensors, direction: Tensors) -> Passes:
    """2 H u by differentiating the gradients again; they must carry their graph."""
    curved = [(g, u) for g, u in zip(gradients, direction, strict=True) if g.requires_grad]
    if not curved:  # the loss is linear in the weights
        return [torch.zeros_like(p) for p in params]
    roots, weights = zip(*curved, strict=True)
    try:
        product = torch.autograd.grad(roots, list(params), weights, allow_unused=True, materialize_grads=True)
    except RuntimeError as error:
        if "double backward" in str(error) or "not implemented" in str(error):
            raise RuntimeError(
                "engine='exact' differentiates twice, and this model cannot (torch.compile and fused attention "
                "kernels cannot). Use engine='finite-difference', or for attention wrap the forward pass in "
                f"torch.nn.attention.sdpa_kernel(SDPBackend.MATH). torch said: {error}"
            ) from error
        raise
    return torch._foreach_mul(product, 2)
    yield  # no displaced pass is needed, but the signature is that of a generator


def finite_difference(
    params: Tensors,
    gradients: Tensors,
    direction: Tensors,
    *,
    radius: float = RADIUS,
    central: bool = False,
) -> Passes:
    """2 H u from gradients `radius` away along u: one further pass, or with `central` two.

    The error is O(radius), with `central` O(radius²). The direction and the gradients that are
    sent in are overwritten, so that no further copy of the weights is needed.
    """
    displacement = list(direction)
    length = tensors.norm(displacement)
    # 0/0 would turn a vanished gradient into NaN; its penalty is 0.
    tensors.scale_(displacement, torch.where(length > 0, radius / length, 0.0))
    ahead = yield displacement
    if central:
        torch._foreach_neg_(displacement)
        behind: Tensors = yield displacement
    else:
        behind = gradients
    torch._foreach_sub_(ahead, behind)
    tensors.scale_(ahead, length / radius if central else 2 * length / radius)
    return ahead


class TracerPenalty:
    """Adds ρT to a loss, exactly, for any optimiser and any trainer that calls `backward()` for you.

    >>> w = torch.nn.Parameter(torch.tensor([2.0]))
    >>> penalty = TracerPenalty([w], rho=0.5, delta=1.0, f0=3.0)
    >>> penalty((w**2).sum() / 2)  # L + ρ g²/(f + δ) = 2 + 0.5 · 4/4
    tensor(2.5000, grad_fn=<AddBackward0>)

    Args:
        params: Tensors, or groups (dicts with `params` and any of `rho`, `beta`, `delta`, `f0`).
        rho: ρ, strength of the penalty.
        beta: β, how fast f follows the squared gradient.
        delta: δ, damping of the ratio.
        f0: f₀, `"first-gradient"` or a number.
        nonfinite: What to do about a NaN or infinite loss or T: `"raise"`; `"skip"`, which leaves f alone and
            returns the loss for the trainer to judge; `"ignore"`, which does not look (and so never waits for
            the device).
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        rho: float = RHO,
        beta: float = BETA,
        delta: float = DELTA,
        f0: str | float = curvature.FIRST_GRADIENT,
        nonfinite: str = "raise",
    ) -> None:
        listed = checks.parameters(params)
        groups = listed if isinstance(listed[0], dict) else [{"params": listed}]
        defaults = {"rho": rho, "beta": beta, "delta": delta, "f0": f0}
        self.param_groups: list[dict[str, Any]] = [defaults | group for group in groups]
        for group in self.param_groups:
            group["params"] = [p[1] if isinstance(p, tuple) else p for p in group["params"]]
            check_group(group)
        checks.choice("nonfinite", nonfinite, NONFINITE)
        self.nonfinite = nonfinite
        self.state: dict[Tensor, Tensor] = {}
        self.trace_ratio: Tensor | None = None  # T of the last call, summed over the groups

    def __call__(self, loss: Tensor) -> Tensor:
        """Return L + ρT with its graph, then let f follow the gradient of L.

        Under `torch.no_grad()` (evaluation) the loss comes back as it is.
        """
        if not torch.is_grad_enabled():
            return loss
        check_loss(loss, "TracerPenalty")
        penalised, total, updates = loss, torch.zeros_like(loss, requires_grad=False), []
        for group, params, g in self._gradients(loss):
            constant = [x.detach() for x in g]
            f = self._average(group, params, constant)
            # Algorithm 1 uses f before its update.
            ratio = curvature.trace_ratio(curvature.gradient_magnitude(g), f, group["delta"])
            if group["rho"] > 0:
                penalised = penalised + group["rho"] * ratio
            total = total + ratio.detach()
            updates.append((params, f, constant, group["beta"]))
        self.trace_ratio = total
        if self.nonfinite == "ignore" or torch.isfinite(penalised + total):
            for params, f, constant, beta in updates:
                curvature.update_average_(f, curvature.gradient_magnitude(constant), beta)
                self.state.update(zip(params, f, strict=True))
        elif self.nonfinite == "raise":
            raise FloatingPointError(
                f"the loss is {loss.item():g} and its trace ratio T is {total.item():g}: f was left as it was. "
                "Lower the learning rate or rho, or pass nonfinite='skip' to go on"
            )
        return penalised

    def _gradients(self, loss: Tensor) -> list[tuple[dict[str, Any], Tensors, Tensors]]:
        """Each group with those of its parameters that the loss depends on, and their gradients with graph."""
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        twice = any(group["rho"] > 0 for group in self.param_groups)
        found = torch.autograd.grad(loss, params, create_graph=twice, retain_graph=True, allow_unused=True)
        gradients = {p: g for p, g in zip(params, found, strict=True) if g is not None}
        slices: list[tuple[dict[str, Any], Tensors, Tensors]] = []
        for group in self.param_groups:
            check_group(group)
            used = [p for p in group["params"] if p in gradients]
            if used:
                slices.append((group, used, [gradients[p] for p in used]))
        return slices

    def _average(self, group: dict[str, Any], params: Tensors, g: Tensors) -> Tensors:
        return [
            self.state[p] if p in self.state else curvature.initial_average([x], group["f0"])[0]
            for p, x in zip(params, g, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """f, in the order of the parameters, and the groups' numbers."""
        return {
            "f": [[self.state.get(p) for p in group["params"]] for group in self.param_groups],
            "param_groups": [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict()` gave; refused when it belongs to other parameters."""
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


def check_group(group: dict[str, Any]) -> None:
    """Refuse a group whose ρ, β, δ or f₀ is out of range; Adam's groups have no β of their own."""
    checks.number("rho", group["rho"], low=0)
    checks.number("delta", group["delta"], low=0)
    if "beta" in group:
        checks.number("beta", group["beta"], low=0, high=1)
    if isinstance(group["f0"], str):
        checks.choice("f0", group["f0"], [curvature.FIRST_GRADIENT])
    else:
        checks.number("f0", group["f0"], low=0)


def check_loss(loss: Any, who: str) -> None:
    """Refuse what cannot be differentiated."""
    if not isinstance(loss, Tensor):
        raise RuntimeError(f"{who} needs the loss as a tensor, got {loss!r} ({type(loss).__name__})")
    if not loss.requires_grad:
        raise RuntimeError(
            f"{who} needs a loss with a graph, got {loss!r}: compute it with gradients enabled and do not detach it"
        )
    if loss.numel() != 1:
        raise RuntimeError(f"{who} needs a scalar loss, got shape {tuple(loss.shape)}: average it over the batch")
