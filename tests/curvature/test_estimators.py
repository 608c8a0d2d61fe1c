"""Every estimator of F against the dense truth, and every penalty's gradient against differences of T itself."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, l1_loss, mse_loss

from gtracer import AdamTracer, AdamWTracer, Exact, FiniteDifference, SGDTracer, Tracer, TracerPenalty, variational
from gtracer import curvature as c
from gtracer.curvature import evaluation, layers, products
from gtracer.curvature.likelihood import Bernoulli, Categorical, Gaussian, likelihood_of
from gtracer.experimental import vectorised_micro_batch
from networks import CASES, attention, conv, encoder, group_norm, make, mlp, regression
from problems import relative_error


def evaluate(case, estimator, differentiable=False):
    with c.Recording(case.model) as recording:
        output = case.model(case.x)
    losses = case.loss(output, case.y, reduction="none").reshape(len(case.y), -1).mean(1)
    loss = case.loss(output, case.y)
    return estimator(c.Evaluation(loss, case.params, recording, differentiable=differentiable, losses=losses))


def example_squares(case):
    """mean_i g_i², one example at a time."""
    n = len(case.y)
    g = [torch.autograd.grad(case.example(i), case.params) for i in range(n)]
    return [sum(gi[j] ** 2 for gi in g) / n for j in range(len(case.params))]


def weights_function(case, function):
    """A function of the model's output as one of all weights in one vector."""
    shapes = [(name, p.shape, p.numel()) for name, p in case.model.named_parameters()]

    def of(w):
        parts = w.split([size for _, _, size in shapes])
        named = {name: part.reshape(shape) for (name, shape, _), part in zip(shapes, parts, strict=True)}
        return function(torch.func.functional_call(case.model, named, (case.x,)))

    return of, torch.cat([p.detach().flatten() for p in case.params])


def diagonal(case, matrix):
    """The diagonal of a dense matrix, cut into the parameters' shapes."""
    parts = matrix.diagonal().split([p.numel() for p in case.params])
    return [part.reshape(p.shape) for part, p in zip(parts, case.params, strict=True)]


def dense_hessian(case):
    of, w = weights_function(case, lambda out: case.loss(out, case.y))
    return variational.hessian_of(of)(w)


def dense_gauss_newton(case):
    outputs, w = weights_function(case, torch.flatten)
    return variational.gauss_newton(outputs, lambda z: case.loss(z.reshape(len(case.y), -1), case.y))(w)


# Per example.


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("room", [products.ROOM, 1], ids=["whole", "in chunks"])
def test_per_example_is_the_mean_of_squared_gradients(case, room, monkeypatch):
    monkeypatch.setattr(products, "ROOM", room)
    made = make(case)
    assert relative_error(evaluate(made, c.per_example), example_squares(made)) < 1e-12


@pytest.mark.parametrize("case", [mlp, conv, group_norm, encoder])
def test_fast_paths_agree_with_torch_func(case, monkeypatch):
    made = make(case)
    fast = evaluate(made, c.per_example)
    monkeypatch.setattr(layers, "FAST", {})
    assert relative_error(fast, evaluate(made, c.per_example)) < 1e-12


def test_fast_paths_are_taken(monkeypatch):
    """They would agree with torch.func also if they were never used."""

    def refuse(*args):
        raise AssertionError("not a fast path")

    monkeypatch.setattr(evaluation, "vectorised_squares", refuse)
    for case in (mlp, conv, group_norm, encoder):
        evaluate(make(case), c.per_example)
    with pytest.raises(AssertionError, match="not a fast path"):
        evaluate(make(attention), c.per_example)


def test_per_example_is_what_variational_calls_the_empirical_fisher():
    made = make(mlp)
    of, w = weights_function(made, lambda out: cross_entropy(out, made.y, reduction="none"))
    assert relative_error(evaluate(made, c.per_example), diagonal(made, variational.empirical_fisher(of)(w))) < 1e-12


def test_frozen_and_unused_parameters_are_left_out():
    made = make(mlp)
    made.model[0].weight.requires_grad_(False)
    params = [p for p in made.params if p.requires_grad] + [nn.Parameter(torch.ones(2))]
    with c.Recording(made.model) as recording:
        loss = made.loss_of()
    at = c.Evaluation(loss, params, recording)
    truth = example_squares(type(made)(copy.deepcopy(made.model).requires_grad_(True), made.x, made.y))
    assert relative_error(c.per_example(at), truth[1:]) < 1e-12
    assert len(at.params) == len(params) - 1


def test_a_frozen_batch_norm_is_a_layer_like_others():
    made = make(group_norm)
    made.model[1] = nn.BatchNorm2d(4).double().eval()
    assert relative_error(evaluate(made, c.per_example), example_squares(made)) < 1e-12


# Micro-batches.


@pytest.mark.parametrize("m", [1, 2, 5, 100])
def test_micro_batch_is_the_mean_over_micro_batches(m):
    made = make(mlp)
    losses = cross_entropy(made.model(made.x), made.y, reduction="none")
    found = c.micro_batch(m)(c.Evaluation(losses.mean(), made.params, losses=losses))
    parts = list(zip(made.x.split(m), made.y.split(m), strict=True))
    g = [torch.autograd.grad(made.loss_of(x, y), made.params) for x, y in parts]
    true = [sum(gk[j] ** 2 * len(x) / 5 for gk, (x, _) in zip(g, parts, strict=True)) for j in range(len(made.params))]
    assert relative_error(found, true) < 1e-12
    if m == 1:
        assert relative_error(found, evaluate(made, c.per_example)) < 1e-12
    if m >= 5:
        assert relative_error(found, evaluate(made, c.gradient_magnitude)) < 1e-12


# Fisher and Gauss-Newton.


@pytest.mark.parametrize("case", [mlp, regression, conv, encoder])
def test_gauss_newton_is_exact_for_few_outputs(case):
    made = make(case)
    assert relative_error(evaluate(made, c.gauss_newton(made.loss)), diagonal(made, dense_gauss_newton(made))) < 1e-10


def test_gauss_newton_of_binary_cross_entropy():
    made = make(regression)
    made.loss, made.y = nn.functional.binary_cross_entropy_with_logits, (made.y > 0).double()
    assert relative_error(evaluate(made, c.gauss_newton(made.loss)), diagonal(made, dense_gauss_newton(made))) < 1e-10


