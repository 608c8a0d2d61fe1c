"""One table of small problems, in float64, that every optimiser is tried on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


@dataclass
class Problem:
    model: nn.Module
    loss_of: Callable[[int], Tensor]  # the loss of batch number i

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def everything(self) -> list[Tensor]:
        return [t.detach().clone() for t in self.model.state_dict().values()]


class Vector(nn.Module):
    def __init__(self, start: list[float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start))


def spd(size: int, seed: int = 0) -> Tensor:
    """A positive definite matrix with off-diagonal terms."""
    root = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return root @ root.T / size + torch.eye(size, dtype=torch.float64)


def quadratic() -> Problem:
    model, A = Vector([1.0, -2.0, 0.5]).double(), spd(3)
    return Problem(model, lambda i: model.w @ A @ model.w / 2)


def rosenbrock() -> Problem:
    model = Vector([-0.5, 0.8]).double()
    return Problem(model, lambda i: ((1 - model.w[0]) ** 2 + 10 * (model.w[1] - model.w[0] ** 2) ** 2) / 10)


def classify(model: nn.Module, *shape: int) -> Problem:
    model = model.double()
    x, y = torch.randn(4, 12, *shape, dtype=torch.float64), torch.randint(3, (4, 12))
    return Problem(model, lambda i: cross_entropy(model(x[i % 4]), y[i % 4]))


def tanh_mlp() -> Problem:
    return classify(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), 5)


def conv_batch_norm() -> Problem:
    # No bias before batch norm: its gradient is rounding alone, which Adam and its like blow up to full size.
    layers = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.SiLU(), nn.Flatten(), nn.Linear(64, 3)
    return classify(nn.Sequential(*layers), 2, 4, 4)


def dropout_mlp() -> Problem:
    return classify(nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 3)), 5)


PROBLEMS = [quadratic, rosenbrock, tanh_mlp, conv_batch_norm, dropout_mlp]


def make(problem: Callable[[], Problem], seed: int = 0) -> Problem:
    """The same problem every time; the random numbers after it are fixed too."""
    torch.manual_seed(seed)
    made = problem()
    torch.manual_seed(seed + 1)
    return made


def shapes_in_noise() -> tuple[nn.Module, Tensor, Tensor]:
    """A small convolutional net with batch norm, and 400 images of four shapes; ρ = 0.003 leaves it at chance."""
    torch.manual_seed(0)
    shapes = torch.zeros(4, 1, 16, 16)
    shapes[0, :, 4:12, 4:12], shapes[1, :, 7:9, 2:14], shapes[2, :, 2:14, 7:9] = 1.0, 1.0, 1.0
    shapes[3, :, range(2, 14), range(2, 14)] = 2.0
    y = torch.arange(400) % 4
    x = shapes[y] + 0.7 * torch.randn(400, 1, 16, 16)
    layers = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
    layers += nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 4))
    return model, x, y


@torch.no_grad()
def relative_error(found: list[Tensor], true: list[Tensor]) -> float:
    distance = sum(((a - b) ** 2).sum() for a, b in zip(found, true, strict=True)) ** 0.5
    return float(distance / sum((b**2).sum() for b in true) ** 0.5)
