"""How the loss and its gradients are had: of a closure, in micro-batches, with a graph, scaled; and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gtracer import checks, tensors
from gtracer.curvature import Evaluation, Recording, SecondDerivatives
from gtracer.optim import processes, refusals
from gtracer.optim.methods import Method, TraceRatio
from gtracer.optim.others import PooledGradients, differentiate, in_model, put_aside, put_back
from gtracer.optim.parts import Parts, shared
from gtracer.optim.step import COUNT, Place
from gtracer.optim.watch import Probe, Watch
from gtracer.scopes import (
    Buffers,
    Copies,
    PooledStatistics,
    RandomState,
    Signals,
    displaced,
    is_capturing,
    passes_again,
    replayed_random,
    skips,
)
from gtracer.tensors import Tensors

if TYPE_CHECKING:
    from gtracer.optim.loops import Loop
    from gtracer.optim.optimizer import TwoPassOptimizer

PENALTIES = ("whole", "each")


class Skipped(Exception):  # noqa: N818  # no error: nobody sees it
    """The closure's host wants no step on this batch."""


@dataclass(frozen=True)
class Call:
    """What the caller handed to `step`."""

    closure: Callable[..., Any] | None = None
    batch: tuple[Any, ...] = ()
    parts: Parts | None = None  # micro-batches, each with its share of the examples
    each: bool = False  # whether the penalty is the mean of the parts' own
    scaler: torch.amp.GradScaler | None = None

    @classmethod
    def of(
        cls,
        closure: Callable[..., Any] | None,
        batch: tuple[Any, ...],
        batches: Sequence[Any] | None,
        penalty: str,
        scaler: torch.amp.GradScaler | None,
    ) -> Call:
        """From the arguments, checked."""
        checks.choice("penalty", penalty, PENALTIES)
        if batches is not None and (batch or closure is None):
            raise ValueError("step(closure, batches=[…]) takes a closure and no other batch: the batches are the batch")
        if scaler is not None and closure is None:
            raise ValueError("step(scaler=…) needs a closure: without one call scaler.step(opt), as for any optimiser")
        parts = None if batches is None else shared(batches)
        enabled = scaler if scaler is not None and scaler.is_enabled() else None
        return cls(closure, batch, parts, penalty == "each", enabled)

    @property
    def loss_of_batch(self) -> Callable[[], Any]:
        """The closure, with the whole batch."""
        assert self.closure is not None
        return partial(self.closure, *self.batch)


@dataclass
class Surroundings:
    """What passes find and have to leave as it was."""

    params: Tensors  # all of the optimiser's
    devices: set[torch.device]
    model: nn.Module | None  # whose statistics displaced passes leave alone
    copies: Copies
    random: RandomState  # where the random numbers of the first pass begin
    begins: bool  # whether that is here, and not before in a loop of the caller's
    signals: Signals
    loops: list[Loop] = field(default_factory=list)  # of all whose passes these are
    statistics: Buffers | None = None  # the model's before the step, where they may be wanted again
    drawn: RandomState | None = None  # where the random numbers of the first pass end, once a second has begun
    others: list[Tensor] = field(default_factory=list)  # parameters that are not the optimiser's: the model's first
    in_model: int = 0  # how many of them are the model's
    seeks: bool = False  # whether the loss is asked for more of them
    pooled: PooledGradients | None = None  # theirs, where a batch is taken in parts
    watch: Watch | None = None  # of gradients in the caller's hands, in the first steps
    probe: Probe | None = None  # of gradients that the caller has accumulated before
    aside: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)  # gradients of theirs, during a pass
    seed: int = 0  # by which displaced weights in bfloat16 are rounded: another one in every step

    def clear(self) -> None:
        """Forget all gradients."""
        for p in self.params:
            p.grad = None


