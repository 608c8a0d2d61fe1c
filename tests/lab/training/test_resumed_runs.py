"""Resuming: two processes that want the same run, checkpoints that are gone, damaged or of another run."""

import json
import multiprocessing
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
import torch

from gtracer.lab import files
from gtracer.lab.config import Config
from gtracer.lab.errors import LabError
from gtracer.lab.results.record import NAME, Record
from gtracer.lab.sweeps.launchers.cuda_graphs import CudaGraphs
from gtracer.lab.sweeps.launchers.local import Job, failure_of
from gtracer.lab.training import captured, trainer
from gtracer.lab.training.checkpoint import NAME as CHECKPOINT
from gtracer.lab.training.trainer import train
from support.commands import finished

SMALL = Config(task="digits", width=8, rho=0.003, delta=0.01, epochs=4, device="cpu", batch_size=512)


class Stop:
    """Dies after so many epochs, as in a power cut: record and checkpoint are there."""

    def __init__(self, epochs):
        self.epochs = epochs

    def step(self, run, loss):
        pass

    def epoch(self, run, row):
        if run.epoch == self.epochs:
            raise RuntimeError("power cut")


def cut(config, folder, epochs=2):
    with pytest.raises(RuntimeError, match="power cut"):
        train(config, folder, [Stop(epochs)], resume=None)


def cut_in_parallel(config, folder, epochs=2):
    """Its checkpoints have random numbers of their own, and are no other launcher's."""
    with closing(CudaGraphs(1)([(config, folder)])) as events:
        assert next(event for event in events if event.epochs == epochs)


def resumed(config, folder):
    """By `gtracer train --resume`."""
    train(config, folder, [], resume=True)


def by_a_worker(config, folder):
    """By a sweep's process."""
    assert failure_of(Job(config, folder), []) is None


def in_parallel(config, folder):
    """By the launcher that makes several runs in one process."""
    (failure,) = [event.failure for event in CudaGraphs(1)([(config, folder)]) if event.ended]
    assert failure is None


WAYS = [resumed, by_a_worker, in_parallel]
CUT = {resumed: cut, by_a_worker: cut, in_parallel: cut_in_parallel}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The curves of the run that nothing happened to, by way: in parallel they differ in the last bits."""
    folder = tmp_path_factory.mktemp("straight")
    plain = train(SMALL, folder / "plain", []).curves
    in_parallel(SMALL, folder / "parallel")
    return {resumed: plain, by_a_worker: plain, in_parallel: Record.read(folder / "parallel").curves}


def holds(folder, curves, rel=1e-4):
    """Whether the record there is of one whole run, with these numbers."""
    record = Record.read(folder)
    assert (record.finished, record.epochs) == (True, SMALL.epochs)
    assert {name: len(values) for name, values in record.curves.items()} == dict.fromkeys(curves, SMALL.epochs)
    for name, values in curves.items():
        assert record.curves[name] == pytest.approx(values, rel=rel), name
    return record


@pytest.fixture
def before_the_lock(monkeypatch):
    """Have something done by another process after the folder was read, before it is locked."""

    def arrange(action):
        locked = files.locked

        @contextmanager
        def late(*words):
            monkeypatch.setattr(files, "locked", locked)
            action()
            with locked(*words):
                yield

        monkeypatch.setattr(files, "locked", late)

    return arrange


class TestTwoAtOnce:
    @pytest.mark.parametrize("way", WAYS)
    def test_one_builds_its_model_while_the_other_comes(self, way, tmp_path, monkeypatch, straight):
        """The second is refused from the moment that the first has read the record."""
        CUT[way](SMALL, tmp_path)
        module, real, refused = (captured if way is in_parallel else trainer), trainer.Run, []

        def slow(*arguments, **named):
            monkeypatch.setattr(module, "Run", real)
            with pytest.raises(LabError, match="another run is at work in") as caught:
                train(SMALL, tmp_path, [], resume=True)
            refused.append(str(caught.value))
            return real(*arguments, **named)

        monkeypatch.setattr(module, "Run", slow)
        way(SMALL, tmp_path)
        assert len(refused) == 1
        holds(tmp_path, straight[way], rel=0)

    @pytest.mark.parametrize("way", WAYS)
    def test_the_other_finishes_before_the_lock(self, way, tmp_path, before_the_lock, straight):
        """Its record is the result, to the byte: nothing is trained on top of it."""
        cut(SMALL, tmp_path)
        left = []

        def other():
            train(SMALL, tmp_path, [], resume=True)
            left.append((tmp_path / NAME).read_bytes())

        before_the_lock(other)
        way(SMALL, tmp_path)
        assert [(tmp_path / NAME).read_bytes()] == left
        holds(tmp_path, straight[resumed], rel=0)

    @pytest.mark.parametrize("way", WAYS)
    def test_the_other_comes_an_epoch_further(self, way, tmp_path, before_the_lock, straight):
        CUT[way](SMALL, tmp_path)
        before_the_lock(lambda: CUT[way](SMALL, tmp_path, epochs=3))
        way(SMALL, tmp_path)
        holds(tmp_path, straight[way], rel=0)

    @pytest.mark.parametrize("way", [by_a_worker, in_parallel])
    def test_the_other_begins_the_run_before_the_lock(self, way, tmp_path, before_the_lock, straight):
        """A sweep's process found an empty folder, and now goes on with what is there."""
        before_the_lock(lambda: CUT[way](SMALL, tmp_path))
        way(SMALL, tmp_path)
        assert holds(tmp_path, straight[way], rel=0).notes == []

    def test_two_processes(self, tmp_path, straight):
        """Both resume at the same moment, again and again: one whole run, whoever made it."""
        folders = [tmp_path / str(attempt) for attempt in range(3)]
        for folder in folders:
            cut(SMALL, folder)
        context = multiprocessing.get_context("spawn")
        start = context.Barrier(2)
        both = [context.Process(target=_resume, args=(SMALL, folders, start)) for _ in range(2)]
        for process in both:
            process.start()
        for process in both:
            process.join(120)
        assert [process.exitcode for process in both] == [0, 0]
        for folder in folders:
            holds(folder, straight[resumed], rel=0)

    def test_a_finished_run_is_read_without_a_lock(self, tmp_path):
        """Also from a folder that cannot be written."""
        train(SMALL, tmp_path, [])
        (tmp_path / files.LOCK).unlink()
        assert train(SMALL, tmp_path, []).finished
        assert not (tmp_path / files.LOCK).exists()


