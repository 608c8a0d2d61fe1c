"""Estimators of the diagonal F: functions of an `Evaluation`, handed to the optimisers as `curvature=`.

Any function of an `Evaluation` that gives one tensor for each of its `params` is one. Where its result is to be
differentiated (`Evaluation.differentiable`), it must carry its graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gtracer import checks
from gtracer.curvature.average import squares
from gtracer.curvature.evaluation import Evaluation, model_output, nodes_used
from gtracer.curvature.layers import fast_path
from gtracer.curvature.likelihood import Likelihood, likelihood_of
from gtracer.curvature.recording import Recording
from gtracer.tensors import Tensors

Estimator = Callable[[Evaluation], Tensors]
"""Returns F for each of `at.params`. You can pass a function of your own."""
EXACT_UP_TO = 16


def gradient_magnitude(at: Evaluation) -> Tensors:
    """F = (∇L)², the paper's choice: the square of the mini-batch's mean gradient."""
    return squares(at.gradients)


def loss_gradient(at: Evaluation) -> Tensors:
    """`gradient_magnitude`; as Adam-TRACER's `average=` it feeds the second moment by ∇L (`gtracer.experimental`)."""
    return squares(at.gradients)


@dataclass(frozen=True)
class MicroBatch:
    """F = mean_k g_k², with g_k the mean gradient of a micro-batch; the optimisers make its passes themselves."""

    size: int

    def __call__(self, at: Evaluation) -> Tensors:
        if at.losses is None:
            raise ValueError(f"{self!r} needs the examples' losses one by one")
        total: Tensors | None = None
        for part in torch.split(at.losses, self.size):
            g = torch.autograd.grad(
                part.mean(), at.params, create_graph=at.differentiable, retain_graph=True, materialize_grads=True
            )
            F = torch._foreach_mul(squares(g), len(part) / len(at.losses))
            total = F if total is None else torch._foreach_add(total, F)
        assert total is not None
        return total


@dataclass(frozen=True)
class VectorisedMicroBatch(MicroBatch):
    """`MicroBatch` with all micro-batches in one pass: see `gtracer.experimental`."""

    def check(self, average: Estimator, model: nn.Module | None) -> None:
        """Refuse an average or a model that cannot be vectorised."""
        if model is None or average not in (self, gradient_magnitude):
            raise ValueError(f"curvature = {self!r} needs model= and goes with average=gradient_magnitude or none")


def micro_batch(m: int, *, vectorised: bool | None = None) -> MicroBatch:
    """The mean of squared gradients over micro-batches of `m` examples.

    An optimiser with it is given the batch, `opt.step(closure, x, y)`, and calls `closure` on parts of it. The
    penalty's gradient is the mean of the micro-batches' own, each displaced along its own direction, so a step costs
    two passes over the batch as usual. Batch norm sees one micro-batch at a time.

    Args:
        m: Number of examples in a micro-batch.
        vectorised: Moved to `gtracer.experimental.vectorised_micro_batch`; will be removed in the next version.
    """
    checks.count("m", m)
    if vectorised is not None:
        checks.flag("vectorised", vectorised)
        new = "gtracer.experimental.vectorised_micro_batch(m)" if vectorised else "micro_batch(m)"
        old = f"micro_batch(m, vectorised={vectorised})"
        warnings.warn(f"{old} will be removed in the next version: use {new}", DeprecationWarning, stacklevel=2)
    return VectorisedMicroBatch(m) if vectorised else MicroBatch(m)


@dataclass(frozen=True)
class PerExample:
    """F = mean_i g_i², the empirical Fisher's diagonal, with g_i the gradient of example i."""

    needs_layers = True

    def __call__(self, at: Evaluation) -> Tensors:
        return at.per_example_squares()


per_example = PerExample()
"""F = mean_i g_i², the empirical Fisher's diagonal, with g_i the gradient of example i."""