def sampled_mean(made, estimator, count):
    """Mean of the estimates, and how far off it is in standard errors, coordinate by coordinate."""
    torch.manual_seed(1)
    draws = [torch.cat([F.flatten() for F in evaluate(made, estimator)]) for _ in range(count)]
    stacked = torch.stack(draws)
    return stacked.mean(0), stacked.std(0) / count**0.5


@pytest.mark.parametrize(
    "estimator", [c.monte_carlo_fisher, lambda loss: c.gauss_newton(loss, exact_up_to=0)], ids=["fisher", "sampled GGN"]
)
@pytest.mark.parametrize("case", [mlp, regression])
def test_sampled_labels_are_unbiased(case, estimator):
    """1000 draws: no coordinate further than five standard errors from the dense truth, nearly all within two."""
    made = make(case)
    mean, error = sampled_mean(made, estimator(made.loss), 1000)
    off = (mean - dense_gauss_newton(made).diagonal()).abs()
    assert (off <= 5 * error + 1e-12).all()
    assert (off <= 2 * error + 1e-12).double().mean() > 0.9


def test_sampled_binary_labels_are_unbiased():
    made = make(regression)
    made.loss, made.y = nn.functional.binary_cross_entropy_with_logits, (made.y > 0).double()
    mean, error = sampled_mean(made, c.monte_carlo_fisher(made.loss), 1000)
    off = (mean - dense_gauss_newton(made).diagonal()).abs()
    assert (off <= 5 * error + 1e-12).all()


def test_more_samples_spread_less():
    made = make(mlp)
    one, ten = (sampled_mean(made, c.monte_carlo_fisher(samples=n), 200)[1].norm() for n in (1, 10))
    assert 2 < one / ten < 5  # √10


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(), Bernoulli()])
def test_factors_multiply_to_the_curvature_of_the_loss(likelihood):
    torch.manual_seed(0)
    z = torch.randn(1, 3).double()
    label = torch.tensor([1]) if isinstance(likelihood, Categorical) else torch.tensor([[1.0, 0, 1]]).double()
    loss = {Categorical: cross_entropy, Gaussian: mse_loss}.get(
        type(likelihood), nn.functional.binary_cross_entropy_with_logits
    )
    true = variational.hessian_of(lambda v: loss(v[None], label))(z[0])
    assert torch.allclose(sum(torch.outer(s[0], s[0]) for s in likelihood.factors(z)), true, atol=1e-12)


def test_gumbel_softmax_carries_the_gradient_through_the_drawing():
    """Labels held constant forget how the probabilities move; the relaxation does not.

    Two classes, one input x = 1: F = p(1 − p) for each of the two weights.
    """
    model = nn.Linear(1, 2, bias=False).double()
    nn.init.constant_(model.weight, 0.0)
    model.weight.data[0] = 1.0
    x, y = torch.ones(100_000, 1).double(), torch.zeros(100_000, dtype=torch.long)

    def slope(estimator):
        torch.manual_seed(0)
        with c.Recording(model) as recording:
            loss = cross_entropy(model(x), y)
        F = estimator(c.Evaluation(loss, [model.weight], recording, differentiable=True))[0]
        return torch.autograd.grad(F.sum(), model.weight)[0][0, 0].item()

    p = 1 / (1 + math.exp(-1))
    true = 2 * p * (1 - p) * (1 - 2 * p)  # d/dw of 2 p(1 − p)
    # The label constant: E[2 (p − y)] p(1 − p) · 2 = 0.
    assert abs(slope(c.gauss_newton(exact_up_to=0))) < 0.02
    assert slope(c.gauss_newton()) == pytest.approx(true, rel=1e-9)
    # The relaxation's bias goes with its temperature.
    off = [abs(slope(c.monte_carlo_fisher(temperature=t)) / true - 1) for t in (1.0, 0.3, 0.1)]
    assert off[0] > off[1] > off[2]
    assert off[2] < 0.2


# Hutchinson.


@pytest.mark.parametrize("case", [mlp, regression, conv, group_norm, encoder])
def test_hutchinson_is_unbiased_for_the_hessians_diagonal(case):
    """400 probes: no coordinate further than five standard errors from the dense Hessian."""
    made = make(case)
    mean, error = sampled_mean(made, c.hutchinson(), 400)
    off = (mean - dense_hessian(made).diagonal()).abs()
    assert (off <= 5 * error + 1e-9).all()


def test_probes_take_both_signs(monkeypatch):
    seen = []
    original = torch.randint_like

    def watched(*args, **kwargs):
        seen.append(original(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(torch, "randint_like", watched)
    evaluate(make(mlp), c.hutchinson())
    signs = torch.cat([(2 * z - 1).flatten() for z in seen])
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert 0.3 < (signs > 0).double().mean() < 0.7


def test_one_probe_is_exact_where_the_hessian_is_diagonal():
    w = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]).double())
    at = c.Evaluation((w**3).sum(), [w])
    assert relative_error(c.hutchinson()(at), [6 * w.detach()]) < 1e-12


@pytest.mark.parametrize(("layer", "name"), [(nn.LayerNorm(3), "LayerNorm"), (nn.BatchNorm1d(3), "BatchNorm")])
def test_hutchinson_refuses_wrong_third_derivatives(layer, name):
    """As the average it needs two derivatives only, and those are right."""
    model = nn.Sequential(nn.Linear(4, 3), layer)
    x = torch.randn(5, 4)
    opt = SGDTracer(model.parameters(), lr=0.1, rho=0.003, curvature=c.hutchinson())
    with pytest.raises(ValueError, match=rf"third derivative of {name} is wrong"):
        opt.step(lambda: model(x).square().mean())
    SGDTracer(model.parameters(), lr=0.1, rho=0.003, average=c.hutchinson()).step(lambda: model(x).square().mean())
    model.eval()
    if name == "BatchNorm":  # an affine map now
        opt.step(lambda: model(x).square().mean())


def test_hutchinson_averages_over_a_kernel():
    made = make(conv)
    torch.manual_seed(0)
    plain = evaluate(made, c.hutchinson(samples=3))
    torch.manual_seed(0)
    spatial = evaluate(made, c.hutchinson(samples=3, spatial=True))
    for F, mean, p in zip(plain, spatial, made.params, strict=True):
        expected = F.mean((2, 3), keepdim=True).expand_as(F) if p.ndim == 4 else F
        assert torch.allclose(mean, expected, rtol=1e-12)