def _resume(config, folders, start):
    torch.set_num_threads(1)
    for folder in folders:
        start.wait(60)
        try:
            train(config, folder, [], resume=True)
        except LabError as error:
            if "another run is at work" not in str(error):
                raise


class TestWithoutCheckpoint:
    @pytest.mark.parametrize("way", WAYS)
    def test_the_run_starts_over(self, way, tmp_path, straight):
        """No epoch is counted twice, and the record says what happened."""
        cut(SMALL, tmp_path)
        (tmp_path / CHECKPOINT).unlink()
        way(SMALL, tmp_path)
        record = holds(tmp_path, straight[way], rel=0)
        assert record.notes == ["started over: there was no checkpoint of the 2 epochs made before"]

    @pytest.mark.parametrize("way", WAYS)
    def test_a_damaged_one_is_removed_as_the_message_advises(self, way, tmp_path, straight):
        cut(SMALL, tmp_path)
        whole = (tmp_path / CHECKPOINT).read_bytes()
        (tmp_path / CHECKPOINT).write_bytes(whole[:-100])
        with pytest.raises(LabError, match=rf"{CHECKPOINT} is damaged or of another run .*: remove it to start over"):
            train(SMALL, tmp_path, [], resume=True)
        assert Record.read(tmp_path).epochs == 2
        (tmp_path / CHECKPOINT).unlink()
        way(SMALL, tmp_path)
        holds(tmp_path, straight[way], rel=0)

    @pytest.mark.parametrize("way", WAYS)
    def test_a_record_that_counts_too_many_epochs(self, way, tmp_path, straight):
        """As they were left before: with an epoch counted twice, and no checkpoint or one that says the same."""
        cut(SMALL, tmp_path)
        state = torch.load(tmp_path / CHECKPOINT, weights_only=True)
        results = state["results"]
        state["results"] |= {
            "seconds": results["seconds"] + results["seconds"][-1:],
            "curves": {name: values + values[-1:] for name, values in results["curves"].items()},
        }
        torch.save(state, tmp_path / CHECKPOINT)
        record = Record.read(tmp_path)
        record.take(state["results"])
        record.write(tmp_path)
        with pytest.raises(LabError, match=r"results of 3 epochs, the model was trained for 2\): remove it to start"):
            train(SMALL, tmp_path, [], resume=True)
        (tmp_path / CHECKPOINT).unlink()
        way(SMALL, tmp_path)
        holds(tmp_path, straight[way], rel=0)

    def test_killed_before_the_first_epoch(self, tmp_path, straight):
        """Nothing was lost, so there is nothing to say."""
        Record(SMALL, {"commit": "older"}).write(tmp_path)
        resumed(SMALL, tmp_path)
        record = holds(tmp_path, straight[resumed], rel=0)
        assert record.notes == []
        assert set(record.environment) == {"commit", "versions", "hardware"}

    @pytest.mark.parametrize("way", [by_a_worker, in_parallel])
    def test_a_stray_one_is_not_taken_up_at_the_second_attempt_either(self, way, tmp_path, monkeypatch, straight):
        """Another run's, whose record is gone: this one is killed in its first epoch, and started again."""
        cut(replace(SMALL, lr=0.5), tmp_path)
        (tmp_path / NAME).unlink()

        class Killed(BaseException):
            pass

        def killed(*_):
            raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(trainer.Run, "measured", killed)
            with pytest.raises(Killed):
                train(SMALL, tmp_path, [])
        assert Record.read(tmp_path).epochs == 0
        way(SMALL, tmp_path)
        holds(tmp_path, straight[way], rel=0)

    def test_two_processes_of_one_run(self, tmp_path):
        """torchrun: both start over, and end where one that was never cut does."""
        config = replace(SMALL, model="mlp-ln", batch_size=256)
        config.write(tmp_path / "c.yaml")
        alone = train(config, tmp_path / "alone", [])
        cut(config, tmp_path / "cut")
        (tmp_path / "cut" / CHECKPOINT).unlink()
        code, _, error = finished("train", "--resume", str(tmp_path / "cut"))
        assert code == 0, error
        record = holds(tmp_path / "cut", alone.curves)
        assert record.notes == ["started over: there was no checkpoint of the 2 epochs made before"]
        assert record.environment["hardware"]["processes"] == 2  # they made all of it
        assert json.loads((tmp_path / "cut" / NAME).read_text())["finished"] is True

    def test_a_folder_that_another_has_is_refused_in_all_processes(self, tmp_path):
        """One line, and no process waits for the others for ever."""
        cut(SMALL, tmp_path)
        with files.locked(tmp_path, "run"):
            code, _, error = finished("train", "--resume", str(tmp_path))
        assert code != 0
        assert "gtracer: another run is at work in" in error