@dataclass(frozen=True)
class OutputSquares:
    """F = mean_i Σ_s (J_iᵀ s)² for vectors s at the output: the Fisher's or the Gauss-Newton matrix's diagonal."""

    likelihood: Likelihood
    samples: int
    temperature: float | None  # of the sampled labels' relaxation; None holds them constant
    exact_up_to: int  # outputs for which the sum is taken in full

    needs_layers = True

    def __call__(self, at: Evaluation) -> Tensors:
        output = model_output(at.recording)
        total: Tensors | None = None
        for s in self._slopes(_rows(output, at.recording.examples)):
            F = at.per_example_squares(s.reshape(output.shape))
            total = F if total is None else torch._foreach_add(total, F)
        assert total is not None
        return total

    def _slopes(self, outputs: Tensor) -> Iterator[Tensor]:
        if outputs.shape[1] <= self.exact_up_to:
            yield from self.likelihood.factors(outputs)
            return
        for _ in range(self.samples):
            yield self.likelihood.slope(outputs, self.temperature) / self.samples**0.5


def monte_carlo_fisher(
    loss: Any = functional.cross_entropy, *, samples: int = 1, temperature: float = 0.5
) -> OutputSquares:
    """F = mean_i (∇log p(ỹ_i | x_i))², with labels ỹ drawn from the model's own output.

    The gradient flows through the drawing: by Gumbel-Softmax for cross-entropy, by reparameterisation for squared
    error.

    Args:
        loss: What the closure computes, as a function, class or module of torch.
        samples: Labels drawn for each example.
        temperature: Temperature of the Gumbel-Softmax relaxation. The sample is always a true one; a lower
            temperature makes its gradient less biased and noisier.
    """
    checks.count("samples", samples)
    checks.number("temperature", temperature, low=0, open_low=True)
    return OutputSquares(likelihood_of(loss), samples, temperature, exact_up_to=0)


def gauss_newton(
    loss: Any = functional.cross_entropy, *, samples: int = 1, exact_up_to: int = EXACT_UP_TO
) -> OutputSquares:
    """The diagonal of the generalised Gauss-Newton matrix, mean_i J_iᵀ ∇²l J_i.

    Args:
        loss: What the closure computes, as a function, class or module of torch.
        samples: Number of labels to draw from the model, and to hold constant, if there are many outputs.
        exact_up_to: The largest number of outputs for which the diagonal is exact; each costs a backward pass. 0
            always samples.
    """
    checks.count("samples", samples)
    checks.number("exact_up_to", exact_up_to, low=0)
    return OutputSquares(likelihood_of(loss), samples, None, exact_up_to)


@dataclass(frozen=True)
class Hutchinson:
    """F = mean over probes z of z ∘ Hz."""

    samples: int
    spatial: bool

    def __call__(self, at: Evaluation) -> Tensors:
        if at.differentiable:
            _check_third_derivatives(at.loss)
        g = at.gradients_with_graph()
        total: Tensors | None = None
        for _ in range(self.samples):
            F = self._probe(at, g)
            total = F if total is None else torch._foreach_add(total, F)
        assert total is not None
        F = torch._foreach_div(total, self.samples)
        return [_spatial_mean(x) for x in F] if self.spatial else F

    def _probe(self, at: Evaluation, g: Tensors) -> Tensors:
        probes = [torch.randint_like(p, 2) * 2 - 1 for p in at.params]
        curved = [(x, z) for x, z in zip(g, probes, strict=True) if x.requires_grad]
        if not curved:  # the loss is linear in the weights
            return [torch.zeros_like(p) for p in at.params]
        roots, weights = zip(*curved, strict=True)
        product = torch.autograd.grad(
            roots, at.params, weights, create_graph=at.differentiable, retain_graph=True, materialize_grads=True
        )
        return torch._foreach_mul(product, probes)


def hutchinson(samples: int = 1, *, spatial: bool = False) -> Hutchinson:
    """The Hessian's diagonal from Rademacher probes z, E[z ∘ Hz], as in AdaHessian. It may be negative.

    Args:
        samples: Number of probes.
        spatial: Average over the positions of a convolution's kernel.
    """
    checks.count("samples", samples)
    checks.flag("spatial", spatial)
    return Hutchinson(samples, spatial)


