"""ρ that sets itself: it begins at zero, rises while the net memorises, and falls where it holds the net back.

Two things make a penalty ruin a net that trains well without it. Where it is many times the gradient in the first
steps, as in a net with batch norm, the last layer's units die and nothing brings them back: so ρ is zero at first, can
only rise slowly, and ‖ρ∇T‖ is at first at most twice ‖∇L‖. And where a net has more to learn, it slows that down: so ρ
stays next to nothing until there is a gap between the loss and that of data which the net has not seen (`gap`), and
moves by it.

Where ‖ρ∇T‖ is at its limit for most of the time, a higher ρ changes nothing. If the gap is still open then, the limit
rises instead: what has begun to memorise takes a stronger pull back than what has not.

The angle between ∇L and ∇T tells what the gap is made of. Confidently predicted examples that are mislabelled have a
large gradient and hardly any curvature, so where these dominate the two do not point the same way. Where they do, what
is left to fit is hard and correctly labelled, and ρ∇T stands in the way of ∇L: ρ does not rise. Where they point in
opposite directions the penalty holds the net on a plateau: ρ falls.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from gtracer import checks
from gtracer.optim.gap import SHORTEST, Gap, HeldOut, Sawtooth, average, follow
from gtracer.optim.step import COUNT, Step, Surroundings, displaced_pass

if TYPE_CHECKING:
    from gtracer.optim.optimizer import TwoPassOptimizer

AUTO: Literal["auto"] = "auto"
IS_AUTO = "rho_is_auto"  # in a group: whether its ρ sets itself
LOG_RHO = "rho_log"  # in a group: log ρ once it has risen from zero
EVIDENCE = "rho_evidence"  # in the state of one parameter: what ρ is decided by, on its device
KEPT = 0.95  # of the averages of cos(∇L, ∇T) and ‖ρ∇T‖/‖∇L‖ from one step to the next
PATIENCE = 500  # steps after which somebody who has not said what ρ may learn of is told


@dataclass(frozen=True)
class Controller:
    """The constants, one set for all problems; how they were found is in docs/how-to/choosing-rho.md.

    Attributes:
        held_out: Gives the loss of a held-out batch.
        steps_per_epoch: Steps until an example comes back; None where nobody knows.
        start: ρ at first, which is also the lowest.
        wait, rise: Steps at ρ = 0, and those over which ρ then rises to its start.
        aligned: cos(∇L, ∇T) up to which ρ rises in full, and from which it does not rise.
        opposed: The cosine at which ρ falls by `retreat` and does not rise; between it and zero in proportion.
        retreat: By how much log ρ falls in one decision for that.
        most: What ‖ρ∇T‖/‖∇L‖ is cut off at, at first and at last.
        pressed: The average of that ratio, as a share of its limit, from which the limit rises instead of ρ.
        widening: By how much the logarithm of the limit rises for each unit that log ρ does not.
        on_device: Whether ρ is kept where a CUDA graph can move it. The groups then hold `start`, which a graph has
            for good, and ρ∇T is multiplied by what is missing.
    """

    held_out: Callable[[], Tensor] | None = None
    steps_per_epoch: int | None = None
    start: float = 1e-5
    wait: int = 20
    rise: int = 80
    aligned: tuple[float, float] = (0.6, 0.7)
    opposed: float = -0.1
    retreat: float = 0.8
    most: tuple[float, float] = (2.0, 10.0)
    pressed: float = 0.5
    widening: float = 0.25
    on_device: bool = False

    def __post_init__(self) -> None:
        found = self.held_out
        if found is not None and not callable(found):
            raise ValueError(f"held_out must be a function that gives the loss of a held-out batch, got {found!r}")

    @cached_property
    def gap(self) -> Gap | None:
        """What ρ is decided by; None where there is nothing to decide by: then it stays zero."""
        if self.held_out is not None:
            return HeldOut(self.held_out)
        steps = self.steps_per_epoch
        return None if steps is None or steps < SHORTEST else Sawtooth(steps)

    def rho(self, log_rho: float, count: int) -> float:
        """ρ of step number `count`."""
        risen = min(1.0, max(0.0, (count - self.wait) / self.rise))
        return 0.0 if self.gap is None else math.exp(log_rho) * risen

    def factor(self, place: Tensor) -> Tensor:
        """ρ over that of the groups, where it is kept on the device, in `place`."""
        log_rho, count = place.unbind()
        risen = ((count - self.wait) / self.rise).clamp(0, 1)
        return torch.exp(log_rho - math.log(self.start)) * (0 * risen if self.gap is None else risen)

    @property
    def looks_every(self) -> int:
        """Steps from one look at held-out data to the next; 0 where there is none."""
        return self.gap.every if isinstance(self.gap, HeldOut) else 0

    def wants_held_out(self, count: int) -> bool:
        """Whether this step looks at held-out data."""
        return isinstance(self.gap, HeldOut) and self.gap.looks(count)

    def note(self, opt: TwoPassOptimizer, step: Step, place: Tensor | None = None) -> None:
        """Learn from a step that was made, and set ρ for the next. `COUNT` is that step's number still.

        Where ρ is kept on the device, in `place`, nothing is read back.
        """
        count, gap = opt.param_groups[0][COUNT], self.gap
        params = [p for part in step.slices if part.group.get(IS_AUTO) for p in part.params]
        if gap is None:
            _tell_what_is_missing(self.steps_per_epoch, count)
        if gap is None or not params:
            return
        evidence = _evidence(opt, params[0], gap)
        if (step.due or step.renewed) and step.stats is not None:
            follow(evidence.averages, step.stats.penalty, KEPT)
        groups = [group for group in opt.param_groups if group.get(IS_AUTO)]
        if place is not None:
            log_rho, now = place.unbind()
            gap.observe(evidence.gap, step, now)
            due = gap.is_due(now)
            moved = self._decide(gap, evidence, log_rho, opt.model, due)
            place.copy_(torch.stack([log_rho + torch.where(due, moved, 0.0), now + 1]))
            return
        gap.observe(evidence.gap, step, count)
        log_rho = groups[0].get(LOG_RHO, math.log(self.start))
        if gap.is_due(count):
            at = torch.full_like(evidence.room, log_rho)
            log_rho += self._decide(gap, evidence, at, opt.model, None).item()
        for group in groups:
            group[LOG_RHO] = log_rho
            group[opt.rho_key] = self.rho(log_rho, count + 1)

    def _decide(self, gap: Gap, evidence: Evidence, log_rho: Tensor, model: Any, due: Tensor | None) -> Tensor:
        """What is added to log ρ. The evidence is concluded, what ρ rises by spent, and the limit moved.

        All of that where it is `due`, if only the device knows.
        """
        numbers = gap.concluded(evidence.gap, model)
        cosine, ratio = average(evidence.averages)
        share, rise, fall = self._wishes(gap, numbers, cosine, model)
        widest = math.log(self.most[1] / self.most[0])
        filled = ratio / (self.most[0] * evidence.room.exp())
        pressed = ((filled - self.pressed) / (1 - self.pressed)).clamp(0, 1) * (evidence.room < widest)
        moved = (1 - pressed) * rise - fall
        moved = torch.minimum(torch.maximum(moved, math.log(self.start) - log_rho), gap.highest(numbers) - log_rho)
        room = (evidence.room + self.widening * pressed * rise - fall).clamp(0, widest)
        known = torch.isfinite(moved)  # else there is nothing to decide by yet
        moved, room = torch.where(known, moved, 0.0), torch.where(known, room, evidence.room)
        gap.spend(numbers, torch.where(known & (rise > fall), share, 0.0))
        decided = torch.cat([room[None], numbers])
        evidence.decided.copy_(decided if due is None else torch.where(due, decided, evidence.decided))
        return moved

    def _wishes(self, gap: Gap, numbers: Tensor, cosine: Tensor, model: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The share of the evidence that speaks for a rise; by how much log ρ would rise, and fall."""
        low, high = gap.bounds(numbers, model)
        closes, opens, full = gap.thresholds(cosine)
        free, none = self.aligned
        opposed = (cosine / self.opposed).clamp(0, 1)
        rises = ((low - opens) / (full - opens)).clamp(0, 1) * ((none - cosine) / (none - free)).clamp(0, 1)
        falls = (gap.steepness * (closes - high)).clamp(0, gap.fall)
        return rises, gap.pace * rises * (1 - opposed), torch.maximum(falls, self.retreat * opposed)

    def limit(self, opt: TwoPassOptimizer) -> float | Tensor:
        """What ‖ρ∇T‖/‖∇L‖ is cut off at in this step."""
        numbers = _numbers(opt)
        return self.most[0] if numbers is None else self.most[0] * Evidence(numbers).room.exp()


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


