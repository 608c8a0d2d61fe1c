"""`rho="auto"`: against a slow twin, through resumes, and on the kind of net that a fixed default killed."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from gtracer import SAM, AdamWTracer, Clip, RhoScheduler, SGDTracer, Tracer, linear_warmup
from support.problems import shapes_in_noise

STEPS, EPOCH = 160, 5


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
        order = torch.randperm(100, generator=torch.Generator().manual_seed(step // EPOCH))
        rows = order.split(100 // EPOCH)[step % EPOCH]
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
    """What ρ is to be, from losses and cosines alone: the rule, written out once more."""

    def __init__(self, steps):
        self.steps, self.first = steps, int(0.2 * steps)
        self.log_rho, self.count = math.log(1e-5), 0
        self.losses, self.cosine, self.ratio, self.weight, self.room = [], 0.0, 0.0, 0.0, 0.0
        self.end = self.middle = self.gap = self.variance = None

    def rho(self):
        return math.exp(self.log_rho) * min(1, max(0, (self.count - 20) / 80))

    def limit(self):
        return 2 * math.exp(self.room)

    def note(self, loss, cosine, ratio):
        if not math.isnan(cosine):
            self.cosine, self.weight = 0.95 * self.cosine + 0.05 * cosine, 0.95 * self.weight + 0.05
            self.ratio = 0.95 * self.ratio + 0.05 * ratio
        self.losses.append(loss)
        self.count += 1
        if len(self.losses) == self.steps:
            self.conclude()
            self.losses = []

    def conclude(self):
        x = (np.arange(self.steps) + 0.5) / self.steps - 0.5
        x, y = x[self.first :], np.array(self.losses[self.first :])
        (slope, middle), ((variance, _), _) = np.polyfit(x, y, 1, cov=True)
        forgotten = 0.25 * min(1, self.steps / 20)
        if self.end is not None:
            drop = self.end - (middle - slope / 2)
            grown = drop + (1 - forgotten) * (self.gap or 0)
            self.gap = grown - min(max(0, middle - self.middle) / 2, max(0, grown))
            self.variance = variance + (1 - forgotten) ** 2 * (self.variance or 0)
            self.decide(middle)
        self.end, self.middle = middle + slope / 2, middle

    def decide(self, loss):
        if not self.weight:
            return
        error, cosine, ratio = math.sqrt(self.variance), self.cosine / self.weight, self.ratio / self.weight
        low, high = max(0, self.gap - error), max(0, self.gap + error)
        rises, falls = rising(low / (low + loss), cosine), falling(high / (high + loss), cosine)
        pressed = min(1, max(0, 2 * ratio / self.limit() - 1)) if self.limit() < 10 else 0
        self.log_rho += 1.6 * rises * (1 - pressed) - falls
        unknown = min(1, max(0, (error / (max(0, self.gap) + loss) - 0.05) / 0.05))
        self.log_rho = min(math.log(3e-2 / 3**unknown), max(math.log(1e-5), self.log_rho))
        self.room = min(math.log(5), max(0, self.room + 0.25 * pressed * 1.6 * rises - falls))
        if 1.6 * rises > falls:
            self.gap *= 1 - 0.5 * rises


def against(cosine):
    return min(1, max(0, -cosine / 0.1))


def rising(gap, cosine):
    """The share of a full rise for a gap, as a share of the loss on unseen data, less its error."""
    c = min(1, max(0, cosine / 0.3))
    opens, full = 0.02 + 0.08 * c, 0.07 + 0.13 * c
    share = min(1, max(0, (gap - opens) / (full - opens))) * min(1, max(0, (0.7 - cosine) / 0.1))
    return share * (1 - against(cosine))


def falling(gap, cosine):
    """How far log ρ falls for a gap and its error."""
    closes = 0.05 * min(1, max(0, cosine / 0.3))
    return max(min(0.35, max(0, 35 * (closes - gap))), 0.8 * against(cosine))


@pytest.mark.parametrize("steps", [EPOCH, 20, 40])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("how", ["closure", "loop"])
def test_it_follows_the_twin(name, how, steps):
    model = net()
    opt, twin = MAKERS[name](model, steps_per_epoch=steps), Twin(steps)
    rhos, seen = train(model, opt, batches(), how)
    expected = []
    for loss, stats in seen:
        expected.append(twin.rho())
        assert stats["penalty_ratio"] <= twin.limit() * (1 + 1e-6)
        twin.note(loss, stats["cosine"], stats["penalty_ratio"])
    assert rhos == pytest.approx(expected, rel=1e-6, abs=1e-300)
    assert rhos[20] == 0 < rhos[21] < rhos[39]
    assert seen[50][1]["rho"] == rhos[50]
    assert steps > EPOCH or twin.rho() > 2e-5  # the shortest have moved it


@pytest.mark.parametrize(("wrong", "least", "most"), [(0.5, 1e-3, 3e-2), (0.0, 1e-5, 1e-5)])
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
    for _ in range(20):
        for rows in torch.randperm(400, generator=generator).split(20):
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
        opt = MAKERS["sgd"](model, held_out=held_out_of(model, held), steps_per_epoch=1000)
        opt.controller = replace(opt.controller, wait=0, rise=10**9)
        opt.param_groups[0]["rho"] = 0.01
        torch.manual_seed(3)
        train(model, opt, batches(12))  # one look, in the tenth
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
    assert group["rho_log"] == pytest.approx(start + moved, abs=1e-5)


def sawtooth(fall, drop, level=2.0, steps=10, epochs=4):
    """Losses that fall by so much over each epoch, and by so much more from its end to the next one's beginning."""
    places = (torch.arange(steps).double() + 0.5) / steps - 0.5
    return [level - epoch * (fall + drop) - fall * place for epoch in range(epochs) for place in places]


