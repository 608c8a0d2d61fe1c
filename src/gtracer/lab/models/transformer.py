"""A small transformer to measure and test with, that can be differentiated twice."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

CLASSES = 100


class Attention(nn.Module):
    """Self-attention of linear layers; `twice` by the back end that can be differentiated twice."""

    def __init__(self, width: int, heads: int, twice: bool) -> None:
        super().__init__()
        self.heads, self.mixed, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixed(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        with sdpa_kernel(SDPBackend.MATH) if self.twice else nullcontext():
            mixed = functional.scaled_dot_product_attention(q, k, v)
        found: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


class Transformer(nn.Module):
    """A small classifier of token sequences: layer norm first, learnt positions."""

    def __init__(
        self,
        words: int = 1000,
        length: int = 32,
        width: int = 128,
        layers: int = 2,
        *,
        heads: int = 4,
        twice: bool = True,
    ) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.attentions = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), Attention(width, heads, twice)) for _ in range(layers)
        )
        self.wides = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.out = nn.Linear(width, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.positions(torch.arange(words.shape[1], device=words.device)[None])
        for attention, wide in zip(self.attentions, self.wides, strict=True):
            x = x + attention(x)
            x = x + wide(x)
        found: Tensor = self.out(x.mean(1))
        return found
