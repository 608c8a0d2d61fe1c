"""A run on two processes: the numbers of one, through an interrupt; nothing stays behind."""

import io
import multiprocessing
import os
import signal
import socket
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace

import pytest
import torch

from gtracer import cli
from gtracer.lab.config import Config
from gtracer.lab.errors import LabError
from gtracer.lab.results.record import Record
from gtracer.lab.training import checkpoint
from gtracer.lab.training.checkpoint import NAME as CHECKPOINT
from gtracer.lab.training.distributed import ProcessGroup
from gtracer.lab.training.run import Run
from gtracer.lab.training.trainer import train
from support.commands import SECONDS, ended, torchrun, until

# 1347 training examples: the last batch of an epoch has one, so the second process has none that counts.
SMALL = Config(
    model="mlp-ln",
    width=32,
    label_noise=0.5,
    epochs=3,
    batch_size=673,
    holdout=0.1,
    device="cpu",
)
TRACER = {"rho": 0.003, "delta": 0.01}


@pytest.fixture(scope="module")
def on_two():
    """A function: `gtracer …` in two processes, as torchrun starts them; what the first one prints.

    They are started once: that takes longer than what the tests want of them.
    """
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:

        def printed(*words):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            both = [pool.submit(_main, rank, port, words) for rank in range(2)]
            first, _ = (process.result(SECONDS) for process in both)
            return first

        yield printed


def _main(rank, port, words):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as error:
        code = cli.main(words)
    assert code == 0, error.getvalue()
    return out.getvalue()


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": "sgd-tracer", **TRACER},
        {"optimizer": "sam", "rho": 0.1, "holdout": 0.0},
        # With Adam's usual ε rounding alone decides the step of a weight whose gradient is next to nothing.
        {"optimizer": "adam-tracer", "lr": 1e-3, "eps": 1e-3, "difference": "central", **TRACER},
        {"optimizer": "sgd", "batch_size": 100},
    ],
    ids=lambda change: change["optimizer"],
)
def test_the_same_numbers_as_one(change, tmp_path, on_two):
    """The penalty is that of the whole batch: T, ρ∇T and all that follows agree to rounding."""
    config = replace(SMALL, **change)
    config.write(tmp_path / "c.yaml")
    alone = train(config, tmp_path / "one", [])
    out = on_two("train", "--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "two"))
    assert out.count("test accuracy") == 1
    together = Record.read(tmp_path / "two")
    assert together.finished
    assert together.curves.keys() == alone.curves.keys()
    for name, values in alone.curves.items():
        assert together.curves[name] == pytest.approx(values, rel=1e-4, abs=1e-5), name
    assert together.environment["hardware"]["processes"] == 2


def test_real_numbers_and_an_average_too(tmp_path, on_two):
    """90 training rows in batches of 89: of the last one the second process has a padding row alone."""
    table = torch.randn(127, 3, generator=torch.Generator().manual_seed(0)).double()
    lines = [f"{a:.6f},{b:.6f},{3 * a - b + 0.1 * c:.6f}" for a, b, c in table.tolist()]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,label", *lines]))
    change = {"task": str(tmp_path / "t.csv"), "label_noise": 0.0, "batch_size": 89, "loss": "huber", "ema": 0.8}
    config = replace(SMALL, **change, optimizer="sgd-tracer", **TRACER)
    config.write(tmp_path / "c.yaml")
    alone = train(config, tmp_path / "one", [])
    assert alone.resolved["examples"] == 90
    on_two("train", "--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "two"))
    together = Record.read(tmp_path / "two")
    for name, values in alone.curves.items():
        assert together.curves[name] == pytest.approx(values, rel=1e-4, abs=1e-5), name


def test_interrupted_and_resumed(tmp_path, on_two):
    """Ctrl-C reaches torchrun and both processes; all stop at the same step, and go on to the same numbers."""
    config = replace(SMALL, epochs=80, batch_size=256, width=8, **TRACER)
    config.write(tmp_path / "c.yaml")
    on_two("train", "--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "straight"))
    with torchrun("train", "--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "cut")) as cut:
        until(lambda: (tmp_path / "cut" / CHECKPOINT).exists())
        os.killpg(cut.pid, signal.SIGINT)
        _, error = ended(cut)
    assert error.count("go on with gtracer train --resume") == 1
    assert not Record.read(tmp_path / "cut").finished
    with pytest.raises(LabError, match="2 processes, not 1, wrote it"):
        checkpoint.load(Run(config), tmp_path / "cut")
    on_two("train", "--resume", str(tmp_path / "cut"))
    assert Record.read(tmp_path / "cut").curves == Record.read(tmp_path / "straight").curves


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"curvature": "per-example"}, "curvature = 'per-example' cannot be shared by several processes"),
        ({"average": "hutchinson"}, "average = 'hutchinson' cannot be shared by several processes"),
        ({"engine": "exact"}, "engine = 'exact' cannot be shared by several processes"),
    ],
)
def test_what_cannot_be_shared_is_refused(change, message):
    with pytest.raises(LabError, match=message):
        Run(replace(SMALL, **change), ProcessGroup(torch.device("cpu"), rank=0, world=2))


def test_shares_are_equal_and_every_row_counts_once():
    rows = torch.arange(100, 107)
    shares = [ProcessGroup(torch.device("cpu"), rank, 3).share(rows) for rank in range(3)]
    assert [part.tolist() for part, _ in shares] == [[100, 103, 106], [101, 104, 100], [102, 105, 100]]
    assert [counted for _, counted in shares] == [3, 2, 2]
    assert ProcessGroup(torch.device("cpu")).share(rows)[0] is rows
