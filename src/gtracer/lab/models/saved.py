"""A model in a folder: its weights as safetensors, and `model.json`, which says how to make it again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from typing_extensions import TypedDict

from gtracer.lab import data, files, models
from gtracer.lab.config import Config
from gtracer.lab.data.labels import Target
from gtracer.lab.data.task import Preprocessing, Task
from gtracer.lab.errors import LabError, one_line, shown
from gtracer.lab.models.built import Architecture, Built
from gtracer.lab.schema import STRICT, Count, Name, Units, Words, problems

FORMAT = 1
# The best epoch's by held-out data, or the last's where nothing is held out; the last's beside the best's.
WEIGHTS, LAST = "model.safetensors", "last.safetensors"
DESCRIPTION = "model.json"
PARTS = "model"  # folder of what else it takes, such as a tokenizer


class Network(TypedDict):
    """An `Architecture`, as the file has it."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    kind: Name
    name: str
    outputs: Count
    shape: list[Count]
    width: Units
    depth: Units
    max_length: Count


class Content(TypedDict):
    """What the file holds beside its format."""

    __pydantic_config__ = STRICT | {"extra": "ignore"}  # type: ignore[misc]
    model: Network
    classes: list[Words]
    preprocessing: dict[str, Any] | None
    run: dict[str, Any]
    versions: dict[str, Any]


CONTENT = TypeAdapter(Content)


@dataclass(frozen=True)
class Description:
    """What a trained model is, but for its weights.

    Attributes:
        architecture: Of the network.
        classes: Their names, in the order of the outputs.
        preprocessing: Of what it is given; None where only the run's own data suits it.
        target: The real number that it predicts, where it knows no classes.
        config: Of the run that trained it.
        versions: Of the packages that did.
    """

    architecture: Architecture
    classes: tuple[str, ...]
    preprocessing: Preprocessing | None
    target: Target | None
    config: Config
    versions: dict[str, Any]

    @classmethod
    def of(cls, config: Config, task: Task, built: Built, versions: dict[str, str]) -> Description:
        return cls(built.architecture, task.class_names, task.preprocessing, task.target, config, versions)

    def write(self, folder: Path) -> None:
        content = {
            "format": FORMAT,
            "model": asdict(self.architecture),
            "classes": self.classes,
            "preprocessing": None if self.preprocessing is None else self.preprocessing.described(),
            "target": None if self.target is None else self.target.described(),
            "run": self.config.to_mapping() | {"data": None},  # where the data lies is the machine's business
            "versions": self.versions,
        }
        files.write(folder / DESCRIPTION, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Description:
        """From a run's folder; refused in one line where there is none, or it is damaged or of another format."""
        path = folder / DESCRIPTION
        if not files.exists(path):
            raise LabError(f"{folder} holds no {DESCRIPTION}: gtracer train leaves one, with the model, in its --out")
        try:
            content = json.loads(files.read(path))
            if content["format"] != FORMAT:
                raise LabError(
                    f"{path} has format {shown(content['format'])}, this gtracer reads {FORMAT}: "
                    "use the version that wrote it"
                )
            CONTENT.validate_python(content)
            architecture, classes = Architecture.of(content["model"]), tuple(content["classes"])
            target = content.get("target")  # older ones predict classes alone
            if architecture.outputs != (len(classes) if target is None else 1):
                raise ValueError(f"{len(classes)} classes for {architecture.outputs} outputs")
            config = Config.from_mapping(content["run"])
            described = content["preprocessing"]
            fitted = None if described is None else data.preprocessing(described)
            return cls(architecture, classes, fitted, target and Target(**target), config, content["versions"])
        except LabError:
            raise
        except Exception as error:  # whatever JSON and scikit-learn's objects, packed, come across
            raise LabError(f"{path} is damaged ({_why(error)}): train the model again") from error


def _why(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return str(problems(error))
    return f"it has no {error}" if isinstance(error, KeyError) else one_line(error)


def write_weights(model: torch.nn.Module, path: Path, epoch: int) -> None:
    """All or nothing. The file itself says of which epoch they are, counted from 1."""
    try:
        with files.replacing(path) as part:
            save_model(model, str(part), {"epoch": str(epoch)})  # one fact alone: of several the order is random
    except SafetensorError as error:  # its word for whatever the disk says
        raise LabError(f"cannot write {path}: {one_line(error)}; what was there before is untouched") from error


def read(folder: Path, *, last: bool = False) -> tuple[Built, Description]:
    """The model that a run has left, on the CPU, and what it is."""
    about = Description.read(folder)
    path = folder / (LAST if last and files.exists(folder / LAST) else WEIGHTS)
    if not files.exists(path):
        raise LabError(f"{folder} holds no {path.name} yet: go on with gtracer train --resume {folder}")
    built = models.rebuilt(about.architecture, folder / PARTS)
    load_weights(built.model, path)
    return built, about


def load_weights(model: torch.nn.Module, path: Path) -> None:
    """Refused in one line where the file is damaged or another model's."""
    try:
        load_model(model, path)
    except (SafetensorError, OSError) as error:
        raise LabError(f"{path} is damaged ({one_line(error)})") from error
    except RuntimeError as error:  # torch says so in as many lines as there are tensors
        found = [line.strip() for line in str(error).splitlines()]
        raise LabError(f"{path} is of another model: {shown(found[min(1, len(found) - 1)])}") from error
