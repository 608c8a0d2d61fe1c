"""Eigenvalues, trace and spectral density of a symmetric matrix that is known by its products alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

SINGLE = 10.0  # times its mean: one eigenvalue's weight, a squared normal number, is below that but once in 600
TOLERANCE = 1e-3  # residuals, of the largest eigenvalue: no eigenvalue is further off than its residual

Product = Callable[[Tensor], Tensor]
Draw = Callable[[], Tensor]


@dataclass
class Krylov:
    """An orthonormal basis, and the matrix in it: tridiagonal, of blocks where the matrix left nothing to go on with.

    Every block starts from a random vector orthogonal to those before, which are then invariant subspaces.
    """

    size: int
    basis: list[Tensor] = field(default_factory=list)
    diagonal: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)  # the last one leads out of the basis
    blocks: list[int] = field(default_factory=lambda: [0])
    astray: float = 0.0  # the largest of what a symmetric matrix has none of: products' parts along earlier vectors

    @property
    def asymmetry(self) -> float:
        """By what share of the largest eigenvalue the matrix is seen not to be symmetric."""
        largest = max(map(abs, (*self.diagonal, *self.beside)))
        return self.astray / largest if largest else 0.0

    @property
    def steps(self) -> int:
        return len(self.basis)

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ritz values, rising; their vectors in the basis, as columns; their residuals."""
        made = torch.diag(torch.tensor(self.diagonal, dtype=torch.float64))
        off = torch.tensor(self.beside[:-1], dtype=torch.float64)
        values, vectors = torch.linalg.eigh(made + torch.diag(off, 1) + torch.diag(off, -1))
        return values, vectors, self.beside[-1] * vectors[-1].abs()

    def converged(self, values: Tensor, residuals: Tensor, tolerance: float) -> Tensor:
        """Which Ritz values are eigenvalues, to the tolerance."""
        return residuals <= tolerance * float(values.abs().max())

    def quadrature(self, tolerance: float) -> tuple[list[float], list[float]]:
        """Nodes and weights of the spectral density, which sum up to the matrix's size (stochastic Lanczos quadrature).

        A Ritz value that has converged is one eigenvalue and counts as that, where plain quadrature would draw its
        weight at random, unless that weight is a multiple one's, as zero is where the rank is low. The others share
        what is left by their weights in the last block's first vector.
        """
        values, vectors, residuals = self.ritz()
        first = vectors[self.blocks[-1]].square()
        exact = self.converged(values, residuals, max(tolerance, 1e-12))
        if self.steps < self.size:
            exact &= self.size * first < SINGLE
            if bool(exact.all()):  # the last block stands for all that was not seen
                exact = first < 0.5 / self.size  # none of it: those of the earlier blocks
        weights = exact.double()
        left = torch.where(exact, 0.0, first)
        if float(left.sum()) > 0:
            weights += left / left.sum() * (self.size - float(weights.sum()))
        return values.tolist(), weights.tolist()


def lanczos(product: Product, draw: Draw, size: int, steps: int, top: int = 1, tolerance: float = TOLERANCE) -> Krylov:
    """Lanczos' method with full reorthogonalisation, until the `top` largest eigenvalues have converged.

    Args:
        product: The matrix times a vector.
        draw: A random vector.
        size: Of the matrix.
        steps: At most so many products.
        top: How many.
        tolerance: Of their residuals, of the largest eigenvalue in modulus; 0 makes all steps.
    """
    made = Krylov(size)
    q = _unit(draw())
    while True:
        w = product(q)
        made.diagonal.append(float(torch.dot(q, w)))
        made.basis.append(q)
        length = float(torch.linalg.vector_norm(w))
        w, along = _orthogonal(w, made.basis)
        made.astray = max(made.astray, *map(abs, along[:-2]), 0.0)
        beta = float(torch.linalg.vector_norm(w))
        scale = max(map(abs, (*made.diagonal, *made.beside, length)))
        is_over = beta <= torch.finfo(w.dtype).eps ** 0.75 * scale
        made.beside.append(0.0 if is_over or made.steps == size else beta)
        if made.steps >= min(steps, size):
            return made
        if is_over:
            made.blocks.append(made.steps)
            q = _unit(_orthogonal(draw(), made.basis)[0])
        elif len(made.blocks) == 1 and made.steps >= top and tolerance > 0 and _is_enough(made, top, tolerance):
            return made
        else:
            q = w / beta


def _is_enough(made: Krylov, top: int, tolerance: float) -> bool:
    values, _, residuals = made.ritz()
    return bool(made.converged(values, residuals, tolerance)[-top:].all())


def _unit(x: Tensor) -> Tensor:
    made: Tensor = x / torch.linalg.vector_norm(x)
    return made


def _orthogonal(x: Tensor, basis: Sequence[Tensor]) -> tuple[Tensor, list[float]]:
    """What is left of it, and how much lay along each. Twice is enough (Kahan and Parlett)."""
    x, along = x.clone(), []
    for again in (False, True):
        for q in basis:
            part = float(torch.dot(q, x))
            x.sub_(q, alpha=part)
            if not again:
                along.append(part)
    return x, along


def trace(
    products: Callable[[list[Tensor]], list[Tensor]], draw: Draw, made: Krylov, probes: int
) -> tuple[float, float | None]:
    """The trace and its standard error: exact on the basis, Hutchinson's estimate on its complement (as Hutch++ does).

    Args:
        products: The matrix times some vectors.
        draw: A vector of random signs.
        made: The basis.
        probes: Random vectors.
    """
    inside = math.fsum(made.diagonal)
    if made.steps == made.size:
        return inside, 0.0
    drawn = [_orthogonal(draw(), made.basis)[0] for _ in range(probes)]
    found = [float(torch.dot(z, Hz)) for z, Hz in zip(drawn, products(drawn), strict=True)]
    mean, error = mean_and_error(found)
    return inside + mean, error


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error, where there are several.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1) / len(values))
