"""Every refusal names the argument and its value, and nothing has changed afterwards."""

import math
import re
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from gtracer import (
    SAM,
    AdamTracer,
    AdamWTracer,
    FiniteDifference,
    NonFiniteError,
    RhoScheduler,
    SGDTracer,
    Tracer,
    TracerPenalty,
    linear_warmup,
)
from gtracer.curvature import gradient_magnitude, hutchinson, per_example
from gtracer.experimental import Precondition, PreviousStep, Ridge
from gtracer.optim import processes
from gtracer.optim.refusals import check_capture
from support.optimizers import every_optimiser, same, snapshot
from support.problems import make, tanh_mlp


def weight():
    return nn.Parameter(torch.ones(2))


def refused(make_it, name, value):
    with pytest.raises(ValueError, match=name) as caught:
        make_it()
    assert repr(value) in str(caught.value) or str(value) in str(caught.value)


NUMBERS = [-1.0, math.nan, math.inf, "0.1", None, True]
CASES = [
    *[("rho", v) for v in NUMBERS],
    *[("delta", v) for v in NUMBERS],
    *[("f0", v) for v in [-1.0, math.nan, math.inf, "last-gradient", None, True]],
    *[("interval", v) for v in [0, -1, 1.5, "2", True]],
    ("engine", "double"),
    ("engine", 0.05),
    ("scale_free", 1),
    ("clip", 1.0),
    ("transforms", ["clip"]),
    ("implementation", "fastest"),
    ("nonfinite", "warn"),
    ("model", "resnet"),
]
TORCH_CASES = (
    [("lr", v) for v in NUMBERS] + [("weight_decay", v) for v in NUMBERS] + [("maximize", 1), ("foreach", "no")]
)


@pytest.mark.parametrize("cls", [SGDTracer, AdamTracer, AdamWTracer])
@pytest.mark.parametrize(("name", "value"), CASES + TORCH_CASES)
def test_arguments(cls, name, value):
    refused(lambda: cls([weight()], **{name: value}), name, value)


@pytest.mark.parametrize(("name", "value"), [*CASES, *[("beta", v) for v in [*NUMBERS, 1.5]]])
def test_tracer_arguments(name, value):
    refused(lambda: Tracer(torch.optim.SGD([weight()]), **{name: value}), name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("momentum", v) for v in NUMBERS] + [("dampening", "x"), ("nesterov", "yes"), ("beta", 2.0)],
)
def test_sgd_arguments(name, value):
    refused(lambda: SGDTracer([weight()], **{name: value}), name, value)


@pytest.mark.parametrize("cls", [AdamTracer, AdamWTracer])
@pytest.mark.parametrize(
    ("name", "value"),
    [("eps", -1.0), ("eps", "x"), ("betas", (0.9,)), ("betas", 0.9), ("amsgrad", True)],
)
def test_adam_arguments(cls, name, value):
    refused(lambda: cls([weight()], **{name: value}), name, value)


@pytest.mark.parametrize(("betas", "name", "value"), [((0.9, 1.0), "betas.1.", 1.0), ((-0.1, 0.9), "betas.0.", -0.1)])
def test_betas(betas, name, value):
    refused(lambda: AdamTracer([weight()], betas=betas), name, value)


@pytest.mark.parametrize("cls", [AdamTracer, AdamWTracer])
def test_amsgrad_of_a_group(cls):
    opt = cls([weight()])
    refused(lambda: opt.add_param_group({"params": [weight()], "amsgrad": True}), "amsgrad", True)
    assert len(opt.param_groups) == 1


def test_adam_has_no_beta_of_its_own():
    refused(lambda: AdamTracer([{"params": [weight()], "beta": 0.3}]), "beta", 0.3)


@pytest.mark.parametrize(
    ("name", "value"), [("rho", -1.0), ("adaptive", 1), ("eta", -0.5), ("interval", 0), ("model", 3)]
)
def test_sam_arguments(name, value):
    refused(lambda: SAM(torch.optim.SGD([weight()]), **{name: value}), name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("rho", -1.0), ("beta", 2.0), ("delta", "x"), ("f0", -1.0), ("nonfinite", "x"), ("model", "resnet")],
)
def test_penalty_arguments(name, value):
    refused(lambda: TracerPenalty([weight()], **{name: value}), name, value)