# The gradient of every penalty.

# The Monte-Carlo Fisher's relaxed gradient is not that of its value: it is tested on its own.
ESTIMATORS = {
    "gradient_magnitude": lambda loss: c.gradient_magnitude,
    "micro_batch": lambda loss: c.micro_batch(2),
    "per_example": lambda loss: c.per_example,
    "gauss_newton": c.gauss_newton,
    "sampled gauss_newton": lambda loss: c.gauss_newton(loss, exact_up_to=0),
    "hutchinson": lambda loss: c.hutchinson(samples=2),
}


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("case", CASES)
def test_penalty_gradient_against_differences_of_the_ratio(case, name):
    made = make(case)
    estimator = ESTIMATORS[name](made.loss)
    if name == "sampled gauss_newton" and made.loss is mse_loss:
        pytest.skip("its labels move with the outputs; drawn again, they are those of the Monte-Carlo Fisher")
    if case is encoder and name == "hutchinson":
        made.model.norm = nn.Identity()  # refused: torch's third derivative of LayerNorm is wrong
        made.model.words.padding_idx = None  # and its third derivative of the padding word is not zero
    f = [torch.rand_like(p) for p in made.params]

    def ratio(differentiable=False):
        torch.manual_seed(3)  # the same probes
        return c.trace_ratio(evaluate(made, estimator, differentiable), f, 0.1)

    slope = torch.autograd.grad(ratio(differentiable=True), made.params, allow_unused=True, materialize_grads=True)
    torch.manual_seed(7)
    for _ in range(3):
        step, h = [torch.randn_like(p) for p in made.params], 1e-5
        if case is encoder:
            step[0][0] = 0  # the padding word has no gradient, though the loss depends on it
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                torch._foreach_add_(made.params, step, alpha=sign * h)
            ends.append(ratio().item())
            with torch.no_grad():
                torch._foreach_sub_(made.params, step, alpha=sign * h)
        inner = sum((a * b).sum() for a, b in zip(slope, step, strict=True)).item()
        assert inner == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=2e-5, abs=1e-7)


def test_gaussian_monte_carlo_penalty_against_differences_of_the_ratio():
    """Reparameterised in full, so here the gradient is that of the value."""
    made = make(regression)
    estimator, f = c.monte_carlo_fisher(made.loss), [torch.rand_like(p) for p in made.params]

    def ratio(differentiable=False):
        torch.manual_seed(3)
        return c.trace_ratio(evaluate(made, estimator, differentiable), f, 0.1)

    slope = torch.autograd.grad(ratio(differentiable=True), made.params, allow_unused=True, materialize_grads=True)
    p, h = made.params[0], 1e-6
    for index in [(0, 0), (2, 1)]:
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                p[index] += sign * h
            ends.append(ratio().item())
            with torch.no_grad():
                p[index] -= sign * h
        assert slope[0][index].item() == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-6)


def test_squared_outer_products_against_gradcheck():
    torch.manual_seed(0)
    a, b = (torch.randn(3, size, 4, dtype=torch.float64, requires_grad=True) for size in (2, 5))
    assert torch.autograd.gradcheck(lambda a, b: products.SquaredOuter.apply(a, b, products.Sequence()), (a, b))
    image = torch.randn(3, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    slopes = torch.randn(3, 6, 3, 3, dtype=torch.float64, requires_grad=True)
    for kind in (products.Convolution, products.UnfoldedConvolution):
        slide = kind((2, 2), (1, 1), (1, 1), 2, (3, 3), (5, 5))
        assert torch.autograd.gradcheck(lambda a, b, s=slide: products.SquaredOuter.apply(a, b, s), (image, slopes))


# The optimisers.


def twin_step(made, numerator, average, *, lr, rho, delta, beta, f):
    """w ← w − lr ∇[L + ρ⟨F, 1/(f + δ)⟩] and f ← (1 − β)f + β|F'|, straight from the estimators."""
    torch.manual_seed(5)
    with c.Recording(made.model) as recording:
        loss = made.loss_of()
    at = c.Evaluation(loss, made.params, recording, differentiable=True)
    F = numerator(at)
    measured = [x.detach().abs() for x in (F if average == numerator else average(at))]
    f = [x.clone() for x in measured] if f is None else f
    T = sum((x / (y + delta)).sum() for x, y in zip(F, f, strict=True))
    total = torch.autograd.grad(loss + rho * T, made.params)
    with torch.no_grad():
        for p, g in zip(made.params, total, strict=True):
            p -= lr * g
    return [(1 - beta) * y + beta * x for x, y in zip(measured, f, strict=True)]


PAIRS = [
    (c.per_example, c.per_example),
    (c.per_example, c.gradient_magnitude),
    (c.gradient_magnitude, c.per_example),
    (c.gauss_newton(), c.gauss_newton()),
    (c.gradient_magnitude, c.gauss_newton()),
    (c.hutchinson(), c.gradient_magnitude),
    (c.hutchinson(), c.hutchinson()),
    (c.gradient_magnitude, c.hutchinson()),
    (c.monte_carlo_fisher(), c.monte_carlo_fisher()),
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " ".join(getattr(x, "__name__", repr(x))[:14] for x in pair))
def test_optimiser_follows_the_twin(pair):
    """Numerator and average each by its own estimator, step by step."""
    numerator, average = pair
    knobs = {"lr": 0.05, "rho": 0.01, "delta": 0.1, "beta": 0.3}
    mine, other = make(mlp), make(mlp)
    opt = SGDTracer(mine.params, **knobs, curvature=numerator, average=average, engine="exact", model=mine.model)
    f = None
    for _ in range(4):
        torch.manual_seed(5)
        opt.step(mine.loss_of)
        f = twin_step(other, numerator, average, **knobs, f=f)
        assert relative_error(mine.params, other.params) < 1e-10
    assert relative_error([opt.state[p]["f"] for p in mine.params], f) < 1e-9


@pytest.mark.parametrize("average", [c.per_example, c.gauss_newton(), c.hutchinson()], ids=repr)
def test_average_works_with_the_finite_difference(average):
    """Against the exact engine: the numerator differs by the difference's error, f not at all at first."""
    results = []
    for engine in (FiniteDifference(1e-5, central=True), "exact"):
        made = make(mlp)
        options = {"average": average, "engine": engine, "model": made.model}
        opt = SGDTracer(made.params, lr=0.05, rho=0.01, **options)
        for _ in range(3):
            torch.manual_seed(5)
            opt.step(made.loss_of)
        results.append(made.params)
    assert relative_error(*results) < 1e-6


FAST_CASES = [mlp, regression, conv, group_norm, encoder]


def penalty_of(case, **options):
    """ρ∇T of the first step, by what it adds to the gradient."""
    made = make(case)
    opt = SGDTracer(made.params, lr=0.1, rho=0.02, delta=0.1, curvature=c.per_example, model=made.model, **options)
    opt.step(made.loss_of)
    reference = make(case)
    plain = torch.autograd.grad(reference.loss_of(), reference.params)
    return [p.grad - g for p, g in zip(made.params, plain, strict=True)], opt


@pytest.mark.parametrize("case", FAST_CASES)
@pytest.mark.parametrize("room", [products.ROOM, 1], ids=["whole", "in chunks"])
def test_finite_difference_per_example_converges_to_the_exact_penalty(case, room, monkeypatch):
    """With the order of its error: 1 one way, 2 both ways."""
    monkeypatch.setattr(products, "ROOM", room)
    exact, _ = penalty_of(case, engine="exact")
    for central, order in ((False, 1), (True, 2)):
        radii = (1e-2, 1e-3)
        off = [relative_error(penalty_of(case, engine=FiniteDifference(r, central))[0], exact) for r in radii]
        assert off[1] < 10**-order * 0.05
        # ReLU has no derivative to converge to where it switches.
        assert math.log10(off[0] / off[1]) == pytest.approx(order, abs=0.3) or case is mlp


def test_finite_difference_per_example_is_the_default_where_it_can_be():
    for case, engine in ((mlp, FiniteDifference()), (encoder, FiniteDifference()), (attention, Exact())):
        made = make(case)
        opt = SGDTracer(made.params, lr=0.1, curvature=c.per_example, model=made.model)
        assert opt.method.engine == engine
        opt.step(made.loss_of)
    with pytest.raises(ValueError, match="leave engine out"):
        SGDTracer(made.params, lr=0.1, curvature=c.per_example, model=made.model, engine="finite-difference")


def test_finite_difference_per_example_leaves_no_graph_and_no_hook():
    made = make(conv)
    opt = SGDTracer(made.params, lr=0.1, curvature=c.per_example, model=made.model)
    loss = opt.step(made.loss_of)
    assert not loss.requires_grad
    assert not any(p.grad.requires_grad for p in made.params)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in made.model.modules())


