"""What was wrong once: each was found by attacking the optimisers, and is held by numbers here."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer import AdamTracer, AdamWTracer, Clip, FiniteDifference, SGDTracer, Tracer, TracerPenalty
from gtracer.curvature import micro_batch
from gtracer.experimental import PartialBatch, vectorised_micro_batch

X = torch.randn(12, 5, dtype=torch.double, generator=torch.Generator().manual_seed(1))
Y = torch.arange(12) % 3


def net(dtype=torch.double):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


@pytest.mark.parametrize("own", [{"engine": PartialBatch(0.5)}, {}], ids=["share", "whole"])
def test_a_scaler_scales_no_penalty(own):
    """The second pass over a share of the batch was never unscaled."""

    def ratio(scaler):
        model = net(torch.float32)
        opt = SGDTracer(model.parameters(), lr=0.1, rho=0.01, model=model, **own)
        opt.step(lambda x, y: cross_entropy(model(x), y), X.float(), Y, scaler=scaler)
        return opt.stats.penalty_ratio

    assert ratio(torch.amp.GradScaler("cpu", init_scale=1024.0)) == pytest.approx(ratio(None), rel=1e-5)


def loop(opt, model, clip=None):
    opt.zero_grad()
    cross_entropy(model(X), Y).backward()
    with opt.perturbed():
        cross_entropy(model(X), Y).backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    opt.step()


def test_what_is_reused_is_not_clipped():
    """Clipped by the loop, the penalty that was kept was mostly −∇L."""

    def last(clip):
        model = net()
        opt = SGDTracer(model.parameters(), lr=0.1, rho=0.01, interval=4, reuse=1.0, model=model)
        loop(opt, model, clip)
        return flat(opt.state[p]["last_penalty"] for p in model.parameters())

    assert torch.equal(last(None), last(0.01))
    assert last(None).norm() > 0.01


@pytest.mark.parametrize("own", [{"interval": 3}, {"rho": 0.0}, {"interval": 3, "reuse": 0.5}], ids=str)
def test_f_does_not_learn_of_what_torch_writes_into_the_gradient(own):
    """Nesterov's foreach update does, in place."""

    def f(foreach):
        model = net()
        given = {"momentum": 0.9, "nesterov": True, "rho": 0.01} | own
        opt = SGDTracer(model.parameters(), lr=0.1, foreach=foreach, model=model, **given)
        for _ in range(5):
            opt.step(lambda: cross_entropy(model(X), Y))
        return flat(opt.state[p]["f"] for p in model.parameters())

    torch.testing.assert_close(f(True), f(False), rtol=1e-12, atol=0)


def test_f_does_not_learn_of_clipping_in_a_loop():
    def f(clip):
        model = net()
        opt = SGDTracer(model.parameters(), lr=0.0, rho=0.01, interval=2, model=model)
        for _ in range(4):
            loop(opt, model, clip)
        return flat(opt.state[p]["f"] for p in model.parameters())

    assert torch.equal(f(0.01), f(None))


