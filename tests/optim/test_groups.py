"""What training needs: groups, schedulers, ρ schedules, averaging, odd parameters, copies."""

import copy
import pickle

import pytest
import torch
from torch import nn

from gtracer import (
    SAM,
    AdamTracer,
    AdamWTracer,
    FiniteDifference,
    RhoScheduler,
    SGDTracer,
    Tracer,
    TracerPenalty,
    linear_warmup,
)
from gtracer.experimental import Ridge
from support.optimizers import every_optimiser, same, snapshot
from support.problems import make, relative_error, tanh_mlp
from support.twin import SGDTwin


def scheduled(optimizer, name):
    if name == "cosine":
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)


@pytest.mark.parametrize("name", ["cosine", "one-cycle"])
@every_optimiser
def test_learning_rate_schedulers(maker, name):
    """The scheduler drives our groups exactly as it drives a plain torch optimiser's."""
    made = make(tanh_mlp)
    opt, plain = maker(made.model.parameters()), torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1, momentum=0.9)
    plain.param_groups[0]["lr"] = opt.param_groups[0]["lr"]
    if "momentum" not in opt.defaults and "betas" not in opt.defaults:
        pytest.skip("OneCycleLR wants a momentum")
    schedules = scheduled(opt, name), scheduled(plain, name)
    for i in range(6):
        before = made.weights()
        opt.step(lambda i=i: made.loss_of(i))
        plain.step()
        assert opt.param_groups[0]["lr"] == plain.param_groups[0]["lr"] == opt.base.param_groups[0]["lr"]
        assert not all(torch.equal(a, b) for a, b in zip(before, made.weights(), strict=True))
        for schedule in schedules:
            schedule.step()


def test_the_scheduled_rate_is_the_one_used():
    made, twins = make(tanh_mlp), make(tanh_mlp)
    opt = SGDTracer(made.model.parameters(), lr=0.1, rho=0.01, engine="exact")
    twin = SGDTwin(twins.model.parameters(), lr=0.1, rho=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 5)
    for i in range(5):
        twin.lr = schedule.get_last_lr()[0]
        opt.step(lambda i=i: made.loss_of(i))
        twin.step(twins.loss_of(i))
        schedule.step()
    assert relative_error(made.weights(), twins.weights()) < 1e-12


def test_rho_warms_up():
    made, twins = make(tanh_mlp), make(tanh_mlp)
    opt = SGDTracer(made.model.parameters(), lr=0.1, rho=0.02, engine="exact")
    twin = SGDTwin(twins.model.parameters(), lr=0.1)
    schedule = RhoScheduler(opt, linear_warmup(4))
    for i in range(6):
        twin.rho = 0.02 * min(1.0, (i + 1) / 4)
        assert schedule.get_last_rho() == [twin.rho]
        opt.step(lambda i=i: made.loss_of(i))
        twin.step(twins.loss_of(i))
        schedule.step()
    assert relative_error(made.weights(), twins.weights()) < 1e-12


def test_rho_schedule_resumes():
    opt = SGDTracer([nn.Parameter(torch.ones(1))], rho=0.4)
    schedule = RhoScheduler(opt, lambda step: 0.5**step)
    schedule.step()
    again = SGDTracer([nn.Parameter(torch.ones(1))], rho=0.4)
    resumed = RhoScheduler(again, lambda step: 0.5**step)
    again.load_state_dict(opt.state_dict())
    resumed.load_state_dict(schedule.state_dict())
    assert resumed.get_last_rho() == [0.2]
    resumed.step()
    assert resumed.get_last_rho() == [0.1]


def test_rho_schedule_serves_penalties_sam_and_late_groups():
    weight = nn.Parameter(torch.ones(1))
    penalty = TracerPenalty([weight], rho=1.0)
    assert RhoScheduler(penalty, linear_warmup(2)).get_last_rho() == [0.5]
    sam = SAM(torch.optim.SGD([weight], 0.1), rho=1.0)
    schedule = RhoScheduler(sam, linear_warmup(2))
    sam.add_param_group({"params": [nn.Parameter(torch.ones(1))], "rho": 3.0})
    schedule.step()
    assert schedule.get_last_rho() == [1.0, 3.0]