@pytest.mark.parametrize("case", [mlp, conv, group_norm, encoder])
@pytest.mark.parametrize("engine", ["exact", "finite-difference"])
@pytest.mark.parametrize("room", [products.ROOM, 1], ids=["whole", "in chunks"])
def test_per_example_in_mixed_precision(case, engine, room, monkeypatch):
    """bfloat16 has three digits: the penalised gradient agrees with float32's to about two."""
    monkeypatch.setattr(products, "ROOM", room)
    gradients = []
    for mixed in (False, True):
        made = make(case)
        made.model.float()
        made.x = made.x.float() if made.x.is_floating_point() else made.x
        opt = SGDTracer(
            made.params, lr=0.1, rho=0.02, delta=0.1, curvature=c.per_example, engine=engine, model=made.model
        )

        def closure(made=made, mixed=mixed):
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                output = made.model(made.x)
            return made.loss(output.float(), made.y)

        opt.step(closure)
        gradients.append([p.grad for p in made.params])
    assert relative_error(*gradients) < 0.03


def test_gradients_by_examples_are_the_gradients():
    """Also of a weight that the loss has another way to, and where examples are taken in chunks."""
    for case in FAST_CASES:
        for room in (products.ROOM, 1):
            made = make(case)
            with pytest.MonkeyPatch.context() as patch, c.Recording(made.model) as recording:
                patch.setattr(products, "ROOM", room)
                loss = made.loss_of() + made.params[0].square().sum()
                at = c.Evaluation(loss, made.params, recording, by_examples=True)
            assert relative_error(at.gradients, torch.autograd.grad(loss, made.params)) < 1e-12


def test_a_ridge_in_the_closure_is_no_examples_gradient():
    """It is in the gradient, but not in F, with either engine."""
    results = []
    for options in ({"engine": "exact"}, {"engine": FiniteDifference(1e-5, central=True)}):
        made = make(conv)
        opt = SGDTracer(made.params, lr=0.1, rho=0.05, curvature=c.per_example, model=made.model, **options)
        opt.step(lambda made=made: made.loss_of() + sum(p.square().sum() for p in made.params))
        results.append(made.params)
    assert relative_error(*results) < 1e-7
    plain = make(conv)
    assert relative_error([opt.state[p]["f"] for p in made.params], example_squares(plain)) < 1e-9


def test_finite_difference_per_example_with_frozen_weights():
    results = []
    for options in ({"engine": "exact"}, {"engine": FiniteDifference(1e-5, central=True)}):
        made = make(conv)
        made.model[0].weight.requires_grad_(False)
        made.model[2].bias.requires_grad_(False)
        params = [p for p in made.params if p.requires_grad]
        opt = SGDTracer(params, lr=0.1, rho=0.05, curvature=c.per_example, model=made.model, **options)
        opt.step(made.loss_of)
        results.append(params)
    assert relative_error(*results) < 1e-7


@pytest.mark.parametrize("engine", ["exact", FiniteDifference(1e-4, central=True)])
@pytest.mark.parametrize("m", [1, 2, 5])
def test_micro_batch_optimiser_follows_its_penalty(m, engine):
    """Against the exact penalty on the examples' losses, which shares none of the passes in parts."""
    mine, other = make(mlp), make(mlp)
    knobs = {"rho": 0.01, "delta": 0.1, "beta": 0.3, "f0": 0.2}
    opt = SGDTracer(mine.params, lr=0.05, **knobs, curvature=c.micro_batch(m), engine=engine)
    penalty = TracerPenalty(other.params, **knobs, curvature=c.micro_batch(m))
    sgd = torch.optim.SGD(other.params, lr=0.05)
    for _ in range(4):
        loss = opt.step(mine.loss_of, mine.x, mine.y)
        sgd.zero_grad()
        losses = cross_entropy(other.model(other.x), other.y, reduction="none")
        penalty(losses).backward()
        sgd.step()
        assert loss.item() == pytest.approx(losses.mean().item(), rel=1e-7)
        assert opt.stats.trace_ratio == pytest.approx(penalty.trace_ratio.item(), rel=1e-6)
    assert relative_error(mine.params, other.params) < (1e-10 if engine == "exact" else 1e-7)
    assert relative_error([opt.state[p]["f"] for p in mine.params], [penalty.state[p] for p in other.params]) < 1e-6


