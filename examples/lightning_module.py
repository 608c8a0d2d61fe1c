"""Lightning: automatic optimisation as it is; manual optimisation for float16 and micro-batches."""

import lightning
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from gtracer import SGDTracer
from gtracer.integrations.lightning import TracerCallback


class Automatic(lightning.LightningModule):
    """Nothing but the optimiser is TRACER's."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def loss_of(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.net(x), y)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.loss_of(*batch)

    def configure_optimizers(self) -> SGDTracer:
        return SGDTracer(self.parameters(), lr=0.1, momentum=0.9, model=self)


class Manual(Automatic):
    """Micro-batches of a batch, and in float16 the precision plugin's scaler."""

    def __init__(self, micro_batch: int = 16) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.micro_batch = micro_batch

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)

        def closure(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with self.trainer.precision_plugin.forward_context():
                return self.loss_of(x, y)

        parts = list(zip(*(t.split(self.micro_batch) for t in batch), strict=True))
        optimizer.step(closure, batches=parts, scaler=scaler)
        if scaler is not None:
            scaler.update()


def main(module: type[Automatic] = Automatic, precision: str = "32-true", epochs: int = 2) -> lightning.Trainer:
    """Train on made-up data."""
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=32)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        precision=precision,
        callbacks=[TracerCallback(every_n_steps=1)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module(), loader)
    return trainer


if __name__ == "__main__":
    print(main().callback_metrics)
