"""ρ that sets itself: it begins at zero, rises slowly, and moves by what the gradients say; nothing to tune.

Two things make a penalty ruin a net that trains well without it. Where it is many times the gradient in the first
steps, as in a net with batch norm, the last layer's units die and nothing brings them back: so ρ is zero at first and
then rises, and ‖ρ∇T‖ is never more than twice ‖∇L‖. And where a net has more to learn, it slows that down: so ρ stays
where it starts until the net memorises. Two cosines tell:

- Of the gradients of successive batches, s. A step on one example lowers the loss of another by s of what it lowers its
  own. An epoch of m steps lowers the loss of each example once by itself and m times by s: where m s is small, what is
  learnt is that example's own label. That takes an epoch to show, and s an average of many steps to be known; where
  there is doubt ρ does not rise.
- Of ∇L and ∇T. Confidently predicted examples with a wrong label have a large gradient and hardly any curvature, so
  where they rule the two do not point the same way. Where they do, ρ∇T stands in the way of ∇L.

With held-out data, whose labels are as noisy as the rest, the gap between its loss and that of the training data takes
the place of the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from gtracer import checks, tensors
from gtracer.optim import processes
from gtracer.optim.step import COUNT, Step, Surroundings, displaced_pass
from gtracer.tensors import Tensors

if TYPE_CHECKING:
    from gtracer.optim.optimizer import TwoPassOptimizer

AUTO: Literal["auto"] = "auto"
IS_AUTO = "rho_is_auto"  # in a group: whether its ρ sets itself
LOG_RHO = "rho_log"  # in a group: log ρ once it has risen from zero
NUMBERS = "rho_numbers"  # in the state of one parameter: averages and their weights, on its device
BEFORE = "rho_before"  # in the state: the direction of the gradient of the step before
SAMPLED = 2**20  # coordinates that the gradients are compared in, of nets with more
State = dict[Tensor, dict[str, Any]]

# The averages, and what share of each is kept from one value to the next; that of s depends on how long an epoch is.
# The third is of s², or with held-out data of the training loss.
AGREEMENT, ALIGNMENT, THIRD, HELD_OUT = range(4)
KEPT = (0.975, 0.95, 0.97, 0.75)


@dataclass(frozen=True)
class Controller:
    """The constants, one set for all problems; how they were found is in docs/how-to/choosing-rho.md.

    Attributes:
        held_out: Gives the loss of a held-out batch.
        steps_per_epoch: Steps until an example comes back; None where nobody knows.
        start: ρ at first, which is also the lowest.
        high: The highest.
        wait, rise: Steps at ρ = 0, and those over which ρ then rises to its start.
        first: Step of the first decision, and steps that s is averaged over; an epoch, where that is longer.
        every: Steps from one decision to the next; more by as much as an epoch is longer than `first`.
        sure: Standard errors by which s has to be below its bounds, where an epoch is long or nobody knows.
        pace: By how much log ρ moves at most, where an epoch is short and there may be few steps in all.
        slow: The same where it is long.
        most: What ‖ρ∇T‖/‖∇L‖ is cut off at.
        on_device: Whether ρ is kept where a CUDA graph can move it. The groups then hold `start`, which a graph has
            for good, and ρ∇T is multiplied by what is missing.
    """

    held_out: Callable[[], Tensor] | None = None
    steps_per_epoch: int | None = None
    start: float = 1e-5
    high: float = 1e-2
    wait: int = 20
    rise: int = 80
    first: int = 40
    every: int = 10
    sure: float = 3.0
    pace: float = 2.3
    slow: float = 0.7
    most: float = 2.0
    on_device: bool = False

    def __post_init__(self) -> None:
        found = self.held_out
        if found is not None and not callable(found):
            raise ValueError(f"held_out must be a function that gives the loss of a held-out batch, got {found!r}")

    def rho(self, log_rho: float, count: int) -> float:
        """ρ of step number `count`."""
        return math.exp(log_rho) * min(1.0, max(0.0, (count - self.wait) / self.rise))

    def factor(self, place: Tensor) -> Tensor:
        """ρ over that of the groups, where it is kept on the device, in `place`."""
        log_rho, count = place.unbind()
        return torch.exp(log_rho - math.log(self.start)) * ((count - self.wait) / self.rise).clamp(0, 1)

    def wants_held_out(self, count: int) -> bool:
        """Whether this step looks at held-out data."""
        return self.held_out is not None and (count + 1) % self.every == 0

    @cached_property
    def bounds(self) -> tuple[float, float, float]:
        """The agreement of batches up to which ρ rises in full, from which it does not rise, from which it falls."""
        m = self.steps_per_epoch
        return (0.01, 0.03, 0.1) if m is None else (min(0.04, 3 / m), min(0.07, 5 / m), min(0.08, 6 / m))

    @cached_property
    def window(self) -> int:
        """Steps that s is averaged over. Before an example has come back nothing is memorised."""
        return max(self.first, self.steps_per_epoch or 0) if self.held_out is None else self.first

    @cached_property
    def pause(self) -> int:
        """Steps from one decision to the next."""
        return self.every * self.window // self.first

    @cached_property
    def stride(self) -> float:
        """By how much log ρ moves at most."""
        return max(self.slow, self.pace * self.first / self.window)

    @cached_property
    def doubt(self) -> float:
        """How many standard errors of s stand between it and its bounds, which an epoch of m steps narrows to 1/m."""
        return self.sure * max(0.0, 1 - self.first / (self.steps_per_epoch or math.inf))

    @cached_property
    def kept(self) -> tuple[float, ...]:
        """Of each average."""
        own = 1 - 1 / self.window
        return KEPT if self.held_out is not None else (own, KEPT[ALIGNMENT], own, KEPT[HELD_OUT])

    def note(self, opt: TwoPassOptimizer, step: Step, place: Tensor | None = None) -> None:
        """Learn from a step that was made, and set ρ for the next. `COUNT` is that step's number still.

        Where ρ is kept on the device, in `place`, nothing is read back.
        """
        count, state = opt.param_groups[0][COUNT], opt.base.state
        parts = [part for part in step.slices if part.group.get(IS_AUTO)]
        pairs = [pair for part in parts for pair in zip(part.params, part.gradients, strict=True)]
        if not pairs:
            return
        numbers = _numbers(opt, pairs[0][0])
        alignment = step.stats.alignment if (step.due or step.renewed) and step.stats is not None else None
        if self.held_out is None:
            s = _by_kernel(step, state) if step.kernels is not None else None
            s = _agreement(state, pairs) if s is None else s
            _follow(numbers, [s, alignment, None if s is None else s.square(), None], self.kept)
        else:
            _follow(numbers, [None, alignment, step.loss, step.held_out], self.kept)
        if place is not None:
            log_rho, now = place.unbind()
            decides = (now >= self.window) & ((now + 1) % self.pause == 0)
            moved = (log_rho + self._move(numbers, opt)).clamp(math.log(self.start), math.log(self.high))
            place.copy_(torch.stack([torch.where(decides, moved, log_rho), now + 1]))
            return
        groups = [group for group in opt.param_groups if group.get(IS_AUTO)]
        log_rho = groups[0].get(LOG_RHO, math.log(self.start))
        if count >= self.window and (count + 1) % self.pause == 0:
            log_rho += float(self._move(numbers, opt))
            log_rho = min(math.log(self.high), max(math.log(self.start), log_rho))
        for group in groups:
            group[LOG_RHO] = log_rho
            group[opt.rho_key] = self.rho(log_rho, count + 1)

    def _move(self, numbers: Tensor, opt: TwoPassOptimizer) -> Tensor:
        """What is added to log ρ."""
        agreement, alignment, third, held_out = (numbers[:, 0] / numbers[:, 1].clamp_min(1e-30)).unbind()
        if self.held_out is None:
            (full, none, falls), kept = self.bounds, self.kept[AGREEMENT]
            spread = (third - agreement.square()).clamp_min(0).sqrt()
            error = spread * math.sqrt((1 - kept) / (1 + kept))
            # Where s is negative batches undo what others did: that is noise, and little of it is kept.
            known = agreement + self.doubt * (error + (-agreement).clamp_min(0))
            up, down = (none - known) / (none - full), 3 * (agreement - falls)
        else:
            gap = 1 - processes.mean_of(third, opt.model) / processes.mean_of(held_out, opt.model)
            up, down = (gap - 0.15) / 0.1, 3 * (0.05 - gap)
        free = (0.7 - alignment) / 0.1
        moved = self.stride * up.clamp(0, 1) * free.clamp(0, 1) - down.clamp(0, self.stride)
        return torch.where(torch.isfinite(moved) & (numbers[ALIGNMENT, 1] > 0), moved, 0.0)


def controller_of(held_out: Callable[[], Tensor] | None, steps_per_epoch: int | None = None) -> Controller:
    """For held-out data, or without; the arguments are checked."""
    if steps_per_epoch is not None:
        checks.count("steps_per_epoch", steps_per_epoch)
    return Controller(held_out, steps_per_epoch)


def place_of(opt: TwoPassOptimizer) -> Tensor | None:
    """Where a CUDA graph can move ρ: its logarithm and the step's number, if they are kept on the device."""
    group = next((group for group in opt.param_groups if group.get(IS_AUTO)), None)
    if group is None or opt.controller is None or not opt.controller.on_device:
        return None
    p = group["params"][0]
    log_rho = group.get(LOG_RHO, math.log(opt.controller.start))
    return torch.tensor([log_rho, group[COUNT]], dtype=_dtype_for(p), device=p.device)


