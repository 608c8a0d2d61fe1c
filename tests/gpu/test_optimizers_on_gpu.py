"""On a CUDA device: the same numbers as on the CPU, and no wait for the device in a step.

Run with `pytest -m gpu`.
"""

import pytest
import torch
from torch import nn

from gtracer import AdamWTracer, FiniteDifference, SGDTracer, curvature
from gtracer.experimental import vectorised_micro_batch
from support.optimizers import MAKERS, every_optimiser
from support.problems import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.SiLU(), nn.Flatten(), nn.Linear(16, 3))


def train(maker, device, steps=5, dtype=torch.float64):
    torch.manual_seed(0)
    model = Net().to(dtype)
    x, y = torch.randn(8, 2, 4, 4, dtype=dtype), torch.randint(3, (8,))
    model, x, y = model.to(device), x.to(device), y.to(device)
    opt = maker(model.parameters(), model=model)
    for _ in range(steps):
        opt.step(lambda: nn.functional.cross_entropy(model(x), y))
    return [t.cpu() for t in model.state_dict().values()], opt


@every_optimiser
def test_same_as_on_the_cpu(maker):
    ours, opt = train(maker, "cuda")
    theirs, reference = train(maker, "cpu")
    assert relative_error(ours, theirs) < 1e-8
    for name, value in reference.stats.as_dict().items():
        assert opt.stats.as_dict()[name] == pytest.approx(value, rel=1e-6, nan_ok=True)


LEAN = {"implementation": "compiled"}
OWN = {"lean": LEAN, "scale-free": {"scale_free": True}, "both": LEAN | {"scale_free": True}}


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize("name", OWN)
def test_other_ways_are_the_same_as_on_the_cpu(name):
    def maker(params, **own):
        return SGDTracer(params, lr=0.1, momentum=0.9, rho=0.01, **own, **OWN[name])

    assert relative_error(train(maker, "cuda")[0], train(maker, "cpu")[0]) < 1e-8


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("nonfinite", ["ignore", "skip"])
@pytest.mark.parametrize("cls", [AdamWTracer, SGDTracer])
def test_a_fused_step_is_that_of_many_kernels_and_never_waits(cls, nonfinite, monkeypatch):
    """By itself, from the first step on, with nothing compiled. More cases: test_fused_step.py."""
    monkeypatch.setattr(torch, "compile", None)

    def maker(**own):
        return lambda params, **words: cls(params, lr=0.01, rho=0.01, **(words | own))

    fused = maker(nonfinite=nonfinite)
    found, opt = train(fused, "cuda", dtype=torch.float32)
    assert opt.implementation_used == "fused"
    expected, reference = train(maker(implementation="foreach"), "cuda", dtype=torch.float32)
    assert all(p.grad is None for p in opt.param_groups[0]["params"])  # so it was that step
    assert relative_error(found, expected) < 1e-3  # TF32 twice
    assert opt.stats.penalty_ratio == pytest.approx(reference.stats.penalty_ratio, rel=0.05)
    model, x = Net().cuda(), torch.randn(8, 2, 4, 4, device="cuda")
    opt = fused(model.parameters(), model=model)
    opt.step(lambda: model(x).square().mean())
    try:
        torch.cuda.set_sync_debug_mode("error")
        opt.step(lambda: model(x).square().mean())
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", MAKERS)
def test_a_step_never_waits_for_the_device(name):
    torch.manual_seed(0)
    model = Net().cuda()
    x, y = torch.randn(8, 2, 4, 4, device="cuda"), torch.randint(3, (8,), device="cuda")
    opt = MAKERS[name](model.parameters(), model=model, nonfinite="ignore")

    def closure():
        return nn.functional.cross_entropy(model(x), y)

    opt.step(closure)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            opt.step(closure)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert opt.stats.gradient_norm > 0


@every_optimiser
def test_dropout_masks_agree_between_passes(maker):
    seen = []
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 1)).cuda()
    model[1].register_forward_hook(lambda module, inputs, output: seen.append(output.detach() == 0))
    opt = maker(model.parameters())
    opt.step(lambda: model(torch.ones(3, 4, device="cuda")).square().mean())
    first = seen[0]
    assert len(seen) > 1
    assert all(torch.equal(mask, first) for mask in seen)
    seen.clear()
    opt.step(lambda: model(torch.ones(3, 4, device="cuda")).square().mean())
    assert not torch.equal(seen[0], first)


