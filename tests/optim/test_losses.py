"""A second pass over another batch is noticed; random numbers of Python and NumPy are replayed."""

import random
import warnings
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from gtracer import AdamWTracer, FiniteDifference, SGDTracer, Tracer
from gtracer.optim import losses
from gtracer.optim.stats import Verdict
from support.problems import PROBLEMS
from support.problems import make as make_problem


class Setting:
    def __init__(self, dtype=torch.float64):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3)).to(dtype)
        self.x, self.y, self.calls = torch.randn(400, 5, dtype=dtype), torch.randint(3, (400,)), 0

    @property
    def weights(self):
        return [p.detach().clone() for p in self.net.parameters()]

    def loss(self, rows):
        self.calls += 1
        return cross_entropy(self.net(self.x[rows]), self.y[rows])


MAKERS = {
    "sgd": lambda p, **k: SGDTracer(p, lr=0.1, rho=0.01, **k),
    "central": lambda p, **k: SGDTracer(p, lr=0.1, rho=0.01, engine=FiniteDifference(central=True), **k),
    "adamw": lambda p, **k: AdamWTracer(p, lr=0.01, rho=0.01, **k),
    "rmsprop": lambda p, **k: Tracer(torch.optim.RMSprop(p, lr=0.01), rho=0.01, **k),
}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def from_a_generator(setting):
    generator = torch.Generator().manual_seed(1)
    return lambda: setting.loss(torch.randint(400, (16,), generator=generator))


def from_a_loader(setting):
    batches = iter(torch.randperm(400).split(16))
    return lambda: setting.loss(next(batches))


def from_numpy_s_own(setting):
    generator = np.random.default_rng(0)
    return lambda: setting.loss(generator.integers(400, size=16))


@makers
@pytest.mark.parametrize("draw", [from_a_generator, from_a_loader, from_numpy_s_own])
def test_another_batch_in_the_second_pass_is_noticed(make, draw):
    """Once, by a pass or two more than the steps have."""
    setting = Setting()
    opt, closure = make(setting.net.parameters()), draw(setting)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            opt.step(closure)
    assert len(caught) == 1
    assert "another batch" in str(caught[0].message)
    assert setting.calls <= 5 * (3 if opt.is_central else 2) + 2


@pytest.mark.parametrize("draw", [from_a_generator, None])
def test_a_doubt_may_come_a_step_later(draw, monkeypatch):
    """From a GPU, which nobody waits for: the step after makes the further pass."""

    class Slow(Verdict):
        asked = 0

        @property
        def is_there(self):
            self.asked += 1
            return self.asked > 1

    monkeypatch.setattr(losses, "Verdict", Slow)
    setting = Setting()
    opt = SGDTracer(setting.net.parameters(), lr=0.1, rho=0.01)
    closure = draw(setting) if draw else lambda: setting.loss(slice(0, 16))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.step(closure)
        assert setting.calls == 2
        for _ in range(4):
            opt.step(closure)
    assert len(caught) == (draw is not None)
    assert setting.calls == 10 + (draw is not None)


@makers
@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_same_batch_is_not(make, problem):
    """Nor is the closure called more often."""
    p, calls = make_problem(problem), []
    opt = make(p.model.parameters(), model=p.model)
    for i in range(10):
        opt.step(lambda i=i: calls.append(i) or p.loss_of(i))
    assert len(calls) == 10 * (3 if opt.is_central else 2)


class Memory(TorchDispatchMode):
    """How many numbers tensors hold at once, at most."""

    def __init__(self):
        super().__init__()
        self.now, self.most, self.known = 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for x in made if isinstance(made, list | tuple) else [made]:
            if isinstance(x, torch.Tensor) and id(x) not in self.known and not x._is_view():
                self.known.add(id(x))
                self.now += x.numel()
                self.most = max(self.most, self.now)
                weakref.finalize(x, self.free, id(x), x.numel())
        return made

    def free(self, key, size):
        self.known.remove(key)
        self.now -= size


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_it_takes_no_copy_of_the_weights(name):
    """The steps in which losses are compared hold no more than later ones, but for a parameter or two."""
    torch.manual_seed(0)
    params, most = [nn.Parameter(torch.randn(100)) for _ in range(50)], []
    opt = MAKERS[name](params)
    with Memory() as memory:
        for _ in range(8):
            opt.zero_grad()
            memory.most = memory.now
            opt.step(lambda: sum(p.square().sum() for p in params))
            most.append(memory.most)
    assert min(most) > 4 * 5000  # weights come first
    assert max(most[: losses.LOOKED]) < max(most[losses.LOOKED :]) + 2.5 * 100


