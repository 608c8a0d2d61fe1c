"""What one step knows, as plain data, made anew for every step; and what its passes find, and leave as it was."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gtracer import tensors
from gtracer.curvature import Evaluation
from gtracer.optim.directions import Rows
from gtracer.optim.stats import Stats
from gtracer.scopes import Buffers, Copies, RandomState, Signals, displaced, is_capturing, passes_again, replayed_random
from gtracer.tensors import Tensors

if TYPE_CHECKING:
    from gtracer.optim.kernels import TwoKernels
    from gtracer.optim.loops import Loop
    from gtracer.optim.optimizer import TwoPassOptimizer
    from gtracer.optim.others import PooledGradients
    from gtracer.optim.watch import Probe, Watch

COUNT = "gtracer_step"  # how many steps a group has made; in the groups, so that state_dict has it

# Where the weights are to be for the next pass: by how much to displace them, or a scope that does it.
Place = Tensors | AbstractContextManager[None]
# Yields places, is sent the gradients there, returns what is added to the gradient.
Passes = Generator[Place, Tensors, Tensors]


@dataclass
class Slice:
    """Those parameters of a group that have a gradient, and their gradients of the loss."""

    group: dict[str, Any]
    hyper: dict[str, Any]  # the group's ρ, β, δ, f₀ by their plain names
    params: Tensors
    gradients: Tensors
    curvature: Tensors | None = None  # F for the average, where it is not the squared gradient
    start: Tensors | None = None  # F for f₀, where that is not this slice's own
    f: Tensors | None = None  # where a rule keeps it as it is, once it was looked up

    @property
    def measured(self) -> Tensors:
        """F for the average f."""
        if self.curvature is not None:
            return self.curvature
        gradients = tensors.wide(self.gradients)
        return torch._foreach_mul(gradients, gradients)

    @property
    def signed_rho(self) -> float:
        """ρ; negative where torch's `maximize` will flip the sign of the total."""
        rho: float = self.hyper["rho"]
        return -rho if self.group.get("maximize") else rho

    def without(self, dropped: set[Tensor]) -> Slice:
        """The same with some parameters left out."""
        return self._only([i for i, p in enumerate(self.params) if p not in dropped])

    def each(self) -> Iterator[Slice]:
        """Its parameters, one after the other."""
        for i in range(len(self.params)):
            yield self._only([i])

    def _only(self, kept: list[int]) -> Slice:
        def some(xs: Tensors | None) -> Tensors | None:
            return None if xs is None else [xs[i] for i in kept]

        params, gradients = [self.params[i] for i in kept], [self.gradients[i] for i in kept]
        return Slice(self.group, self.hyper, params, gradients, some(self.curvature), some(self.start), some(self.f))


@dataclass
class Step:
    """A step under way, from the first gradient to the update."""

    slices: list[Slice]
    returned: Any = None  # the loss, as the closure gave it
    due: bool = False  # whether it makes displaced passes
    compared: Tensors | None = None  # what those are compared with, where it is not the gradient of the loss
    evaluation: Evaluation | None = None  # of the first pass, where more than its gradient is wanted
    trace_ratio: Tensor | None = None  # T
    penalty: Tensors | None = None  # ρ∇T, until it is added to the gradient
    renewed: bool = False  # whether the penalty is this step's own
    rows: dict[Tensor, Rows] = field(default_factory=dict)  # of weights of which only the direction counts
    kernels: TwoKernels | None = None  # what makes the step instead of torch's kernels, if anything
    random: tuple[RandomState, RandomState] | None = None  # where those of its first pass began, and ended
    stats: Stats | None = None
    most: float | Tensor | None = None  # what ‖ρ∇T‖/‖∇L‖ is cut off at
    factor: Tensor | None = None  # what a new ρ∇T is multiplied by first, where ρ is moved on the device
    held_out: Tensor | None = None  # the loss of a held-out batch, where ρ learns of it
    after: list[Callable[[Step], None]] = field(default_factory=list)  # what writes into the state after the update

    @property
    def params(self) -> Tensors:
        return [p for part in self.slices for p in part.params]

    @property
    def gradients(self) -> Tensors:
        return [g for part in self.slices for g in part.gradients]

    @property
    def loss(self) -> Tensor | None:
        """As a tensor; a closure that calls backward() itself may return what it likes."""
        return torch.as_tensor(self.returned).detach() if isinstance(self.returned, Tensor | float) else None

    @property
    def total(self) -> Tensors:
        """∇L + ρ∇T, which is where the base optimiser looks for it."""
        return [p.grad for p in self.params if p.grad is not None]

    @total.setter
    def total(self, total: Tensors) -> None:
        tensors.leave(self.params, total)

    def drop_graph(self) -> None:
        """The engine may need the gradients' graph, nobody after it does."""
        self.evaluation = None
        self.widen()

    def widen(self) -> None:
        """Gradients in float32, where they are in bfloat16."""
        for part in self.slices:
            part.gradients = tensors.wide([g.detach() for g in part.gradients])

    def drop_parameters_without_gradient(self) -> None:
        """Leave out what the caller has taken the gradient of since, as torch's optimisers do."""
        if dropped := {p for p in self.params if p.grad is None}:
            self.slices = [part for part in (part.without(dropped) for part in self.slices) if part.params]


