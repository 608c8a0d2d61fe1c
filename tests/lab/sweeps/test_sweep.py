"""Sweeps: only what is missing, through the death of a worker and of the sweep itself."""

import json
import multiprocessing
import os
import resource
import signal
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gtracer import cli
from gtracer.lab import files
from gtracer.lab.errors import Interrupted, LabError
from gtracer.lab.results.record import NAME, Record
from gtracer.lab.sweeps.launchers.local import Event, Local, PipeCallback
from gtracer.lab.sweeps.study import Study, load
from gtracer.lab.sweeps.sweep import RunsFolder, run_missing, sweep
from gtracer.lab.training import checkpoint
from gtracer.lab.training.checkpoint import NAME as CHECKPOINT
from gtracer.lab.training.run import Run
from gtracer.lab.training.trainer import train
from support.commands import ended, started, until
from support.studies import QUIET, STUDY, TWO, stamps, straight, study

LONG = 1_000_000  # epochs: hours


def refuse(cells):
    """An engine that is not to be asked."""
    raise AssertionError("nothing is missing")


def is_free(folder) -> bool:
    """Whether no process is at work there."""
    try:
        with files.locked(folder, "run"):
            return True
    except LabError:
        return False


def test_only_what_is_missing_and_each_as_if_alone(tmp_path):
    sweep(study(), tmp_path / "out", TWO, QUIET)
    before = stamps(tmp_path / "out")
    assert len(before) == 4
    for config in study().configs():
        assert Record.read(tmp_path / "out" / config.identity.folder).curves == straight(config, tmp_path)

    (gone,) = (tmp_path / "out").glob("digits-sgd-seed1-*")
    (gone / NAME).unlink()
    sweep(study(), tmp_path / "out", TWO, QUIET)
    after = stamps(tmp_path / "out")
    assert {name for name in after if after[name] != before[name]} == {gone.name}


def test_some_settings_of_a_study(tmp_path, capsys):
    """The others are left for later, and the folder is still the whole study's."""
    whole = study().to_mapping() | {
        "settings": {"right": {"label_noise": 0.0}, "half wrong": {"label_noise": 0.5}},
        "seeds": 1,
    }
    path, out = tmp_path / "study.json", tmp_path / "out"
    path.write_text(json.dumps(whole))
    assert cli.main(["sweep", str(path), "--out", str(out), "--workers", "1", "--settings", "half wrong"]) == 0
    made = [Record.read(out / name).config for name in stamps(out)]
    assert len(made) == len(whole["methods"])
    assert {config.label_noise for config in made} == {0.5}
    assert load(str(out / "study.json")).settings == whole["settings"]
    assert "not run" in capsys.readouterr().out
    assert cli.main(["sweep", str(path), "--out", str(out), "--settings", "wrong"]) != 0
    assert "setting 'wrong'" in capsys.readouterr().err


def test_a_finished_run_is_found_whatever_its_folder_is_called(tmp_path):
    config = study().configs()[0]
    train(config, tmp_path / "by hand", [])
    before = stamps(tmp_path)
    run_missing([replace(config, device="cpu")], tmp_path, refuse, QUIET)
    assert stamps(tmp_path) == before


def test_a_worker_dies(tmp_path, children):
    """SIGKILL after its first epoch: the run goes on in another process, to the same numbers."""
    (config, *_) = study(epochs=30).configs()
    killed = False
    for event in TWO([(config, tmp_path / "run")]):
        if not killed:
            for child in children():
                os.kill(child.pid, signal.SIGKILL)
            killed = True
            assert not event.ended
    assert event == Event(config, ended=True)
    assert Record.read(tmp_path / "run").curves == straight(config, tmp_path)


def test_a_worker_that_always_dies_is_given_up(tmp_path, children):
    """And its neighbours are run all the same."""
    one, two = study(epochs=40).configs()[:2]
    engine, failures = Local(processes=1, retries=1), {}
    for event in engine([(one, tmp_path / "one"), (two, tmp_path / "two")]):
        if event.config == one and not event.ended:
            for child in children():
                os.kill(child.pid, signal.SIGKILL)
        if event.ended:
            failures[event.config] = event.failure
    assert failures == {one: "its process died 2 times, at last with exit code -9", two: None}
    assert Record.read(tmp_path / "two").finished


