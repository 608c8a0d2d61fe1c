"""A training process that is killed, anywhere and again and again, ends where the one that never was does."""

import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch

from gtracer.lab import files
from gtracer.lab.config import Config
from gtracer.lab.training.checkpoint import NAME as CHECKPOINT
from gtracer.lab.training.run import Run
from gtracer.lab.training.trainer import train

BETWEEN, INSIDE, WRITING = range(3)
KILLS = 12
SMALL = Config(
    model="mlp-bn", width=64, label_noise=0.5, epochs=30, batch_size=128, rho=0.003, delta=0.01, device="cpu"
)


def life(config, folder, phase, steps):
    """Train on, telling in every moment what is going on, and how many steps it has begun."""
    torch.set_num_threads(1)
    update, sync = Run.update, os.fsync

    def step(*args):
        phase.value, steps.value = INSIDE, steps.value + 1
        found = update(*args)
        phase.value = BETWEEN
        return found

    def synced(*args):
        phase.value, before = WRITING, phase.value  # half of the file is there, under another name
        sync(*args)
        time.sleep(0.002)
        phase.value = before

    Run.update, files.os.fsync = step, synced
    train(config, folder, [], resume=(folder / "record.json").exists())


def killed(config, folder, wanted, after):
    """Start it, and kill it `after` some steps, as soon as it does what is wanted; whether it was still alive.

    Steps, not seconds: a quick machine would have finished the run before the last kill.
    """
    context = multiprocessing.get_context("fork")
    phase = context.Value("i", -1, lock=False)  # who is killed with a lock in his hand keeps it
    steps = context.Value("i", 0, lock=False)
    process = context.Process(target=life, args=(config, folder, phase, steps))
    process.start()
    start = time.monotonic()
    while process.is_alive() and (phase.value != wanted or steps.value < after):
        if time.monotonic() - start > 60:
            break
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL and phase.value == wanted


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("optimizer", ["sgd-tracer", "adam-tracer"])
def test_twelve_kills(tmp_path, optimizer):
    """Between steps, inside steps and while the checkpoint is written, four times each, at random moments."""
    config, threads = replace(SMALL, optimizer=optimizer), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        straight = train(config, tmp_path / "straight", [])
        choice = random.Random(0)
        plan = [BETWEEN, INSIDE, WRITING] * (KILLS // 3)
        choice.shuffle(plan)
        hits = Counter(wanted for wanted in plan if killed(config, tmp_path / "run", wanted, choice.randint(0, 12)))
        assert min(hits[wanted] for wanted in plan) >= 2  # where the machine is busy a kill may come too late
        assert train(config, tmp_path / "run", [], resume=True).curves == straight.curves
    finally:
        torch.set_num_threads(threads)
    assert not (tmp_path / "run" / CHECKPOINT).exists()
