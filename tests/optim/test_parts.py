"""Micro-batches, clipping and float16's loss scaling, against the plain step of the whole batch."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer import SAM, Clip, FiniteDifference, NonFiniteError, SGDTracer
from gtracer.curvature import hutchinson, micro_batch
from gtracer.optim.pool import Pool
from gtracer.optim.step import Slice, Step
from support.batches import OPTIMIZERS, TRACER, Setting, cut, everyone, plain

# Micro-batches.


@everyone
@pytest.mark.parametrize("sizes", [(4, 4, 4), (7, 5), (12,)])
@pytest.mark.parametrize("own_backward", [False, True])
def test_the_whole_batch_in_parts(make, sizes, own_backward):
    """As it is in one piece, whatever the pieces' sizes and whoever calls backward."""
    setting = Setting()

    def in_parts(opt, loss_of, x, y):
        def closure(x, y):
            opt.zero_grad()
            loss = loss_of(x, y)
            loss.backward()
            return loss

        found = opt.step(closure if own_backward else loss_of, batches=cut(x, y, *sizes))
        return found

    torch.testing.assert_close(setting.weights(make, in_parts), setting.weights(make, plain), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "own", [{"engine": FiniteDifference(central=True)}, {"engine": "exact"}, {"interval": 2}], ids=str
)
def test_the_whole_batch_in_parts_with_other_passes(own):
    setting, make = Setting(), OPTIMIZERS["SGDTracer"]

    def in_parts(opt, loss_of, x, y):
        return opt.step(loss_of, batches=cut(x, y, 4, 8))

    expected = setting.weights(make, plain, **own)
    torch.testing.assert_close(setting.weights(make, in_parts, **own), expected, rtol=1e-9, atol=1e-12)


def test_the_loss_that_comes_back_is_the_batches():
    setting = Setting()
    opt = OPTIMIZERS["SAM"](setting.start.parameters())
    x, y = setting.x[0], setting.y[0]
    expected = cross_entropy(setting.start(x), y).item()
    found = opt.step(lambda x, y: cross_entropy(setting.start(x), y), batches=cut(x, y, 7, 5))
    assert found.item() == pytest.approx(expected)
    assert opt.stats.loss == pytest.approx(expected)


@pytest.mark.parametrize("name", ["SGDTracer", "AdamWTracer"])
def test_the_penalty_of_each_part(name):
    """Is that of micro_batch, which splits the batch itself."""
    setting, make = Setting(), OPTIMIZERS[name]

    def in_parts(opt, loss_of, x, y):
        return opt.step(loss_of, batches=cut(x, y, 4, 4, 4), penalty="each")

    expected = setting.weights(make, plain, curvature=micro_batch(4))
    torch.testing.assert_close(setting.weights(make, in_parts), expected, rtol=1e-9, atol=1e-12)
    whole = setting.weights(make, plain)
    assert not torch.allclose(expected, whole, rtol=1e-3)


def test_sam_of_each_part():
    """m-sharpness, against a loop."""
    setting, rho = Setting(), 0.1

    def by_hand(opt, loss_of, x, y):
        params, total = opt.param_groups[0]["params"], None
        for part in cut(x, y, 4, 4, 4):
            g = torch.autograd.grad(loss_of(*part), params)
            scale = rho / nn.utils.parameters_to_vector(g).norm()
            saved = [p.detach().clone() for p in params]
            with torch.no_grad():
                for p, d in zip(params, g, strict=True):
                    p.add_(scale * d)
            ahead = torch.autograd.grad(loss_of(*part), params)
            with torch.no_grad():
                for p, s in zip(params, saved, strict=True):
                    p.copy_(s)
            total = [a / 3 for a in ahead] if total is None else [t + a / 3 for t, a in zip(total, ahead, strict=True)]
        for p, t in zip(params, total, strict=True):
            p.grad = t
        opt.step()

    def in_parts(opt, loss_of, x, y):
        return opt.step(loss_of, batches=cut(x, y, 4, 4, 4), penalty="each")

    sgd = setting.weights(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), by_hand)
    torch.testing.assert_close(setting.weights(OPTIMIZERS["SAM"], in_parts), sgd, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("penalty", "order"), [("whole", [0, 1, 0, 1]), ("each", [0, 0, 1, 1])])
