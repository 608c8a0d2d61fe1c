"""The passes: both kinds of closure, none, what they leave behind, and misuse."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from gtracer import Clip, FiniteDifference, NonFiniteError, SGDTracer
from gtracer.experimental import PreviousStep
from gtracer.optim import evaluate
from support.optimizers import every_optimiser, same, snapshot, with_plain_closure, with_torch_closure, without_closure
from support.problems import PROBLEMS, conv_batch_norm, dropout_mlp, make, relative_error, tanh_mlp


def train(problem, maker, style, steps=5, **options):
    made = make(problem)
    opt = maker(made.model.parameters(), model=made.model, **options)
    losses = [style(opt, lambda i=i: made.loss_of(i)).item() for i in range(steps)]
    return made.everything(), losses, torch.get_rng_state()


@every_optimiser
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("interval", [1, 2])
def test_all_three_ways_give_the_same_bits(maker, problem, interval):
    weights, losses, random = train(problem, maker, with_plain_closure, interval=interval)
    for style in (with_torch_closure, without_closure):
        other, other_losses, other_random = train(problem, maker, style, interval=interval)
        assert all(torch.equal(a, b) for a, b in zip(weights, other, strict=True))
        assert losses == other_losses
        assert torch.equal(random, other_random)


@every_optimiser
def test_loss_is_the_plain_one_at_the_old_weights(maker):
    made = make(tanh_mlp)
    opt = maker(made.model.parameters())
    for i in range(3):
        before = made.loss_of(i).item()
        assert opt.step(lambda i=i: made.loss_of(i)).item() == before == opt.stats.loss


@every_optimiser
def test_batch_norm_sees_one_pass(maker):
    """Statistics after a step are those of one plain forward pass, whatever the displaced ones did."""
    made, plain = make(conv_batch_norm), make(conv_batch_norm)
    opt = maker(made.model.parameters(), model=made.model)
    opt.step(lambda: made.loss_of(0))
    plain.loss_of(0)
    for mine, one in zip(made.model.buffers(), plain.model.buffers(), strict=True):
        assert torch.equal(mine, one)
    without_model = make(conv_batch_norm)
    maker(without_model.model.parameters()).step(lambda: without_model.loss_of(0))
    assert without_model.model[1].num_batches_tracked > 1  # so `model=` is what makes the difference


@every_optimiser
@pytest.mark.parametrize("style", [with_plain_closure, without_closure])
def test_dropout_masks_agree_between_passes(maker, style):
    seen = []
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 1)).double()
    model[1].register_forward_hook(lambda module, inputs, output: seen.append(output.detach() == 0))
    opt = maker(model.parameters())
    style(opt, lambda: model(torch.ones(3, 4, dtype=torch.float64)).square().mean())
    assert len(seen) > 1
    assert all(torch.equal(mask, seen[0]) for mask in seen)
    first = seen[0]
    seen.clear()
    style(opt, lambda: model(torch.ones(3, 4, dtype=torch.float64)).square().mean())
    assert not torch.equal(seen[0], first)  # the next step draws new ones


@every_optimiser
def test_weights_are_really_displaced_and_come_back(maker):
    model = nn.Linear(3, 1)
    start = model.weight.detach().clone()
    seen = []

    def closure():
        seen.append(model.weight.detach().clone())
        return model(torch.ones(2, 3)).square().mean()

    opt = maker(model.parameters())
    for group in opt.param_groups:
        group["lr"] = 0.0
    opt.step(closure)
    assert torch.equal(seen[0], start)
    assert all(not torch.equal(w, start) for w in seen[1:])
    assert torch.equal(model.weight.detach(), start)


def test_the_displacement_has_the_length_that_was_asked_for():
    made = make(tanh_mlp)
    start, lengths = made.weights(), []

    def closure():
        lengths.append(sum(((p - s) ** 2).sum() for p, s in zip(made.weights(), start, strict=True)).sqrt().item())
        return made.loss_of(0)

    SGDTracer(made.model.parameters(), rho=0.01, engine=FiniteDifference(0.07, central=True)).step(closure)
    assert lengths == pytest.approx([0, 0.07, 0.07], rel=1e-9)


def test_random_numbers_drawn_before_zero_grad_inside_the_closure():
    """All three passes of a central difference see the same noise, though gradients are cleared after drawing."""
    model, noise = nn.Linear(3, 1), []
    opt = SGDTracer(model.parameters(), rho=0.01, engine=FiniteDifference(central=True))

    def closure():
        noise.append(torch.randn(4, 3))
        opt.zero_grad()
        loss = model(noise[-1]).square().mean()
        loss.backward()
        return loss

    opt.step(closure)
    assert len(noise) == 3
    assert all(torch.equal(x, noise[0]) for x in noise)


class Interrupted(BaseException):
    pass


@every_optimiser
@pytest.mark.parametrize("fail_at", [1, 2])
@pytest.mark.parametrize("error", [ValueError, Interrupted])
def test_a_closure_that_raises_changes_nothing(maker, fail_at, error):
    made = make(dropout_mlp)
    opt = maker(made.model.parameters(), model=made.model)
    opt.step(lambda: made.loss_of(0))
    for p in made.model.parameters():
        p.grad = torch.ones_like(p)
    before, state, random = made.everything(), snapshot(opt), torch.get_rng_state()
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        loss = made.loss_of(1)
        if calls == fail_at:
            raise error
        return loss

    with pytest.raises(error):
        opt.step(closure)
    assert all(torch.equal(a, b) for a, b in zip(made.everything(), before, strict=True))
    assert same(snapshot(opt), state)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in made.model.parameters())
    opt.step(lambda: made.loss_of(1))  # and the optimiser is fit to go on


@every_optimiser
def test_an_error_inside_perturbed_changes_nothing_and_can_be_retried(maker):
    made, clean = make(dropout_mlp), make(dropout_mlp)
    opt = maker(made.model.parameters())
    opt.zero_grad()
    made.loss_of(0).backward()
    before, random = made.everything(), torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), opt.perturbed():
        made.loss_of(0) / (1 // 0)
    assert all(torch.equal(a, b) for a, b in zip(made.everything(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    for _ in range(2 if opt.is_central else 1):
        with opt.perturbed():
            made.loss_of(0).backward()
    opt.step()
    torch.manual_seed(1)
    without_closure(maker(clean.model.parameters()), lambda: clean.loss_of(0))
    assert relative_error(made.everything(), clean.everything()) == 0


@every_optimiser
class TestMisuse:
    def test_step_without_the_second_pass(self, maker):
        made = make(tanh_mlp)
        opt = maker(made.model.parameters())
        made.loss_of(0).backward()
        with pytest.raises(RuntimeError, match="without the second pass"):
            opt.step()

    def test_nested_scopes(self, maker):
        made = make(tanh_mlp)
        opt = maker(made.model.parameters())
        made.loss_of(0).backward()
        with pytest.raises(RuntimeError, match=r"inside perturbed\(\)"), opt.perturbed(), opt.perturbed():
            pass

    def test_step_inside_the_scope(self, maker):
        made = make(tanh_mlp)
        opt = maker(made.model.parameters())
        made.loss_of(0).backward()
        with pytest.raises(RuntimeError, match=r"inside perturbed\(\)"), opt.perturbed():
            opt.step()

    def test_scope_before_backward(self, maker):
        made = make(tanh_mlp)
        with pytest.raises(RuntimeError, match=r"before backward\(\)"), maker(made.model.parameters()).perturbed():
            pass

    def test_scope_without_backward(self, maker):
        made = make(tanh_mlp)
        opt = maker(made.model.parameters())
        made.loss_of(0).backward()
        gradient = made.model[0].weight.grad
        with pytest.raises(RuntimeError, match=r"without a backward\(\)"), opt.perturbed():
            pass
        assert made.model[0].weight.grad is gradient

    def test_one_scope_too_many(self, maker):
        made = make(tanh_mlp)
        opt = maker(made.model.parameters())
        opt.zero_grad()
        made.loss_of(0).backward()
        scopes = 2 if opt.is_central else 1
        for _ in range(scopes):
            with opt.perturbed():
                made.loss_of(0).backward()
        with pytest.raises(RuntimeError, match=r"again before step\(\)"), opt.perturbed():
            pass
        with pytest.raises(RuntimeError, match=r"call step\(\) alone"):
            opt.step(lambda: made.loss_of(0))
        opt.step()

    def test_random_numbers_drawn_between_zero_grad_and_the_first_pass(self, maker):
        made = make(dropout_mlp)
        opt = maker(made.model.parameters())
        opt.zero_grad()
        torch.rand(3)
        made.loss_of(0).backward()
        before = made.everything()
        with pytest.raises(RuntimeError, match="right before the first forward pass"), opt.perturbed():
            made.loss_of(0).backward()
        assert all(torch.equal(a, b) for a, b in zip(made.everything(), before, strict=True))

    def test_such_numbers_do_not_matter_to_a_net_that_draws_none(self, maker):
        made = make(tanh_mlp)
        opt = maker(made.model.parameters())
        opt.zero_grad()
        torch.rand(3)
        made.loss_of(0).backward()
        random = torch.get_rng_state()
        for _ in range(2 if opt.is_central else 1):
            with opt.perturbed():
                made.loss_of(0).backward()
        opt.step()
        assert torch.equal(torch.get_rng_state(), random)


def test_central_needs_both_scopes():
    made = make(tanh_mlp)
    opt = SGDTracer(made.model.parameters(), rho=0.01, engine=FiniteDifference(central=True))
    made.loss_of(0).backward()
    with opt.perturbed():
        made.loss_of(0).backward()
    with pytest.raises(RuntimeError, match="second perturbed"):
        opt.step()


def test_zero_grad_forgets_a_step_that_was_begun():
    made = make(tanh_mlp)
    opt = SGDTracer(made.model.parameters(), rho=0.01)
    made.loss_of(0).backward()
    with opt.perturbed():
        made.loss_of(0).backward()
    opt.zero_grad()
    made.loss_of(1).backward()
    with pytest.raises(RuntimeError, match="without the second pass"):
        opt.step()


def test_exact_engine_needs_the_loss_itself():
    made = make(tanh_mlp)
    opt = SGDTracer(made.model.parameters(), rho=0.01, engine="exact")
    before = made.weights()

    def closure():
        loss = made.loss_of(0)
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="differentiates the loss itself"):
        opt.step(closure)
    with pytest.raises(RuntimeError, match="TracerPenalty"):
        opt.perturbed()
    assert all(torch.equal(a, b) for a, b in zip(before, made.weights(), strict=True))


def test_a_parameter_that_enters_only_when_displaced_is_left_alone():
    used, other = nn.Parameter(torch.tensor([1.0])), nn.Parameter(torch.tensor([1.0]))

    def closure():
        return (used**2).sum() + (other.sum() if used.item() != 1.0 else 0.0)

    SGDTracer([used, other], lr=0.1, rho=0.01).step(closure)
    assert other.grad is None
    assert other.item() == 1.0
    assert used.item() != 1.0


def test_clipping_between_the_passes_and_the_step_is_honoured():
    made = make(tanh_mlp)
    opt = SGDTracer(made.model.parameters(), lr=1.0, rho=0.01)
    before = made.weights()
    opt.zero_grad()
    made.loss_of(0).backward()
    with opt.perturbed():
        made.loss_of(0).backward()
    nn.utils.clip_grad_norm_(made.model.parameters(), 1e-3)
    opt.step()
    moved = sum(((a - b) ** 2).sum() for a, b in zip(made.weights(), before, strict=True)).sqrt()
    assert moved.item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"rho": "auto"},
        {"interval": 2, "reuse": 0.5},
        {"reuse": PreviousStep()},
        {"scale_free": True},
        {"engine": "exact"},
        {"clip": Clip(norm=0.1)},
    ],
    ids=str,
)
def test_a_step_is_gone_after_it(own, monkeypatch):
    """At once, and not when Python's collector comes round: it holds copies of the weights."""
    made = make(tanh_mlp)
    opt = SGDTracer(made.model.parameters(), **({"lr": 0.1, "rho": 0.01} | own))
    steps, begun = [], evaluate.begun

    def noted(*args, **kwargs):
        step = begun(*args, **kwargs)
        steps.append(weakref.ref(step))
        return step

    monkeypatch.setattr(evaluate, "begun", noted)
    gc.disable()
    try:
        for i in range(4):
            opt.step(lambda i=i: made.loss_of(i))
            assert len(steps) == i + 1
            assert all(step() is None for step in steps)
    finally:
        gc.enable()


