"""The commands of a trained model: `predict`, `evaluate`, `export`, `find-label-errors`, `sharpness`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gtracer.lab.errors import LabError
from gtracer.lab.parser import above_zero, at_least_one, whole

FORMATS = ("onnx", "torchscript", "hf")


def add(commands: Any) -> None:
    """To the command line's others."""
    predict = commands.add_parser(
        "predict",
        help="the classes of examples and their probabilities, as csv",
        description="Predict each example of a file or folder with a trained model: its class and the probability of "
        "every class, or a number. Examples need no labels.",
        epilog="example: gtracer predict runs/mine photos/new --out predictions.csv",
    )
    _add_model(predict)
    predict.add_argument("examples", type=Path, metavar="DATA", help="file or folder, as the model was trained on")
    predict.add_argument(
        "--out",
        type=Path,
        default=Path("predictions.csv"),
        metavar="FILE",
        help="file to write (default: predictions.csv)",
    )
    predict.set_defaults(run=_predict)

    evaluate = commands.add_parser(
        "evaluate",
        help="accuracy, class by class, confusions and calibration of a trained model; or R² and errors",
        description="Compare a trained model with labels, and write JSON and two pictures. For classes: accuracy, "
        "precision and recall, confusions and calibration. For real numbers: R² and errors.",
        epilog="example: gtracer evaluate runs/mine photos/new",
    )
    _add_model(evaluate)
    evaluate.add_argument(
        "examples", type=Path, nargs="?", metavar="DATA", help="labelled data (default: the run's own test data)"
    )
    evaluate.add_argument("--data", metavar="DIR", help="folder with the official files of the run's own task")
    evaluate.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to write to (default: evaluation, in the run's folder)"
    )
    evaluate.set_defaults(run=_evaluate)

    export = commands.add_parser(
        "export",
        help="a trained model in formats that other programs read",
        description="Write a trained model as ONNX, as TorchScript, or as a folder of Hugging Face's transformers. It "
        "takes preprocessed inputs (model.json describes them) and returns logits, or the predicted number. The "
        "export is read again and compared with the model.",
        epilog="example: gtracer export runs/mine --format onnx",
    )
    _add_model(export)
    export.add_argument("--format", choices=FORMATS, default="onnx", help="format to write (default: onnx)")
    export.add_argument(
        "--out", type=Path, metavar="PATH", help="file or folder to write (default: model.onnx, model.pt or hf in RUN)"
    )
    export.set_defaults(run=_export)

    errors = commands.add_parser(
        "find-label-errors",
        help="training examples that are likely mislabelled",
        description="Rank a run's training examples by how likely they are mislabelled, with cleanlab's confident "
        "learning on the probabilities of the run's own model, or of models that have not seen them.",
        epilog="example: gtracer find-label-errors runs/mine",
    )
    _add_model(errors)
    errors.add_argument(
        "--folds",
        type=at_least_one,
        default=1,
        metavar="N",
        help="judge each part of the data by a model trained on the others (default: 1, the run's model judges all)",
    )
    errors.add_argument(
        "--retrain",
        action="store_true",
        help="train once more without the flagged examples, into cleaned in that folder",
    )
    errors.add_argument("--data", metavar="DIR", help="folder with the official files of the run's own task")
    errors.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to write to (default: label-errors, in the run's folder)"
    )
    errors.set_defaults(run=_find_label_errors)
    _add_sharpness(commands)


# What `measure` takes, with its own defaults.
COUNTS = {
    "top": (at_least_one, 3, "number of largest eigenvalues"),
    "steps": (
        at_least_one,
        40,
        "largest number of steps of Lanczos' method; each is a pass over the examples that costs some training passes",
    ),
    "probes": (whole, 8, "random vectors for the trace; 0: no trace"),
    "samples": (whole, 8, "pairs of random displacements for the expected sharpness; 0: none"),
    "ascent": (whole, 8, "gradient steps to the worst point of a ball; 0: none"),
}
LENGTHS = {
    "sigma": (0.01, "standard deviation of the random displacements"),
    "adaptive-sigma": (0.1, "the same in units of |w|"),
    "radius": (0.05, "radius of the ball"),
    "adaptive-radius": (0.5, "the same in units of |w|"),
}


