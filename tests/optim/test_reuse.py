"""Penalties for less than a second pass, against loops written out with autograd and torch's own optimisers."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer import AdamTracer, FiniteDifference, SGDTracer, Tracer
from gtracer.curvature import hutchinson
from gtracer.experimental import PartialBatch, PreviousStep

RHO, DELTA, BETA = 0.02, 0.05, 0.1


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def data(steps=8):
    torch.manual_seed(1)
    return list(zip(torch.randn(steps, 12, 5).double(), torch.randint(3, (steps, 12)), strict=True))


def gradients(model, x, y, **words):
    return torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()), **words)


def update(opt, params, total):
    for p, g in zip(params, total, strict=True):
        p.grad = g.detach().clone()
    opt.step()


def followed(f, g):
    return [(1 - BETA) * a + BETA * b.detach() ** 2 for a, b in zip(f, g, strict=True)]


def trained(maker=None, batches=None, **options):
    model = net()
    maker = maker or (lambda params, **own: SGDTracer(params, lr=0.1, momentum=0.9, beta=BETA, **own))
    opt = maker(model.parameters(), rho=RHO, delta=DELTA, **options)
    calls = []

    def closure(x, y):
        calls.append(1)
        return cross_entropy(model(x), y)

    losses = [float(opt.step(closure, x, y)) for x, y in batches or data()]
    return nn.utils.parameters_to_vector(model.parameters()).detach(), losses, len(calls), opt


@pytest.mark.parametrize(("interval", "reuse"), [(3, 0.5), (2, 1.0), (4, 0)])
def test_the_last_penalty_again(interval, reuse):
    model = net()
    params = list(model.parameters())
    opt = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    f, penalty = None, None
    for step, (x, y) in enumerate(data()):
        g = gradients(model, x, y, create_graph=True)
        f = f or [a.detach() ** 2 for a in g]
        if step % interval == 0:
            T = sum((a**2 / (b + DELTA)).sum() for a, b in zip(g, f, strict=True))
            penalty = [RHO * slope for slope in torch.autograd.grad(T, params)]
        else:
            penalty = [reuse * slope for slope in penalty]
        update(opt, params, [a + b for a, b in zip(g, penalty, strict=True)])
        f = followed(f, g)
    found, *_ = trained(interval=interval, reuse=reuse, engine="exact")
    torch.testing.assert_close(found, nn.utils.parameters_to_vector(params).detach(), rtol=1e-10, atol=1e-12)


def test_one_pass_displaced_by_the_step_before():
    model = net()
    params = list(model.parameters())
    opt = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    f, ahead, losses = None, None, []
    for x, y in data():
        moved = copy.deepcopy(model)
        if ahead is not None:
            with torch.no_grad():
                for p, v in zip(moved.parameters(), ahead, strict=True):
                    p += 2 * RHO * v
        losses.append(float(cross_entropy(moved(x), y).detach()))
        g = gradients(moved, x, y)
        f = followed(f or [a**2 for a in g], g)
        ahead = [a / (b + DELTA) for a, b in zip(g, f, strict=True)]
        update(opt, params, g)
    found, found_losses, calls, _ = trained(reuse=PreviousStep())
    assert calls == 8
    assert found_losses == pytest.approx(losses, rel=1e-10)
    torch.testing.assert_close(found, nn.utils.parameters_to_vector(params).detach(), rtol=1e-10, atol=1e-12)


def test_it_is_the_penalty_to_first_order():
    """On the same batch again and again, with steps so small that the step before is this one."""
    batch = data(1)[0]

    def change(**options):
        model = net()
        opt = SGDTracer(model.parameters(), lr=1e-9, rho=1e-4, delta=DELTA, **options)
        for _ in range(2):
            opt.step(lambda: cross_entropy(model(batch[0]), batch[1]))
        plain = gradients(model, *batch)
        return torch.cat([(p.grad - g).flatten() for p, g in zip(model.parameters(), plain, strict=True)])

    full, cheap = change(engine="exact"), change(reuse=PreviousStep())
    assert (cheap - full).norm() < 0.02 * full.norm()


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_share_of_the_batch(share):
    """g + 2 H_share u, with u from the whole batch and H from its first examples."""
    model = net()
    params = list(model.parameters())
    opt = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    f = None
    for x, y in data():
        some = round(12 * share)
        g = gradients(model, x, y)
        f = f or [a**2 for a in g]
        part = gradients(model, x[:some], y[:some], create_graph=True)
        u = [RHO * a / (b + DELTA) for a, b in zip(g, f, strict=True)]
        product = torch.autograd.grad(part, params, u)
        update(opt, params, [a + 2 * b for a, b in zip(g, product, strict=True)])
        f = followed(f, g)
    expected = nn.utils.parameters_to_vector(params).detach()
    for central in (False, True):  # only the first needs the share's gradient at the weights themselves
        found, *_ = trained(engine=PartialBatch(share, 1e-6, central))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_share_with_dropout_and_batch_norm():
    """Dropout draws the same masks for it again, and batch norm counts one pass."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.5), nn.Linear(7, 3)).double()
    ratios = []
    for rho in (1e-9, 1e-6):
        model = copy.deepcopy(start)
        opt = SGDTracer(model.parameters(), lr=0.1, rho=rho, delta=DELTA, model=model, engine=PartialBatch(0.5))
        torch.manual_seed(2)
        for x, y in data(3):
            opt.step(lambda x, y, model=model: cross_entropy(model(x), y), x, y)
        ratios.append(opt.stats.penalty_ratio)
        assert int(model[1].num_batches_tracked) == 3
    # Other masks in the second pass would give a difference that does not fall with ρ.
    assert ratios[1] == pytest.approx(1000 * ratios[0], rel=1e-2)