def batch_norm_problem(maker, **own):
    """After one step, with a gradient of the user's own in each place, and what there is then."""
    made = make(conv_batch_norm)
    opt = maker(made.model.parameters(), model=made.model, **own)
    opt.step(lambda: made.loss_of(0))
    mine = [torch.full_like(p, 7.0) for p in made.model.parameters()]
    for p, g in zip(made.model.parameters(), mine, strict=True):
        p.grad = g
    return made, opt, mine, made.everything()


def as_before(made, mine, before):
    gradients = zip(made.model.parameters(), mine, strict=True)
    assert all(p.grad is g and (g is None or bool((g == 7).all())) for p, g in gradients)
    assert all(torch.equal(a, b) for a, b in zip(made.everything(), before, strict=True))


@every_optimiser
@pytest.mark.parametrize("fail_at", [1, 2])
@pytest.mark.parametrize("nonfinite", ["raise", "ignore"])
def test_after_an_error_gradients_and_statistics_are_those_before_the_step(maker, fail_at, nonfinite):
    """Also those that the failed pass itself has moved."""
    made, opt, mine, before = batch_norm_problem(maker, nonfinite=nonfinite)
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        loss = made.loss_of(1)
        if calls == fail_at:
            raise Interrupted
        return loss

    with pytest.raises(Interrupted):
        opt.step(closure)
    as_before(made, mine, before)


