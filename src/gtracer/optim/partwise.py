"""The two-pass scheme as people train: in micro-batches, on several processes, in half precision, with clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch.amp.grad_scaler import OptState
from torch.nn.parallel import DistributedDataParallel

from gtracer import checks, tensors
from gtracer.optim.clip import Clip
from gtracer.optim.parts import Pool, as_first, mean_over_processes, shared
from gtracer.optim.trial import Slice, Trial
from gtracer.optim.two_pass import TwoPassOptimizer
from gtracer.scopes import PooledStatistics, RandomState
from gtracer.tensors import Tensors

PENALTIES = ("whole", "each")
Parts = list[tuple[float, tuple[Any, ...]]]


class PartwiseOptimizer(TwoPassOptimizer):
    """A two-pass optimiser whose passes may be taken in parts.

    Args:
        *args: As for `TwoPassOptimizer`.
        clip: Bounds for the gradient that makes the update.
        **kwargs: As for `TwoPassOptimizer`.
    """

    def __init__(self, *args: Any, clip: Clip | None = None, **kwargs: Any) -> None:
        checks.kind("clip", clip, (Clip, type(None)), ", such as gtracer.Clip(norm=1.0)")
        self.clip = clip
        super().__init__(*args, **kwargs)

    _settings = (*TwoPassOptimizer._settings, "clip")

    def _forget(self) -> None:
        super()._forget()
        self._parts: Parts | None = None
        self._each = False
        self._scaler: torch.amp.GradScaler | None = None
        self._unscaled = False  # whether the gradients of the pass under way are so already, part by part
        self._held = _Held(self)

    def step(
        self,
        closure: Callable[..., Any] | None = None,
        *batch: Any,
        batches: Sequence[Any] | None = None,
        penalty: str = "whole",
        scaler: torch.amp.GradScaler | None = None,
    ) -> Any:
        """Make one step; return the plain loss at the old weights.

        Args:
            closure: Computes the loss of one batch and returns it, with or without having called `zero_grad()`
                and `backward()` itself. Without a closure the gradients must be there and, where
                `second_pass_due`, the pass under `perturbed()` must have been made.
            *batch: What to call the closure with, if anything.
            batches: Micro-batches instead: the closure is called with each of them, and the step is that of all of
                them together. Each counts by its number of examples.
            penalty: `"whole"`: of the whole batch, of all micro-batches and all processes. `"each"`: the mean of the
                penalties of its parts, which on several processes takes one exchange of gradients, not two; then
                `model=` must be the `DistributedDataParallel` module.
            scaler: For float16: scales the loss of every pass. An overflow in any of them skips the step. Call
                `scaler.update()` afterwards, as ever.
        """
        checks.choice("penalty", penalty, PENALTIES)
        if batches is not None and (batch or closure is None):
            raise ValueError("step(closure, batches=[…]) takes a closure and no other batch: the batches are the batch")
        if scaler is not None and closure is None:
            raise ValueError("step(scaler=…) needs a closure: without one call scaler.step(opt), as for any optimiser")
        self._parts = None if batches is None else shared(batches)
        self._each = penalty == "each"
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        try:
            return super().step(closure, *batch)
        finally:
            self._parts, self._each, self._scaler = None, False, None

    @contextmanager
    def perturbed(self, scaler: torch.amp.GradScaler | None = None) -> Iterator[None]:
        """Weights displaced for the second pass, in loops that cannot hand over a closure.

            opt.zero_grad()
            loss_of(batch).backward()
            with opt.perturbed():
                loss_of(batch).backward()
            opt.step()

        Random numbers are replayed from the last `zero_grad()`, so call that right before the first pass. With
        `difference="central"` two such scopes are needed. In a step that is not `second_pass_due` the scope
        displaces nothing and drops what is computed in it.

        Args:
            scaler: Where both passes scale their loss by it. The gradient that is left is scaled too, for
                `scaler.unscale_(opt)` and `scaler.step(opt)` to find it as ever.
        """
        if scaler is None or not scaler.is_enabled():
            with super().perturbed():
                yield
            return
        self._require_scaled(scaler)
        self._drop_abandoned()
        scaled = [(p, p.grad) for p in self._params()]
        if self._trial is None and not self._busy:
            self._unscale(scaler)
        self._scaler = scaler
        try:
            with super().perturbed():
                yield
                self._unscale(scaler)
        except BaseException:
            for p, gradient in scaled:
                p.grad = gradient
            raise
        finally:
            self._scaler = None
        if self._trial is not None and self._trial.displacement is None:
            self._scale(self._trial, scaler)
            self._trial.leave()

    # Half precision: nothing but the backward pass itself sees scaled gradients.

    def _backward(self, loss: Tensor) -> None:
        super()._backward(loss if self._scaler is None else self._scaler.scale(loss))

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        loss = super()._evaluate(closure)
        if self._scaler is not None and not self._unscaled:
            self._unscale(self._scaler)
        self._unscaled = False
        return loss

    def _unscale(self, scaler: torch.amp.GradScaler) -> None:
        _multiply([p for p in self._params() if p.grad is not None], lambda one: 1 / scaler.scale(one))

    def _scale(self, trial: Trial, scaler: torch.amp.GradScaler) -> None:
        _multiply(trial.params, scaler.scale)

    def _require_scaled(self, scaler: torch.amp.GradScaler) -> None:
        if scaler._per_optimizer_states[id(self)]["stage"] is OptState.UNSCALED:
            raise RuntimeError(
                "perturbed(scaler=…) after scaler.unscale_(opt): the gradients would be unscaled twice. Call unscale_ "
                "behind the scope, before scaler.step(opt)"
            )

    @property
    def _may_overflow(self) -> bool:
        """Whether a first pass may do so by way of routine, and a second at weights of NaN spoil what nobody saves."""
        return self._scaler is not None and self.model is None

    def _nonfinite(self, trial: Trial) -> str:
        if self._scaler is not None or trial.stats is None:  # a scaler looks for itself
            return ""
        # All processes must decide the same, and each has a loss of its own.
        return trial.stats.nonfinite(loss=self._world == 1)

    def _update(self, trial: Trial) -> None:
        if self._scaler is None:
            self._clipped_update(trial)
            return
        self._scale(trial, self._scaler)
        self._held.trial = trial
        self._scaler.step(self._held)  # type: ignore[arg-type]

    def _clipped_update(self, trial: Trial) -> None:
        self._clip(trial)
        super()._update(trial)

    def _clip(self, trial: Trial) -> None:
        if self.clip is not None:
            self.clip(trial)

    # Parts.

    def _make_passes(self, closure: Callable[..., Any], batch: tuple[Any, ...]) -> tuple[Any, Trial]:
        alone = self._parts is None and not (self._each and self._world > 1)
        if alone:
            return super()._make_passes(closure, batch)
        parts = self._parts or [(1.0, batch)]
        if self._each:
            return self._make_passes_of_each(closure, parts, own_curvature=True)
        return super()._make_passes(partial(self._evaluate_parts, closure, parts), ())

    def _make_passes_of_each(
        self, closure: Callable[..., Any], parts: Parts, *, own_curvature: bool
    ) -> tuple[Any, Trial]:
        """Both passes over each part, displaced along its own direction; the means of what they find."""
        pool, statistics = Pool(), PooledStatistics(self.model)
        with self._by_itself() if self._each else nullcontext():
            for share, part in parts:
                self._random = RandomState(self._devices())
                with statistics.part(share):
                    _, trial = self._passes_over(partial(closure, *part))
                pool.add(trial, share)
        statistics.conclude()
        if self._world > 1 and self._each:
            pool.join_processes(self._params(), self._group)
            as_first(self.model)
        slices = [Slice(group, self.knobs(group), group["params"], []) for group in self.param_groups]
        trial = pool.trial(slices, own_curvature=own_curvature)
        self._conclude(trial)
        return trial.loss, trial

    def _evaluate_parts(self, closure: Callable[..., Any], parts: Parts) -> Any:
        """A closure for the whole batch that takes it in parts."""
        mean: dict[Tensor, Tensor] = {}
        shared_model = isinstance(self.model, DistributedDataParallel)
        total, statistics = None, PooledStatistics(self.model)
        with self._by_itself() if shared_model else nullcontext():
            for share, part in parts:
                with statistics.part(share):
                    loss = self._evaluate(partial(closure, *part))
                with torch.no_grad():
                    for p in self._params():
                        if p.grad is not None:
                            mean[p] = share * p.grad + mean.get(p, 0)
                    self._note_part(share)
                    known = isinstance(loss, Tensor)
                    total = share * loss.detach() + (0 if total is None else total) if known else loss
        statistics.conclude()
        if shared_model:
            joined, _ = mean_over_processes({p: [g] for p, g in mean.items()}, self._params(), self._group)
            mean = {p: gradient for p, (gradient,) in joined.items()}
            as_first(self.model)
        for p in self._params():
            p.grad = mean.get(p)
        self._unscaled = True
        return total

    def _note_part(self, share: float) -> None:
        """Take notes of a part's gradients, which are in `.grad`."""

    def _processes_are_joined(self) -> bool:
        """Whether other processes train the same weights; unless a model says otherwise, they do."""
        return self._world > 1 and (self.model is None or isinstance(self.model, DistributedDataParallel))

    @property
    def _group(self) -> Any:
        """The processes that train the model; None for all there are."""
        return self.model.process_group if isinstance(self.model, DistributedDataParallel) else None

    @property
    def _world(self) -> int:
        several = distributed.is_available() and distributed.is_initialized()
        return distributed.get_world_size(self._group) if several else 1

    def _by_itself(self) -> AbstractContextManager[Any]:
        """Where gradients are this process's own."""
        if self._world == 1:
            return nullcontext()
        if not isinstance(self.model, DistributedDataParallel):
            raise RuntimeError(
                f"penalty = 'each' on {self._world} processes needs model=, the DistributedDataParallel module, to "
                f"keep their gradients apart; got model = {type(self.model).__name__}"
            )
        if self.model.static_graph:
            raise RuntimeError(
                "static_graph=True of DistributedDataParallel with batches or penalty = 'each': it cannot keep "
                "gradients apart, leave it out"
            )
        return self.model.no_sync()


class _Held:
    """What a GradScaler takes for an optimiser: it looks at the gradients and makes the update, or does not."""

    def __init__(self, optimizer: PartwiseOptimizer) -> None:
        self._optimizer = optimizer
        self.trial: Trial | None = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def step(self) -> None:
        assert self.trial is not None
        trial, self.trial = self.trial, None
        self._optimizer._clipped_update(trial)


def _multiply(params: Tensors, factor: Callable[[Tensor], Tensor]) -> None:
    """Put multiples in the place of the gradients; the factor is made on the device, and not waited for."""
    if params:
        gradients = tensors.clone([p.grad for p in params if p.grad is not None])
        tensors.scale_(gradients, factor(torch.ones((), device=params[0].device)))
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient
