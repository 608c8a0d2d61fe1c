"""`find_rho`: against a slow twin and closed forms; it leaves everything as it was, and recommends no collapse."""

import copy
import itertools
import math
import random
import signal
import sys

import numpy
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import gtracer
from gtracer import SAM, AdamWTracer, NonFiniteError, SGDTracer, Tracer, find_rho
from gtracer.finder import Branch, RhoCurve, _judged
from support.problems import shapes_in_noise

MAKERS = {
    "sgd": lambda m: SGDTracer(m.parameters(), lr=0.1, momentum=0.9, model=m),
    "sgd, a number": lambda m: SGDTracer(m.parameters(), lr=0.1, momentum=0.9, rho=0.01, model=m),
    "adamw": lambda m: AdamWTracer(m.parameters(), lr=0.01, model=m),
    "rmsprop, reused": lambda m: Tracer(
        torch.optim.RMSprop(m.parameters(), lr=0.003), rho=0.01, interval=2, reuse=0.5, model=m
    ),
    "sam": lambda m: SAM(torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), rho=0.1, model=m),
}


class Training:
    """A net with batch norm and dropout in mid-training, with a gradient and a frozen parameter."""

    def __init__(self, name, steps=3):
        torch.manual_seed(0)
        layers = nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
        self.model = nn.Sequential(*layers).double()
        self.model[4].bias.requires_grad_(False)
        self.opt = MAKERS[name](self.model)
        self.x = torch.randn(96, 5).double()
        self.y = (3 * self.x[:, :3] + torch.randn(96, 3)).argmax(1)
        self.batches = list(zip(self.x.split(8), self.y.split(8), strict=True))
        for batch in self.batches[:steps]:
            self.opt.step(self.loss_of, batch)
        self.model[1].eval()  # as where statistics are frozen for good

    def loss_of(self, batch):
        return cross_entropy(self.model(batch[0]), batch[1])

    def everything(self):
        parts = {("model", name): t.clone() for name, t in self.model.state_dict().items()}
        parts |= {("grad", n): None if p.grad is None else p.grad.clone() for n, p in self.model.named_parameters()}
        parts |= {("asked", n): p.requires_grad for n, p in self.model.named_parameters()}
        parts |= {("mode", name): module.training for name, module in self.model.named_modules()}
        parts["opt"] = copy.deepcopy(self.opt.state_dict())
        parts["random"] = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
        return parts

    def tensors(self):
        """The very objects, by what holds them."""
        found = [p.grad for p in self.model.parameters()]
        return [*found, *(value for state in self.opt.state.values() for value in state.values())]


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def found_by(made, **own):
    own = {"candidates": [1e-3, 0.1], "steps": 4, "optimizer": made.opt, "tell": None} | own
    return find_rho(made.model, own.pop("loss_of", made.loss_of), made.batches[:8], made.batches[8:], **own)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("steps", [0, 3])
def test_everything_is_put_back(name, steps):
    made = Training(name, steps)
    made.model[1].train(not steps)  # with statistics that move, and frozen
    before, objects = made.everything(), made.tensors()
    stats, group = made.opt.stats, made.opt.param_groups[0]
    found_by(made)
    assert same(made.everything(), before)
    assert all(a is b for a, b in zip(made.tensors(), objects, strict=True))
    assert made.opt.stats is stats
    assert made.opt.param_groups[0] is group is made.opt.base.param_groups[0]
    assert made.opt.state is made.opt.base.state


@pytest.mark.parametrize("name", MAKERS)
def test_training_goes_on_as_if_nothing_had_been(name):
    made, plain = Training(name), Training(name)
    found_by(made)
    ends = []
    for training in (plain, made):
        torch.manual_seed(4)
        losses = [training.opt.step(training.loss_of, batch) for batch in training.batches]
        ends.append((losses, training.everything()))
    assert same(*ends)


