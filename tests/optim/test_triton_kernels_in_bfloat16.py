"""The two kernels on weights in bfloat16, against the same kernels on float32 and against torch's.

Where there is no GPU, Triton's interpreter runs them.
"""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer import AdamWTracer, Clip, NonFiniteError, SGDTracer
from gtracer.optim import kernels
from gtracer.optim.masters import REST, joined, split

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore")  # numpy's, in the interpreter
from gtracer.optim import triton_kernels  # noqa: E402
from gtracer.optim.triton_kernels import Launched  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = torch.bfloat16
SIZES = [(3000,), (40, 70)]
ADAM = {"betas": (0.9, 0.99), "eps": 1e-6, "whole": True, "lr": 1e-3, "decay": 0.1}
SGD = {"betas": (0.9, 0.95), "nesterov": True, "lr": 1e-2, "decay": 0.1}
KINDS = {"adam": ADAM, "sgd": SGD}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """How often a step was finished so."""
    calls, finish = [], kernels.TwoKernels.finish
    monkeypatch.setattr(kernels.TwoKernels, "finish", lambda self: calls.append(1) or finish(self))
    if DEVICE == "cpu":
        monkeypatch.setattr(kernels, "readable", lambda *lists: all(t.is_contiguous() for x in lists for t in x))
    return calls


@pytest.fixture
def many(monkeypatch):
    """No copy is kept, as of a large net."""
    monkeypatch.setattr(triton_kernels, "FEW", 0)


def drawn(seed, scale=1.0):
    draw = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(size, generator=draw) for size in SIZES]


def rounded(xs):
    return [x.to(LOW) for x in xs]


def on_device(xs, dtype=None):
    return [x.to(DEVICE, dtype or x.dtype, copy=True) for x in xs]


def launched(kind, params, g, momenta, averages, **own):
    numbers = {"state": {}, "rho": 0.01, "delta": 0.05} | KINDS[kind] | own
    counts = [torch.tensor(3.0, device=DEVICE) for _ in params] if kind == "adam" else []
    part = Launched(params, g, momenta, averages, counts, **numbers)
    part.held = g, momenta, averages  # it knows their addresses alone
    return part


def inputs():
    """Weights as masters, both gradients in bfloat16, momenta, averages."""
    masters, g = drawn(0), rounded(drawn(1, 0.1))
    ahead = rounded([x.float() + 0.01 * y for x, y in zip(g, drawn(2), strict=True)])
    return masters, g, ahead, rounded(drawn(3, 0.1)), [x.square().to(LOW) for x in drawn(4, 0.1)]


def test_displaced_on_average_and_back_by_the_same_bits(many):
    """All but a few come back to the bit: those that the displacement takes past a power of two, or swallows."""
    masters, g, _, m, v = inputs()
    before = on_device(rounded(masters))
    before[0][:100], g[0][:50] = 0.0, 0.0
    params = [p.clone() for p in before]
    part = launched("adam", params, on_device(g), on_device(m), on_device(v), seed=5)
    reached, radius = part.reach(), 0.05
    u = [0.01 * x.float() / (y.float() / (1 - 0.99**3) + 0.05) for x, y in zip(g, v, strict=True)]
    expected = on_device([x * (radius / sum(y.square().sum() for y in u).sqrt()) for x in u])
    part.displace_(reached, radius)
    moved = torch.cat([(p.float() - b.float()).flatten() for p, b in zip(params, before, strict=True)])
    e = torch.cat([x.flatten() for x in expected])
    assert not moved[:50].any()  # no gradient, no displacement
    gap = torch.cat([b.float().abs().flatten() for b in before]) * 2**-7 + e.abs() * 2**-7
    assert ((moved - e).abs() <= gap).all()
    error, spread = (moved - e).mean(), (gap * e.abs()).sum().sqrt() / len(e)
    assert error.abs() < 4 * spread  # where to the nearest most would stay where they are
    assert (moved == 0).float().mean() > 0.3
    other = [p.clone() for p in before]
    launched("adam", other, on_device(g), on_device(m), on_device(v), seed=6).displace_(reached, radius)
    assert not all(map(torch.equal, params, other))
    part.displace_(reached, radius, back=True)
    found, start = (torch.cat([p.float().flatten() for p in xs]) for xs in (params, before))
    assert (found == start).float()[100:].mean() > 0.995
    assert ((found - start).abs() <= 2**-7 * (start.abs() + e.abs())).all()
    assert torch.equal(found[:50], start[:50])


