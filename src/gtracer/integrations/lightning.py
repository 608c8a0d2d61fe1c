"""Lightning: a callback that logs what a step did and refuses what would go wrong; a step of manual optimisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:  # the package's older name
    from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment]

from gtracer.integrations.records import held
from gtracer.optim import TwoPassOptimizer
from gtracer.optim.loops import tell_loss
from gtracer.optim.parts import shared
from gtracer.scopes import second_pass, skips

LOGGED = ("loss", "trace_ratio", "penalty_ratio")


class TracerCallback(Callback):
    """Logs the loss, T and the penalty's share of the gradient every `every_n_steps` steps of the optimiser.

    With automatic optimisation Lightning passes the optimiser a closure, so TRACER works unchanged in float32 and
    bfloat16. The callback refuses three things that do not work: float16, where the closure runs before the optimiser
    can scale its loss; `accumulate_grad_batches`, where only the last micro-batch's closure arrives; and Lightning's
    clipping, which is inside the closure and clips each pass. Use `manual_step` for the first two, and the optimiser's
    `clip=Clip(norm=…)` for the last: see docs/how-to/lightning.md.

    `tracer/loss` is the loss at the weights of the step. `training_step` logs and counts in the first pass only: in the
    second one nothing is logged, and the module's numbers, lists, dictionaries and metrics (`torchmetrics`) stay as
    they are. A `training_step` that returns None skips the step, as with other optimisers.

    Args:
        every_n_steps: Steps from one log to the next. Reading the numbers waits for the device.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        self.every_n_steps = every_n_steps
        self._replaced: dict[str, Any] = {}  # methods of the module's that were set on it, while others are

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the length of an epoch, and refuse what automatic optimisation would silently get wrong."""
        for opt in _two_pass(trainer):
            if opt.steps_per_epoch is None and math.isfinite(trainer.num_training_batches):
                opt.steps_per_epoch = max(1, math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches))
        if not pl_module.automatic_optimization or not _two_pass(trainer):
            return
        if trainer.accumulate_grad_batches > 1:
            raise RuntimeError(
                f"accumulate_grad_batches = {trainer.accumulate_grad_batches} with automatic optimisation: the second "
                "pass would see the last micro-batch alone. Use manual optimisation and manual_step(self, closure, "
                "batches=[…])"
            )
        if str(trainer.precision).startswith("16"):
            raise RuntimeError(
                f"precision = {trainer.precision!r} with automatic optimisation runs the closure before the optimiser "
                "can scale its loss. Use 'bf16-mixed', or manual optimisation and manual_step(self, closure, [batch])"
            )
        if trainer.gradient_clip_val or _clips(pl_module):
            what = "configure_gradient_clipping" if _clips(pl_module) else "gradient_clip_val"
            bound = "value" if trainer.gradient_clip_algorithm == "value" else "norm"
            raise RuntimeError(
                f"{what} with automatic optimisation clips the gradient of either pass before the optimiser sees it: "
                "T, f and the penalty would be wrong. Leave it out and let the optimiser clip: "
                f"clip=gtracer.Clip({bound}={trainer.gradient_clip_val or 1.0})"
            )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep second passes out of logs and metrics from now on."""
        if stage == "fit":
            log, training_step = pl_module.log, pl_module.training_step

            @wraps(log)
            def log_once(*args: Any, **words: Any) -> None:
                if not second_pass():
                    log(*args, **words)

            @wraps(training_step)  # Lightning asks for the names of its arguments
            def step_once(*args: Any, **words: Any) -> Any:
                with held(pl_module) if second_pass() else nullcontext():
                    found = training_step(*args, **words)
                # Lightning's StochasticWeightAveraging ends with an epoch for batch norm alone.
                none = found is None or trainer.fit_loop._skip_backward
                skips.set(none and pl_module.automatic_optimization)
                return found

            self._replaced = {name: vars(pl_module).get(name) for name in ("log", "training_step")}
            pl_module.log, pl_module.training_step = log_once, step_once  # type: ignore[method-assign]

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the module's own methods."""
        for name, own in self._replaced.items():
            vars(pl_module).pop(name, None)
            if own is not None:  # torch.compile(module) has put one there
                setattr(pl_module, name, own)
        self._replaced.clear()
        skips.set(False)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Log the numbers of the last step."""
        for i, opt in enumerate(_two_pass(trainer)):
            # The optimiser's own count: trainer.global_step adds up that of all, and misses steps past Lightning.
            if opt.stats is not None and opt.steps % self.every_n_steps == 0:
                values = {name: getattr(opt.stats, name) for name in LOGGED}
                prefix = f"tracer{i}" if i else "tracer"
                pl_module.log_dict({f"{prefix}/{name}": x for name, x in values.items() if not math.isnan(x)})


def manual_step(
    module: LightningModule, closure: Callable[..., Tensor], batches: Sequence[Any], optimizer: Any = None
) -> Tensor:
    """Make one step of manual optimisation; return the plain loss at the old weights.

    It goes through Lightning's `manual_backward` and Lightning's optimiser, so loss scaling, several processes,
    `trainer.global_step` and `max_steps` work as usual.

    Args:
        module: The one whose `training_step` this is.
        closure: Computes the loss of a micro-batch and returns it; a tuple or list is unpacked.
        batches: The micro-batches, or `[batch]` if the batch is not split. Each counts by its number of examples, and
            moves batch norm's running statistics as any batch does.
        optimizer: One of `module.optimizers()`, if there are several.
    """
    optimizer = module.optimizers() if optimizer is None else optimizer
    # Lightning's wrapper inherits from the class that it wraps: but for step() it would keep a state of its own.
    opt = optimizer.optimizer
    scaler = getattr(module.trainer.precision_plugin, "scaler", None)
    parts = shared(batches)
    losses: list[Tensor] = []

    def one_pass() -> Tensor:
        opt.zero_grad()
        with held(module) if second_pass() else nullcontext():
            losses.append(torch.stack([_backward(module, share * closure(*part)) for share, part in parts]).sum())
        return losses[-1]

    def all_passes() -> None:
        tell_loss(opt, one_pass())
        for _ in range(opt.second_pass_due * (1 + opt.is_central)):
            with opt.perturbed(scaler=scaler, loss=losses[0]):
                one_pass()

    # With a scaler Lightning calls the closure itself, once; without, the optimiser does, once for every pass.
    optimizer.step(one_pass if scaler is None else all_passes)
    return losses[0]


def _backward(module: LightningModule, loss: Tensor) -> Tensor:
    module.manual_backward(loss)
    return loss.detach()


def _clips(module: LightningModule) -> bool:
    return type(module).configure_gradient_clipping is not LightningModule.configure_gradient_clipping


def _two_pass(trainer: Trainer) -> list[TwoPassOptimizer]:
    return [opt for opt in trainer.optimizers if isinstance(opt, TwoPassOptimizer)]


__all__ = ["TracerCallback", "manual_step"]
