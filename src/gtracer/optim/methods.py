"""What is added to the gradient, and the passes that it takes: the gradient of the trace ratio, or SAM's change."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from gtracer import tensors
from gtracer.curvature import Choice, MicroBatch, gradient_magnitude, per_example
from gtracer.optim import directions
from gtracer.optim.compiler import runner
from gtracer.optim.directions import TINY
from gtracer.optim.engines import (
    RADIUS,
    Engine,
    Exact,
    Runner,
    aimed,
    differentiated,
    exact,
    example_difference,
    finite_difference,
)
from gtracer.optim.step import Passes, Slice, Step
from gtracer.tensors import Tensors

if TYPE_CHECKING:
    from gtracer.optim.rules import Rule


class Method(Protocol):
    """What TRACER and SAM differ in.

    Attributes:
        central: Whether a due step makes two displaced passes, one to either side.
        needs_graph: Whether more is wanted of the loss than its gradient.
        needs_closure: Why the passes cannot be made by a loop of the caller's own, if they cannot.
        parts: The size of the micro-batches that the batch is to be taken in, if in any.
    """

    @property
    def central(self) -> bool: ...
    @property
    def needs_graph(self) -> bool: ...
    @property
    def needs_closure(self) -> str | None: ...
    @property
    def parts(self) -> int | None: ...

    def passes(self, step: Step, rule: Rule, *, safely: bool) -> Passes | None:
        """The displaced passes of this step, and T; their result is what is added to the gradient."""


@dataclass(frozen=True)
class TraceRatio:
    """∇(ρT), for any estimate of the curvature.

    Attributes:
        curvature: The estimators of T's numerator and of f.
        engine: How T is differentiated.
        scale_free: Whether weights count by their direction where the loss sees nothing else of them.
        lean: Keep no copy of the weights while they are displaced.
        compile: Compile the arithmetic.
    """

    curvature: Choice
    engine: Engine
    scale_free: bool = False
    lean: bool = False
    compile: bool = False

    # What follows from these, once for all steps.

    @cached_property
    def run(self) -> Runner:
        """Runs a piece of arithmetic."""
        return runner(self.compile)

    @cached_property
    def central(self) -> bool:
        return self.engine.central

    @cached_property
    def radius(self) -> float:
        """Length of the displacement, where there is one."""
        return float(getattr(self.engine, "radius", RADIUS))

    @cached_property
    def is_plain(self) -> bool:
        """Whether it is the paper's: the squared gradient of the batch, by first-order passes."""
        return self.curvature.is_default and not self.engine.is_exact

    @cached_property
    def needs_closure(self) -> str | None:
        if not self.is_plain:
            return f"{self.curvature} with engine={self.engine!r} makes its own passes"
        return getattr(self.engine, "needs_closure", None)

    @cached_property
    def needs_graph(self) -> bool:
        return self.engine.is_exact or not (_is_square(self.curvature.average) and _is_square(self.curvature.numerator))

    @cached_property
    def by_examples(self) -> bool:
        """Whether a displaced pass moves every example's weights by themselves."""
        return not self.engine.is_exact and self.curvature.numerator == per_example

    @cached_property
    def parts(self) -> int | None:
        return self.curvature.parts

    def passes(self, step: Step, rule: Rule, *, safely: bool) -> Passes | None:
        F = None if step.evaluation is None else self._measure(step)
        if F is not None:
            return self._passes_of(F, step, rule)
        # 2 H u, as for any square of a gradient.
        u, step.trace_ratio = self._aim(step, rule)
        if not step.due:
            return None
        params, compared = step.params, step.gradients if step.compared is None else step.compared
        if isinstance(self.engine, Exact):
            return exact(params, compared, u)
        again = (lambda: self._aim(step, rule)[0]) if self.lean else None
        own: dict[str, Any] = {"radius": self.radius, "central": self.central, "run": self.run}
        return finite_difference(params, compared, u, **own, again=again, safely=safely)

    def damped(self, step: Step, rule: Rule, part: Slice) -> tuple[Tensors, float]:
        """f, and the δ that is still to be added to it."""
        f, delta = rule.average(part), part.hyper["delta"]
        if not self.scale_free:
            return f, delta
        return directions.damped(part, f, rule.base.state, step.rows), min(delta, TINY)

    def _aim(self, step: Step, rule: Rule) -> tuple[Tensors, Tensor | None]:
        """u of these gradients, and T."""
        ratio: Tensor | None = None
        u: list[Tensor] = []
        for part in step.slices:
            g = part.gradients if step.evaluation is None else tensors.wide([x.detach() for x in part.gradients])
            rho = torch.tensor(part.signed_rho, dtype=g[0].dtype) if self.compile else part.signed_rho
            here, T = self.run(aimed)(g, *self.damped(step, rule, part), rho)
            ratio = T if ratio is None else ratio + T.to(ratio.device)
            u += here
        return u, ratio

    def _measure(self, step: Step) -> dict[Tensor, Tensor] | None:
        """Note the curvature for the average in the slices; give the numerator's, where it is no squared gradient."""
        at, (numerator, average) = step.evaluation, (self.curvature.numerator, self.curvature.average)
        assert at is not None
        F: dict[Tensor, Tensor] | None = None
        measured: dict[Tensor, Tensor] | None = None
        with torch.enable_grad():
            if not _is_square(numerator):
                F = dict(zip(at.params, numerator(at), strict=True))
            if average == numerator:
                measured = F
            elif not _is_square(average):
                measured = dict(zip(at.params, average(at), strict=True))
        if measured is not None:
            note_curvature(step, measured)
        return F

    def _passes_of(self, F: dict[Tensor, Tensor], step: Step, rule: Rule) -> Passes | None:
        """For any estimator: T is differentiated as it stands, or example by example."""
        ratio: Tensor | None = None
        weights: list[Tensor] = []
        for part in step.slices:
            weight = tensors.inverse(*self.damped(step, rule, part))
            here = tensors.dot(tensors.wide([F[p].detach() for p in part.params]), weight)
            ratio = here if ratio is None else ratio + here.to(ratio.device)
            weights += torch._foreach_mul(weight, part.signed_rho)
        step.trace_ratio = ratio
        if not step.due:
            return None
        params, at = step.params, step.evaluation
        assert at is not None
        if isinstance(self.engine, Exact):
            return differentiated(params, [F[p] for p in params], weights)
        # mean_i ‖u_i‖² with u_i = weights ∘ g_i
        length = tensors.dot(tensors.wide([F[p] for p in params]), torch._foreach_mul(weights, weights)).sqrt()
        shifts = at.shifts(dict(zip(params, weights, strict=True)))
        return example_difference(step.gradients, shifts, length, radius=self.radius, central=self.central)


