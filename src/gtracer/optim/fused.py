"""A step of TRACER with as few readings of memory as there can be: one kernel before the second pass, one behind.

Before: direction and displacement, from the gradient and f. Behind: the weights come back, ρ∇T, the update and f.
Between them no direction, no old weights and no ρ∇T are kept: what displaced the weights is computed again. The
lengths, which the displacement needs first, are one reading more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gtracer.optim.amortised import LAST, PREVIOUS
from gtracer.optim.clip import to_norm
from gtracer.optim.penalised import TracerOptimizer
from gtracer.optim.stats import Stats
from gtracer.optim.trial import Plan, Slice, Trial
from gtracer.optim.two_pass import STEP
from gtracer.penalty import Passes
from gtracer.tensors import Tensors

if TYPE_CHECKING:
    from gtracer.optim.launches import Launched


class FusedTracer(TracerOptimizer):
    """Makes a step in two kernels on a GPU, where nothing has to be looked at between passes and update."""

    _fuses = False
    _kernels: TwoKernels | None = None

    def _launched(self, part: Slice) -> Launched | None:
        """The slice for the kernels; None where they do not make this optimiser's update."""
        return None

    def _passes_over(self, closure: Callable[[], Any]) -> tuple[Any, Trial]:
        alone = self._parts is None and not self._each and self._scaler is None
        bounded = self.clip is None or self.clip.is_one_factor
        plain = self._is_plain and not (self.scale_free or self.preconditioned or self.eta or self.reuse == PREVIOUS)
        quiet = self.compiled and self.lean and self.nonfinite == "ignore"
        self._fuses = alone and bounded and plain and quiet and _has_triton()
        try:
            return super()._passes_over(closure)
        finally:
            self._fuses = False

    def _plan_of_squares(self, slices: list[Slice], due: bool) -> Plan:
        self._kernels = None
        parts = [self._launched(part) for part in slices] if self._fuses else []
        launched = [part for part in parts if part is not None]
        if not launched or len(launched) < len(parts):
            return super()._plan_of_squares(slices, due)
        self._kernels = TwoKernels(launched, self.radius, self.clip.norm if self.clip else None)
        return Plan(self._kernels.passes() if due else None)

    def _conclude(self, trial: Trial) -> None:
        if self._kernels is None:
            super()._conclude(trial)

    def _clip(self, trial: Trial) -> None:
        if self._kernels is None:
            super()._clip(trial)

    def _update(self, trial: Trial) -> None:
        try:
            super()._update(trial)
        finally:
            self._kernels = None

    def _apply(self, trial: Trial) -> None:
        if self._kernels is None:
            super()._apply(trial)
            return
        sums = self._finish(self._kernels, trial.params)
        self.stats = Stats.of_squares(trial.loss, self._kernels.reached, sums)

    def _finish(self, kernels: TwoKernels, params: Tensors) -> Tensor | None:
        """Make the update with this step's ρ∇T, an old one, or none; gives ‖ρ∇T‖² and ‖∇L + ρ∇T‖²."""
        if kernels.ahead:
            return kernels.finish(kernels.ahead, kept=self._kept(params) if self.reuse is not None else None)
        strong = any(group[self.rho_key] > 0 for group in self.param_groups)
        if self.reuse is not None and strong and all(LAST in self.state.get(p, {}) for p in params):
            passed = self.param_groups[0][STEP] % self.interval
            return kernels.finish([self.state[p][LAST] for p in params], again=float(self.reuse) ** passed)
        kernels.finish(params, again=0.0)
        return None

    def _kept(self, params: Tensors) -> Tensors:
        for p in params:
            if LAST not in self.state[p]:
                self.state[p][LAST] = torch.zeros_like(p)
        return [self.state[p][LAST] for p in params]

    def _learn(self, slices: list[Slice]) -> None:
        if self._kernels is None:
            super()._learn(slices)
            return
        for part in self._kernels.parts:
            part.count_()
            for p, state in part.state.items():
                self.state[p].update(state)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def launchable(*lists: Tensors) -> bool:
    """Whether the kernels can read them: whole tensors of float32, all on one GPU."""
    tensors = [t for part in lists for t in part]
    alike = {t.dtype for t in tensors} == {torch.float32} and len({t.device for t in tensors}) == 1
    return alike and tensors[0].is_cuda and all(map(Tensor.is_contiguous, tensors))


class TwoKernels:
    """A step under way, from the first gradient to the update.

    Args:
        parts: What is updated.
        radius: Length of the displacement.
        most: The norm that ∇L + ρ∇T is clipped to, if it is.
    """

    def __init__(self, parts: list[Launched], radius: float, most: float | None) -> None:
        self.parts, self._radius, self._most = parts, radius, most
        self.reached = _sum([part.reach() for part in parts])  # ‖u‖², T and ‖∇L‖²
        self.ahead: Tensors = ()  # gradients at the displaced weights

    def passes(self) -> Passes:
        """The one further pass, behind which the weights stay displaced."""
        self.ahead = yield self._displaced()
        return self.ahead

    @contextmanager
    def _displaced(self) -> Iterator[None]:
        self._displace(self._radius)
        try:
            yield
        except BaseException:
            self._displace(-self._radius)
            raise

    def _displace(self, radius: float) -> None:
        for part in self.parts:
            part.displace_(self.reached, radius)

    def finish(self, ahead: Tensors, *, again: float | None = None, kept: Tensors | None = None) -> Tensor:
        """Make the update; gives ‖ρ∇T‖² and ‖∇L + ρ∇T‖².

        Args:
            ahead: The gradients at the displaced weights; or an old ρ∇T.
            again: In that case the factor to multiply it by.
            kept: Where to keep the new one.
        """
        start, of, shrink = 0, (self.reached, self._radius), None
        for part in self.parts:
            own = slice(start, start + len(part.params))
            part.take(ahead[own], again, kept[own] if kept is not None else None)
            start = own.stop
        if self._most is not None:
            shrink = to_norm(self._most, _sum([part.total(*of) for part in self.parts]).sqrt())
        return _sum([part.finish_(*of, shrink) for part in self.parts])


def _sum(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(tensors).sum(0)