def followed(losses, start, curvature=(1.0, -1.0), **own):
    """log ρ after these losses, with a cosine of ∇L and ∇T of the curvatures' mean."""
    w = nn.Parameter(torch.ones(2).double())
    opt = SGDTracer([w], lr=0.0, delta=1e3, **own)
    opt.controller = replace(opt.controller, wait=0, rise=1)
    group = opt.param_groups[0]
    for i, loss in enumerate(losses):
        if i == len(losses) - 1:
            group["rho_log"] = math.log(start)
        opt.step(lambda loss=loss: loss + (curvature[0] * (w[0] ** 2 - 1) + curvature[1] * (w[1] ** 2 - 1)) / 2)
    return group["rho_log"]


@pytest.mark.parametrize("drop", [0.0, 0.1, 0.3, -0.2])
@pytest.mark.parametrize("fall", [0.0, 0.2, -0.3])
def test_the_gap_is_the_sum_of_the_drops(fall, drop):
    """In closed form: the third drop stands in full, those before have lost an eighth each epoch; ∇T ⊥ ∇L."""
    kept = 1 - 0.125  # an epoch of ten steps
    spent, gap = 0.0, 0.0
    for epoch in range(1, 4):
        loss = 2.0 - epoch * (fall + drop)
        gap = max(0.0, kept * gap + drop - max(0.0, -fall - drop) / 2) if drop > 0 else 0.0
        rises = rising(gap / (gap + loss), 0)
        gap, spent = gap * (1 - 0.5 * rises), rises
    expected = math.log(1e-4) + (1.6 * spent if drop > 0 else 0.0)
    assert followed(sawtooth(fall, drop), 1e-4, steps_per_epoch=10) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("cosine", "fall"), [(0.0, 0.0), (1.0, 0.35)])
def test_without_a_gap_it_falls_where_the_penalty_stands_in_the_way(cosine, fall):
    """In closed form: ∇T at right angles to ∇L, or along it."""
    curvature = (1.0, 1.0 if cosine else -1.0)
    found = followed(sawtooth(0.2, 0.0), 1e-4, curvature, steps_per_epoch=10)
    assert found == pytest.approx(math.log(1e-4) - fall, abs=1e-5)