def _is_square(estimator: Any) -> bool:
    """Whether F is the square of a gradient (of a batch or micro-batch), so that ∇T is 2 H u."""
    return estimator is gradient_magnitude or isinstance(estimator, MicroBatch)


def note_curvature(step: Step, measured: dict[Tensor, Tensor]) -> None:
    """Let f follow this instead of the squared gradient."""
    for part in step.slices:
        # A Hessian's diagonal may be negative, f must not be.
        part.curvature = torch._foreach_abs(tensors.wide([measured[p].detach() for p in part.params]))


@dataclass(frozen=True)
class Sharpness:
    """∇L(w + e) − ∇L(w), what SAM adds to the gradient, with e the steepest way out of the neighbourhood's centre.

    Attributes:
        adaptive: ASAM: the neighbourhood is measured in units of |w| + η.
        eta: ASAM's η.
    """

    adaptive: bool = False
    eta: float = 0.01

    central = False
    needs_graph = False
    needs_closure: str | None = None
    parts: int | None = None

    def passes(self, step: Step, rule: Rule, *, safely: bool) -> Passes | None:
        if not step.due:
            return None
        params, gradients = step.params, step.gradients
        # ASAM's ball is ‖e / T‖ ≤ ρ with T = |w| + η, so e = ρ T² ∇L / ‖T ∇L‖; SAM has T = 1.
        steps = self._stretched(params, gradients)
        length = tensors.norm(steps)
        rhos = [part.signed_rho for part in step.slices for _ in part.params]
        displacement = list(torch._foreach_mul(self._stretched(params, steps), rhos))
        tensors.scale_(displacement, torch.where(length > 0, 1 / length, 0.0))
        if safely:
            tensors.finite_(displacement)
        return sharpness_change(gradients, displacement)

    def _stretched(self, params: Tensors, xs: Tensors) -> Tensors:
        """T x."""
        return [x * (p.abs() + self.eta) for p, x in zip(params, xs, strict=True)] if self.adaptive else xs


def sharpness_change(gradients: Tensors, displacement: Tensors) -> Passes:
    """∇L(w + e) − ∇L(w)."""
    ahead = tensors.wide((yield displacement))
    torch._foreach_sub_(ahead, gradients)
    return ahead
