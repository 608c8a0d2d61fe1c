"""scikit-learn's handwritten digits with wrong labels: a memorisation problem that needs no download."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

CLASSES = 10


@dataclass(frozen=True)
class Digits:
    """A split. `y` are the labels to train on, of which a share is wrong; `y_clean` are the true ones."""

    x: Tensor
    y: Tensor
    y_clean: Tensor
    x_test: Tensor
    y_test: Tensor


def load(noise: float, seed: int) -> Digits:
    """A seeded split (three quarters for training) with a share `noise` of the training labels made wrong."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32) / 16
    y = torch.tensor(data.target, dtype=torch.int64)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    train, test = order[: len(x) * 3 // 4], order[len(x) * 3 // 4 :]
    return Digits(x[train], mislabelled(y[train], noise, generator), y[train], x[test], y[test])


def mislabelled(y: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Replace a share of the labels by a different class, drawn evenly."""
    wrong = torch.randperm(len(y), generator=generator)[: round(share * len(y))]
    shift = torch.randint(1, CLASSES, (len(wrong),), generator=generator)
    noisy = y.clone()
    noisy[wrong] = (y[wrong] + shift) % CLASSES
    return noisy


def batch_norm_mlp(width: int = 256) -> nn.Sequential:
    """64-256-256-10 with batch norm: enough to learn every wrong label by heart."""
    return nn.Sequential(
        nn.Linear(64, width, bias=False),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, width, bias=False),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, CLASSES),
    )
