"""Runs in parallel in one process: each as if it were alone. On a GPU: tests/gpu/test_optimizers_on_gpu.py."""

import json
import os
import signal
import weakref
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from gtracer import cli
from gtracer.lab import data
from gtracer.lab.config import Config
from gtracer.lab.inference.trained import load
from gtracer.lab.results.record import Record
from gtracer.lab.sweeps.launchers.cuda_graphs import CudaGraphs
from gtracer.lab.sweeps.launchers.local import Job, Local
from gtracer.lab.sweeps.sweep import RunsFolder, sweep
from gtracer.lab.training.captured import Captured
from gtracer.lab.training.checkpoint import NAME as CHECKPOINT
from gtracer.lab.training.trainer import train
from gtracer.lab.training.weights import best_epoch
from support.datasets import cifar_pickle
from support.parallel_runs import RUNS, trained
from support.studies import stamps, study

QUIET = Console(quiet=True)


def test_as_if_alone(tmp_path):
    together, ends = trained(RUNS, tmp_path / "together", 4)
    alone, _ = trained(RUNS, tmp_path / "alone", 1)
    assert ends == [None] * len(RUNS)
    assert [r.curves for r in together] == [r.curves for r in alone]
    assert all(r.finished for r in together)
    assert together[0].environment["hardware"]["runs_side_by_side"] == 4
    assert "runs_side_by_side" not in alone[0].environment["hardware"]


def test_the_numbers_of_a_plain_run(tmp_path):
    """Of `gtracer train`, up to the rounding of the learning rate and of torch's fused update."""
    together, _ = trained(RUNS, tmp_path / "together", 4)
    for index, config in enumerate(RUNS):
        plain = train(config, tmp_path / f"plain-{index}", [])
        assert plain.curves.keys() == together[index].curves.keys()
        for name, values in plain.curves.items():
            assert together[index].curves[name] == pytest.approx(values, rel=1e-3, abs=2e-3, nan_ok=True), name


@pytest.mark.parametrize("engine", [CudaGraphs(2), Local(1)])
def test_a_model_and_data_of_its_own(tmp_path, engine):
    """The weights are those that the record speaks of; without being asked for, no model is left."""
    config = replace(RUNS[0], holdout=0.1)
    task = data.load(config)
    half = replace(task, train=task.train.rows(torch.arange(600)))
    jobs = [Job(config, tmp_path / "half", model=True, task=half), Job(config, tmp_path / "all")]
    assert [event.failure for event in engine(jobs) if event.ended] == [None, None]
    made = Record.read(tmp_path / "half")
    assert made.resolved["examples"] == 600
    guesses = load(tmp_path / "half", device="cpu").probabilities(task.test).argmax(1)
    accuracy = (guesses == task.test.labels).double().mean().item()
    assert accuracy == made.curves["test_accuracy"][best_epoch(made) - 1]
    assert not (tmp_path / "all" / "model.safetensors").exists()


def test_a_sweep_leaves_models_if_asked(tmp_path):
    (tmp_path / "study.json").write_text(json.dumps({"base": {"epochs": 1, "width": 8}, "methods": {"SGD": {}}}))
    words = [str(tmp_path / "study.json"), "--device", "cpu", "--engine", "cuda-graphs", "--seeds", "2"]
    assert cli.main(["sweep", *words, "--out", str(tmp_path / "runs"), "--models"]) == 0
    assert len(list((tmp_path / "runs").glob("*/model.safetensors"))) == 2


def test_random_numbers_are_its_own(tmp_path):
    """Augmentation draws in every step; neighbours that draw as well change nothing."""
    cifar_pickle(tmp_path / "cifar-100-python/train", 200, "fine_labels", 100)
    cifar_pickle(tmp_path / "cifar-100-python/test", 100, "fine_labels", 100)
    base = Config(task="cifar100", data=str(tmp_path), model="mlp", width=16, epochs=2, rho=1e-4, delta=0.01)
    configs = [replace(base, batch_size=64, augment=True, device="cpu", seed=seed) for seed in range(3)]
    together, ends = trained(configs, tmp_path / "together", 3)
    alone, _ = trained(configs, tmp_path / "alone", 1)
    assert ends == [None] * 3
    assert [r.curves for r in together] == [r.curves for r in alone]
    plain, _ = trained([replace(configs[0], augment=False)], tmp_path / "plain", 1)
    assert plain[0].curves != alone[0].curves


def test_one_that_diverges_or_fails_does_not_disturb_its_neighbours(tmp_path):
    wild, missing = replace(RUNS[0], lr=1e30), replace(RUNS[0], task="cifar100", data=str(tmp_path / "nowhere"))
    cells = [(c, tmp_path / str(i)) for i, c in enumerate([RUNS[0], wild, missing, RUNS[2]])]
    ends = {event.config: event.failure for event in CudaGraphs(4)(cells) if event.ended}
    alone, _ = trained(RUNS, tmp_path / "alone", 1)
    assert ends[RUNS[0]] is ends[RUNS[2]] is None
    assert "not finite" in ends[wild]
    assert "nowhere" in ends[missing]
    assert Record.read(tmp_path / "1").failure == ends[wild]
    assert Record.read(tmp_path / "0").curves == alone[0].curves
    assert Record.read(tmp_path / "3").curves == alone[2].curves