def test_a_step_alone_where_no_second_pass_is_due_is_that_of_a_closure():
    one, two = make(tanh_mlp), make(tanh_mlp)
    by_closure, alone = (SGDTracer(p.model.parameters(), lr=0.1, rho=0.1, interval=2) for p in (one, two))
    for opt, problem in ((by_closure, one), (alone, two)):
        opt.step(lambda problem=problem: problem.loss_of(0))
    assert not alone.second_pass_due
    by_closure.step(lambda: one.loss_of(1))
    alone.zero_grad()
    two.loss_of(1).backward()
    alone.step()
    assert all(map(torch.equal, one.weights(), two.weights()))
    two.loss_of(2).backward()
    with pytest.raises(RuntimeError, match="without the second pass"):
        alone.step()


@pytest.mark.parametrize("cls", [AdamTracer, AdamWTracer])
def test_adam_is_preconditioned_already(cls):
    with pytest.raises(ValueError, match="Adam divides by √f already"):
        cls([weight()], transforms=[Precondition()])


@pytest.mark.parametrize(
    ("make_it", "name", "value"),
    [
        *[(lambda v=v: FiniteDifference(radius=v), "radius", v) for v in [*NUMBERS, 0.0]],
        (lambda: FiniteDifference(central="backward"), "central", "backward"),
        *[(lambda v=v: Ridge(v), "eta", v) for v in [-1.0, 0.0, math.nan, "1", True]],
    ],
)
def test_engines_and_transforms(make_it, name, value):
    refused(make_it, name, value)


@pytest.mark.parametrize("make_it", [SGDTracer, AdamTracer, TracerPenalty])
@pytest.mark.parametrize("params", [3, [], torch.ones(2), ["weight"]], ids=str)
def test_parameters(make_it, params):
    with pytest.raises(ValueError, match="params"):
        make_it(params)


@pytest.mark.parametrize("wrapper", [Tracer, SAM])
def test_bases(wrapper):
    refused(lambda: wrapper([weight()]), "base_optimizer", "list")
    refused(lambda: wrapper(torch.optim.LBFGS([weight()])), "base_optimizer", "LBFGS")
    refused(lambda: wrapper(SGDTracer([weight()])), "base_optimizer", "SGDTracer")
    base = torch.optim.SGD([weight()])
    wrapper(base)
    refused(lambda: wrapper(base), "wrapped already", "SGD")


def test_a_refused_wrap_leaves_the_base_as_it_was():
    base = torch.optim.SGD([{"params": [weight()]}, {"params": [weight()], "rho": -1.0}])
    before = [dict(group) for group in base.param_groups]
    refused(lambda: Tracer(base, rho=0.5), "rho", -1.0)
    assert [dict(group) for group in base.param_groups] == before
    base.param_groups[1]["rho"] = 0.1
    assert [group["rho"] for group in Tracer(base, rho=0.7).param_groups] == [0.7, 0.1]


def test_per_group_values_are_checked_at_the_start_later_and_at_the_step():
    refused(lambda: SGDTracer([{"params": [weight()], "rho": -2.0}]), "rho", -2.0)
    w = weight()
    opt = SGDTracer([w])
    refused(lambda: opt.add_param_group({"params": [weight()], "delta": -2.0}), "delta", -2.0)
    assert len(opt.param_groups) == 1
    opt.param_groups[0]["rho"] = -3.0
    refused(lambda: opt.step(lambda: w.sum()), "rho", -3.0)


def test_schedules():
    refused(lambda: RhoScheduler(torch.optim.SGD([weight()]), linear_warmup(3)), "optimizer", "SGD")
    refused(lambda: RhoScheduler(SGDTracer([weight()], rho=0.1), 0.5), "factor", 0.5)
    refused(lambda: RhoScheduler(SGDTracer([weight()], rho=0.1), lambda step: -1.0), "factor", -1.0)
    refused(lambda: linear_warmup(0), "steps", 0)


