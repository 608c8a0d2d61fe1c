"""What hosts do to gradients between the passes: refused where T, f or the step would be wrong, else left alone."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer import SAM, AdamWTracer, Clip, FiniteDifference, SGDTracer


class Setting:
    def __init__(self):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.x, self.y = torch.randn(12, 5).double(), torch.randint(3, (12,))

    @property
    def params(self):
        return list(self.net.parameters())

    @property
    def weights(self):
        return [p.detach().clone() for p in self.params]

    def loss(self, rows=slice(None)):
        return cross_entropy(self.net(self.x[rows]), self.y[rows])


def per_parameter(params):
    for p in params:
        nn.utils.clip_grad_norm_([p], 0.02)


CLIPS = {
    "by norm": lambda params: nn.utils.clip_grad_norm_(params, 0.05),
    "by norm, tensor by tensor": lambda params: nn.utils.clip_grad_norm_(params, 0.05, foreach=False),
    "by value": lambda params: nn.utils.clip_grad_value_(params, 0.01),
    "each parameter": per_parameter,
}


def halve(params):
    for p in params:
        p.grad /= 2


def mask(params):
    for p in params:
        p.grad *= (torch.arange(p.numel()) % 3 > 0).view_as(p)


def centre(params):
    for p in params:
        p.grad -= p.grad.mean()


def into_new_tensors(params):
    for p in params:
        p.grad = p.grad * 0.5


def clip_far_off(params):
    nn.utils.clip_grad_norm_(params, 1e6)


LINEAR = {f.__name__: f for f in (halve, mask, centre, into_new_tensors, clip_far_off)}


def by_closure(opt, setting, touch):
    def closure():
        opt.zero_grad()
        loss = setting.loss()
        loss.backward()
        touch(setting.params)
        return loss

    return opt.step(closure)


def by_scope(opt, setting, touch, first=True):
    opt.zero_grad()
    setting.loss().backward()
    if first:
        touch(setting.params)
    with opt.perturbed():
        setting.loss().backward()
        touch(setting.params)
    opt.step()


def by_two_scopes(opt, setting, touch):
    opt.zero_grad()
    setting.loss().backward()
    touch(setting.params)
    for _ in range(2):
        with opt.perturbed():
            setting.loss().backward()
            touch(setting.params)
    opt.step()


def before_the_scope(opt, setting, touch):
    opt.zero_grad()
    setting.loss().backward()
    touch(setting.params)
    with opt.perturbed():
        setting.loss().backward()
    opt.step()


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize("step", [by_closure, by_scope, before_the_scope])
@pytest.mark.parametrize("make", [SGDTracer, AdamWTracer])
def test_clipping_of_each_pass_is_refused(make, step, clip):
    setting = Setting()
    opt, before = make(setting.params, rho=0.1), setting.weights
    with pytest.raises(RuntimeError, match=r"clip=gtracer\.Clip"):
        step(opt, setting, clip)
    assert all(map(torch.equal, setting.weights, before))
    assert opt.steps == 0


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize("step", [by_closure, by_two_scopes])
def test_of_three_passes_too(step, clip):
    setting = Setting()
    opt, before = SGDTracer(setting.params, rho=0.1, engine=FiniteDifference(central=True)), setting.weights
    with pytest.raises(RuntimeError, match=r"clip=gtracer\.Clip"):
        step(opt, setting, clip)
    assert all(map(torch.equal, setting.weights, before))


@pytest.mark.parametrize("step", [by_closure, by_scope])
def test_clipping_that_begins_later_is_refused_a_step_later(step):
    """In the first steps the bound is far off, so that nothing is wrong; the optimiser goes on looking."""
    setting, bound = Setting(), 1e6
    opt = SGDTracer(setting.params, lr=0.01, rho=0.1)
    for _ in range(3):
        step(opt, setting, lambda params: nn.utils.clip_grad_norm_(params, bound))
    bound = 0.05
    step(opt, setting, lambda params: nn.utils.clip_grad_norm_(params, bound))
    with pytest.raises(RuntimeError, match=r"clip=gtracer\.Clip"):
        step(opt, setting, lambda params: nn.utils.clip_grad_norm_(params, bound))


@pytest.mark.parametrize("touch", LINEAR.values(), ids=LINEAR)
@pytest.mark.parametrize("step", [by_closure, by_scope])
def test_what_is_linear_is_not(step, touch):
    """The step is that of a loss with such gradients."""
    setting = Setting()
    opt = SGDTracer(setting.params, lr=0.1, rho=0.1)
    for _ in range(3):
        step(opt, setting, touch)
    assert opt.steps == 3


def test_nor_clipping_of_the_total():
    one, two = Setting(), Setting()
    opt, twin = SGDTracer(one.params, lr=0.1, rho=0.1), SGDTracer(two.params, lr=0.1, rho=0.1, clip=Clip(norm=0.05))
    for _ in range(3):
        opt.zero_grad()
        one.loss().backward()
        with opt.perturbed():
            one.loss().backward()
        nn.utils.clip_grad_norm_(one.params, 0.05)
        opt.step()
        twin.step(two.loss)
    torch.testing.assert_close(one.weights, two.weights)


def test_sam_may_be_clipped():
    """Its direction is of length one, and what is left is the second gradient."""
    setting, twin = Setting(), Setting()
    opt = SAM(torch.optim.SGD(setting.params, lr=0.1), rho=0.05)
    g = torch.autograd.grad(twin.loss(), twin.params)
    length = torch.cat([x.flatten() for x in g]).norm()
    before = twin.weights
    with torch.no_grad():
        for p, x in zip(twin.params, g, strict=True):
            p += 0.05 * x / length
    twin.loss().backward()
    nn.utils.clip_grad_norm_(twin.params, 0.05)
    by_closure(opt, setting, CLIPS["by norm"])
    expected = [w - 0.1 * p.grad for w, p in zip(before, twin.params, strict=True)]
    torch.testing.assert_close(setting.weights, expected)


def test_hooks_are_gone_after_the_first_steps():
    setting = Setting()
    opt = SGDTracer(setting.params, rho=0.1)
    for step in (by_closure, by_scope):
        step(opt, setting, lambda params: None)
        assert not any(p._post_accumulate_grad_hooks for p in setting.params)
    opt = SGDTracer(setting.params, rho=0.1, engine=FiniteDifference(central=True))
    by_two_scopes(opt, setting, lambda params: None)
    assert not any(p._post_accumulate_grad_hooks for p in setting.params)
    opt = SGDTracer(setting.params, rho=0.1)
    with pytest.raises(KeyError):
        by_closure(opt, setting, lambda params: {}[0])
    assert not any(p._post_accumulate_grad_hooks for p in setting.params)


# Gradients that a step would forget.


def accumulated(opt, setting, *, clears):
    """As Lightning accumulates: the last micro-batch alone comes as a closure."""
    opt.zero_grad()
    setting.loss(slice(0, 6)).backward()

    def closure():
        if clears:
            setting.net.zero_grad()
        loss = setting.loss(slice(6, 12))
        loss.backward()
        return loss

    return opt.step(closure)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("make", [SGDTracer, lambda p, **k: SAM(torch.optim.SGD(p, lr=0.1), **k)])
def test_accumulation_past_the_optimiser_is_refused(make, steps):
    setting = Setting()
    opt = make(setting.params, rho=0.1)
    for _ in range(steps):
        opt.step(setting.loss)
    before = setting.weights
    with pytest.raises(RuntimeError, match=r"batches=\[…\]"):
        accumulated(opt, setting, clears=False)
    assert all(map(torch.equal, setting.weights, before))
    assert all(p.grad is not None for p in setting.params)


def test_gradients_that_the_closure_clears_or_that_are_ours_or_zero_are_not():
    setting, twin = Setting(), Setting()
    opt, expected = (SGDTracer(s.params, lr=0.1, rho=0.1) for s in (setting, twin))

    def backward_alone():
        loss = setting.loss(slice(6, 12))
        loss.backward()
        return loss

    accumulated(opt, setting, clears=True)
    opt.step(backward_alone)  # there is what the last step has left
    setting.net.zero_grad(set_to_none=False)
    opt.step(backward_alone)
    setting.loss().backward()  # somebody looks at a gradient
    opt.step(lambda: setting.loss(slice(6, 12)))
    for _ in range(4):
        expected.step(lambda: twin.loss(slice(6, 12)))
    torch.testing.assert_close(setting.weights, twin.weights)


# A scaler that the optimiser was not told of.


@pytest.mark.parametrize("unscales", [False, True])
def test_a_scope_without_the_scaler_is_refused(unscales):
    setting, scaler = Setting(), torch.amp.GradScaler("cpu")
    opt, before = SGDTracer(setting.params, rho=0.1), setting.weights
    opt.zero_grad()
    scaler.scale(setting.loss()).backward()
    with opt.perturbed():
        scaler.scale(setting.loss()).backward()
    if unscales:
        scaler.unscale_(opt)
    with pytest.raises(RuntimeError, match=r"perturbed\(scaler=scaler\)"):
        scaler.step(opt)
    assert all(map(torch.equal, setting.weights, before))


def by_micro_batches(opt, setting, again):
    """Gradients of two micro-batches, and a second pass over those named."""
    opt.zero_grad()
    for rows in HALVES:
        (setting.loss(rows) / 2).backward()
    with opt.perturbed():
        for rows in again:
            (setting.loss(rows) / 2).backward()
    opt.step()


HALVES = slice(0, 6), slice(6, 12)


def test_a_second_pass_over_the_last_micro_batch_alone_is_told():
    setting = Setting()
    opt = SGDTracer(setting.params, lr=0.1, rho=0.05)
    with pytest.warns(UserWarning, match="1 times, the first pass 2 times"):
        by_micro_batches(opt, setting, HALVES[1:])


def test_one_over_all_of_them_is_the_step_of_the_batch():
    setting, other = Setting(), Setting()
    opt, twin = SGDTracer(setting.params, lr=0.1, rho=0.05), SGDTracer(other.params, lr=0.1, rho=0.05)
    by_micro_batches(opt, setting, HALVES)
    twin.step(other.loss)
    torch.testing.assert_close(setting.weights, other.weights)


@pytest.mark.parametrize("told", [True, False])
def test_a_scaler_that_is_switched_off_in_a_scope(told):
    setting, other = Setting(), Setting()
    opt, twin = SGDTracer(setting.params, lr=0.1, rho=0.05), SGDTracer(other.params, lr=0.1, rho=0.05)
    off = torch.amp.GradScaler("cpu", enabled=False)
    opt.zero_grad()
    off.scale(setting.loss()).backward()
    with opt.perturbed(scaler=off if told else None):
        off.scale(setting.loss()).backward()
    off.step(opt)
    off.update()
    twin.step(other.loss)
    assert all(map(torch.equal, setting.weights, other.weights))


def test_a_scaler_that_brings_the_closure_is_refused():
    setting, scaler = Setting(), torch.amp.GradScaler("cpu")
    opt = SGDTracer(setting.params, rho=0.1)
    scaler.scale(setting.loss()).backward()
    with pytest.raises(RuntimeError, match=r"opt.step\(closure, scaler=scaler\)"):
        scaler.step(opt, setting.loss)


def test_one_that_is_switched_off_is_not():
    setting, scaler = Setting(), torch.amp.GradScaler("cpu", enabled=False)
    opt = SGDTracer(setting.params, rho=0.1)
    opt.zero_grad()
    setting.loss().backward()
    with opt.perturbed():
        setting.loss().backward()
    scaler.step(opt)
    scaler.step(opt, setting.loss)
    assert opt.steps == 2
