"""`gtracer train` from the command line."""

from dataclasses import replace
from pathlib import Path

import pytest

from gtracer import cli
from gtracer.lab.errors import Interrupted
from gtracer.lab.results.record import Record
from gtracer.lab.training.trainer import train
from support.runs import SMALL, StopAfter


class StoppingBar(StopAfter):
    def __init__(self):
        super().__init__(1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class TestCommandLine:
    def run(self, *words):
        return cli.main(["train", *words])

    def test_options_reach_the_record(self, tmp_path, capsys):
        words = [
            "--label-noise",
            "0.5",
            "--optimizer",
            "adam-tracer",
            "--betas",
            "0.8",
            "0.9",
            "--f0",
            "0.5",
            "--epochs",
            "1",
            "--width",
            "16",
            "--holdout",
            "0.1",
        ]
        assert self.run(*words, "--out", str(tmp_path)) == 0
        config = Record.read(tmp_path).config
        assert (config.betas, config.f0, config.optimizer) == ((0.8, 0.9), 0.5, "adam-tracer")
        assert config.holdout == 0.1
        out = capsys.readouterr().out
        assert "test accuracy" in out
        assert str(tmp_path / "record.json") in out

    def test_a_file_and_options_over_it(self, tmp_path):
        replace(SMALL, seed=5).write(tmp_path / "c.yaml")
        assert self.run("--config", str(tmp_path / "c.yaml"), "--epochs", "1", "--out", str(tmp_path / "run")) == 0
        assert Record.read(tmp_path / "run").config == replace(SMALL, seed=5, epochs=1)

    def test_default_folder_tells_the_run(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert self.run("--epochs", "1", "--width", "8") == 0
        assert self.run("--epochs", "1", "--width", "9") == 0
        names = sorted(p.name for p in Path("runs").iterdir())
        assert len(names) == 2
        assert all(name.startswith("digits-sgd-tracer-seed0-") for name in names)

    def test_resume(self, tmp_path, capsys):
        with pytest.raises(Interrupted):
            train(SMALL, tmp_path, [StopAfter(2)])
        assert self.run("--resume", str(tmp_path)) == 0
        assert Record.read(tmp_path).finished
        assert self.run("--resume", str(tmp_path), "--lr", "1") == 1
        assert "leave the others out" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--task", "digit"], "unknown task 'digit': did you mean digits?"),
            (["--rho", "-1"], "rho must be"),
            (["--rho", "much"], "rho must be"),
            (["--holdout", "1"], "holdout must be"),
            (["--holdout", "0.0001"], "holdout = 0.0001 keeps 0 of 1347 training examples"),
            (["--config", "nowhere.yaml"], "cannot read nowhere.yaml"),
            (["--resume", "nowhere"], "cannot read nowhere/record.json"),
            (["--schedule", "step"], "schedule must be one of"),
        ],
    )
    def test_one_clear_line(self, words, message, capsys):
        assert self.run(*words) == 1
        error = capsys.readouterr().err
        assert error.startswith("gtracer: ")
        assert message in error
        assert error.count("\n") == 1

    def test_progress_on_a_terminal(self, tmp_path, monkeypatch, capsys):
        """What is drawn: accuracy, loss, T, epochs done and the time left."""
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "140")
        assert self.run("--epochs", "3", "--label-noise", "0.5", "--out", str(tmp_path), "--tensorboard") == 0
        drawn = capsys.readouterr().out
        for part in ("accuracy", "loss", " T ", "/3", "epochs", "00:0"):
            assert part in drawn
        assert (tmp_path / "tensorboard").is_dir()

    def test_interrupt(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr("gtracer.lab.training.callbacks.ProgressBar", lambda *_: StoppingBar())
        assert self.run("--epochs", "3", "--out", str(tmp_path)) == 130
        assert f"go on with gtracer train --resume {tmp_path}" in capsys.readouterr().err

    def test_help_shows_defaults_and_an_example(self, capsys):
        with pytest.raises(SystemExit):
            self.run("--help")
        out = capsys.readouterr().out
        assert "default: 0.02" in out
        assert "example: gtracer train" in out
        assert "--label-noise" in out
