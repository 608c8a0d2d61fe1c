"""The commands of a trained model: `predict`, `evaluate`, `export`, `find-label-errors`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gtracer.lab.parser import at_least_one

FORMATS = ("onnx", "torchscript", "hf")


def add(commands: Any) -> None:
    """To the command line's others."""
    predict = commands.add_parser(
        "predict",
        help="the classes of examples and their probabilities, as csv",
        description="Write for each example of a file or folder the class that a trained model gives it, and the "
        "probability of every class; or the number that it predicts. Examples need no labels.",
        epilog="example: gtracer predict runs/mine photos/new --out predictions.csv",
    )
    _add_model(predict)
    predict.add_argument("examples", type=Path, metavar="DATA", help="file or folder, as the model was trained on")
    predict.add_argument(
        "--out", type=Path, default=Path("predictions.csv"), metavar="FILE", help="(default: predictions.csv)"
    )
    predict.set_defaults(run=_predict)

    evaluate = commands.add_parser(
        "evaluate",
        help="accuracy, class by class, confusions and calibration of a trained model; or R² and errors",
        description="Compare a trained model with labels: accuracy, precision and recall of each class, which are "
        "taken for which, and how far the probabilities can be believed; of real numbers R² and errors. As JSON and "
        "two pictures.",
        epilog="example: gtracer evaluate runs/mine photos/new",
    )
    _add_model(evaluate)
    evaluate.add_argument(
        "examples", type=Path, nargs="?", metavar="DATA", help="with labels (default: the run's own test data)"
    )
    evaluate.add_argument("--data", metavar="DIR", help="folder with the official files of the run's own task")
    evaluate.add_argument("--out", type=Path, metavar="DIR", help="(default: evaluation, in the run's folder)")
    evaluate.set_defaults(run=_evaluate)

    export = commands.add_parser(
        "export",
        help="a trained model in formats that other programs read",
        description="Write a trained model as ONNX, as TorchScript, or as a folder of Hugging Face's transformers. It "
        "takes what preprocessing gives (model.json says what that is), and gives logits, or the number that is "
        "predicted. What was written is read again and compared with the model.",
        epilog="example: gtracer export runs/mine --format onnx",
    )
    _add_model(export)
    export.add_argument("--format", choices=FORMATS, default="onnx", help="(default: onnx)")
    export.add_argument("--out", type=Path, metavar="PATH", help="(default: model.onnx, model.pt or hf, beside it)")
    export.set_defaults(run=_export)

    errors = commands.add_parser(
        "find-label-errors",
        help="which training labels are likely wrong, by a trained model",
        description="Rank a run's training examples by how likely their label is wrong: by cleanlab's confident "
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
    errors.add_argument("--data", metavar="DIR", help="folder with the official files of the run's own task")
    errors.add_argument("--out", type=Path, metavar="DIR", help="(default: label-errors, in the run's folder)")
    errors.set_defaults(run=_find_label_errors)


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
    console.out(f"{found.told()}, against the labels as they are: {out / NAME}", highlight=False)


def _export(chosen: argparse.Namespace) -> None:
    from gtracer.lab.inference.export import export

    path, checked = export(_loaded(chosen), chosen.format, chosen.out)
    print(f"exported: {path}; {checked}")


def _find_label_errors(chosen: argparse.Namespace) -> None:
    from gtracer.lab.inference import label_errors

    out = chosen.out or chosen.model / "label-errors"
    found = label_errors.find(_loaded(chosen), chosen.folds, out, chosen.data)
    print("\n".join(label_errors.told(found, out)))