def test_dropout_is_replayed_part_by_part(penalty, order):
    setting, masks = Setting(torch.float64, nn.Dropout(0.5)), []
    model = setting.start
    model[2].register_forward_hook(lambda module, inputs, output: masks.append(output.detach() == 0))
    opt = SGDTracer(model.parameters(), lr=0.1, f0=0.1, **TRACER)
    x, y = setting.x[0], setting.y[0]
    opt.step(lambda x, y: cross_entropy(model(x), y), batches=cut(x, y, 6, 6), penalty=penalty)
    assert len(masks) == 4
    same = [[torch.equal(one, other) for other in masks] for one in masks]
    assert same == [[one == other for other in order] for one in order]


def test_running_statistics_move_by_the_mean_of_the_parts():
    setting = Setting(torch.float64, nn.BatchNorm1d(7))
    norm = setting.start[2]
    x, y = setting.x[0], setting.y[0]
    inside = setting.start[:2](x)
    expected = 0.1 * torch.stack([inside[:6].mean(0), inside[6:].mean(0)]).mean(0)
    opt = SAM(torch.optim.SGD(setting.start.parameters(), lr=0.1), model=setting.start)
    opt.step(lambda x, y: cross_entropy(setting.start(x), y), batches=cut(x, y, 6, 6))
    torch.testing.assert_close(norm.running_mean, expected.detach())
    assert norm.num_batches_tracked == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"batches": []}, "at least one batch"),
        ({"batches": [(torch.zeros(3, 5), torch.zeros(2))]}, r"lengths \[2, 3\]"),
        ({"penalty": "all"}, "penalty must be one of"),
        ({"scaler": 3.0, "closure": None}, "scaler"),
        ({"batches": [torch.zeros(1)], "closure": None}, "takes a closure"),
    ],
)
def test_bad_arguments_of_a_step(words, message):
    setting = Setting()
    opt = OPTIMIZERS["SGDTracer"](setting.start.parameters())
    with pytest.raises(ValueError, match=message):
        opt.step(words.pop("closure", lambda *batch: None), **words)


def test_estimators_that_look_into_the_batch_refuse_parts():
    setting = Setting()
    x, y = setting.x[0], setting.y[0]
    params = setting.start.parameters()

    def loss_of(x, y):
        return cross_entropy(setting.start(x), y)

    with pytest.raises(RuntimeError, match="penalty='each'"):
        SGDTracer(params, curvature=hutchinson()).step(loss_of, batches=cut(x, y, 6, 6))
    with pytest.raises(RuntimeError, match=r"micro_batch\(4\)"):
        SGDTracer(setting.start.parameters(), curvature=micro_batch(4)).step(loss_of, batches=cut(x, y, 6, 6))


# Clipping.


def by_hand(clip):
    """The same bounds with torch's own functions, on the gradients of a step without any."""

    def step(opt, loss_of, x, y):
        params = opt.param_groups[0]["params"]
        opt.zero_grad()
        loss_of(x, y).backward()
        before = [p.grad.clone() for p in params]
        with opt.perturbed():
            loss_of(x, y).backward()
        if clip.of == "total":
            bounded = None
        else:
            bounded = [p.grad - g for p, g in zip(params, before, strict=True)]
            for p, g in zip(params, before, strict=True):
                p.grad = g.clone()
        if clip.norm is not None:
            nn.utils.clip_grad_norm_(params, clip.norm)
        if clip.value is not None:
            nn.utils.clip_grad_value_(params, clip.value)
        for p, change in zip(params, bounded or [], strict=False):
            p.grad += change
        opt.step()

    return step


@everyone
@pytest.mark.parametrize(
    "clip",
    [Clip(norm=0.05), Clip(value=0.01), Clip(norm=0.05, of="loss"), Clip(value=0.01, of="loss"), Clip(0.1, 0.02)],
)
def test_clipping(make, clip):
    """And f, T and the base optimiser's state are those of torch's functions used in between."""
    setting = Setting()
    expected = setting.weights(make, by_hand(clip))
    torch.testing.assert_close(setting.weights(make, plain, clip=clip), expected, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(expected, setting.weights(make, plain), rtol=1e-3)


def test_bounds_that_are_not_reached_change_nothing():
    setting, make = Setting(), OPTIMIZERS["SGDTracer"]
    found = setting.weights(make, plain, clip=Clip(norm=1e6, value=1e6))
    torch.testing.assert_close(found, setting.weights(make, plain), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("words", "message"),
    [({}, "neither"), ({"norm": 0}, "norm"), ({"value": -1}, "value"), ({"norm": 1, "of": "x"}, "of")],
)
def test_bad_bounds(words, message):
    with pytest.raises(ValueError, match=message):
        Clip(**words)
    with pytest.raises((ValueError, TypeError), match="clip"):
        SGDTracer([nn.Parameter(torch.ones(1))], clip=1.0)


# Loss scaling.


def scaler(**own):
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, **own)


