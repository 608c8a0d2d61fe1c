"""What did not earn its place: variants that were measured and are hardly ever worth it. They may change or go.

Each is an object that is handed to an optimiser where its own sort goes:

| | handed over as | what it is |
| --- | --- | --- |
| `PartialBatch(0.25)` | `engine=` | the second pass sees a share of the batch |
| `PreviousStep()` | `reuse=` | one pass in all, displaced by the step before |
| `vectorised_micro_batch(m)` | `curvature=` | all micro-batches in one pass, by `vmap` |
| `Ridge(eta)` | in `transforms=` | the pull of a Gaussian prior on the weights |
| `Precondition()` | in `transforms=` | ∇L + ρ∇T divided by f + δ, as the derivation has it before the paper drops it |
| `loss_gradient` | `average=` of Adam-TRACER | its second moment fed by ∇L alone, as Algorithm 1 has it for f |
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
