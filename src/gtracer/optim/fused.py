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
from gtracer.optim.penalised import TracerOptimizer
from gtracer.optim.stats import Stats
from gtracer.optim.trial import Plan, Slice, Trial
from gtracer.optim.two_pass import STEP
from gtracer.penalty import Passes
from gtracer.scopes import is_capturing
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
        alone = self._parts is None and not self._each and self._scaler is None and self.clip is None
        plain = self._is_plain and not (self.scale_free or self.preconditioned or self.eta or self.reuse == PREVIOUS)
        # In a capture no addresses could be handed over from the CPU.
        quiet = self.compiled and self.lean and self.nonfinite == "ignore" and not is_capturing()
        self._fuses = alone and plain and quiet and _has_triton()
        try:
            return super()._passes_over(closure)
        finally:
            self._fuses = False

    def _plan_of_squares(self, slices: list[Slice], due: bool) -> Plan:
        self._kernels = None
        parts = [self._launched(part) for part in slices] if self._fuses else [None]
        launched = [part for part in parts if part is not None]
        if len(launched) < len(parts):
            return super()._plan_of_squares(slices, due)
        self._kernels = TwoKernels(launched, self.radius)
        return Plan(self._kernels.passes() if due else None, self._kernels.ratio)

    def _conclude(self, trial: Trial) -> None:
        if self._kernels is None:
            super()._conclude(trial)

    def _update(self, trial: Trial) -> None:
        try:
            super()._update(trial)
        finally:
            self._kernels = None

    def _apply(self, trial: Trial) -> None:
        if self._kernels is None:
            super()._apply(trial)
            return
        change, total = self._finish(self._kernels, trial.params)
        self.stats = Stats(trial.loss, trial.trace_ratio, self._kernels.size, change, total)

    def _finish(self, kernels: TwoKernels, params: Tensors) -> tuple[Tensor | None, Tensor | None]:
        """Make the update with this step's ρ∇T, an old one, or none; gives ‖ρ∇T‖ and ‖∇L + ρ∇T‖."""
        if kernels.ahead:
            return kernels.finish(self._kept(params) if self.reuse is not None else None)
        strong = any(group[self.rho_key] > 0 for group in self.param_groups)
        if self.reuse is not None and strong and all(LAST in self.state.get(p, {}) for p in params):
            passed = self.param_groups[0][STEP] % self.interval
            return kernels.finish_again([self.state[p][LAST] for p in params], float(self.reuse) ** passed)
        kernels.finish_again(params, 0.0)
        return None, None

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
            for p, state in zip(part.params, part.state, strict=True):
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
    """A step under way, from the first gradient to the update."""

    def __init__(self, parts: list[Launched], radius: float) -> None:
        self.parts = parts
        squared_length, self.ratio, squared_size = torch.stack([part.reach() for part in parts]).sum(0)
        length = squared_length.sqrt()
        self.size = squared_size.sqrt()
        self._scale = torch.where(length > 0, radius / length, 0.0)
        self._factor = 2 * length / radius
        self.ahead: Tensors = ()  # gradients at the displaced weights

    def passes(self) -> Passes:
        """The one further pass, behind which the weights stay displaced."""
        self.ahead = yield self._displaced()
        return self.ahead

    @contextmanager
    def _displaced(self) -> Iterator[None]:
        self._displace(self._scale)
        try:
            yield
        except BaseException:
            self._displace(-self._scale)
            raise

    def _displace(self, scale: Tensor) -> None:
        for part in self.parts:
            part.displace_(scale)

    def finish(self, kept: Tensors | None) -> tuple[Tensor, Tensor]:
        """Make the update, with ρ∇T `kept` where that is asked for; gives ‖ρ∇T‖ and ‖∇L + ρ∇T‖."""
        return self._finished(self.ahead, self._factor, again=False, kept=kept)

    def finish_again(self, penalties: Tensors, factor: float) -> tuple[Tensor, Tensor]:
        """Make the update with the given ρ∇T times the factor."""
        return self._finished(penalties, torch.full_like(self._factor, factor), again=True)

    def _finished(
        self, ahead: Tensors, factor: Tensor, *, again: bool, kept: Tensors | None = None
    ) -> tuple[Tensor, Tensor]:
        sums, start = [], 0
        for part in self.parts:
            own = slice(start, start + len(part.params))
            place = kept[own] if kept is not None else None
            sums.append(part.finish_(ahead[own], self._scale, factor, again=again, kept=place))
            start = own.stop
        change, total = torch.stack(sums).sum(0).sqrt()
        return change, total
