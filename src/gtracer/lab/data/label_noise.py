"""Label noise."""

from __future__ import annotations

import torch
from torch import Tensor


def mislabelled(labels: Tensor, share: float, classes: int, seed: int) -> Tensor:
    """Replace a seeded share of the labels by a *different* class, drawn evenly.

    >>> labels = torch.zeros(4, dtype=torch.int64)
    >>> mislabelled(labels, 0.5, classes=2, seed=0).sum()
    tensor(2)
    """
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    shift = torch.randint(1, classes, (len(wrong),), generator=generator) if len(wrong) else wrong
    noisy = labels.clone()
    noisy[wrong] = (labels[wrong] + shift) % classes
    return noisy