def surroundings_of(
    opt: TwoPassOptimizer, signals: Signals, *, begins: bool = False, several: bool = False
) -> Surroundings:
    """What the passes of an optimiser's step find; random numbers begin here, or where the loop has marked it."""
    params = [p for group in opt.param_groups for p in group["params"]]
    devices = {p.device for p in params}
    caller, due = opt._caller, opt.second_pass_due
    start = RandomState(devices, others=due and caller.draws is not False) if begins else caller.loop.mark
    around = Surroundings(params, devices, opt.model, opt._copies, start, begins, signals, [caller.loop])
    around.seed = opt.param_groups[0][COUNT]
    if several or due:  # a step of one pass leaves others what it should
        around.seeks = caller.others.sought
        if opt.model is not None:
            around.others = in_model(opt.model, params)
            around.in_model = len(around.others)
        elif several:
            around.others = caller.others.recall(params)
    return around


@contextmanager
def all_or_nothing(around: Surroundings, *, anew: bool = False, checked: bool = True) -> Iterator[None]:
    """Where passes are made, and nobody else's: on any error random numbers, statistics and gradients are put back.

    Args:
        around: Them.
        anew: Gradients that were there before are forgotten: they take memory, and the first pass clears them anyway.
        checked: Whether the step fails where a number is not finite.
    """
    if anew:
        around.clear()
    gradients = [p.grad for p in around.params]
    without = [p for p in around.others if p.grad is None]
    start = around.random if around.begins else RandomState(around.devices)
    # The device waits for the copy of the statistics: in a step that keeps no copies nothing but a closure that fails
    # could want it, and what fails in a capture has changed nothing yet.
    if around.model is not None and not (is_capturing() or (anew and not checked)):
        around.statistics = around.copies.of(around.model, "of the step")
    try:
        for loop in around.loops:
            loop.busy = True
        yield
    except BaseException:
        for p, gradient in zip(around.params, gradients, strict=True):
            p.grad = gradient
        for p in without:
            p.grad = None
        if around.statistics is not None:
            around.statistics.restore()
        start.restore()
        raise
    finally:
        for loop in around.loops:
            loop.busy = False
        if around.watch is not None:
            around.watch.remove()


@contextmanager
def displaced_pass(params: Tensors, place: Place | None, around: Surroundings) -> Iterator[None]:
    """Where a further pass is made: at displaced weights, with the first's random numbers and frozen statistics."""
    around.clear()
    around.seeks = False
    if around.others:
        put_aside(around, around.others)
    scope: AbstractContextManager[None] = nullcontext()
    if place is not None:
        scope = displaced(params, place, around.seed) if isinstance(place, list | tuple) else place
    statistics = None if around.model is None else around.copies.of(around.model, "of the first pass")
    with scope, replayed_random(around.random, around.devices) as around.drawn:
        if isinstance(place, list):
            place.clear()  # it is in the weights: a copy of them less while the pass is made
        token = passes_again.set(around)
        torch.clear_autocast_cache()  # where the caller's autocast is around both passes, it has the first's weights
        try:
            yield
        finally:
            torch.clear_autocast_cache()
            passes_again.reset(token)
            if statistics is not None:
                statistics.restore()
            if around.aside:
                put_back(around)


def gradients_ahead(params: Tensors, *, keep: bool) -> Tensors:
    """What a displaced pass has left in `.grad`; `keep` it where another pass follows."""
    # A parameter that drops out of the loss at the displaced weights has gradient zero there.
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    return tensors.kept(gradients) if keep else gradients


def one_pass(loss_of: Callable[[], Any], around: Surroundings, scaler: torch.amp.GradScaler | None = None) -> Any:
    """Evaluate the loss and leave its gradients in `.grad`, whoever calls `backward()`."""
    around.clear()
    if around.probe is not None:
        around.probe.lay()
    with torch.enable_grad():
        around.signals.is_open = True
        try:
            loss = loss_of()
            if around.probe is not None:
                around.probe.check()
                around.probe = None
            before = all(p.grad is None for p in around.params)  # it is still to be differentiated
            if before and loss is None and skips.get():
                raise Skipped
            if around.seeks and isinstance(loss, Tensor):
                found = tensors.leaves(loss, besides=[*around.params, *around.others])
                around.others += found
                if before and around.pooled is not None:
                    around.pooled.meet(found)
            if before:
                checks.loss(loss, "step(closure)")
                (loss if scaler is None else scaler.scale(loss)).backward()
            elif around.watch is not None:
                around.watch.look()
        finally:
            around.signals.is_open = False
    if all(p.grad is None for p in around.params):
        raise RuntimeError("step(closure): the loss depends on none of the optimiser's parameters")
    if scaler is not None:
        unscale(around.params, scaler)
    return loss


