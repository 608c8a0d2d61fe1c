"""torch.compile(model): the same trajectory, and compiled once."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer import SAM, AdamWTracer, RhoScheduler, SGDTracer, linear_warmup

OPTIMIZERS = {
    "SGDTracer": lambda model, lr=0.1, **own: SGDTracer(
        model.parameters(), lr, momentum=0.9, rho=0.02, delta=0.05, model=model, **own
    ),
    "AdamWTracer": lambda model, lr=0.01, **own: AdamWTracer(
        model.parameters(), lr, rho=0.02, delta=0.05, model=model, **own
    ),
    "SAM": lambda model: SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho=0.1, model=model),
}


def trained(model, called, make, **own):
    opt = make(model, **own)
    schedules = [torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=6), RhoScheduler(opt, linear_warmup(6))]
    torch.manual_seed(1)
    x, y = torch.randn(6, 16, 5, dtype=torch.float64), torch.randint(3, (6, 16))
    for inputs, labels in zip(x, y, strict=True):
        opt.step(lambda inputs, labels: cross_entropy(called(inputs), labels), inputs, labels)
        for schedule in schedules:
            schedule.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "backend"), [("SGDTracer", "inductor"), ("AdamWTracer", "aot_eager"), ("SAM", "aot_eager")]
)
def test_a_compiled_model(name, backend):
    """With learning rate and ρ on a schedule, and batch norm's statistics put back between the passes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    twin = copy.deepcopy(model)
    expected = trained(twin, twin, OPTIMIZERS[name])
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = trained(model, torch.compile(model, backend=backend), OPTIMIZERS[name])
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    for (key, mine), theirs in zip(model.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=key)


@pytest.mark.filterwarnings("ignore")
def test_the_exact_engine_says_that_it_cannot():
    model = nn.Linear(5, 3)
    opt = SGDTracer(model.parameters(), rho=0.003, engine="exact")
    called = torch.compile(model, backend="aot_eager")
    with pytest.raises(RuntimeError, match="engine='finite-difference'"):
        opt.step(lambda: cross_entropy(called(torch.randn(4, 5)), torch.zeros(4, dtype=torch.long)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["SGDTracer", "AdamWTracer"])
def test_a_compiled_update(name):
    """With the learning rate in a tensor, and both it and ρ on a schedule: compiled in the first step, never again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    twin = copy.deepcopy(model)
    lr = {"SGDTracer": 0.1, "AdamWTracer": 0.01}[name]
    expected = trained(twin, twin, OPTIMIZERS[name], lr=lr)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = trained(
            model, model, OPTIMIZERS[name], lr=torch.tensor(lr, dtype=torch.float64), implementation="compiled"
        )
    # Adam counts its steps in float32 on the device, as torch's own does.
    torch.testing.assert_close(found, expected, rtol=1e-8 if name == "SGDTracer" else 1e-3, atol=1e-6)
    pieces = {"SGDTracer": 3, "AdamWTracer": 4}[name]  # f of SGD-TRACER is one kernel, compiled or not
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= pieces