def test_passes():
    assert trained(interval=4, reuse=0.9)[2] == 10
    assert trained(interval=4)[2] == 10
    assert trained(reuse=PreviousStep())[2] == 8


MAKERS = {
    "SGDTracer": None,
    "AdamTracer": lambda params, **own: AdamTracer(params, lr=0.01, **own),
    "Tracer": lambda params, **own: Tracer(torch.optim.RMSprop(params, lr=0.01), **own),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("options", [{"interval": 3, "reuse": 0.5}, {"reuse": PreviousStep()}])
def test_saved_and_loaded_it_goes_on(maker, options):
    """In the middle of an interval; what is reused is in the state."""
    straight, *_ = trained(MAKERS[maker], **options)
    half, _, _, first = trained(MAKERS[maker], data()[:4], **options)
    model = net()
    nn.utils.vector_to_parameters(half, model.parameters())
    make = MAKERS[maker] or (lambda params, **own: SGDTracer(params, lr=0.1, momentum=0.9, beta=BETA, **own))
    opt = make(model.parameters(), rho=RHO, delta=DELTA, **options)
    opt.load_state_dict(first.state_dict())
    for x, y in data()[4:]:
        opt.step(lambda x=x, y=y: cross_entropy(model(x), y))
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), straight)


def test_a_penalty_of_none_is_sgd():
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in data():
        opt.zero_grad()
        cross_entropy(model(x), y).backward()
        opt.step()
    for options in ({"interval": 3, "reuse": 0.5}, {"reuse": PreviousStep()}):
        twin = net()
        ours = SGDTracer(twin.parameters(), lr=0.1, momentum=0.9, rho=0.0, **options)
        for x, y in data():
            ours.step(lambda x=x, y=y, twin=twin: cross_entropy(twin(x), y))
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q)


