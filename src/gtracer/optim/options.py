"""The arguments that all TRACER optimisers share, in one place for their signatures and documentation."""

from __future__ import annotations

from typing import TypedDict

from torch import nn

from gtracer.curvature import Estimator
from gtracer.optim.clip import Clip


class Options(TypedDict, total=False):
    """What every TRACER optimiser takes besides ρ, β and δ.

    Attributes:
        f0: f₀: `"first-gradient"` (default) or a number. May be set per group.
        curvature: The estimator F, one of `gtracer.curvature` (default `gradient_magnitude`).
        average: Another estimator for f alone (default: the same).
        engine: `"finite-difference"`: first-order passes only. `"exact"`: double backward. By default the first where
            the estimator has it (squared gradients of batches, micro-batches and, for most layers, examples).
        radius: Length of the finite difference's displacement (default 0.05).
        difference: `"forward"` (default): one further pass. `"central"`: two, with the error squared.
        interval: Penalise every so many steps (default 1).
        reuse: Penalise for less. A number: between two such steps use the last ρ∇T again, times this every step.
            `"previous"`: one pass in all, displaced by the step before (default None).
        share: Of the batch that the second pass sees; `step(closure, x, y)` must be handed it (default 1).
        lean: Keep no copy of the weights while the second pass is made: they come back to within one rounding, not bit
            for bit (default False).
        preconditioned: Divide the total by f + δ, as the derivation has it before the paper drops it (default False).
        eta: η, variance of a Gaussian prior on the weights: adds its ridge term ρ/η · w (default None, a flat prior).
        scale_free: Where the network sees only the direction of a unit's weights, as before batch norm, measure T by
            it: without weight decay a penalty by the weights themselves fades while they grow. At the first step δ
            means what it always does (default False).
        model: With it, the displaced pass leaves batch-norm statistics and other buffers alone.
        nonfinite: `"raise"` (default), `"skip"` or `"ignore"` a NaN or infinite loss or gradient. The first two look at
            the numbers, and so wait for the device once a step.
        compiled: Compile what TRACER adds to a step, and Adam-TRACER's update, with `torch.compile`: fewer kernels,
            after a start of seconds, or a minute for an encoder's 150 tensors. Adam-TRACER's learning rate must be a
            tensor then, if it changes. On a GPU take it with `lean` and `nonfinite="ignore"`, or a step may be slower
            for it: with them all arithmetic of SGD-TRACER and Adam-TRACER is two kernels for weights in float32,
            nothing is compiled, and no gradients are left behind (default False).
        clip: Bounds for the gradient that makes the update, such as `Clip(norm=1.0)` (default None).
    """

    f0: str | float
    curvature: Estimator
    average: Estimator | None
    engine: str | None
    radius: float
    difference: str
    interval: int
    reuse: float | str | None
    share: float
    lean: bool
    preconditioned: bool
    eta: float | None
    scale_free: bool
    model: nn.Module | None
    nonfinite: str
    clip: Clip | None
    compiled: bool
