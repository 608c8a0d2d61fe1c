"""Hugging Face's Trainer with a second pass: `TracerTrainer`, or `TracerMixin` for a Trainer of one's own."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from transformers import Trainer

from gtracer.optim import AdamWTracer
from gtracer.optim.partwise import PartwiseOptimizer


class TracerMixin:
    """Makes a Trainer run its micro-batches a second time, at displaced weights, before each update.

    Put it before the Trainer: `class Mine(TracerMixin, Seq2SeqTrainer): …`. Accumulation, mixed precision, clipping
    (`max_grad_norm`, of the total gradient), checkpoints and several processes are the Trainer's own. The penalty is
    that of the whole batch: of all micro-batches and processes. T and ‖ρ∇T‖/‖∇L‖ of the last step come with every
    loss that is logged, as `trace_ratio` and `penalty_ratio`.

    Args:
        *args: The Trainer's.
        tracer: Options of `AdamWTracer`, such as `{"rho": 1e-3}`; its learning rate, betas, eps and weight decay are
            those of the TrainingArguments. For another optimiser of gtracer pass `optimizers` or
            `optimizer_cls_and_kwargs`.
        **kwargs: The Trainer's.
    """

    # What a Trainer has.
    args: Any
    accelerator: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any

    def __init__(self, *args: Any, tracer: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        own = self.optimizer is not None or self.optimizer_cls_and_kwargs is not None
        if own and tracer is not None:
            raise ValueError(f"tracer = {tracer!r} beside an optimizer of your own, which has its options already")
        if not own:
            asked = self.args
            betas = (asked.adam_beta1, asked.adam_beta2)
            options = {"lr": asked.learning_rate, "betas": betas, "eps": asked.adam_epsilon, **(tracer or {})}
            self.optimizer_cls_and_kwargs = (AdamWTracer, options)
        self._window: list[tuple[dict[str, Any], Any]] = []  # micro-batches of the step under way

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """One micro-batch; behind the last of a step, all of them again at displaced weights."""
        opt = self._two_pass_optimizer()
        if not self._window:
            opt.zero_grad()  # also where random numbers begin
        self._window.append((inputs, num_items_in_batch))
        loss = self._plain_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            try:
                if opt.second_pass_due:
                    self._second_pass(model, opt)
            finally:
                self._window.clear()
        return loss

    def _second_pass(self, model: nn.Module, opt: PartwiseOptimizer) -> None:
        for _ in range(2 if getattr(opt, "difference", "") == "central" else 1):
            with opt.perturbed(scaler=self.accelerator.scaler):
                for i, (inputs, count) in enumerate(self._window):
                    last = i == len(self._window) - 1
                    with nullcontext() if last else self.accelerator.no_sync(model):
                        self._plain_step(model, inputs, count)

    def _plain_step(self, model: nn.Module, inputs: dict[str, Any], count: Any) -> Tensor:
        found: Tensor = super().training_step(model, inputs, count)  # type: ignore[misc]
        return found

    def _two_pass_optimizer(self) -> PartwiseOptimizer:
        opt = getattr(self.optimizer, "optimizer", self.optimizer)
        if not isinstance(opt, PartwiseOptimizer):
            raise TypeError(
                f"TracerTrainer needs an optimizer of gtracer, got {type(opt).__name__}: leave it out, or pass "
                "optimizers=(AdamWTracer(model.parameters()), None)"
            )
        return opt

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the Trainer does, with T and the penalty's share beside the loss."""
        opt = getattr(self.optimizer, "optimizer", self.optimizer)
        stats = getattr(opt, "stats", None)
        if "loss" in logs and stats is not None:
            logs |= {"trace_ratio": stats.trace_ratio, "penalty_ratio": stats.penalty_ratio}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class TracerTrainer(TracerMixin, Trainer):
    """`transformers.Trainer` with AdamW-TRACER.

    trainer = TracerTrainer(model, args, train_dataset=data, tracer={"rho": 1e-3})
    """


__all__ = ["TracerMixin", "TracerTrainer"]