def test_a_penalty_that_is_switched_off_is_not_used_again():
    model = net()
    opt = SGDTracer(model.parameters(), lr=0.1, rho=RHO, delta=DELTA, interval=3, reuse=1.0)
    (x, y), *rest = data()
    opt.step(lambda: cross_entropy(model(x), y))
    opt.param_groups[0]["rho"] = 0.0
    for x, y in rest:
        plain = gradients(model, x, y)
        opt.step(lambda x=x, y=y: cross_entropy(model(x), y))
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True))


def test_weights_come_back_when_the_closure_fails():
    model = net()
    opt = SGDTracer(model.parameters(), lr=0.1, rho=RHO, delta=DELTA, reuse=PreviousStep())
    x, y = data(1)[0]
    opt.step(lambda: cross_entropy(model(x), y))
    before = copy.deepcopy(model.state_dict())

    def failing():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        opt.step(failing)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reuse": "next"}, "reuse must be"),
        ({"reuse": 1.5, "interval": 2}, "reuse must be"),
        ({"reuse": 0.5}, "set interval to 2 or more"),
        ({"reuse": PreviousStep(), "interval": 2}, "leave interval = 2 out"),
        ({"reuse": PreviousStep(), "engine": "exact"}, "engine='finite-difference'"),
        ({"engine": PartialBatch(0.5), "reuse": PreviousStep()}, "second pass"),
        ({"engine": PartialBatch(0.5), "average": hutchinson()}, "go with curvature=gradient_magnitude"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        SGDTracer(net().parameters(), **options)


@pytest.mark.parametrize("share", [0.0, 1.5, "half"])
def test_shares_that_are_none(share):
    with pytest.raises(ValueError, match="share must be"):
        PartialBatch(share)


def test_a_share_needs_the_batch():
    model = net()
    opt = SGDTracer(model.parameters(), rho=RHO, engine=PartialBatch(0.5))
    (x, y), other = data(2)
    with pytest.raises(RuntimeError, match=r"share = 0\.5 splits the batch: hand it to step"):
        opt.step(lambda: cross_entropy(model(x), y))
    with pytest.raises(RuntimeError, match=r"share = 0\.5 with batches"):
        opt.step(lambda x, y: cross_entropy(model(x), y), batches=[(x, y), other])
    opt.step(lambda x, y: cross_entropy(model(x), y), x, y)


def test_a_loop_without_closure_is_refused():
    """As is its scope, in which nothing would be displaced."""
    model = net()
    opt = SGDTracer(model.parameters(), reuse=PreviousStep())
    x, y = data(1)[0]
    cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"reuse=PreviousStep\(\) displaces the weights itself"):
        opt.step()
    with pytest.raises(RuntimeError, match="one pass in all"):
        opt.perturbed()


def test_where_nothing_is_said_the_partial_batch_is_a_forward_difference_as_long_as_any():
    assert PartialBatch(0.5) == PartialBatch(0.5, radius=FiniteDifference().radius, central=FiniteDifference().central)
    assert not PartialBatch(0.5).central


def test_a_share_of_every_third_batch_alone():
    """Both parts and the share again in a step that is due; the whole batch once in the others, as SGD."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    plain = copy.deepcopy(model)
    x, sizes = torch.randn(8, 3, dtype=torch.float64), []
    opt = SGDTracer(model.parameters(), lr=0.1, rho=RHO, delta=DELTA, interval=3, engine=PartialBatch(0.25))

    def loss_of(rows):
        sizes.append(len(rows))
        return model(rows).square().mean()

    for step in range(4):
        plain.load_state_dict(model.state_dict())
        opt.step(loss_of, x)
        gradients = torch.autograd.grad(plain(x).square().mean(), list(plain.parameters()))
        moved = [(before - after) / 0.1 for before, after in zip(plain.parameters(), model.parameters(), strict=True)]
        alike = all(torch.allclose(a, b) for a, b in zip(moved, gradients, strict=True))
        assert alike == (step % 3 != 0)
    assert sizes == [2, 6, 2, 8, 8, 2, 6, 2]