def test_a_base_with_its_own_rho_keeps_it():
    """Adadelta calls its decay `rho`: both are kept, under two names."""
    weight = nn.Parameter(torch.ones(1))
    opt = Tracer(torch.optim.Adadelta([weight], rho=0.7), rho=0.2)
    assert opt.rho_key == "gtracer_rho"
    assert opt.param_groups[0]["rho"] == 0.7
    assert RhoScheduler(opt, linear_warmup(2)).get_last_rho() == [0.1]
    assert opt.param_groups[0]["rho"] == 0.7


def test_zero_rho_needs_no_second_pass():
    calls = []
    made = make(tanh_mlp)
    SGDTracer(made.model.parameters(), rho=0.0).step(lambda: (calls.append(1), made.loss_of(0))[1])
    assert len(calls) == 1


@every_optimiser
def test_average_of_weights(maker):
    made = make(tanh_mlp)
    opt = maker(made.model.parameters())
    average = torch.optim.swa_utils.AveragedModel(made.model)
    seen = []
    for i in range(4):
        opt.step(lambda i=i: made.loss_of(i))
        average.update_parameters(made.model)
        seen.append(made.weights())
    true = [torch.stack(w).mean(0) for w in zip(*seen, strict=True)]
    assert relative_error([p.detach() for p in average.module.parameters()], true) < 1e-12


@every_optimiser
def test_group_added_in_mid_training(maker):
    """A layer that joins later starts with its own f, and moves."""
    made = make(tanh_mlp)
    opt = maker(made.model[0].parameters())
    opt.step(lambda: made.loss_of(0))
    late = made.model[2].weight.detach().clone()
    opt.add_param_group({"params": made.model[2].parameters(), "rho": 0.5})
    opt.step(lambda: made.loss_of(1))
    assert opt.param_groups[1]["rho"] == 0.5
    assert opt.base.param_groups is opt.param_groups
    assert not torch.equal(made.model[2].weight, late)
    opt.step(lambda: made.loss_of(2))


def test_group_added_later_takes_the_defaults():
    opt = SGDTracer([nn.Parameter(torch.ones(1))], lr=0.3, rho=0.2, delta=0.7, f0=0.1)
    opt.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert {k: opt.param_groups[1][k] for k in ("lr", "rho", "delta", "f0")} == {
        "lr": 0.3,
        "rho": 0.2,
        "delta": 0.7,
        "f0": 0.1,
    }


@every_optimiser
def test_frozen_unused_and_empty(maker):
    """A frozen layer, a parameter outside the loss and a group without parameters: only the rest moves."""
    made = make(tanh_mlp)
    made.model[0].requires_grad_(False)
    unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    opt = maker([{"params": [*made.model.parameters(), unused]}, {"params": []}])
    before = made.weights()
    for i in range(2):
        opt.step(lambda i=i: made.loss_of(i))
    after = made.weights()
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, True, False, False]
    assert torch.equal(unused.detach(), torch.ones(2))


def test_exact_engine_with_frozen_and_unused():
    made, twins = make(tanh_mlp), make(tanh_mlp)
    made.model[0].requires_grad_(False)
    unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    opt = SGDTracer([*made.model.parameters(), unused], lr=0.1, rho=0.01, engine="exact")
    twin = SGDTwin(twins.model[2].parameters(), lr=0.1, rho=0.01)
    for i in range(3):
        opt.step(lambda i=i: made.loss_of(i))
        twin.step(twins.loss_of(i))
    assert relative_error(made.weights(), twins.weights()) < 1e-12


@pytest.mark.parametrize("options", [{"engine": "exact"}, {"engine": FiniteDifference(1e-5, central=True)}], ids=str)
def test_tied_parameters_are_one(options):
    """An embedding shared by two layers: ∇T counts it once, with both of its gradients summed."""

    def tied():
        torch.manual_seed(0)
        first, second = nn.Linear(4, 4, bias=False).double(), nn.Linear(4, 4, bias=False).double()
        second.weight = first.weight
        model = nn.Sequential(first, nn.Tanh(), second)
        x = torch.randn(6, 4, dtype=torch.float64)
        return model, lambda: model(x).square().mean()

    model, loss_of = tied()
    opt = SGDTracer(model.parameters(), lr=0.1, rho=0.01, **options)
    twin_model, twin_loss_of = tied()
    twin = SGDTwin(twin_model.parameters(), lr=0.1, rho=0.01)
    assert len(opt.param_groups[0]["params"]) == 1
    for _ in range(3):
        opt.step(loss_of)
        twin.step(twin_loss_of())
    assert relative_error([model[0].weight.detach()], [twin_model[0].weight.detach()]) < 1e-8