def look_at_held_out_data(opt: TwoPassOptimizer, step: Step, around: Surroundings) -> None:
    """Its loss at the weights of the step, where ρ sets itself and wants it."""
    controller = opt.controller
    if not opt.looks_at_held_out:
        return
    assert controller is not None
    assert controller.held_out is not None
    with displaced_pass(around.params, None, around), torch.no_grad(), around.signals.opened():
        loss = controller.held_out()
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(f"held_out must return the loss of a held-out batch, a tensor of one number, got {loss!r}")
    step.held_out = loss.detach()


def stride_of(xs: Tensors) -> int:
    """Which coordinates are compared: where they are many, a share of them is enough for a cosine."""
    return max(1, math.ceil(sum(x.numel() for x in xs) / SAMPLED))


def _numbers(opt: TwoPassOptimizer, fallback: Tensor) -> Tensor:
    """The averages and their weights, kept with one parameter."""
    state = opt.base.state
    known = (p for group in opt.param_groups for p in group["params"] if NUMBERS in state.get(p, {}))
    p = next(known, fallback)
    if NUMBERS not in state[p]:
        state[p][NUMBERS] = torch.zeros(len(KEPT), 2, dtype=_dtype_for(p), device=p.device)
    numbers: Tensor = state[p][NUMBERS]
    return numbers


