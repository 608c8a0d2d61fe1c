"""On a CUDA device: runs in parallel, as graphs on streams.

Run with `pytest -m gpu`.
"""

from dataclasses import replace

import pytest
import torch

from gtracer.lab.config import Config
from gtracer.lab.results.record import Record
from gtracer.lab.sweeps.launchers.cuda_graphs import CudaGraphs
from gtracer.lab.training.captured import Captured
from gtracer.lab.training.run import Run
from gtracer.lab.training.trainer import train
from support import encoders, films
from support.datasets import cifar_pickle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_runs_side_by_side(tmp_path, precision):
    """As graphs on streams: the numbers of each alone, and of the plain run, to what atomics and rounding leave."""
    cifar_pickle(tmp_path / "cifar-100-python/train", 330, "fine_labels", 100)
    cifar_pickle(tmp_path / "cifar-100-python/test", 100, "fine_labels", 100)
    base = Config(task="cifar100", data=str(tmp_path), model="resnet20", label_noise=0.5, epochs=4, lr=0.01)
    base = replace(base, batch_size=128, device="cuda", precision=precision, delta=0.01)
    configs = [
        replace(base, optimizer="sgd"),
        replace(base, optimizer="sam", rho=0.1, seed=1, weight_decay=5e-4),
        replace(base, optimizer="sgd-tracer", rho=0.001, seed=2),
        replace(base, optimizer="sgd-tracer", rho=0.001, interval=2, reuse=0.5, scale_free=True),
        replace(base, optimizer="sgd-tracer", rho=0.001, reuse="previous"),
    ]
    curves = {}
    for width in (5, 1):
        cells = [(config, tmp_path / str(width) / config.folder) for config in configs]
        ends = {event.config: event.failure for event in CudaGraphs(width)(cells) if event.ended}
        assert ends == dict.fromkeys(configs)
        curves[width] = [Record.read(folder).curves["train_loss"] for _, folder in cells]
    plain = [train(config, tmp_path / "plain" / config.folder, []).curves["train_loss"] for config in configs]
    tolerance = {"fp32": 2e-3, "bf16": 3e-2}[precision]
    for ours, alone, theirs in zip(curves[5], curves[1], plain, strict=True):
        assert ours == pytest.approx(alone, rel=tolerance)
        assert ours == pytest.approx(theirs, rel=tolerance)


def test_augmentation_draws_anew_in_every_replay(tmp_path):
    """And the same in a run that is started again, whoever runs beside it."""
    cifar_pickle(tmp_path / "cifar-100-python/train", 256, "fine_labels", 100)
    cifar_pickle(tmp_path / "cifar-100-python/test", 100, "fine_labels", 100)
    base = Config(task="cifar100", data=str(tmp_path), model="mlp", width=32, epochs=5, lr=0.01, batch_size=64)
    config = replace(base, optimizer="sgd", augment=True, device="cuda")
    replayed = Captured(config)
    drawn = []
    original = replayed.run.batch

    def batch(rows, width):
        inputs, labels = original(rows, width)
        drawn.append(inputs)  # the graph's own memory: what a replay leaves there
        return inputs, labels

    replayed.run.batch = batch
    sums = []
    for _ in range(3):
        for _ in replayed.rest_of_epoch():
            pass
        torch.cuda.synchronize()
        sums.append(drawn[-1].double().sum().item())
        replayed.run.step = 0
    assert len(set(sums)) == 3
    cells = [(config, tmp_path / "a"), (replace(config, seed=1), tmp_path / "b")]
    assert [event.failure for event in CudaGraphs(2)(cells) if event.ended] == [None, None]
    assert [event.failure for event in CudaGraphs(1)([(config, tmp_path / "c")]) if event.ended] == [None]
    together, alone = (Record.read(tmp_path / name).curves["train_loss"] for name in "ac")
    assert together == pytest.approx(alone, rel=1e-4)