@dataclass(frozen=True)
class Left:
    """What a step leaves for the next one to look at."""

    random: tuple[RandomState, RandomState] | None = None  # where those of its first pass began, and ended
    smallest: Tensor | None = None  # of the parameters, so that the gradient may be held
    gradient: Tensor | None = None  # of that one
    version: int = 0

    def by(self, step: Step) -> Left:
        """What the next step leaves, which may know less."""
        smallest = self.smallest
        if smallest is None:
            smallest = min(step.params, key=Tensor.numel, default=None)
        gradient = None if smallest is None else smallest.grad
        return Left(step.random or self.random, smallest, gradient, 0 if gradient is None else gradient._version)

    @property
    def is_untouched(self) -> bool:
        """Whether nobody has written into gradients since, as a caller who accumulates them has."""
        if self.smallest is None:
            return False
        g = self.smallest.grad
        return g is None or (g is self.gradient and g._version == self.version)

    @property
    def has_drawn(self) -> bool:
        """Whether the first pass drew random numbers of torch's."""
        return self.random is not None and self.random[0] != self.random[1]


@dataclass
class Course:
    """The displaced passes of a step: where the next one is wanted, and at the end what they have found."""

    passes: Passes | None
    place: Place | None = None
    found: Tensors | None = None

    def proceed(self, gradients: Tensors | None = None) -> None:
        """Hand over the gradients of the pass that was wanted (at first none was)."""
        if self.passes is None:
            return
        try:
            self.place = self.passes.send(gradients)  # type: ignore[arg-type]
        except StopIteration as finished:
            self.place, self.found = None, finished.value


def drive(passes: Passes | None, gradients_at: Callable[[Place], Tensors]) -> Tensors | None:
    """Make all displaced passes; gives what they have found."""
    course = Course(passes)
    course.proceed()
    while course.place is not None:
        course.proceed(gradients_at(course.place))
    return course.found


def scale_of(factor: Tensor | None, most: float | Tensor | None, gradient: Tensor, penalty: Tensor) -> Tensor | None:
    """What ρ∇T is to be multiplied by: its factor, and what then keeps it within `most` of ‖∇L‖, given both norms."""
    if most is None:
        return factor
    size = penalty if factor is None else penalty * factor
    # 1 where it is short enough, or no number; in few kernels.
    limit = (most * gradient / size).nan_to_num_(1.0, posinf=1.0).clamp_(max=1.0)
    return limit if factor is None else limit * factor


def combine(step: Step) -> None:
    """Add the penalty to the gradient, put the sum where the base optimiser looks for it, and note their lengths."""
    params, gradients = step.params, step.gradients
    total, norms = gradients, [tensors.norm(gradients)]
    if step.penalty is not None:
        total, step.penalty = tensors.wide(step.penalty), None
        size = tensors.norm(total)
        own = step.factor if step.renewed else None
        if (factor := scale_of(own, step.most, norms[0], size)) is not None:
            tensors.scale_(total, factor)
            size = size * factor
        norms.append(size)
        torch._foreach_add_(total, gradients)
        norms.append(tensors.norm(total))
    tensors.leave(params, total)
    step.stats = Stats(step.loss, step.trace_ratio, *norms)


# What the passes find, and leave as it was.


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
    frozen: Buffers | None = None  # those that a displaced pass has found, and left
    drawn: RandomState | None = None  # where the random numbers of the first pass end, once a second has begun
    others: list[Tensor] = field(default_factory=list)  # parameters that are not the optimiser's: the model's first
    in_model: int = 0  # how many of them are the model's
    seeks: bool = False  # whether the loss is asked for more of them
    pooled: PooledGradients | None = None  # theirs, where a batch is taken in parts
    watch: Watch | None = None  # of gradients in the caller's hands, in the first steps
    probe: Probe | None = None  # of gradients that the caller has accumulated before
    aside: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)  # gradients of theirs, during a pass
    seed: int = 0  # by which displaced weights in bfloat16 are rounded: another one in every step


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


def in_model(model: nn.Module, own: Tensors) -> list[Tensor]:
    """Those of a model's parameters that are not the optimiser's own, in an order that all processes agree on."""
    known = set(map(id, own))
    found: list[Tensor] = []
    ahead: list[nn.Module | None] = [model]
    for module in ahead:  # which grows; model.parameters() takes ten times as long
        if module is not None:
            for p in module._parameters.values() if module._parameters else ():
                if p is not None and id(p) not in known:
                    known.add(id(p))
                    found.append(p)
            if module._modules:
                ahead.extend(module._modules.values())
    return found


@contextmanager
def all_or_nothing(around: Surroundings, *, anew: bool = False, checked: bool = True) -> Iterator[None]:
    """Where passes are made, and nobody else's: on any error random numbers, statistics and gradients are put back.

    Args:
        around: Them.
        anew: Gradients that were there before are forgotten: they take memory, and the first pass clears them anyway.
        checked: Whether the step fails where a number is not finite.
    """
    if anew:
        tensors.forget(around.params)
    gradients = [None] * len(around.params) if anew else [p.grad for p in around.params]
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
    tensors.forget(around.params)
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
                if (frozen := around.copies.frozen) is not None and not frozen.is_settled:
                    frozen.settle()
                statistics.restore()
                around.frozen = statistics
            if around.aside:
                put_back(around)


def put_aside(around: Surroundings, others: Tensors) -> None:
    """Let a further pass leave its gradients for nobody: those of the first are put back afterwards."""
    for p in others:
        around.aside.append((p, None if p.grad is None else tensors.kept([p.grad])[0]))
        p.grad = None


def put_back(around: Surroundings) -> None:
    """The gradients that were put aside."""
    for p, gradient in around.aside:
        p.grad = gradient
    around.aside.clear()


def gradients_ahead(params: Tensors, *, keep: bool) -> Tensors:
    """What a displaced pass has left in `.grad`; `keep` it where another pass follows."""
    # A parameter that drops out of the loss at the displaced weights has gradient zero there.
    gradients = [torch.zeros_like(p) if (g := p.grad) is None else g for p in params]
    return tensors.kept(gradients) if keep else gradients
