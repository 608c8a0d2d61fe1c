"""Every estimator of F against the dense truth, and every penalty's gradient against differences of T itself."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from gtracer import SGDTracer, variational
from gtracer import curvature as c
from gtracer.curvature import layers, products
from gtracer.experimental import vectorised_micro_batch
from support.estimates import diagonal, evaluate, weights_function
from support.networks import CASES, conv, encoder, group_norm, make, mlp, regression
from support.problems import relative_error


def dense_hessian(case):
    of, w = weights_function(case, lambda out: case.loss(out, case.y))
    return variational.hessian_of(of)(w)


def dense_gauss_newton(case):
    outputs, w = weights_function(case, torch.flatten)
    return variational.gauss_newton(outputs, lambda z: case.loss(z.reshape(len(case.y), -1), case.y))(w)


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


def test_a_choice_says_what_it_is():
    for numerator in (c.gradient_magnitude, c.per_example):
        for average in (c.gradient_magnitude, c.per_example):
            both = numerator is average is c.gradient_magnitude
            assert c.Choice(numerator, average).is_default is both
            assert c.Choice(numerator, average).needs_layers is not both
    assert str(c.Choice(c.gradient_magnitude, c.gradient_magnitude)) == "curvature=gradient_magnitude"
    apart = c.Choice(c.micro_batch(4), c.gradient_magnitude)
    assert str(apart) == "curvature=MicroBatch(size=4), average=gradient_magnitude"


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