def test_a_model_that_cannot_be_recorded_is_told_of_and_disturbs_nobody(tmp_path, monkeypatch):
    """One that waits for the device, as some of transformers' did when they copied positions to it."""
    config = Config(task="digits", model="mlp-bn", optimizer="sgd-tracer", epochs=2, batch_size=128, device="cuda")
    waits, fine = config, replace(config, seed=1)
    original = Run.update

    def update(run, inputs, labels, of):
        if run.config.seed == waits.seed:
            labels = labels + torch.zeros(1, dtype=torch.int64).to(labels.device)
        return original(run, inputs, labels, of)

    monkeypatch.setattr(Run, "update", update)
    cells = [(waits, tmp_path / "waits"), (fine, tmp_path / "fine")]
    ends = {event.config: event.failure for event in CudaGraphs(2)(cells) if event.ended}
    assert "cannot be captured as a CUDA graph" in ends[waits]
    assert "--engine local" in ends[waits]
    assert ends[fine] is None
    assert Record.read(tmp_path / "fine").finished


@pytest.mark.parametrize("kind", ["bert", "mpnet"])
def test_texts_side_by_side(tmp_path, kind):
    """With dropout, whose masks are the same in both passes and in the plain run, and widths that change."""
    pytest.importorskip("transformers")
    base = replace(films.config(tmp_path), device="cuda", epochs=6)
    base = replace(base, model=str(getattr(encoders, f"tiny_{kind}")(tmp_path / kind)))
    configs = [
        base,
        replace(base, optimizer="adamw", rho=None),
        replace(base, optimizer="adamw-sam", rho=0.05, seed=1),
        replace(base, optimizer="sgd-tracer", lr=0.05, seed=2, precision="bf16"),
    ]
    cells = [(config, tmp_path / "together" / config.folder) for config in configs]
    ends = {event.config: event.failure for event in CudaGraphs(4)(cells) if event.ended}
    assert ends == dict.fromkeys(configs)
    for config, folder, *_ in cells:
        plain = train(config, tmp_path / "plain" / config.folder, [])
        found = Record.read(folder).curves
        tolerance = 2e-2 if config.precision == "bf16" else 2e-3
        assert found["train_loss"] == pytest.approx(plain.curves["train_loss"], rel=tolerance)
        if "penalty_ratio" in found:  # other masks would make it larger by a quarter at the least
            assert found["penalty_ratio"] == pytest.approx(plain.curves["penalty_ratio"], rel=0.1)


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kernels", ["compiled", "fused"])
@pytest.mark.parametrize("kind", ["bert", "mpnet"])
def test_compiled_texts_side_by_side(tmp_path, kind, kernels, dropout):
    """Without dropout torch's numbers. Masks are drawn otherwise, but the same ones in both passes.

    At so small a radius others would make the penalty five to eight times as large.
    """
    pytest.importorskip("transformers")
    base = replace(films.config(tmp_path), device="cuda", epochs=6, precision="bf16", radius=0.01)
    base = replace(base, model=str(getattr(encoders, f"tiny_{kind}")(tmp_path / kind, dropout)))
    compiled = replace(base, kernels=kernels)
    cells = [
        (config, tmp_path / config.folder)
        for config in (base, compiled, replace(compiled, optimizer="adamw-sam", clip=0.1))
    ]
    ends = {event.config: event.failure for event in CudaGraphs(3)(cells) if event.ended}
    assert ends == dict.fromkeys(config for config, *_ in cells)
    plain, found, _ = (Record.read(folder).curves for _, folder in cells)
    assert found["train_loss"] == pytest.approx(plain["train_loss"], rel=0.05 if dropout else 5e-3)
    assert found["test_loss"] == pytest.approx(plain["test_loss"], rel=0.05 if dropout else 5e-3)
    most = 3 if dropout else 1.2
    for ours, theirs in zip(found["penalty_ratio"], plain["penalty_ratio"], strict=True):
        assert 1 / most < ours / theirs < most