@every_optimiser
def test_hooks_run_once_a_step(maker):
    made = make(tanh_mlp)
    opt = maker(made.model.parameters())
    seen = []
    opt.register_step_pre_hook(lambda *_: seen.append("pre"))
    opt.register_step_post_hook(lambda *_: seen.append("post"))
    opt.step(lambda: made.loss_of(0))
    assert seen == ["pre", "post"]


@every_optimiser
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"]
)
def test_a_copy_goes_on_alike_and_apart(maker, duplicate):
    made = make(tanh_mlp)
    opt = maker(made.model.parameters(), model=made.model)
    opt.step(lambda: made.loss_of(0))
    model, other = duplicate((made.model, opt))
    assert other.base.param_groups is other.param_groups
    assert other.base.state is other.state
    before = snapshot(opt)
    x, y = torch.randn(5, 5, dtype=torch.float64), torch.randint(3, (5,))
    other.step(lambda: nn.functional.cross_entropy(model(x), y))
    assert same(snapshot(opt), before)
    opt.step(lambda: nn.functional.cross_entropy(made.model(x), y))
    assert same(snapshot(opt), snapshot(other))
    assert all(torch.equal(a, b) for a, b in zip(made.model.parameters(), model.parameters(), strict=True))


def test_a_plain_checkpoint_can_be_taken_up():
    """Train with torch's SGD, load its state into SGDTracer: momentum is kept, ρ is the new one, f starts anew."""
    made = make(tanh_mlp)
    plain = torch.optim.SGD(made.model.parameters(), lr=0.1, momentum=0.9)
    made.loss_of(0).backward()
    plain.step()
    opt = SGDTracer(made.model.parameters(), lr=0.5, momentum=0.9, rho=0.02)
    with pytest.warns(UserWarning, match="f starts anew"):
        opt.load_state_dict(plain.state_dict())
    assert opt.param_groups[0]["lr"] == 0.1
    assert opt.param_groups[0]["rho"] == 0.02
    first = next(iter(made.model.parameters()))
    assert torch.equal(opt.state[first]["momentum_buffer"], plain.state[first]["momentum_buffer"])
    opt.step(lambda: made.loss_of(1))


@pytest.mark.parametrize("rho", [0.0, 0.01])
@pytest.mark.parametrize("cls", [SGDTracer, AdamTracer, AdamWTracer])
def test_ridge_of_the_prior_is_a_term_of_the_loss(cls, rho):
    """For SGD, ρ/η · w is weight decay of that strength; in Adam it joins the first moment alone. f never sees it."""
    ours, plain = make(tanh_mlp), make(tanh_mlp)
    opt = cls(ours.model.parameters(), lr=0.01, rho=rho, transforms=[Ridge(0.5)], engine="exact")
    other = cls(plain.model.parameters(), lr=0.01, rho=rho, engine="exact", weight_decay=0.0)
    opt.param_groups[0]["weight_decay"] = 0.0
    if cls is SGDTracer:
        other.param_groups[0]["weight_decay"] = rho / 0.5
    for i in range(3):
        opt.step(lambda i=i: ours.loss_of(i))
        other.step(lambda i=i: plain.loss_of(i))
    same = relative_error(ours.weights(), plain.weights()) < 1e-12
    assert same == (rho == 0 or cls is SGDTracer)


def test_bfloat16_weights_with_the_exact_engine():
    """Documented way out for weights without a float32 copy: within bfloat16's rounding of the float32 step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    low = copy.deepcopy(model).bfloat16()
    x = torch.randn(16, 6)
    for net, data in ((model, x), (low, x.bfloat16())):
        opt = SGDTracer(net.parameters(), lr=0.1, rho=0.01, delta=0.05, engine="exact")
        opt.step(lambda net=net, data=data: net(data).square().mean())
    true = [p.detach() for p in model.parameters()]
    assert relative_error([p.detach().float() for p in low.parameters()], true) < 1e-2


def test_float16_is_refused_even_there():
    with pytest.raises(ValueError, match="underflow"):
        SGDTracer(nn.Linear(2, 2).half().parameters(), engine="exact")
