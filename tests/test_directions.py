"""scale_free: weights before batch norm count by their direction, all others as ever."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer import AdamTracer, SGDTracer, curvature
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


def trained(model, groups, **options):
    xs, ys = data()
    opt = SGDTracer(groups, lr=0.1, rho=0.02, delta=0.01, model=model, scale_free=True, **options)
    ratios = []
    for x, y in zip(xs.to(model[0].weight.dtype), ys, strict=True):
        opt.step(lambda x=x, y=y: cross_entropy(model(x), y))
        ratios.append(float(opt.stats.trace_ratio))
    return model(xs[0].to(model[0].weight.dtype)).detach(), torch.tensor(ratios)


def split(model, factor):
    """With rows c times longer the same steps of the direction need c² times the learning rate."""
    free = free_weights(model)
    rest = [p for p in model.parameters() if all(p is not w for w in free)]
    return [{"params": free, "lr": 0.1 * factor**2}, {"params": rest}]


OPTIONS = {
    "finite difference": {"radius": 1e-5, "difference": "central"},
    "exact": {"engine": "exact"},
    "per example": {"curvature": curvature.per_example},
    "a constant f₀": {"engine": "exact", "f0": 0.0},
    "compiled": {"radius": 1e-5, "compiled": True},
    "micro-batches": {"engine": "exact", "curvature": curvature.micro_batch(16)},
}


@pytest.mark.parametrize("name", ["finite difference", "exact", "a constant f₀"])
def test_longer_rows_train_the_same_network(name):
    """The network with rows three times as long is the same function, and stays so."""
    short, long = net(), net()
    with torch.no_grad():
        for p in free_weights(long):
            p.mul_(3)
    same, ratios = trained(short, split(short, 1), **OPTIONS[name])
    found, found_ratios = trained(long, split(long, 3), **OPTIONS[name])
    # The displacement has one length for all weights, so a difference sees long rows at other places.
    close = {"rtol": 1e-3, "atol": 1e-4} if name == "finite difference" else {"rtol": 1e-8, "atol": 1e-8}
    torch.testing.assert_close(found, same, **close)
    torch.testing.assert_close(found_ratios, ratios, **close)


def test_by_the_weights_it_is_another_network():
    """What the test before would find without scale_free."""
    found = []
    for factor in (1, 3):
        model = net()
        with torch.no_grad():
            for p in free_weights(model):
                p.mul_(factor)
        opt = SGDTracer(split(model, factor), lr=0.1, rho=0.02, delta=0.01, model=model, engine="exact")
        for x, y in zip(*data(), strict=True):
            opt.step(lambda x=x, y=y, model=model: cross_entropy(model(x.double()), y))
        found.append(model(data()[0][0].double()).detach())
    assert (found[0] - found[1]).abs().max() > 0.01


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_penalty_by_hand(dtype):
    """T = Σ (∇L)²/(f + δ/‖w‖²) on free rows and Σ (∇L)²/(f + δ) elsewhere; no part along free rows."""
    model = net(dtype=dtype)
    x, y = data(1)[0][0].to(dtype), data(1)[1][0]
    params = list(model.parameters())
    gradients = torch.autograd.grad(cross_entropy(model(x), y), params, create_graph=True)
    f = [g.detach() ** 2 for g in gradients]
    free = free_weights(model)
    total, T = [], 0
    for p, g, average in zip(params, gradients, f, strict=True):
        rows = p.detach().flatten(1).norm(dim=1) ** 2 if p.ndim > 1 else None
        is_free = any(p is w for w in free)
        T = T + (g**2 / (average + (0.01 / rows.view(-1, *[1] * (p.ndim - 1)) if is_free else 0.01))).sum()
    slopes = torch.autograd.grad(T, params)
    for p, g, slope in zip(params, gradients, slopes, strict=True):
        if any(p is w for w in free):
            rows, w = slope.flatten(1), p.detach().flatten(1)
            slope = (rows - w * ((rows * w).sum(1) / (w * w).sum(1))[:, None]).view_as(slope)
        total.append((g + 0.02 * slope).detach())
    opt = SGDTracer(params, lr=0.0, rho=0.02, delta=0.01, model=model, engine="exact", scale_free=True)
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
    assert [bool(directions._is_free(p, p.grad)) for p in weights] == [True, True, False]


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
