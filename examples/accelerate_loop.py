"""Accelerate: a loop with a second pass, for `accelerate launch` on any number of processes."""

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from gtracer import SGDTracer


def main(epochs: int = 3, shuffle: bool = True, accumulate: int = 1, precision: str = "no") -> torch.nn.Module:
    """Train on made-up data."""
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=accumulate, mixed_precision=precision)
    layers = torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 2)
    model = torch.nn.Sequential(*layers)
    x = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=32, shuffle=shuffle)
    model = accelerator.prepare(model)  # first, so that the optimiser is given the module as it is run
    optimizer = SGDTracer(model.parameters(), lr=0.1, momentum=0.9, rho=0.003, model=model)
    prepared, loader = accelerator.prepare(optimizer, loader)

    def backward(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        return loss

    window: list[list[torch.Tensor]] = []  # the micro-batches of the step under way
    for _ in range(epochs):
        for batch in loader:
            if not window:
                optimizer.zero_grad()  # also where random numbers begin
            window.append(batch)
            with accelerator.accumulate(model):
                loss = backward(*batch)
                if accelerator.sync_gradients:
                    with optimizer.perturbed(scaler=accelerator.scaler):  # the addition to a loop of Accelerate's
                        for again in window:
                            backward(*again)
                    window.clear()
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                prepared.step()
    accelerator.print(f"loss {loss.item():.3f}, {optimizer.stats}")
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    main()
