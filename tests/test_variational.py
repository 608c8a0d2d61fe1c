"""The paper's propositions, each computed a second way: by autograd through the definition, or in closed form."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy

from gtracer import SGDTracer, TracerPenalty
from gtracer import variational as v
from gtracer.experimental import Precondition, Ridge
from gtracer.variational import Gaussian, hessian_of
from support.problems import spd

RHO, ETA = 0.3, 2.0
EXACT = v.quadrature(16)
X = torch.tensor([[1.0, -0.5], [0.3, 0.8], [-1.2, 0.4]], dtype=torch.float64)


def loss(w):
    """Smooth, not quadratic, not even, with curvature everywhere."""
    return torch.log(1 + torch.exp(X @ w)).mean() + 0.1 * torch.sin(w[0] + 2 * w[1]) + 0.05 * (w**2).sum()


def family(scale=1.0):
    return Gaussian(torch.tensor([0.4, -0.7], dtype=torch.float64), spd(2, 3) * 4 / scale)


def close(a, b, tolerance=1e-8):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


class TestGaussian:
    def test_quadrature_has_the_moments(self):
        q = family()
        close(EXACT(q, lambda w: w), q.mean)
        close(EXACT(q, lambda w: torch.outer(w - q.mean, w - q.mean)), q.covariance)

    def test_sampling_agrees_within_its_error(self):
        """1/√n of the standard deviation, with n = 20,000 pairs."""
        q = family()
        assert v.sampling(20_000)(q, loss).item() == pytest.approx(EXACT(q, loss).item(), abs=3e-3)

    def test_density_entropy_and_divergence(self):
        q = family()
        reference = torch.distributions.MultivariateNormal(q.mean, precision_matrix=q.precision)
        prior = torch.distributions.MultivariateNormal(torch.zeros(2).double(), ETA * torch.eye(2).double())
        close(q.log_density(X[0]), reference.log_prob(X[0]))
        close(q.entropy(), reference.entropy())
        close(q.entropy(), -EXACT(q, q.log_density))
        close(q.divergence_from_prior(ETA), torch.distributions.kl_divergence(reference, prior))

    def test_refusals(self):
        with pytest.raises(ValueError, match="at most 200"):
            Gaussian(torch.zeros(201), torch.eye(201))
        with pytest.raises(ValueError, match=r"\(2,\) and \(3, 3\)"):
            Gaussian(torch.zeros(2), torch.eye(3))
        with pytest.raises(ValueError, match=r"use sampling\(\)"):
            v.quadrature(12)(Gaussian(torch.zeros(20), torch.eye(20)), loss)
        with pytest.raises(ValueError, match="points"):
            v.quadrature(0)


def test_fisher_matrix_of_the_gaussian():
    """E_q[−∇²log q] in (μ, vec Λ), by autograd and quadrature, is Λ and ½ Σ⊗Σ in blocks."""
    q = family()

    def log_density(parameters, w):
        return Gaussian(parameters[:2], parameters[2:].reshape(2, 2)).log_density(w)

    parameters = torch.cat([q.mean, q.precision.reshape(-1)])
    found = -EXACT(q, lambda w: hessian_of(lambda p: log_density(p, w))(parameters))
    # log|Λ| is differentiated as a function of a general matrix, so its block is Σ⊗Σ up to transposing one index pair.
    swapped = found[2:, 2:].reshape(2, 2, 2, 2).transpose(2, 3).reshape(4, 4)
    expected = v.fisher_of_gaussian(q)
    close(found[:2], expected[:2])
    close(swapped, expected[2:, 2:])


def test_bonnet_and_price():
    """∇_μ E_q[L] = E_q[∇L] and ∇_Σ E_q[L] = ½E_q[∇²L]."""
    q = family()

    def expected_loss(mean, covariance):
        return EXACT(Gaussian(mean, torch.linalg.inv(covariance)), loss)

    close(grad(expected_loss, 0)(q.mean, q.covariance), EXACT(q, grad(loss)))
    slope = grad(expected_loss, 1)(q.mean, q.covariance)
    close((slope + slope.T) / 2, EXACT(q, hessian_of(loss)) / 2)


def objective_of(mean, covariance):
    return v.objective(loss, Gaussian(mean, torch.linalg.inv(covariance)), RHO, ETA, EXACT)


def test_gradient_of_the_objective():
    q = family()
    towards_mean, towards_covariance = v.gradient(loss, q, RHO, ETA, EXACT)
    close(grad(objective_of, 0)(q.mean, q.covariance), towards_mean)
    slope = grad(objective_of, 1)(q.mean, q.covariance)
    close((slope + slope.T) / 2, towards_covariance)


def test_natural_gradient_is_the_fisher_matrix_s():
    """F⁻¹∇_(μ, vec Λ) of the objective, with ∇ by autograd and F dense."""
    q = family()

    def objective(parameters):
        precision = parameters[2:].reshape(2, 2)
        return v.objective(loss, Gaussian(parameters[:2], (precision + precision.T) / 2), RHO, ETA, EXACT)

    slope = grad(objective)(torch.cat([q.mean, q.precision.reshape(-1)]))
    found = torch.linalg.solve(v.fisher_of_gaussian(q), slope)
    towards_mean, towards_precision = v.natural_gradient(loss, q, RHO, ETA, EXACT)
    close(found[:2], towards_mean)
    close(found[2:].reshape(2, 2), towards_precision)


def test_the_step_goes_down_and_its_fixed_point_is_the_minimum():
    """On ½(w−c)ᵀA(w−c) the objective's minimum is known: Λ = A/ρ + I/η, μ = (A + (ρ/η)I)⁻¹Ac."""
    A, c, eye = spd(2, 5), torch.tensor([1.0, -2.0], dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    q = family()
    values = []
    for _ in range(200):
        values.append(v.objective(quadratic(A, c), q, RHO, ETA, EXACT).item())
        q = v.natural_gradient_step(quadratic(A, c), q, 0.3, 0.3, RHO, ETA, EXACT)
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(values))
    close(q.precision, A / RHO + eye / ETA)
    close(q.mean, torch.linalg.solve(A + RHO / ETA * eye, A @ c))