@pytest.mark.parametrize("name", ["sgd", "adamw", "sam"])
def test_the_branches_are_those_of_a_slow_twin(name):
    """Copies of everything by deepcopy, and plain steps."""
    made = Training(name)
    curve = found_by(made)
    for branch in curve.branches:
        twin = Training(name)
        for group in twin.opt.param_groups:
            group["rho"] = branch.rho
            group.pop("rho_is_auto", None)
        for batch in twin.batches[:4]:
            train = twin.opt.step(twin.loss_of, batch).item()
        twin.model.eval()
        held = [twin.loss_of(batch).item() for batch in twin.batches[8:]]
        assert branch.held_out == pytest.approx(held, rel=1e-12)
        assert branch.train == pytest.approx(train, rel=1e-12)
    assert curve.base_loss == curve.losses[0]
    assert curve.rhos == (0.0, 1e-3, 0.1)


def test_a_quadratic_has_a_closed_form():
    """L = c w²/2 with f₀ = 3 and β = 0: a step is w ← w (1 − α c − 2 α ρ c²/(3 + δ) · c)."""
    c, delta, alpha = 2.0, 1.0, 0.1
    model = nn.ParameterList([nn.Parameter(torch.tensor(1.5, dtype=torch.float64))])
    opt = SGDTracer(model.parameters(), lr=alpha, rho=0.1, beta=0.0, f0=3.0, delta=delta, model=model)
    curve = find_rho(
        model,
        lambda scale: scale * c * model[0] ** 2 / 2,
        [1.0],
        [1.0, 3.0],
        optimizer=opt,
        steps=5,
        candidates=[0.2, 0.5],
        tell=None,
    )
    for branch in curve.branches:
        w = 1.5 * (1 - alpha * c - alpha * 2 * branch.rho * c**2 / (3 + delta) * c / c) ** 5
        assert branch.held_out == pytest.approx([c * w**2 / 2, 3 * c * w**2 / 2], rel=1e-6)
    assert curve.rho == 0.5  # here it but speeds descent up
    assert curve.chance == pytest.approx(2 * c * 1.5**2 / 2)  # no labels: the loss at the start


def test_every_branch_sees_the_same_batches():
    """A loader that shuffles, with dropout drawing from the same numbers; and one with a generator of its own."""
    for generator in (None, torch.Generator().manual_seed(1)):
        made = Training("sgd")
        data = TensorDataset(made.x[:64], made.y[:64])
        loader = DataLoader(data, 8, shuffle=True, generator=generator)
        seen = []

        def loss_of(batch, made=made, seen=seen):
            if made.model.training:
                seen.append((batch[0][0, 0].item(), made.opt.param_groups[0]["rho"]))
            return made.loss_of(batch)

        own = None if generator is None else generator.get_state()
        find_rho(
            made.model,
            loss_of,
            loader,
            made.batches[8:],
            optimizer=made.opt,
            steps=20,
            candidates=[1e-4, 1e-3],
            tell=None,
        )
        by_rho = [[x for x, r in seen if r == rho] for rho in (0.0, 1e-4, 1e-3)]
        assert [x for x in by_rho[0] for _ in "12"] == by_rho[1] == by_rho[2]
        assert len(set(by_rho[0])) > 10
        assert own is None or torch.equal(own, generator.get_state())


def test_what_the_first_steps_look_at_is_looked_at_after_it():
    """Whether the closure draws another batch in its second call: the branches' steps do not count."""
    made = Training("sgd, a number", steps=0)
    found_by(made)
    batches = iter(made.batches)

    def train():
        for _ in range(3):
            made.opt.step(lambda: made.loss_of(next(batches)))

    with pytest.warns(UserWarning, match="another batch"):
        train()


@pytest.mark.parametrize("where", ["training", "held-out"])
def test_ctrl_c_puts_everything_back(where):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        made = Training("adamw")
        there, calls = made.everything(), itertools.count()

        def loss_of(batch):
            if next(calls) > 6 and made.model.training == (where == "training"):
                signal.raise_signal(signal.SIGINT)
            return made.loss_of(batch)

        with pytest.raises(KeyboardInterrupt):
            found_by(made, loss_of=loss_of)
        assert next(calls) < 14  # and soon
        assert same(made.everything(), there)
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_puts_everything_back():
    made = Training("sgd")
    there, calls = made.everything(), itertools.count()

    def loss_of(batch):
        if next(calls) == 9:
            raise OSError("no more")
        return made.loss_of(batch)

    with pytest.raises(OSError, match="no more"):
        found_by(made, loss_of=loss_of)
    assert same(made.everything(), there)


