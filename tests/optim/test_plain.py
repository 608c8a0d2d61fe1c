"""With ρ = 0 every optimiser is torch's own, buffers and random numbers included."""

import pytest
import torch

from gtracer import SAM, AdamTracer, AdamWTracer, SGDTracer, Tracer, TracerPenalty
from support.bases import ADAM_ARGUMENTS, BASES, SGD_ARGUMENTS
from support.problems import PROBLEMS, conv_batch_norm, dropout_mlp, make, relative_error

STEPS = 20


def run_torch(problem, make_optimizer):
    made = make(problem)
    optimizer = make_optimizer(made.model.parameters())
    for i in range(STEPS):
        optimizer.zero_grad()
        made.loss_of(i).backward()
        optimizer.step()
    return made.everything(), torch.get_rng_state()


def run_ours(problem, make_optimizer):
    made = make(problem)
    optimizer = make_optimizer(made.model.parameters())
    for i in range(STEPS):
        optimizer.step(lambda i=i: made.loss_of(i))
    return made.everything(), torch.get_rng_state()


def assert_same_bits(ours, theirs):
    assert all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("engine", ["finite-difference", "exact"])
@pytest.mark.parametrize("arguments", SGD_ARGUMENTS, ids=str)
def test_sgd_bit_for_bit(problem, engine, arguments):
    ours = run_ours(problem, lambda p: SGDTracer(p, lr=0.05, rho=0.0, engine=engine, **arguments))
    assert_same_bits(ours, run_torch(problem, lambda p: torch.optim.SGD(p, lr=0.05, **arguments)))


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize(("ours", "theirs"), [(AdamTracer, torch.optim.Adam), (AdamWTracer, torch.optim.AdamW)])
@pytest.mark.parametrize("arguments", [*ADAM_ARGUMENTS, {"fused": True}], ids=str)
def test_adam_bit_for_bit(problem, ours, theirs, arguments):
    found = run_ours(problem, lambda p: ours(p, lr=0.02, rho=0.0, **arguments))
    assert_same_bits(found, run_torch(problem, lambda p: theirs(p, lr=0.02, **arguments)))


def test_adamw_decays_by_default_as_torch_does():
    found, _ = run_ours(dropout_mlp, lambda p: AdamWTracer(p, rho=0.0))
    true, _ = run_torch(dropout_mlp, lambda p: torch.optim.AdamW(p))
    assert relative_error(found, true) < 1e-12


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
@pytest.mark.parametrize("wrapper", [Tracer, SAM])
def test_any_torch_optimiser_bit_for_bit(base, wrapper):
    ours = run_ours(conv_batch_norm, lambda p: wrapper(base(p, lr=1e-2), rho=0.0))
    assert_same_bits(ours, run_torch(conv_batch_norm, lambda p: base(p, lr=1e-2)))


@pytest.mark.parametrize("problem", PROBLEMS)
def test_penalty_is_the_plain_loss(problem):
    made = make(problem)
    penalty, optimizer = TracerPenalty(made.model.parameters(), rho=0.0), torch.optim.SGD(made.model.parameters(), 0.05)
    for i in range(STEPS):
        optimizer.zero_grad()
        penalty(made.loss_of(i)).backward()
        optimizer.step()
    theirs = run_torch(problem, lambda p: torch.optim.SGD(p, 0.05))
    assert_same_bits((made.everything(), torch.get_rng_state()), theirs)


@pytest.mark.parametrize("f0", ["first-gradient", 0.1])
def test_counting_on_the_device_changes_nothing(f0):
    """capturable=True: the steps are tensors, and so may the learning rate be; to float32, which torch counts in."""
    weights = []
    for own in ({"lr": 0.01}, {"lr": torch.tensor(0.01), "capturable": True}):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)).double()
        opt = AdamWTracer(model.parameters(), rho=0.01, delta=0.05, f0=f0, **own)
        for _ in range(5):
            opt.step(lambda model=model: model(torch.ones(3, 4, dtype=torch.float64)).square().mean())
        weights.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("ours", [AdamTracer, AdamWTracer])
def test_fused_adam_with_a_penalty(ours):
    """As without; a ρ that comes and goes hands the state back and forth."""

    def trained(fused):
        made = make(conv_batch_norm)
        opt = ours(made.model.parameters(), lr=0.02, fused=fused, model=made.model)
        for i in range(STEPS):
            opt.param_groups[0]["rho"] = 0.01 * (i // 3 % 2)
            opt.step(lambda i=i: made.loss_of(i))
        return made.everything()

    assert relative_error(trained(True), trained(None)) < 1e-9
