"""Runs that predict real numbers: losses, scores, and what they leave."""

from dataclasses import replace

import numpy
import pandas
import pytest
import torch
from sklearn.metrics import mean_squared_error, r2_score
from torch.nn.functional import huber_loss, mse_loss

import gtracer
from gtracer import cli
from gtracer.lab import data
from gtracer.lab.config import Config
from gtracer.lab.errors import Interrupted
from gtracer.lab.results.record import Record
from gtracer.lab.training.run import Run
from gtracer.lab.training.trainer import train
from gtracer.lab.training.weights import best_epoch
from support.runs import StopAfter


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("houses")
    draws = numpy.random.default_rng(0)
    x = draws.normal(size=(150, 3))
    frame = pandas.DataFrame(x, columns=list("abc")).assign(y=40 + 10 * x[:, 0] - 5 * x[:, 1] ** 2)
    frame.to_csv(folder / "f.csv", index=False)
    return Config(task=str(folder / "f.csv"), label_column="y", epochs=4, width=16, holdout=0.2, device="cpu")


@pytest.mark.parametrize(("loss", "twin"), [(None, mse_loss), ("mse", mse_loss), ("huber", huber_loss)])
def test_the_loss_is_torch_s(config, loss, twin):
    run = Run(replace(config, loss=loss))
    outputs, labels = torch.randn(20, 1), run.labels[:20] * 3
    torch.testing.assert_close(run.loss(outputs, labels), twin(outputs[:, 0], labels))
    padded = torch.cat([labels[:12], torch.full((8,), torch.nan)])  # as processes that share a batch have it
    torch.testing.assert_close(run.loss(outputs, padded, "sum"), 12 * twin(outputs[:12, 0], labels[:12]))


def test_scores_are_scikit_learn_s(config, tmp_path):
    record = train(config, tmp_path, [], model=True)
    task, trained = data.load(config), gtracer.load(tmp_path)
    best = best_epoch(record) - 1
    assert best == min(range(4), key=record.curves["holdout_rmse"].__getitem__)
    for part in ("test", "holdout"):
        split = getattr(task, part)
        wanted, given = trained.target.restored(split.labels).numpy(), trained.numbers(split).numpy()
        assert record.curves[f"{part}_r2"][best] == pytest.approx(r2_score(wanted, given), rel=1e-5)
        assert record.curves[f"{part}_rmse"][best] == pytest.approx(mean_squared_error(wanted, given) ** 0.5, rel=1e-5)
    again = Record.read(tmp_path)
    assert again.metric == "r2"
    assert again.summary()["last"]["test_r2"] == record.curves["test_r2"][-1]
    assert "test_accuracy" not in again.curves


@pytest.mark.parametrize("optimizer", ["sgd", "adamw-tracer"])
def test_cut_and_gone_on_with_it_is_the_same_run(config, tmp_path, optimizer):
    """Also with an average of the weights."""
    config = replace(config, optimizer=optimizer, ema=0.9, loss="huber", batch_size=32)
    whole = train(config, tmp_path / "whole", [], model=True)
    with pytest.raises(Interrupted):
        train(config, tmp_path / "cut", [StopAfter(6)], model=True)
    assert train(config, tmp_path / "cut", [], resume=True, model=True).curves == whole.curves
    for name in ("model.safetensors", "last.safetensors"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_single_held_out_example_chooses_too(config, tmp_path):
    """R² there is none of it; its error there is."""
    task = data.load(config)
    record = train(config, tmp_path, [], task=replace(task, holdout=task.holdout.rows(torch.tensor([3]))))
    errors = record.curves["holdout_rmse"]
    assert all(value != value or value == -torch.inf for value in record.curves["holdout_r2"])
    assert best_epoch(record) == 1 + min(range(4), key=errors.__getitem__)
    assert Record.read(tmp_path).epochs == 4


def test_compare_chooses_by_held_out_data_and_says_r2(config, tmp_path, capsys):
    words = ["--label-column", "y", "--epochs", "2", "--width", "8", "--seeds", "1", "--out", str(tmp_path / "out")]
    assert cli.main(["compare", config.task, *words]) == 0
    said = capsys.readouterr().out
    assert "R² in %, at each run's best epoch by held-out data" in " ".join(said.split())
    assert "is best by held-out data, with R² of " in said
    assert (tmp_path / "out" / "report" / "index.html").is_file()


def test_find_rho_takes_the_same_loss(config, tmp_path):
    words = ["--task", config.task, "--label-column", "y", "--optimizer", "sgd-tracer", "--width", "8", "--steps", "4"]
    assert cli.main(["find-rho", *words, "--candidates", "0.001", "0.01", "--out", str(tmp_path)]) == 0
