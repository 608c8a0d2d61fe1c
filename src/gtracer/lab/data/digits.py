"""scikit-learn's handwritten digits: 1,797 images of 8 × 8, embedded in the package."""

from __future__ import annotations

import torch

from gtracer.lab.data.pictures import Pictures
from gtracer.lab.data.task import Split, Task


def load(seed: int) -> Task:
    """A seeded split, three quarters for training."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32) / 16
    y = torch.tensor(data.target, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, test = order[: len(x) * 3 // 4], order[len(x) * 3 // 4 :]
    pictures = Pictures((8, 8), (0.0,), (255.0,), flat=True)
    return Task("vector", 10, Split.clean(x[train], y[train]), Split.clean(x[test], y[test]), preprocessing=pictures)