@pytest.mark.parametrize("central", [False, True])
def test_vectorised_micro_batches_are_the_same(central):
    """Batch norm, dropout and a penalty for each group; over several steps, statistics included."""

    def run(vectorised):
        torch.manual_seed(0)
        layers = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
        model = nn.Sequential(*layers).double()
        x, y = torch.randn(12, 4).double(), torch.randint(3, (12,))
        groups = [{"params": model[0].parameters()}, {"params": [*model[1:].parameters()], "rho": 0.03, "delta": 0.2}]
        curvature = (vectorised_micro_batch if vectorised else c.micro_batch)(4)
        engine = FiniteDifference(central=central)
        opt = SGDTracer(groups, lr=0.1, rho=0.01, f0=0.1, curvature=curvature, model=model, engine=engine)
        losses = [opt.step(lambda x, y: cross_entropy(model(x), y), x, y).item() for _ in range(3)]
        return [*model.state_dict().values(), torch.tensor([*losses, opt.stats.trace_ratio]).double()]

    assert relative_error(run(True), run(False)) < 1e-9


def test_vectorised_micro_batches_replay_their_dropout():
    """Against the exact engine, which makes one pass: other masks in the second would show."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    x, y = torch.randn(8, 4).double(), torch.randint(3, (8,))
    curvature = vectorised_micro_batch(2)
    sizes = []
    for radius in (1e-4, 1e-5):
        opt = SGDTracer(
            model.parameters(), lr=0.0, rho=0.05, curvature=curvature, model=model, engine=FiniteDifference(radius)
        )
        torch.manual_seed(3)
        opt.step(lambda x, y: cross_entropy(model(x), y), x, y)
        sizes.append(opt.stats.penalty_ratio)
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-2)


def test_vectorised_micro_batches_that_do_not_divide_the_batch():
    results = []
    for vectorised in (True, False):
        made = make(mlp)
        curvature = (vectorised_micro_batch if vectorised else c.micro_batch)(2)
        opt = SGDTracer(made.params, lr=0.05, rho=0.01, curvature=curvature, model=made.model)
        opt.step(made.loss_of, made.x, made.y)
        results.append(made.params)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_micro_batch_as_large_as_the_batch_is_the_default():
    """Both terms, and both engines' defaults: bit for bit."""
    results = []
    for curvature in (c.gradient_magnitude, c.micro_batch(100)):
        made = make(mlp)
        opt = SGDTracer(made.params, lr=0.05, rho=0.01, curvature=curvature)
        for _ in range(3):
            opt.step(made.loss_of, made.x, made.y)
        results.append(made.params)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_micro_batches_for_the_average_alone():
    """The penalty is the whole batch's, f follows the parts; per example they are the empirical Fisher's."""
    results = []
    for average in (c.micro_batch(1), c.per_example):
        made = make(mlp)
        opt = SGDTracer(made.params, lr=0.05, rho=0.01, average=average, f0=0.1, model=made.model)
        for _ in range(3):
            opt.step(made.loss_of, made.x, made.y)
        results.append([*made.params, *(opt.state[p]["f"] for p in made.params)])
    assert relative_error(*results) < 1e-9


def test_micro_batches_for_the_numerator_alone():
    made, plain = make(mlp), make(mlp)
    opt = SGDTracer(made.params, lr=0.05, rho=0.01, curvature=c.micro_batch(2), average=c.gradient_magnitude, f0=0.1)
    opt.step(made.loss_of, made.x, made.y)
    g = torch.autograd.grad(plain.loss_of(), plain.params)
    assert relative_error([opt.state[p]["f"] for p in made.params], [0.09 + 0.1 * x**2 for x in g]) < 1e-12


def test_micro_batches_take_batches_of_any_shape():
    """Dictionaries and lists are split, what is no tensor goes to every part."""
    made = make(mlp)
    seen = []

    def closure(batch, reduction):
        seen.append((len(batch["x"]), len(batch["more"][0]), reduction))
        return cross_entropy(made.model(batch["x"]), batch["more"][0], reduction=reduction)

    opt = SGDTracer(made.params, lr=0.05, rho=0.01, curvature=c.micro_batch(2), f0=0.1)
    opt.step(closure, {"x": made.x, "more": [made.y]}, "mean")
    assert seen == [(2, 2, "mean")] * 4 + [(1, 1, "mean")] * 2


def test_batch_norm_statistics_move_once():
    """From the same start by the mean of the micro-batches' moves; the running mean is that of one pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    plain = copy.deepcopy(model)
    x, y = torch.randn(8, 4).double() + 2, torch.randint(3, (8,))
    opt = SGDTracer(model.parameters(), lr=0.05, rho=0.01, curvature=c.micro_batch(2), model=model)
    opt.step(lambda x, y: cross_entropy(model(x), y), x, y)
    plain(x)
    assert torch.allclose(model[0].running_mean, plain[0].running_mean, rtol=1e-12)
    variance = torch.stack([part.var(0) for part in x.split(2)]).mean(0)
    assert torch.allclose(model[0].running_var, 0.9 + 0.1 * variance, rtol=1e-12)
    assert model[0].num_batches_tracked == 1


def test_dropout_masks_agree_between_a_micro_batchs_passes():
    """A linear net with dropout: other masks in the second pass would give another Hessian."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    start = copy.deepcopy(model.state_dict())
    x, y = torch.randn(6, 4).double(), torch.randint(3, (6,))
    results = []
    for engine in ("exact", FiniteDifference(1e-5, central=True)):
        model.load_state_dict(start)
        opt = SGDTracer(model.parameters(), lr=0.1, rho=0.05, curvature=c.micro_batch(2), engine=engine)
        torch.manual_seed(9)
        opt.step(lambda x, y: cross_entropy(model(x), y), x, y)
        results.append([p.detach().clone() for p in model.parameters()])
    assert relative_error(*results) < 1e-7


