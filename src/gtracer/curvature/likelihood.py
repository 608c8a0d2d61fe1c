"""Output distributions: the likelihood whose negative logarithm a loss is, as the Fisher matrix needs it.

Each says how the loss of one example curves in the model's output: `factors` are vectors s with Σ s sᵀ = ∇²l,
and `slope` is the score of a label drawn from the model itself, for which E[slope slopeᵀ] = ∇²l.
Outputs are examples × outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from gtracer import checks


class Likelihood(Protocol):
    def factors(self, outputs: Tensor) -> Iterator[Tensor]: ...

    def slope(self, outputs: Tensor, temperature: float | None) -> Tensor: ...


@dataclass(frozen=True)
class Categorical:
    """Cross-entropy on logits: l = −log softmax(z)_y."""

    def factors(self, outputs: Tensor) -> Iterator[Tensor]:
        """√p_c (p − e_c), class by class."""
        log_p = functional.log_softmax(outputs, 1)
        p, eye = log_p.exp(), torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device)
        for c in range(outputs.shape[1]):
            yield (log_p[:, c, None] / 2).exp() * (p - eye[c])

    def slope(self, outputs: Tensor, temperature: float | None) -> Tensor:
        """p − y for y ∼ p. With a temperature y carries the gradient of its Gumbel-Softmax relaxation.

        Straight through: the value is a true sample, so its square is unbiased; only the gradient is relaxed.
        """
        label = functional.gumbel_softmax(outputs, tau=temperature or 1.0, hard=True)
        off: Tensor = functional.softmax(outputs, 1) - (label.detach() if temperature is None else label)
        return off


@dataclass(frozen=True)
class Gaussian:
    """Mean squared error: l = mean_c (z_c − y_c)², a normal distribution of variance C/2 in each of C outputs."""

    def factors(self, outputs: Tensor) -> Iterator[Tensor]:
        eye = torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device)
        for row in torch.unbind(eye * math.sqrt(2 / outputs.shape[1])):
            yield row.expand_as(outputs)

    def slope(self, outputs: Tensor, temperature: float | None) -> Tensor:
        """(z − y)/σ² for y = z + σν: reparameterised, the outputs cancel."""
        variance = outputs.shape[1] / 2
        label = outputs + math.sqrt(variance) * torch.randn_like(outputs)
        off: Tensor = outputs - (label.detach() if temperature is None else label)
        return off / variance


@dataclass(frozen=True)
class Bernoulli:
    """Binary cross-entropy on logits, the mean over C outputs."""

    def factors(self, outputs: Tensor) -> Iterator[Tensor]:
        eye = torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device)
        # √(p (1 − p)) from logarithms: its derivative stays finite where p is 0 or 1 to rounding.
        root = ((functional.logsigmoid(outputs) + functional.logsigmoid(-outputs)) / 2).exp()
        for row in torch.unbind(eye):
            yield root * row / math.sqrt(outputs.shape[1])

    def slope(self, outputs: Tensor, temperature: float | None) -> Tensor:
        """(p − y)/√C for y ∼ p: the outputs are independent, so the square has no cross terms in the mean."""
        pair = torch.stack([outputs, torch.zeros_like(outputs)], -1)
        label = functional.gumbel_softmax(pair, tau=temperature or 1.0, hard=True)[..., 0]
        off: Tensor = torch.sigmoid(outputs) - (label.detach() if temperature is None else label)
        return off / math.sqrt(outputs.shape[1])


KNOWN: dict[Any, Callable[[], Likelihood]] = {
    functional.cross_entropy: Categorical,
    nn.CrossEntropyLoss: Categorical,
    functional.mse_loss: Gaussian,
    nn.MSELoss: Gaussian,
    functional.binary_cross_entropy_with_logits: Bernoulli,
    nn.BCEWithLogitsLoss: Bernoulli,
}


def likelihood_of(loss: Any) -> Likelihood:
    """The output distribution of a loss of torch, given as function, class or module."""
    name = getattr(loss, "__name__", type(loss).__name__)
    kind = type(loss) if isinstance(loss, nn.Module) else loss
    try:
        known = KNOWN.get(kind)
    except TypeError:  # not hashable
        known = None
    if known is None:
        names = ", ".join(sorted({key.__name__ for key in KNOWN}))
        raise ValueError(
            f"loss = {name} has no known output distribution (known: {names}): use curvature=per_example, micro_batch "
            "or hutchinson, which need none"
        )
    for option in ("weight", "pos_weight"):
        if getattr(loss, option, None) is not None:
            raise ValueError(
                f"loss = {name} with {option} is no likelihood, and so has no output distribution: leave {option} out, "
                "or use curvature=per_example, which needs none"
            )
    if isinstance(loss, nn.Module):
        checks.choice("reduction of the loss", loss.reduction, ["mean"])
    return known()
