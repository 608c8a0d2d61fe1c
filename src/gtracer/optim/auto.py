"""ρ that sets itself: it begins at zero, rises slowly, and moves by what the gradients say; nothing to tune.

Two things make a penalty ruin a net that trains well without it. Where it is many times the gradient in the first
steps, as in a net with batch norm, the last layer's units die and nothing brings them back: so ρ is zero at first and
then rises, and ‖ρ∇T‖ is never more than twice ‖∇L‖. And where there is nothing to gain, it slows the fit down: so ρ
starts small, and moves every tenth step.

Without held-out data: while a net fits what its examples have in common, sums of gradients over ten steps agree with
those before; when it memorises, each undoes what the others did. ρ rises while their cosine is low, once the loss has
fallen, and falls while it is high.

With held-out data, whose labels are as noisy as the rest: dL_held/dρ = −lr ⟨∇L_held, ∇T⟩, so ρ rises while ∇T points
where the held-out loss falls, and falls where ∇L itself does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from gtracer import tensors
from gtracer.optim import processes
from gtracer.optim.evaluate import Surroundings, displaced_pass, gradients_ahead, one_pass
from gtracer.optim.step import COUNT, Step
from gtracer.tensors import Tensors

if TYPE_CHECKING:
    from gtracer.optim.optimizer import TwoPassOptimizer

AUTO: Literal["auto"] = "auto"
IS_AUTO = "rho_is_auto"  # in a group: whether its ρ sets itself
NUMBERS = "rho_numbers"  # in the state of one parameter: what a controller knows, on its device
SAMPLED = 2**20  # coordinates that the gradients are compared in, of nets with more
State = dict[Tensor, dict[str, Any]]


@dataclass(frozen=True)
class Controller:
    """The constants, one set for all problems; how they were found is in docs/choosing-rho.md.

    Attributes:
        held_out: Gives the loss of a held-out batch.
        start, low, high: ρ at first, and its bounds.
        wait, rise: Steps at ρ = 0, and those over which ρ then rises.
        most: What ‖ρ∇T‖/‖∇L‖ is cut off at.
        every: Steps from one decision to the next.
        pace: By how much log ρ moves at most.
    """

    held_out: Callable[[], Tensor] | None = None
    start: float = 3e-5
    low: float = 1e-5
    high: float = 1e-2
    wait: int = 20
    rise: int = 80
    most: float = 2.0
    every: int = 10
    pace: float = 0.2

    # Of the cosine of successive gradients.
    wanted = 0.3  # below it ρ rises
    fallen = (0.2, 0.4)  # shares of the loss: ρ rises from the first on, in full from the second on
    memory = 0.8

    def rho(self, log_rho: float, count: int) -> float:
        """ρ of step number `count`."""
        return math.exp(log_rho) * min(1.0, max(0.0, (count - self.wait) / self.rise))

    def wants_held_out(self, count: int) -> bool:
        """Whether this step looks at held-out data."""
        return self.held_out is not None and count >= self.wait and count % self.every == 0

    def note(self, opt: TwoPassOptimizer, step: Step) -> None:
        """Learn from a step that was made, and set ρ for the next. `COUNT` is that step's number still."""
        count, state = opt.param_groups[0][COUNT], opt.base.state
        parts = [part for part in step.slices if part.group.get(IS_AUTO)]
        if not parts:
            return
        params = [p for part in parts for p in part.params]
        known = (p for group in opt.param_groups for p in group["params"] if NUMBERS in state.get(p, {}))
        numbers = _numbers(state, next(known, params[0]), self.start)
        if self.held_out is None:
            gradients = sampled([g for part in parts for g in part.gradients])
            _add(state, "rho_sum", params, gradients, keep=1.0, weight=1.0)
            _follow_loss(numbers, step.loss, count)
            if (count + 1) % self.every == 0:
                self._compare_gradients(state, params, numbers, count, opt.model)
        elif step.held_out is not None:
            self._compare_with_held_out(state, params, step, numbers)
        if (count + 1) % self.every == 0 or self.wants_held_out(count):
            log_rho = float(numbers[3])
        else:
            log_rho = opt.param_groups[0].get("rho_log", math.log(self.start))
        for group in opt.param_groups:
            if group.get(IS_AUTO):
                group["rho_log"] = log_rho
                group[opt.rho_key] = self.rho(log_rho, count + 1)

    def _compare_gradients(
        self, state: State, params: Tensors, numbers: Tensor, count: int, model: torch.nn.Module | None
    ) -> None:
        known = [p for p in params if "rho_before" in state[p]]
        new = [state[p]["rho_sum"] for p in known]
        tensors.finite_([state[p]["rho_sum"] for p in params])  # of a step that the kernels have skipped
        if known:
            before = [state[p]["rho_before"] for p in known]
            cosine = _cosine(new, before)
            loss, first, average, log_rho = numbers.unbind()
            average = self.memory * average + (1 - self.memory) * cosine.to(numbers)
            push = self.wanted - average
            low, full = self.fallen
            fallen = (1 - processes.mean_of(loss, model) / processes.mean_of(first, model) - low) / (full - low)
            gate = torch.where(torch.isfinite(fallen) & (first > 0), fallen.clamp(0, 1), 0.0)
            push = torch.where(push > 0, push * gate, push)
            moved = log_rho + self._step(push) if count >= self.wait + self.rise else log_rho
            numbers.copy_(torch.stack([loss, first, average, self._bounded(moved)]))
        for p in params:
            fresh = state[p]["rho_sum"]
            if "rho_before" in state[p]:
                state[p]["rho_before"].mul_(0.5).add_(fresh, alpha=0.5)
            else:
                state[p]["rho_before"] = fresh.clone()
            fresh.zero_()

    def _compare_with_held_out(self, state: State, params: Tensors, step: Step, numbers: Tensor) -> None:
        assert step.held_out is not None
        pairs = {p: i for i, p in enumerate(step.params)}
        kinds = {"rho_held": step.held_out, "rho_gradient": sampled(step.gradients), "rho_penalty": step.pushed}
        for name, found in kinds.items():
            if found is None:
                return
            own = [found[pairs[p]] for p in params]
            unit = torch._foreach_div(own, tensors.norm(own).clamp_min(1e-30))
            tensors.finite_(unit)
            _add(state, name, params, unit, keep=self.memory, weight=1 - self.memory)
        held, gradient, penalty = ([state[p][name] for p in params] for name in kinds)
        push = _cosine(held, penalty) - 2 * _cosine(held, gradient)
        numbers[3] = self._bounded(numbers[3] + self._step(push.to(numbers)))

    def _step(self, push: Tensor) -> Tensor:
        return (2 * push).clamp(-self.pace, self.pace)

    def _bounded(self, log_rho: Tensor) -> Tensor:
        return log_rho.clamp(math.log(self.low), math.log(self.high))


