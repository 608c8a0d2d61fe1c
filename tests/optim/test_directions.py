"""scale_free: weights before batch norm count by their direction, all others as ever."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer import AdamTracer, FiniteDifference, SGDTracer, curvature
from gtracer.optim import directions


def data(steps=6):
    torch.manual_seed(1)
    return torch.randn(steps, 32, 3, 8, 8), torch.randint(5, (steps, 32))


def net(norm=True, dtype=torch.float64):
    """The first two layers' rows are free where there is a norm, the last layer's never are."""
    torch.manual_seed(0)
    between = [nn.BatchNorm2d(6)] if norm else []
    behind = [nn.BatchNorm1d(8)] if norm else []
    layers = nn.Conv2d(3, 6, 3, bias=False), *between, nn.Tanh(), nn.Flatten(), nn.Linear(216, 8, bias=False), *behind
    model = nn.Sequential(*layers, nn.Tanh(), nn.Linear(8, 5)).to(dtype)
    for layer in model:
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.eps = 1e-12 if dtype == torch.float64 else 1e-5  # by which a row's length counts a little
    return model


def free_weights(model):
    return [layer.weight for layer in model if isinstance(layer, nn.Conv2d | nn.Linear)][:-1]


def grown(factor, scale_free=True, **options):
    """Two steps; then the free rows become so many times longer, and four more. What is the network then?

    The same steps of a direction need factor² times the learning rate, and f, an average of squared gradients, is
    smaller by as much.
    """
    model = net()
    free = free_weights(model)
    rest = [p for p in model.parameters() if all(p is not w for w in free)]
    groups = [{"params": free}, {"params": rest}]
    opt = SGDTracer(groups, lr=0.1, rho=0.02, delta=0.01, model=model, scale_free=scale_free, **options)
    ratios = []
    for i, (x, y) in enumerate(zip(*data(), strict=True)):
        if i == 2:
            opt.param_groups[0]["lr"] *= factor**2
            with torch.no_grad():
                for p in free:
                    p.mul_(factor)
                    opt.state[p]["f"].div_(factor**2)
        opt.step(lambda x=x, y=y: cross_entropy(model(x.double()), y))
        ratios.append(float(opt.stats.trace_ratio))
    return model(data()[0][0].double()).detach(), torch.tensor(ratios)


OPTIONS = {
    "finite difference": {"engine": FiniteDifference(1e-5, central=True)},
    "exact": {"engine": "exact"},
    "per example": {"curvature": curvature.per_example},
    "a constant f₀": {"engine": "exact", "f0": 0.0},
    "compiled": {"engine": FiniteDifference(1e-5), "implementation": "compiled"},
    "micro-batches": {"engine": "exact", "curvature": curvature.micro_batch(16)},
}


@pytest.mark.parametrize("name", ["finite difference", "exact", "a constant f₀"])
def test_longer_rows_train_the_same_network(name):
    same, ratios = grown(1, **OPTIONS[name])
    found, found_ratios = grown(3, **OPTIONS[name])
    # The displacement has one length for all weights, so a difference sees long rows at other places.
    close = {"rtol": 1e-3, "atol": 1e-4} if name == "finite difference" else {"rtol": 1e-8, "atol": 1e-8}
    torch.testing.assert_close(found, same, **close)
    torch.testing.assert_close(found_ratios, ratios, **close)


def test_by_the_weights_it_is_another_network():
    """What the test before would find without scale_free."""
    (same, _), (found, _) = (grown(factor, scale_free=False, engine="exact") for factor in (1, 3))
    assert (found - same).abs().max() > 0.01


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_penalty_by_hand(dtype):
    """T = Σ (∇L)²/(f + δ ‖w₀‖²/‖w‖²) on free rows and Σ (∇L)²/(f + δ) elsewhere; no part along free rows."""
    model = net(dtype=dtype)
    x, y = data(1)[0][0].to(dtype), data(1)[1][0]
    params, free = list(model.parameters()), free_weights(model)
    opt = SGDTracer(params, lr=0.0, rho=0.02, delta=0.01, model=model, engine="exact", scale_free=True)
    opt.step(lambda: cross_entropy(model(x), y))
    f = [opt.state[p]["f"].clone() for p in params]
    with torch.no_grad():
        for p in free:
            p.mul_(2)
    gradients = torch.autograd.grad(cross_entropy(model(x), y), params, create_graph=True)
    is_free = [any(p is w for w in free) for p in params]
    terms = zip(gradients, f, is_free, strict=True)
    T = sum((g**2 / (average + (0.01 / 4 if shorter else 0.01))).sum() for g, average, shorter in terms)
    total = []
    for p, g, slope, turned in zip(params, gradients, torch.autograd.grad(T, params), is_free, strict=True):
        if turned:
            rows, w = slope.flatten(1), p.detach().flatten(1)
            slope = (rows - w * ((rows * w).sum(1) / (w * w).sum(1))[:, None]).view_as(slope)
        total.append((g + 0.02 * slope).detach())
    opt.step(lambda: cross_entropy(model(x), y))
    assert float(opt.stats.trace_ratio) == pytest.approx(float(T.detach()), rel=1e-5)
    torch.testing.assert_close([p.grad for p in params], total)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPTIONS)
def test_without_norm_nothing_changes(name):
    xs, ys = data()
    found = []
    for scale_free in (False, True):
        model = net(norm=False)
        given = OPTIONS[name] | {"model": model, "scale_free": scale_free}
        opt = SGDTracer(model.parameters(), lr=0.1, rho=0.002, delta=0.01, **given)
        for x, y in zip(xs.double(), ys, strict=True):
            opt.step(lambda x, y, model=model: cross_entropy(model(x), y), x, y)
        found.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_which_weights_are_free(precision):
    """Found from the gradient alone, in half precision too."""
    model = net(dtype=torch.float32)
    x, y = data(1)[0][0], data(1)[1][0]
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        cross_entropy(model(x), y).backward()
    weights = [p for p in model.parameters() if p.ndim > 1]
    assert [bool(x) for x in directions.rows_of(weights, [p.grad for p in weights]).free] == [True, True, False]


def test_rows_of_zeros():
    """They have no direction; nothing becomes NaN."""
    model = net(dtype=torch.float32)
    with torch.no_grad():
        model[0].weight[0] = 0
    before = copy.deepcopy(model.state_dict())
    opt = AdamTracer(model.parameters(), lr=0.01, rho=0.02, delta=0.01, model=model, scale_free=True)
    x, y = data(1)[0][0], data(1)[1][0]
    opt.step(lambda: cross_entropy(model(x), y))
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert not torch.equal(model[0].weight, before["0.weight"])


def test_no_posterior():
    model = net(dtype=torch.float32)
    opt = SGDTracer(model.parameters(), lr=0.1, scale_free=True)
    x, y = data(1)[0][0], data(1)[1][0]
    opt.step(lambda: cross_entropy(model(x), y))
    with pytest.raises(RuntimeError, match="scale_free"), opt.sampled_weights():
        pass
