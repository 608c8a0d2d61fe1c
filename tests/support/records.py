"""Records with made-up numbers, for tests of what is read from them."""

import json
import math
from pathlib import Path

from gtracer.lab.results.record import Record
from gtracer.lab.sweeps.study import Study

ENVIRONMENT = {
    "commit": "0123456789abcdef",
    "versions": {"gtracer": "0.1.0", "python": "3.12.0", "torch": "2.6.0"},
    "hardware": {"machine": "x86_64", "cores": 16, "threads": 1, "device": "cpu"},
}


def fill(study: Study, folder: Path, *, without=(), diverged=()) -> None:
    """A record for every run of the study, and the study beside them.

    Args:
        without: (label, setting, seed) of those that are to be missing.
        diverged: The same of those that end after two epochs.
    """
    study.write(folder)
    for place, point in enumerate(study.points()):
        for config in point.configs():
            key = (point.label, point.setting, config.seed)
            if key not in without:
                made_up(config, place, failed=key in diverged).write(folder / f"{place}-{config.seed}")


def made_up(config, place: int, failed: bool = False) -> Record:
    """Curves that rise and fall a little, seed by seed somewhat apart, each method by its own amount."""
    record = Record(config, ENVIRONMENT)
    for epoch in range(1, 1 + (2 if failed else config.epochs)):
        share = epoch / config.epochs
        shape = 1.2 * math.sqrt(share) - 0.4 * share**2
        accuracy = (0.3 + 0.05 * place) * shape + 0.01 * math.sin(7 * config.seed + place + 3 * share)
        row = {"test_accuracy": round(accuracy, 4)}
        if config.label_noise:
            row["memorised"] = round(0.6 * share**2 / (1 + place) + 0.005 * config.seed, 4)
        record.add(row, seconds=1.5 + 0.5 * place + 0.01 * config.seed)
    record.failure = "the loss is not finite at epoch 3" if failed else None
    return record


def damage(folder: Path) -> None:
    """A record that is cut in half, and one of another format."""
    for name in ("half", "other"):
        (folder / name).mkdir()
    whole = json.dumps({"format": 1, "config": {}, "curves": {}})
    (folder / "half" / "record.json").write_text(whole[: len(whole) // 2])
    (folder / "other" / "record.json").write_text(json.dumps({"format": 99}))


HOSTILE = '<script>alert(1)</script> & "x" | y'


def small(folder: Path) -> Study:
    """Two settings, three methods, three seeds; a cell is not run, a run diverged, a label would be a script."""
    study = Study.from_mapping(
        {
            "title": f"A small study of {HOSTILE}",
            "about": "Made-up numbers.\nA second line with </script><img src=x onerror=alert(2)>.",
            "base": {"epochs": 6},
            "seeds": 3,
            "settings": {"clean": {}, "half wrong": {"label_noise": 0.5}},
            "methods": {
                "SGD": {"optimizer": "sgd"},
                HOSTILE: {"optimizer": "sam", "rho": 0.1},
                "SGD-TRACER": {"optimizer": "sgd-tracer", "rho": 0.003},
            },
            "paper": {"SGD": {"half wrong": [21.96, 0.36]}, "SGD-TRACER": {"half wrong": [51.62, 0.18]}},
        }
    )
    missing = [(HOSTILE, "half wrong", seed) for seed in study.seeds]
    fill(study, folder, without=missing, diverged=[("SGD-TRACER", "clean", 1)])
    return study


def varied(folder: Path) -> Study:
    """One setting; a method as it is, and two over many values of ρ."""
    study = Study.from_mapping(
        {
            "title": "Accuracy against ρ",
            "base": {"epochs": 6, "label_noise": 0.5},
            "seeds": 2,
            "methods": {
                "SGD": {"optimizer": "sgd"},
                "SAM": {"optimizer": "sam", "vary": {"rho": [0.05, 0.1, 0.5, 2.0]}},
                "SGD-TRACER": {"optimizer": "sgd-tracer", "vary": {"rho": [0.0003, 0.001, 0.002, 0.006]}},
            },
        }
    )
    fill(study, folder)
    return study


def detailed(folder: Path) -> Study:
    """Two methods with all that a run leaves: losses, ρ, T, held-out accuracy, confusions, calibration."""
    study = Study.from_mapping(
        {
            "title": "With everything",
            "base": {"epochs": 4, "holdout": 0.1},
            "seeds": 2,
            "methods": {"SGD": {"optimizer": "sgd"}, "SGD-TRACER": {"optimizer": "sgd-tracer"}},
        }
    )
    study.write(folder)
    for place, point in enumerate(study.points()):
        for config in point.configs():
            record = made_up(config, place)
            epochs = range(config.epochs)
            record.curves["train_loss"] = [2.3 / (1 + epoch) for epoch in epochs]
            record.curves["test_loss"] = [2.0 / (1 + 20 * epoch) for epoch in epochs]
            record.curves["holdout_accuracy"] = [0.3, 0.5 + 0.1 * place, 0.4, 0.5]
            if point.method == "SGD-TRACER":
                record.curves["rho"] = [0.0, 1e-5, 1e-4, 2e-3]
                record.curves["trace_ratio"] = [100.0, 10.0, 5.0, 4.0 + config.seed]
                record.resolved = {"rho": "auto", "delta": 0.01, "test_examples": 40}
            record.evaluation = {
                "bins": [[10, 0.5, 0.4], [30, 0.9, 0.95 - 0.05 * place]],
                "classes": ["cat", "<i>dog</i>"],
                "confusion": [[19 + config.seed, 1], [5, 15]],
            }
            record.write(folder / f"run #{place}-{config.seed}")
    return study


def numbers(folder: Path) -> Study:
    """Two methods on a table whose labels are real numbers."""
    study = Study.from_mapping(
        {
            "title": "Real numbers",
            "base": {"task": "t.csv", "loss": "mse", "epochs": 3, "holdout": 0.2},
            "seeds": 2,
            "methods": {"SGD": {"optimizer": "sgd"}, "SGD-TRACER": {"optimizer": "sgd-tracer"}},
        }
    )
    study.write(folder)
    for place, point in enumerate(study.points()):
        for config in point.configs():
            record = Record(config, ENVIRONMENT, resolved={"test_examples": 50})
            for epoch, (r2, rmse) in enumerate([(0.5, 3.0), (0.7, 2.0), (0.6, 2.5)]):
                better = 0.1 * place + 0.02 * config.seed
                row = {"test_r2": r2 + better, "test_rmse": rmse, "test_loss": 1.0 / (1 + epoch)}
                record.add(row | {"holdout_r2": r2 - 0.1, "holdout_rmse": rmse - 0.1 * place}, seconds=1.0)
            record.write(folder / f"{place}-{config.seed}")
    return study