@pytest.mark.parametrize("room", [0, 1, 2, 3])
def test_one_that_finds_no_memory_waits_for_its_neighbours(tmp_path, room, monkeypatch):
    """There is room for so many in their second epoch. No run is asked for before one of four has ended."""
    monkeypatch.setattr("gtracer.lab.sweeps.launchers.cuda_graphs.SAVE_SECONDS", 0)
    plain, together, refused, ended = Captured.rest_of_epoch, weakref.WeakSet(), [], []

    def without_memory(self):
        together.add(self)
        if self.run.epoch == 1 and len(together) > room:
            refused.append(self.run.config)
            raise torch.OutOfMemoryError("none left")
        yield from plain(self)

    def handed():
        for index, cell in enumerate(cells):
            assert index < 4 + len(ended)
            yield cell

    alone, _ = trained(RUNS, tmp_path / "alone", 1)
    monkeypatch.setattr(Captured, "rest_of_epoch", without_memory)
    cells = [(config, tmp_path / str(index)) for index, config in enumerate(RUNS)]
    for event in CudaGraphs(4)(handed()):
        ended += [event] if event.ended else []
    assert sorted(map(str, (event.config for event in ended))) == sorted(map(str, RUNS))
    if not room:  # alone there is nobody to wait for
        assert all(event.failure.startswith("OutOfMemoryError: none left") for event in ended)
        return
    assert [event.failure for event in ended] == [None] * len(RUNS)
    assert len(refused) == 4 - room  # whoever waits does not ask again
    assert [Record.read(folder).curves for _, folder in cells] == [record.curves for record in alone]


@pytest.mark.parametrize("turns", [3, 9, 14])
def test_cut_and_resumed(tmp_path, turns, monkeypatch):
    """In mid-epoch too: closed after so many turns, the runs save; started again, they end on the same numbers."""
    monkeypatch.setattr("gtracer.lab.training.captured.TURN", 2)
    configs = [replace(c, epochs=6) for c in RUNS]
    straight, _ = trained(configs, tmp_path / "straight", 4)
    cells = [(c, tmp_path / "cut" / str(i)) for i, c in enumerate(configs)]
    events = CudaGraphs(len(RUNS))(cells)
    for _ in range(turns):
        assert not next(events).ended
    events.close()
    assert all((folder / CHECKPOINT).exists() for _, folder in cells)
    assert not any(Record.read(folder).finished for _, folder in cells)
    resumed, ends = trained(configs, tmp_path / "cut", 2)
    assert ends == [None] * len(RUNS)
    assert [r.curves for r in resumed] == [r.curves for r in straight]
    assert not any((folder / CHECKPOINT).exists() for _, folder in cells)


def test_ctrl_c_comes_between_turns(tmp_path, monkeypatch):
    """Not in the middle of a step, which would be made twice: all of them save, and end on the same numbers."""
    configs = [replace(c, epochs=6) for c in RUNS[:3]]
    straight, _ = trained(configs, tmp_path / "straight", 3)
    original, steps = Captured._step, []

    def step(replayed, *shape):
        steps.append(shape)
        if len(steps) == 40:
            os.kill(os.getpid(), signal.SIGINT)
        return original(replayed, *shape)

    monkeypatch.setattr(Captured, "_step", step)
    with pytest.raises(KeyboardInterrupt):
        trained(configs, tmp_path / "cut", 3)
    assert all((tmp_path / "cut" / str(i) / CHECKPOINT).exists() for i in range(3))
    resumed, _ = trained(configs, tmp_path / "cut", 3)
    assert [r.curves for r in resumed] == [r.curves for r in straight]


def test_a_plain_run_goes_on_from_its_checkpoint(tmp_path):
    """And it from a plain run's: the checkpoint is the same thing."""
    config = replace(RUNS[2], epochs=6)
    events = CudaGraphs(1)([(config, tmp_path / "run")])
    next(events)
    events.close()
    went_on = train(config, tmp_path / "run", [], resume=True)
    straight = train(config, tmp_path / "straight", [])
    assert went_on.curves["train_loss"] == pytest.approx(straight.curves["train_loss"], rel=1e-3)


def test_as_the_engine_of_a_sweep(tmp_path):
    sweep(study(), tmp_path, CudaGraphs(3), QUIET)
    before = stamps(tmp_path)
    assert len(before) == 4
    assert all(record.finished for record in RunsFolder.of(tmp_path).all())
    sweep(study(), tmp_path, CudaGraphs(3), QUIET)
    assert stamps(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": "rmsprop-tracer"}, "optimizer 'rmsprop-tracer' counts its steps on the CPU"),
        ({"rho_warmup": 0.1}, "rho_warmup changes ρ on the CPU"),
    ],
)
def test_what_cannot_be_replayed_is_refused(change, message, tmp_path):
    (event,) = CudaGraphs(1)([(replace(RUNS[2], **change), tmp_path)])
    assert message in event.failure
    assert "use --engine local" in event.failure


def test_from_the_command_line(tmp_path, capsys):
    study(seeds=1).write(tmp_path)
    words = ["sweep", str(tmp_path / "study.json"), "--out", str(tmp_path / "out"), "--engine", "cuda-graphs"]
    assert cli.main([*words, "--workers", "2"]) == 0
    assert "TRACER" in capsys.readouterr().out
