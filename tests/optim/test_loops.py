"""Loops as people write them, and what goes wrong in them: skipped steps, odd buffers, calls in another order."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer import FiniteDifference, SGDTracer
from support.batches import OPTIMIZERS, Setting, everyone, plain


def scaler(**own):
    return torch.amp.GradScaler("cpu", **({"init_scale": 1024.0} | own))


def test_weights_are_displaced_in_the_scope_and_the_total_is_the_closures():
    (mine, opt), (other, twin) = (
        (net, SGDTracer(net.parameters(), lr=0.1, rho=0.5, f0=1.0, model=net))
        for net in (nn.Linear(3, 1, dtype=torch.float64), nn.Linear(3, 1, dtype=torch.float64))
    )
    other.load_state_dict(mine.state_dict())
    x, before = torch.randn(5, 3).double(), mine.weight.detach().clone()
    opt.zero_grad()
    mine(x).square().mean().backward()
    with opt.perturbed():
        assert not torch.equal(mine.weight, before)
        mine(x).square().mean().backward()
    assert torch.equal(mine.weight, before)
    opt.step()
    twin.step(lambda: other(x).square().mean())
    assert torch.equal(mine.weight, other.weight)
    assert opt.stats.penalty_ratio == twin.stats.penalty_ratio > 0


# Skipped steps.


@everyone
@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("cleared_by", ["optimiser", "model"])
def test_a_loop_goes_on_after_a_skipped_step(make, interval, cleared_by):
    """Whoever clears the gradients: the next step knows nothing of the one that a scaler skipped."""
    setting = Setting(torch.float32)

    def weights(overflow):
        model = setting.start
        opt, scale = make(model.parameters(), interval=interval), scaler()
        start = {name: value.clone() for name, value in model.state_dict().items()}
        factors = [1.0, 1.0, *([1e38] if overflow else []), 1.0, 1.0]
        rows = [0, 1, *([3] if overflow else []), 2, 3]
        for i, factor in zip(rows, factors, strict=True):
            (opt if cleared_by == "optimiser" else model).zero_grad()
            loss = cross_entropy(model(setting.x[i]), setting.y[i])
            scale.scale(loss * factor).backward()
            with opt.perturbed(scaler=scale):
                scale.scale(cross_entropy(model(setting.x[i]), setting.y[i]) * factor).backward()
            scale.step(opt)
            scale.update()
        found = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        model.load_state_dict(start)
        return found, scale.get_scale()

    (found, lowered), (expected, kept) = weights(True), weights(False)
    assert lowered == kept / 2
    assert torch.equal(found, expected)


@everyone
def test_an_overflow_leaves_statistics_that_nobody_saves_finite(make):
    """Without model= the second pass counts too, but never at weights of NaN."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    opt, scale = make(model.parameters()), scaler(init_scale=2.0**120)
    x, y = torch.randn(12, 5), torch.randint(3, (12,))
    for _ in range(4):
        opt.step(lambda: cross_entropy(model(x), y) * 1e10, scaler=scale)
        scale.update()
    assert scale.get_scale() == 2.0**116  # all were skipped
    assert all(torch.isfinite(b).all() for b in model.buffers())


def test_unscaling_before_the_second_pass_is_refused():
    model, scale = nn.Linear(5, 3), scaler()
    opt = SGDTracer(model.parameters())
    scale.scale(model(torch.ones(2, 5)).square().mean()).backward()
    scale.unscale_(opt)
    with pytest.raises(RuntimeError, match="unscaled twice"), opt.perturbed(scaler=scale):
        pass


@everyone
def test_an_error_in_the_second_pass_leaves_scaled_gradients(make):
    model, scale = nn.Linear(5, 3), scaler()
    opt = make(model.parameters())
    scale.scale(model(torch.ones(2, 5)).square().mean()).backward()
    before = [p.grad.clone() for p in model.parameters()]

    def interrupted():
        with opt.perturbed(scaler=scale):
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), before, strict=True))


# Half precision.


def penalty_at(radius, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 10))
    x, y, found = torch.randn(256, 64), torch.randint(10, (256,)), []
    for rho in (0.003, 0.0):

        def closure():
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                return cross_entropy(model(x).float(), y)

        SGDTracer(model.parameters(), lr=0.0, rho=rho, engine=FiniteDifference(radius)).step(closure)
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return found[0] - found[1]


def test_a_larger_radius_rounds_less():
    """As docs/how-to/mixed-precision.md says of bfloat16."""

    def error(radius):
        expected = penalty_at(radius, None)
        return (penalty_at(radius, torch.bfloat16) - expected).norm() / expected.norm()

    assert error(0.2) < 0.5 * error(0.05)
    assert error(0.2) < 0.1


# Buffers.


class Masked(nn.Module):
    """Attention's mask is a buffer with −∞; and the inputs' average is put in the place of the last one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3).double()
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1).double())
        self.register_buffer("average", torch.zeros(3).double())
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        hidden = self.linear(x)
        self.average = 0.9 * self.average + 0.1 * hidden.detach().mean(0)
        self.count = self.count + 1
        return (self.mask.softmax(1) @ hidden.T).T


WAYS = {
    "plain": lambda opt, loss_of, x: opt.step(loss_of, x),
    "whole": lambda opt, loss_of, x: opt.step(loss_of, batches=[x[:4], x[4:]]),
    "each": lambda opt, loss_of, x: opt.step(loss_of, batches=[x[:4], x[4:]], penalty="each"),
}


@everyone
@pytest.mark.parametrize("way", WAYS)
def test_buffers_that_hold_infinity_or_are_put_anew(make, way):
    model = Masked()
    x = torch.randn(8, 3).double()
    hidden = model.linear(x).detach()
    opt = make(model.parameters(), model=model)
    WAYS[way](opt, lambda x: model(x).square().mean(), x)
    assert torch.equal(model.mask, Masked().mask)
    torch.testing.assert_close(model.average, 0.1 * hidden.mean(0))
    assert model.count == 1


def test_a_step_that_fails_puts_buffers_back():
    model = Masked()
    opt = SGDTracer(model.parameters(), model=model)

    def closure():
        model(torch.ones(2, 3).double())
        raise KeyError

    with pytest.raises(KeyError):
        opt.step(closure)
    assert model.count == 0
    assert not model.average.any()


# Batches.


@everyone
def test_batches_as_a_data_loader_gives_them(make):
    setting = Setting()

    def loaded(opt, loss_of, x, y):
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=5)
        opt.step(loss_of, batches=list(loader))

    torch.testing.assert_close(setting.weights(make, loaded), setting.weights(make, plain), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["SGDTracer", "AdamWTracer"])
def test_not_a_number_in_a_step_that_keeps_no_copy(name, monkeypatch):
    """What displaces the weights is subtracted again, and must be a number for that."""
    monkeypatch.setattr("gtracer.optim.compiler.compiled", lambda function: function)
    model = nn.Linear(5, 3)
    opt = OPTIMIZERS[name](model.parameters(), implementation="compiled", nonfinite="skip")
    opt.step(lambda: model(torch.ones(2, 5)).square().mean())
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    opt.step(lambda: model(torch.full((2, 5), torch.inf)).square().mean())
    after = nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-7)