def _check_third_derivatives(loss: Tensor) -> None:
    """Refuse a loss through a layer whose third derivative torch gets wrong without a word.

    Its fused kernels take the mean and deviation for constants there (pytorch issues 175754 and 186256).
    """
    for node in nodes_used(loss):
        name = node.name()
        if "LayerNorm" in name or ("BatchNorm" in name and getattr(node, "_saved_training", True)):
            layer = "LayerNorm" if "LayerNorm" in name else "BatchNorm"
            raise ValueError(
                f"curvature=hutchinson is differentiated a third time, and torch's third derivative of {layer} is "
                "wrong: use it as average= alone, use GroupNorm, or use curvature=gauss_newton()"
            )


def _spatial_mean(F: Tensor) -> Tensor:
    return F.mean((2, 3), keepdim=True).expand_as(F) if F.ndim == 4 else F


def _rows(output: Tensor, examples: int) -> Tensor:
    """Examples × outputs."""
    if output.ndim > 2 or len(output) != examples:
        raise ValueError(
            f"the model gives {tuple(output.shape)} for {examples} examples, and the output distribution is known for "
            "one vector an example: use curvature=per_example or micro_batch, which need none"
        )
    return output.reshape(examples, -1)


@dataclass(frozen=True)
class Choice:
    """The estimator that is differentiated, T's numerator, and the one that f averages."""

    numerator: Estimator
    average: Estimator

    def __str__(self) -> str:
        """As arguments; a function by its name, without its address."""
        given = {"curvature": self.numerator} | ({} if self.average == self.numerator else {"average": self.average})
        return ", ".join(f"{name}={getattr(value, '__name__', repr(value))}" for name, value in given.items())

    @property
    def is_default(self) -> bool:
        """Whether both are the gradient magnitude, which the gradient alone gives."""
        return self.numerator is gradient_magnitude and self.average is gradient_magnitude

    @property
    def needs_layers(self) -> bool:
        """Whether one of them looks into the layers of a model."""
        return any(getattr(estimator, "needs_layers", False) for estimator in (self.numerator, self.average))

    @property
    def parts(self) -> int | None:
        """The size of the micro-batches, if an estimator uses them."""
        sizes = [x.size for x in (self.numerator, self.average) if isinstance(x, MicroBatch)]
        return min(sizes, default=None)

    def measure(self, at: Evaluation) -> tuple[Tensors, Tensors]:
        """F for the numerator, with its graph if asked for, and |F| for the average, without.

        A Hessian's diagonal may be negative, f must not be.
        """
        F = self.numerator(at)
        measured = F if self.average == self.numerator else self.average(at)
        return F, torch._foreach_abs([x.detach() for x in measured])


def has_finite_difference(estimator: Estimator, model: nn.Module | None) -> bool:
    """Whether first-order passes give ∇⟨F, ·⟩: for squared gradients of batches, micro-batches or examples."""
    if isinstance(estimator, PerExample) and model is not None:
        return all(fast_path(layer, name) is not None for name, layer in Recording(model).layers)
    return estimator is gradient_magnitude or isinstance(estimator, MicroBatch)


def chosen(curvature: Any, average: Any, model: Any) -> Choice:
    """Check the two estimators that a user passed, and return them. Without `average` both are the same."""
    choice = Choice(curvature, curvature if average is None else average)
    value: Any
    for name, value in (("curvature", choice.numerator), ("average", choice.average)):
        if value in (micro_batch, monte_carlo_fisher, gauss_newton, hutchinson):
            raise ValueError(f"{name} = {value.__name__} is to be called first: {name}={value.__name__}(...)")
        if not callable(value) or isinstance(value, type):
            kind = type(value).__name__
            raise ValueError(
                f"{name} must be an estimator of gtracer.curvature, such as per_example, got {value!r} ({kind})"
            )
    sizes = {x.size for x in (choice.numerator, choice.average) if isinstance(x, MicroBatch)}
    if len(sizes) > 1:
        raise ValueError(
            f"curvature and average split the batch into micro-batches of {sizes} examples: choose one size"
        )
    if choice.needs_layers:
        if model is None:
            raise ValueError(f"curvature = {curvature!r}, average = {average!r}: to look into the layers, pass model=")
        Recording(model).check()
    if isinstance(curvature, VectorisedMicroBatch):
        curvature.check(choice.average, model)
    return choice
