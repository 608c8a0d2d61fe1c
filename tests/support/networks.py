"""Small networks without batch norm, in float64, one for each kind of layer that has gradients per example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss


class Unfinished(nn.Linear):
    """A model with a bug that does not show on a few examples."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 16:
            raise TypeError("this model is not finished")
        return super().forward(x)


def unfinished(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Unfinished(shape[0], classes)


@dataclass
class Case:
    model: nn.Module
    x: Tensor
    y: Tensor
    loss: Callable = cross_entropy

    def loss_of(self, x: Tensor | None = None, y: Tensor | None = None) -> Tensor:
        return self.loss(self.model(self.x if x is None else x), self.y if y is None else y)

    def example(self, i: int) -> Tensor:
        return self.loss_of(self.x[i : i + 1], self.y[i : i + 1])

    @property
    def params(self) -> list[Tensor]:
        return list(self.model.parameters())


def image_case(*layers: nn.Module, channels: int = 2, size: int = 6) -> Case:
    return Case(nn.Sequential(*layers).double(), torch.randn(5, channels, size, size).double(), torch.randint(3, (5,)))


def mlp() -> Case:
    # In place: the layer's own output is gone when the gradient comes back.
    model = nn.Sequential(nn.Linear(4, 6), nn.Softplus(), nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))
    return Case(model.double(), torch.randn(5, 4).double(), torch.randint(3, (5,)))


def regression() -> Case:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    return Case(model.double(), torch.randn(5, 4).double(), torch.randn(5, 2).double(), mse_loss)


def conv() -> Case:
    return image_case(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2),
        nn.Tanh(),
        nn.Conv2d(6, 3, 1, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def group_norm() -> Case:
    return image_case(
        nn.Conv2d(2, 4, 3, bias=False),
        nn.GroupNorm(2, 4),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


class Encoder(nn.Module):
    """Words and positions (looked up once for all, as in BERT), a linear layer along the sequence, layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(7, 4, padding_idx=0), nn.Embedding(5, 4)
        self.norm, self.inner, self.out = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.positions(torch.arange(words.shape[1])[None])
        return self.out(torch.tanh(self.inner(self.norm(x))).mean(1))


def encoder() -> Case:
    # Words repeat within an example, so that their gradients add up before they are squared.
    return Case(Encoder().double(), torch.randint(0, 4, (6, 5)), torch.randint(3, (6,)))


class Attention(nn.Module):
    """No fast path: torch's attention keeps parameters of its own (and gives a pair)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(x, x, x)[0].mean(1))


def attention() -> Case:
    return Case(Attention().double(), torch.randn(5, 3, 4).double(), torch.randint(3, (5,)))


class OwnParameter(nn.Module):
    """A parameter on the model itself, so the whole model is one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.rand(4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(x * self.scale))


def own_parameter() -> Case:
    return Case(OwnParameter().double(), torch.randn(5, 4).double(), torch.randint(3, (5,)))


def conv1d() -> Case:
    layers = nn.Conv1d(2, 3, 3), nn.PReLU(), nn.Flatten(), nn.Linear(12, 3)
    return Case(nn.Sequential(*layers).double(), torch.randn(5, 2, 6).double(), torch.randint(3, (5,)))


CASES = [mlp, regression, conv, group_norm, encoder, attention, own_parameter, conv1d]


def make(case: Callable[[], Case]) -> Case:
    """The same case every time."""
    torch.manual_seed(0)
    return case()