def test_the_sweep_itself_is_killed(tmp_path):
    """Its workers leave off by themselves, and the next sweep ends on the numbers of one that was left alone."""
    path = tmp_path / "study.json"
    study(epochs=25).write(tmp_path)
    with started("sweep", str(path), "--out", str(tmp_path / "out"), "--workers", "2") as process:
        until(lambda: list((tmp_path / "out").glob(f"*/{CHECKPOINT}")))
        process.kill()
        ended(process)
    runs = RunsFolder.of(tmp_path / "out")
    finished = {folder.name for record, folder in runs.records.values() if record.finished}
    before = stamps(tmp_path / "out")

    until(lambda: all(is_free(path.parent) for path in (tmp_path / "out").glob(f"*/{NAME}")))
    sweep(study(epochs=25), tmp_path / "out", TWO, QUIET)
    after = stamps(tmp_path / "out")
    assert all(after[name] == before[name] for name in finished)
    for config in study(epochs=25).configs():
        assert Record.read(tmp_path / "out" / config.identity.folder).curves == straight(config, tmp_path)


def test_workers_of_a_killed_sweep_leave_off(tmp_path):
    """In the middle of runs that would go on for hours."""
    study(epochs=LONG).write(tmp_path)
    out = tmp_path / "out"
    with started("sweep", str(tmp_path / "study.json"), "--out", str(out), "--workers", "2") as process:
        until(lambda: len(list(out.glob(f"*/{CHECKPOINT}"))) == 2)
        process.kill()
        ended(process)
    until(lambda: all(is_free(path.parent) for path in out.glob(f"*/{NAME}")))


@pytest.mark.parametrize("alive", [True, False])
def test_a_worker_looks_after_its_sweep_in_every_step(alive, monkeypatch):
    """Its epoch may take an hour: it does not wait for the end of it."""
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(is_alive=lambda: alive))
    with nullcontext() if alive else pytest.raises(SystemExit):
        PipeCallback(None).step(None, 0.0)


@pytest.mark.parametrize("to_all", [True, False], ids=["as the terminal does", "to the sweep alone"])
def test_ctrl_c(tmp_path, to_all):
    path = tmp_path / "study.json"
    study(epochs=LONG, seeds=1).write(tmp_path)
    with started("sweep", str(path), "--out", str(tmp_path / "out"), "--workers", "2") as process:
        until(lambda: len(list((tmp_path / "out").glob(f"*/{CHECKPOINT}"))) == 2)  # both are under way
        (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
        out, error = ended(process)
    assert process.returncode == 130
    assert error == "gtracer: interrupted; what was under way is saved; give the same command again to go on\n"
    assert "unfinished" in out
    for config in study(epochs=LONG, seeds=1).configs():  # what is saved goes on: tests/lab/training/test_trainer.py
        folder, run = tmp_path / "out" / config.identity.folder, Run(config)
        results = checkpoint.load(run, folder)
        assert len(results["seconds"]) == run.epoch >= Record.read(folder).epochs > 0
        assert not Record.read(folder).finished


def test_interrupt_stops_the_workers(tmp_path, children):
    def interrupted(cells):
        for event in TWO(cells):
            yield event
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="give the same command again"):
        sweep(study(epochs=300), tmp_path, interrupted, QUIET)
    assert not children()


