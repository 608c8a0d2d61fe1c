"""Schedules of ρ: it lives in the parameter groups, as the learning rate does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from gtracer import checks


class HasGroups(Protocol):
    """An optimiser, or a `TracerPenalty`."""

    param_groups: list[dict[str, Any]]


def linear_warmup(steps: int) -> Callable[[int], float]:
    """A factor that rises from 1/steps to 1 over `steps` steps and stays at 1.

    >>> [linear_warmup(4)(step) for step in range(6)]
    [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    """
    checks.count("steps", steps)
    return lambda step: min(1.0, (step + 1) / steps)


class RhoScheduler(LRScheduler):
    """Sets each group's `rho` to its initial value times `factor(step)`, as torch's LambdaLR does for `lr`.

    It counts as a scheduler of torch's, which Lightning requires. It does not change learning rates.

    Args:
        optimizer: An optimiser of gtracer, or a `TracerPenalty`: anything with `rho` in its `param_groups`.
        factor: Maps the number of `step()` calls so far to the factor. For warm-up, `linear_warmup(steps)`.
    """

    def __init__(self, optimizer: HasGroups, factor: Callable[[int], float]) -> None:
        self._key = getattr(optimizer, "rho_key", "rho")
        if not all(self._key in group for group in getattr(optimizer, "param_groups", [{}])):
            raise ValueError(f"optimizer must have rho in its param_groups, got {type(optimizer).__name__}")
        if any(group.get("rho_is_auto") for group in optimizer.param_groups):
            raise ValueError("optimizer sets its ρ itself (rho='auto'): pass a number for rho to schedule it")
        if not callable(factor):
            raise ValueError(f"factor must be a function of the step, got {factor!r}")
        self.optimizer = optimizer  # type: ignore[assignment]
        self.factor = factor
        self.last_step = 0
        for group in optimizer.param_groups:
            group.setdefault("initial_rho", group[self._key])
        self._set()

    def step(self, epoch: int | None = None) -> None:
        """Advance by one step. Call it after the optimiser's step, as the learning-rate scheduler's."""
        self.last_step += 1
        self._set()

    def get_last_rho(self) -> list[float]:
        """The current ρ of each group."""
        return [group[self._key] for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[float | Tensor]:
        """The learning rates, for hosts that log them."""
        return [group["lr"] for group in self.optimizer.param_groups if "lr" in group]

    @property
    def last_epoch(self) -> int:  # type: ignore[override]
        """The number of steps, by the name that torch's schedulers use."""
        return self.last_step

    def state_dict(self) -> dict[str, int]:
        """The state, for a checkpoint."""
        return {"last_step": self.last_step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restore the state and the groups' ρ."""
        self.last_step = state_dict["last_step"]
        self._set()

    def _set(self) -> None:
        factor = self.factor(self.last_step)
        checks.number("factor(step)", factor, low=0)
        for group in self.optimizer.param_groups:
            # A group added later starts from the ρ it came with.
            group[self._key] = group.setdefault("initial_rho", group[self._key]) * factor