@everyone
def test_scaling_by_a_power_of_two_changes_nothing(make):
    """To the bit: nothing but the backward pass sees scaled gradients."""
    setting, scale = Setting(torch.float32), scaler()

    def scaled(opt, loss_of, x, y):
        opt.step(loss_of, x, y, scaler=scale)
        scale.update()

    expected = setting.weights(make, plain)
    torch.testing.assert_close(setting.weights(make, scaled), expected, rtol=0, atol=0)
    assert scale.get_scale() == 2.0**12  # it grows as ever


@everyone
def test_scaling_in_a_loop_without_closure(make):
    """torch's own recipe, with the second pass in its scope; clipping where torch has it."""
    setting, scale = Setting(torch.float32), scaler()

    def loop(opt, loss_of, x, y):
        opt.zero_grad()
        scale.scale(loss_of(x, y)).backward()
        with opt.perturbed(scaler=scale):
            scale.scale(loss_of(x, y)).backward()
        scale.unscale_(opt)
        nn.utils.clip_grad_norm_(opt.param_groups[0]["params"], 0.1)
        scale.step(opt)
        scale.update()

    expected = setting.weights(make, plain, clip=Clip(norm=0.1))
    torch.testing.assert_close(setting.weights(make, loop), expected, rtol=1e-6, atol=1e-8)


def test_scaling_with_micro_batches_and_a_closure_that_goes_back_itself():
    setting, scale, make = Setting(torch.float32), scaler(), OPTIMIZERS["SGDTracer"]

    def scaled(opt, loss_of, x, y):
        def closure(x, y):
            loss = loss_of(x, y)
            scale.scale(loss).backward()
            return loss

        opt.step(closure, batches=cut(x, y, 6, 6), scaler=scale)
        scale.update()

    torch.testing.assert_close(setting.weights(make, scaled), setting.weights(make, plain), rtol=1e-5, atol=1e-7)


@everyone
@pytest.mark.parametrize("bad", [1, 2])
@pytest.mark.parametrize("loop", [False, True])
def test_an_overflow_in_either_pass_skips_the_step(make, bad, loop):
    """And halves the scale; the next step is as if it had not been."""
    setting, scale = Setting(torch.float32), scaler()
    model = copy.deepcopy(setting.start)
    opt = make(model.parameters())
    x, y, passes = setting.x[0], setting.y[0], 0

    def loss_of(overflow):
        nonlocal passes
        passes += 1
        loss = cross_entropy(model(x), y)
        return loss * (1e38 if overflow and passes == bad else 1.0)

    def step(overflow):
        nonlocal passes
        passes = 0
        if loop:
            opt.zero_grad()
            scale.scale(loss_of(overflow)).backward()
            with opt.perturbed(scaler=scale):
                scale.scale(loss_of(overflow)).backward()
            scale.step(opt)
        else:
            opt.step(loss_of, overflow, scaler=scale)
        scale.update()

    before = copy.deepcopy(model.state_dict())
    step(overflow=True)
    assert scale.get_scale() == 2.0**9
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert not opt.state_dict()["state"]
    step(overflow=False)
    twin = copy.deepcopy(setting.start)
    make(twin.parameters()).step(lambda: cross_entropy(twin(x), y))
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)


def test_without_a_scaler_an_overflow_is_still_an_error():
    setting = Setting(torch.float32)
    opt = OPTIMIZERS["SGDTracer"](setting.start.parameters())
    with pytest.raises(NonFiniteError):
        opt.step(lambda: cross_entropy(setting.start(setting.x[0]), setting.y[0]) * 1e38 * 1e38)