@pytest.mark.parametrize("kind", KINDS)
def test_the_update_is_float32s(kind, many):
    """With masters: that of the kernels on float32 weights, whose gradients are these."""
    masters, g, ahead, m, v = inputs()
    state = [on_device(m, torch.float32), on_device(v, torch.float32)]
    weights, rest = zip(*map(split, masters), strict=True)
    params, rest = on_device(weights), on_device(rest)
    narrow = launched(kind, params, on_device(g), *state, rest=rest, seed=2)
    wide = launched(kind, on_device(masters), on_device(g, torch.float32), *[[x.clone() for x in xs] for xs in state])
    sums = []
    for part, dtype in ((narrow, LOW), (wide, torch.float32)):
        reached = part.reach()
        part.displace_(reached, 0.05)
        part.take(on_device(ahead, dtype), None, None)
        sums.append(part.finish_(reached, 0.05).sum(0))
    torch.testing.assert_close(*sums, rtol=1e-5, atol=0)
    found = [joined(p, r) for p, r in zip(params, rest, strict=True)]
    for one, other, start in zip(found, wide.params, on_device(masters), strict=True):
        same = (one - other).abs() <= 1e-6 * other.abs() + 1e-4 * (other - start).abs()
        assert same.float().mean() > 0.995  # the rest came back to the number beside theirs
        assert ((one - other).abs() <= 2**-7 * (other.abs() + 1e-3)).all()
        assert not torch.allclose(other, start, rtol=1e-4)
    for one, other in zip(state[1], wide.held[2], strict=True):
        torch.testing.assert_close(one, other)


def wide_averages(part):
    return part.averages


@pytest.mark.parametrize("kind", KINDS)
def test_without_masters_it_is_rounded_by_chance(kind, many):
    """Weights, momenta and averages: to a number beside float32's, and right on average."""
    masters, g, ahead, m, v = inputs()
    start = rounded(masters)
    sides = []
    for dtype in (LOW, torch.float32):
        own = [on_device(start, dtype), on_device(m, dtype), on_device(v, dtype)]
        part = launched(kind, own[0], on_device(g, dtype), *own[1:], seed=2)
        reached = part.reach()
        part.take(on_device(ahead, dtype), None, None)
        part.displace_(reached, 0.05)
        part.finish_(reached, 0.05)
        sides.append(own)
    for low, high in zip(*sides, strict=True):
        one, other = (torch.cat([x.float().flatten() for x in xs]) for xs in (low, high))
        apart, gap = one - other, 2**-7 * other.abs() + 1e-6
        assert (apart.abs() <= gap).float().mean() > 0.995
        scaled = (apart / gap)[apart.abs() <= gap]
        assert scaled.mean().abs() < 5 * scaled.std() / len(scaled) ** 0.5
        assert (one != other.to(LOW).float()).float().mean() > 0.1  # some are not rounded to the nearest


def network(width=32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3)).to(DEVICE, LOW)


def batch(i):
    draw = torch.Generator().manual_seed(i)
    return torch.randn(12, 5, generator=draw).to(DEVICE, LOW), torch.randint(3, (12,), generator=draw).to(DEVICE)


def trained(cls, steps=12, model=None, **own):
    model = network() if model is None else model
    opt = cls(model.parameters(), rho=0.01, delta=0.05, model=model, **own)
    for i in range(steps):
        opt.step(lambda x, y: cross_entropy(model(x).float(), y), *batch(i))
    return model, opt


RATES = {AdamWTracer: 1e-4, SGDTracer: 1e-2}