def test_without_held_out_batches_some_are_set_aside():
    made = Training("sgd")
    seen = {True: set(), False: set()}

    def loss_of(batch):
        seen[made.model.training].add(batch[0][0, 0].item())
        return made.loss_of(batch)

    find_rho(made.opt, loss_of, iter(made.batches), candidates=[0.01], steps=9, tell=None)
    assert len(seen[False]) == 4
    assert len(seen[True]) == 8
    assert not seen[True] & seen[False]


def test_a_branch_that_diverges_has_collapsed():
    made = Training("sgd")
    curve = found_by(made, candidates=[1e-3, 1e12], steps=12)
    assert curve.collapsed == (1e12,)
    assert curve.rho < 1
    assert math.isnan(curve.losses[-1])
    assert "from ρ = 1e+12 on training collapses" in curve.reason
    assert "collapsed" in str(curve)


def branches(rows):
    return [Branch(rho, tuple(held), train) for rho, held, train in rows]


def test_the_largest_within_one_standard_error():
    """Paired: what matters is how much the difference scatters, not the losses."""
    curve = _judged(
        branches(
            [
                (0.0, [1.0, 2.0, 3.0, 4.0], 1.0),
                (0.1, [0.9, 1.9, 2.9, 3.9], 1.0),
                (0.2, [0.8, 2.05, 2.85, 3.95], 1.0),  # 0.0125 ± 0.0554 above the lowest
                (0.3, [1.0, 2.0, 3.0, 3.9], 1.0),  # 0.075 ± 0.025 above
            ]
        ),
        chance=6.0,
        steps=10,
    )
    assert curve.rho == 0.2
    assert curve.reason.startswith("ρ = 0.2 is the largest whose held-out loss (2.4125) is within one standard error")
    assert "(2.4000 at 0.1), 0.0875 ± 0.0554 below that at ρ = 0" in curve.reason


def test_what_has_collapsed_is_never_recommended():
    """Also where the held-out loss scatters so much that it is within the error."""
    rows = [(0.0, [0.6, 1.6, 0.9, 1.3], 0.5), (0.1, [1.3, 1.3, 1.3, 1.3], 1.3)]
    curve = _judged(branches(rows), chance=1.39, steps=10)
    distance, error = curve.branches[1].above(curve.branches[0])
    assert distance < error
    assert (curve.rho, curve.collapsed) == (0.0, (0.1,))


def test_memorising_is_no_collapse():
    """Where ρ is too small the held-out loss is above chance, and yet the branch learns."""
    rows = [(0.0, [3.0, 3.1, 2.9, 3.0], 0.3), (0.1, [1.7, 1.8, 1.6, 1.7], 1.5), (0.2, [2.3, 2.3, 2.3, 2.3], 2.3)]
    curve = _judged(branches(rows), chance=2.3, steps=10)
    assert (curve.rho, curve.collapsed) == (0.1, (0.2,))


def test_where_nothing_is_learnt_nothing_is_recommended():
    rows = [(0.0, [1.39, 1.38, 1.4, 1.39], 1.39), (0.1, [1.385, 1.39, 1.39, 1.39], 1.39)]
    curve = _judged(branches(rows), chance=1.386, steps=10)
    assert curve.rho == 0.0
    assert "no branch has learnt more than chance" in curve.reason
    nothing = _judged(branches([(0.0, [math.nan] * 2, 1.0), (0.1, [math.nan] * 2, 1.0)]), chance=1.0, steps=10)
    assert (nothing.rho, nothing.collapsed) == (0.0, (0.0, 0.1))


def test_a_small_convolutional_net_that_collapses():
    """The net of test_auto, which ρ = 0.003 kills."""
    model, x, y = shapes_in_noise()
    batches = list(zip(x[:300].split(50), y[:300].split(50), strict=True))
    held = list(zip(x[300:].split(10), y[300:].split(10), strict=True))
    curve = find_rho(
        model,
        lambda batch: cross_entropy(model(batch[0]), batch[1]),
        batches,
        held,
        optimizer=lambda m: SGDTracer(m.parameters(), lr=0.02, momentum=0.9, model=m),
        candidates=[1e-5, 0.003, 0.03],
        steps=60,
        tell=None,
    )
    assert curve.rho <= 1e-5
    assert {0.003, 0.03} <= set(curve.collapsed)
    assert curve.chance == pytest.approx(math.log(4))


