"""A model that a run has left, ready to be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from gtracer.lab import data
from gtracer.lab.config import Config
from gtracer.lab.data import batches
from gtracer.lab.data.labels import Target
from gtracer.lab.data.task import Found, Preprocessing, Split, Task
from gtracer.lab.errors import LabError, shown
from gtracer.lab.models import saved
from gtracer.lab.models.built import Built
from gtracer.lab.training.device import device_of

BATCH = 256  # examples at a time


@dataclass(frozen=True)
class Trained:
    """A model and what it takes to use it.

    Attributes:
        folder: The run's.
        model: In evaluation mode, on `device`.
        preprocessing: Reads files as the model takes them: `preprocessing.read(path)`.
        classes: Their names, in the order of the model's outputs; none where it predicts a real number.
        target: That number, of which the model's output is (number − mean) / deviation.
        config: Of the run that trained it.
        device: Where it computes.
        built: How examples are handed to it.
    """

    folder: Path
    model: nn.Module
    preprocessing: Preprocessing | None
    classes: tuple[str, ...]
    target: Target | None
    config: Config
    device: torch.device
    built: Built

    def read(self, path: Path) -> Found:
        """The examples that a file or folder holds, as the model takes them."""
        if self.preprocessing is None:
            raise LabError(f"{self.folder} was trained on data sets from Python: only they tell how data is read")
        if not path.exists():
            raise LabError(f"cannot read {path}: there is no such file or folder")
        return self.preprocessing.read(path)

    def task(self, folder: str | None = None) -> Task:
        """The data that it was trained on, as it is now; the folder is that of the task's official files."""
        if folder is not None and self.config.task not in data.TASKS:
            raise LabError(
                f"--data {folder} has no effect: it is for the official files of a task, and {self.folder} was "
                f"trained on data of its own, {self.config.task}"
            )
        return data.load(replace(self.config, data=folder))

    def predict(self, path: str | Path) -> Tensor:
        """For each example of a file or folder a row with the probabilities of the classes, or the number."""
        found = self.read(Path(path))
        return self.probabilities(found) if self.target is None else self.numbers(found)

    def probabilities(self, examples: Found | Split) -> Tensor:
        """The probabilities of the classes for examples that have been read, on the CPU."""
        if self.target is not None:
            raise LabError(f"the model in {self.folder} predicts real numbers ({self.target.name}), no classes")
        return self._outputs(examples, lambda outputs: outputs.softmax(1))

    def numbers(self, examples: Found | Split) -> Tensor:
        """The predicted numbers for examples that have been read, on the CPU."""
        if self.target is None:
            raise LabError(f"the model in {self.folder} predicts classes, no real numbers")
        return self.target.restored(self._outputs(examples, lambda outputs: outputs).squeeze(1))

    @torch.no_grad()
    def _outputs(self, examples: Found | Split, finished: Callable[[Tensor], Tensor]) -> Tensor:
        if not len(examples.inputs):
            return torch.zeros(0, max(1, len(self.classes)))
        batch = self.built.batches(examples, self.device)
        rows = torch.split(torch.arange(len(examples.inputs), device=self.device), BATCH)
        inputs = batches.each(batch, [(part, batch.width(part)) for part in rows])
        return torch.cat([finished(self.model(each).float()).cpu() for each in inputs])

    def index(self, names: list[str]) -> Tensor:
        """The classes of these names; refused in one line where the model knows no such class."""
        known = {name: place for place, name in enumerate(self.classes)}
        for name in names:
            if name not in known:
                some = ", ".join(self.classes[:10]) + (", …" if len(self.classes) > 10 else "")
                raise LabError(f"label {shown(name)} was never seen in training: the model knows {some}")
        return torch.tensor([known[name] for name in names], dtype=torch.int64)


def load(run: str | Path, *, device: str = "auto", last: bool = False) -> Trained:
    """The model that a run has left.

    Args:
        run: Its folder.
        device: Device to compute on.
        last: Load the last epoch's weights instead of the best ones by held-out data.
    """
    folder, place = Path(run), device_of(device)
    built, about = saved.read(folder, last=last)
    model = built.model.to(place).eval()
    return Trained(folder, model, about.preprocessing, about.classes, about.target, about.config, place, built)
