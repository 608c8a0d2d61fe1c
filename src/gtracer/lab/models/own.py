"""Models from elsewhere: timm's by name, a function's of one's own; and weights that were trained before."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gtracer.lab.data import TIMM, python
from gtracer.lab.errors import LabError, one_line, raised, shown
from gtracer.lab.models import hub
from gtracer.lab.models.built import Architecture

PREFIXES = ("module.", "_orig_mod.", "module.")  # of a model that DataParallel or torch.compile has wrapped, or both
WRAPPED = ("state_dict", "model")  # where others' checkpoints keep the weights


def is_named(name: str) -> bool:
    """Whether it is timm/NAME or MODULE:FUNCTION."""
    return name.startswith(TIMM) or python.is_named(name)


def made(of: Architecture, *, pretrained: bool = False) -> nn.Module:
    """That model, with a head for these classes; refused where it does not fit the data."""
    model = _timm(of, pretrained) if of.name.startswith(TIMM) else _by_function(of)
    _check(model, of)
    return model


def _timm(of: Architecture, pretrained: bool) -> nn.Module:
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # also where torchvision, which it needs, is another torch's
        raise LabError(
            f"model {of.name!r} needs timm, and that torchvision ({one_line(error)}): pip install 'gtracer-optim[timm]'"
        ) from error
    if len(of.shape) != 3:
        raise LabError(f"model {of.name!r} wants images, the task's examples have shape {of.shape}")
    name = of.name.removeprefix(TIMM)
    known = timm.get_pretrained_cfg(name)
    sized = {"img_size": of.shape[1:]} if known is not None and known.fixed_input_size else {}
    try:
        with hub.asked() if pretrained else nullcontext():
            model: nn.Module = timm.create_model(
                name, pretrained=pretrained, num_classes=of.outputs, in_chans=of.shape[0], **sized
            )
    except Exception as error:  # of a name, of the network, of the hub: of any class
        hint = "; offline: --weights FILE instead of --pretrained" if pretrained and hub.is_offline() else ""
        raise LabError(f"model {of.name!r} is not available: {one_line(error)}{hint}") from error
    return model


def _by_function(of: Architecture) -> nn.Module:
    model = python.called(of.name, shape=of.shape, classes=of.outputs)
    if not isinstance(model, nn.Module):
        raise LabError(f"{of.name} must give a torch.nn.Module, got {shown(model)}")
    return model


@torch.no_grad()
def _check(model: nn.Module, of: Architecture) -> None:
    """With two examples of nothing, before anything is trained on."""
    was = model.training
    try:
        outputs = model.eval()(torch.zeros(2, *of.shape))
    except Exception as error:  # the user's own, or timm's assertions
        raise LabError(f"model {of.name!r} does not take examples of shape {of.shape}: {raised(error)}") from error
    finally:
        model.train(was)
    found = (
        f"outputs of shape {tuple(outputs.shape[1:])}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
    )
    if not isinstance(outputs, Tensor) or outputs.shape != (2, of.outputs):
        raise LabError(f"model {of.name!r} gives {found}, not one for each of {of.outputs} classes")


def take_weights(model: nn.Module, path: Path) -> list[str]:
    """Begin with a file's, safetensors or torch's. The head, the last layer, may be another task's: that is said."""
    given, own = _weights(path), model.state_dict()
    lost = [name for name in own if name not in given or given[name].shape != own[name].shape]
    head = list(own)[-1].rpartition(".")[0]
    if strange := next((name for name in lost if name.rpartition(".")[0] != head), None):
        theirs = f"has it as {tuple(given[strange].shape)}" if strange in given else "has none of that name"
        ours = tuple(own[strange].shape)
        raise LabError(f"{path} is of another model: {strange} of shape {ours} is wanted, the file {theirs}")
    if further := _further(model, given, head):
        raise LabError(f"{path} is of another model: it has {further}, for which this one has no place")
    model.load_state_dict({name: given[name] for name in own if name not in lost}, strict=False)
    if not lost:
        return []
    there = f"of shape {tuple(given[lost[0]].shape)}" if lost[0] in given else "missing"
    return [f"{path}: {lost[0]} is {there}, another task's head: that for this one starts anew"]


def _further(model: nn.Module, given: dict[str, Tensor], head: str) -> str | None:
    """A weight of a layer that the model would have if it were deeper, or wider; heads of other kinds may be there."""
    modules = {name for name, _ in model.named_modules()}
    parts = {name.partition(".")[0] for name in modules} - {head.partition(".")[0]}
    for name in given:
        layer = name.rpartition(".")[0]
        part = layer.partition(".")[0]
        if layer not in modules and (part in parts or part.isdigit()):
            return name
    return None


def _weights(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix.lower() == ".safetensors":
            return load_file(path)
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise LabError(f"cannot read the weights {path}: {error.strerror or one_line(error)}") from error
    except Exception as error:  # whatever torch's reader of pickles comes across
        reason = "it is damaged, or neither a .safetensors file nor a state_dict that torch.save wrote"
        raise LabError(f"cannot read the weights {path}: {reason}") from error
    found = next((found[name] for name in WRAPPED if isinstance(found, dict) and name in found), found)
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise LabError(f"{path} holds no weights by their names, but {shown(type(found).__name__)}")
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in found):
            found = {name.removeprefix(prefix): value for name, value in found.items()}
    weights: dict[str, Tensor] = found
    return weights