def pass_in_parts(
    closure: Callable[..., Any],
    parts: Parts,
    around: Surroundings,
    scaler: torch.amp.GradScaler | None = None,
    note: Callable[[float], None] = lambda share: None,
) -> Any:
    """The same of a batch that is taken in parts; `note` may look at the gradients of each."""
    mean: dict[Tensor, Tensor] = {}
    total, statistics, pooled = None, PooledStatistics(around.model), PooledGradients(around)
    wrapped = processes.is_wrapped(around.model)
    with processes.by_itself(around.model) if wrapped else nullcontext():
        for share, part in parts:
            with statistics.part(share), pooled.part(share):
                loss = one_pass(partial(closure, *part), around, scaler)
            reached = [p for p in around.params if p.grad is not None]
            for p, g in zip(reached, tensors.wide([p.grad for p in reached if p.grad is not None]), strict=True):
                mean[p] = share * g + mean.get(p, 0)
            note(share)
            known = isinstance(loss, Tensor)
            total = share * loss.detach() + (0 if total is None else total) if known else loss
    statistics.conclude()
    pooled.conclude(joined=wrapped)
    if wrapped:
        joined, _ = processes.mean({p: [g] for p, g in mean.items()}, around.params, processes.group_of(around.model))
        mean = {p: gradient for p, (gradient,) in joined.items()}
        processes.as_first(around.model)
    around.clear()
    tensors.leave(list(mean), list(mean.values()))
    return total


def sum_over(closure: Callable[..., Any], parts: Parts, model: nn.Module | None) -> Tensor:
    """The loss of a batch that is taken in parts, in one graph; statistics move as in `pass_in_parts`."""
    statistics = PooledStatistics(model, one_graph=True)
    total = torch.zeros(())
    for share, part in parts:
        with statistics.part(share):
            total = total + share * closure(*part)
    statistics.conclude()
    return total


def pass_with_graph(loss_of: Callable[[], Any], around: Surroundings, method: TraceRatio, due: bool) -> Evaluation:
    """A pass of which more is wanted than the gradient."""
    around.clear()
    model = around.model
    recording = Recording(model) if model is not None and method.curvature.needs_layers else None
    with torch.enable_grad():
        with recording or nullcontext(), SecondDerivatives(method.run):
            around.signals.is_open = True
            try:
                loss = loss_of()
            finally:
                around.signals.is_open = False
        if any(p.grad is not None for p in around.params):
            raise RuntimeError(
                f"engine={method.engine!r} with {method.curvature} differentiates the loss "
                "itself: let the closure return the loss without calling backward()"
            )
        checks.loss(loss, "step(closure)")
        wanted = [p for p in around.params if p.requires_grad]
        twice, examples = due and method.engine.is_exact, due and method.by_examples
        at = Evaluation(loss, wanted, recording, differentiable=twice, by_examples=examples)
        around.others += tensors.leaves(loss, besides=[*around.params, *around.others])
        differentiate(loss, around.others)
    if not at.params:
        raise RuntimeError("step(closure): the loss depends on none of the optimiser's parameters")
    for p, g in zip(at.params, at.gradients, strict=True):
        p.grad = g
    return at


def used(group: dict[str, Any], method: Method) -> Tensors:
    """Those parameters of a group that have a gradient; what is out of the ordinary about them is checked."""
    found: list[Any] = [p for p in group["params"] if p.grad is not None]
    # There are many of them, and almost always nothing is.
    whole = all(p.dtype == torch.float32 and type(p) in (nn.Parameter, Tensor) for p in found)
    if whole and all(p.grad.layout == torch.strided for p in found):
        return found
    for label, p in checks.labelled(group):
        if p.grad is not None:
            refusals.check_parameter(method, label, p)
            if p.grad.layout != torch.strided:
                raise RuntimeError(f"{label} has a sparse gradient: use dense ones (Embedding(sparse=False))")
    return found