@every_optimiser
@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64])
def test_weights_that_cannot_be_displaced(maker, dtype):
    model = nn.Linear(2, 2, dtype=dtype)
    with pytest.raises(ValueError, match=str(dtype)):
        maker(model.parameters())
    with pytest.raises(ValueError, match="weight"):
        maker(model.named_parameters())


def test_weights_in_which_squared_gradients_underflow():
    """With the exact engine nothing is displaced: bfloat16, which has float32's range, will do."""
    refused(
        lambda: SGDTracer(nn.Linear(2, 2, dtype=torch.float16).parameters(), engine="exact"), "underflow", torch.float16
    )
    SGDTracer(nn.Linear(2, 2, dtype=torch.bfloat16).parameters(), engine="exact")


@every_optimiser
def test_weights_made_low_precision_afterwards(maker):
    model = nn.Linear(2, 2)
    opt = maker(model.parameters())
    model.half()
    with pytest.raises(ValueError, match=r"torch\.float16.* let the weights be torch\.bfloat16"):
        opt.step(lambda: model(torch.ones(1, 2, dtype=torch.float16)).square().mean())


@every_optimiser
class TestClosures:
    """Each leaves weights, state and random numbers as they were."""

    def check(self, maker, closure_of, error, match):
        made = make(tanh_mlp)
        opt = maker(made.model.parameters())
        opt.step(lambda: made.loss_of(0))
        before, state, random = made.weights(), snapshot(opt), torch.get_rng_state()
        with pytest.raises(error, match=match):
            opt.step(closure_of(made))
        assert all(torch.equal(a, b) for a, b in zip(before, made.weights(), strict=True))
        assert same(snapshot(opt), state)
        assert torch.equal(torch.get_rng_state(), random)

    def test_number(self, maker):
        self.check(maker, lambda made: lambda: made.loss_of(0).item(), RuntimeError, "as a tensor, got .*float")

    def test_nothing(self, maker):
        self.check(maker, lambda made: lambda: None, RuntimeError, "as a tensor, got None")

    def test_detached(self, maker):
        self.check(maker, lambda made: lambda: made.loss_of(0).detach(), RuntimeError, "with a graph")

    def test_vector(self, maker):
        self.check(maker, lambda made: lambda: made.model[0].weight.sum(1), RuntimeError, "scalar loss, got shape")

    def test_elsewhere(self, maker):
        self.check(maker, lambda made: lambda: weight().sum(), RuntimeError, "none of the optimiser's parameters")

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_non_finite_loss(self, maker, value):
        self.check(
            maker, lambda made: lambda: made.loss_of(torch.randint(4, ()).item()) * value, NonFiniteError, "the loss is"
        )

    def test_non_finite_gradient(self, maker):
        # √0 is 0 with an infinite slope.
        self.check(
            maker,
            lambda made: lambda: made.loss_of(0) + (made.model[0].bias * 0).sum().sqrt(),
            NonFiniteError,
            "gradient is",
        )

    def test_non_finite_only_when_displaced(self, maker):
        def closure_of(made):
            calls = []

            def closure():
                calls.append(1)
                return made.loss_of(0) * (1.0 if len(calls) == 1 else math.nan)

            return closure

        self.check(maker, closure_of, NonFiniteError, "penalty's gradient is nan")


@every_optimiser
def test_sparse_gradients(maker):
    table = nn.Embedding(5, 2, sparse=True)
    opt = maker(table.parameters())
    with pytest.raises(RuntimeError, match="sparse"):
        opt.step(lambda: table(torch.tensor([1, 2])).square().mean())


@every_optimiser
def test_skipping_goes_on(maker):
    made = make(tanh_mlp)
    opt = maker(made.model.parameters(), nonfinite="skip")
    opt.step(lambda: made.loss_of(0))
    before, state = made.weights(), snapshot(opt)
    assert math.isnan(opt.step(lambda: made.loss_of(0) * math.nan))
    assert math.isnan(opt.stats.loss)
    assert all(torch.equal(a, b) for a, b in zip(before, made.weights(), strict=True))
    assert same(snapshot(opt), state)
    opt.step(lambda: made.loss_of(1))
    assert not all(torch.equal(a, b) for a, b in zip(before, made.weights(), strict=True))


