"""Accelerate: a loop with a second pass, for `accelerate launch` on any number of processes."""

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from gtracer import SGDTracer


def main(epochs: int = 3, shuffle: bool = True) -> float:
    """Train on made-up data; the last loss."""
    torch.manual_seed(0)
    accelerator = Accelerator()
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    x = torch.randn(256, 8)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=32, shuffle=shuffle)
    optimizer = SGDTracer(model.parameters(), lr=0.1, momentum=0.9)
    model, prepared, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for inputs, labels in loader:
            prepared.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            with optimizer.perturbed(scaler=accelerator.scaler):  # the one addition to a loop of Accelerate's
                accelerator.backward(cross_entropy(model(inputs), labels))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            prepared.step()
    accelerator.print(f"loss {loss.item():.3f}, {optimizer.stats}")
    return loss.item()


if __name__ == "__main__":
    main()
