"""`rho="auto"`: against a slow twin, through resumes, and on the kind of net that a fixed default killed."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from gtracer import SAM, AdamWTracer, Clip, RhoScheduler, SGDTracer, Tracer, linear_warmup
from gtracer.optim import auto
from gtracer.optim.auto import Controller
from support.problems import shapes_in_noise

STEPS = 160


def net(norm=True):
    torch.manual_seed(0)
    layers = [nn.Linear(5, 16), *([nn.BatchNorm1d(16)] if norm else []), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)]
    return nn.Sequential(*layers).double()


def batches(steps=STEPS, first=0):
    """Of 100 examples, half of whose labels say nothing: there is something to learn, and more to memorise."""
    generator = torch.Generator().manual_seed(1)
    centres = 2 * torch.randn(3, 5, generator=generator).double()
    right = torch.randint(3, (100,), generator=generator)
    x = centres[right] + torch.randn(100, 5, generator=generator).double()
    y = torch.where(torch.rand(100, generator=generator) < 0.5, torch.randint(3, (100,), generator=generator), right)
    for step in range(first, first + steps):
        rows = torch.randperm(100, generator=torch.Generator().manual_seed(step))[:20]
        yield x[rows], y[rows]


MAKERS = {
    "sgd": lambda m, **own: SGDTracer(m.parameters(), lr=0.1, momentum=0.9, model=m, **own),
    "adamw": lambda m, **own: AdamWTracer(m.parameters(), lr=0.01, model=m, **own),
    "rmsprop": lambda m, **own: Tracer(torch.optim.RMSprop(m.parameters(), lr=0.003), model=m, **own),
}


def train(model, opt, data, how="closure"):
    """ρ of every step, and what the gradients were; by a closure, or in a loop of one's own."""
    rhos, seen = [], []
    for x, y in data:
        rhos.append(opt.param_groups[0]["rho"])
        if how == "closure":
            loss = opt.step(lambda x, y: cross_entropy(model(x), y), x, y)
        else:
            opt.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            with opt.perturbed(loss=loss):
                cross_entropy(model(x), y).backward()
            opt.step()
        seen.append((loss.item(), opt.stats.as_dict()))
    return rhos, seen


class Twin:
    """What ρ is to be, from gradients and losses alone: the rule, written out once more."""

    def __init__(self, full, none, falls, window=40, every=10, doubt=3.0):
        self.full, self.none, self.falls = full, none, falls
        self.window, self.every, self.doubt = window, every, doubt
        self.stride = max(0.7, 2.3 * 40 / window)
        self.log_rho, self.before, self.count = math.log(1e-5), None, 0
        self.agreements, self.alignment = [], (0.0, 0.0)

    def rho(self):
        return math.exp(self.log_rho) * min(1, max(0, (self.count - 20) / 80))

    @staticmethod
    def follow(average, value, kept):
        total, weight = average
        return kept * total + (1 - kept) * value, kept * weight + (1 - kept)

    def note(self, g, cosine):
        if self.before is not None:
            self.agreements.append(float(self.before @ g / self.before.norm() / g.norm()))
        if not math.isnan(cosine):
            self.alignment = self.follow(self.alignment, cosine, 0.95)
        self.before = g
        if self.count % self.every == self.every - 1 and self.count >= self.window:
            kept, c = 1 - 1 / self.window, self.alignment[0] / self.alignment[1]
            weights = [kept**age for age in reversed(range(len(self.agreements)))]
            s = sum(w * x for w, x in zip(weights, self.agreements, strict=True)) / sum(weights)
            variance = sum(w * (x - s) ** 2 for w, x in zip(weights, self.agreements, strict=True)) / sum(weights)
            known = s + self.doubt * (math.sqrt(variance * (1 - kept) / (1 + kept)) + max(0, -s))
            up = min(1, max(0, (self.none - known) / (self.none - self.full))) * min(1, max(0, (0.7 - c) / 0.1))
            down = min(self.stride, max(0, 3 * (s - self.falls)))
            self.log_rho = min(math.log(1e-2), max(math.log(1e-5), self.log_rho + self.stride * up - down))
        self.count += 1


