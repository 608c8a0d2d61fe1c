"""Networks by name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from gtracer.lab import data, files
from gtracer.lab.config import Config
from gtracer.lab.data.batches import Examples
from gtracer.lab.data.streams import Items
from gtracer.lab.data.task import Found, Split, Task
from gtracer.lab.errors import LabError, unknown
from gtracer.lab.models import encoders, mlp, own, resnet
from gtracer.lab.models.built import Architecture, Built

__all__ = ["Architecture", "Built", "build", "network", "rebuilt"]


# Where no name is given, for each kind of data.
DEFAULTS = {"vector": "mlp-bn", "table": "mlp-bn", "image": "resnet20", "text": "bert-base-uncased"}


def build(config: Config, task: Task) -> Built:
    """The configuration's model for this task; without a name, one that suits it."""
    name = config.model or DEFAULTS[task.kind]
    if task.kind == "text":
        if config.init != "own":
            raise LabError(f"init = {config.init!r} is for networks built here: a text model brings its own weights")
        beside = data.folder(config) / name  # a copy beside the data goes by the same name on every machine
        local = (beside / "config.json").is_file()
        found = encoders.build(str(beside) if local else name, task.outputs, config.max_length)
        return replace(found, architecture=replace(found.architecture, name=name))
    if (files.expanded(name) / "config.json").is_file():
        raise LabError(
            f"model {name!r} is an encoder of texts, task {config.task!r} holds none; columns of texts are named with "
            "--text-columns"
        )
    examples = _examples(task.train)
    shape = tuple(examples.shape[1:])
    if not shape or 0 in shape:
        raise LabError(f"the task's examples have shape {shape}: there is nothing to learn from")
    if not own.is_named(name) and not examples.dtype.is_floating_point:
        raise LabError(f"model {name!r} wants real numbers, the task's examples are of {examples.dtype}")
    architecture = Architecture(task.kind, name, task.outputs, shape, config.width, config.depth)
    built = made(architecture, pretrained=config.pretrained)
    if config.init == "torch":
        built.model.apply(resnet.reset_convolution)
    if config.weights:
        built.notes.extend(own.take_weights(built.model, files.expanded(config.weights)))
    return built


def was_trained_before(config: Config) -> bool:
    """Whether a model is fine-tuned that was trained before, on other data."""
    return data.is_text(config.task, config.text_columns) or config.pretrained or config.weights is not None


def rebuilt(architecture: Architecture, folder: Path) -> Built:
    """A model that was built before, with any weights; what else it takes, `Built.save` has left in the folder."""
    return encoders.rebuilt(architecture, folder) if architecture.kind == "text" else made(architecture)


def made(of: Architecture, *, pretrained: bool = False) -> Built:
    """A network of ours, of timm's, or of the user's."""
    if own.is_named(of.name):
        model = own.made(of, pretrained=pretrained)
    else:
        model = network(of.name, of.shape, of.outputs, of.width, of.depth)
    return Built(model, lambda split, device: Examples(_examples(split), device), of)


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


def _examples(split: Split | Found) -> Tensor | Items:
    assert not isinstance(split.inputs, list)
    return split.inputs
