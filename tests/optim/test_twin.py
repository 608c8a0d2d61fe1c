"""With ρ > 0 every optimiser is its slow twin, step by step."""

import pytest
import torch

from gtracer import AdamTracer, AdamWTracer, FiniteDifference, SGDTracer, Tracer, TracerPenalty
from gtracer.experimental import loss_gradient
from support.bases import ADAM_ARGUMENTS, BASES, SGD_ARGUMENTS
from support.problems import PROBLEMS, conv_batch_norm, make, relative_error, tanh_mlp
from support.twin import AdamTwin, BaseTwin, SGDTwin

STEPS = 8
# The central difference is exact to O(radius²); 1e-4 balances that against rounding in float64.
ENGINES = [
    ({"engine": "exact"}, 1e-11),
    ({"engine": FiniteDifference(1e-4, central=True)}, 1e-6),
]
F0 = [("first-gradient", None), (0.3, 0.3)]


def follow(problem, make_ours, make_twin, tolerance):
    """Run both from the same start, and compare the weights after every step."""
    ours, twins = make(problem), make(problem)
    optimizer, twin = make_ours(ours.model), make_twin(twins.model.parameters())
    for i in range(STEPS):
        torch.manual_seed(i)
        optimizer.step(lambda i=i: ours.loss_of(i))
        torch.manual_seed(i)
        twin.step(twins.loss_of(i))
        assert relative_error(ours.weights(), twins.weights()) < tolerance, f"step {i}"
    assert relative_error(ours.everything(), twins.everything()) < tolerance  # batch-norm statistics too
    return optimizer, twin


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize(("engine", "tolerance"), ENGINES, ids=["exact", "difference"])
@pytest.mark.parametrize("arguments", SGD_ARGUMENTS, ids=str)
@pytest.mark.parametrize(("f0", "twin_f0"), F0, ids=["first-gradient", "number"])
def test_sgd(problem, engine, tolerance, arguments, f0, twin_f0):
    options = {"rho": 0.01, "beta": 0.2, "delta": 0.05}
    optimizer, twin = follow(
        problem,
        lambda m: SGDTracer(m.parameters(), lr=0.02, f0=f0, model=m, **options, **arguments, **engine),
        lambda p: SGDTwin(p, lr=0.02, f0=twin_f0, **options, **arguments),
        tolerance,
    )
    f = [optimizer.state[p]["f"] for p in optimizer.param_groups[0]["params"]]
    assert relative_error(f, twin.f) < 10 * tolerance


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize(("engine", "tolerance"), ENGINES, ids=["exact", "difference"])
@pytest.mark.parametrize(("ours", "decoupled"), [(AdamTracer, False), (AdamWTracer, True)])
@pytest.mark.parametrize("arguments", ADAM_ARGUMENTS, ids=str)
@pytest.mark.parametrize(("f0", "twin_f0"), F0, ids=["first-gradient", "number"])
def test_adam(problem, engine, tolerance, ours, decoupled, arguments, f0, twin_f0):
    arguments = {"weight_decay": 0.0, **arguments}
    options = {"rho": 0.01, "delta": 0.05, "lr": 0.01}
    follow(
        problem,
        lambda m: ours(m.parameters(), f0=f0, model=m, **options, **arguments, **engine),
        lambda p: AdamTwin(p, f0=twin_f0, decoupled=decoupled, **options, **arguments),
        # Adam divides by √v, which blows rounding up where gradients vanish.
        100 * tolerance,
    )


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("arguments", ADAM_ARGUMENTS, ids=str)
def test_adam_whose_second_moment_has_seen_the_loss_alone(problem, arguments):
    arguments = {"weight_decay": 0.0, **arguments}
    options = {"rho": 0.01, "delta": 0.05, "lr": 0.01}
    optimizer, twin = follow(
        problem,
        lambda m: AdamTracer(m.parameters(), model=m, engine="exact", average=loss_gradient, **options, **arguments),
        lambda p: AdamTwin(p, second_moment="loss", **options, **arguments),
        1e-9,
    )
    v = [optimizer.state[p]["exp_avg_sq"] for p in optimizer.param_groups[0]["params"]]
    assert relative_error(v, twin.v) < 1e-8