def test_an_error_in_a_later_micro_batch_leaves_nothing_behind():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    opt = SGDTracer(model.parameters(), lr=0.05, rho=0.01, curvature=c.micro_batch(2), model=model)
    before = copy.deepcopy(model.state_dict())

    def closure(x, y):
        if x[0, 0] > 1:
            raise ZeroDivisionError
        return cross_entropy(model(x), y)

    x = torch.zeros(6, 4)
    x[4] = 2
    with pytest.raises(ZeroDivisionError):
        opt.step(closure, x, torch.zeros(6, dtype=torch.long))
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert not opt.state


@pytest.mark.parametrize("kind", [AdamTracer, AdamWTracer])
def test_adams_second_moment_is_fed_by_the_average(kind):
    made, plain = make(mlp), make(mlp)
    opt = kind(made.params, lr=0.01, rho=0.01, curvature=c.per_example, model=made.model)
    opt.step(made.loss_of)
    for p, F in zip(made.params, example_squares(plain), strict=True):
        assert torch.allclose(opt.state[p]["exp_avg_sq"], 0.001 * F, rtol=1e-9)
    # f is that moment, with its start at zero divided out.
    found = opt.average_of(opt.param_groups[0], made.params)
    assert relative_error(found, example_squares(plain)) < 1e-9


def test_any_torch_optimiser_takes_an_estimator():
    made, other = make(mlp), make(mlp)
    base = torch.optim.RMSprop(made.params, lr=0.01)
    opt = Tracer(base, rho=0.01, curvature=c.per_example, engine="exact", model=made.model)
    penalty = TracerPenalty(other.params, rho=0.01, curvature=c.per_example, model=other.model)
    plain = torch.optim.RMSprop(other.params, lr=0.01)
    for _ in range(3):
        opt.step(made.loss_of)
        plain.zero_grad()
        penalty(other.loss_of()).backward()
        plain.step()
    assert relative_error(made.params, other.params) < 1e-10


def test_an_estimator_of_ones_own():
    """Any function of an evaluation will do: here the weights' size, whose penalty is a ridge."""

    def ridge(at):
        return [p**2 for p in at.params]

    made, other = make(mlp), make(mlp)
    opt = SGDTracer(made.params, lr=0.1, rho=0.5, delta=1.0, f0=0.0, curvature=ridge)
    opt.step(made.loss_of)
    plain = torch.optim.SGD(other.params, lr=0.1, weight_decay=1.0)  # ρ∇(w²/δ) = 2ρ w
    other.loss_of().backward()
    plain.step()
    assert relative_error(made.params, other.params) < 1e-12


def test_at_rho_zero_the_estimator_changes_nothing():
    made, other = make(mlp), make(mlp)
    opt = SGDTracer(made.params, lr=0.1, momentum=0.9, rho=0.0, curvature=c.per_example, model=made.model)
    plain = torch.optim.SGD(other.params, lr=0.1, momentum=0.9)
    for _ in range(3):
        opt.step(made.loss_of)
        plain.zero_grad()
        other.loss_of().backward()
        plain.step()
    assert all(torch.equal(a, b) for a, b in zip(made.params, other.params, strict=True))
    assert "f" in opt.state[made.params[0]]


def test_hooks_and_graphs_are_gone_after_a_step():
    made = make(mlp)
    opt = SGDTracer(made.params, lr=0.1, curvature=c.per_example, model=made.model)
    opt.step(made.loss_of)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in made.model.modules())
    assert not any(p.grad.requires_grad for p in made.params)


def test_the_penalty_forgets_its_recording():
    made = make(mlp)
    penalty = TracerPenalty(made.params, curvature=c.per_example, model=made.model)
    penalty(made.loss_of())
    assert penalty._recording.calls == []
    with torch.no_grad():
        made.model(made.x)
    assert penalty._recording.calls == []


@pytest.mark.parametrize("estimator", [c.per_example, c.micro_batch(3), c.gauss_newton(), c.hutchinson()], ids=repr)
def test_an_optimiser_with_an_estimator_can_be_pickled(estimator):
    made = make(mlp)
    opt = SGDTracer(made.params, lr=0.1, curvature=estimator, model=made.model)
    assert pickle.loads(pickle.dumps(opt)).method == opt.method


# Refusals.


def refusal(model, curvature, x, loss=cross_entropy, y=None, **options):
    opt = SGDTracer(model.parameters(), lr=0.1, curvature=curvature, model=model, **options)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="use |pass ") as caught:
        opt.step(lambda: loss(model(x), torch.zeros(len(x), dtype=torch.long) if y is None else y))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return str(caught.value)


def test_batch_norm_is_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
    with pytest.raises(ValueError, match=r"layer '1' \(BatchNorm1d\).*GroupNorm.*micro_batch"):
        SGDTracer(model.parameters(), lr=0.1, curvature=c.per_example, model=model)
    model.eval()
    opt = SGDTracer(model.parameters(), lr=0.1, curvature=c.per_example, model=model)
    model.train()
    with pytest.raises(ValueError, match="BatchNorm1d"):
        opt.step(lambda: model(torch.randn(3, 4)).square().mean())


def test_a_layer_used_twice_is_refused_by_name():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(torch.tanh(self.inner(x)))

    assert "layer 'inner' are used twice" in refusal(Twice(), c.per_example, torch.randn(3, 4))


def test_tied_weights_are_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert "layer '1' are used twice in one pass (the other time in layer '0')" in refusal(
        model, c.per_example, torch.randn(3, 4)
    )


def test_batch_not_first_is_refused_by_name():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x):
            return self.inner(x.transpose(0, 1)).mean(0)

    assert "layer 'inner' (Linear) was given a tensor of shape (5, 3, 4)" in refusal(
        Turned(), c.per_example, torch.randn(3, 5, 4)
    )


def test_random_numbers_inside_a_layer_are_refused_by_name():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return nn.functional.dropout(x * self.scale, 0.5)

    assert "layer '1' (Noisy) cannot be taken example by example" in refusal(
        nn.Sequential(nn.Linear(4, 4), Noisy()), c.per_example, torch.randn(3, 4)
    )


