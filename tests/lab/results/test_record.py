"""Records: what is in one, those of earlier versions, and those that are damaged."""

import json
import math
from dataclasses import replace

import pytest

from gtracer import cli
from gtracer.lab.config import Config
from gtracer.lab.errors import Interrupted, LabError
from gtracer.lab.results.record import Record
from gtracer.lab.training.trainer import train
from support.datasets import cifar_pickle
from support.runs import SMALL, StopAfter


@pytest.mark.parametrize(("optimizer", "fed"), [("adam-tracer", "loss"), ("adamw-tracer", "loss"), ("adamw", None)])
def test_a_record_from_before_the_second_moment_was_a_choice(tmp_path, optimizer, fed):
    """It says what was done then, not what the same words mean now."""
    Record(replace(SMALL, optimizer=optimizer, rho=None), {}).write(tmp_path)
    assert Record.read(tmp_path).config.second_moment is None
    content = json.loads((tmp_path / "record.json").read_text())
    del content["config"]["second_moment"]
    (tmp_path / "record.json").write_text(json.dumps(content))
    assert Record.read(tmp_path).config.second_moment == fed


def test_record_has_what_a_reader_needs(tmp_path):
    train(SMALL, tmp_path, [])
    content = json.loads((tmp_path / "record.json").read_text())
    assert content["format"] == 1
    assert content["finished"] is True
    assert Config.from_mapping(content["config"]) == SMALL
    assert set(content["environment"]) == {"commit", "versions", "hardware"}
    assert {"torch", "python", "gtracer"} <= set(content["environment"]["versions"])
    names = "train_loss lr penalty_ratio rho trace_ratio test_accuracy test_loss memorised recovered"
    assert set(content["curves"]) == set(names.split())
    assert all(len(curve) == 3 for curve in content["curves"].values())
    accuracy = content["curves"]["test_accuracy"]
    assert content["summary"]["last"]["test_accuracy"] == accuracy[-1]
    assert content["summary"]["best"] == {"epoch": accuracy.index(max(accuracy)) + 1, "test_accuracy": max(accuracy)}
    assert content["summary"]["wall_time"] == sum(content["seconds"])
    assert content["peak_memory"] > 2**20
    assert Record.read(tmp_path).curves == content["curves"]


def test_a_record_does_not_tell_where_the_data_lay(tmp_path):
    """It is for other machines too; a run is resumed with the data wherever it lies then."""
    for name in ("one", "two"):
        cifar_pickle(tmp_path / name / "cifar-100-python/train", 200, "fine_labels", 100)
        cifar_pickle(tmp_path / name / "cifar-100-python/test", 100, "fine_labels", 100)
    config = Config(task="cifar100", data=str(tmp_path / "one"), model="mlp", width=16, epochs=2, rho=1e-4)
    straight = train(config, tmp_path / "straight", [])
    with pytest.raises(Interrupted):
        train(config, tmp_path / "cut", [StopAfter(1)])
    assert str(tmp_path) not in (tmp_path / "cut" / "record.json").read_text()
    assert cli.main(["train", "--resume", str(tmp_path / "cut"), "--data", str(tmp_path / "two")]) == 0
    assert Record.read(tmp_path / "cut").curves == straight.curves


def test_nan_is_null_in_the_file_and_nan_again(tmp_path):
    record = Record(replace(SMALL, epochs=1), {})
    record.add({"test_accuracy": 0.5, "trace_ratio": math.nan}, 1.0)
    record.write(tmp_path)
    assert "NaN" not in (tmp_path / "record.json").read_text()
    assert math.isnan(Record.read(tmp_path).curves["trace_ratio"][0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": 99}', "has format 99, this gtracer reads 1"),
        ('{"format": 1}', "is damaged .a configuration is a mapping of names to values, got NoneType"),
        ('{"format": 1, "config": {"speed": 1}}', "is damaged .unknown configuration key 'speed'"),
        ("[]", "has format 'list'"),
        ("", "is damaged"),
        (
            json.dumps({"format": 1, "config": {}, "environment": None}),
            "is damaged .environment must be a mapping, got None",
        ),
        ('{"format": 1, "con', "is damaged"),
    ],
)
def test_damaged_record(tmp_path, content, message):
    (tmp_path / "record.json").write_text(content)
    with pytest.raises(LabError, match=message):
        train(SMALL, tmp_path, [])
