"""Networks by name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from gtracer.lab import data
from gtracer.lab.config import Config
from gtracer.lab.data.batches import Examples
from gtracer.lab.data.task import Found, Split, Task
from gtracer.lab.errors import LabError, unknown
from gtracer.lab.models import encoders, mlp, resnet
from gtracer.lab.models.built import Architecture, Built

__all__ = ["Architecture", "Built", "build", "network", "rebuilt"]


def build(config: Config, task: Task) -> Built:
    """The configuration's model for this task; without a name, one that suits it."""
    name = config.model or {"vector": "mlp-bn", "image": "resnet20", "text": ""}[task.kind]
    if task.kind == "text":
        if config.init != "own":
            raise LabError(f"init = {config.init!r} is for networks built here: a text model brings its own weights")
        beside = data.folder(config) / name  # a copy beside the data goes by the same name on every machine
        local = bool(name) and (beside / "config.json").is_file()
        found = encoders.build(str(beside) if local else name, task.classes, config.max_length)
        return replace(found, architecture=replace(found.architecture, name=name))
    shape = tuple(_tensor(task.train).shape[1:])
    built = made(Architecture(task.kind, name, task.classes, shape, config.width, config.depth))
    if config.init == "torch":
        built.model.apply(resnet.reset_convolution)
    return built


def rebuilt(architecture: Architecture, folder: Path) -> Built:
    """A model that was built before, with any weights; what else it takes, `Built.save` has left in the folder."""
    return encoders.rebuilt(architecture, folder) if architecture.kind == "text" else made(architecture)


def made(architecture: Architecture) -> Built:
    """A network of ours."""
    of = architecture
    model = network(of.name, of.shape, of.outputs, of.width, of.depth)
    return Built(model, lambda split, device: Examples(_tensor(split).to(device)), of)


def network(name: str, shape: tuple[int, ...], classes: int, width: int = 256, depth: int = 2) -> nn.Module:
    """A network by its name, for inputs of this shape.

    >>> sum(p.numel() for p in network("resnet20", (3, 32, 32), 100).parameters())
    275572
    """
    if name in mlp.NORMS:
        return mlp.mlp(shape, width, depth, classes, mlp.NORMS[name])
    found = re.fullmatch(r"resnet(\d+)(-gn)?|wrn-(\d+)-([1-9]\d*)", name)
    layers = int(found[1] or found[3]) if found else 0
    plain = bool(found and found[1]) and layers > 2 and layers % 6 == 2
    wide = bool(found and found[3]) and layers > 4 and layers % 6 == 4
    if not found or not (plain or wide):
        raise unknown("model", name, [*mlp.NORMS, *resnet.NAMES])
    if len(shape) != 3:
        choices = ", ".join(mlp.NORMS)
        raise LabError(f"model {name!r} wants images, the task's examples have shape {shape}: use one of {choices}")
    if wide:
        return resnet.WideResNet(layers, int(found[4]), shape[0], classes)
    return resnet.ResNet(layers, shape[0], classes, resnet.group_norm if found[2] else nn.BatchNorm2d)


def _tensor(split: Split | Found) -> Tensor:
    assert isinstance(split.inputs, Tensor)
    return split.inputs
