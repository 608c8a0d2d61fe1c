"""`gtracer export`: a trained model in formats that other programs read."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gtracer.lab import files
from gtracer.lab.data.labels import Target
from gtracer.lab.errors import LabError, one_line
from gtracer.lab.inference.trained import Trained
from gtracer.lab.models import saved
from gtracer.lab.models.encoders import Classifier, quiet, transformers

ROWS = 3  # of the examples that it is traced with; which number it is does not matter, but it must not be 1
WORDS = 16
TOLERANCE = 1e-3  # relative difference of outputs that are the same but for rounding


class Outputs(nn.Module):
    """A classifier of texts that takes its tensors one by one, as the formats have it."""

    def __init__(self, classifier: Classifier, names: list[str]) -> None:
        super().__init__()
        self.classifier, self.names = classifier, names

    def forward(self, *inputs: Tensor) -> Tensor:
        found: Tensor = self.classifier(dict(zip(self.names, inputs, strict=True)))
        return found


class Restored(nn.Module):
    """A model of a real number that gives it in its own unit."""

    def __init__(self, model: nn.Module, target: Target) -> None:
        super().__init__()
        self.model, self.mean, self.deviation = model, target.mean, target.deviation

    def forward(self, *inputs: Tensor) -> Tensor:
        found: Tensor = self.model(*inputs) * self.deviation + self.mean
        return found


def export(trained: Trained, kind: str, out: Path | None = None) -> tuple[Path, str]:
    """Write it beside the run's model, or elsewhere; gives where, and how far it was checked.

    What is exported gives logits, or the number that is predicted, of what preprocessing gives.
    """
    default, write, read = FORMATS[kind]
    target = out or trained.folder / default
    with (files.filling if kind == "hf" else files.replacing)(target) as part:
        write(trained, part)
        with _saying_why(trained, kind, " and read again"):
            checked = _checked(trained, kind, part, read)
    return target, checked


def _checked(trained: Trained, kind: str, part: Path, read: Callable[[Trained, Path], Callable[..., Tensor]]) -> str:
    """What was written gives what the model gives, also for more examples than it was traced with."""
    try:
        again = read(trained, part)
    except ModuleNotFoundError as error:
        return f"not checked: {error.name} is not installed"
    model, names, _ = _callable(trained)
    generator = torch.Generator().manual_seed(0)
    if len(names) > 1:
        some: tuple[Tensor, ...] = tuple(_words(names, ROWS + 2, WORDS // 2))
    else:
        some = (torch.randn(ROWS + 2, *trained.built.architecture.shape, generator=generator),)
    with torch.no_grad():
        wanted, found = model(*some), again(*some)
    scale = wanted.abs().max().clamp(min=1e-6)
    off = ((found - wanted).abs().max() / scale).item() if found.shape == wanted.shape else float("inf")
    if not off < TOLERANCE:
        raise LabError(
            f"as {kind} the model gives other outputs than it does here (relative difference {off:.2g}): "
            "nothing is written"
        )
    return f"its outputs are the model's (relative difference {off:.1g})"


def _onnx(trained: Trained, target: Path) -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise LabError(f"onnx needs {error.name}: pip install 'gtracer-optim[onnx]'") from error
    model, names, inputs = _callable(trained)
    several = torch.export.Dim("examples")
    shapes = tuple({0: several} | ({1: torch.export.Dim("tokens")} if len(names) > 1 else {}) for _ in inputs)
    if len(names) > 1 or trained.target is not None:
        shapes = (shapes,)  # type: ignore[assignment]  # of the one variadic argument
    with _saying_why(trained, "onnx"):
        program = torch.onnx.export(
            model,
            inputs,
            input_names=names,
            output_names=["logits" if trained.target is None else "number"],
            dynamic_shapes=shapes,
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        program.save(target, external_data=False)


def _read_onnx(trained: Trained, target: Path) -> Callable[..., Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(target), providers=["CPUExecutionProvider"])
    _, names, _ = _callable(trained)
    return lambda *some: torch.from_numpy(
        session.run(None, {name: each.numpy() for name, each in zip(names, some, strict=True)})[0]
    )


def _torchscript(trained: Trained, target: Path) -> None:
    model, _, inputs = _callable(trained)
    with _saying_why(trained, "torchscript"):
        torch.jit.save(torch.jit.trace(model, inputs), str(target))  # type: ignore[no-untyped-call]


def _read_torchscript(trained: Trained, target: Path) -> Callable[..., Tensor]:
    return torch.jit.load(str(target))  # type: ignore[no-any-return, no-untyped-call]


@contextmanager
def _saying_why(trained: Trained, kind: str, how: str = "") -> Iterator[None]:
    """In a line why this model cannot be exported so; torch's exporters warn of themselves and raise anything."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except (LabError, OSError):
            raise
        except Exception as error:
            reason = one_line(error)[:300] or type(error).__name__
            raise LabError(f"model {trained.built.name} cannot be exported as {kind}{how}: {reason}") from error
        finally:
            logger.setLevel(level)


def _hugging_face(trained: Trained, target: Path) -> None:
    if not isinstance(trained.model, Classifier):
        raise LabError(f"hf is for encoders of texts, not model {trained.built.name}: use onnx or torchscript")
    model: Any = deepcopy(trained.model.model).cpu()
    if trained.target is not None:
        _fold(model, trained.target)
        model.config.problem_type = "regression"
    else:
        model.config.id2label = dict(enumerate(trained.classes))
        model.config.label2id = {name: place for place, name in enumerate(trained.classes)}
    shutil.copytree(trained.folder / saved.PARTS, target, dirs_exist_ok=True)
    with quiet(transformers()):
        model.save_pretrained(target)


@torch.no_grad()
def _fold(model: nn.Module, target: Target) -> None:
    """Let the last layer give the number in its own unit."""
    last = [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features == 1][-1]
    last.weight.mul_(target.deviation)
    if last.bias is None:
        last.bias = nn.Parameter(torch.zeros(1))
    last.bias.mul_(target.deviation).add_(target.mean)


def _read_hugging_face(trained: Trained, target: Path) -> Callable[..., Tensor]:
    library = transformers()
    with quiet(library):
        made = library.AutoModelForSequenceClassification.from_pretrained(target).eval()
    names = list(trained.built.inputs)
    return lambda *some: made(**dict(zip(names, some, strict=True))).logits


# What is written where nothing else is said; how it is written, and read again.
FORMATS: dict[str, tuple[str, Callable[[Trained, Path], None], Callable[[Trained, Path], Callable[..., Tensor]]]] = {
    "onnx": ("model.onnx", _onnx, _read_onnx),
    "torchscript": ("model.pt", _torchscript, _read_torchscript),
    "hf": ("hf", _hugging_face, _read_hugging_face),
}


def _callable(trained: Trained) -> tuple[nn.Module, list[str], tuple[Tensor, ...]]:
    """A model of plain tensors on the CPU, their names, and examples of them."""
    model: nn.Module = trained.model.cpu()
    names = ["input"]
    inputs: tuple[Tensor, ...] = (torch.zeros(ROWS, *trained.built.architecture.shape),)
    if isinstance(model, Classifier):
        names = list(trained.built.inputs)
        inputs = tuple(_words(names, ROWS, WORDS))
        model = Outputs(model, names)
    if trained.target is not None:
        model = Restored(model, trained.target)
    return model.eval(), names, inputs


def _words(names: list[str], texts: int, words: int) -> Iterator[Tensor]:
    """Texts of nothing, as an encoder takes them."""
    for name in names:
        made = torch.ones(texts, words, dtype=torch.int64)
        yield made if name == "attention_mask" else 0 * made
