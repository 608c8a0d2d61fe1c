"""An average of the weights (EMA), which is evaluated and kept instead of the last ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """Exponential averages of a model's weights and buffers, which take their place where they are wanted.

    torch's `AveragedModel` is a deep copy, which a model need not survive: what is patched into one, as compiled layers
    and fused attention are, would be the original's still.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.steps = decay, 0
        held = [*model.parameters(), *model.buffers()]
        self.live = [tensor.detach() for tensor in held if tensor.is_floating_point()]
        self.means = [tensor.clone() for tensor in self.live]

    @torch.no_grad()
    def update(self) -> None:
        """After a step. The first ones count for more, or where training began would weigh for long."""
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self.means, self.live, 1 - decay)
        self.steps += 1

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The model has the averages inside this block."""
        own = [tensor.clone() for tensor in self.live]
        try:
            torch._foreach_copy_(self.live, self.means)
            yield
        finally:
            torch._foreach_copy_(self.live, own)

    def state_dict(self) -> dict[str, int | list[Tensor]]:
        """For a checkpoint."""
        return {"steps": self.steps, "means": self.means}

    def load_state_dict(self, state: dict[str, int | list[Tensor]]) -> None:
        """The inverse."""
        steps, means = state["steps"], state["means"]
        assert isinstance(steps, int)
        assert isinstance(means, list)
        if [each.shape for each in means] != [each.shape for each in self.means]:
            raise ValueError("its average is of another model")
        torch._foreach_copy_(self.means, means)
        self.steps = steps