def test_an_embedding_that_mixes_examples_is_refused_by_name():
    model = nn.Sequential(nn.Embedding(5, 4, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(8, 3))
    with pytest.raises(ValueError, match=r"layer '0' \(Embedding\) has max_norm or scale_grad_by_freq"):
        SGDTracer(model.parameters(), lr=0.1, curvature=c.per_example, model=model)


def test_a_model_that_the_closure_does_not_call_is_refused():
    used, other = nn.Linear(4, 3), nn.Linear(4, 3)
    params = [*used.parameters(), *other.parameters()]
    opt = SGDTracer(params, lr=0.1, curvature=c.per_example, model=other)
    with pytest.raises(ValueError, match="model="):
        opt.step(lambda: used(torch.randn(3, 4)).square().mean())


def test_a_parameter_outside_of_the_model_is_refused():
    model, extra = nn.Linear(4, 3), nn.Parameter(torch.ones(3))
    opt = SGDTracer([*model.parameters(), extra], lr=0.1, curvature=c.per_example, model=model)
    with pytest.raises(ValueError, match=r"shape \(3,\) .* in no layer of model="):
        opt.step(lambda: (model(torch.randn(3, 4)) * extra).square().mean())


@pytest.mark.parametrize(
    ("loss", "name"), [(l1_loss, "l1_loss"), (nn.HingeEmbeddingLoss(), "HingeEmbeddingLoss"), ("mse", "str")]
)
def test_losses_without_output_distribution_are_refused_by_name(loss, name):
    for estimator in (c.monte_carlo_fisher, c.gauss_newton):
        with pytest.raises(ValueError, match=rf"{name} has no known output distribution.*per_example"):
            estimator(loss)


def test_weighted_losses_are_refused_and_smoothed_ones_taken():
    with pytest.raises(ValueError, match="CrossEntropyLoss with weight"):
        c.gauss_newton(nn.CrossEntropyLoss(weight=torch.ones(3)))
    with pytest.raises(ValueError, match="reduction of the loss"):
        c.gauss_newton(nn.MSELoss(reduction="sum"))
    assert isinstance(likelihood_of(nn.CrossEntropyLoss(label_smoothing=0.1)), Categorical)


def test_outputs_with_positions_are_refused():
    message = refusal(nn.Linear(4, 3), c.gauss_newton(mse_loss), torch.randn(3, 5, 4), mse_loss, torch.zeros(3, 5, 3))
    assert "the model gives (3, 5, 3) for 3 examples" in message


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"curvature": c.hutchinson}, r"hutchinson is to be called first: curvature=hutchinson\(\.\.\.\)"),
        ({"curvature": "per_example"}, "curvature must be an estimator"),
        ({"average": 3}, "average must be an estimator"),
        ({"curvature": c.per_example}, "pass model="),
        ({"curvature": c.micro_batch(2), "average": c.micro_batch(3)}, "choose one size"),
        ({"curvature": vectorised_micro_batch(2)}, "needs model="),
        ({"curvature": c.hutchinson(), "engine": "finite-difference"}, "leave engine out"),
        ({"average": c.micro_batch(3), "engine": "exact"}, "takes it in parts"),
    ],
)
def test_choices_that_cannot_be(options, match):
    with pytest.raises(ValueError, match=match):
        SGDTracer([nn.Parameter(torch.ones(2))], lr=0.1, **options)


@pytest.mark.parametrize(
    "make_estimator",
    [
        lambda: c.micro_batch(0),
        lambda: c.micro_batch(2.5),
        lambda: c.hutchinson(0),
        lambda: c.hutchinson(spatial=1),
        lambda: c.monte_carlo_fisher(samples=-1),
        lambda: c.monte_carlo_fisher(temperature=0),
        lambda: c.gauss_newton(exact_up_to=-1),
    ],
)
def test_estimators_refuse_bad_numbers(make_estimator):
    with pytest.raises(ValueError, match="must be"):
        make_estimator()


def test_micro_batch_needs_the_batch():
    made = make(mlp)
    opt = SGDTracer(made.params, lr=0.1, curvature=c.micro_batch(2))
    with pytest.raises(RuntimeError, match=r"opt\.step\(closure, x, y\)"):
        opt.step(made.loss_of)
    with pytest.raises(RuntimeError, match=r"lengths \[4, 5\]"):
        opt.step(made.loss_of, made.x, made.y[:4])
    with pytest.raises(RuntimeError, match="perturbed"):
        opt.perturbed()
    penalty = TracerPenalty(made.params, curvature=c.micro_batch(2))
    with pytest.raises(RuntimeError, match="vector of the examples' losses"):
        penalty(made.loss_of())


@pytest.mark.parametrize("rho", [0.0, 0.01])
@pytest.mark.parametrize(
    "options",
    [
        {"average": c.per_example},
        {"curvature": c.micro_batch(2), "average": c.gradient_magnitude},
        {"average": c.micro_batch(2)},
    ],
    ids=["average", "numerator", "micro-batches"],
)
def test_loops_without_closure_are_refused(options, rho):
    """Also at ρ = 0, where no second pass is due: f would follow something else."""
    made = make(mlp)
    opt = SGDTracer(made.params, lr=0.1, rho=rho, model=made.model, **options)
    made.loss_of().backward()
    with pytest.raises(RuntimeError, match="curvature"):
        opt.perturbed()
    with pytest.raises(RuntimeError, match="without a closure"):
        opt.step()


def test_vectorised_micro_batches_of_any_number():
    """49 times 1/49 is not 1: all 49 are to be taken at once, in one call of the closure for each pass."""
    model, calls = nn.Linear(2, 2), []

    def closure(x):
        calls.append(x.shape)
        return model(x).square().mean()

    opt = SGDTracer(model.parameters(), lr=0.1, rho=0.003, curvature=vectorised_micro_batch(1), model=model)
    opt.step(closure, torch.randn(49, 2))
    assert len(calls) == 2


def test_a_closure_that_calls_backward_is_refused_where_the_graph_is_needed():
    made = make(mlp)
    opt = SGDTracer(made.params, lr=0.1, average=c.per_example, model=made.model)

    def closure():
        loss = made.loss_of()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match=r"without calling backward\(\)"):
        opt.step(closure)


def test_an_evaluation_says_what_it_lacks():
    made = make(mlp)
    at = c.Evaluation(made.loss_of(), made.params)
    with pytest.raises(ValueError, match="pass model="):
        c.per_example(at)
    with pytest.raises(ValueError, match="losses one by one"):
        c.micro_batch(2)(at)