def _dtype_for(p: Tensor) -> torch.dtype:
    return torch.float64 if p.dtype == torch.float64 else torch.float32


def _follow(numbers: Tensor, values: list[Tensor | None], kept: tuple[float, ...]) -> None:
    """Let each average follow its value, if there is one and it is finite; nobody waits for the device."""
    missing = numbers.new_full((), math.nan)
    now = torch.stack([missing if x is None else x.detach().reshape(()).to(numbers) for x in values]).unsqueeze(1)
    new = torch.lerp(torch.cat([now, torch.ones_like(now)], 1), numbers, _kept(kept, numbers.dtype, numbers.device))
    numbers.copy_(torch.where(now.abs() < math.inf, new, numbers))  # torch.isfinite is five kernels


@cache
def _kept(kept: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(kept, dtype=dtype, device=device).unsqueeze(1)


def _by_kernel(step: Step, state: State) -> Tensor | None:
    """The same cosine by one launch, where the gradients of the step before are there."""
    parts = [part for part in step.slices if part.group.get(IS_AUTO)]
    if step.kernels is None or not all(BEFORE in state[p] for part in parts for p in part.params):
        return None
    before = [[state[p][BEFORE] for p in x.params] if x.group.get(IS_AUTO) else None for x in step.slices]
    return step.kernels.agreement(before, stride_of([g for part in parts for g in part.gradients]))


def _agreement(state: State, pairs: list[tuple[Tensor, Tensor]]) -> Tensor | None:
    """The cosine of these gradients and those of the step before, whose direction is kept."""
    unit: Tensors = [g.detach() for _, g in pairs]
    if (stride := stride_of(unit)) > 1:
        unit = [g if tensors.is_sharded(g) else g.reshape(-1)[::stride] for g in unit]
    unit = list(torch._foreach_mul(unit, 1 / tensors.norm(unit).clamp_min(1e-30)))
    places = [state[p] for p, _ in pairs]
    known = [(own[BEFORE], u) for own, u in zip(places, unit, strict=True) if BEFORE in own]
    cosine = None
    if known:
        before, now = map(list, zip(*known, strict=True))
        # ‖u + v‖² = 2 + 2 cos: of many tensors a norm takes fewer kernels than an inner product
        cosine = tensors.norm(torch._foreach_add(before, now)).square() / 2 - 1
        tensors.copy_(before, now)  # in place: a CUDA graph finds it where it was
    if len(known) < len(unit):
        for own, u in zip(places, unit, strict=True):
            own.setdefault(BEFORE, u)
    return cosine