def test_a_run_that_diverges_is_a_result(tmp_path, capsys):
    """It is recorded, not run again, and the table says so; its neighbours are not disturbed."""
    path = tmp_path / "study.json"
    mine = study(seeds=1).to_mapping()
    mine["methods"]["wild"] = {"optimizer": "sgd", "lr": 1e30}
    Study.from_mapping(mine).write(tmp_path)
    words = ["sweep", str(path), "--out", str(tmp_path / "out"), "--workers", "2"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "diverged" in out
    assert all(f"/3 runs  {name}\n" in out for name in stamps(tmp_path / "out"))
    (record,) = [r for r in RunsFolder.of(tmp_path / "out").all() if r.config.lr == 1e30]
    assert "not finite" in record.failure
    sweep(Study.from_mapping(mine), tmp_path / "out", refuse, QUIET)


class TestBadInput:
    def line(self, capsys, tmp_path, mine: dict, *words: str) -> str:
        (tmp_path / "study.json").write_text(json.dumps(mine))
        assert cli.main(["sweep", str(tmp_path / "study.json"), "--out", str(tmp_path / "out"), *words]) == 1
        error = capsys.readouterr().err
        assert error.startswith("gtracer: ")
        assert error.count("\n") == 1
        return error

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"optimizer": "sgd-trace"}, "unknown optimizer 'sgd-trace': did you mean sgd-tracer"),
            ({"task": "digit"}, "unknown task 'digit': did you mean digits?"),
            ({"curvature": "per-exemple"}, "unknown curvature 'per-exemple': did you mean per-example?"),
        ],
    )
    def test_names_are_refused_before_anything_runs(self, capsys, tmp_path, change, message):
        mine = STUDY | {"methods": {"SGD": {"optimizer": "sgd"}, "x": change}}
        assert message in self.line(capsys, tmp_path, mine)
        assert not (tmp_path / "out").exists()

    def test_a_run_that_cannot_be_made(self, capsys, tmp_path):
        mine = study(seeds=1).to_mapping()
        mine["methods"]["CIFAR"] = {"task": "cifar100", "data": str(tmp_path / "nowhere")}
        mine["methods"]["CIFAR2"] = {"task": "cifar100", "data": str(tmp_path / "nowhere"), "lr": 0.5}
        line = self.line(capsys, tmp_path, mine)
        assert "2 of 4 runs failed, the others are kept: " in line
        assert "nowhere" in line
        assert "(2 runs)" in line
        assert len([r for r in RunsFolder.of(tmp_path / "out").all() if r.finished]) == 2

    def test_a_record_cut_in_the_middle(self, capsys, tmp_path):
        mine = study(seeds=1)
        sweep(mine, tmp_path / "out", TWO, QUIET)
        path = tmp_path / "out" / mine.configs()[0].identity.folder / NAME
        half = path.read_text()[: path.stat().st_size // 2]
        path.write_text(half)
        line = self.line(capsys, tmp_path, mine.to_mapping())
        assert "1 of 2 runs failed, the others are kept" in line
        assert f"{path} is damaged" in line
        assert "remove its folder to run it anew" in line
        assert path.read_text() == half  # not ours to throw away

    def test_a_record_of_another_version(self, capsys, tmp_path):
        mine = study(seeds=1)
        sweep(mine, tmp_path / "out", TWO, QUIET)
        path = tmp_path / "out" / mine.configs()[0].identity.folder / NAME
        path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
        line = self.line(capsys, tmp_path, mine.to_mapping())
        assert f"{path} has format 2, this gtracer reads 1: use the version that wrote it" in line

    def test_two_sweeps_on_one_folder(self, capsys, tmp_path):
        with files.locked(tmp_path / "out", "sweep"):
            line = self.line(capsys, tmp_path, STUDY)
        assert f"another sweep is at work in {tmp_path / 'out'}" in line

    def test_a_run_that_ends_without_a_record(self, tmp_path):
        def forgetful(cells):
            yield from (Event(config, ended=True) for config, *_ in cells)

        with pytest.raises(LabError, match=r"cannot read .*record\.json"):
            run_missing(study().configs(), tmp_path, forgetful, QUIET)

    def test_two_runs_in_one_folder(self, tmp_path):
        with files.locked(tmp_path, "run"), pytest.raises(LabError, match="another run is at work"):
            train(study().configs()[0], tmp_path, [])

    def test_a_full_disk(self, tmp_path):
        """A limit on the size of files, between that of a record and that of a checkpoint."""
        study(seeds=1).write(tmp_path)

        def limited():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))

        words = ["sweep", str(tmp_path / "study.json"), "--out", str(tmp_path / "out")]
        with started(*words, preexec_fn=limited) as process:
            _, error = ended(process)
        assert process.returncode == 1
        assert "2 of 2 runs failed" in error
        assert "File too large" in error
        assert error.count("\n") == 1
        sweep(study(seeds=1), tmp_path / "out", TWO, QUIET)  # room was made
        assert all(r.finished for r in RunsFolder.of(tmp_path / "out").all())

    def test_a_read_only_folder(self, capsys, tmp_path, monkeypatch):
        def refused(*_, **__):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(files.Path, "mkdir", refused)
        Study.from_mapping(STUDY)
        with pytest.raises(LabError, match="Permission denied"):
            sweep(study(), tmp_path / "out", TWO, QUIET)

    def test_a_bug_in_a_run_does_not_take_the_others_with_it(self, tmp_path):
        """An exception that is no LabError, here of a model that is somebody else's."""
        one, two = study().configs()[:2]
        one = replace(one, model="support.networks:unfinished")
        ends = {
            event.config: event.failure for event in TWO([(one, tmp_path / "1"), (two, tmp_path / "2")]) if event.ended
        }
        assert ends[two] is None
        assert ends[one].startswith("TypeError: this model is not finished")
        assert "gtracer train --resume" in ends[one]
