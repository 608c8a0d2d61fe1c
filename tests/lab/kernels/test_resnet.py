"""The fused kernels against torch's, run by Triton's interpreter where there is no GPU."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from gtracer.lab.config import Config
from gtracer.lab.errors import LabError
from gtracer.lab.kernels.resnet import Fused
from gtracer.lab.models import network
from gtracer.lab.results.record import Record
from gtracer.lab.sweeps.launchers.cuda_graphs import CudaGraphs
from gtracer.lab.training.trainer import train
from support.datasets import cifar_pickle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton")
needs_gpu = pytest.mark.skipif(
    DEVICE == "cpu", reason="needs a CUDA device: the interpreter knows no bfloat16, and is slow"
)


def pair(depth=8, size=8):
    """A network whose norms are not the identity that they start as, and its like."""
    torch.manual_seed(0)
    theirs = network(f"resnet{depth}", (3, size, size), 10)
    for module in theirs.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.weight, 1, 0.3)
            torch.nn.init.normal_(module.bias, 0, 0.3)
    return deepcopy(theirs).to(DEVICE), theirs.to(DEVICE)


def batch(n, size):
    return torch.randn(n, 3, size, size, device=DEVICE), torch.randint(10, (n,), device=DEVICE)


@pytest.mark.parametrize(("n", "depth", "size"), [(5, 8, 8), (2, 14, 12)])
def test_loss_gradients_and_statistics_are_torchs(n, depth, size):
    """Also where a tile is not full."""
    ours, theirs = pair(depth, size)
    fused = Fused(ours, torch.float32)
    (x, y), exact = batch(n, size), deepcopy(theirs).double()
    losses = [cross_entropy(f(inputs), y) for f, inputs in ((fused, x), (theirs, x), (exact, x.double()))]
    for loss in losses:
        loss.backward()
    tolerance = 2e-5 if DEVICE == "cpu" else 0.05  # TF32 on a GPU, for both
    assert losses[0].item() == pytest.approx(losses[2].item(), rel=tolerance)
    for (name, p), t, q in zip(ours.named_parameters(), theirs.parameters(), exact.parameters(), strict=True):
        torchs = (t.grad - q.grad).norm()
        assert (p.grad - q.grad).norm() <= max(tolerance * q.grad.norm() + 1e-7, 2 * torchs), name
        assert p.grad.stride() == p.stride()
    for (name, mine), other in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(
            mine, other, rtol=max(1e-5, tolerance / 10), atol=max(1e-6, tolerance / 10), msg=name
        )
    ours.eval()
    theirs.eval()
    torch.testing.assert_close(fused(x), theirs(x), rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@needs_gpu
def test_bfloat16_is_as_near_as_torchs():
    ours, theirs = pair()
    exact = deepcopy(theirs).double()
    x, y = batch(16, 8)
    with torch.autocast(DEVICE, torch.bfloat16):
        losses = [cross_entropy(f(x).float(), y) for f in (Fused(ours, torch.bfloat16), theirs)]
    losses.append(cross_entropy(exact(x.double()), y))
    for loss in losses:
        loss.backward()
    mine, other, truth = (torch.cat([p.grad.double().flatten() for p in m.parameters()]) for m in (ours, theirs, exact))
    assert (mine - truth).norm() < 1.5 * (other - truth).norm()


def test_two_passes_before_the_way_back():
    """Each keeps what it needs."""
    ours, theirs = pair()
    fused = Fused(ours, torch.float32)
    (x, y), (x2, y2) = batch(4, 8), batch(4, 8)
    for model in (fused, theirs):
        (cross_entropy(model(x), y) + cross_entropy(model(x2), y2)).backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (p.grad - q.grad).norm() <= (1e-5 if DEVICE == "cpu" else 0.1) * q.grad.norm() + 1e-7


def test_there_is_no_second_derivative():
    ours, _ = pair()
    x, y = batch(2, 8)
    loss = cross_entropy(Fused(ours, torch.float32)(x), y)
    slopes = torch.autograd.grad(loss, list(ours.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        sum(s.square().sum() for s in slopes).backward()


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(LabError, match="NVIDIA GPU, got inputs on cpu"):
        Fused(pair()[0].cpu(), torch.float32)(torch.zeros(2, 3, 8, 8))


@pytest.mark.parametrize("name", ["resnet20-gn", "wrn-28-2"])
def test_other_networks_are_refused(name):
    with pytest.raises(LabError, match="resnet20"):
        Fused(network(name, (3, 8, 8), 10), torch.float32)


@pytest.mark.parametrize("shape", [(2, 3, 8, 4), (2, 3, 6, 6), (2, 3)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(LabError, match="square images") as refusal:
        Fused(pair()[0], torch.float32)(torch.zeros(shape))
    assert str(shape) in str(refusal.value)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize("optimizer", ["sgd", "sgd-tracer"])
def test_a_run_is_the_same_on_either_kernels(tmp_path, optimizer):
    """Alone and in parallel."""
    cifar_pickle(tmp_path / "cifar-100-python/train", 8, "fine_labels", 100)
    cifar_pickle(tmp_path / "cifar-100-python/test", 4, "fine_labels", 100)
    config = Config(task="cifar100", data=str(tmp_path), model="resnet8", label_noise=0.5, epochs=2, lr=0.01)
    config = replace(
        config, batch_size=4, optimizer=optimizer, rho=0.001 if optimizer != "sgd" else None, device=DEVICE
    )
    plain = train(config, tmp_path / "plain", []).curves["train_loss"]
    fused = replace(config, kernels="fused")
    assert train(fused, tmp_path / "fused", []).curves["train_loss"] == pytest.approx(plain, rel=1e-2)
    assert [event.failure for event in CudaGraphs(1)([(fused, tmp_path / "parallel")]) if event.ended] == [None]
    assert Record.read(tmp_path / "parallel").curves["train_loss"] == pytest.approx(plain, rel=1e-2)