def controller_of(held_out: Callable[[], Tensor] | None) -> Controller:
    """For held-out data, or without."""
    if held_out is None:
        return Controller()
    if not callable(held_out):
        raise ValueError(f"held_out must be a function that gives the loss of a held-out batch, got {held_out!r}")
    return Controller(held_out, start=5e-4, low=1e-4)


def held_out_gradient(
    controller: Controller, params: Tensors, around: Surroundings, scaler: torch.amp.GradScaler | None
) -> Tensors:
    """A sample of the held-out loss's gradient; statistics and random numbers are left as they were."""
    assert controller.held_out is not None
    with displaced_pass(params, None, around):
        one_pass(controller.held_out, around, scaler)
    gradients = sampled(gradients_ahead(params, keep=True))
    around.clear()
    return tensors.clone(gradients)


def sampled(xs: Tensors) -> Tensors:
    """A share of the coordinates of each, where they are many: enough for a cosine."""
    stride = max(1, math.ceil(sum(x.numel() for x in xs) / SAMPLED))
    return [x.detach() if tensors.is_sharded(x) else x.detach().reshape(-1)[::stride] for x in xs]


def _numbers(state: State, p: Tensor, start: float) -> Tensor:
    """The loss (average, and at first), the cosine, and log ρ."""
    if NUMBERS not in state[p]:
        dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
        nothing = float("inf")
        state[p][NUMBERS] = torch.tensor([nothing, nothing, 0.0, math.log(start)], dtype=dtype, device=p.device)
    numbers: Tensor = state[p][NUMBERS]
    return numbers


def _follow_loss(numbers: Tensor, loss: Tensor | None, count: int) -> None:
    if loss is None:
        return
    loss = loss.detach().to(numbers).reshape(())
    loss = torch.where(torch.isfinite(loss), loss, numbers[0])
    numbers[0] = torch.where(torch.isfinite(numbers[0]), 0.95 * numbers[0] + 0.05 * loss, loss)
    if count < 5:
        numbers[1] = torch.minimum(numbers[1], loss)


def _add(state: State, name: str, params: Tensors, values: Tensors, *, keep: float, weight: float) -> None:
    """Let an average in the state follow."""
    for p, value in zip(params, values, strict=True):
        if name not in state[p]:
            state[p][name] = torch.zeros_like(value)
    known = [state[p][name] for p in params]
    if keep != 1.0:
        torch._foreach_mul_(known, keep)
    torch._foreach_add_(known, list(values), alpha=weight)


def _cosine(xs: Tensors, ys: Tensors) -> Tensor:
    return tensors.dot(xs, ys) / (tensors.norm(xs) * tensors.norm(ys)).clamp_min(1e-30)