def test_a_spike_at_the_beginning_of_an_epoch_is_no_drop_before_it():
    """As after a last batch of few examples: a fifth of the epoch is left out."""
    plain = sawtooth(0.0, 0.1, steps=20)
    spiked = [loss + (5.0 if i % 20 < 4 else 0.0) for i, loss in enumerate(plain)]
    found, expected = (followed(losses, 1e-4, steps_per_epoch=20) for losses in (spiked, plain))
    assert found == pytest.approx(expected, abs=1e-9)
    assert found > math.log(1e-4)


@pytest.mark.parametrize("amplitude", [0.02, 0.1, 0.5, 8.0])
def test_a_drop_less_than_its_error_moves_nothing(amplitude):
    """In closed form: scatter of this size around the line of each epoch, which leaves the line as it is."""
    x = np.arange(8.0)
    scatter = (-1.0) ** x
    scatter -= np.polyval(np.polyfit(x, scatter, 1), x)
    scatter *= amplitude
    losses = np.array(sawtooth(0.0, 0.6, level=4.0, epochs=2)) + np.tile(np.r_[0, 0, scatter], 2)
    error = math.sqrt((scatter**2).sum() / 6 / 0.42)  # Σ (x − x̄)² = 42 steps², of which 10 are the unit
    low = max(0.0, 0.6 - error)
    moved = 1.6 * rising(low / (low + 3.4), 0)
    assert (moved > 0) == (amplitude < 0.11)
    assert followed(losses.tolist(), 1e-4, steps_per_epoch=10) == pytest.approx(math.log(1e-4) + moved, abs=1e-5)


@pytest.mark.parametrize("curvature", [(1.0, 1.0), (1.0, -0.5), (1.0, -0.58), (1.0, -0.7), (0.95, -1.0), (0.8, -1.0)])
def test_the_angle_of_the_penalty_decides_what_is_made_of_a_gap(curvature):
    """In closed form: at w = 1 ∇L is c and ∇T is as c², coordinate by coordinate."""
    c = np.array(curvature)
    cosine = (c**3).sum() / np.linalg.norm(c) / np.linalg.norm(c**2)
    moved = 1.6 * rising(1.0 / 4.0, cosine) - 0.8 * against(cosine)
    losses = sawtooth(0.0, 1.0, level=4.0, epochs=2)
    found = followed(losses, 1e-4, curvature, steps_per_epoch=10)
    assert found == pytest.approx(math.log(1e-4) + moved, abs=5e-3)  # of the finite difference, times 16


@pytest.mark.parametrize("drop", [0.3, 0.0])
@pytest.mark.parametrize("rho", [1e-9, 100.0])
def test_where_the_limit_holds_the_penalty_back_it_rises_instead_of_rho(rho, drop):
    """In closed form: ‖ρ∇T‖ far below its limit, or cut off at it; a gap and ∇T ⊥ ∇L, or no gap and ∇T along ∇L."""
    w = nn.Parameter(torch.ones(2).double())
    opt = SGDTracer([w], lr=0.0, delta=1.0, f0=0.0, beta=0.0, steps_per_epoch=10)
    opt.controller = replace(opt.controller, wait=10**6)
    group, sign = opt.param_groups[0], -1 if drop else 1
    for i, loss in enumerate(sawtooth(0.0, drop, epochs=2)):
        if i == 19:
            group["rho_log"] = math.log(1e-3)
            if not drop:
                opt.state[w]["rho_evidence"][4] = math.log(3)
        group["rho"] = rho
        opt.step(lambda loss=loss: loss + (w[0] ** 2 + sign * w[1] ** 2) / 2)
    limit = opt.controller.limit(opt).item()
    if drop:
        rise, share = 1.6 * rising(drop / 2, 0), float(rho > 1)
        expected = math.log(1e-3) + (1 - share) * rise, 2 * math.exp(0.25 * share * rise)
    else:
        expected = math.log(1e-3) - 0.35, 6 * math.exp(-0.35)
    assert (group["rho_log"], limit) == pytest.approx(expected, rel=1e-5)
    group["rho"] = 100.0
    opt.step(lambda: 2 + (w[0] ** 2 - w[1] ** 2) / 2)
    assert opt.stats.penalty_ratio == pytest.approx(limit, rel=1e-9)


