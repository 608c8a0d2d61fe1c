"""Lightning: automatic optimisation as it is; manual optimisation for float16 and micro-batches."""

from typing import Any

import lightning
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from gtracer import SGDTracer
from gtracer.integrations.lightning import TracerCallback, manual_step


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
        return SGDTracer(self.parameters(), lr=0.1, momentum=0.9, rho=0.003, model=self)


class Manual(Automatic):
    """Micro-batches of a batch, in any precision."""

    def __init__(self, micro_batch: int = 16) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.micro_batch = micro_batch

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        parts = list(zip(*(t.split(self.micro_batch) for t in batch), strict=True))
        self.log("train_loss", manual_step(self, self.loss_of, parts))


def main(module: type[Automatic] = Automatic, epochs: int = 2, **options: Any) -> lightning.Trainer:
    """Train on made-up data; the options are the Trainer's."""
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=32)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        callbacks=[TracerCallback(every_n_steps=1)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module(), loader)
    return trainer


if __name__ == "__main__":
    print(main().callback_metrics)
