"""Variants that were measured and found hardly ever worthwhile. They may change or be removed.

Pass each to an optimiser as the argument that the table names:

| option | passed as | what it does |
| --- | --- | --- |
| `PartialBatch(0.25)` | `engine=` | the second pass sees a share of the batch |
| `PreviousStep()` | `reuse=` | one pass in all, displaced by the previous step |
| `vectorised_micro_batch(m)` | `curvature=` | all micro-batches in one pass, by `vmap` |
| `Ridge(eta)` | in `transforms=` | adds the ridge term of a Gaussian prior on the weights |
| `Precondition()` | in `transforms=` | divides ∇L + ρ∇T by f + δ, as the derivation does before the paper drops it |
| `loss_gradient` | `average=` of Adam-TRACER | feeds its second moment by ∇L alone, as Algorithm 1 feeds f |
"""

from gtracer.optim.experimental import (
    PartialBatch,
    Precondition,
    PreviousStep,
    Ridge,
    VectorisedMicroBatch,
    loss_gradient,
    vectorised_micro_batch,
)

__all__ = [
    "PartialBatch",
    "Precondition",
    "PreviousStep",
    "Ridge",
    "VectorisedMicroBatch",
    "loss_gradient",
    "vectorised_micro_batch",
]
