"""What ρ learns of in a run where examples are held out."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from gtracer.lab import data
from gtracer.lab.config import Config
from gtracer.lab.results.record import Record
from gtracer.lab.sweeps.launchers.cuda_graphs import CudaGraphs
from gtracer.lab.training.run import Run
from gtracer.lab.training.trainer import train

NOISY = Config(label_noise=0.5, holdout=0.1, epochs=12, width=64, batch_size=64, seed=1, device="cpu")


def test_each_look_is_at_the_next_batch():
    """All are looked at in turn, with the labels that they have, by the model in training mode."""
    run, held_out = Run(NOISY), data.load(NOISY).holdout
    look, count = run.optimizer.held_out, len(held_out.labels)
    assert count == 135
    model = run.model.train()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    for steps, first in ((0, 0), (9, 0), (10, 64), (29, 128)):
        run.epoch, run.step = divmod(steps, run.steps_an_epoch)
        rows = order.roll(-first)[:64]
        expected = cross_entropy(model(held_out.inputs[rows]), held_out.labels[rows])
        torch.testing.assert_close(look(), expected)


def test_rho_rises_sooner_and_alone_as_in_parallel(tmp_path):
    """As CUDA graphs have it, too; without held-out examples, or with a number, there is nothing to look at."""
    plain = train(NOISY, tmp_path / "plain", [])
    assert [event.failure for event in CudaGraphs(1)([(NOISY, tmp_path / "captured")]) if event.ended] == [None]
    captured = Record.read(tmp_path / "captured")
    assert plain.curves["rho"] == pytest.approx(captured.curves["rho"], rel=0.05)
    assert max(plain.curves["rho"]) > 1e-3
    assert Run(replace(NOISY, holdout=0.0)).optimizer.held_out is None
    assert Run(replace(NOISY, rho=0.01)).optimizer.held_out is None


def test_few_examples_are_not_looked_at(tmp_path):
    """Of 27 rows one is held out: batch norm would refuse it, and what it says would be chance."""
    config = replace(NOISY, train_share=0.02, holdout=0.05, batch_size=4, label_noise=0.0, epochs=3)
    record = train(config, tmp_path, [])
    assert record.resolved["holdout_examples"] == 1
    assert len(record.curves["rho"]) == 3  # of six or seven steps each: it would have looked
    assert Run(replace(NOISY, holdout=50 / 1347)).optimizer.held_out is not None
    assert Run(replace(NOISY, holdout=40 / 1347)).optimizer.held_out is None


def test_a_run_that_is_cut_goes_on_to_the_same_numbers(tmp_path):
    whole = train(replace(NOISY, epochs=4), tmp_path / "whole", [])
    from support.runs import StopAfter

    with pytest.raises(KeyboardInterrupt):
        train(replace(NOISY, epochs=4), tmp_path / "cut", [StopAfter(30)])
    again = train(replace(NOISY, epochs=4), tmp_path / "cut", [], resume=True)
    assert again.curves == whole.curves
