"""Runs: the same numbers for the same seed, through interrupts and kills; what is refused."""

from dataclasses import replace

import pytest

from gtracer.lab.config import Config
from gtracer.lab.errors import Interrupted, LabError
from gtracer.lab.results.record import Record
from gtracer.lab.training.checkpoint import NAME as CHECKPOINT
from gtracer.lab.training.trainer import record_in, train
from support.commands import started, until
from support.datasets import cifar_pickle
from support.runs import SMALL, StopAfter


def test_same_seed_same_record(tmp_path):
    first, second = (train(SMALL, tmp_path / name, []) for name in "ab")
    assert first.curves == second.curves
    assert first.config == second.config
    assert first.environment == second.environment
    other = train(replace(SMALL, seed=1), tmp_path / "c", [])
    assert other.curves != first.curves


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": "sgd-tracer", "rho_warmup": 0.5, "warmup": 0.2},
        {"optimizer": "adam-tracer", "lr": 0.01, "rho": 0.003},
        {"optimizer": "sam", "rho": 0.5},
        {"optimizer": "sgd", "nesterov": True},
        {"optimizer": "rmsprop-tracer", "lr": 1e-3, "engine": "exact", "rho": 0.001},
    ],
    ids=lambda c: c["optimizer"],
)
@pytest.mark.parametrize("steps", [2, 6, 9])
def test_interrupted_and_resumed_is_never_interrupted(tmp_path, change, steps):
    """In mid-epoch (2, 9) and at its end (6 steps an epoch)."""
    config = replace(SMALL, **change)
    straight = train(config, tmp_path / "straight", [])
    with pytest.raises(Interrupted, match="--resume"):
        train(config, tmp_path / "cut", [StopAfter(steps)])
    assert (tmp_path / "cut" / CHECKPOINT).exists()
    assert not Record.read(tmp_path / "cut").finished
    resumed = train(config, tmp_path / "cut", [], resume=True)
    assert resumed.curves == straight.curves
    assert resumed.finished
    assert len(resumed.seconds) == config.epochs
    assert not (tmp_path / "cut" / CHECKPOINT).exists()


def test_random_numbers_go_on_too(tmp_path):
    """Augmentation draws in every step: after a resume it must go on where it was."""
    cifar_pickle(tmp_path / "cifar-100-python/train", 200, "fine_labels", 100)
    cifar_pickle(tmp_path / "cifar-100-python/test", 100, "fine_labels", 100)
    config = Config(
        task="cifar100", data=str(tmp_path), model="mlp", width=16, epochs=2, rho=1e-4, batch_size=50, augment=True
    )
    straight = train(config, tmp_path / "straight", [])
    with pytest.raises(Interrupted):
        train(config, tmp_path / "cut", [StopAfter(3)])
    assert train(config, tmp_path / "cut", [], resume=True).curves == straight.curves


def test_a_killed_run_goes_on_to_the_same_numbers(tmp_path):
    """SIGKILL as soon as there is a checkpoint, wherever that is; then resumed here."""
    config = replace(SMALL, epochs=40)
    config.write(tmp_path / "c.yaml")
    words = ["train", "--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "run")]
    with started(*words) as process:
        until(lambda: (tmp_path / "run" / CHECKPOINT).exists())
        process.kill()
    assert Record.read(tmp_path / "run").epochs < 40
    resumed = train(config, tmp_path / "run", [], resume=True)
    assert resumed.curves == train(config, tmp_path / "straight", []).curves


def test_a_stray_checkpoint_is_not_taken_up(tmp_path):
    """Its record is gone, so nobody knows whose it is: a new run starts from the beginning."""
    straight = train(SMALL, tmp_path / "straight", [])
    with pytest.raises(Interrupted):
        train(replace(SMALL, lr=0.5), tmp_path / "cut", [StopAfter(2)])
    (tmp_path / "cut" / "record.json").unlink()
    assert train(SMALL, tmp_path / "cut", []).curves == straight.curves


def test_power_failure_between_checkpoint_and_record(tmp_path):
    """The checkpoint is an epoch ahead of the record: its results count."""
    straight = train(SMALL, tmp_path / "straight", [])
    with pytest.raises(Interrupted):
        train(SMALL, tmp_path / "cut", [StopAfter(7)])
    record = Record.read(tmp_path / "cut")
    record.curves, record.seconds = {}, []
    record.write(tmp_path / "cut")
    assert train(SMALL, tmp_path / "cut", [], resume=True).curves == straight.curves


class TestBadInput:
    def test_another_run_in_the_folder(self, tmp_path):
        train(SMALL, tmp_path, [])
        with pytest.raises(LabError, match=r"another run \(lr 0\.02, not 0\.5\)"):
            train(replace(SMALL, lr=0.5), tmp_path, [])

    def test_a_run_may_go_on_with_other_kernels(self, tmp_path):
        """They are the machine's business, and the record tells of it."""
        with pytest.raises(Interrupted):
            train(SMALL, tmp_path, [StopAfter(6)])
        other = replace(SMALL, kernels="compiled")
        with pytest.raises(LabError, match="go on with gtracer train --resume"):
            train(other, tmp_path, [])
        assert record_in(tmp_path, SMALL, resume=True).notes == []
        record = record_in(tmp_path, other, resume=True)
        assert record.notes == ["kernels torch at first, compiled later"]
        assert record.config == SMALL

    def test_finished_is_not_run_again(self, tmp_path):
        before = train(SMALL, tmp_path, [])
        stamp = (tmp_path / "record.json").stat().st_mtime_ns
        assert train(SMALL, tmp_path, []).curves == before.curves
        assert (tmp_path / "record.json").stat().st_mtime_ns == stamp

    def test_unfinished_without_resume(self, tmp_path):
        with pytest.raises(Interrupted):
            train(SMALL, tmp_path, [StopAfter(1)])
        with pytest.raises(LabError, match="unfinished: go on with gtracer train --resume"):
            train(SMALL, tmp_path, [])

    def test_nothing_to_resume(self, tmp_path):
        with pytest.raises(LabError, match="nothing to resume"):
            train(SMALL, tmp_path, [], resume=True)

    @pytest.mark.parametrize("keep", [0, 100, 0.5, 0.99])
    def test_truncated_checkpoint(self, tmp_path, keep):
        with pytest.raises(Interrupted):
            train(SMALL, tmp_path, [StopAfter(1)])
        path = tmp_path / CHECKPOINT
        content = path.read_bytes()
        path.write_bytes(content[: int(keep if keep > 1 else keep * len(content))])
        with pytest.raises(LabError, match=r"checkpoint\.pt is damaged") as caught:
            train(SMALL, tmp_path, [], resume=True)
        assert "\n" not in str(caught.value)

    def test_device(self, tmp_path):
        with pytest.raises(LabError, match="device 'tpu' cannot be used here"):
            train(replace(SMALL, device="tpu"), tmp_path, [])

    def test_augmentation_of_vectors(self, tmp_path):
        with pytest.raises(LabError, match="augment = True is for images"):
            train(replace(SMALL, augment=True), tmp_path, [])

    def test_unknown_optimiser(self, tmp_path):
        with pytest.raises(LabError, match="unknown optimizer 'sgd-trace': did you mean sgd-tracer"):
            train(replace(SMALL, optimizer="sgd-trace"), tmp_path, [])

    def test_divergence(self, tmp_path):
        for optimizer in ("sgd", "sgd-tracer"):
            with pytest.raises(LabError, match="not finite in epoch 1: lower lr or rho"):
                train(replace(SMALL, lr=1e30, optimizer=optimizer, model="mlp"), tmp_path / optimizer, [])
