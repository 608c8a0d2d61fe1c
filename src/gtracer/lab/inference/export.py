"""`gtracer export`: a trained model in formats that other programs read."""

from __future__ import annotations

import io
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gtracer.lab import files
from gtracer.lab.errors import LabError, one_line
from gtracer.lab.inference.trained import Trained
from gtracer.lab.models import saved
from gtracer.lab.models.encoders import Classifier

ROWS = 3  # of the examples that it is traced with; which number it is does not matter, but it must not be 1
WORDS = 16


class Outputs(nn.Module):
    """A classifier of texts that takes its tensors one by one, as the formats have it."""

    def __init__(self, classifier: Classifier, names: list[str]) -> None:
        super().__init__()
        self.classifier, self.names = classifier, names

    def forward(self, *inputs: Tensor) -> Tensor:
        found: Tensor = self.classifier(dict(zip(self.names, inputs, strict=True)))
        return found


def export(trained: Trained, kind: str, out: Path | None = None) -> Path:
    """Write it beside the run's model, or elsewhere. What is exported gives logits, of what preprocessing gives."""
    wanted = FORMATS[kind]
    default, write = wanted
    target = out or trained.folder / default
    write(trained, target)
    return target


def _onnx(trained: Trained, target: Path) -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise LabError(f"onnx needs {error.name}: pip install 'gtracer-optim[onnx]'") from error
    model, names, inputs = _callable(trained)
    several = torch.export.Dim("examples")
    shapes = tuple({0: several} | ({1: torch.export.Dim("tokens")} if len(names) > 1 else {}) for _ in inputs)
    if len(names) > 1:
        shapes = (shapes,)  # type: ignore[assignment]  # of the one variadic argument
    with (
        warnings.catch_warnings(),
        files.replacing(target) as part,
    ):  # torch's exporter warns of itself
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model,
            inputs,
            input_names=names,
            output_names=["logits"],
            dynamic_shapes=shapes,
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        program.save(part, external_data=False)


def _torchscript(trained: Trained, target: Path) -> None:
    model, _, inputs = _callable(trained)
    buffer = io.BytesIO()
    with warnings.catch_warnings():  # torch calls the format itself a thing of the past
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(model, inputs), buffer)  # type: ignore[no-untyped-call]
    files.write(target, buffer.getvalue())


def _hugging_face(trained: Trained, target: Path) -> None:
    if not isinstance(trained.model, Classifier):
        raise LabError(f"hf is for encoders of texts, not model {trained.built.name}: use onnx or torchscript")
    model: Any = trained.model.model
    model.config.id2label = dict(enumerate(trained.classes))
    model.config.label2id = {name: place for place, name in enumerate(trained.classes)}
    try:
        shutil.copytree(trained.folder / saved.PARTS, target, dirs_exist_ok=True)
        model.save_pretrained(target)
    except OSError as error:
        raise LabError(f"cannot write {target}: {one_line(error)}") from error


FORMATS: dict[str, tuple[str, Callable[[Trained, Path], None]]] = {
    "onnx": ("model.onnx", _onnx),
    "torchscript": ("model.pt", _torchscript),
    "hf": ("hf", _hugging_face),
}


def _callable(trained: Trained) -> tuple[nn.Module, list[str], tuple[Tensor, ...]]:
    """A model of plain tensors on the CPU, their names, and examples of them."""
    model = trained.model.cpu()
    if not isinstance(model, Classifier):
        return model, ["input"], (torch.zeros(ROWS, *trained.built.architecture.shape),)
    names = list(trained.built.inputs)
    ones = torch.ones(ROWS, WORDS, dtype=torch.int64)
    return Outputs(model, names).eval(), names, tuple(ones if name == "attention_mask" else 0 * ones for name in names)