@pytest.mark.parametrize("noise", [1e-6, 1e-4])
def test_nor_what_a_gpu_adds_up_in_another_order(noise):
    setting, generator = Setting(torch.float32), torch.Generator().manual_seed(1)
    opt = SGDTracer(setting.net.parameters(), lr=0.1, rho=0.01)
    for _ in range(10):
        opt.step(lambda: setting.loss(slice(0, 16)) * (1 + noise * torch.randn((), generator=generator)))


def test_a_rough_loss_is_asked_once_and_left_alone():
    """It changes by something else than its slopes say: a further pass at the same weights agrees."""
    torch.manual_seed(0)
    w, calls = nn.Parameter(torch.randn(4).double()), []

    def loss():
        calls.append(0)
        return 1 + (w.detach().sum() / 0.0013).floor() % 2 + 1e-3 * w.square().sum()

    twin = nn.Parameter(w.detach().clone())
    opt = SGDTracer([w], lr=0.1, rho=0.01)
    for _ in range(6):
        opt.step(loss)
    assert len(calls) == 13
    other = SGDTracer([twin], lr=0.1, rho=0.01)
    for _ in range(6):
        other.step(lambda: 1e-3 * twin.square().sum())
    assert torch.equal(w, twin)


DRAWS = {
    "numpy": lambda: np.random.randint(400, size=16),
    "python": lambda: [random.randrange(400) for _ in range(16)],
}


def by_closure(opt, setting, draw):
    opt.step(lambda: setting.loss(draw()))


def by_scope(opt, setting, draw):
    opt.zero_grad()
    setting.loss(draw()).backward()
    for _ in range(1 + opt.is_central):
        with opt.perturbed():
            setting.loss(draw()).backward()
    opt.step()


@makers
@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("step", [by_closure, by_scope])
def test_numpy_s_and_python_s_random_numbers_are_replayed(make, name, step):
    """The step is that of a batch drawn outside, and the numbers go on as if they had been drawn once."""
    one, two, draw = Setting(), Setting(), DRAWS[name]
    opt, other = make(one.net.parameters()), make(two.net.parameters())
    np.random.seed(0)
    random.seed(0)
    for _ in range(4):
        step(opt, one, draw)
    after = draw()
    np.random.seed(0)
    random.seed(0)
    for _ in range(4):
        rows = draw()
        other.step(lambda rows=rows: two.loss(rows))
    assert list(after) == list(draw())
    torch.testing.assert_close(one.weights, two.weights, rtol=1e-12, atol=1e-14)


def test_a_failed_step_gives_the_random_numbers_back():
    setting = Setting()
    opt = SGDTracer(setting.net.parameters(), rho=0.01)
    np.random.seed(0)
    with pytest.raises(KeyError):
        opt.step(lambda: {}[np.random.rand()])
    found = np.random.rand()
    np.random.seed(0)
    assert found == np.random.rand()


@pytest.mark.parametrize(("name", "loop"), [*((name, False) for name in MAKERS), ("sgd", True), ("adamw", True)])
def test_autocast_around_the_step_is_autocast_in_the_closure(name, loop):
    """Autocast keeps the weights that it has rounded: the second pass would compute with the first's, and ∇T be 0."""

    def weights(within):
        it = Setting(torch.float32)
        opt = MAKERS[name](it.net.parameters())
        outside, inside = (
            torch.autocast("cpu", torch.bfloat16) if on else nullcontext() for on in (not within, within)
        )

        def closure():
            opt.zero_grad()
            with inside:
                loss = it.loss(slice(None))
            loss.backward()
            return loss

        for _ in range(3):
            with outside:
                if loop:
                    loss = closure()
                    with opt.perturbed(loss=loss):
                        closure()
                    opt.step()
                else:
                    opt.step(closure)
            assert opt.stats.penalty_ratio > 0
        return it.weights

    torch.testing.assert_close(weights(False), weights(True), rtol=0, atol=0)