@dataclass(frozen=True)
class First:
    """What the first pass has found besides gradients.

    Attributes:
        returned: The loss, as the closure gave it.
        evaluation: The loss with its graph, where that is wanted.
        measured: F for the average, where the parts of the batch have one.
        compared: Gradients that a displaced pass is compared with, where it sees less of the batch.
    """

    returned: Any
    evaluation: Evaluation | None = None
    measured: dict[Tensor, Tensor] | None = None
    compared: dict[Tensor, Tensor] | None = None


def first_with_graph(loss_of: Callable[[], Any], around: Surroundings, method: TraceRatio, due: bool) -> First:
    """A first pass that is differentiated as it is."""
    at = pass_with_graph(loss_of, around, method, due)
    return First(at.loss.detach(), evaluation=at)


def first_in_parts(
    closure: Callable[..., Any], parts: Parts, around: Surroundings, scaler: torch.amp.GradScaler | None
) -> First:
    """A first pass that notes F, the mean of the parts' squared gradients."""
    measured: dict[Tensor, Tensor] = {}

    def note(share: float) -> None:
        for p in around.params:
            if p.grad is not None:
                measured[p] = share * p.grad**2 + measured.get(p, 0)

    returned = pass_in_parts(closure, parts, around, scaler, note)
    return First(returned, measured=measured)


@dataclass(frozen=True)
class Evaluator:
    """The passes of one batch.

    Attributes:
        around: What they find and leave.
        due: Whether there are displaced ones.
        first: Makes the first.
        again: Makes a displaced one.
        keep: Whether gradients of a displaced pass have to outlive the next.
    """

    around: Surroundings
    due: bool
    first: Callable[[], Any]  # gives the loss, or a First
    again: Callable[[], Any]
    keep: bool = False

    def at(self, params: Tensors, place: Place) -> Tensors:
        """The gradients of the loss there."""
        with displaced_pass(params, place, self.around):
            self.again()
        gradients = gradients_ahead(params, keep=self.keep)
        self.around.clear()  # one that enters the loss only there has no gradient in this step
        return gradients


def evaluator_of(method: Method, call: Call, around: Surroundings, model: nn.Module | None, due: bool) -> Evaluator:
    """How the passes over a batch are made."""
    closure = call.closure
    assert closure is not None
    if method.needs_graph and isinstance(method, TraceRatio):
        refusals.check_graph(method, model, call)
        loss_of = call.loss_of_batch if call.parts is None else partial(sum_over, closure, call.parts, model)
        first = partial(first_with_graph, loss_of, around, method, due)
        return Evaluator(around, due, first, partial(one_pass, loss_of, around), method.central)
    if (own := getattr(getattr(method, "engine", None), "evaluator", None)) is not None:
        made: Evaluator = own(call, around, due)
        return made
    one: Callable[[], Any] = partial(one_pass, partial(closure, *call.batch), around, call.scaler)
    if call.parts is not None:
        one = partial(pass_in_parts, closure, call.parts, around, call.scaler)
    return Evaluator(around, due, one, one, method.central)


class Held:
    """What a GradScaler takes for an optimiser: it looks at the gradients and makes the update, or does not."""

    def __init__(self, optimizer: TwoPassOptimizer) -> None:
        self._optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def step(self, update: Callable[[], None]) -> None:
        update()


def scale(params: Tensors, scaler: torch.amp.GradScaler) -> None:
    """Put scaled gradients in the place of the gradients."""
    _multiply(params, scaler.scale)


def unscale(params: Tensors, scaler: torch.amp.GradScaler) -> None:
    """And the other way round."""
    _multiply(params, lambda one: 1 / scaler.scale(one))


def _multiply(params: Tensors, factor: Callable[[Tensor], Tensor]) -> None:
    """The factor is made on the device, and not waited for."""
    if found := [p for p in params if p.grad is not None]:
        gradients = tensors.clone([p.grad for p in found if p.grad is not None])
        tensors.scale_(gradients, factor(torch.ones((), device=found[0].device)))
        for p, gradient in zip(found, gradients, strict=True):
            p.grad = gradient
