"""A model in a folder: its weights as safetensors, and `model.json`, which says how to make it again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model

from gtracer.lab import data, files, models
from gtracer.lab.config import Config
from gtracer.lab.data.labels import Target
from gtracer.lab.data.task import Preprocessing, Task
from gtracer.lab.errors import LabError, one_line, shown
from gtracer.lab.models.built import Architecture, Built

FORMAT = 1
# The best epoch's by held-out data, or the last's where nothing is held out; the last's beside the best's.
WEIGHTS, LAST = "model.safetensors", "last.safetensors"
DESCRIPTION = "model.json"
PARTS = "model"  # folder of what else it takes, such as a tokenizer


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
    versions: dict[str, str]

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
            told, target = content["preprocessing"], content.get("target")  # older ones predict classes alone
            return cls(
                Architecture.of(content["model"]),
                tuple(content["classes"]),
                None if told is None else data.preprocessing(told),
                None if target is None else Target(**target),
                Config.from_mapping(content["run"]),
                content["versions"],
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else one_line(error)
            raise LabError(f"{path} is damaged ({why}): train the model again") from error


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