def test_at_its_widest_the_limit_stays_and_rho_rises():
    """In closed form: cut off at ten times ‖∇L‖, with a gap."""
    w = nn.Parameter(torch.ones(2).double())
    opt = SGDTracer([w], lr=0.0, delta=1.0, f0=0.0, beta=0.0, steps_per_epoch=10)
    opt.controller = replace(opt.controller, wait=10**6)
    group = opt.param_groups[0]
    for i, loss in enumerate(sawtooth(0.0, 0.3, epochs=2)):
        if i == 5:
            opt.state[w]["rho_evidence"][4] = math.log(5)
        group["rho"] = 100.0
        group["rho_log"] = math.log(1e-3)
        opt.step(lambda loss=loss: loss + (w[0] ** 2 - w[1] ** 2) / 2)
    assert opt.stats.penalty_ratio == pytest.approx(10, rel=1e-9)
    assert opt.controller.limit(opt).item() == pytest.approx(10, rel=1e-9)
    assert group["rho_log"] == pytest.approx(math.log(1e-3) + 1.6 * rising(0.15, 0), rel=1e-5)


@pytest.mark.parametrize(("amplitude", "unknown"), [(0.02, 0.0), (0.17, 0.5), (0.5, 1.0)])
def test_where_the_gap_is_hardly_known_rho_stops_sooner(amplitude, unknown):
    """In closed form: scatter of this size around the line of each epoch, as above."""
    x = np.arange(8.0)
    scatter = (-1.0) ** x
    scatter -= np.polyval(np.polyfit(x, scatter, 1), x)
    scatter *= amplitude
    losses = np.array(sawtooth(0.0, 0.6, level=4.0, epochs=2)) + np.tile(np.r_[0, 0, scatter], 2)
    error = math.sqrt((scatter**2).sum() / 6 / 0.42)
    share = min(1, max(0, (error / 4 - 0.05) / 0.05))
    assert share == pytest.approx(unknown, abs=0.1)
    expected = math.log(3e-2) - math.log(3) * share
    assert followed(losses.tolist(), 3e-2, steps_per_epoch=10) == pytest.approx(expected, abs=1e-5)


@pytest.mark.filterwarnings("ignore:rho = 'auto' learns of the loss")
@pytest.mark.parametrize("seen", [4, 3])
def test_an_epoch_of_which_little_was_seen(seen):
    """Through four losses a line can be laid; of fewer nothing is made, neither of the step to the next epoch."""
    w = nn.Parameter(torch.ones(2).double())
    opt = SGDTracer([w], lr=0.0, delta=1e3, steps_per_epoch=10)
    opt.controller = replace(opt.controller, wait=0, rise=1)
    for i, loss in enumerate(sawtooth(0.0, 0.3, epochs=3)):
        unknown = 10 <= i < 20 - seen  # as in a loop of one's own that does not hand over the loss
        opt.zero_grad()
        at = loss + (w[0] ** 2 - w[1] ** 2) / 2
        at.backward()
        with opt.perturbed(loss=None if unknown else at):
            (loss + (w[0] ** 2 - w[1] ** 2) / 2).backward()
        opt.step()
    assert opt.state[w]["rho_evidence"][11] == (3 if seen == 4 else 1)  # epochs in a row
    assert (opt.param_groups[0]["rho_log"] > math.log(1e-5)) == (seen == 4)