def test_a_step_is_bounded_where_the_second_moment_has_seen_it():
    """At a wall, where ∇L grows a hundredfold and ρ∇T a millionfold, Adam's own bound holds; otherwise it does not."""

    def largest_step(**own):
        w = torch.ones(1, dtype=torch.float64, requires_grad=True)
        opt = AdamTracer([w], lr=1e-3, rho=1.0, delta=1.0, engine="exact", **own)
        steps = []
        for steepness in [0.1] * 50 + [100.0] + [0.1] * 20:
            before = w.detach().clone()
            opt.step(lambda steepness=steepness: steepness * (w**2 / 2).sum())
            steps.append((w.detach() - before).abs().item())
        return max(steps)

    bound = 1e-3 * (1 - 0.9) / (1 - 0.999) ** 0.5  # Kingma and Ba, section 2.1
    assert largest_step() < 1.1 * bound
    assert largest_step(average=loss_gradient) > 10 * bound


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_any_torch_optimiser(base):
    options = {"rho": 0.01, "beta": 0.2, "delta": 0.05}
    follow(
        conv_batch_norm,
        lambda m: Tracer(base(m.parameters(), lr=1e-2), engine="exact", **options),
        lambda p: BaseTwin(base(p, lr=1e-2), **options),
        1e-10,
    )


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize(("f0", "twin_f0"), F0, ids=["first-gradient", "number"])
def test_penalty_on_the_loss(problem, f0, twin_f0):
    options = {"rho": 0.01, "beta": 0.2, "delta": 0.05}

    class Penalised:
        def __init__(self, model):
            self.penalty = TracerPenalty(model.parameters(), f0=f0, **options)
            self.optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)

        def step(self, closure):
            self.optimizer.zero_grad()
            self.penalty(closure()).backward()
            self.optimizer.step()

    follow(problem, Penalised, lambda p: SGDTwin(p, lr=0.02, momentum=0.9, f0=twin_f0, **options), 1e-11)


def test_interval_penalises_every_kth_step():
    """Twin: ρ is 0 in the steps between."""
    ours, twins = make(tanh_mlp), make(tanh_mlp)
    optimizer = SGDTracer(ours.model.parameters(), lr=0.1, rho=0.01, delta=0.05, engine="exact", interval=3)
    twin = SGDTwin(twins.model.parameters(), lr=0.1, rho=0.01, delta=0.05)
    for i in range(STEPS):
        assert optimizer.second_pass_due == (i % 3 == 0)
        twin.rho = 0.01 if i % 3 == 0 else 0.0
        optimizer.step(lambda i=i: ours.loss_of(i))
        twin.step(twins.loss_of(i))
        assert relative_error(ours.weights(), twins.weights()) < 1e-12


def test_two_groups_with_their_own_rho_and_delta():
    ours, twins = make(tanh_mlp), make(tanh_mlp)
    first, second = ours.model[0].parameters(), ours.model[2].parameters()
    groups = [{"params": first, "rho": 0.02, "delta": 0.1}, {"params": second, "rho": 0.0}]
    optimizer = SGDTracer(groups, lr=0.1, delta=0.5, rho=7.0, engine="exact")
    twin = SGDTwin(twins.model.parameters(), lr=0.1, rho=[0.02, 0.02, 0.0, 0.0], delta=[0.1, 0.1, 0.5, 0.5])
    for i in range(STEPS):
        optimizer.step(lambda i=i: ours.loss_of(i))
        twin.step(twins.loss_of(i))
        assert relative_error(ours.weights(), twins.weights()) < 1e-12