def test_groups_keep_their_proportion():
    made = Training("sgd")
    groups = [{"params": made.model[0].parameters(), "rho": 0.02}, {"params": made.model[4].weight, "rho": 0.01}]
    groups += [{"params": made.model[1].parameters(), "rho": 0.0}]
    opt = SGDTracer(groups, lr=0.1, model=made.model)
    seen = set()

    def loss_of(batch):
        seen.add(tuple(group["rho"] for group in opt.param_groups))
        return made.loss_of(batch)

    found_by(made, optimizer=opt, loss_of=loss_of, candidates=[0.1])
    assert seen == {(0.02, 0.01, 0.0), (0.0, 0.0, 0.0), (0.1, 0.05, 0.0)} - {(0.02, 0.01, 0.0)}


def test_the_candidates_go_with_the_optimiser():
    made = Training("sgd", steps=0)
    seen = find_rho(made.model, made.loss_of, made.batches[:8], made.batches[8:], steps=1, tell=None).rhos
    assert seen == (0.0, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
    sam = Training("sam", steps=0)
    assert find_rho(sam.opt, sam.loss_of, sam.batches, steps=1, tell=None).rhos[1:] == (
        0.01,
        0.05,
        0.1,
        0.2,
        0.5,
        1.0,
        2.0,
    )


def test_it_tells_and_draws(capsys, tmp_path):
    made = Training("sgd")
    curve = found_by(made, tell=print, figure=tmp_path / "rho.png")
    out = capsys.readouterr().out
    assert out == f"{curve}\n"
    assert curve.reason in out
    assert (tmp_path / "rho.png").read_bytes().startswith(b"\x89PNG")
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    assert curve.plot(axes) is axes
    assert axes.get_xscale() == "log"


def test_without_matplotlib(monkeypatch, tmp_path):
    curve = RhoCurve(0.0, "", tuple(branches([(0.0, [1.0], 1.0)])), (), 1.0, 1)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'gtracer-optim\[lab\]'"):
        curve.plot(tmp_path / "rho.png")


def test_what_cannot_be(monkeypatch):
    made = Training("sgd")
    with pytest.raises(ValueError, match="model must be a Module or TwoPassOptimizer"):
        find_rho(3, made.loss_of, made.batches)
    with pytest.raises(ValueError, match="loss_of must be a function of a batch"):
        find_rho(made.model, 3, made.batches)
    with pytest.raises(ValueError, match="wrap torch's"):
        found_by(made, optimizer=torch.optim.SGD(made.model.parameters()))
    with pytest.raises(ValueError, match="pass the model first"):
        find_rho(made.opt, made.loss_of, made.batches, optimizer=made.opt)
    with pytest.raises(ValueError, match="does not know its model"):
        find_rho(SGDTracer(made.model.parameters(), lr=0.1), made.loss_of, made.batches)
    with pytest.raises(ValueError, match="trains none of the parameters of Linear"):
        find_rho(nn.Linear(1, 1), made.loss_of, made.batches, optimizer=made.opt)
    with pytest.raises(ValueError, match=r"candidates must hold a ρ above 0, got \[0\]"):
        found_by(made, candidates=[0])
    with pytest.raises(ValueError, match=r"candidates\[1\] must be"):
        found_by(made, candidates=[0.1, -1])
    with pytest.raises(ValueError, match="steps must be"):
        found_by(made, steps=0)
    with pytest.raises(ValueError, match="batches must be at least 8, got 3"):
        find_rho(made.model, made.loss_of, made.batches[:3], tell=None)
    with pytest.raises(ValueError, match="at least one batch each"):
        find_rho(made.model, made.loss_of, made.batches, [], tell=None)
    made.opt.zero_grad()
    made.loss_of(made.batches[0]).backward()
    made.opt.param_groups[0]["rho"] = 0.1
    with made.opt.perturbed():
        made.loss_of(made.batches[0]).backward()
    with pytest.raises(RuntimeError, match=r"in the middle of a step"):
        found_by(made)
    made = Training("sgd")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *group: 2)
    with pytest.raises(RuntimeError, match="find_rho in 2 processes"):
        found_by(made)


def test_it_is_exported():
    assert gtracer.find_rho is find_rho
    assert issubclass(NonFiniteError, Exception)