def _add_sharpness(commands: Any) -> None:
    command = commands.add_parser(
        "sharpness",
        help="sharpness of the minima that runs have found",
        description="Measure how sharp the loss is at trained models: eigenvalues, traces and spectral densities of "
        "the Hessian and the Gauss-Newton matrix, expected and worst rises around the weights, and TRACER's T. It uses "
        "some of the training examples, with the labels of the training. Print a table with a column for each model, "
        "and write numbers and figures into each run's folder.",
        epilog="example: gtracer sharpness runs/sgd runs/tracer --landscape --between",
    )
    command.add_argument(
        "models",
        nargs="+",
        metavar="RUN",
        help="folder that gtracer train wrote to, or MODULE:FUNCTION that returns model, loss of a batch, batches",
    )
    command.add_argument(
        "--last", action="store_true", help="the last epoch's weights (default: the best by held-out data)"
    )
    command.add_argument("--device", default="auto", metavar="X", help="cpu, cuda, mps, … or auto (default: auto)")
    command.add_argument("--data", metavar="DIR", help="folder with the official files of the runs' own task")
    command.add_argument(
        "--examples",
        type=at_least_one,
        default=1000,
        metavar="N",
        help="number of examples to measure on (default: 1000)",
    )
    command.add_argument(
        "--batch-size",
        type=at_least_one,
        metavar="N",
        help="examples in a batch, the m of m-sharpness (default: that of training); what does not depend on it is "
        "computed in larger batches on a GPU",
    )
    command.add_argument(
        "--split", choices=("train", "test"), default="train", help="data to measure on (default: train)"
    )
    for name, (kind, default, text) in COUNTS.items():
        command.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=f"{text} (default: {default})")
    for name, (length, text) in LENGTHS.items():
        command.add_argument(
            f"--{name}", type=above_zero, default=length, metavar="X", help=f"{text} (default: {length})"
        )
    command.add_argument("--landscape", action="store_true", help="also draw the loss along a line and on two planes")
    command.add_argument(
        "--points",
        type=at_least_one,
        default=21,
        metavar="N",
        help="points of a landscape along each axis (default: 21)",
    )
    command.add_argument(
        "--reach", type=above_zero, default=1.0, metavar="X", help="reach of a landscape to both sides (default: 1.0)"
    )
    command.add_argument(
        "--between", action="store_true", help="also draw the loss from the first model to each of the others"
    )
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to write to (default: sharpness, in each run's folder)"
    )
    command.set_defaults(run=_sharpness)


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", type=Path, metavar="RUN", help="folder that gtracer train wrote to")
    command.add_argument(
        "--last", action="store_true", help="the last epoch's weights (default: the best by held-out data)"
    )
    command.add_argument("--device", default="auto", metavar="X", help="cpu, cuda, mps, … or auto (default: auto)")


def _loaded(chosen: argparse.Namespace) -> Any:
    from gtracer.lab.inference.trained import load

    return load(chosen.model, device=chosen.device, last=chosen.last)


def _predict(chosen: argparse.Namespace) -> None:
    from gtracer.lab.inference.prediction import predict

    count = predict(_loaded(chosen), chosen.examples, chosen.out)
    print(f"{count} predictions: {chosen.out}")


def _evaluate(chosen: argparse.Namespace) -> None:
    from rich.console import Console

    from gtracer.lab.inference.evaluation import evaluate
    from gtracer.lab.inference.residuals import NAME

    found = evaluate(_loaded(chosen), chosen.examples, chosen.data)
    out = chosen.out or chosen.model / "evaluation"
    found.write(out)
    console = Console()
    console.print(found.table())
    console.out(f"{found.in_a_line()}, against the labels as they are: {out / NAME}", highlight=False)


def _export(chosen: argparse.Namespace) -> None:
    from gtracer.lab.inference.export import export

    path, checked = export(_loaded(chosen), chosen.format, chosen.out)
    print(f"exported: {path}; {checked}")


def _find_label_errors(chosen: argparse.Namespace) -> None:
    from rich.console import Console

    from gtracer.lab.inference import label_errors

    out, console, trained = chosen.out or chosen.model / "label-errors", Console(), _loaded(chosen)
    found = label_errors.find(trained, chosen.folds, out, chosen.data, console)
    print("\n".join(label_errors.outcome(found, out)))
    if chosen.retrain:
        cleaned, place = label_errors.retrain(found, trained, out, console)
        print(label_errors.gain_of(cleaned, place, chosen.model))


def _sharpness(chosen: argparse.Namespace) -> None:
    from rich.console import Console

    from gtracer.lab.inference import sharpness
    from gtracer.lab.results.report.sharpness import NAME

    if chosen.points < 2:
        raise LabError(f"--points must be at least 2, got {chosen.points}")
    named = {"examples": chosen.examples, "batch_size": chosen.batch_size, "split": chosen.split, "folder": chosen.data}
    subjects = [sharpness.found(word, device=chosen.device, last=chosen.last, **named) for word in chosen.models]
    if chosen.between and len(subjects) < 2:
        raise LabError("--between needs two models at least, got 1")
    names = [*COUNTS, *(name.replace("-", "_") for name in LENGTHS)]
    options = {name: getattr(chosen, name) for name in names}
    console, measured = Console(), []
    for it in subjects:
        out = it.folder if chosen.out is None else chosen.out / it.name if len(subjects) > 1 else chosen.out
        with _progress(console, it.name) as progress:
            found = it.measured(**options, progress=progress)
            drawn = it.landscapes(chosen.points, chosen.reach, progress) if chosen.landscape else {}
            if chosen.between and it is not subjects[0]:
                drawn[f"from-{subjects[0].name}"] = subjects[0].towards(it, chosen.points, progress)
        sharpness.write(it, found, out, drawn)
        measured.append((it.name, found))
        console.out(f"{it.name}: {out / NAME}", highlight=False)
    console.print(sharpness.table(measured))


@contextmanager
def _progress(console: Any, name: str) -> Iterator[Callable[[str, float], None]]:
    """A bar on a terminal, which is gone at the end."""
    from rich.progress import Progress

    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=1.0)
        yield lambda what, share: bar.update(task, completed=share, description=f"{name}: {what}")
