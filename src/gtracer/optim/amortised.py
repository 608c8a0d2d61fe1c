"""Penalties for less than a second pass: kept from step to step, or paid out of the one pass that there is.

`reuse` a number: between the steps that make the second pass (`interval`) the last ρ∇T is used again, less of it every
step. `reuse="previous"`: one pass in all, at w + 2u with u = ρ∇L/(f + δ) of the step before, since ∇L(w + 2u) ≈
∇L + 2Hu = ∇L + ρ∇T. `share`: the second pass sees a share of the batch, ρ∇T ≈ 2 H_share u with the whole batch's u.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gtracer import checks
from gtracer.optim.parts import cut
from gtracer.optim.posterior import PosteriorOptimizer
from gtracer.optim.trial import Slice, Trial, signed_rho
from gtracer.optim.two_pass import STEP
from gtracer.penalty import direction
from gtracer.scopes import displaced
from gtracer.tensors import Tensors

PREVIOUS = "previous"
LAST = "last_penalty"  # in the state: ρ∇T of the last step that made a second pass
AHEAD = "ahead"  # in the state: ∇L / (f + δ) of the last step


def check_reuse(reuse: float | str | None, share: float, interval: int, first_order: bool) -> None:
    """Refuse what cannot be reused or shared."""
    checks.number("share", share, low=0, high=1, open_low=True)
    if share < 1 and (reuse == PREVIOUS or not first_order):
        raise ValueError(
            f"share = {share} is of the second pass of curvature=gradient_magnitude and engine='finite-difference'"
        )
    if reuse is None:
        return
    if isinstance(reuse, str):
        checks.choice("reuse", reuse, [PREVIOUS])
        if interval != 1:
            raise ValueError(f"reuse = 'previous' makes one pass in every step: leave interval = {interval} out")
        if not first_order:
            raise ValueError("reuse = 'previous' is for curvature=gradient_magnitude and engine='finite-difference'")
        return
    checks.number("reuse", reuse, low=0, high=1)
    if interval == 1:
        raise ValueError(f"reuse = {reuse} is for the steps between two penalties: set interval to 2 or more")


def check_lean(lean: bool, possible: bool) -> None:
    """Refuse to do without a copy of the weights where their displacement is not computed from what is kept anyway."""
    checks.flag("lean", lean)
    if lean and not possible:
        raise ValueError(
            "lean = True is for the forward difference of curvature=gradient_magnitude, which displaces the weights "
            "once, by what can be computed again: leave it out"
        )


class AmortisedOptimizer(PosteriorOptimizer):
    """An optimiser that may reuse what its last steps have found."""

    reuse: float | str | None = None
    share = 1.0
    _some: dict[Tensor, Tensor] | None = None  # gradients of the share, while a step is made

    def _damped(self, part: Slice) -> tuple[Tensors, float]:
        """f, and the δ that is still to be added to it."""
        raise NotImplementedError

    @property
    def second_pass_due(self) -> bool:
        """Whether this step wants a displaced pass (ρ > 0 somewhere, and `interval` has come round)."""
        return self.reuse != PREVIOUS and super().second_pass_due

    def _first_pass(self, closure: Callable[[], Any]) -> Any:
        if self.reuse != PREVIOUS:
            return super()._first_pass(closure)
        known = [(g, p) for g in self.param_groups for p in g["params"] if AHEAD in self.state.get(p, {})]
        steps = [2 * signed_rho(group, self.knobs(group)) * self.state[p][AHEAD] for group, p in known]
        with displaced([p for _, p in known], steps) if known else nullcontext():
            return super()._first_pass(closure)

    def _make_passes(self, closure: Callable[..., Any], batch: tuple[Any, ...]) -> tuple[Any, Trial]:
        if self.share == 1 or not self.second_pass_due:
            return super()._make_passes(closure, batch)
        if self._parts is not None or self._each:
            raise RuntimeError(f"share = {self.share} with batches or penalty = 'each': hand over one whole batch")
        parts = cut(batch, self.share)
        self._some = {}
        try:
            loss = self._evaluate_parts(closure, parts)
            self._note_draws()
            trial = self._begin(loss)
        finally:
            self._some = None
        while trial.displacement is not None:
            with self._displaced_pass(trial):
                self._evaluate(partial(closure, *parts[0][1]))
        self._conclude(trial)
        return loss, trial

    def _note_part(self, share: float) -> None:
        if self._some == {}:  # the first part's
            self._some = {p: p.grad.clone() for p in self._params() if p.grad is not None}

    def _compared(self, slices: list[Slice]) -> Tensors:
        """The gradients that the second pass is compared with: of the same examples."""
        if self._some is None:
            return [g for part in slices for g in part.gradients]
        return [self._some[p] if p in self._some else torch.zeros_like(p) for part in slices for p in part.params]

    def _passes_made(self) -> Trial:
        if self.reuse == PREVIOUS and not self._is_empty_step():
            raise RuntimeError("step() without a closure: reuse='previous' displaces the weights itself, step(closure)")
        return super()._passes_made()

    def _conclude(self, trial: Trial) -> None:
        trial.renewed = trial.penalty is not None
        if not trial.renewed and isinstance(self.reuse, float | int):
            self._use_again(trial, self.reuse)
        super()._conclude(trial)

    def _use_again(self, trial: Trial, decay: float) -> None:
        wanted = any(group[self.rho_key] > 0 for group in self.param_groups)
        if wanted and trial.params and all(LAST in self.state.get(p, {}) for p in trial.params):
            passed = self.param_groups[0][STEP] % self.interval
            trial.penalty = torch._foreach_mul([self.state[p][LAST] for p in trial.params], decay**passed)

    def _clipped_update(self, trial: Trial) -> None:
        found: dict[str, Tensors] = {}
        if isinstance(self.reuse, float | int) and trial.renewed:
            found[LAST] = torch._foreach_sub([p.grad for p in trial.params if p.grad is not None], trial.gradients)
        super()._clipped_update(trial)
        if isinstance(self.reuse, float | int):
            for p in trial.params:
                if LAST not in self.state[p]:  # a place for what a checkpoint holds
                    self.state[p][LAST] = torch.zeros_like(p)
        if self.reuse == PREVIOUS:
            found[AHEAD] = [v for part in trial.slices for v in direction(part.gradients, *self._damped(part))]
        for name, values in found.items():
            for p, value in zip(trial.params, values, strict=True):
                if name in self.state[p]:  # where a captured step will look for it again
                    self.state[p][name].copy_(value)
                else:
                    self.state[p][name] = value
