"""Several processes with runs in parallel: each run as if it were alone, through deaths and interrupts."""

import os
import signal
from dataclasses import replace

import pytest

from gtracer import cli
from gtracer.lab.results.record import Record
from gtracer.lab.sweeps.launchers.cuda_graphs import CudaGraphs, Processes
from gtracer.lab.sweeps.launchers.local import Process
from gtracer.lab.sweeps.sweep import RunsFolder
from gtracer.lab.training.checkpoint import NAME as CHECKPOINT
from support.parallel_runs import RUNS
from support.studies import study


def curves(cells):
    return [Record.read(folder).curves["train_loss"] for _, folder in cells]


def alone(cells, folder):
    mine = [(config, folder / str(index)) for index, (config, _) in enumerate(cells)]
    assert all(event.failure is None for event in CudaGraphs(1)(mine))
    return curves(mine)


def test_as_if_alone(tmp_path, monkeypatch, children):
    """Seven runs by two processes of two: each is handed the next one when one has ended, and ends by itself."""
    monkeypatch.setattr(Process, "interrupt", lambda process: pytest.fail("interrupted at its end"))
    cells = [(config, tmp_path / str(index)) for index, config in enumerate(RUNS[:7])]
    events = list(Processes(2, 3)(cells))
    assert {event.config: event.failure for event in events if event.ended} == {config: None for config, *_ in cells}
    assert [event.epochs for event in events if event.config == RUNS[0]] == [1, 2, 3, 0]
    assert not children()
    for found, expected in zip(curves(cells), alone(cells, tmp_path / "alone"), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    assert {Record.read(folder).environment["hardware"]["runs_side_by_side"] for _, folder in cells} == {4}


def test_a_process_that_dies_takes_only_its_own_runs(tmp_path, children):
    """They are told of; the other process makes the rest; given again, they go on to the same numbers."""
    cells = [(replace(RUNS[0], seed=seed, epochs=40), tmp_path / str(seed)) for seed in range(6)]
    events = Processes(2, 4)(cells)
    first = next(events)
    victim, _ = children()
    os.kill(victim.pid, signal.SIGKILL)
    ends = {event.config: event.failure for event in [first, *events] if event.ended}
    assert set(ends) == {config for config, *_ in cells}
    lost = [reason for reason in ends.values() if reason]
    assert 1 <= len(lost) <= 2
    assert all("its process died" in reason for reason in lost)
    assert all(event.failure is None for event in Processes(2, 4)(cells))
    for found, expected in zip(curves(cells), alone(cells, tmp_path / "alone"), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def test_all_of_them_die(tmp_path, children):
    cells = [(replace(RUNS[0], seed=seed, epochs=200), tmp_path / str(seed)) for seed in range(4)]
    events = Processes(2, 2)(cells)
    ends = [next(events)]
    for victim in children():
        os.kill(victim.pid, signal.SIGKILL)
    ends = {event.config: event.failure for event in [*ends, *events] if event.ended}
    assert len(ends) == 4
    assert sorted(filter(None, ends.values()))[0] == "all processes have died"


def test_closed_they_save(tmp_path, children):
    cells = [(replace(RUNS[0], seed=seed, epochs=500), tmp_path / str(seed)) for seed in range(3)]
    events = Processes(2, 4)(cells)
    seen = set()
    while len(seen) < 3:  # all are under way
        seen.add(next(events).config)
    events.close()
    assert not children()
    assert all((folder / CHECKPOINT).exists() for _, folder in cells)


def test_from_the_command_line(tmp_path):
    study().write(tmp_path)
    words = ["--engine", "cuda-graphs", "--processes", "2", "--workers", "4", "--out", str(tmp_path / "out")]
    assert cli.main(["sweep", str(tmp_path / "study.json"), *words]) == 0
    assert [record.finished for record in RunsFolder.of(tmp_path / "out").all()] == [True] * 4
