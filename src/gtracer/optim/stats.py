"""What a step did, kept on the device until somebody reads it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


class NonFiniteError(FloatingPointError):
    """A loss or gradient was NaN or infinite; nothing was updated.

    Args:
        message: What was not finite.
        loss: The loss of the step, as the closure returned it.
    """

    def __init__(self, message: str, loss: Any = None) -> None:
        super().__init__(message)
        self.loss = loss


class Stats:
    """Numbers of the last step. Reading them waits for the device; keeping them does not.

    Attributes:
        loss: L at the old weights (NaN in a step without a closure).
        trace_ratio: T (NaN for SAM).
        gradient_norm: ‖∇L‖.
        penalty_ratio: ‖ρ∇T‖ / ‖∇L‖; for SAM, with its change to the gradient in place of ρ∇T. 0 in a step without
            penalty. It does not tell whether ρ is right: see `gtracer.find_rho`.
        cosine: cos(∇L, ∇T) (NaN in a step without penalty).
        rho: ρ of the first group, in this step.
        damped_share: Share of the coordinates where δ > f, with the optimiser's f when it is first read (NaN for SAM).
    """

    def __init__(
        self,
        loss: Tensor | None,
        trace_ratio: Tensor | None,
        size: Tensor,  # ‖∇L‖
        change: Tensor | None = None,  # ‖ρ∇T‖
        total: Tensor | None = None,  # ‖∇L + ρ∇T‖
    ) -> None:
        known = [math.nan if x is None else x.detach().reshape(()).to(size) for x in (loss, trace_ratio)]
        values = [*known, size, 0.0 if change is None else change, math.nan if total is None else total]
        missing = torch.zeros_like(size)
        self._values = torch.stack([x if isinstance(x, Tensor) else missing + x for x in values])
        self._has_loss = loss is not None

    _of: tuple[Tensor, Tensor, Tensor]
    set_rho: float | Tensor = math.nan  # as the step had it: a number, or on the device
    _squared = False  # whether norms are still to be taken the root of
    _read: list[float] | None = None
    _damped_share: float | None = None
    count_damped: Callable[[], Tensor] | None = None

    @classmethod
    def of_squares(cls, loss: Tensor | None, reached: Tensor, sums: Tensor | None) -> Stats:
        """From T and ‖∇L‖² after something else, and ‖ρ∇T‖² and ‖∇L + ρ∇T‖², which nobody else writes into.

        The loss may be followed by other numbers.
        """
        if sums is None or loss is None:
            norms = [None, None] if sums is None else list(sums.sqrt())
            return cls(loss, reached[1], reached[2].sqrt(), *norms)
        made = cls.__new__(cls)
        made._of = loss, reached, sums
        made._squared = made._has_loss = True
        return made

    @cached_property
    def _values(self) -> Tensor:
        """Loss, T and the norms, or their squares; put together when somebody asks."""
        loss, reached, sums = self._of
        return torch.cat([loss.reshape(-1)[:1].to(reached), reached[1:], sums])

    def on_device(self) -> Tensor:
        """Loss, T and ‖ρ∇T‖/‖∇L‖ as a tensor, without waiting for the device."""
        loss, trace_ratio, size, change, _ = self._values
        ratio = change / size
        return torch.stack([loss, trace_ratio, ratio.sqrt() if self._squared else ratio])

    @property
    def penalty(self) -> Tensor:
        """cos(∇L, ∇T) and ‖ρ∇T‖/‖∇L‖ as a tensor, without waiting for the device; NaN in a step without penalty."""
        g, h, total = (self._values[2:] if self._squared else self._values[2:].square()).unbind()
        return torch.stack([(total - g - h) / 2, h]) / (g * h).sqrt()

    def read(self) -> list[float]:
        """Loss, T, ‖∇L‖, ‖ρ∇T‖ and ‖∇L + ρ∇T‖."""
        if self._read is None:
            self._read = self._values.tolist()
            if self._squared:
                self._read[2:] = map(math.sqrt, self._read[2:])
        return self._read

    @property
    def loss(self) -> float:
        return self.read()[0]

    @property
    def rho(self) -> float:
        return float(self.set_rho)

    @property
    def trace_ratio(self) -> float:
        return self.read()[1]

    @property
    def gradient_norm(self) -> float:
        return self.read()[2]

    @property
    def penalty_norm(self) -> float:
        return self.read()[3]

    @property
    def penalty_ratio(self) -> float:
        return _ratio(self.penalty_norm, self.gradient_norm) if self.penalty_norm else 0.0

    @property
    def cosine(self) -> float:
        _, _, g, h, total = self.read()
        # ‖g + h‖² = ‖g‖² + ‖h‖² + 2 ⟨g, h⟩, and the norm of the sum is one kernel, not one for every tensor.
        cosine = _ratio(total**2 - g**2 - h**2, 2 * g * h)
        return cosine if math.isnan(cosine) else max(-1.0, min(1.0, cosine))

    @property
    def damped_share(self) -> float:
        if self._damped_share is None:
            self._damped_share = math.nan if self.count_damped is None else self.count_damped().item()
        return self._damped_share

    def nonfinite(self, *, loss: bool = True) -> str:
        """Say what is NaN or infinite; empty if nothing is. A loss that is not known is not checked."""
        value, _, size, change, _ = self.read()
        values = {
            "the loss": value if loss and self._has_loss else 0.0,
            "the norm of the gradient": size,
            "the norm of the penalty's gradient": change,
        }
        return ", ".join(f"{name} is {value:g}" for name, value in values.items() if not math.isfinite(value))

    def as_dict(self) -> dict[str, float]:
        """All numbers, for a logger."""
        names = ("loss", "trace_ratio", "gradient_norm", "penalty_ratio", "cosine", "damped_share", "rho")
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        return "Stats(" + ", ".join(f"{name}={value:.4g}" for name, value in self.as_dict().items()) + ")"


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


class Verdict:
    """Whether a step's numbers were finite, on its way from the device."""

    def __init__(self, healthy: Tensor) -> None:
        self._value, self._arrival = healthy, None
        if healthy.is_cuda:
            self._value = torch.empty(healthy.shape, dtype=healthy.dtype, pin_memory=True)
            self._value.copy_(healthy, non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record()

    @property
    def is_there(self) -> bool:
        """Whether nobody has to wait for it."""
        return self._arrival is None or bool(self._arrival.query())  # type: ignore[no-untyped-call]

    @property
    def is_healthy(self) -> bool:
        """Waits for the device, where it is not there yet."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return bool(self._value)
