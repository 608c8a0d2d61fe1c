"""Multilayer perceptrons."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

# From a number of features to the layer that normalises them; none in a plain one.
NORMS: dict[str, Callable[[int], nn.Module] | None] = {
    "mlp": None,
    "mlp-bn": nn.BatchNorm1d,
    "mlp-ln": nn.LayerNorm,
}


def mlp(
    shape: tuple[int, ...], width: int, depth: int, classes: int, norm: Callable[[int], nn.Module] | None
) -> nn.Sequential:
    """Fully connected layers; with batch norm they memorise any labels."""
    layers: list[nn.Module] = [nn.Flatten()]
    size = int(torch.Size(shape).numel())
    for _ in range(depth):
        layers.append(nn.Linear(size, width, bias=norm is None))
        layers += [nn.ReLU()] if norm is None else [norm(width), nn.ReLU()]
        size = width
    return nn.Sequential(*layers, nn.Linear(size, classes))
