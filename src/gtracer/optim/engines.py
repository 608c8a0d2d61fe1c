"""The engines that differentiate the penalty: ∇(ρT) by double backward, or by a finite difference of gradients.

With F = (∇L)² and f held constant, ∇(ρT) = 2 H u with u = ρ ∇L / (f + δ): one Hessian-vector product. An engine is a
generator with one signature, `engine(params, gradients, direction)`: it yields displacements of the weights, is sent
the gradient of the loss there, and returns 2 H u. So the caller owns the passes, whether it runs a closure or waits for
the user's own backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from gtracer import checks, tensors
from gtracer.curvature import Shifts
from gtracer.optim.step import Passes
from gtracer.scopes import moved
from gtracer.tensors import Tensors

RADIUS = 0.05

# From a function to one that does the same, compiled for one.
Runner = Callable[[Callable[..., Any]], Callable[..., Any]]


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """The runner that changes nothing."""
    return function


class Engine(Protocol):
    """How T is differentiated.

    Attributes:
        is_exact: By differentiating the gradient again.
        central: By two displaced passes, one to either side.
    """

    @property
    def is_exact(self) -> bool: ...
    @property
    def central(self) -> bool: ...


@dataclass(frozen=True)
class FiniteDifference:
    """∇(ρT) from gradients at displaced weights: first-order passes only, so any layer and compiled model works.

    >>> FiniteDifference(radius=0.02)
    FiniteDifference(radius=0.02, central=False)

    Attributes:
        radius: Length of the displacement of the whole weight vector. A longer one has a larger error and less
            rounding.
        central: Displace to both sides: two extra passes instead of one, with an error of second order.
    """

    radius: float = RADIUS
    central: bool = False

    def __post_init__(self) -> None:
        checks.number("radius", self.radius, low=0, open_low=True)
        checks.flag("central", self.central)

    is_exact: ClassVar[bool] = False


@dataclass(frozen=True)
class Exact:
    """∇(ρT) by differentiating the gradient again, for models that can be differentiated twice (double backward)."""

    is_exact: ClassVar[bool] = True
    central: ClassVar[bool] = False


def direction(g: Tensors, f: Tensors, delta: float) -> Tensors:
    """v = ∇L / (f + δ)."""
    v = tensors.inverse(f, delta)
    torch._foreach_mul_(v, g)
    return v


def aimed(g: Tensors, f: Tensors, delta: float, rho: float | Tensor) -> tuple[Tensors, Tensor]:
    """u = ρ ∇L / (f + δ), and T = Σ (∇L)² / (f + δ)."""
    u = tensors.inverse(f, delta)
    torch._foreach_mul_(u, g)
    ratio = tensors.aligned(g, u)
    torch._foreach_mul_(u, rho)
    return u, ratio


def exact(params: Tensors, gradients: Tensors, direction: Tensors) -> Passes:
    """2 H u by differentiating the gradients again; they must carry their graph."""
    return torch._foreach_mul(_pulled_back(gradients, params, direction), 2)
    yield  # no displaced pass is needed, but the signature is that of a generator


def differentiated(params: Tensors, F: Tensors, weights: Tensors) -> Passes:
    """∇⟨F, weights⟩, for any estimate F that carries its graph; `weights` are the constants ρ/(f + δ)."""
    return tensors.clone(_pulled_back(F, params, weights))  # autograd may give views
    yield  # as above


def _pulled_back(roots: Tensors, params: Tensors, weights: Tensors) -> Tensors:
    """∇⟨roots, weights⟩ with respect to the parameters."""
    curved = [(root, w) for root, w in zip(roots, weights, strict=True) if root.requires_grad]
    if not curved:  # the loss is linear in the weights
        return [torch.zeros_like(p) for p in params]
    roots, weights = zip(*curved, strict=True)
    try:
        return list(torch.autograd.grad(roots, list(params), weights, allow_unused=True, materialize_grads=True))
    except RuntimeError as error:
        if "double backward" in str(error) or "not implemented" in str(error):
            raise RuntimeError(
                "engine='exact' differentiates twice, and this model cannot (torch.compile and fused attention "
                "kernels cannot). Use engine='finite-difference', or for attention wrap the forward pass in "
                f"torch.nn.attention.sdpa_kernel(SDPBackend.MATH). torch said: {error}"
            ) from error
        raise


def finite_difference(
    params: Tensors,
    gradients: Tensors,
    direction: Tensors,
    *,
    radius: float = RADIUS,
    central: bool = False,
    run: Runner = as_it_is,
    again: Callable[[], Tensors] | None = None,
    safely: bool = False,
) -> Passes:
    """2 H u from gradients `radius` away along u: one further pass, or with `central` two.

    The error is O(radius), with `central` O(radius²). The direction and the gradients that are
    sent in are overwritten, so that no further copy of the weights is needed. `run` may compile the arithmetic.
    With `again`, which computes the direction once more, not even the weights are copied (and not with `central`).
    `safely`, and always with `again`, no weight is displaced to infinity or NaN.
    """
    safely = safely or again is not None
    length = run(tensors.shorten_)(direction, radius, safely=safely)

    def shortened() -> Tensors:
        assert again is not None
        u = again()
        run(tensors.shorten_)(u, radius, safely=safely)
        return u

    # Whoever displaces the weights empties the list, which then holds no memory any more.
    place = list(direction) if central else direction
    ahead = tensors.wide((yield place if again is None else moved(params, place, shortened)))
    if central:
        torch._foreach_neg_(direction)
        behind = tensors.wide((yield direction))
    else:
        behind = gradients
    run(tensors.subtract_)(ahead, behind, length / radius if central else 2 * length / radius)
    return ahead


def example_difference(
    gradients: Tensors, shifts: Shifts, length: Tensor, *, radius: float = RADIUS, central: bool = False
) -> Passes:
    """mean_i 2 H_i u_i from gradients with every example's weights moved along its own u_i; as above.

    Args:
        gradients: ∇L at the weights.
        shifts: Moves of the examples by u_i = g_i/(f + δ) times ρ.
        length: √mean_i ‖u_i‖². One scale for all keeps the moves proportional to u_i, so that one difference of mean
            gradients is the mean of all of them.
        radius: The moves' root mean square.
        central: Whether to take the difference both ways.
    """
    scale = torch.where(length > 0, radius / length, 0.0)
    ahead = yield shifts.made(scale)
    behind: Tensors = (yield shifts.made(-scale)) if central else gradients
    tensors.subtract_(ahead, behind, length / radius if central else 2 * length / radius)
    return ahead
