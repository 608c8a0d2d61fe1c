"""What a step does besides its passes takes as many calls of torch for a deep net as for a shallow one.

On a GPU each call is a kernel to start; a small net's passes are hardly longer than a few hundred of those.
"""

from functools import cache

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gtracer import SAM, AdamTracer, SGDTracer, Tracer
from gtracer.optim.losses import LOOKED

NO_KERNEL = {"detach", "view", "reshape", "alias", "select", "split", "unbind", "empty_like", "expand", "t"}
ON_THE_CPU = {"_local_scalar_dense"}  # Adam's count of steps


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ not in NO_KERNEL | ON_THE_CPU
        return func(*args, **(kwargs or {}))


def calls_of(action):
    with Calls() as calls:
        action()
    return calls.count


def own_calls(maker, depth, passes=2, nonfinite="ignore"):
    """Of a step, less those of its passes."""
    torch.manual_seed(0)
    blocks = [(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(depth)]
    model = nn.Sequential(*(layer for block in blocks for layer in block))
    x = torch.randn(8, 4)

    def loss_of():
        return model(x).square().mean()

    opt = maker(model.parameters(), model=model, nonfinite=nonfinite)
    for _ in range(1 + LOOKED):  # in the first steps more is looked at
        opt.step(loss_of)
    alone = calls_of(lambda: torch.autograd.grad(loss_of(), list(model.parameters())))
    return calls_of(lambda: opt.step(loss_of)) - passes * alone


SGD = {"lr": 0.1, "momentum": 0.9, "foreach": True}  # on a CPU torch's default is tensor by tensor
MAKERS = {
    "sgd": (lambda p, **k: SGDTracer(p, rho=0.003, **SGD, **k), 60),
    "adam": (lambda p, **k: AdamTracer(p, lr=0.01, rho=0.003, **k), 70),
    "rmsprop": (lambda p, **k: Tracer(torch.optim.RMSprop(p, lr=0.01, foreach=True), rho=0.003, **k), 70),
    "sam": (lambda p, **k: SAM(torch.optim.SGD(p, **SGD), **k), 50),
}


@pytest.mark.parametrize("name", MAKERS)
def test_as_many_for_many_tensors_as_for_few(name):
    maker, most = MAKERS[name]
    few, many = own_calls(maker, 2), own_calls(maker, 9)
    assert few == many
    assert few <= most


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_step_in_two_kernels_needs_few_others(name, monkeypatch):
    """What they do is left out. The rest copies and restores statistics, adds up blocks, and looks at the sums."""
    pytest.importorskip("triton")
    from gtracer.optim import kernels, triton_kernels

    launched = []
    monkeypatch.setattr("gtracer.optim.optimizer.FUSED_ON", {"cpu"})
    monkeypatch.setattr(kernels, "readable", lambda *lists: True)
    monkeypatch.setattr(kernels.TwoKernels, "found_early", lambda self, healthy: self.is_new)  # as on a GPU
    monkeypatch.setattr(triton_kernels, "launch", lambda kernel, *given: launched.append(kernel.__name__))
    room = cache(torch.zeros)  # for the sums, which nobody fills here
    monkeypatch.setattr(triton_kernels.Launched, "_sums", lambda self, count: room(self._programs, count))
    maker = MAKERS[name][0]
    few, many = (own_calls(maker, depth, nonfinite="raise") for depth in (2, 9))
    assert few == many
    assert few <= {"sgd": 12, "adam": 14}[name]
    assert launched[-4:] == ["reach_kernel", "displace_kernel", "total_kernel", "finish_kernel"]


def test_a_capture_saves_no_statistics_for_a_step_that_fails(monkeypatch):
    """Nothing is computed before the replay; the second pass still puts back what it moves."""
    maker, _ = MAKERS["sgd"]
    eager = own_calls(maker, 2)
    for room in ("optimizer", "step"):
        monkeypatch.setattr(f"gtracer.optim.{room}.is_capturing", lambda: True)
    monkeypatch.setattr("gtracer.optim.refusals.check_capture", lambda opt: None)
    assert own_calls(maker, 2) == eager - 1  # one copy of floats and counts


@pytest.mark.parametrize("tracer", [True, False])
def test_a_learning_rate_that_sgd_would_read_back_is_not_captured(tracer, monkeypatch):
    """torch's own error names neither it nor the cure; on a GPU: test_gpu.py."""

    def captured(**own):
        p = nn.Parameter(torch.ones(2))
        opt = SGDTracer([p], rho=0.003, nonfinite="ignore", **own)
        if not tracer:
            opt = SAM(torch.optim.SGD([p], **own), nonfinite="ignore")
        with monkeypatch.context() as patch:
            opt.step(lambda: p.square().sum())
            patch.setattr("gtracer.optim.optimizer.is_capturing", lambda: True)
            opt.step(lambda: p.square().sum())

    captured(lr=0.1)
    captured(lr=torch.tensor(0.1), fused=True)
    with pytest.raises(RuntimeError, match="pass fused=True"):
        captured(lr=torch.tensor(0.1))
