"""Lightning: a callback that logs what a step did, and says where automatic optimisation would go wrong."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:  # the package's older name
    from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment]

from gtracer.optim.partwise import PartwiseOptimizer


class TracerCallback(Callback):
    """Logs T and the penalty's share of the gradient every `every_n_steps` steps.

    With automatic optimisation Lightning hands the optimiser a closure, so TRACER works as it is in float32 and
    bfloat16. Two things it cannot do so, and the callback refuses them: float16, where the closure is run before the
    optimiser can scale it, and `accumulate_grad_batches`, where only the last micro-batch's closure arrives. For these
    use manual optimisation: see docs/training.md.

    Args:
        every_n_steps: Reading the numbers waits for the device.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        self.every_n_steps = every_n_steps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what automatic optimisation would get wrong without a word."""
        if not pl_module.automatic_optimization or not _two_pass(trainer):
            return
        if trainer.accumulate_grad_batches > 1:
            raise RuntimeError(
                f"accumulate_grad_batches = {trainer.accumulate_grad_batches} with automatic optimisation: the second "
                "pass would see the last micro-batch alone. Use manual optimisation and opt.step(closure, batches=[…])"
            )
        if str(trainer.precision).startswith("16"):
            raise RuntimeError(
                f"precision = {trainer.precision!r} with automatic optimisation runs the closure before the optimiser "
                "can scale its loss. Use 'bf16-mixed', or manual optimisation and opt.step(closure, scaler=scaler)"
            )

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Hand the last step's numbers to the module's log."""
        if trainer.global_step % self.every_n_steps:
            return
        for i, opt in enumerate(_two_pass(trainer)):
            if opt.stats is not None:
                name = f"tracer{i}" if i else "tracer"
                pl_module.log(f"{name}/trace_ratio", opt.stats.trace_ratio)
                pl_module.log(f"{name}/penalty_ratio", opt.stats.penalty_ratio)


def _two_pass(trainer: Trainer) -> list[PartwiseOptimizer]:
    return [opt for opt in trainer.optimizers if isinstance(opt, PartwiseOptimizer)]


__all__ = ["TracerCallback"]
