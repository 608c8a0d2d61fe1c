"""The learning rate from step to step."""

from __future__ import annotations

import math
from collections.abc import Callable


def learning_rate_factor(schedule: str, warmup: int, total: int) -> Callable[[int], float]:
    """The factor on the learning rate: a linear rise, then the schedule down to 0 (or none).

    >>> [round(learning_rate_factor("linear", 2, 6)(step), 2) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, total - warmup)
        return {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[schedule]

    return factor
