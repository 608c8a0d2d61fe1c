"""Both passes over a batch, and how each is made: of a closure, in micro-batches, with a graph, scaled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gtracer import checks, tensors
from gtracer.curvature import Evaluation, Recording, SecondDerivatives
from gtracer.optim import processes, refusals
from gtracer.optim.auto import look_at_held_out_data
from gtracer.optim.methods import Method, TraceRatio, note_curvature
from gtracer.optim.others import PooledGradients, differentiate
from gtracer.optim.parts import Parts, shared
from gtracer.optim.scaler import unscale
from gtracer.optim.step import Place, Slice, Step, Surroundings, displaced_pass, drive, gradients_ahead
from gtracer.scopes import PooledStatistics, is_capturing, passes_again, skips
from gtracer.tensors import Tensors

if TYPE_CHECKING:
    from gtracer.optim.optimizer import TwoPassOptimizer

PENALTIES = ("whole", "each")
DTYPE, LAYOUT = attrgetter("dtype"), attrgetter("layout")


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


def one_pass(loss_of: Callable[[], Any], around: Surroundings, scaler: torch.amp.GradScaler | None = None) -> Any:
    """Evaluate the loss and leave its gradients in `.grad`, whoever calls `backward()`."""
    tensors.forget(around.params)
    if around.probe is not None:
        around.probe.lay()
    with torch.enable_grad(), around.signals.opened():
        loss = loss_of()
        if around.probe is not None:
            around.probe.check()
            around.probe = None
        before = all(p.grad is None for p in around.params)  # it is still to be differentiated
        if before and skips.get() and not getattr(loss, "requires_grad", False):
            raise Skipped
        if around.seeks and passes_again.get() is not around and isinstance(loss, Tensor):
            found = tensors.leaves(loss, besides=[*around.params, *around.others])
            around.others += found
            if before and around.pooled is not None:
                around.pooled.meet(found)
        if before:
            checks.loss(loss, "step(closure)")
            (loss if scaler is None else scaler.scale(loss)).backward()
        elif around.watch is not None:
            around.watch.look()
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
    tensors.forget(around.params)
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
    tensors.forget(around.params)
    model = around.model
    recording = Recording(model) if model is not None and method.curvature.needs_layers else None
    with torch.enable_grad():
        with recording or nullcontext(), SecondDerivatives(method.run), around.signals.opened():
            loss = loss_of()
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


def used(group: dict[str, Any], method: Method) -> tuple[Tensors, Tensors]:
    """Those parameters of a group that have a gradient, and it; what is out of the ordinary about them is checked."""
    found, gradients = list(group["params"]), [p.grad for p in group["params"]]
    if type(None) in set(map(type, gradients)):
        found, gradients = [p for p in found if p.grad is not None], [g for g in gradients if g is not None]
    # There are many of them, and almost always nothing is.
    plain = set(map(DTYPE, found)) <= {torch.float32} and set(map(type, found)) <= {nn.Parameter, Tensor}
    if plain and set(map(LAYOUT, gradients)) <= {torch.strided}:
        return found, gradients
    for label, p in checks.labelled(group):
        if p.grad is not None:
            refusals.check_parameter(method, label, p)
            if p.grad.layout != torch.strided:
                raise RuntimeError(f"{label} has a sparse gradient: use dense ones (Embedding(sparse=False))")
    return found, gradients


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
        tensors.forget(self.around.params)  # one that enters the loss only there has no gradient in this step
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


def penalised(
    opt: TwoPassOptimizer,
    evaluator: Evaluator,
    call: Call,
    *,
    fuse: bool = False,
    start: dict[Tensor, Tensor] | None = None,
) -> Step:
    """Both passes over a batch, or over a part of it: the step has ∇L and ρ∇T then, or kernels that make ρ∇T."""
    caller, around = opt._caller, evaluator.around
    with nullcontext() if opt.reuse is None else opt.reuse.first_pass(opt._whole_groups(), opt.base.state):
        found = evaluator.first()
    if opt._fusion.verdicts and not is_capturing():
        opt._fusion.hear(opt)
    if evaluator.due and caller.draws is None:
        caller.note_draws(around.random)
    step = begun(opt, found if isinstance(found, First) else First(found), evaluator.due, start, wide=not fuse)
    if opt.controller is not None and opt.controller.held_out is not None:
        look_at_held_out_data(opt, step, around)
    if fuse:
        step.kernels = opt._fusion.kernels(step, opt.method, opt.rule, opt.transforms)
    if step.kernels is None:
        if fuse:
            step.widen()
        passes = opt.method.passes(step, opt.rule, safely=call.scaler is not None and opt.model is None)
    else:
        passes = step.kernels.passes() if step.due else None
    if step.evaluation is not None:
        step.drop_graph()
    losses = caller.losses.of(step, evaluator, call, opt.rule) if caller.losses.steps and step.due else None
    step.penalty = drive(passes, partial((losses or evaluator).at, step.params))
    if losses is not None:
        caller.losses.conclude(losses)
    step.renewed = step.penalty is not None
    if not is_capturing():
        step.random = around.random, around.drawn or around.random
    return step


def begun(
    opt: TwoPassOptimizer, found: First, due: bool, start: dict[Tensor, Tensor] | None = None, *, wide: bool = True
) -> Step:
    """A step, from the gradients of its first pass; `wide`, in float32 where they are in bfloat16."""
    slices = []
    for group in opt.param_groups:
        params, gradients = used(group, opt.method)
        if params:
            gradients = tensors.kept(gradients)
            if wide and found.evaluation is None:  # else they have a graph, which is in bfloat16
                gradients = tensors.wide(gradients)
            F = None if start is None else [start[p] for p in params]
            slices.append(Slice(group, opt.hyperparameters(group), params, gradients, start=F))
    returned = found.returned.detach() if isinstance(found.returned, Tensor) else found.returned
    step = Step(slices, returned, due=due and bool(slices), evaluation=found.evaluation)
    if opt.sets_rho and opt.controller is not None:
        step.most = opt.controller.limit(opt)
        step.factor = None if opt._place is None else opt.controller.factor(opt._place)
    if found.measured is not None:
        note_curvature(step, found.measured)
    if found.compared is not None:
        step.compared = [found.compared.get(p, torch.zeros_like(p)) for p in step.params]
    return step