@every_optimiser
def test_skipping_without_a_closure(maker):
    made = make(tanh_mlp)
    opt = maker(made.model.parameters(), nonfinite="skip")
    before = made.weights()
    opt.zero_grad()
    (made.loss_of(0) * math.nan).backward()
    for _ in range(2 if opt.is_central else 1):
        with opt.perturbed():
            made.loss_of(0).backward()
    opt.step()
    assert all(torch.equal(a, b) for a, b in zip(before, made.weights(), strict=True))


def test_a_skipped_batch_does_not_poison_batch_norm():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    opt = SGDTracer(model.parameters(), nonfinite="skip", model=model)
    opt.step(lambda: model(torch.full((4, 3), math.nan)).sum())
    assert torch.isfinite(model[1].running_mean).all()
    assert model[1].num_batches_tracked == 0


def test_ignoring_does_not_look():
    w = weight()
    SGDTracer([w], nonfinite="ignore", rho=0.0, lr=0.1).step(lambda: (w * math.nan).sum())
    assert torch.isnan(w).all()


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        ({}, []),
        ({"interval": 2}, ["interval = 2 counts steps"]),
        ({"nonfinite": "raise"}, ["nonfinite = 'raise' looks at the numbers"]),
        ({"rho": "auto", "nonfinite": "skip"}, ["nonfinite = 'skip' looks at", "rho = 'auto' moves"]),
        ({"dropout": True}, ["its passes draw random numbers"]),
        ({"steps": 0}, ["make a step first"]),
    ],
    ids=str,
)
def test_what_a_cuda_graph_cannot_replay(options, reasons):
    """The reasons; that a capture asks for them is tested on a GPU."""
    own = {"rho": 0.1, "nonfinite": "ignore"} | options
    steps, dropout = own.pop("steps", 1), own.pop("dropout", False)
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5 if dropout else 0.0)).eval()
    model.train(dropout)
    opt, x = SGDTracer(model.parameters(), lr=0.1, **own), torch.randn(5, 3)
    for _ in range(steps):
        opt.step(lambda: model(x).square().mean())
    if not reasons:
        return check_capture(opt)
    with pytest.raises(RuntimeError, match="cannot be captured") as caught:
        check_capture(opt)
    parts = str(caught.value).partition(": ")[2].split("; ")
    assert len(parts) == len(reasons)
    assert all(part.startswith(reason) for part, reason in zip(parts, reasons, strict=True))


def test_adam_in_a_cuda_graph_counts_on_the_device():
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    opt = AdamTracer(model.parameters(), rho=0.1, nonfinite="ignore")
    opt.step(lambda: model(x).square().mean())
    with pytest.raises(RuntimeError, match="AdamTracer counts steps outside of the graph, pass capturable=True"):
        check_capture(opt)


@pytest.mark.parametrize("options", [{"engine": "exact"}, {"curvature": hutchinson()}], ids=str)
def test_a_scaler_where_the_loss_is_differentiated_as_it_is(options):
    p = weight()
    opt = SGDTracer([p], lr=0.1, **options)
    with pytest.raises(RuntimeError, match="a GradScaler with engine=") as caught:
        opt.step(lambda: (p**4).sum(), scaler=torch.amp.GradScaler("cpu"))
    assert "torch.bfloat16" in str(caught.value)
    assert p.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_frozen_weights_may_be_of_any_kind(dtype):
    """As under an adapter; where one is trained later, it is refused then, with the way out."""
    frozen, trained = nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False), weight()
    opt = SGDTracer([frozen, trained], lr=0.1, rho=0.1)
    opt.step(lambda: (trained * frozen.real.float()).square().sum())
    assert (trained < 1).all()
    frozen.requires_grad_(True)
    if dtype == torch.bfloat16:
        opt.step(lambda: (trained * frozen.float()).square().sum())
        assert (frozen < 1).all()
        return
    with pytest.raises(ValueError, match="is complex" if dtype.is_complex else "let the weights be torch.bfloat16"):
        opt.step(lambda: (trained * frozen.real.float()).square().sum())
    refused(lambda: SGDTracer([frozen, trained], rho=0.1), "parameter 0", dtype)


