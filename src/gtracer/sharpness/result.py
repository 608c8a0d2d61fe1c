"""What was measured: plain numbers, with what each is and whether it knows how the weights are scaled."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from gtracer.sharpness.bound import PacBayes


@dataclass(frozen=True)
class Estimate:
    """A number and, where it was estimated, its standard error."""

    value: float
    error: float | None = None


@dataclass(frozen=True)
class Spectrum:
    """The spectrum of a matrix of second derivatives.

    Attributes:
        eigenvalues: The largest, falling.
        residuals: ‖Hv − λv‖ of each: an eigenvalue is no further off than that.
        lowest: The smallest eigenvalue.
        lowest_residual: Its own.
        trace: The sum of all.
        trace_error: Its standard error; 0 where the trace is exact.
        runs: Of Lanczos' method, for each the nodes and weights of the spectral density; weights sum up to the number
            of parameters.
    """

    eigenvalues: tuple[float, ...] = ()
    residuals: tuple[float, ...] = ()
    lowest: float | None = None
    lowest_residual: float | None = None
    trace: float | None = None
    trace_error: float | None = None
    runs: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...] = field(default=(), repr=False)

    @property
    def top(self) -> float | None:
        """The largest eigenvalue."""
        return self.eigenvalues[0] if self.eigenvalues else None

    def density(self, at: Sequence[float], width: float | None = None) -> list[float]:
        """The spectral density: the share of eigenvalues per unit, each smoothed by a Gaussian of this width.

        >>> spectrum = Spectrum(runs=(((0.0, 1.0), (3.0, 1.0)),))
        >>> [round(d, 3) for d in spectrum.density([0.0, 1.0], width=0.1)]
        [2.992, 0.997]
        """
        nodes = [x for run in self.runs for x in run[0]]
        if not nodes:
            return [0.0 for _ in at]
        width = width or 0.02 * (max(nodes) - min(nodes)) or 1e-3
        pairs = [(x, w / sum(weights)) for values, weights in self.runs for x, w in zip(values, weights, strict=True)]
        factor = 1 / (len(self.runs) * width * math.sqrt(2 * math.pi))
        return [factor * math.fsum(w * math.exp(-(((y - x) / width) ** 2) / 2) for x, w in pairs) for y in at]

    def effective_dimension(self, alpha: float) -> Estimate:
        """Σ λ/(λ + α) over the positive eigenvalues: the directions that data determines more than a prior does.

        >>> Spectrum(runs=(((0.0, 1.0), (3.0, 1.0)),)).effective_dimension(1.0).value
        0.5
        """
        from gtracer.sharpness.lanczos import mean_and_error

        each = [
            math.fsum(w * x / (x + alpha) for x, w in zip(*run, strict=True) if x > 0) for run in self.runs if run[0]
        ]
        return Estimate(*mean_and_error(each))


@dataclass(frozen=True)
class TraceRatio:
    """TRACER's T = Σ F/(f + δ), F the mean of the batches' squared gradients.

    Attributes:
        total: Over all parameters.
        error: Its standard error over the batches; None where f was measured on them too.
        layers: The part of each layer.
        delta: δ.
        measured: Whether f is F itself, because no optimiser's f was given.
    """

    total: float
    error: float | None
    layers: Mapping[str, float]
    delta: float
    measured: bool


class Row(NamedTuple):
    """A line of the table."""

    name: str  # of the field
    text: str  # for a reader
    value: float
    error: float | None
    invariant: bool


# Whether a measure stays what it is when one layer is multiplied and the next divided by the same number, with a ReLU
# in between: of one function the others can have any value (Dinh et al., 2017).
INVARIANT: dict[str, bool] = {
    "loss": True,
    "accuracy": True,
    "gradient_norm": False,
    "gradient_noise": False,
    "noise_scale": False,
    "hessian.top": False,
    "hessian.lowest": False,
    "hessian.trace": False,
    "ggn.top": False,
    "ggn.trace": False,
    "expected": False,
    "expected_adaptive": True,
    "worst": False,
    "worst_adaptive": True,
    "m_worst": False,
    "m_worst_adaptive": True,
    "trace_ratio": False,
    "pac_bayes": False,
    "effective_dimension": False,
}
TEXTS: dict[str, str] = {
    "loss": "loss",
    "accuracy": "accuracy",
    "gradient_norm": "‖∇L‖",
    "gradient_noise": "noise of an example's gradient, tr Σ",
    "noise_scale": "tr Σ/‖∇L‖²",
    "hessian.top": "largest eigenvalue, Hessian",
    "hessian.lowest": "smallest eigenvalue, Hessian",
    "hessian.trace": "trace, Hessian",
    "ggn.top": "largest eigenvalue, Gauss-Newton",
    "ggn.trace": "trace, Gauss-Newton",
    "expected": "E[L(w + σε)] − L(w)",
    "expected_adaptive": "E[L(w + σ|w|ε)] − L(w)",
    "worst": "max L(w + u) − L(w)",
    "worst_adaptive": "max L(w + |w|u) − L(w)",
    "m_worst": "m-sharpness",
    "m_worst_adaptive": "m-sharpness, adaptive",
    "trace_ratio": "TRACER's T",
    "pac_bayes": "PAC-Bayes bound on the error",
    "effective_dimension": "effective dimension",
}


@dataclass(frozen=True)
class Sharpness:
    """How sharp a minimum is, by every measure that was asked for; None where one was not.

    Attributes:
        loss: The mean over the examples.
        accuracy: If the loss gives it.
        gradient_norm: ‖∇L‖ of the mean.
        gradient_noise: tr Σ of an example's gradient around the mean, from the scatter of the batches.
        noise_scale: tr Σ/‖∇L‖², the batch size at which noise and gradient are level (McCandlish et al., 2018).
        hessian: Its eigenvalues, trace and spectral density.
        ggn: The same of the Gauss-Newton matrix.
        expected: E[L(w + σε)] − L(w) for normal ε.
        expected_adaptive: The same for ε scaled by |w|.
        worst: The largest rise of the loss found within a ball, a lower bound.
        worst_adaptive: The same for displacements measured in |w|.
        m_worst: The mean of the batches' own: m-sharpness.
        m_worst_adaptive: The same for displacements measured in |w|.
        trace_ratio: TRACER's T.
        pac_bayes: A bound on the error of weights drawn from N(w, σ²I).
        effective_dimension: Σ λ/(λ + α) of the Gauss-Newton matrix, or of the Hessian where there is none.
        examples: How many.
        batches: Their sizes' number and the largest size, m of m-sharpness.
        parameters: How many.
        passes: What it took, in passes over all the examples: evaluations, gradients, products with either matrix.
        settings: The settings of the measurement.
    """

    loss: float
    accuracy: float | None = None
    gradient_norm: float = 0.0
    gradient_noise: float | None = None
    noise_scale: float | None = None
    hessian: Spectrum | None = None
    ggn: Spectrum | None = None
    expected: Estimate | None = None
    expected_adaptive: Estimate | None = None
    worst: Estimate | None = None
    worst_adaptive: Estimate | None = None
    m_worst: Estimate | None = None
    m_worst_adaptive: Estimate | None = None
    trace_ratio: TraceRatio | None = None
    pac_bayes: PacBayes | None = None
    effective_dimension: Estimate | None = None
    examples: float = 0
    batches: tuple[int, float] = (0, 0)
    parameters: int = 0
    passes: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def top_eigenvalue(self) -> float | None:
        """Of the Hessian."""
        return self.hessian.top if self.hessian else None

    @property
    def trace(self) -> float | None:
        """Of the Hessian."""
        return self.hessian.trace if self.hessian else None

    @staticmethod
    def is_invariant(name: str) -> bool:
        """Whether a measure stays the same if layers are rescaled without changing the function.

        >>> Sharpness.is_invariant("worst_adaptive"), Sharpness.is_invariant("hessian.trace")
        (True, False)
        """
        return INVARIANT[name]

    def rows(self) -> Iterator[Row]:
        """Each measure with its error."""
        for name, text in TEXTS.items():
            value, error = self._numbers(name)
            if value is not None:
                yield Row(name, text, value, error, INVARIANT[name])

    def _numbers(self, name: str) -> tuple[float | None, float | None]:
        owner, _, inner = name.partition(".")
        found = getattr(self, owner)
        if found is None or isinstance(found, float):
            return found, None
        if isinstance(found, Spectrum):
            errors = {
                "top": found.residuals[0] if found.residuals else None,
                "lowest": found.lowest_residual,
                "trace": found.trace_error,
            }
            return getattr(found, inner), errors[inner]
        if isinstance(found, TraceRatio):
            return found.total, found.error
        if isinstance(found, PacBayes):
            return found.bound, None
        return found.value, found.error

    def to_mapping(self) -> dict[str, Any]:
        """Plain values, for JSON; not a number and infinity are None there."""
        return {name: _plain(value) for name, value in asdict(self).items()} | {
            "invariant": {row.name: row.invariant for row in self.rows()}
        }

    def __str__(self) -> str:
        lines = [f"{'':<40} {'value':>12} {'± error':>10}  invariant"]
        for row in self.rows():
            error = "" if row.error is None else f"{row.error:.2g}"
            lines.append(f"{row.text:<40} {row.value:>12.5g} {error:>10}  {'yes' if row.invariant else 'no'}")
        for title, spectrum in (("Hessian", self.hessian), ("Gauss-Newton", self.ggn)):
            if spectrum is not None and len(spectrum.eigenvalues) > 1:
                lines.append(f"eigenvalues, {title}: " + ", ".join(f"{x:.4g}" for x in spectrum.eigenvalues))
        lines.append(
            f"{self.parameters:,} parameters; {self.examples:,.0f} examples in {self.batches[0]} batches of at most "
            f"{self.batches[1]:g}"
        )
        lines.append("passes: " + ", ".join(f"{kind} {count:g}" for kind, count in self.passes.items()))
        return "\n".join(lines)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(x) for name, x in value.items()}
    return [_plain(x) for x in value] if isinstance(value, list | tuple) else value
