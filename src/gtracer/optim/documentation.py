"""What the optimisers' arguments mean, written once and put into every docstring."""

from __future__ import annotations

from typing import TypeVar

C = TypeVar("C", bound=type)

TEXTS = {
    "rho": """\
rho: ρ, strength of the penalty: a number, or `"auto"`, which sets and moves it (docs/how-to/choosing-rho.md). May be
    set per group, as β, δ and f₀ may.""",
    "beta": "beta: β, how fast f follows the squared gradient.",
    "delta": "delta: δ, damping of the ratio. What matters is ρ/δ while δ is well above f.",
    "shared": """\
f0: f₀, where f starts: `"first-gradient"`, the first squared gradient, or a number.
curvature: The estimator F, one of `gtracer.curvature`; `gradient_magnitude` is the paper's.
average: Another estimator for f alone.
engine: How T is differentiated: `FiniteDifference(radius=0.05, central=False)`, by gradients at displaced
    weights, or `Exact()`, by double backward; `"finite-difference"` and `"exact"` for short. By default the first,
    where the estimator has it.
interval: Make the second pass only every so many steps.
reuse: In the steps between, use the last ρ∇T again, times this every step.
scale_free: Where the network sees only the direction of a unit's weights, as before batch norm, measure T by it:
    without weight decay a penalty by the weights themselves fades while they grow. At the first step δ means what
    it always does.
clip: Bounds for the gradient that makes the update, such as `Clip(norm=1.0)`.
transforms: More that is done to ∇L + ρ∇T before the update, after clipping: see `gtracer.experimental`.
model: With it, the displaced pass leaves batch-norm statistics and other buffers alone.
nonfinite: What to do about a NaN or infinite loss or gradient: `"raise"`, `"skip"` the step, or `"ignore"`, which
    does not look. In two kernels the device looks for itself: `"skip"` never waits for it, and `"raise"` tells at the
    next step at the latest. Elsewhere both wait for one number.
implementation: `"auto"`: two kernels on a GPU wherever they can make the step, otherwise torch's foreach kernels;
    `implementation_used` tells which, and why. `"foreach"`: those always. `"compiled"`: what TRACER adds, through
    `torch.compile`, without a copy of the weights (they come back to within a rounding). `"fused"`: the two kernels,
    or an error that says why not.
master_weights: Of weights in bfloat16: keep sixteen bits more of each in the state, whose float32 the update and its
    state then are. Without them weights and state are in bfloat16, as torch's are, and rounded up or down by chance.
steps_per_epoch: For `rho="auto"`: steps until an example comes back, `len(loader)` mostly. Without it ρ rises later.
held_out: For `rho="auto"`: gives the loss of a held-out batch, whose labels are as noisy as the rest. It is called
    every tenth step, without gradients, with statistics frozen and random numbers as they were; ρ then goes by it, and
    not by `steps_per_epoch`.""",
}


def documented(cls: C) -> C:
    """Put the texts where a docstring's braces name them."""
    doc = cls.__doc__ or ""
    for name, text in TEXTS.items():
        indented = text.replace("\n", "\n        ")
        doc = doc.replace(f"{{{name}}}", indented)
    cls.__doc__ = doc
    return cls