def quadratic(A, c):
    return lambda w: (w - c) @ A @ (w - c) / 2


@pytest.mark.parametrize(("factor", "order"), [(0.5, 4), (1.0, 2)])
def test_order_of_the_second_order_loss(factor, order):
    """E_q[L] = L + ½Tr(ΣH) + O(σ⁴). Without its ½, as the paper prints it in places, only O(σ²) is left."""
    errors = []
    for k in range(5):
        q = family(scale=0.25 / 4**k)  # σ halves
        approximation = loss(q.mean) + factor * torch.trace(hessian_of(loss)(q.mean) @ q.covariance)
        if factor == 0.5:
            close(approximation, v.second_order_loss(loss, q.covariance)(q.mean), 1e-12)
        errors.append(abs(EXACT(q, loss) - approximation).item())
    slopes = [math.log2(a / b) for a, b in itertools.pairwise(errors)]
    assert slopes[-1] == pytest.approx(order, abs=0.1)


def test_second_order_step_is_near_the_exact_one():
    """Their difference vanishes with Σ faster than the step's own penalty does."""
    for scale, tolerance in ((0.1, 2e-3), (0.01, 2e-5)):
        q = family(scale)
        exact = v.natural_gradient_step(loss, q, 1.0, 0.3, RHO, ETA, EXACT)
        near = v.second_order_step(loss, q, 1.0, 0.3, RHO, ETA)
        moved = (exact.mean - q.mean).norm()
        assert (exact.mean - near.mean).norm() / moved < tolerance
        assert (exact.precision - near.precision).norm() / exact.precision.norm() < 10 * scale


def test_trace_ratio_step_is_the_second_order_step_in_other_letters():
    """η → ∞, F = H, F̄ = ρ'Λ, α = α'ρ', ρ = ρ'/2."""
    rho, alpha, beta = 0.3, 0.2, 0.1
    q = family()
    first = v.second_order_step(loss, q, alpha, beta, rho, eta=math.inf)
    w, average = v.trace_ratio_step(loss, v.hessian_of(loss), q.mean, rho * q.precision, alpha * rho, beta, rho / 2)
    close(w, first.mean)
    close(average, rho * first.precision)


def test_diagonal_step_keeps_the_diagonals():
    """Where both matrices are diagonal already nothing is lost by it (δ = 0)."""

    def separable(w):
        return torch.log(torch.cosh(w)).sum() + (w**4).sum()

    w, f = torch.tensor([0.4, -0.7], dtype=torch.float64), torch.tensor([1.5, 0.8], dtype=torch.float64)
    curvature = v.hessian_of(separable)
    full = v.trace_ratio_step(separable, curvature, w, torch.diag(f), 0.1, 0.2, 0.3)
    diagonal = v.diagonal_step(separable, curvature, w, f, 0.1, 0.2, 0.3, delta=0.0)
    close(diagonal[0], full[0])
    close(diagonal[1], full[1].diagonal())


def test_the_last_link_is_the_optimiser():
    """`tracer_step` with the gradient magnitude is SGDTracer, step by step."""
    w, f = torch.tensor([0.4, -0.7], dtype=torch.float64), torch.full((2,), 0.2, dtype=torch.float64)
    weight = nn.Parameter(w.clone())
    opt = SGDTracer([weight], lr=0.1, rho=0.05, beta=0.3, delta=0.01, f0=0.2, engine="exact")
    for _ in range(5):
        w, f = v.tracer_step(loss, v.gradient_magnitude(loss), w, f, 0.1, 0.3, 0.05, 0.01)
        opt.step(lambda: loss(weight))
    close(weight.detach(), w, 1e-12)
    close(opt.state[weight]["f"], f, 1e-12)