@pytest.mark.parametrize(
    ("steps", "bounds"),
    [
        (None, (0.01, 0.03, 0.1)),
        (10, (0.04, 0.07, 0.08, 40, 10, 0.0)),
        (60, (0.04, 0.07, 0.08, 60, 15, 1.0)),
        (100, (0.03, 0.05, 0.06, 100, 25, 1.8)),
        (1000, (0.003, 0.005, 0.006, 1000, 250, 2.88)),
    ],
)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("how", ["closure", "loop"])
def test_it_follows_the_twin(name, how, steps, bounds, monkeypatch):
    model = net()
    opt, twin, gradients = MAKERS[name](model, steps_per_epoch=steps), Twin(*bounds), []
    note = Controller.note
    monkeypatch.setattr(
        Controller,
        "note",
        lambda self, opt, step, *place: (
            gradients.append(torch.cat([g.flatten().clone() for g in step.gradients])) or note(self, opt, step, *place)
        ),
    )
    rhos, seen = train(model, opt, batches(), how)
    expected = []
    for g, (_, stats) in zip(gradients, seen, strict=True):
        expected.append(twin.rho())
        twin.note(g, stats["cosine"])
    assert rhos == pytest.approx(expected, rel=1e-6, abs=1e-300)
    assert rhos[20] == 0 < rhos[21] < rhos[39]
    assert seen[50][1]["rho"] == rhos[50]


@pytest.mark.parametrize(("wrong", "least", "most"), [(0.5, 1e-3, 1e-2), (0.0, 1e-5, 1e-5)])
def test_it_rises_where_labels_are_memorised_and_not_where_they_are_learnt(wrong, least, most):
    """Clusters with label noise, and without."""
    generator = torch.Generator().manual_seed(2)
    centres, right = 2 * torch.randn(10, 20, generator=generator), torch.randint(10, (400,), generator=generator)
    x = centres[right] + torch.randn(400, 20, generator=generator)
    drawn = torch.randint(10, (400,), generator=generator)
    y = torch.where(torch.rand(400, generator=generator) < wrong, drawn, right)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
    opt = MAKERS["adamw"](model, steps_per_epoch=20)
    for _ in range(400):
        rows = torch.randperm(400, generator=generator)[:20]
        opt.step(lambda x, y: cross_entropy(model(x), y), x[rows], y[rows])
    assert least * 0.999 <= opt.param_groups[0]["rho"] <= most * 1.001


def test_how_long_an_epoch_is_may_be_said_later():
    model = net()
    opt = MAKERS["sgd"](model)
    assert opt.steps_per_epoch is None
    opt.steps_per_epoch = 100
    assert opt.controller == MAKERS["sgd"](model, steps_per_epoch=100).controller
    with pytest.raises(ValueError, match="steps_per_epoch must be a whole number of at least 1, got 0"):
        opt.steps_per_epoch = 0
    assert opt.steps_per_epoch == 100
    opt.steps_per_epoch = None
    assert opt.steps_per_epoch is None
    fixed = MAKERS["sgd"](model, rho=0.01)
    fixed.steps_per_epoch = 100  # where it has no say
    assert fixed.param_groups[0]["rho"] == 0.01


def test_the_first_steps_are_the_base_optimisers():
    """ρ = 0 in them, to the bit and at its price."""
    model, plain = net(norm=False), net(norm=False)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    opt, sgd = MAKERS["sgd"](model), torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(5)
    train(model, opt, batches(20))
    torch.manual_seed(5)
    for x, y in batches(20):
        sgd.zero_grad()
        cross_entropy(plain(x), y).backward()
        sgd.step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert len(calls) == 20


def test_the_penalty_is_never_more_than_twice_the_gradient():
    model = net()
    opt = MAKERS["sgd"](model)
    opt.param_groups[0]["rho"] = 100.0  # as if it had risen so far
    (x, y), *_ = batches(1)
    opt.step(lambda: cross_entropy(model(x), y))
    assert opt.stats.penalty_ratio == pytest.approx(2.0, rel=1e-9)
    fixed = MAKERS["sgd"](net(), rho=100.0)
    fixed.step(lambda: cross_entropy(fixed.model(x), y))
    assert fixed.stats.penalty_ratio > 100  # a number is Algorithm 1 to the letter