@every_optimiser
@pytest.mark.parametrize("bad", [1, 2])
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_after_a_loss_that_is_not_finite_too(maker, bad, nonfinite):
    made, opt, mine, before = batch_norm_problem(maker, nonfinite=nonfinite)
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        return made.loss_of(1) * (torch.nan if calls == bad else 1.0)

    with pytest.raises(NonFiniteError) if nonfinite == "raise" else nullcontext():
        opt.step(closure)
    as_before(made, mine, before)
    assert opt.steps == 1


@every_optimiser
def test_after_an_error_in_the_scope_they_are_those_of_the_first_pass(maker):
    """Statistics have seen the first pass, and the gradients are the first pass's own."""
    made, opt, _, _ = batch_norm_problem(maker)
    opt.zero_grad()
    made.loss_of(1).backward()
    gradients = [p.grad for p in made.model.parameters()]
    values, after_first = [g.clone() for g in gradients], made.everything()

    def interrupted():
        with opt.perturbed():
            made.loss_of(1).backward()
            raise Interrupted

    with pytest.raises(Interrupted):
        interrupted()
    assert all(p.grad is g for p, g in zip(made.model.parameters(), gradients, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients, values, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(made.everything(), after_first, strict=True))
    for _ in range(2 if opt.is_central else 1):
        with opt.perturbed():
            made.loss_of(1).backward()
    opt.step()
    statistics = list(made.model.buffers())
    assert statistics[-1] == 2  # one pass a step