def test_a_scaler_that_is_off_changes_nothing():
    setting, scale, make = Setting(torch.float32), scaler(enabled=False), OPTIMIZERS["SGDTracer"]

    def scaled(opt, loss_of, x, y):
        opt.step(loss_of, x, y, scaler=scale)
        scale.update()

    torch.testing.assert_close(setting.weights(make, scaled), setting.weights(make, plain), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_the_fp32_run_within_precision(dtype):
    setting, scale, make = Setting(torch.float32), scaler(enabled=dtype == torch.float16), OPTIMIZERS["SGDTracer"]

    def cast(opt, loss_of, x, y):
        def closure(x, y):
            with torch.autocast("cpu", dtype):
                return loss_of(x, y)

        opt.step(closure, x, y, scaler=scale)
        scale.update()

    start = nn.utils.parameters_to_vector(setting.start.parameters())
    found, expected = setting.weights(make, cast), setting.weights(make, plain)
    tolerance = {torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]
    assert (found - expected).norm() < tolerance * (expected - start).norm()


def test_what_is_differentiated_twice_refuses_a_scaler():
    setting = Setting(torch.float32)
    opt = SGDTracer(setting.start.parameters(), engine="exact")
    with pytest.raises(RuntimeError, match="bfloat16"):
        opt.step(lambda: cross_entropy(setting.start(setting.x[0]), setting.y[0]), scaler=scaler())


def test_the_pool_keeps_nothing_that_the_next_part_writes_over():
    """Gradients of DistributedDataParallel may be views of one bucket (gradient_as_bucket_view), filled anew."""
    p, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    bucket, change = torch.zeros(2), torch.zeros(2)
    group = {"params": [p, unused]}
    pool = Pool()
    for share, g, h, loss, ratio in (
        (0.25, [1.0, 2.0], [8.0, 0.0], 4.0, 0.5),
        (0.75, [5.0, -2.0], [0.0, 4.0], 8.0, 1.5),
    ):
        bucket.copy_(torch.tensor(g))
        change.copy_(torch.tensor(h))
        part = Slice(group, {"rho": 1.0}, [p], [bucket])
        pool.add(Step([part], torch.tensor(loss), trace_ratio=torch.tensor(ratio), penalty=[change]), share)
    bucket.fill_(torch.nan)
    change.fill_(torch.nan)
    step = pool.step([Slice(group, {"rho": 1.0}, [p, unused], [])], own_curvature=True)
    assert step.params == [p]
    assert step.gradients[0].tolist() == [4.0, -1.0]
    assert step.penalty[0].tolist() == [2.0, 3.0]
    assert step.renewed
    assert step.slices[0].measured[0].tolist() == [0.25 * 1 + 0.75 * 25, 0.25 * 4 + 0.75 * 4]
    assert step.loss == 7.0
    assert step.trace_ratio == 1.25
    assert list(pool.curvature) == [p]
    assert pool.step([Slice(group, {}, [p], [])], own_curvature=False).slices[0].measured[0].tolist() == [16.0, 1.0]


def test_a_pool_without_penalties_has_none():
    p, pool = nn.Parameter(torch.zeros(1)), Pool()
    group = {"params": [p]}
    pool.add(Step([Slice(group, {}, [p], [torch.ones(1)])], None), 1.0)
    step = pool.step([Slice(group, {}, [p], []), Slice({"params": []}, {}, [], [])], own_curvature=False)
    assert step.penalty is None
    assert not step.renewed
    assert step.loss is None
    assert step.trace_ratio is None
    assert len(step.slices) == 1


def test_the_passes_for_f0_leave_no_trace_in_random_numbers():
    """Each part's f would start from its own: passes over all come first, and the step's dropout is as without them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(), nn.Linear(16, 3)).double()
    parts = [(torch.randn(6, 4).double(), torch.randint(3, (6,))) for _ in range(2)]

    def loss_of(x, y):
        return cross_entropy(model(x), y)

    torch.manual_seed(1)
    expected = sum(loss_of(x, y).item() / 2 for x, y in parts)
    torch.manual_seed(1)
    found = SGDTracer(model.parameters(), lr=0.1, rho=0.1, model=model).step(loss_of, batches=parts, penalty="each")
    assert found.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("sizes", "order"), [((4, 8), [0, 1, 0, 0, 1, 1]), ((12,), [0, 0])])
def test_passes_of_a_part_draw_the_same_numbers_of_python_s_own(sizes, order):
    """Those for f₀, which one part alone does not need, then both of each part."""
    torch.manual_seed(0)
    model, drawn = nn.Linear(4, 3).double(), []
    x, y = torch.randn(12, 4).double(), torch.randint(3, (12,))

    def loss_of(x, y):
        drawn.append(random.random())
        return cross_entropy(drawn[-1] * model(x), y)

    random.seed(1)
    opt = SGDTracer(model.parameters(), lr=0.1, rho=0.1, model=model)
    opt.step(loss_of, batches=cut(x, y, *sizes), penalty="each")
    random.seed(1)
    first, second = random.random(), random.random()
    assert drawn == [(first, second)[i] for i in order]
