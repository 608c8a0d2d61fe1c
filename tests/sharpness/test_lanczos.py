"""Lanczos' method, the trace and the spectral density, against dense matrices."""

import pytest
import torch

from gtracer.sharpness import lanczos
from gtracer.sharpness.result import Spectrum


def matrix(values):
    """A symmetric matrix of these eigenvalues."""
    values = torch.tensor(values, dtype=torch.float64)
    basis, _ = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64))
    return basis @ torch.diag(values) @ basis.T


@pytest.fixture
def draw():
    torch.manual_seed(0)
    return lambda size: lambda: torch.randn(size, dtype=torch.float64)


def run(A, draw, steps, **options):
    return lanczos.lanczos(lambda v: A @ v, draw(len(A)), len(A), steps, **options)


def signs():
    return (torch.randint(0, 2, (100,)) * 2.0 - 1.0).double()


OUTLIERS = [50.0, 20.0, 12.0, -8.0, *torch.linspace(-0.5, 1, 96).tolist()]


def test_the_largest_eigenvalues_come_with_residuals_that_bound_their_error(draw):
    A = matrix(OUTLIERS)
    made = run(A, draw, steps=60, top=3)
    values, _, residuals = made.ritz()
    assert made.steps < 60  # it stops where they have converged
    for found, true, residual in zip(values.flip(0)[:3], OUTLIERS, residuals.flip(0)[:3], strict=False):
        assert abs(found - true) <= residual + 1e-12
        assert residual <= 1e-3 * 50
    assert abs(values[0] + 8) < 0.01


def test_the_residuals_are_those_of_the_vectors(draw):
    A = matrix(OUTLIERS)
    made = run(A, draw, steps=9, tolerance=0.0)
    assert made.steps == 9
    values, vectors, residuals = made.ritz()
    Q = torch.stack(made.basis, 1)
    torch.testing.assert_close(Q.T @ Q, torch.eye(9, dtype=torch.float64), atol=1e-12, rtol=0)
    X = Q @ vectors
    torch.testing.assert_close((A @ X - X * values).norm(dim=0), residuals, atol=1e-10, rtol=1e-8)


def test_all_steps_give_all_eigenvalues(draw):
    A = matrix([5.0, 5.0, 5.0, 1.0, 0.0, 0.0, 0.0, -2.0])
    made = run(A, draw, steps=100, top=8)
    assert made.steps == 8
    torch.testing.assert_close(made.ritz()[0], torch.linalg.eigvalsh(A), atol=1e-10, rtol=0)
    _nodes, weights = made.quadrature(1e-3)
    assert weights == pytest.approx([1.0] * 8)
    assert lanczos.trace(None, None, made, 0) == pytest.approx((14.0, 0.0))


def test_equal_eigenvalues_are_found_although_each_block_sees_one(draw):
    """Of a multiple of the unit matrix every vector is an eigenvector: the method has to start again."""
    A = 3 * torch.eye(50, dtype=torch.float64)
    made = run(A, draw, steps=6, top=4)
    values, _, residuals = made.ritz()
    torch.testing.assert_close(values, torch.full((6,), 3.0, dtype=torch.float64))
    assert residuals.max() < 1e-12
    nodes, weights = made.quadrature(1e-3)
    assert nodes == pytest.approx([3.0] * 6)
    assert sum(weights) == pytest.approx(50)


def test_a_matrix_of_low_rank_keeps_its_eigenvalues_and_the_rest_is_zero(draw):
    A = matrix([4.0, 2.0, 1.0] + [0.0] * 37)
    nodes, weights = run(A, draw, steps=12, top=3).quadrature(1e-3)
    found = {round(n, 6) + 0.0: 0.0 for n in nodes}
    for node, weight in zip(nodes, weights, strict=True):
        found[round(node, 6) + 0.0] += weight
    assert found == pytest.approx({4.0: 1, 2.0: 1, 1.0: 1, 0.0: 37}, abs=1e-6)


def test_zero(draw):
    made = run(torch.zeros(4, 4, dtype=torch.float64), draw, steps=3, top=2)
    assert made.ritz()[0].abs().max() == 0


@pytest.mark.parametrize("probes", [4, 16])
def test_the_trace_is_within_its_error_and_unbiased(draw, probes):
    A = matrix(OUTLIERS)
    true, off, errors = float(A.trace()), [], []
    for _ in range(200):
        made = run(A, draw, steps=8, tolerance=0.0)
        found, error = lanczos.trace(lambda zs: [A @ z for z in zs], signs, made, probes)
        off.append(found - true)
        errors.append(error)
    off, errors = torch.tensor(off), torch.tensor(errors)
    assert abs(off.mean()) < 4 * off.std() / len(off) ** 0.5
    # The error that is told is the one that is made: their mean squares agree.
    assert 0.8 < errors.square().mean() / off.square().mean() < 1.25


def test_the_basis_takes_the_outliers_out_of_the_trace_s_error(draw):
    """Hutchinson's variance is that of what is off the diagonal, most of it the outliers'."""
    A = matrix(OUTLIERS)

    def products(zs):
        return [A @ z for z in zs]

    bare = lanczos.trace(products, signs, lanczos.Krylov(100), 200)[1]
    deflated = lanczos.trace(products, signs, run(A, draw, steps=15, tolerance=0.0), 200)[1]
    assert deflated < bare / 5


def test_the_density_is_that_of_the_eigenvalues(draw):
    """Its moments, and how many eigenvalues lie where: outliers counted, the bulk within its sampling error."""
    A = matrix([30.0, 10.0, *torch.linspace(-1, 2, 398).tolist()])
    nodes, weights = run(A, draw, steps=30, tolerance=0.0).quadrature(1e-3)
    assert sum(weights) == pytest.approx(400)
    assert sum(w for n, w in zip(nodes, weights, strict=True) if n > 5) == pytest.approx(2)
    upper = sum(w for n, w in zip(nodes, weights, strict=True) if n > 0.5)
    assert upper == pytest.approx(201, abs=30)
    spectrum = Spectrum(runs=((tuple(nodes), tuple(weights)),))
    at = [i / 50 for i in range(-400, 2000)]
    total = sum(spectrum.density(at, width=0.3)) / 50
    assert total == pytest.approx(1, abs=1e-3)
    level = spectrum.density([0.5], width=0.3)[0]
    assert level == pytest.approx(1 / 3, abs=0.1)


@pytest.mark.parametrize("steps", [25, 60])
def test_a_null_space_is_not_taken_for_one_eigenvalue_although_it_converges(draw, steps):
    A = matrix([40.0, 15.0, 9.0, *torch.linspace(0.5, 3, 47).tolist(), *[0.0] * 350])
    made = run(A, draw, steps=steps, tolerance=0.0)
    values, _, residuals = made.ritz()
    assert steps < 60 or (residuals[values.abs() < 1e-6] < 1e-6).all()
    nodes, weights = made.quadrature(1e-3)
    assert sum(weights) == pytest.approx(400)
    assert sum(w for n, w in zip(nodes, weights, strict=True) if n < 0.25) == pytest.approx(350, abs=12)
    assert sum(n * w for n, w in zip(nodes, weights, strict=True)) == pytest.approx(float(A.trace()), rel=0.25)
    alpha = 0.5
    true = sum(x / (x + alpha) for x in torch.linalg.eigvalsh(A).clamp(min=0).tolist())
    found = Spectrum(runs=((tuple(nodes), tuple(weights)),)).effective_dimension(alpha)
    assert found.value == pytest.approx(true, rel=0.25)