def test_an_output_that_is_no_tensor_is_refused():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x):
            return self.inner(x), x

    message = refusal(Pair(), c.gauss_newton(), torch.randn(3, 4), lambda pair, y: cross_entropy(pair[0], y))
    assert "the model gives a tuple" in message


def test_logits_are_found_in_an_object():
    """As Hugging Face's models give it."""

    class Output:
        def __init__(self, logits):
            self.logits = logits

    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return Output(self.inner(x))

    made = make(mlp)
    plain = evaluate(made, c.gauss_newton())
    model = Wrapped(made.model)
    with c.Recording(model) as recording:
        loss = cross_entropy(model(made.x).logits, made.y)
    assert relative_error(c.gauss_newton()(c.Evaluation(loss, made.params, recording)), plain) < 1e-12


def test_a_linear_loss_has_no_curvature():
    w = nn.Parameter(torch.randn(3))
    opt = SGDTracer([w], lr=0.1, curvature=c.hutchinson())
    opt.step(lambda: w.sum())
    assert torch.equal(opt.state[w]["f"], torch.zeros(3))


def test_a_layer_called_otherwise_has_no_difference_per_example():
    """By keyword: `torch.func` takes it, the finite difference says so."""

    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x):
            return self.inner(input=x)

    model, x = Keyword(), torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"layer 'inner' \(Linear\) has no difference per example: use engine='exact'"):
        SGDTracer(model.parameters(), lr=0.1, rho=0.003, curvature=c.per_example, model=model).step(
            lambda: model(x).square().mean()
        )
    SGDTracer(model.parameters(), lr=0.1, curvature=c.per_example, model=model, engine="exact").step(
        lambda: model(x).square().mean()
    )


def test_stacked_weights_must_be_the_models():
    model, extra = nn.Linear(4, 3), nn.Parameter(torch.ones(3))
    opt = SGDTracer([*model.parameters(), extra], lr=0.1, curvature=vectorised_micro_batch(2), model=model)
    with pytest.raises(ValueError, match=r"shape \(3,\) is not in model="):
        opt.step(lambda x: (model(x) * extra).square().mean(), torch.randn(4, 4))


def test_a_loss_that_depends_on_nothing_is_refused():
    made = make(mlp)
    opt = SGDTracer(made.params, lr=0.1, curvature=c.per_example, engine="exact", model=made.model)
    other = nn.Parameter(torch.ones(()))
    with pytest.raises((ValueError, RuntimeError), match="none of the optimiser's parameters|model="):
        opt.step(lambda: made.model(made.x).detach().sum() * other)


@pytest.mark.parametrize("loss", [["a", "list"], None])
def test_what_is_no_loss_at_all_is_refused(loss):
    with pytest.raises(ValueError, match="no known output distribution"):
        c.gauss_newton(loss)


# What the choice of two estimators says, and what is said where nothing is.


def test_a_choice_says_what_it_is():
    for numerator in (c.gradient_magnitude, c.per_example):
        for average in (c.gradient_magnitude, c.per_example):
            both = numerator is average is c.gradient_magnitude
            assert c.Choice(numerator, average).is_default is both
            assert c.Choice(numerator, average).needs_layers is not both


def test_what_the_average_measures_is_its_own():
    """Another estimator's F, or the absolute value of the same: the probes are not drawn again."""
    made = make(mlp)
    for numerator, average in ((c.gradient_magnitude, c.hutchinson()), (c.hutchinson(), c.hutchinson())):
        at = c.Evaluation(made.loss_of(), made.params, differentiable=True)
        torch.manual_seed(3)
        F, measured = c.Choice(numerator, average).measure(at)
        torch.manual_seed(3)
        probed = [x.detach().abs() for x in c.hutchinson()(at)]
        assert relative_error(list(measured), probed) == 0
        assert not any(x.requires_grad for x in measured)
        squared = [g.detach() ** 2 for g in at.gradients]
        expected = squared if numerator is c.gradient_magnitude else probed
        assert relative_error([x.detach().abs() for x in F], expected) == 0


def test_what_estimators_do_where_nothing_is_said():
    assert c.monte_carlo_fisher() == c.monte_carlo_fisher(cross_entropy, samples=1, temperature=0.5)
    assert c.gauss_newton() == c.gauss_newton(cross_entropy, samples=1, exact_up_to=16)
    assert c.hutchinson() == c.hutchinson(1, spatial=False)


@pytest.mark.parametrize(
    ("given", "new"), [(True, r"gtracer\.experimental\.vectorised_micro_batch\(m\)"), (False, r"micro_batch\(m\)")]
)
def test_the_old_argument_of_micro_batch(given, new):
    with pytest.warns(DeprecationWarning, match=rf"^micro_batch\(m, vectorised={given}\) .*: use {new}$"):
        made = c.micro_batch(3, vectorised=given)
    assert made == (vectorised_micro_batch(3) if given else c.micro_batch(3))


@pytest.mark.parametrize(
    ("path", "layer", "shape"),
    [
        (layers.Linear, nn.Linear(4, 3), (5, 6, 4)),
        (layers.Linear, nn.Linear(4, 3), (5, 4)),
        (layers.Conv2d, nn.Conv2d(2, 3, 3, padding=1), (5, 2, 6, 6)),
        (layers.Conv2d, nn.Conv2d(2, 3, 3, padding=1, bias=False), (5, 2, 6, 6)),
    ],
    ids=["sequence", "linear", "convolution", "without bias"],
)
def test_a_layer_that_is_not_moved_computes_as_the_layer_does(path, layer, shape):
    """In the precision of autocast too, so that the two passes of a difference differ by the move alone."""
    x = torch.randn(shape)
    for mixed in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            plain = layer(x)
            made = path(layer, x, torch.randn_like(plain)).moved(x, {})
        tolerance = {"rtol": 1e-6, "atol": 1e-6} if not mixed else {"rtol": 2**-7, "atol": 2**-8}
        torch.testing.assert_close(made.to(plain.dtype), plain, **tolerance)
        if mixed:
            exact = layer.float()(x)
            rounding = (plain.float() - exact).abs().max()
            assert (made.float() - exact).abs().max() > rounding / 8  # not computed in float32