def held_out_of(model, kind):
    """The loss of a held-out batch with other labels than are trained on; dropout draws random numbers."""
    x, y = next(iter(batches(1, first=1000)))
    y = (y + 1) % 3
    return (lambda: cross_entropy(model(x), y)) if kind else None


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_saved_and_loaded_it_goes_on(name, held):
    """Bit for bit, also within a window of ten steps."""
    straight = net()
    opt = MAKERS[name](straight, steps_per_epoch=5, held_out=held_out_of(straight, held))
    torch.manual_seed(3)
    rhos, _ = train(straight, opt, batches())
    half = net()
    first = MAKERS[name](half, steps_per_epoch=5, held_out=held_out_of(half, held))
    torch.manual_seed(3)
    train(half, first, batches(127))
    random = torch.get_rng_state()
    saved = copy.deepcopy({"model": half.state_dict(), "opt": first.state_dict()})
    again = net()
    second = MAKERS[name](again, steps_per_epoch=5, held_out=held_out_of(again, held))
    again.load_state_dict(saved["model"])
    second.load_state_dict(saved["opt"])
    torch.set_rng_state(random)
    later, _ = train(again, second, batches(STEPS - 127, first=127))
    assert later == rhos[127:]
    assert later[-1] > 2e-5  # it has moved
    assert all(map(torch.equal, straight.state_dict().values(), again.state_dict().values()))


