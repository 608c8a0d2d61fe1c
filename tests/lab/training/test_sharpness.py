"""Sharpness while training: training is the same to the bit, through interrupts too; the numbers are the model's."""

import math
import os
import signal
from dataclasses import replace

import pytest
import torch

import gtracer
from gtracer import cli
from gtracer.lab.config import Config
from gtracer.lab.errors import Interrupted, LabError
from gtracer.lab.inference.sharpness import subject
from gtracer.lab.results.record import Record
from gtracer.lab.training import sharpness
from gtracer.lab.training.captured import _refuse_what_cannot_be_captured
from gtracer.lab.training.trainer import train
from support.runs import SMALL, StopAfter

WATCHED = replace(SMALL, sharpness=2)
OWN = set(sharpness.CURVES)


def curves(record):
    """NaN is equal to itself here."""
    return {name: [None if math.isnan(x) else x for x in values] for name, values in record.curves.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(WATCHED, tmp_path_factory.mktemp("whole"), [])


def test_training_is_the_same_to_the_bit(whole, tmp_path):
    plain = train(SMALL, tmp_path, [])
    assert curves(plain) == {name: values for name, values in curves(whole).items() if name not in OWN}


def test_it_is_measured_every_so_many_epochs_and_after_the_last(whole):
    for name in OWN:
        assert [math.isfinite(x) for x in whole.curves[name]] == [False, True, True]
    assert whole.curves["sharpness_top"][1] > 0


@pytest.mark.parametrize("steps", [2, 8, 13])
def test_interrupted_and_resumed_the_same_numbers(whole, tmp_path, steps):
    with pytest.raises(Interrupted):
        train(WATCHED, tmp_path, [StopAfter(steps)])
    assert curves(train(WATCHED, tmp_path, [], resume=True)) == curves(whole)


def test_ctrl_c_in_the_middle_of_a_measurement_lets_it_be_finished(whole, tmp_path, monkeypatch):
    """The run stops after it and goes on to the same numbers."""
    plain, calls = sharpness._loss, []

    def interrupting(run):
        loss_of = plain(run)

        def loss_on(outputs, batch):
            calls.append(1)
            if len(calls) == 5:
                os.kill(os.getpid(), signal.SIGINT)
            return loss_of.loss_on(outputs, batch)

        return replace(loss_of, loss_on=loss_on)

    monkeypatch.setattr(sharpness, "_loss", interrupting)
    with pytest.raises(Interrupted):
        train(WATCHED, tmp_path, [])
    assert Record.read(tmp_path).epochs == 2
    assert curves(train(WATCHED, tmp_path, [], resume=True)) == curves(whole)


def test_the_numbers_are_those_of_the_model_that_is_left(whole, tmp_path):
    config = replace(WATCHED, epochs=2)
    record = train(config, tmp_path, [], model=True)
    trained = subject(gtracer.load(tmp_path), examples=sharpness.EXAMPLES)
    found = trained.measured(**sharpness.CHEAP)
    its = {row.name: row.value for row in found.rows()}
    for name, measure in sharpness.CURVES.items():
        assert record.curves[name][-1] == pytest.approx(its[measure], rel=1e-4), name


def test_a_loss_that_is_not_finite_leaves_a_gap(monkeypatch, tmp_path):
    def nan(*_, **__):
        raise FloatingPointError("the loss of batch 0 is nan")

    monkeypatch.setattr(sharpness, "measure", nan)
    record = train(replace(SMALL, epochs=1, sharpness=1), tmp_path, [])
    assert math.isnan(record.curves["sharpness_top"][0])
    assert Record.read(tmp_path).finished


def test_from_the_command_line(tmp_path, capsys):
    words = ["--epochs", "2", "--width", "8", "--out", str(tmp_path), "--tensorboard"]
    assert cli.main(["train", "--sharpness", "every=2", *words]) == 0
    assert Record.read(tmp_path).config.sharpness == 2
    assert cli.main(["train", "--sharpness", "every=0", *words]) == 1
    assert "sharpness must be a whole number of at least 1" in capsys.readouterr().err


def test_runs_without_it_are_called_what_they_were_called():
    assert Config().folder == "digits-sgd-tracer-seed0-2d6f44d7"
    assert Config(sharpness=2).folder != Config().folder


def test_where_it_cannot_be_measured_it_is_refused():
    with pytest.raises(LabError, match="sharpness is measured outside of the graphs"):
        _refuse_what_cannot_be_captured(WATCHED)


def test_without_enough_memory_one_line_says_what_to_do(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(sharpness, "measure", fails)
    with pytest.raises(LabError, match="sharpness = 2: there is not enough memory .* a smaller batch_size"):
        train(WATCHED, tmp_path, [])
