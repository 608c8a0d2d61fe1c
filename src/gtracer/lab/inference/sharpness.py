"""`gtracer sharpness`: how sharp the minima are that runs have found, on the data that they were trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.nn.functional import huber_loss, mse_loss

from gtracer import sharpness
from gtracer.lab import files
from gtracer.lab.data import python
from gtracer.lab.data.task import sampled
from gtracer.lab.errors import LabError, one_line, raised, shown
from gtracer.lab.inference.trained import Trained, load
from gtracer.lab.results import provenance
from gtracer.lab.results.report.sharpness import FORMAT, NAME
from gtracer.lab.results.report.sharpness import shown as number
from gtracer.lab.training.weights import require_same_data
from gtracer.sharpness import Settings, Sharpness, picture

EXAMPLES = 1000
SPLITS = ("train", "test")
FOLDER = "sharpness"


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        name: For tables and figures.
        model: In any mode.
        loss_of: The loss of a batch by it.
        batches: To be read several times.
        folder: Where to write to if nothing else is said.
        is_own: Whether loss and batches are a user's own code.
    """

    name: str
    model: nn.Module
    loss_of: Callable[[Any], Tensor]
    batches: Any
    folder: Path
    is_own: bool = False

    def measured(self, **options: Any) -> Sharpness:
        """As `gtracer.sharpness.measure`."""
        found: Sharpness = self._of(sharpness.measure, **options)
        return found

    def landscapes(self, points: int, reach: float, progress: Any) -> dict[str, Any]:
        """A line, a plane of random directions, and one of the Hessian's eigenvectors."""
        options = {"points": points, "reach": reach, "settings": Settings(progress=progress)}
        values, vectors = self._of(sharpness.eigenvectors, settings=options["settings"])
        labels = tuple(f"{n} eigenvector, λ = {x:.3g}" for n, x in zip(("first", "second"), values, strict=False))
        return {
            "line": self._of(sharpness.line, **options),
            "plane": self._of(sharpness.plane, **options),
            "eigenvectors": self._of(sharpness.plane, directions=vectors, labels=labels, **options),
        }

    def towards(self, other: Subject, points: int, progress: Any) -> sharpness.Line:
        """From this model to another, with batch norm's statistics estimated anew in between."""
        found: sharpness.Line = self._of(
            sharpness.between,
            first=self.model,
            second=other.model,
            points=points,
            statistics="reestimated",
            settings=Settings(progress=progress),
        )
        return found

    def _of(self, function: Callable[..., Any], **options: Any) -> Any:
        """A refusal is an error of the lab, in one line."""
        try:
            return function(self.model, self.loss_of, self.batches, **options)
        except (ValueError, FloatingPointError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError) and not self.is_own:
                size = max(len(labels) for _, labels in self.batches)
                raise LabError(
                    f"{self.name}: there is not enough memory for batches of {size}: choose a smaller --batch-size, or "
                    "fewer --steps"
                ) from error
            raise LabError(f"{self.name}: {one_line(error)}") from error
        except Exception as error:  # the user's own, of any class
            if not self.is_own or isinstance(error, LabError | MemoryError):
                raise
            raise LabError(f"{self.name} raises {raised(error)}") from error


def subject(
    trained: Trained,
    examples: int = EXAMPLES,
    batch_size: int | None = None,
    split: str = "train",
    folder: str | None = None,
) -> Subject:
    """A trained model with examples of its own data, a random choice that is the same for every model of that data.

    Args:
        trained: The model.
        examples: At most so many.
        batch_size: By default the one that it was trained with.
        split: "train", with the labels that it was trained on, or "test", with the true ones.
        folder: Of the task's official files.
    """
    task = trained.task(folder)
    part = task.train if split == "train" else task.test
    require_same_data(trained.folder, {split: part.ids}, "it would be measured on other examples; train anew")
    chosen, place = part.rows(sampled(len(part.labels), examples)), trained.device
    labels = (chosen.labels if split == "train" else chosen.truth).to(place)
    batch = trained.built.batches(chosen, place)
    rows = torch.split(torch.arange(len(labels), device=place), batch_size or trained.config.batch_size)
    batches = [(batch(each, batch.width(each)), labels[each]) for each in rows]
    loss_of = sharpness.classification(trained.model) if trained.target is None else _distance(trained)
    return Subject(trained.folder.name, trained.model, loss_of, batches, trained.folder / FOLDER)


def _distance(trained: Trained) -> sharpness.SplitLoss:
    """Of real numbers, as in training: in deviations of the training data."""
    distance = huber_loss if trained.config.loss == "huber" else mse_loss

    def outputs_of(batch: Any) -> Tensor:
        outputs: Tensor = trained.model(batch[0]).float()
        return outputs

    def loss_on(outputs: Tensor, batch: Any) -> Tensor:
        loss: Tensor = distance(outputs.squeeze(1), batch[1])
        return loss

    return sharpness.SplitLoss(outputs_of, loss_on, merge=sharpness.concatenated)


def found(word: str, *, device: str, last: bool, **chosen: Any) -> Subject:
    """What a word of the command line names: a run's folder, or MODULE:FUNCTION giving model, loss and batches."""
    if files.exists(Path(word)) or not python.is_named(word):
        return subject(load(word, device=device, last=last), **chosen)
    given = python.called(word)
    if not isinstance(given, tuple) or len(given) != 3 or not isinstance(given[0], nn.Module):
        raise LabError(f"{word} must give a model, its loss of a batch, and batches, got {shown(given)}")
    name = word.rpartition(":")[2]
    return Subject(name, *given, Path(f"{FOLDER}-{name}"), is_own=True)


def write(it: Subject, measured: Sharpness, out: Path, landscapes: dict[str, Any]) -> None:
    """All numbers as JSON, and figures."""
    numbers = {
        "format": FORMAT,
        "name": it.name,
        "rows": [row._asdict() for row in measured.rows()],
        "sharpness": measured.to_mapping(),
        "landscapes": {name: each.to_mapping() for name, each in landscapes.items()},
        "environment": provenance.describe(next(it.model.parameters()).device),
    }
    files.write(out / NAME, (json.dumps(finite(numbers), indent=1, ensure_ascii=False) + "\n").encode())
    spectra = {"Hessian": measured.hessian, "Gauss-Newton": measured.ggn}
    there = {name: spectrum for name, spectrum in spectra.items() if spectrum is not None}
    if there:
        draw(out / "density.png", lambda file: picture.density(there, file))
    for name, each in landscapes.items():
        draw(out / f"{name}.png", each.plot)
        if isinstance(each, sharpness.Surface) and each.accuracies is not None:
            draw(out / f"{name}-accuracy.png", partial(each.plot, accuracy=True))


def draw(path: Path, plot: Callable[[Any], Any]) -> None:
    """A figure, whole or not at all."""
    file = BytesIO()
    plot(file)
    files.write(path, file.getvalue())


def table(measured: Sequence[tuple[str, Sharpness]]) -> Table:
    """A row for each measure, a column for each model."""
    made = Table()
    made.add_column("")
    for name, _ in measured:
        made.add_column(Text(name), justify="right")
    made.add_column("invariant")
    rows = [{row.name: row for row in each.rows()} for _, each in measured]
    for name in dict.fromkeys(name for row in rows for name in row):
        known = next(row[name] for row in rows if name in row)
        cells = [number(row[name].value, row[name].error) if name in row else "" for row in rows]
        made.add_row(known.text, *cells, "yes" if known.invariant else "no")
    return made


def finite(value: Any) -> Any:
    """NaN and infinity are not JSON: null stands for them."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, list | tuple) else value