def test_held_out_data_leaves_no_trace_but_rho():
    """Statistics and random numbers are those of training without: as long as ρ is the same, so is all."""
    found = []
    for held in (False, True):
        model = net()
        opt = MAKERS["sgd"](model, held_out=held_out_of(model, held))
        opt.param_groups[0]["rho"] = 0.01
        opt.controller = Controller(opt.controller.held_out, wait=0, rise=10**9, every=1)
        torch.manual_seed(3)
        train(model, opt, batches(2))
        found.append([*model.state_dict().values(), torch.get_rng_state()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("ratio", "moved"), [(0.5, 2.3), (0.8, 1.15), (0.9, 0), (0.97, -0.06), (1.5, -1.65), (2.0, -2.3)]
)
def test_rho_follows_the_gap_to_held_out_data(ratio, moved):
    """In closed form: the training loss is this share of the held-out one, and ∇T at right angles to ∇L."""
    w = nn.Parameter(torch.ones(2).double())
    opt = SGDTracer([w], lr=0.0, delta=1e3, held_out=lambda: torch.tensor(2.0).double())
    group = opt.param_groups[0]
    for _ in range(49):
        opt.step(lambda: 2 * ratio + (w[0] ** 2 - w[1] ** 2) / 2)
    group["rho_log"] = math.log(1e-3) if moved > -2 else math.log(5e-3)
    start = group["rho_log"]
    opt.step(lambda: 2 * ratio + (w[0] ** 2 - w[1] ** 2) / 2)
    assert group["rho_log"] == pytest.approx(start + moved, abs=1e-9)


@pytest.mark.parametrize(
    ("steps", "agreement", "moved"),
    [
        (None, 0.02, 1.15),
        (None, 0.05, 0),
        (None, 0.15, -0.15),
        (10, 0.15, -0.21),
        (100, 0.15, -0.27),
        (48, 0.05, 2.3 * 40 / 48 * 2 / 3),
    ],
)
def test_rho_follows_the_agreement_of_batches(steps, agreement, moved):
    """In closed form: gradients of successive steps have this cosine, and ∇T is at right angles to ∇L."""
    w = nn.Parameter(torch.ones(4).double())
    cosine = (agreement * 102 - 2) / 100  # of the parts of length 10 that alternate; the others are (1, −1)
    slopes = [torch.tensor([10.0, 0.0]), torch.tensor([10 * cosine, 10 * math.sqrt(1 - cosine**2)])]
    opt = SGDTracer([w], lr=0.0, delta=1e6, steps_per_epoch=steps)
    group = opt.param_groups[0]
    last = {100: 124, 48: 59}.get(steps, 49)  # the first decision
    for i in range(last + 1):
        if i == last:
            group["rho_log"] = math.log(1e-3)
        opt.step(lambda i=i: (slopes[i % 2].double() * w[:2]).sum() + (w[2] ** 2 - w[3] ** 2) / 2)
    assert group["rho_log"] == pytest.approx(math.log(1e-3) + moved, abs=1e-6)


def test_held_out_data_in_a_loop_of_ones_own():
    """The same ρ as by a closure."""
    rhos = []
    for how in ("closure", "loop"):
        model = net()
        torch.manual_seed(3)
        rhos.append(train(model, MAKERS["sgd"](model, held_out=held_out_of(model, True)), batches(120), how)[0])
    assert rhos[0] == pytest.approx(rhos[1], rel=1e-9, abs=1e-300)
    assert rhos[0][-1] > 2e-5


@pytest.mark.parametrize("told", [0.5, torch.ones(3), None])
def test_what_is_no_held_out_loss(told):
    model = net()
    opt = MAKERS["sgd"](model, held_out=lambda: told)
    with pytest.raises(ValueError, match="held_out must return the loss of a held-out batch"):
        train(model, opt, batches(11))


def test_a_group_with_a_number_keeps_it():
    model = net()
    groups = [{"params": model[0].parameters()}, {"params": [*model[1:].parameters()], "rho": 0.007}]
    opt = SGDTracer(groups, lr=0.1, model=model)
    train(model, opt, batches(130))
    assert opt.param_groups[1]["rho"] == 0.007
    assert 0 < opt.param_groups[0]["rho"] != 0.007
    opt.add_param_group({"params": [nn.Parameter(torch.ones(2).double())]})
    assert opt.param_groups[2]["rho"] == 0.0
    train(model, opt, batches(2))
    assert opt.param_groups[2]["rho"] == opt.param_groups[0]["rho"]


def test_many_coordinates_are_compared_in_a_sample(monkeypatch):
    """Of a fixed size, whatever the net's; small nets are compared in full."""
    monkeypatch.setattr(auto, "SAMPLED", 20)
    model = net()
    opt = MAKERS["sgd"](model)
    train(model, opt, batches(30))
    kept = sum(s["rho_before"].numel() for s in opt.state.values())
    assert kept <= 20 + len(list(model.parameters()))


def test_what_cannot_be():
    model = net()
    opt = MAKERS["sgd"](model)
    with pytest.raises(ValueError, match="sets its ρ itself"):
        RhoScheduler(opt, linear_warmup(3))
    with pytest.raises(ValueError, match="held_out must be a function"):
        MAKERS["sgd"](model, held_out=0.1)
    with pytest.raises(ValueError, match="steps_per_epoch must be a whole number of at least 1, got 0"):
        MAKERS["sgd"](model, steps_per_epoch=0)
    with pytest.raises(ValueError, match="rho must be 'auto' or a finite number in .*, got 'automatic'"):
        MAKERS["sgd"](model, rho="automatic")
    train(model, opt, batches(1))
    from gtracer.optim.refusals import check_capture

    with pytest.raises(RuntimeError, match="rho = 'auto' moves ρ outside of the graph, call prepare_capture"):
        check_capture(opt)
    opt = MAKERS["sgd"](model, held_out=lambda: model(torch.zeros(2, 5).double()).sum(), interval=4, reuse=0.9)
    opt.prepare_capture()
    assert opt.phases == 20  # a penalty in every fourth, a look in every tenth
    with pytest.raises(ValueError, match=r"held_out must be a function .* got 0\.1"):
        opt.held_out = 0.1
    with pytest.raises(ValueError, match="held_out is for a rho that sets itself, and SAM's does not"):
        SAM(torch.optim.SGD(model.parameters(), lr=0.1)).held_out = len


@pytest.mark.parametrize("own", [{}, {"interval": 2, "reuse": 0.9}, {"clip": Clip(norm=1.0)}], ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_kept_on_the_device_it_moves_as_it_does_elsewhere(name, own):
    """As a CUDA graph has it; no number is read back."""
    plain, model = net(), net()
    usual = MAKERS[name](plain, steps_per_epoch=5, **own)
    opt = MAKERS[name](model, steps_per_epoch=5, **own)
    opt.prepare_capture()
    expected, rhos = [], []
    for x, y in batches():
        for found, m, o in ((expected, plain, usual), (rhos, model, opt)):
            torch.manual_seed(len(found))
            o.step(lambda x, y, m=m: cross_entropy(m(x), y), x, y)
            found.append(o.rho_of(o.param_groups[0]))
    assert rhos == pytest.approx(expected, rel=1e-6)
    assert rhos[-1] > 2e-5  # it has moved
    assert opt.stats.rho == pytest.approx(usual.stats.rho, rel=1e-6)
    assert f"now {rhos[-1]:.3g}" in repr(opt)
    assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("on_device", [False, True], ids=["to the CPU", "to the device"])
def test_from_the_device_it_is_saved_as_it_is_elsewhere(on_device):
    model = net()
    opt = MAKERS["sgd"](model, steps_per_epoch=5)
    opt.prepare_capture()
    train(model, opt, batches(127))
    saved, rho = copy.deepcopy(opt.state_dict()), opt.rho_of(opt.param_groups[0])
    assert saved["param_groups"][0]["rho"] == rho > 2e-5
    again, random = copy.deepcopy(model), torch.get_rng_state()
    second = MAKERS["sgd"](again, steps_per_epoch=5)
    if on_device:
        second.prepare_capture()
    second.load_state_dict(saved)
    assert second.rho_of(second.param_groups[0]) == pytest.approx(rho, rel=1e-12)
    train(model, opt, batches(20, first=127))
    torch.set_rng_state(random)
    train(again, second, batches(20, first=127))
    assert_close(dict(again.state_dict()), dict(model.state_dict()), rtol=1e-6, atol=1e-9)
    assert copy.deepcopy(opt).rho_of(opt.param_groups[0]) == opt.rho_of(opt.param_groups[0])


def test_one_factor_cannot_serve_groups_with_a_number_of_their_own():
    model = net()
    groups = [{"params": [model[0].weight], "rho": 0.01}, {"params": [model[4].weight]}]
    with pytest.raises(ValueError, match="in all groups where steps are captured, got both"):
        SGDTracer(groups, lr=0.1).prepare_capture()


def test_a_checkpoint_with_a_number_counts():
    """ρ of a checkpoint is that of the run which wrote it."""
    model = net()
    fixed = MAKERS["sgd"](model, rho=0.02)
    train(model, fixed, batches(3))
    opt = MAKERS["sgd"](model)
    opt.load_state_dict(fixed.state_dict())
    assert not opt.sets_rho
    assert opt.param_groups[0]["rho"] == 0.02


@pytest.mark.parametrize("rho", ["auto", 0.003])
def test_a_small_convolutional_net_with_batch_norm(rho):
    """A violent start kills its last layer for good, at ρ 0.003, which was the default once."""
    model, x, y = shapes_in_noise()
    opt = SGDTracer(model.parameters(), lr=0.02, momentum=0.9, rho=rho, model=model)
    for step in range(140):
        rows = torch.randint(300, (50,), generator=torch.Generator().manual_seed(step))
        opt.step(lambda a, b: cross_entropy(model(a), b), x[rows], y[rows])
    model.eval()
    accuracy = (model(x[300:]).argmax(1) == y[300:]).double().mean().item()
    assert (accuracy > 0.9) if rho == "auto" else (accuracy < 0.5)


def test_a_step_that_is_skipped_leaves_no_trace():
    """On the device it is found late: what was added of it is left out of the next decision."""
    model = net()
    opt = MAKERS["sgd"](model, nonfinite="skip")
    train(model, opt, batches(104))
    first = next(iter(model.parameters()))
    opt.state[first]["rho_before"][0] = math.nan  # as the kernels would leave it
    train(model, opt, batches(40, first=104))
    assert all(torch.isfinite(t).all() for s in opt.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    assert math.isfinite(opt.param_groups[0]["rho"])


@pytest.mark.parametrize("held", [False, True])
def test_in_parts_it_moves_too(held):
    """Every way of taking a batch in parts has the cap and learns from held-out data."""
    from gtracer.curvature import micro_batch
    from gtracer.experimental import vectorised_micro_batch

    for own, words in (
        ({}, {"penalty": "each"}),
        ({"curvature": micro_batch(10)}, None),
        ({"curvature": vectorised_micro_batch(10)}, None),
    ):
        model = net()
        opt = MAKERS["sgd"](model, steps_per_epoch=5, held_out=held_out_of(model, held), **own)
        for x, y in batches(160):
            loss_of = lambda x, y, model=model: cross_entropy(model(x), y)  # noqa: E731
            if words:
                opt.step(loss_of, batches=list(zip(x.split(10), y.split(10), strict=True)), **words)
            else:
                opt.step(loss_of, x, y)
        assert opt.param_groups[0]["rho"] != pytest.approx(opt.controller.start, rel=1e-6)
        opt.param_groups[0]["rho"] = 100.0
        if words is None:
            opt.step(lambda x, y, model=model: cross_entropy(model(x), y), x, y)
            assert opt.stats.penalty_ratio == pytest.approx(2.0, rel=1e-6)


def test_a_parameter_that_is_not_always_there():
    """What is known is kept with one that is missing in some steps; it is not learnt anew."""
    model = net()
    opt = MAKERS["sgd"](model)
    for step, (x, y) in enumerate(batches(150)):
        model[0].weight.requires_grad_(step % 3 != 1)
        opt.step(lambda x=x, y=y: cross_entropy(model(x), y))
    assert sum("rho_numbers" in state for state in opt.state.values()) == 1
