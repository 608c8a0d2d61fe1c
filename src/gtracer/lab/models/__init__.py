"""Networks, and how a task's examples are handed to them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from gtracer.lab import data
from gtracer.lab.config import Config
from gtracer.lab.data.task import Split, Task
from gtracer.lab.errors import LabError, unknown


class Batch(Protocol):
    """From rows of a split to what the model takes. Texts have a width, which images have not."""

    def __call__(self, rows: Tensor, width: int | None = None) -> Any: ...

    def width(self, rows: Tensor) -> int | None:
        """How wide a batch of these rows is."""

    def sorted(self, rows: Tensor) -> Tensor:
        """These rows in the order that is cheapest to go through."""

    def grouped(self, rows: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """These rows, which come in random order, in batches that are cheap."""


# From a number of channels to the layer that normalises them.
Norm = Callable[[int], nn.Module]

MLP_NORMS: dict[str, Norm | None] = {"mlp": None, "mlp-bn": nn.BatchNorm1d, "mlp-ln": nn.LayerNorm}
RESNETS = ("resnet20", "resnet32", "resnet56", "resnet20-gn", "wrn-28-2", "wrn-28-10")


@dataclass(frozen=True)
class Built:
    """A model, how to feed it, and what it is called."""

    model: nn.Module
    batches: Callable[[Split, torch.device], Batch]
    notes: list[str] = field(default_factory=list)  # what the user should know about them
    name: str = ""


def build(config: Config, task: Task) -> Built:
    """The configuration's model for this task; without a name, one that suits it."""
    name = config.model or {"vector": "mlp-bn", "image": "resnet20", "text": ""}[task.kind]
    if task.kind == "text":
        from gtracer.lab.models import encoders

        if config.init != "own":
            raise LabError(f"init = {config.init!r} is for networks built here: a text model brings its own weights")
        beside = data.folder(config) / name  # a copy beside the data goes by the same name on every machine
        local = bool(name) and (beside / "config.json").is_file()
        return replace(encoders.build(str(beside) if local else name, task.classes, config.max_length), name=name)
    shape = tuple(_tensor(task.train).shape[1:])
    model = network(name, shape, task.classes, config.width, config.depth)
    if config.init == "torch":
        model.apply(_reset_convolution)
    return Built(model, lambda split, device: Examples(_tensor(split).to(device)), name=name)


def network(name: str, shape: tuple[int, ...], classes: int, width: int = 256, depth: int = 2) -> nn.Module:
    """A network by its name, for inputs of this shape.

    >>> sum(p.numel() for p in network("resnet20", (3, 32, 32), 100).parameters())
    275572
    """
    if name in MLP_NORMS:
        return mlp(shape, width, depth, classes, MLP_NORMS[name])
    found = re.fullmatch(r"resnet(\d+)(-gn)?|wrn-(\d+)-([1-9]\d*)", name)
    layers = int(found[1] or found[3]) if found else 0
    plain = bool(found and found[1]) and layers > 2 and layers % 6 == 2
    wide = bool(found and found[3]) and layers > 4 and layers % 6 == 4
    if not found or not (plain or wide):
        raise unknown("model", name, [*MLP_NORMS, *RESNETS])
    if len(shape) != 3:
        choices = ", ".join(MLP_NORMS)
        raise LabError(f"model {name!r} wants images, the task's examples have shape {shape}: use one of {choices}")
    if wide:
        return WideResNet(layers, int(found[4]), shape[0], classes)
    return ResNet(layers, shape[0], classes, group_norm if found[2] else nn.BatchNorm2d)


def mlp(shape: tuple[int, ...], width: int, depth: int, classes: int, norm: Norm | None) -> nn.Sequential:
    """Fully connected layers; with batch norm they memorise any labels."""
    layers: list[nn.Module] = [nn.Flatten()]
    size = int(torch.Size(shape).numel())
    for _ in range(depth):
        layers.append(nn.Linear(size, width, bias=norm is None))
        layers += [nn.ReLU()] if norm is None else [norm(width), nn.ReLU()]
        size = width
    return nn.Sequential(*layers, nn.Linear(size, classes))


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def _reset_convolution(layer: nn.Module) -> None:
    """Behind batch norm only the direction of a filter counts, and the shorter it is the faster that turns."""
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


def _tensor(split: Split) -> Tensor:
    assert isinstance(split.inputs, Tensor)
    return split.inputs


class Examples:
    """Examples of one shape: any batch of them is as good as another."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __call__(self, rows: Tensor, width: int | None = None) -> Tensor:
        return self.x[rows]

    def width(self, rows: Tensor) -> None:
        return None

    def sorted(self, rows: Tensor) -> Tensor:
        return rows

    def grouped(self, rows: Tensor, size: int, generator: torch.Generator) -> Tensor:
        return rows


def cropped_and_flipped(x: Tensor, generator: torch.Generator | None = None, padding: int = 4) -> Tensor:
    """Each image shifted by up to `padding` pixels and, half of them, mirrored."""
    n, _, height, width = x.shape
    padded = functional.pad(x, (padding,) * 4)
    down, right = torch.randint(0, 2 * padding + 1, (2, n, 1), generator=generator, device=x.device)
    columns = right + torch.arange(width, device=x.device)
    mirrored = torch.rand(n, 1, generator=generator, device=x.device) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    rows = down + torch.arange(height, device=x.device)
    image = torch.arange(n, device=x.device)[:, None, None]
    return padded[image, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
