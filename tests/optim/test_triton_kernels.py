"""A step in two kernels (`implementation="fused"`) against the step in many, in float64.

Where there is no GPU, Triton's interpreter runs them.
"""

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer import (
    AdamTracer,
    AdamWTracer,
    Clip,
    FiniteDifference,
    NonFiniteError,
    RhoScheduler,
    SGDTracer,
    linear_warmup,
)
from gtracer.experimental import PartialBatch, PreviousStep, loss_gradient
from gtracer.optim import kernels
from support.places import SUPPORT
from support.problems import relative_error

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore")  # numpy's, in the interpreter
from gtracer.optim import triton_kernels  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FUSED = {"implementation": "fused"}
STEPS = 4  # the interpreter is slow; with an interval of three there are two penalties
MOMENTUM = {"cls": SGDTracer, "momentum": 0.9}


@pytest.fixture(autouse=True)
def finished(monkeypatch):
    """How often a step was finished so, and nothing is compiled."""
    calls, finish = [], kernels.TwoKernels.finish
    monkeypatch.setattr(kernels.TwoKernels, "finish", lambda self: calls.append(not self.ahead) or finish(self))
    monkeypatch.setattr(triton_kernels, "BLOCK", 32)  # the first layer is two blocks
    if DEVICE == "cpu":
        monkeypatch.setattr(kernels, "readable", readable)
    return calls


def readable(*lists):
    return all(t.dtype in kernels.READ and t.is_contiguous() for part in lists for t in part)


