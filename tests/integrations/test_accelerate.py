"""A loop of Accelerate's makes the steps of a closure with micro-batches."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer import SAM, FiniteDifference, SGDTracer

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from gtracer.integrations.accelerate import Passes

pytestmark = pytest.mark.filterwarnings("ignore")
MAKERS = {
    "sgd": lambda p, **k: SGDTracer(p, lr=0.1, momentum=0.9, rho=0.05, **k),
    "central": lambda p, **k: SGDTracer(p, lr=0.1, rho=0.05, engine=FiniteDifference(central=True), **k),
    "every second": lambda p, **k: SGDTracer(p, lr=0.1, rho=0.05, interval=2, **k),
    "sam": lambda p, **k: SAM(torch.optim.SGD(p, lr=0.1), rho=0.05, **k),
}


@pytest.fixture(autouse=True)
def _alone():
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)).double()


def batches(dtype=torch.float64):
    torch.manual_seed(1)
    return list(zip(torch.randn(6, 12, 5, dtype=dtype), torch.randint(3, (6, 12)), strict=True))


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_steps_of_a_closure(make, accumulate, clip):
    steps_of_both(make, accumulate, clip, "no")


@pytest.mark.parametrize("accumulate", [1, 3])
def test_in_bfloat16(accumulate):
    steps_of_both(MAKERS["sgd"], accumulate, None, "bf16")


def steps_of_both(make, accumulate, clip, precision):
    """By Accelerate, and by hand."""
    accelerator = Accelerator(gradient_accumulation_steps=accumulate, cpu=True, mixed_precision=precision)
    low = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    dtype = torch.float32 if precision == "bf16" else torch.float64
    net, twin = network().to(dtype), network().to(dtype)
    model, optimizer = accelerator.prepare(net, make(net.parameters()))
    passes, data = Passes(accelerator, model, optimizer), batches(dtype)
    torch.manual_seed(2)
    losses = []
    for x, y in data:
        with accelerator.accumulate(model):
            losses.append(passes(lambda x, y: cross_entropy(model(x), y), x, y))
            if clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    opt = make(twin.parameters(), model=twin)
    torch.manual_seed(2)
    for i in range(0, 6, accumulate):

        def backward(parts=data[i : i + accumulate]):
            for x, y in parts:
                with low:
                    outputs = twin(x)
                (cross_entropy(outputs.to(dtype), y) / accumulate).backward()

        opt.zero_grad()
        backward()
        for _ in range(opt.second_pass_due * (1 + opt.is_central)):
            with opt.perturbed():
                backward()
        if clip:
            nn.utils.clip_grad_norm_(twin.parameters(), clip)
        opt.step()
    torch.testing.assert_close(list(net.parameters()), list(twin.parameters()))
    torch.testing.assert_close(dict(net.named_buffers()), dict(twin.named_buffers()))
    assert optimizer.optimizer.steps == 6 // accumulate
    if opt.interval == 1:  # a ρ that sets itself learns of it
        mean = torch.stack(losses[-accumulate:]).mean().item()
        assert optimizer.optimizer.stats.loss == pytest.approx(mean, rel=1e-3)


def test_another_optimiser_is_refused():
    net = network()
    with pytest.raises(ValueError, match="got SGD"):
        Passes(Accelerator(cpu=True), net, torch.optim.SGD(net.parameters()))


def test_of_each_round_of_passes_only_the_last_synchronises(monkeypatch):
    """As of the first, which Accelerate sees to: processes exchange gradients once."""
    accelerator = Accelerator(gradient_accumulation_steps=3, cpu=True)
    model = accelerator.prepare(network())
    opt = SGDTracer(model.parameters(), lr=0.1, rho=0.05)
    passes, apart, seen = Passes(accelerator, model, opt), [], []

    @contextmanager
    def no_sync(_):
        apart.append(True)
        yield
        apart.pop()

    monkeypatch.setattr(accelerator, "no_sync", no_sync)
    for x, y in batches()[:3]:
        with accelerator.accumulate(model):

            def loss_of(x=x, y=y):
                seen.append(bool(apart))
                return cross_entropy(model(x), y)

            passes(loss_of)
    assert seen == [True, True, False] * 2


def test_a_rho_that_sets_itself_learns_of_every_loss():
    """Also while ρ is 0 and there is no second pass."""
    data, found = batches(), []
    for way in ("Accelerate", "by hand"):
        accelerator = Accelerator(cpu=True)
        net = network()
        model, prepared = accelerator.prepare(net, SGDTracer(net.parameters(), lr=0.05, steps_per_epoch=len(data)))
        opt, passes = prepared.optimizer, Passes(accelerator, model, prepared)
        opt.model = net
        for _ in range(12):
            torch.manual_seed(2)
            for x, y in data:
                if way == "by hand":
                    opt.step(lambda x=x, y=y, net=net: cross_entropy(net(x), y))
                else:
                    passes(lambda x, y, net=net: cross_entropy(net(x), y), x, y)
                    prepared.step()
                    prepared.zero_grad()
        (evidence,) = (entry["rho_evidence"].clone() for entry in opt.state.values() if "rho_evidence" in entry)
        found.append(evidence)
        assert evidence[11] > 1  # epochs in a row
    torch.testing.assert_close(*found)