@pytest.mark.parametrize("clip", [None, Clip(norm=0.3)], ids=["plain", "clipped"])
@pytest.mark.parametrize("cls", RATES)
def test_they_make_the_steps_of_many_kernels(cls, clip, interpreted):
    """From float32's as far as rounding of the displacement takes both: in the masters, of which nothing is lost."""
    own = {"lr": RATES[cls], "clip": clip}
    start = torch.cat([p.detach().float().flatten() for p in network().parameters()])
    found = []
    for implementation in ("fused", "foreach"):
        model, opt = trained(cls, implementation=implementation, **own)
        found.append(torch.cat([joined(p, opt.state[p][REST]).flatten() for p in model.parameters()]) - start)
        kinds = {k: x.dtype for k, x in opt.state[model[0].weight].items() if x.dim()}
        assert kinds.pop(REST) == torch.int16
        assert set(kinds.values()) == {torch.float32}
    twin = network().float()
    opt = cls(twin.parameters(), rho=0.01, delta=0.05, model=twin, implementation="foreach", **own)
    for i in range(12):
        x, y = batch(i)
        opt.step(lambda x=x, y=y: cross_entropy(twin(x.float()), y))
    expected = torch.cat([p.detach().flatten() for p in twin.parameters()]) - start
    assert len(interpreted) == 12
    for one in found:
        assert (one - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
@pytest.mark.parametrize("cls", RATES)
def test_without_masters_small_updates_are_not_lost(cls, implementation):
    """Each is a tenth of what moves a weight to the nearest; over many weights the way is float32's."""
    rate = RATES[cls] / 10
    start = torch.cat([p.detach().float().flatten() for p in network(400).parameters()])
    found = {}
    for master_weights in (True, False):
        own = {"lr": rate, "master_weights": master_weights, "implementation": implementation}
        model, opt = trained(cls, steps=30, model=network(400), **own)
        if not master_weights:
            state = opt.state[model[0].weight]
            assert REST not in state
            assert all(x.dtype == LOW for k, x in state.items() if x.dim())
        weights = [p if not master_weights else joined(p, opt.state[p][REST]) for p in model.parameters()]
        found[master_weights] = torch.cat([w.detach().float().flatten() for w in weights]) - start
    along = found[False] @ found[True] / found[True].square().sum()
    assert along.item() == pytest.approx(1, abs=0.2)


def test_a_state_without_masters_goes_on_to_the_same_bits():
    found = []
    for saved in (False, True):
        model, opt = trained(AdamWTracer, steps=4, lr=1e-3, master_weights=False)
        if saved:
            other = AdamWTracer(model.parameters(), lr=1e-3, rho=0.01, delta=0.05, model=model, master_weights=False)
            other.load_state_dict(opt.state_dict())
            opt = other
        for i in range(4, 7):
            opt.step(lambda x, y, model=model: cross_entropy(model(x).float(), y), *batch(i))
        found.append([*model.parameters(), *(x for p in opt.state for x in opt.state[p].values() if x.dim())])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("master_weights", [True, False])
def test_a_second_pass_that_fails_is_undone(master_weights):
    model, opt = trained(AdamWTracer, steps=2, lr=1e-3, implementation="fused", master_weights=master_weights)
    before, calls = [p.detach().clone() for p in model.parameters()], []

    def closure():
        calls.append(1)
        if len(calls) == 2:
            raise KeyError
        x, y = batch(9)
        return cross_entropy(model(x).float(), y)

    with pytest.raises(KeyError):
        opt.step(closure)
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("master_weights", [True, False])
def test_what_is_no_number_changes_no_state(master_weights, monkeypatch):
    monkeypatch.setattr(kernels.TwoKernels, "found_early", lambda self, healthy: self.is_new)  # as on a GPU
    own = {"lr": 1e-3, "implementation": "fused", "master_weights": master_weights}
    model, opt = trained(AdamWTracer, steps=2, **own)
    before = [x.clone() for p in opt.state for k, x in opt.state[p].items() if k != REST]
    calls = []

    def closure(spoilt):
        calls.append(1)
        x, y = batch(9)
        return cross_entropy(model(x).float(), y) * (torch.nan if spoilt and len(calls) == 2 else 1)

    opt.step(closure, True)
    assert all(map(torch.equal, [x for p in opt.state for k, x in opt.state[p].items() if k != REST], before))
    with pytest.raises(NonFiniteError, match="in the last step"):
        opt.step(closure, False)


def test_a_reused_penalty_is_torchs():
    _, opt = trained(AdamWTracer, steps=3, lr=1e-3, interval=2, reuse=0.9)
    assert "reuse" in opt.implementation_used
