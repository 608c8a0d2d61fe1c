"""Residual networks of CIFAR form, plain and wide."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

# From a number of channels to the layer that normalises them.
Norm = Callable[[int], nn.Module]

NAMES = ("resnet20", "resnet32", "resnet56", "resnet20-gn", "wrn-28-2", "wrn-28-10")


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def reset_convolution(layer: nn.Module) -> None:
    """Before batch norm only the direction of a filter counts, and the shorter it is the faster that turns."""
    if isinstance(layer, nn.Conv2d):
        layer.reset_parameters()


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(8, channels)


class Block(nn.Module):
    """He et al.'s basic block; where the size changes, the shortcut is subsampled and padded (their option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv(inputs, outputs, stride), norm(outputs)
        self.conv2, self.norm2 = conv(outputs, outputs), norm(outputs)
        self.stride, self.padding = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        return functional.relu(out + functional.pad(shortcut, (0, 0, 0, 0, 0, self.padding)))


class ResNet(nn.Sequential):
    """ResNet of CIFAR form: three stages of 16, 32 and 64 channels; depth 6n + 2."""

    def __init__(self, depth: int, channels: int, classes: int, norm: Norm = nn.BatchNorm2d) -> None:
        layers: list[nn.Module] = [conv(channels, 16), norm(16), nn.ReLU()]
        size = 16
        for outputs, stride in ((16, 1), (32, 2), (64, 2)):
            for i in range((depth - 2) // 6):
                layers.append(Block(size, outputs, stride if i == 0 else 1, norm))
                size = outputs
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(size, classes))


class PreactivatedBlock(nn.Module):
    """Zagoruyko and Komodakis's block: batch norm and ReLU come before each convolution."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), conv(inputs, outputs, stride)
        self.bn2, self.conv2 = nn.BatchNorm2d(outputs), conv(outputs, outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = None if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        ready = functional.relu(self.bn1(x))
        out: Tensor = self.conv2(functional.relu(self.bn2(self.conv1(ready))))
        return out + (x if self.shortcut is None else self.shortcut(ready))


class WideResNet(nn.Sequential):
    """WRN-depth-k: three stages of 16k, 32k and 64k channels; depth 6n + 4."""

    def __init__(self, depth: int, k: int, channels: int, classes: int) -> None:
        layers: list[nn.Module] = [conv(channels, 16)]
        size = 16
        for outputs, stride in ((16 * k, 1), (32 * k, 2), (64 * k, 2)):
            for i in range((depth - 4) // 6):
                layers.append(PreactivatedBlock(size, outputs, stride if i == 0 else 1))
                size = outputs
        head = (nn.BatchNorm2d(size), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(size, classes))
        super().__init__(*layers, *head)
