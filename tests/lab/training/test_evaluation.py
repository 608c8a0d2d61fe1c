"""What a record tells of its last model: against scikit-learn's and torchmetrics' own figures."""

from dataclasses import replace

import numpy
import pytest
import torch
from sklearn.metrics import confusion_matrix

from gtracer.calibration import calibration
from gtracer.lab import data
from gtracer.lab.config import Config
from gtracer.lab.inference.trained import load
from gtracer.lab.results.record import Record
from gtracer.lab.training import evaluation
from gtracer.lab.training.run import Run
from gtracer.lab.training.trainer import train

CONFIG = Config(epochs=2, width=32, label_noise=0.3, device="cpu")


def test_confusions_and_calibration_are_those_of_the_model_that_is_left(tmp_path):
    found = train(CONFIG, tmp_path, [], model=True).evaluation
    test = data.load(CONFIG).test
    p = load(tmp_path).probabilities(test)
    assert found["classes"] == [str(i) for i in range(10)]
    assert found["confusion"] == confusion_matrix(test.labels, p.argmax(1)).tolist()
    counts, sure, right = numpy.array(found["bins"]).T
    assert counts.sum() == len(test.labels)
    assert (counts * right).sum() == pytest.approx((p.argmax(1) == test.labels).sum().item(), abs=1e-3)
    error = (counts * abs(right - sure)).sum() / counts.sum()
    assert error == pytest.approx(calibration(p, test.labels)["ece"], abs=1e-5)
    assert Record.read(tmp_path).evaluation == found


def test_of_many_classes_the_pairs_that_are_confused_most():
    task = data.load(CONFIG)
    task = replace(task, classes=25, names=(*(f"class {i}" for i in range(24)), "\udc80"))
    torch.manual_seed(0)
    run = Run(CONFIG, task=task)
    found = evaluation.of(run)
    assert "confusion" not in found
    _, predicted, labels = run.tested()
    counts = confusion_matrix(labels, predicted, labels=range(25))
    numpy.fill_diagonal(counts, 0)
    assert [n for _, _, n in found["confused"]] == sorted(counts.flatten().tolist(), reverse=True)[:10]
    for label, taken, n in found["confused"]:
        a, b = (24 if name == "?" else int(name.split()[1]) for name in (label, taken))
        assert counts[a, b] == n


def test_without_classes_there_is_nothing_to_confuse():
    run = Run(CONFIG)
    run.test = replace(run.test, labels=run.test.labels.double())
    assert evaluation.of(run) == {}
