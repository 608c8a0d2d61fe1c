"""How much of what a net learns it memorises: the gap between its loss and that of data which it has not seen.

Without held-out data the training loss tells, once it is known how long an epoch is. All batches of an epoch have been
seen equally often, so where the loss falls within the epoch, the examples of one batch help those of others. At the
beginning of the next epoch every example has been seen once more: where the loss drops there, each has helped itself.
The loss of a net that memorises has the shape of a sawtooth: it rises within each epoch, as what was memorised is
forgotten, and drops at its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from gtracer.optim import processes
from gtracer.optim.step import Step

SHORTEST = 4  # steps of an epoch that a line can be laid through, and its error be known
Count = int | Tensor  # of the steps made: a tensor where a CUDA graph counts them


class Gap(Protocol):
    """Evidence of a gap, kept in a tensor of a few numbers.

    Attributes:
        size: How many numbers.
        pace: By how much log ρ rises at most in one decision.
        steepness, fall: By how much it falls for each unit that the gap is too small, and at most.
    """

    size: int
    pace: float
    steepness: float
    fall: float

    def observe(self, numbers: Tensor, step: Step, count: Count) -> None:
        """Take in a step; nobody waits for the device."""

    def is_due(self, count: Count) -> Any:
        """Whether there is something to decide after this step."""

    def concluded(self, numbers: Tensor, model: Any) -> Tensor:
        """The numbers once they are decided by."""

    def bounds(self, numbers: Tensor, model: Any) -> tuple[Tensor, Tensor]:
        """The gap less its error, and with it, as shares of the loss on unseen data."""

    def thresholds(self, cosine: Tensor) -> tuple[Any, Any, Any]:
        """The gap below which ρ falls, from which it rises, and from which it rises in full, given cos(∇L, ∇T)."""

    def highest(self, numbers: Tensor) -> Any:
        """The highest log ρ."""

    def spend(self, numbers: Tensor, share: Tensor) -> None:
        """This share of the evidence has been acted upon."""


@dataclass(frozen=True)
class Sawtooth:
    """By the training loss alone: a leaky sum of its drops from one epoch to the next.

    Attributes:
        steps: Of an epoch.
        forgotten: What share of the sum each epoch takes off, as nets forget what they have memorised.
        unlearnt: What share of a rise of the loss from one epoch to the next the sum loses: if what was memorised is
            unlearnt, the loss rises and the gap closes.
        full: Shorter epochs take off less, as they tell less.
        settles: The share of an epoch that is left out: a short last batch makes a spike after it.
        doubt: How many standard errors are taken off, or added.
        spent: What share of the sum a rise takes off: ρ has yet to show what it does.
        high: The highest ρ, where the gap is hardly known, and where it is known well.
        blurred: The gap's standard error, as a share of the loss, up to which it is known well, and from which hardly.
    """

    steps: int
    forgotten: float = 0.25
    unlearnt: float = 0.5
    full: int = 20
    settles: float = 0.2
    doubt: float = 1.0
    spent: float = 0.5
    high: tuple[float, float] = (1e-2, 3e-2)
    blurred: tuple[float, float] = (0.05, 0.1)

    size = 11
    pace = 1.6
    steepness = 35.0
    fall = 0.35

    # The numbers: sums over the epoch under way (of 1, x, x², L, L x, L², where x is the place in the epoch, from −1/2
    # to 1/2), then what the epochs before have left (how many there were; the loss at the end and in the middle of the
    # last one, by a line; the gap; its variance).

    @cached_property
    def rate(self) -> float:
        """What each epoch takes off the sum."""
        return self.forgotten * min(1.0, self.steps / self.full)

    def observe(self, numbers: Tensor, step: Step, count: Count) -> None:
        place = count % self.steps
        settled = int(self.settles * self.steps)
        known = step.loss
        if known is None or known.numel() != 1 or (isinstance(place, int) and place < settled):
            return
        loss = known.to(numbers).reshape(())
        at = (place + 0.5) / self.steps - 0.5
        x = at.to(loss) if isinstance(at, Tensor) else torch.full_like(loss, at)  # nobody waits for a fill
        counts = (loss.abs() < torch.inf) & (place >= settled)  # a NaN may be found later
        row = torch.stack([torch.ones_like(loss), x, x * x, loss, loss * x, loss * loss])
        numbers[:6] += torch.where(counts, row, 0.0)

    def is_due(self, count: Count) -> Any:
        return (count + 1) % self.steps == 0

    def concluded(self, numbers: Tensor, model: Any) -> Tensor:
        n, x, xx, y, xy, yy = numbers[:6].unbind()
        epochs, end, middle, gap, variance = numbers[6:].unbind()
        centre, mean = x / n, y / n
        spread = xx - x * centre
        slope = (xy - x * mean) / spread
        noise = (yy - y * mean - slope.square() * spread).clamp_min(0) / (n - 2)
        mean, slope, noise = processes.mean_of(torch.stack([mean, slope, noise]), model).unbind()
        at_start, at_middle, at_end = (mean + slope * (place - centre) for place in (-0.5, 0.0, 0.5))
        kept = 1 - self.rate
        compared = epochs > 0
        grown = kept * gap + end - at_start
        unlearnt = self.unlearnt * (at_middle - middle).clamp_min(0)
        gap = torch.where(compared, grown - torch.minimum(unlearnt, grown.clamp_min(0)), gap)
        variance = torch.where(compared, kept**2 * variance + noise / spread, variance)
        now = torch.stack([epochs + 1, at_end, at_middle, gap, variance])
        # An epoch of which too little was seen has no end that the next one could be compared with.
        broken = torch.cat([torch.zeros_like(numbers[6:7]), numbers[7:]])
        return torch.cat([torch.zeros_like(numbers[:6]), torch.where(n >= SHORTEST, now, broken)])

    def bounds(self, numbers: Tensor, model: Any) -> tuple[Tensor, Tensor]:
        epochs, _, loss, gap, variance = numbers[6:].unbind()
        error = self.doubt * variance.sqrt()
        low, high = (gap - error).clamp_min(0), (gap + error).clamp_min(0)
        # A second epoch in a row is the first to be compared with one before; a loss may also be negative.
        known, unknown = (epochs > 1) & (loss > 0), torch.full_like(gap, torch.nan)
        return torch.where(known, low / (low + loss), unknown), torch.where(known, high / (high + loss), unknown)

    def thresholds(self, cosine: Tensor) -> tuple[Any, Any, Any]:
        # Right labels that are hard to fit leave a gap too, and a larger cosine.
        c = (cosine / 0.3).clamp(0, 1)
        return 0.05 * c, 0.02 + 0.08 * c, 0.07 + 0.13 * c

    def highest(self, numbers: Tensor) -> Any:
        # Where it cannot be seen in time that ρ is too high, it must not come near what kills a net.
        (low, high), (well, hardly) = self.high, self.blurred
        _, _, loss, gap, variance = numbers[6:].unbind()
        unknown = ((variance.sqrt() / (gap.clamp_min(0) + loss) - well) / (hardly - well)).clamp(0, 1)
        return math.log(high) - math.log(high / low) * unknown

    def spend(self, numbers: Tensor, share: Tensor) -> None:
        numbers[9] *= 1 - self.spent * share


@dataclass(frozen=True)
class HeldOut:
    """By the loss of held-out batches, whose labels are as noisy as the rest.

    Attributes:
        loss: Gives it.
        every: Steps from one look to the next.
        first: Steps before the first decision.
        train_kept, held_out_kept: What is kept of the averages of either loss from one value to the next.
    """

    loss: Callable[[], Tensor]
    every: int = 10
    first: int = 40
    train_kept: float = 0.97
    held_out_kept: float = 0.75

    size = 4
    pace = 2.3
    steepness = 3.0
    fall = 2.3

    # The numbers: average and weight, of the training loss and of the held-out one.

    def looks(self, count: int) -> bool:
        """Whether this step looks at held-out data."""
        return (count + 1) % self.every == 0

    def observe(self, numbers: Tensor, step: Step, count: Count) -> None:
        for averages, loss, kept in (
            (numbers[:2], step.loss, self.train_kept),
            (numbers[2:], step.held_out, self.held_out_kept),
        ):
            if loss is not None and loss.numel() == 1:
                follow(averages, loss, kept)

    def is_due(self, count: Count) -> Any:
        return ((count + 1) % self.every == 0) & (count >= self.first)

    def concluded(self, numbers: Tensor, model: Any) -> Tensor:
        return numbers

    def bounds(self, numbers: Tensor, model: Any) -> tuple[Tensor, Tensor]:
        train, held_out = processes.mean_of(torch.stack([average(numbers[:2]), average(numbers[2:])]), model).unbind()
        return 1 - train / held_out, 1 - train / held_out

    def thresholds(self, cosine: Tensor) -> tuple[Any, Any, Any]:
        return 0.05, 0.15, 0.25

    def highest(self, numbers: Tensor) -> Any:
        return math.log(1e-2)

    def spend(self, numbers: Tensor, share: Tensor) -> None:
        pass


def follow(averages: Tensor, value: Tensor, kept: float) -> None:
    """Let an average, and the weight of all that went into it, follow a value; what is not finite is left out.

    Args:
        averages: The averages, and in a second row their weights.
        value: One for each of them.
        kept: What is kept of an average.
    """
    now = value.detach().to(averages).reshape(averages[0].shape)
    new = torch.lerp(torch.stack([now, torch.ones_like(now)]), averages, kept)
    averages.copy_(torch.where(now.abs() < torch.inf, new, averages))


def average(averages: Tensor) -> Tensor:
    """What `follow` has followed; NaN where nothing went in."""
    return averages[0] / averages[1]