def trained(
    cls=AdamWTracer, *, steps=STEPS, dtype=torch.float64, scheduled=False, groups=False, words=None, kept=None, **own
):
    """Weights, statistics and state after some steps, and what each step says of itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    x, y = torch.randn(steps, 16, 5), torch.randint(3, (steps, 16))
    x[..., 0] = 0  # weights that never have a gradient
    model, x, y = model.to(DEVICE, dtype), x.to(DEVICE, dtype), y.to(DEVICE)
    model[0].bias.requires_grad_(False)  # before batch norm it has no gradient but rounding
    params = [p for p in model.parameters() if p.requires_grad]
    if groups:
        params = [{"params": params[:2]}, {"params": params[2:], "rho": 0.1, "weight_decay": 0.1}]
    rate = torch.tensor(0.01, dtype=dtype, device=DEVICE) if scheduled else 0.01
    options = {"rho": 0.02, "delta": 0.05} | ({} if cls is SGDTracer else {"capturable": True})
    opt = cls(params, rate, model=model, **(options | own))
    schedules = [torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=6), RhoScheduler(opt, linear_warmup(6))]
    stats = []
    for i in range(steps):
        opt.step(lambda x, y: cross_entropy(model(x), y), x[i], y[i], **(words or {}))
        stats.append(list(opt.stats.as_dict().values()))
        for schedule in schedules if scheduled else ():
            schedule.step()
    if kept is not None:
        kept.append(opt)
    state = [opt.state[p][name] for p in opt.state for name in sorted(opt.state[p])]
    return [t.double().cpu() for t in [*model.state_dict().values(), *state]], torch.tensor(stats)


CASES = {
    "as it is": {},
    "schedules": {"scheduled": True},
    "two groups": {"groups": True},
    "a number f₀": {"f0": 0.5},
    "no damping": {"delta": 0.0, "f0": 0.5},
    "every third step": {"interval": 3},
    "every third step, reused": {"interval": 3, "reuse": 0.5},
    "clipped": {"clip": Clip(norm=0.3)},
    "clipped, two groups": {"clip": Clip(norm=0.3), "groups": True},
    "clipped, every third step, reused": {"clip": Clip(norm=0.3), "interval": 3, "reuse": 0.5},
    "clipped where it is longer": {"clip": Clip(norm=0.5)},
}
ADAM = {"Adam": {"cls": AdamTracer}, "no memory": {"betas": (0.0, 0.5)}, "loss": {"average": loss_gradient}}
ADAM["loss, clipped"] = {"average": loss_gradient, "clip": Clip(norm=0.3)}
ADAM["loss, every third step, reused"] = {"average": loss_gradient, "interval": 3, "reuse": 0.5}
SGD = {
    "no momentum": {"cls": SGDTracer},
    "weight decay": {**MOMENTUM, "weight_decay": 0.1},
    "Nesterov": {**MOMENTUM, "nesterov": True, "weight_decay": 0.1},
    "dampening of no momentum": {"cls": SGDTracer, "dampening": 0.5},
    "β": {**MOMENTUM, "beta": 0.6},
}
EVERY = CASES | ADAM | {f"SGD, {name}": {**MOMENTUM, **own} for name, own in CASES.items()} | SGD


@pytest.mark.parametrize("name", EVERY)
def test_the_same_step(name, finished):
    found, stats = trained(**EVERY[name], dtype=torch.float32, **FUSED)
    due = [i % EVERY[name].get("interval", 1) == 0 for i in range(STEPS)]
    assert finished == [not d for d in due]
    expected, expected_stats = trained(**EVERY[name])
    assert relative_error(found, expected) < 2e-5
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(stats, expected_stats, rtol=1e-4, atol=1e-5, equal_nan=True)


OTHERS = {
    "clipping of the loss": ({"clip": Clip(norm=0.3, of="loss")}, "clipping by the norm of the total"),
    "clipping by value": ({"clip": Clip(value=0.1)}, "clipping by the norm of the total"),
    "both": ({"clip": Clip(norm=0.3, value=0.1)}, "clipping by the norm of the total"),
    "scale-free": ({"scale_free": True}, "scale_free"),
    "each": ({"words": {"penalty": "each"}, "steps": 1}, "penalty='each'"),
    "coupled decay": ({"cls": AdamTracer, "weight_decay": 0.1}, "weight decay"),
    "maximize": ({"maximize": True}, "maximize"),
    "float64": ({"dtype": torch.float64}, "float32 weights"),
    "ρ = 0": ({"rho": 0.0}, "ρ = 0"),
    "dampening": ({**MOMENTUM, "dampening": 0.1}, "dampening"),
    "SGD, maximize": ({**MOMENTUM, "maximize": True}, "maximize"),
    "exact": ({**MOMENTUM, "engine": "exact"}, "curvature or engine"),
    "central": ({**MOMENTUM, "engine": FiniteDifference(central=True)}, "central"),
    "share": ({**MOMENTUM, "engine": PartialBatch(0.5)}, "experimental"),
    "previous": ({**MOMENTUM, "reuse": PreviousStep()}, "PreviousStep"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_steps_are_made_as_ever(name, finished, monkeypatch):
    """And the optimiser says why; asked for the kernels alone, it refuses."""
    own, reason = OTHERS[name]
    monkeypatch.setattr("gtracer.optim.optimizer.FUSED_ON", {"cuda", "cpu"})
    found, _ = trained(**{"dtype": torch.float32, "kept": (kept := [])} | own)
    assert not finished
    assert reason in kept[0].implementation_used
    assert kept[0].implementation_used.startswith("foreach, not fused: ")
    assert relative_error(found, trained(**{"dtype": torch.float64} | own)[0]) < 1e-4
    if name != "ρ = 0":  # which the base optimiser makes whoever is asked
        with pytest.raises((ValueError, RuntimeError), match="implementation = 'fused' cannot") as refusal:
            trained(**{"dtype": torch.float32} | FUSED | own)
        assert reason in str(refusal.value)


@pytest.mark.parametrize("cls", [AdamWTracer, SGDTracer])
def test_it_is_what_auto_takes(cls, finished, monkeypatch):
    monkeypatch.setattr("gtracer.optim.optimizer.FUSED_ON", {"cuda", "cpu"})
    _, stats = trained(cls, dtype=torch.float32, kept=(kept := []))
    assert len(finished) == STEPS
    assert kept[0].implementation_used == "fused"
    assert torch.equal(stats, trained(cls, dtype=torch.float32, **FUSED)[1])


@pytest.mark.parametrize("cls", [AdamWTracer, SGDTracer])
@pytest.mark.parametrize("own", [{}, {"interval": 3, "reuse": 0.5}, {"clip": Clip(norm=0.3)}], ids=str)
def test_looking_changes_nothing(cls, own):
    """`nonfinite` decides what is done about a bad number, and there is none."""
    (found, _), (ignoring, _) = (
        trained(cls, dtype=torch.float32, **FUSED, **own, nonfinite=nonfinite) for nonfinite in ("raise", "ignore")
    )
    assert all(map(torch.equal, found, ignoring))


@pytest.mark.parametrize("cls", [AdamWTracer, SGDTracer])
@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
@pytest.mark.parametrize("bad", [1, 2])
@pytest.mark.parametrize("first", [True, False])
def test_what_is_no_number_is_found_on_the_device(cls, nonfinite, bad, first, finished, monkeypatch):
    """In either pass, in the first step and later; the weights come back to within a rounding, all else to the bit."""
    monkeypatch.setattr(kernels.TwoKernels, "found_early", lambda self, healthy: self.is_new)  # as on a GPU
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).to(DEVICE)
    own = {} if cls is SGDTracer else {"capturable": True}
    opt = cls(model.parameters(), 0.01, rho=0.02, delta=0.05, model=model, nonfinite=nonfinite, **FUSED, **own)
    x = torch.randn(6, 5, device=DEVICE)
    passes = []

    def closure(spoilt):
        passes.append(1)
        return model(x).square().mean() * (torch.nan if spoilt and len(passes) == bad else 1.0)

    if not first:
        opt.step(closure, False)
    before = [t.clone() for t in model.state_dict().values()]
    state = {(p, k): v.clone() for p, s in opt.state.items() for k, v in s.items()}
    passes.clear()
    told_late = nonfinite == "raise" and not first
    with pytest.raises(NonFiniteError) if nonfinite == "raise" and first else nullcontext():
        opt.step(closure, True)
    for now, then in zip(model.state_dict().values(), before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0 if bad == 1 else 1e-7)
    assert {(p, k) for p, s in opt.state.items() for k in s} == set(state)
    assert all(torch.equal(opt.state[p][k], v) for (p, k), v in state.items())
    with pytest.raises(NonFiniteError, match="in the last step") if told_late else nullcontext():
        opt.step(closure, False)
    made = 0 if first else 1
    if told_late:
        assert opt.param_groups[0]["gtracer_step"] == made
        opt.step(closure, False)
    assert opt.param_groups[0]["gtracer_step"] == made + 1  # what was not made is not counted
    assert not torch.allclose(model[0].weight, before[0], rtol=1e-5)
    assert torch.isfinite(model[0].weight).all()


def test_the_last_step_is_told_of_after_the_first_pass(monkeypatch):
    """Where its verdict is still on its way when the next step begins: the device has that pass to do meanwhile."""

    class OnItsWay:
        is_there = is_healthy = False

    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(DEVICE)
    opt, passes = SGDTracer(model.parameters(), 0.1, rho=0.01, model=model, **FUSED), []

    def closure():
        passes.append(1)
        return model(torch.ones(4, 3, device=DEVICE)).square().mean()

    opt.step(closure)
    weights, state = model.weight.clone(), opt.state[model.weight]["f"].clone()
    opt._fusion.verdicts = [OnItsWay()]
    passes.clear()
    with pytest.raises(NonFiniteError, match="in the last step"):
        opt.step(closure)
    assert len(passes) == 1
    assert torch.equal(model.weight, weights)
    assert torch.equal(opt.state[model.weight]["f"], state)
    assert opt.steps == 0  # the one that was not made is not counted


@pytest.mark.parametrize("cls", [AdamWTracer, SGDTracer])
def test_addresses_that_come_as_arguments(cls, finished, monkeypatch):
    """As in a capture; one is made, on a GPU, in test_training_on_gpu.py."""
    expected, _ = trained(cls, dtype=torch.float32, **FUSED)
    tables = []
    monkeypatch.setattr(
        triton_kernels, "as_arguments", lambda *a, made=triton_kernels.as_arguments: tables.append(a) or made(*a)
    )
    monkeypatch.setattr(triton_kernels, "is_capturing", lambda: True)
    found, _ = trained(cls, dtype=torch.float32, **FUSED)
    assert len(finished) == 2 * STEPS
    assert len(tables) == 2 * STEPS  # two a step
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("cls", [AdamWTracer, SGDTracer])
@pytest.mark.parametrize("failing", [2, 4])
def test_a_second_pass_that_fails_is_undone(finished, failing, cls):
    """In the first step and later."""
    model = nn.Linear(5, 3, device=DEVICE)
    opt = cls(model.parameters(), 0.01, rho=0.02, delta=0.05, **FUSED)
    x, calls = torch.randn(4, 5, device=DEVICE), []

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
    torch.testing.assert_close(model.weight.detach(), before, rtol=1e-6, atol=1e-7)
    assert bool(opt.state) == (failing == 4)
    opt.step(closure)
    assert len(finished) == failing // 2
    assert not torch.allclose(model.weight, before, rtol=1e-4)


def test_momentum_that_is_switched_on_later(finished):
    def found(dtype, **own):
        torch.manual_seed(0)
        w = nn.Parameter(torch.randn(6, 7).to(DEVICE, dtype))
        opt = SGDTracer([w], 0.01, rho=0.02, delta=0.05, **own)
        for _ in range(5):
            opt.step(lambda: w.pow(4).sum())
            opt.param_groups[0]["momentum"] = 0.9
        return w.detach().double()

    torch.testing.assert_close(found(torch.float32, **FUSED), found(torch.float64), rtol=1e-4, atol=1e-5)
    assert len(finished) == 5


@pytest.mark.parametrize("cls", [AdamWTracer, SGDTracer])
def test_what_is_no_number_displaces_nothing(finished, cls):
    model = nn.Linear(5, 3, device=DEVICE)
    opt = cls(model.parameters(), 0.01, rho=0.003, nonfinite="ignore", **FUSED)
    seen = []

    def closure(x):
        seen.append(torch.isfinite(model.weight).all().item())
        return model(x).square().mean()

    opt.step(closure, torch.ones(2, 5, device=DEVICE))
    opt.step(closure, torch.full((2, 5), torch.inf, device=DEVICE))
    assert all(seen)
    assert len(finished) == 2


@pytest.mark.parametrize("cls", [AdamWTracer, SGDTracer])
def test_tensors_at_odd_addresses_and_gradients_that_lie_otherwise(finished, cls):
    def found(odd):
        torch.manual_seed(0)
        start = torch.randn(6, 7, device=DEVICE)
        memory = torch.zeros(43, device=DEVICE)
        w = nn.Parameter(memory[1:].view(6, 7) if odd else memory[:42].view(6, 7))
        w.data.copy_(start)
        opt, passes = cls([w], 0.01, rho=0.02, delta=0.05, **FUSED), []

        def closure():
            passes.append(1)
            loss = w.pow(4).sum()
            loss.backward()
            if odd and len(passes) % 2 == 0:  # column by column, after the displaced pass
                w.grad = w.grad.T.contiguous().T
            return loss

        for _ in range(3):
            opt.step(closure)
        return w.detach().clone()

    torch.testing.assert_close(found(odd=True), found(odd=False))
    assert len(finished) == 6


@pytest.mark.skipif(DEVICE == "cuda", reason="of tensors on a CPU")
def test_on_a_cpu_nothing_is_launched(monkeypatch):
    monkeypatch.undo()
    w = torch.zeros(3)
    assert not kernels.readable([w], [w])


@pytest.mark.skipif(DEVICE == "cuda", reason="there they are compiled to be run")
def test_the_kernels_compile_for_a_gpu_and_read_four_numbers_at_a_time():
    """Where tensors lie at addresses that allow it; no GPU is needed for that."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SUPPORT / "kernels_for_a_gpu.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    # A thread has 16 numbers of each tensor: g and v; p too; g and the second pass's; all of these, momentum, last ρ∇T.
    lists = {"reach": 2, "displace": 3, "total": 2, "finish": 6}
    # Of weights in bfloat16, eight at a time: their rest too; without masters averages and momenta likewise.
    narrow = {"reach": (6, 4), "displace": (8, 6), "total": (4, 4), "finish": (20, 14)}
    expected = []
    for name, count in lists.items():
        expected += [f"{name} adam True {4 * count}", f"{name} sgd True {4 * count}", f"{name} adam False 0"]
        expected += [f"{name} masters {narrow[name][0]}", f"{name} low {narrow[name][1]}"]
    assert done.stdout.splitlines() == expected