@pytest.mark.filterwarnings("ignore:rho = 'auto' learns of the loss")
@pytest.mark.parametrize("returned", [None, "what the closure likes"])
def test_a_closure_that_returns_no_loss(returned):
    """It calls backward() itself: nothing is learnt of it, and nothing breaks."""
    model = net()
    opt = MAKERS["sgd"](model, steps_per_epoch=EPOCH)

    def closure():
        opt.zero_grad()
        cross_entropy(model(x), y).backward()
        return returned

    for x, y in batches(40):  # noqa: B007
        opt.step(closure)
    assert opt.param_groups[0]["rho_log"] == math.log(1e-5)


def test_nothing_to_learn_of_leaves_the_base_optimiser():
    """At ρ = 0, at the price of one pass; it is told once what is missing, and works as soon as it is said."""
    model = net()
    opt = MAKERS["sgd"](model)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    train(model, opt, batches(500))
    assert len(calls) == 500
    assert opt.param_groups[0]["rho"] == 0
    with pytest.warns(
        UserWarning, match=r"stayed at 0 for 500 steps.* steps_per_epoch=len\(loader\), or pass held_out="
    ):
        train(model, opt, batches(1, first=500))
    opt.steps_per_epoch = EPOCH
    train(model, opt, batches(499, first=501))
    assert opt.param_groups[0]["rho"] > 2e-5
    short = MAKERS["sgd"](net(), steps_per_epoch=3)  # through fewer than four losses no line can be laid
    with pytest.warns(UserWarning, match="an epoch of 3 steps is too short to learn from"):
        train(short.model, short, batches(501))
    assert short.param_groups[0]["rho"] == 0


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
    opt = SGDTracer(groups, lr=0.1, model=model, steps_per_epoch=EPOCH)
    train(model, opt, batches(130))
    assert opt.param_groups[1]["rho"] == 0.007
    assert 0 < opt.param_groups[0]["rho"] != 0.007
    opt.add_param_group({"params": [nn.Parameter(torch.ones(2).double())]})
    assert opt.param_groups[2]["rho"] == 0.0
    train(model, opt, batches(2))
    assert opt.param_groups[2]["rho"] == opt.param_groups[0]["rho"]


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
        if held:
            assert opt.param_groups[0]["rho"] != pytest.approx(opt.controller.start, rel=1e-6)
        else:  # every epoch had a loss to learn of
            assert next(state["rho_evidence"] for state in opt.state.values() if "rho_evidence" in state)[11] == 32
        opt.param_groups[0]["rho"] = 100.0
        if words is None:
            opt.step(lambda x, y, model=model: cross_entropy(model(x), y), x, y)
            assert opt.stats.penalty_ratio == pytest.approx(2.0, rel=1e-6)


def test_a_parameter_that_is_not_always_there():
    """What is known is kept with one that is missing in some steps; it is not learnt anew."""
    model = net()
    opt = MAKERS["sgd"](model, steps_per_epoch=EPOCH)
    for step, (x, y) in enumerate(batches(150)):
        model[0].weight.requires_grad_(step % 3 != 1)
        opt.step(lambda x=x, y=y: cross_entropy(model(x), y))
    assert sum("rho_evidence" in state for state in opt.state.values()) == 1


def without_a_scope(opt, loss):
    loss().backward()
    opt.step()


def with_a_scope(opt, loss):
    loss().backward()
    with opt.perturbed():
        loss().backward()
    opt.step()


def without_a_return(opt, loss):
    def closure():
        opt.zero_grad()
        loss().backward()

    opt.step(closure)


@pytest.mark.parametrize("step", [without_a_scope, with_a_scope, without_a_return])
def test_a_loop_that_never_tells_its_loss_is_told(step):
    """Once: ρ would stay at 0, or next to it, without a word."""
    w = nn.Parameter(torch.ones(2))
    opt = SGDTracer([w], lr=0.1, steps_per_epoch=10)
    with pytest.warns(UserWarning, match="this step was given none"):
        step(opt, lambda: w.square().sum())
    opt.zero_grad()
    step(opt, lambda: w.square().sum())