def test_parameters_on_two_devices():
    """Half of the net on the CPU: as the whole net there."""

    def split(device):
        torch.manual_seed(0)
        first, second = nn.Linear(4, 8).double(), nn.Linear(8, 2).double().to(device)
        x = torch.randn(5, 4, dtype=torch.float64)
        opt = SGDTracer([*first.parameters(), *second.parameters()], lr=0.1, momentum=0.9, rho=0.01)
        for _ in range(3):
            opt.step(lambda: second(first(x).tanh().to(device)).square().mean())
        return [p.detach().cpu() for layer in (first, second) for p in layer.parameters()]

    assert relative_error(split("cuda"), split("cpu")) < 1e-8


def test_autocast_keeps_the_penalty():
    """bfloat16 compute over float32 weights: the penalised gradient is that of float32 within bfloat16's rounding."""

    def gradient(autocast):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 3)).cuda()
        x, y = torch.randn(256, 16, device="cuda"), torch.randint(3, (256,), device="cuda")
        own = {"engine": FiniteDifference(0.5), "implementation": "foreach"}  # which leaves the gradient in .grad
        opt = SGDTracer(model.parameters(), lr=0.0, rho=0.01, delta=0.01, **own)

        def closure():
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                return nn.functional.cross_entropy(model(x).float(), y)

        opt.step(closure)
        return [p.grad.clone() for p in model.parameters()]

    assert relative_error(gradient(True), gradient(False)) < 0.1


ESTIMATORS = {
    "gradient_magnitude": {},
    "exact": {"engine": "exact"},
    "micro_batch": {"curvature": curvature.micro_batch(4)},
    "vectorised": {"curvature": vectorised_micro_batch(4)},
    "per_example": {"curvature": curvature.per_example},
    "average": {"average": curvature.per_example},
    "gauss_newton": {"curvature": curvature.gauss_newton()},
    "hutchinson": {"average": curvature.hutchinson()},
}


def small(norm):
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3, bias=False), norm, nn.SiLU(), nn.Flatten(), nn.Linear(16, 3)
    x, y = torch.randn(8, 2, 4, 4).double(), torch.randint(3, (8,))
    return nn.Sequential(*layers).double(), x, y


def steps_of(options, device, steps=4, graph_from=None):
    """The weights after some steps, of which those from `graph_from` on are replays of one captured step."""
    model, x, y = small(nn.GroupNorm(2, 4))
    model, x, y = model.to(device), x.to(device), y.to(device)
    opt = SGDTracer(model.parameters(), lr=0.1, momentum=0.9, rho=0.02, model=model, nonfinite="ignore", **options)

    def step():
        opt.step(lambda x, y: nn.functional.cross_entropy(model(x), y), x, y)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(steps if graph_from is None else graph_from):
            step()
    torch.cuda.synchronize()
    if graph_from is not None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(steps - graph_from):
            graph.replay()
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "hutchinson"])
def test_estimators_are_the_same_as_on_the_cpu(name):
    assert relative_error(steps_of(ESTIMATORS[name], "cuda"), steps_of(ESTIMATORS[name], "cpu")) < 1e-8


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "hutchinson"])
def test_a_captured_step_is_the_same_step(name):
    eager, replayed = steps_of(ESTIMATORS[name], "cuda"), steps_of(ESTIMATORS[name], "cuda", graph_from=2)
    assert relative_error(replayed, eager) < 1e-10


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize(
    ("net", "options", "reason"),
    [
        (nn.Linear(4, 3), {"nonfinite": "ignore"}, "make a step first"),
        (nn.Sequential(nn.Linear(4, 3), nn.Dropout()), {"nonfinite": "ignore"}, "draw random numbers"),
        (nn.Linear(4, 3), {"nonfinite": "ignore", "interval": 2}, "interval = 2"),
        (nn.Linear(4, 3), {}, "nonfinite = 'raise'"),
        (
            nn.Linear(4, 3),
            {"nonfinite": "ignore", "lr": torch.tensor(0.1), "implementation": "foreach"},
            "pass fused=True",
        ),
    ],
)
def test_what_cannot_be_captured_says_why(net, options, reason):
    net, x = net.cuda(), torch.randn(5, 4, device="cuda")
    opt = SGDTracer(net.parameters(), **{"lr": 0.1, "rho": 0.01} | options)
    if "first" not in reason:
        opt.step(lambda: net(x).square().mean())
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=reason), torch.cuda.graph(torch.cuda.CUDAGraph()):
        opt.step(lambda: net(x).square().mean())
    opt.step(lambda: net(x).square().mean())
