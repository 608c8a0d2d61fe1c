"""What one step knows, as plain data; it is made anew for every step and flows through a few functions."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gtracer import tensors
from gtracer.curvature import Evaluation
from gtracer.optim.directions import Rows
from gtracer.optim.stats import Stats
from gtracer.scopes import RandomState
from gtracer.tensors import Tensors

if TYPE_CHECKING:
    from gtracer.optim.executors import TwoKernels

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
    most: float | None = None  # what ‖ρ∇T‖/‖∇L‖ is cut off at
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

    random: tuple[RandomState, RandomState] | None  # where those of its first pass began, and ended
    smallest: Tensor | None  # of the parameters, so that the gradient may be held
    gradient: Tensor | None  # of that one
    version: int = 0

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


def scale_of(factor: Tensor | None, most: float | None, gradient: Tensor, penalty: Tensor) -> Tensor | None:
    """What ρ∇T is to be multiplied by: its factor, and what then keeps it within `most` of ‖∇L‖, given both norms."""
    if most is None:
        return factor
    size = penalty if factor is None else penalty * factor
    limit = torch.where(size > most * gradient, most * gradient / size, torch.ones_like(size))
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
