"""The paper's derivation as code: from the generalised-Bayes objective to Algorithm 1, one function per step.

A dense reference for small models: weights are one vector, precisions and curvatures are full
matrices, nothing is fast. Each approximation of the paper is one function that follows from the one before it:

    objective                 E_q[L] + ρ KL[q, p],  q = N(μ, Λ⁻¹),  p = N(0, ηI)
    gradient                  towards (μ, Σ): Bonnet's and Price's theorems
    natural_gradient          towards (μ, Λ), in the metric of the Gaussian's Fisher matrix
    natural_gradient_step     exact expectations
    second_order_step         E_q[∇L] ≈ ∇[L + ½Tr(HΣ)],  E_q[∇²L] ≈ H
    trace_ratio_step          η → ∞ and H̄ = ρΛ; H, or the GGN, or a Fisher matrix for it
    diagonal_step             F and F̄ by their diagonals, damped by δ
    tracer_step               no preconditioner, F = (∇L)²: Algorithm 1

A `Loss` is a function of the weight vector. Signs and factors are those that the mathematics gives, not
those of the paper's misprints (docs/explanation/derivation.md has both).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from gtracer import checks

Loss = Callable[[Tensor], Tensor]
"""Maps weights to a number."""
Matrix = Callable[[Tensor], Tensor]
"""Maps weights to the curvature matrix there."""

LARGEST = 200  # dense matrices of this size, and third derivatives of it, still take seconds
MOST_NODES = 1_000_000


def hessian_of(loss: Loss) -> Matrix:
    """H = ∇²L, by differentiating twice in reverse."""
    return jacrev(grad(loss))


# The variational family, and expectations under it.


@dataclass(frozen=True)
class Gaussian:
    """q = N(μ, Λ⁻¹)."""

    mean: Tensor  # μ
    precision: Tensor  # Λ

    def __post_init__(self) -> None:
        size = self.mean.numel()
        if self.mean.ndim != 1 or self.precision.shape != (size, size):
            raise ValueError(
                f"mean and precision must be a vector and a matrix of its size, got shapes {tuple(self.mean.shape)} "
                f"and {tuple(self.precision.shape)}"
            )
        if size > LARGEST:
            raise ValueError(
                f"mean has {size} weights, this dense reference takes at most {LARGEST}: use the optimisers"
            )

    @property
    def covariance(self) -> Tensor:
        """Σ = Λ⁻¹."""
        inverse: Tensor = torch.linalg.inv(self.precision)
        return inverse

    def at(self, standard: Tensor) -> Tensor:
        """Weights from standard normal numbers: μ + Λ^(-1/2) ν, with the graph of μ and Λ."""
        root: Tensor = torch.linalg.cholesky(self.covariance)
        return self.mean + standard @ root.T

    def log_density(self, w: Tensor) -> Tensor:
        """log q(w)."""
        off = w - self.mean
        constant = self.mean.numel() * math.log(2 * math.pi)
        return (torch.logdet(self.precision) - constant - off @ self.precision @ off) / 2

    def entropy(self) -> Tensor:
        """−E_q[log q], which the paper prints as −E[q]."""
        return (self.mean.numel() * (1 + math.log(2 * math.pi)) - torch.logdet(self.precision)) / 2

    def divergence_from_prior(self, eta: float) -> Tensor:
        """KL[q, p] = E_q[log q − log p] for p = N(0, ηI)."""
        size = self.mean.numel()
        square = self.mean @ self.mean + torch.trace(self.covariance)
        return (square / eta - size + size * math.log(eta) + torch.logdet(self.precision)) / 2


Expectation = Callable[[Gaussian, Loss], Tensor]
"""Computes E_q of a function of the weights."""


def quadrature(points: int = 12) -> Expectation:
    """Gauss–Hermite quadrature on a grid: exact for polynomials of degree 2·points − 1 in each direction.

    >>> q = Gaussian(torch.zeros(1, dtype=torch.float64), torch.eye(1, dtype=torch.float64))
    >>> round(quadrature()(q, lambda w: w[0] ** 4).item(), 9)
    3.0
    """
    checks.count("points", points)
    # Golub and Welsch: nodes and weights from the eigenvectors of the Hermite polynomials' recurrence.
    off_diagonal = torch.arange(1, points, dtype=torch.float64).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off_diagonal, 1) + torch.diag(off_diagonal, -1))
    weights = vectors[0] ** 2

    def expectation(q: Gaussian, function: Loss) -> Tensor:
        size = q.mean.numel()
        if points**size > MOST_NODES:
            raise ValueError(f"points = {points} in {size} dimensions are too many nodes: use sampling()")
        grid = torch.tensor(list(itertools.product(range(points), repeat=size)))
        weight = weights.to(q.mean)[grid].prod(1)
        values = vmap(function)(q.at(nodes.to(q.mean)[grid]))
        mean: Tensor = torch.tensordot(weight, values, 1)
        return mean

    return expectation


def sampling(count: int, seed: int = 0) -> Expectation:
    """The mean over `count` draws and their mirror images, the same ones every time."""
    checks.count("count", count)

    def expectation(q: Gaussian, function: Loss) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        draws = torch.randn(count, q.mean.numel(), generator=generator, dtype=q.mean.dtype)
        values: Tensor = vmap(function)(q.at(torch.cat([draws, -draws])))
        return values.mean(0)

    return expectation


# The objective and its gradients.


def objective(loss: Loss, q: Gaussian, rho: float, eta: float, expectation: Expectation) -> Tensor:
    """E_q[L] + ρ KL[q, p] (the tempered generalised-Bayes objective)."""
    return expectation(q, loss) + rho * q.divergence_from_prior(eta)


def gradient(loss: Loss, q: Gaussian, rho: float, eta: float, expectation: Expectation) -> tuple[Tensor, Tensor]:
    """Towards μ and Σ: E_q[∇L] + ρμ/η and ½E_q[∇²L] + (ρ/2)(I/η − Λ) (Bonnet's and Price's theorems)."""
    eye = torch.eye(q.mean.numel(), dtype=q.mean.dtype)
    towards_mean = expectation(q, grad(loss)) + rho / eta * q.mean
    towards_covariance = expectation(q, hessian_of(loss)) / 2 + rho / 2 * (eye / eta - q.precision)
    return towards_mean, towards_covariance


def fisher_of_gaussian(q: Gaussian) -> Tensor:
    """The Fisher matrix of q in (μ, vec Λ): block-diagonal, Λ and ½ Σ⊗Σ (the paper's appendix)."""
    blocks = q.precision, torch.kron(q.covariance, q.covariance) / 2
    matrix: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return matrix


def natural_gradient(
    loss: Loss, q: Gaussian, rho: float, eta: float, expectation: Expectation
) -> tuple[Tensor, Tensor]:
    """F⁻¹∇ towards (μ, Λ): Σ∇_μ and −2∇_Σ, that is −E_q[∇²L] − (ρ/η)I + ρΛ (Proposition 1)."""
    towards_mean, towards_covariance = gradient(loss, q, rho, eta, expectation)
    return q.covariance @ towards_mean, -2 * towards_covariance


# The updates, each an approximation of the one before.


def natural_gradient_step(
    loss: Loss, q: Gaussian, alpha: float, beta: float, rho: float, eta: float, expectation: Expectation
) -> Gaussian:
    """μ ← μ − αΛ⁻¹(E_q[∇L] + ρμ/η);  Λ ← (1 − β)Λ + β(E_q[∇²L]/ρ + I/η). The step on Λ has length β/ρ."""
    towards_mean, towards_precision = natural_gradient(loss, q, rho, eta, expectation)
    return Gaussian(q.mean - alpha * towards_mean, q.precision - beta / rho * towards_precision)


def second_order_loss(loss: Loss, covariance: Tensor) -> Loss:
    """L + ½Tr(HΣ), which is E_q[L] up to O(Σ²); Σ is a constant."""
    return lambda w: loss(w) + torch.trace(hessian_of(loss)(w) @ covariance) / 2


def second_order_step(loss: Loss, q: Gaussian, alpha: float, beta: float, rho: float, eta: float) -> Gaussian:
    """The same with E_q[∇L] ≈ ∇[L + ½Tr(HΣ)] and E_q[∇²L] ≈ H at the mean."""
    eye = torch.eye(q.mean.numel(), dtype=q.mean.dtype)
    slope = grad(second_order_loss(loss, q.covariance.detach()))(q.mean) + rho / eta * q.mean
    curvature = hessian_of(loss)(q.mean)
    return Gaussian(
        q.mean - alpha * q.covariance @ slope, (1 - beta) * q.precision + beta * (curvature / rho + eye / eta)
    )


def trace_ratio(curvature: Matrix, average: Tensor) -> Loss:
    """Tr(F F̄⁻¹) as a function of the weights; F̄ is a constant. Invariant under affine maps of the weights."""
    inverse = torch.linalg.inv(average)
    return lambda w: torch.trace(curvature(w) @ inverse)


def trace_ratio_step(
    loss: Loss, curvature: Matrix, w: Tensor, average: Tensor, alpha: float, beta: float, rho: float
) -> tuple[Tensor, Tensor]:
    """w ← w − αF̄⁻¹∇[L + ρTr(F F̄⁻¹)];  F̄ ← (1 − β)F̄ + βF.

    With F = H and a flat prior this is `second_order_step` in other letters: F̄ = ρΛ, α = α'ρ, ρ = ρ'/2.
    """
    penalty = trace_ratio(curvature, average)
    slope = grad(lambda v: loss(v) + rho * penalty(v))(w)
    return w - alpha * torch.linalg.solve(average, slope), (1 - beta) * average + beta * curvature(w)


def diagonal_step(
    loss: Loss, curvature: Matrix, w: Tensor, average: Tensor, alpha: float, beta: float, rho: float, delta: float
) -> tuple[Tensor, Tensor]:
    """The same with diagonals for both matrices (vectors f and F), damped by δ."""
    slope = grad(_diagonal_objective(loss, curvature, average, rho, delta))(w)
    return w - alpha * slope / (average + delta), (1 - beta) * average + beta * curvature(w).diagonal()


def tracer_step(
    loss: Loss, curvature: Matrix, w: Tensor, average: Tensor, alpha: float, beta: float, rho: float, delta: float
) -> tuple[Tensor, Tensor]:
    """And without the preconditioner, "δ large". With `gradient_magnitude` as F this is Algorithm 1."""
    slope = grad(_diagonal_objective(loss, curvature, average, rho, delta))(w)
    return w - alpha * slope, (1 - beta) * average + beta * curvature(w).diagonal()


def _diagonal_objective(loss: Loss, curvature: Matrix, average: Tensor, rho: float, delta: float) -> Loss:
    """L + ρ Σ_j F_j/(f_j + δ)."""
    return lambda w: loss(w) + rho * (curvature(w).diagonal() / (average + delta)).sum()


# Curvature matrices, from the Hessian to the gradient magnitude.


def gauss_newton(outputs: Callable[[Tensor], Tensor], output_loss: Callable[[Tensor], Tensor]) -> Matrix:
    """G = JᵀH_L J: the Hessian of the loss with the model linearised.

    Args:
        outputs: From weights to all of the model's outputs, as one vector.
        output_loss: From those to the loss.
    """

    def matrix(w: Tensor) -> Tensor:
        jacobian: Tensor = jacrev(outputs)(w)
        inner = hessian_of(output_loss)(outputs(w))
        return jacobian.T @ inner @ jacobian

    return matrix


def classifier_fisher(logits: Callable[[Tensor], Tensor]) -> Matrix:
    """F = mean over examples of E_{y∼p(y|x,w)}[∇log p ∇log pᵀ], the expectation over y taken in full.

    Args:
        logits: From weights to a matrix, one row per example.
    """

    def matrix(w: Tensor) -> Tensor:
        scores = torch.log_softmax(logits(w), 1)
        slopes = jacrev(lambda v: torch.log_softmax(logits(v), 1))(w)  # example × class × weight
        return torch.einsum("nc,nci,ncj->ij", scores.exp(), slopes, slopes) / len(scores)

    return matrix


def empirical_fisher(losses: Callable[[Tensor], Tensor]) -> Matrix:
    """F_emp = mean over examples of ∇l_i ∇l_iᵀ, with the training labels.

    Args:
        losses: From weights to the vector of the examples' losses.
    """

    def matrix(w: Tensor) -> Tensor:
        slopes: Tensor = jacrev(losses)(w)
        return slopes.T @ slopes / len(slopes)

    return matrix


def gradient_magnitude(loss: Loss) -> Matrix:
    """∇L ∇Lᵀ: the square of the mean for the mean of the squares. Its diagonal is the (∇L)² of Algorithm 1."""

    def matrix(w: Tensor) -> Tensor:
        slope = grad(loss)(w)
        return torch.outer(slope, slope)

    return matrix
