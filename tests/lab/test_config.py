"""Configurations: round trips, refusals, and one meaning in file, record and command line."""

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtracer.lab.config import Config, name_of
from gtracer.lab.errors import LabError

EXAMPLES = [
    Config(),
    Config(
        task="cifar100", optimizer="adamw-tracer", betas=(0.8, 0.99), rho=0.1, f0=0.5, augment=True, data="somewhere"
    ),
    Config(rho="auto"),
    Config(task="boolq", model="bert-base-uncased", f0="first-gradient", schedule="linear", warmup=0.1, seed=7),
]


@pytest.mark.parametrize("config", EXAMPLES)
@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_round_trip(config, suffix, tmp_path):
    path = tmp_path / f"config.{suffix}"
    config.write(path)
    assert Config.read(path) == config
    assert Config.from_mapping(json.loads(json.dumps(config.to_mapping()))) == config


@given(st.floats(0, 1), st.integers(1, 99), st.one_of(st.none(), st.floats(0, 10)), st.booleans())
def test_any_values_round_trip(noise, epochs, rho, augment):
    config = Config(label_noise=noise, epochs=epochs, rho=rho, augment=augment)
    assert Config.from_mapping(json.loads(json.dumps(config.to_mapping()))) == config


def test_numbers_as_people_write_them(tmp_path):
    """YAML 1.1 takes 1e-3 for a word."""
    (tmp_path / "c.yaml").write_text("lr: 1e-3\nrho: 3e-3\nf0: first-gradient\n")
    config = Config.read(tmp_path / "c.yaml")
    assert (config.lr, config.rho, config.f0) == (0.001, 0.003, "first-gradient")


def test_anything_below_one_can_be_held_out():
    for share in (0, 0.0, 0.2, 0.999):
        assert Config(holdout=share).holdout == share


def test_a_file_may_leave_things_out(tmp_path):
    (tmp_path / "c.yaml").write_text("task: cifar10\nlr: 1\n")
    assert Config.read(tmp_path / "c.yaml") == replace(Config(), task="cifar10", lr=1)
    (tmp_path / "empty.yaml").write_text("")
    assert Config.read(tmp_path / "empty.yaml") == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate: 1", "unknown configuration key 'learning_rate'"),
        ("optimiser: sgd", "did you mean optimizer"),
        ("lr: -1", "lr must be"),
        ("lr: fast", "lr must be .* got 'fast'"),
        ("epochs: 1.5", "epochs must be .* got 1.5"),
        ("schedule: step", "schedule must be one of"),
        ("label_noise: 2", "label_noise must be"),
        ("holdout: 1", r"holdout must be a finite number in \[0, 1\), got 1"),
        ("holdout: -0.1", r"holdout must be .* got -0\.1"),
        ("holdout: yes", "holdout must be .* got True"),
        ("seed: -1", "seed must be"),
        ("augment: 1", "augment must be True or False"),
        ("betas: [0.9, 1.0]", r"betas\[1\]"),
        ("task: 3", "task must be a str"),
        ("- a\n- b", "mapping"),
        ("a: [1", "neither YAML nor JSON: line"),
    ],
)
def test_bad_files(text, message, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(LabError, match=message) as caught:
        Config.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(LabError, match="cannot read .*No such file"):
        Config.read(tmp_path / "none.yaml")


def test_every_field_has_a_help_text():
    assert all(item.metadata["help"] for item in fields(Config))


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("digits", "digits"),
        ("./some/dir/", "dir"),
        ("dir//", "dir"),
        ("my photos.v1/", "my-photos"),
        (".", "data"),
        ("..", "data"),
        ("a/...", "data"),
        ("/", "data"),
        ("  ", "data"),
        ("~/x y .csv", "x-y"),
        ("-o", "o"),
        (".hidden", "hidden"),
        ("package.module:function", "package"),
        ("module:function", "module-function"),
        ("code/films.py:make", "films"),
        (r"C:\photos\cats.csv", "cats"),
        ("猫/犬", "犬"),
        ("x" * 400, "x" * 40),
    ],
)
def test_a_folder_s_name_is_plain(task, name):
    assert name_of(task) == name
    assert Config(task=task).folder.startswith(f"{name}-sgd-tracer-seed0-")
    assert len(Config(task="猫" * 400).folder.encode()) < 256


def test_a_folder_keeps_the_name_that_it_had(tmp_path):
    """From before names were plain: else what has finished would be run again."""
    config = Config(task="my photos/")
    assert config.place(tmp_path) == tmp_path / config.folder
    mark = config.folder.rsplit("-", 1)[1]
    former = tmp_path / f"my photos-sgd-tracer-seed0-{mark}"
    former.mkdir()
    assert config.place(tmp_path) == former
    assert replace(config, seed=1).place(tmp_path) == tmp_path / replace(config, seed=1).folder
    (tmp_path / f"rho-{former.name}").mkdir()
    assert config.place(tmp_path, "rho-") == tmp_path / f"rho-{former.name}"