@pytest.mark.parametrize("prior", [None, 3.0])
def test_the_preconditioned_form(prior):
    """`diagonal_step`, with the prior's ridge ρ/η · w where there is one, is SGDTracer with these transforms."""
    w, f = torch.tensor([0.4, -0.7], dtype=torch.float64), torch.full((2,), 0.2, dtype=torch.float64)
    weight = nn.Parameter(w.clone())
    transforms = [*([] if prior is None else [Ridge(prior)]), Precondition()]
    hyper = {"rho": 0.05, "beta": 0.3, "delta": 0.01, "f0": 0.2}
    opt = SGDTracer([weight], lr=0.1, **hyper, engine="exact", transforms=transforms)
    for _ in range(5):
        ridge = 0.0 if prior is None else 0.1 * 0.05 / prior * w / (f + 0.01)
        w, f = v.diagonal_step(loss, v.gradient_magnitude(loss), w, f, 0.1, 0.3, 0.05, 0.01)
        w = w - ridge
        opt.step(lambda: loss(weight))
    close(weight.detach(), w, 1e-12)
    close(opt.state[weight]["f"], f, 1e-12)  # fed by the loss alone


class TestCurvature:
    """A tiny tanh classifier, weights as one vector; the last class's logit is 0, so that no direction is flat."""

    x = torch.randn(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    y = torch.arange(12) % 3
    w = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def logits(self, w):
        scores = torch.tanh(self.x @ w[:6].reshape(2, 3)) @ w[6:].reshape(3, 2)
        return torch.cat([scores, torch.zeros_like(scores[:, :1])], 1)

    def losses(self, w):
        return cross_entropy(self.logits(w), self.y, reduction="none")

    def mean_loss(self, w):
        return self.losses(w).mean()

    def test_ggn_is_the_fisher(self):
        """For cross-entropy on logits they are one matrix."""
        ggn = v.gauss_newton(lambda w: self.logits(w).reshape(-1), lambda z: cross_entropy(z.reshape(12, 3), self.y))
        close(ggn(self.w), v.classifier_fisher(self.logits)(self.w))

    def test_ggn_is_the_hessian_of_a_linear_model(self):
        def linear(w):
            return self.x @ w.reshape(2, 3)

        def linear_loss(w):
            return cross_entropy(linear(w), self.y)

        ggn = v.gauss_newton(lambda w: linear(w).reshape(-1), lambda z: cross_entropy(z.reshape(12, 3), self.y))
        close(ggn(self.w[:6]), v.hessian_of(linear_loss)(self.w[:6]))

    def test_empirical_fisher_by_a_loop(self):
        total = torch.zeros(12, 12, dtype=torch.float64)
        for i in range(12):
            slope = grad(lambda w, i=i: self.losses(w)[i])(self.w)
            total += torch.outer(slope, slope) / 12
        close(v.empirical_fisher(self.losses)(self.w), total)

    def test_gradient_magnitude_drops_the_variance(self):
        """mean of squares − square of mean = variance of the examples' gradients, which is positive."""
        difference = v.empirical_fisher(self.losses)(self.w) - v.gradient_magnitude(self.mean_loss)(self.w)
        assert torch.linalg.eigvalsh(difference).min() > -1e-12
        assert difference.trace() > 0.01

    @pytest.mark.parametrize("name", ["hessian", "ggn", "fisher", "empirical", "magnitude"])
    def test_trace_ratio_under_maps_of_the_weights(self, name):
        """Full matrices: any affine map w = Mu + c leaves Tr(F F̄⁻¹) alone. Diagonals: only diagonal maps do."""
        size = 12
        M = spd(size, 1) + torch.triu(torch.ones(size, size, dtype=torch.float64)) / 5
        scales = torch.linspace(0.2, 3, size, dtype=torch.float64)
        full, diagonal = self.ratios(name, torch.eye(size, dtype=torch.float64))
        affine_full, affine_diagonal = self.ratios(name, M)
        scaled_full, scaled_diagonal = self.ratios(name, torch.diag(scales))
        assert affine_full == pytest.approx(full, rel=1e-5)
        assert scaled_full == pytest.approx(full, rel=1e-6)
        assert scaled_diagonal == pytest.approx(diagonal, rel=1e-9)
        assert affine_diagonal != pytest.approx(diagonal, rel=1e-2)

    def ratios(self, name, M):
        """Tr(F F̄⁻¹) and its diagonal form, with F̄ an average of F over other weights, in coordinates w = Mu."""

        def logits(u):
            return self.logits(M @ u)

        def losses(u):
            return self.losses(M @ u)

        curvature = {
            "hessian": v.hessian_of(lambda u: losses(u).mean() + 0.2 * ((M @ u) ** 2).sum()),
            "ggn": v.gauss_newton(lambda u: logits(u).reshape(-1), lambda z: cross_entropy(z.reshape(12, 3), self.y)),
            "fisher": v.classifier_fisher(logits),
            "empirical": v.empirical_fisher(losses),
            "magnitude": v.gradient_magnitude(lambda u: losses(u).mean()),
        }[name]
        places = [torch.linalg.solve(M, self.w + torch.sin(torch.arange(12) * (k + 1.0))) for k in range(60)]
        average = sum(curvature(u) for u in places) / len(places)
        here = curvature(torch.linalg.solve(M, self.w))
        diagonal = (here.diagonal() / average.diagonal()).sum()
        return v.trace_ratio(curvature, average)(torch.linalg.solve(M, self.w)).item(), diagonal.item()


def test_full_batch_tracer_reaches_the_minimum_itself():
    """∇T vanishes with ∇L, so on a quadratic the penalty only slows the last steps."""
    A, c = spd(3), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    w = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    opt = SGDTracer([w], lr=0.05, rho=0.01, delta=0.1, engine="exact")
    for _ in range(2000):
        opt.step(lambda: quadratic(A, c)(w))
    close(w.detach(), c)


class TestConvergence:
    """A finite sum of quadratics with different minima, one summand a mini-batch."""

    As = tuple(spd(3, seed) for seed in range(4))
    cs = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    delta = 0.5

    def slopes(self, w):
        return torch.stack([A @ (w - c) for A, c in zip(self.As, self.cs, strict=True)])

    def stationary(self, rho):
        """Where the mean penalised gradient vanishes, with f at its own stationary value, the mean of g²."""
        w = torch.zeros(3, dtype=torch.float64)
        for _ in range(4000):
            g = self.slopes(w)
            f = (g**2).mean(0)
            penalty = torch.stack([2 * A @ (x / (f + self.delta)) for A, x in zip(self.As, g, strict=True)]).mean(0)
            w = w - 0.05 * (g.mean(0) + rho * penalty)
        return w

    def test_neighbourhood_grows_as_rho_squared(self):
        rhos = [1e-3 * 2**k for k in range(5)]
        squares = [(self.slopes(self.stationary(rho)).mean(0) ** 2).sum().item() for rho in rhos]
        slopes = [math.log2(b / a) for a, b in itertools.pairwise(squares)]
        assert slopes == pytest.approx([2] * 4, abs=0.1)

    def test_it_stays_within_the_bound(self):
        """‖∇L‖² = ‖ρ∇T‖² ≤ 4(ρ/δ)²C² E‖g‖² there. (The paper's bound drops the gradient factor.)"""
        C = max(torch.linalg.eigvalsh(A).max() for A in self.As)
        for rho in (1e-3, 1e-2, 5e-2):
            g = self.slopes(self.stationary(rho))
            bound = 4 * (rho / self.delta) ** 2 * C**2 * (g**2).sum(1).mean()
            assert 0 < (g.mean(0) ** 2).sum() < bound


def test_dinh_s_rescaling_moves_the_hessian_and_not_t():
    """(w₁, w₂) → (αw₁, w₂/α) leaves a ReLU net's function alone; Tr H changes by orders of magnitude, T does not."""
    torch.manual_seed(0)
    x, y = torch.randn(3, 40, 4, dtype=torch.float64), torch.randint(3, (3, 40))

    def trace_and_ratio(alpha):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False)).double()
        with torch.no_grad():
            net[0].weight.mul_(alpha)
            net[2].weight.div_(alpha)
        penalty = TracerPenalty(net.parameters(), rho=0.0, beta=0.3, delta=0.0)
        outputs = []
        for i in range(3):
            out = net(x[i])
            outputs.append(out.detach())
            penalty(cross_entropy(out, y[i]))
        names, flat = zip(*net.named_parameters(), strict=True)
        vector = torch.cat([p.detach().reshape(-1) for p in flat])

        def loss_of(w):
            parts = w.split([p.numel() for p in flat])
            weights = {n: part.reshape(p.shape) for n, part, p in zip(names, parts, flat, strict=True)}
            return cross_entropy(functional_call(net, weights, (x[0],)), y[0])

        return torch.stack(outputs), hessian_of(loss_of)(vector).trace().item(), penalty.trace_ratio.item()

    out, trace, ratio = trace_and_ratio(1.0)
    for alpha in (0.01, 30.0):
        other_out, other_trace, other_ratio = trace_and_ratio(alpha)
        close(other_out, out)
        assert other_trace / trace > 100
        assert other_ratio == pytest.approx(ratio, rel=1e-9)
