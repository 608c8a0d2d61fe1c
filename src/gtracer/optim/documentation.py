"""What the optimisers' arguments mean, written once and put into every docstring."""

from __future__ import annotations

from typing import TypeVar

C = TypeVar("C", bound=type)

TEXTS = {
    "rho": """\
rho: ρ, strength of the penalty: a number, or `"auto"`, which adapts it during training
    (docs/how-to/choosing-rho.md). May be set per group, like β, δ and f₀.""",
    "beta": "beta: β, the rate at which f follows the squared gradient.",
    "delta": "delta: δ, damping of the ratio. While δ is well above f, only ρ/δ matters.",
    "shared": """\
f0: f₀, the initial f: `"first-gradient"`, the first squared gradient, or a number.
curvature: The estimator F, one of `gtracer.curvature`; `gradient_magnitude` is the paper's.
average: Another estimator for f alone.
engine: How T is differentiated: `FiniteDifference(radius=0.05, central=False)` uses gradients at displaced weights,
    `Exact()` double backward. `"finite-difference"` and `"exact"` are short forms. The default is the finite
    difference, or `Exact()` if the estimator has none.
interval: Number of steps from one second pass to the next.
reuse: Reuse the last ρ∇T in the steps between two second passes, multiplied by this factor in each step.
scale_free: Before batch norm, where only the direction of a unit's weights matters, measure T in that direction.
    Otherwise the penalty fades as the weights grow, if there is no weight decay. In the first step δ has its usual
    meaning.
clip: Limits for the gradient that makes the update, such as `Clip(norm=1.0)`.
transforms: Further changes to ∇L + ρ∇T, after clipping and before the update: see `gtracer.experimental`.
model: If given, the displaced pass leaves its batch-norm statistics and other buffers unchanged.
nonfinite: What to do if the loss or a gradient is NaN or infinite: `"raise"`, `"skip"` the step, or `"ignore"`, which
    does not check. The two kernels check on the device: `"skip"` never waits for it, and `"raise"` raises in the next
    step at the latest. Elsewhere both wait for one number.
implementation: `"auto"`: two kernels on a GPU if they can make the step, and torch's foreach kernels otherwise;
    `implementation_used` says which, and why. `"foreach"`: always torch's. `"compiled"`: TRACER's part through
    `torch.compile`, without a copy of the weights (they come back to within a rounding). `"fused"`: the two kernels,
    or an error that says why not.
master_weights: For weights in bfloat16: keep sixteen more bits of each weight in the state, so that the update and its
    state are float32. Without them, weights and state are bfloat16, as in torch, and are rounded stochastically.
steps_per_epoch: For `rho="auto"`: the number of steps in an epoch, usually `len(loader)`. Without it, and without
    `held_out`, ρ stays at 0.
held_out: For `rho="auto"`: a function that returns the loss of a held-out batch, whose labels are as noisy as the
    rest. It is called every tenth step, without gradients, with frozen statistics and replayed random numbers. ρ then
    follows this loss instead of `steps_per_epoch`.""",
}


def documented(cls: C) -> C:
    """Put the texts where a docstring's braces name them."""
    doc = cls.__doc__ or ""
    for name, text in TEXTS.items():
        indented = text.replace("\n", "\n        ")
        doc = doc.replace(f"{{{name}}}", indented)
    cls.__doc__ = doc
    return cls
