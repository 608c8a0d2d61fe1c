"""Diagonal curvature: the estimators of F, its average f, and the trace ratio of the two."""

from gtracer.curvature.average import (
    FIRST_GRADIENT,
    initial_average,
    squares,
    trace_ratio,
    update_average_,
)
from gtracer.curvature.estimators import (
    Choice,
    Estimator,
    MicroBatch,
    VectorisedMicroBatch,
    chosen,
    gauss_newton,
    gradient_magnitude,
    has_finite_difference,
    hutchinson,
    loss_gradient,
    micro_batch,
    monte_carlo_fisher,
    per_example,
)
from gtracer.curvature.evaluation import Evaluation, Shifts
from gtracer.curvature.recording import Recording
from gtracer.curvature.second_derivatives import SecondDerivatives
from gtracer.tensors import inverse

__all__ = [
    "FIRST_GRADIENT",
    "Choice",
    "Estimator",
    "Evaluation",
    "MicroBatch",
    "Recording",
    "SecondDerivatives",
    "Shifts",
    "VectorisedMicroBatch",
    "chosen",
    "gauss_newton",
    "gradient_magnitude",
    "has_finite_difference",
    "hutchinson",
    "initial_average",
    "inverse",
    "loss_gradient",
    "micro_batch",
    "monte_carlo_fisher",
    "per_example",
    "squares",
    "trace_ratio",
    "update_average_",
]