def test_a_lazy_module_has_to_see_a_batch_first():
    net = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    with pytest.raises(ValueError, match="on one batch before"):
        SGDTracer(net.parameters(), rho=0.1)
    net(torch.ones(2, 4))
    SGDTracer(net.parameters(), rho=0.1).step(lambda: net(torch.ones(2, 4)).square().mean())


def test_a_closure_that_forgets_its_return_is_told():
    with pytest.raises((RuntimeError, ValueError), match="loss"):
        SGDTracer([weight()], rho=0.1).step(lambda: None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "without the second pass: pass a closure"),
        ({"engine": "exact"}, "curvature=gradient_magnitude with engine=Exact() makes its own passes, use step("),
        ({"reuse": PreviousStep()}, "displaces the weights itself, step(closure)"),
    ],
    ids=["finite difference", "exact", "previous step"],
)
def test_a_step_alone_is_refused_but_of_zeros_which_only_makes_state(options, message):
    """torch.distributed.checkpoint steps with gradients of zeros, so that there is state to load into."""
    first, unused = weight(), weight()
    opt = SGDTracer([first, unused], lr=0.1, rho=0.1, momentum=0.9, **options)
    first.grad = torch.zeros(2)
    opt.step()
    assert torch.equal(first, torch.ones(2))
    assert "f" in opt.state[first]
    first.grad = torch.ones(2)
    with pytest.raises(RuntimeError) as caught:
        opt.step()
    assert message in str(caught.value)
    assert torch.equal(first, torch.ones(2))


def test_a_loop_that_draws_between_zero_grad_and_its_first_pass_is_told():
    """Its second pass would have another dropout than the first."""
    net, x = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1)), torch.ones(3, 2)
    opt = SGDTracer(net.parameters(), lr=0.1, rho=0.1)
    before = [p.detach().clone() for p in net.parameters()]
    for draws in (1, 0):
        opt.zero_grad()
        torch.rand(draws)
        net(x).square().mean().backward()
        expected = pytest.raises(RuntimeError, match="drew other random numbers") if draws else nullcontext()
        with expected, opt.perturbed():
            net(x).square().mean().backward()
        assert all(map(torch.equal, net.parameters(), before))
    opt.step()
    assert not any(map(torch.equal, net.parameters(), before))


@pytest.mark.parametrize("curvature", [gradient_magnitude, per_example], ids=["gradient", "examples"])
def test_the_exact_engine_averages_nothing_over_processes(monkeypatch, curvature):
    monkeypatch.setattr(processes, "are_joined", lambda model: True)
    model, x = nn.Linear(2, 1), torch.ones(3, 2)
    opt = SGDTracer(model.parameters(), rho=0.1, engine="exact", curvature=curvature, model=model)
    with pytest.raises(RuntimeError, match=re.escape(f"with {opt.method.curvature} on several processes")) as caught:
        opt.step(lambda: model(x).square().mean())
    assert "penalty='each'" in str(caught.value)


def test_an_estimator_that_looks_into_one_pass_takes_the_batch_whole():
    """The exact engine with squared gradients takes it in parts too."""
    torch.manual_seed(0)
    model, parts = nn.Linear(2, 3), [(torch.randn(4, 2), torch.randint(3, (4,))) for _ in range(2)]
    for curvature in (gradient_magnitude, hutchinson()):
        opt = SGDTracer(model.parameters(), lr=0.1, rho=0.1, engine="exact", curvature=curvature, model=model)
        before = [p.detach().clone() for p in model.parameters()]

        def step(opt=opt):
            return opt.step(lambda x, y: nn.functional.cross_entropy(model(x), y), batches=parts)

        if curvature is gradient_magnitude:
            step()
            assert not any(map(torch.equal, before, model.parameters()))
            continue
        with pytest.raises(RuntimeError, match="looks into one pass over the whole batch"):
            step()
        assert all(map(torch.equal, before, model.parameters()))