def _tell_what_is_missing(steps_per_epoch: int | None, count: int) -> None:
    """Once, to somebody who trains with rho="auto" and has not said what it may learn of."""
    if count != PATIENCE:
        return
    so = "say how long an epoch is by steps_per_epoch=len(loader), or pass"
    if steps_per_epoch is not None:
        so = f"an epoch of {steps_per_epoch} steps is too short to learn from (at least {SHORTEST}); pass"
    warnings.warn(
        f"rho = 'auto' has stayed at 0 for {PATIENCE} steps, which are the base optimizer's own: {so} held_out=, or a "
        "number for rho",
        stacklevel=2,
    )


class Evidence:
    """What ρ is decided by: views of a tensor of a few numbers.

    Attributes:
        averages: Of cos(∇L, ∇T) and ‖ρ∇T‖/‖∇L‖, and below them the weight of all that went into them.
        decided: What a decision leaves: the next two.
        room: By how much the logarithm of the limit has risen.
        gap: The numbers of a `Gap`.
    """

    own = 5  # numbers besides those of the gap

    def __init__(self, numbers: Tensor) -> None:
        self.averages, self.decided = numbers[:4].view(2, 2), numbers[4:]
        self.room, self.gap = numbers[4], numbers[5:]


def _numbers(opt: TwoPassOptimizer) -> Tensor | None:
    """Those of the evidence, which are kept with one parameter."""
    states = (opt.base.state.get(p, {}) for group in opt.param_groups for p in group["params"])
    return next((state[EVIDENCE] for state in states if EVIDENCE in state), None)


def _evidence(opt: TwoPassOptimizer, fallback: Tensor, gap: Gap) -> Evidence:
    """What ρ is decided by; where there is none yet, or another gap's, it begins with this parameter."""
    numbers, size = _numbers(opt), Evidence.own + gap.size
    if numbers is None or len(numbers) != size:
        for state in opt.base.state.values():
            state.pop(EVIDENCE, None)
        numbers = torch.zeros(size, dtype=_dtype_for(fallback), device=fallback.device)
        opt.base.state[fallback][EVIDENCE] = numbers
    return Evidence(numbers)


def _dtype_for(p: Tensor) -> torch.dtype:
    return torch.float64 if p.dtype == torch.float64 else torch.float32
