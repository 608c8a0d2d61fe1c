"""Adam-TRACER in two kernels (`compiled=True, lean=True, nonfinite="ignore"`), against the step tensor by tensor."""

import pytest
import torch
from problems import relative_error
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer import AdamTracer, AdamWTracer, Clip, RhoScheduler, linear_warmup
from gtracer.optim import two_kernels

FUSED = {"compiled": True, "lean": True, "nonfinite": "ignore"}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def finished(monkeypatch):
    """How often a step was finished so; the functions as they are, not compiled."""
    calls, finish = [], two_kernels.TwoKernels.finish
    monkeypatch.setattr(two_kernels.TwoKernels, "finish", lambda self: calls.append(1) or finish(self))
    monkeypatch.setattr("gtracer.optim.penalised.compiled", lambda function: function)
    return calls


def trained(cls=AdamWTracer, steps=6, scheduled=False, groups=False, words=None, delta=0.05, **own):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = torch.randn(steps, 16, 5).double(), torch.randint(3, (steps, 16))
    x[..., 0] = 0  # weights that never have a gradient
    params = list(model.parameters())
    if groups:
        params = [{"params": params[:3]}, {"params": params[3:], "rho": 0.1, "weight_decay": 0.1, "betas": (0.8, 0.9)}]
    rate = torch.tensor(0.01, dtype=torch.float64)
    opt = cls(params, rate, rho=0.02, delta=delta, model=model, **({"capturable": True} | own))
    schedules = [torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=6)]
    schedules.append(RhoScheduler(opt, linear_warmup(6)))
    stats = []
    for i in range(steps):
        opt.step(lambda x, y: cross_entropy(model(x), y), x[i], y[i], **(words or {}))
        stats.append(list(opt.stats.as_dict().values()))
        for schedule in schedules if scheduled else ():
            schedule.step()
    return [*model.state_dict().values(), *opt.state_dict()["state"][0].values()], torch.tensor(stats)


CASES = {
    "as it is": {},
    "schedules": {"scheduled": True},
    "two groups": {"groups": True},
    "a number f₀": {"f0": 0.5},
    "no damping": {"delta": 0.0, "f0": 0.5},  # gradients that are mere rounding are not divided by themselves
    "Adam": {"cls": AdamTracer},
    "every third step": {"interval": 3},
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_step(name, finished):
    found, stats = trained(**CASES[name], **FUSED)
    assert len(finished) == (2 if name == "every third step" else 6)
    expected, expected_stats = trained(**CASES[name])
    assert relative_error(found, expected) < 1e-10
    torch.testing.assert_close(stats, expected_stats, rtol=1e-6, atol=1e-8, equal_nan=True)


def test_compiled_once():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        found, _ = trained(scheduled=True, **FUSED)
    assert relative_error(found, trained(scheduled=True)[0]) < 1e-6  # Adam's count of steps is float32


@pytest.mark.parametrize(
    "own",
    [
        {"clip": Clip(norm=1.0)},
        {"scale_free": True},
        {"words": {"penalty": "each"}, "steps": 1},
        {"cls": AdamTracer, "weight_decay": 0.1},
        {"maximize": True},
        {"nonfinite": "skip"},
        {"interval": 2, "reuse": 0.5},
    ],
    ids=str,
)
def test_other_steps_are_made_as_ever(own, finished):
    found, _ = trained(**FUSED | own)
    assert not finished
    assert relative_error(found, trained(**own)[0]) < 1e-10


@pytest.mark.parametrize("failing", [2, 4])
def test_a_second_pass_that_fails_is_undone(finished, failing):
    """In the first step and later."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    opt = AdamWTracer(model.parameters(), 0.01, rho=0.02, delta=0.05, **FUSED)
    x, calls = torch.randn(4, 5).double(), []

    def closure():
        calls.append(1)
        if len(calls) == failing:
            raise KeyError
        return model(x).square().mean()

    if failing == 4:
        opt.step(closure)
    before = model.weight.detach().clone()
    with pytest.raises(KeyError):
        opt.step(closure)
    torch.testing.assert_close(model.weight.detach(), before, rtol=1e-12, atol=1e-12)
    assert bool(opt.state) == (failing == 4)
    opt.step(closure)
    assert len(finished) == failing // 2
    assert not torch.allclose(model.weight, before, rtol=1e-6)


def test_a_gradient_that_is_no_number_displaces_nothing(finished):
    model = nn.Linear(5, 3)
    opt = AdamWTracer(model.parameters(), 0.01, **FUSED)
    seen = []

    def closure(x):
        seen.append(torch.isfinite(model.weight).all().item())
        return model(x).square().mean()

    opt.step(closure, torch.ones(2, 5))
    opt.step(closure, torch.full((2, 5), torch.inf))
    assert all(seen)
    assert len(finished) == 2