def kinds(line):
    """Of a launch: the kernel and its flags as they are, of numbers whether they are whole."""
    name, *given = line.split()
    return name, [x if x in ("True", "False") or x.startswith("torch") else "." in x for x in given]


@pytest.mark.skipif(DEVICE == "cuda", reason="there they are launched")
def test_a_kernel_is_launched_as_triton_did_it_the_first_time():
    """Compiled once, whatever its numbers are. A driver that launches nothing notes what it is handed."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SUPPORT / "launches_for_a_gpu.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    compiled, *launches = done.stdout.splitlines()
    names = ["reach_kernel", "displace_kernel", "total_kernel", "finish_kernel"]
    assert compiled.split() == 2 * names
    first, again, others, wide = (launches[i : i + 4] for i in range(0, 16, 4))
    assert first == again
    assert list(map(kinds, first)) == list(map(kinds, others))
    assert wide == [line.replace("float32", "float64") for line in first]
    assert [line.split()[0] for line in first] == names


def lying_otherwise(x):
    return x.T.contiguous().T


CHANGES = {  # of the optimiser, a weight and one that it has not; and whether the kernels make the next step
    "weights elsewhere": (lambda opt, w, v: setattr(w, "data", w.data.clone()), True),
    "weights that lie otherwise": (lambda opt, w, v: setattr(w, "data", lying_otherwise(w.data)), False),
    "f elsewhere": (lambda opt, w, v: opt.state[w].update(f=opt.state[w]["f"].clone()), True),
    "f that lies otherwise": (lambda opt, w, v: opt.state[w].update(f=lying_otherwise(opt.state[w]["f"])), False),
    "the same f, lying otherwise": (
        lambda opt, w, v: setattr(opt.state[w]["f"], "data", lying_otherwise(opt.state[w]["f"].data)),
        False,
    ),
    "f at the same address, lying otherwise": (
        lambda opt, w, v: opt.state[w].update(f=opt.state[w]["f"].as_strided((6, 7), (1, 6))),
        False,
    ),
    "no momentum": (lambda opt, w, v: opt.state[w].pop("momentum_buffer"), True),
    "a group more": (lambda opt, w, v: opt.add_param_group({"params": [v]}), True),
    "a checkpoint": (lambda opt, w, v: opt.load_state_dict(opt.state_dict()), True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_looked_at_before_has_changed(name, finished, monkeypatch):
    """While nothing has, weights and state are known, and not looked at again in each step."""
    change, is_fused = CHANGES[name]
    monkeypatch.setattr("gtracer.optim.optimizer.FUSED_ON", {"cuda", "cpu"})
    looked, note = [], kernels.Seen.note
    monkeypatch.setattr(kernels.Seen, "note", lambda self, *given: looked.append(1) or note(self, *given))

    def found(**own):
        torch.manual_seed(0)
        w, v = (nn.Parameter(torch.randn(6, 7, device=DEVICE)) for _ in range(2))
        opt = SGDTracer([w], 0.01, momentum=0.9, rho=0.02, delta=0.05, **own)
        held = []
        for step in range(6):
            if step == 4:
                change(opt, w, v)
            if opt.implementation == "auto":
                # In the first step the state is not there yet, in the second it is.
                assert (len(finished), len(looked)) == ((step, 1) if 0 < step <= 4 else (len(finished), len(looked)))
            held.append(torch.zeros(100 * step, device=DEVICE))  # gradients come to lie elsewhere
            opt.zero_grad(set_to_none=True)
            opt.step(lambda: (w * v).pow(2).sum() + w.pow(4).sum())
        return w.detach().clone(), v.detach().clone()

    for one, other in zip(found(), found(implementation="foreach"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert len(finished) == (6 if is_fused else 4)


@pytest.mark.parametrize("cls", [AdamWTracer, SGDTracer])
@pytest.mark.parametrize("clip", [None, Clip(norm=0.3)], ids=["plain", "clipped"])
@pytest.mark.parametrize("rho", [50.0, 0.02])
def test_the_cap_of_a_rho_that_sets_itself(cls, clip, rho, finished):
    """‖ρ∇T‖ is cut off at twice ‖∇L‖, before clipping, as in many kernels; and ρ then moves alike."""
    found = []
    for implementation in ("fused", "foreach"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(DEVICE)
        x, y = torch.randn(16, 5, device=DEVICE), (torch.arange(16) % 3).to(DEVICE)
        opt = cls(model.parameters(), 0.01, model=model, clip=clip, implementation=implementation, steps_per_epoch=5)
        ratios = []
        for _ in range(12):
            opt.param_groups[0]["rho"] = rho
            opt.step(lambda x, y, model=model: cross_entropy(model(x), y), x, y)
            ratios.append(opt.stats.penalty_ratio)
        assert (max(ratios) == pytest.approx(2.0, rel=1e-3)) == (rho == 50.0)
        found.append([p.detach() for p in model.parameters()] + [opt.state[next(model.parameters())]["rho_evidence"]])
    assert len(finished) == 12
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("cls", [AdamWTracer, SGDTracer])
@pytest.mark.parametrize("clip", [None, Clip(norm=0.3)], ids=["plain", "clipped"])
@pytest.mark.parametrize("rho", [50.0, 0.02])
def test_a_rho_that_lives_on_the_device(cls, clip, rho, finished):
    """What ρ∇T is multiplied by, and cut off at twice ‖∇L‖ then, as in many kernels."""
    found = []
    for implementation in ("fused", "foreach"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(DEVICE)
        x, y = torch.randn(16, 5, device=DEVICE), (torch.arange(16) % 3).to(DEVICE)
        own = {"model": model, "clip": clip, "implementation": implementation, "steps_per_epoch": 1000}
        opt = cls(model.parameters(), 0.01, **own)
        opt.controller = replace(opt.controller, start=rho, wait=2, rise=16)
        opt.prepare_capture()
        ratios = []
        for _ in range(12):
            opt.step(lambda x, y, model=model: cross_entropy(model(x), y), x, y)
            ratios.append(opt.stats.penalty_ratio)
        assert ratios[:3] == [0, 0, 0]
        assert (max(ratios) == pytest.approx(2.0, rel=1e-3)) == (rho == 50.0)
        assert opt.stats.rho == pytest.approx(rho * 9 / 16)
        found.append([p.detach() for p in model.parameters()] + [torch.tensor(ratios)])
    assert len(finished) == 12
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-5)