@pytest.mark.parametrize("average", [None, "batch"])
def test_f0_of_micro_batches_is_that_of_the_batch(average):
    """Not each part's own; so it is with all parts in one pass, and so in the loss term."""
    from gtracer.curvature import gradient_magnitude

    own = {} if average is None else {"average": gradient_magnitude}

    def moved(kind, rho):
        model = net()
        start = flat(model.parameters())
        if kind == "penalty":
            penalty = TracerPenalty(model.parameters(), rho=rho, curvature=micro_batch(4), **own)
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            penalty(cross_entropy(model(X), Y, reduction="none")).backward()
            opt.step()
        else:
            curvature = (vectorised_micro_batch if kind == "stacked" else micro_batch)(4)
            engine = FiniteDifference(1e-4, central=True)
            opt = SGDTracer(model.parameters(), lr=0.1, rho=rho, model=model, engine=engine, curvature=curvature, **own)
            opt.step(lambda x, y: cross_entropy(model(x), y), X, Y)
        return flat(model.parameters()) - start

    plain = moved("parts", 0.0)
    parts, stacked, penalty = (moved(kind, 0.01) - plain for kind in ("parts", "stacked", "penalty"))
    torch.testing.assert_close(parts, stacked, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(parts, penalty, rtol=1e-5, atol=1e-9)


def test_f0_of_each_part_is_that_of_the_batch():
    model, twin = net(), net()
    given = {"lr": 0.1, "rho": 0.01}
    parts = list(zip(X.split(4), Y.split(4), strict=True))
    opt = SGDTracer(model.parameters(), **given)
    opt.step(lambda x, y: cross_entropy(model(x), y), batches=parts, penalty="each")
    other = SGDTracer(twin.parameters(), **given, curvature=micro_batch(4))
    other.step(lambda x, y: cross_entropy(twin(x), y), X, Y)
    torch.testing.assert_close(flat(model.parameters()), flat(twin.parameters()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", [torch.ones(3), torch.tensor(1.0)], ids=["vector", "scalar"])
@pytest.mark.parametrize("curvature", [vectorised_micro_batch(4), micro_batch(4)], ids=repr)
def test_a_group_that_is_frozen_as_a_whole(frozen, curvature):
    model, twin = net(), net()
    model.extra = nn.Parameter(frozen.double(), requires_grad=False)
    own = [p for name, p in model.named_parameters() if name != "extra"]
    opt = SGDTracer([{"params": own}, {"params": [model.extra]}], lr=0.1, model=model, curvature=curvature)
    opt.step(lambda x, y: cross_entropy(model[:3](x), y), X, Y)
    other = SGDTracer(twin.parameters(), lr=0.1, model=twin, curvature=curvature)
    other.step(lambda x, y: cross_entropy(twin(x), y), X, Y)
    assert torch.equal(flat(own), flat(twin.parameters()))


class Tempered(nn.Module):
    """Times a number that is learnt."""

    def __init__(self):
        super().__init__()
        self.net, self.temperature = net(), nn.Parameter(torch.tensor(1.0).double())

    def forward(self, x):
        return self.net(x) * self.temperature


def test_a_parameter_without_dimensions():
    results = []
    for curvature in (vectorised_micro_batch(4), micro_batch(4)):
        model = Tempered()
        opt = SGDTracer(model.parameters(), lr=0.1, rho=0.01, model=model, curvature=curvature)
        opt.step(lambda x, y, model=model: cross_entropy(model(x), y), X, Y)
        results.append(flat(model.parameters()))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


def test_numbers_of_a_step_with_a_group_that_has_no_gradient():
    model = net()
    groups = [{"params": list(model.parameters())}, {"params": [nn.Parameter(torch.ones(3).double())]}]
    opt = AdamTracer(groups, lr=0.1)
    opt.step(lambda: cross_entropy(model(X), Y))
    alone = AdamTracer((twin := net()).parameters(), lr=0.1)
    alone.step(lambda: cross_entropy(twin(X), Y))
    assert str(opt.stats) == str(alone.stats)


MAKERS = {
    **{
        name: lambda m, name=name: Tracer(getattr(torch.optim, name)(m.parameters(), lr=1e-3), rho=0.01)
        for name in ("SGD", "Adam", "RMSprop", "NAdam", "Adadelta")
    },
    "AdamWTracer": lambda m: AdamWTracer(m.parameters(), rho=0.01),
    "clipped": lambda m: SGDTracer(m.parameters(), rho=0.01, clip=Clip(norm=1.0)),
    "reused": lambda m: SGDTracer(m.parameters(), rho=0.01, interval=2, reuse=0.5),
    "scale-free": lambda m: SGDTracer(m.parameters(), rho=0.01, scale_free=True),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_gradient_that_the_loop_has_taken_away(name):
    """As DINO does with its last layer: that parameter stays as it is, as with torch's own optimisers."""
    model = net()
    opt = MAKERS[name](model)
    for dropped in (True, False, True):
        before = copy.deepcopy(model.state_dict())
        state = {k: v.clone() for k, v in opt.state.get(model[0].weight, {}).items() if isinstance(v, torch.Tensor)}
        opt.zero_grad()
        cross_entropy(model(X), Y).backward()
        with opt.perturbed():
            cross_entropy(model(X), Y).backward()
        if dropped:
            model[0].weight.grad = None
        opt.step()
        assert torch.equal(model[0].weight, before["0.weight"]) == dropped
        assert not torch.equal(model[2].weight, before["2.weight"])
        if dropped:
            assert all(torch.equal(opt.state[model[0].weight][k], v) for k, v in state.items())


@pytest.mark.parametrize("own", [{}, {"scale_free": True}, {"engine": "exact"}], ids=str)
def test_a_tensor_without_elements(own):
    """Is as if it were not there."""
    found = []
    for empty in (True, False):
        torch.manual_seed(0)
        weight, none = nn.Parameter(torch.randn(2, 2).double()), nn.Parameter(torch.ones(3, 0).double())
        opt = SGDTracer([weight, none] if empty else [weight], lr=0.1, rho=0.01, **own)
        opt.step(lambda weight=weight, none=none: weight.tanh().square().sum() + none.sum())
        found.append(weight.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("cls", [AdamTracer, AdamWTracer])
def test_an_amsgrad_checkpoint_is_refused(cls):
    model = net()
    plain = torch.optim.Adam(model.parameters(), amsgrad=True)
    cross_entropy(model(X), Y).backward()
    plain.step()
    opt = cls(model.parameters())
    with pytest.raises(ValueError, match="amsgrad must be False, got True"):
        opt.load_state_dict(plain.state_dict())
    assert not opt.state
    Tracer(torch.optim.Adam(net().parameters(), amsgrad=True))  # keeps the two apart


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
def test_a_plain_adam_checkpoint_goes_on(cls):
    """Its second moment is f, so nothing starts anew, and nobody is warned."""
    ours = {torch.optim.Adam: AdamTracer, torch.optim.AdamW: AdamWTracer}[cls]
    model = net()
    plain = cls(model.parameters(), lr=0.01)
    for _ in range(3):
        plain.zero_grad()
        cross_entropy(model(X), Y).backward()
        plain.step()
    twin = copy.deepcopy(model)
    opt = ours(twin.parameters(), lr=0.5, rho=0.0)
    opt.load_state_dict(copy.deepcopy(plain.state_dict()))
    plain.zero_grad()
    cross_entropy(model(X), Y).backward()
    plain.step()
    opt.step(lambda: cross_entropy(twin(X), Y))
    assert torch.equal(flat(model.parameters()), flat(twin.parameters()))


@pytest.mark.parametrize("own", [{"curvature": micro_batch(4)}, {}], ids=["micro-batches", "each"])
def test_f0_costs_passes_in_the_first_step_only(own):
    """Also where a parameter is frozen, or never used, and so never has an f."""
    model, calls = net(), []
    model[0].bias.requires_grad_(False)
    unused, frozen = nn.Parameter(torch.ones(2).double()), nn.Parameter(torch.ones(2).double(), requires_grad=False)
    groups = [{"params": [*model.parameters(), unused]}, {"params": [frozen]}]
    opt = SGDTracer(groups, lr=0.1, rho=0.01, model=model, **own)

    def closure(x, y):
        calls.append(1)
        return cross_entropy(model(x), y)

    counts = []
    for _ in range(3):
        calls.clear()
        if own:
            opt.step(closure, X, Y)
        else:
            opt.step(closure, batches=list(zip(X.split(4), Y.split(4), strict=True)), penalty="each")
        counts.append(len(calls))
    assert counts == [9, 6, 6]


@pytest.mark.parametrize("training", [True, False])
def test_statistics_of_a_batch_in_parts_do_not_depend_on_the_engine(training):
    """In one graph each micro-batch moved them by itself, and counted as a batch."""

    def buffers(engine):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3)).double().train(training)
        opt = SGDTracer(model.parameters(), lr=0.1, rho=0.01, engine=engine, model=model)
        opt.step(lambda x, y: cross_entropy(model(x), y), batches=[(X[:4], Y[:4]), (X[4:], Y[4:])])
        return {name: b.clone() for name, b in model.named_buffers()}

    exact, difference = buffers("exact"), buffers("finite-difference")
    assert exact["1.num_batches_tracked"] == int(training)
    torch.testing.assert_close(exact, difference, rtol=0, atol=1e-12)
