"""G-TRACER for PyTorch: train to a flat minimum by changing one line.

opt = SGDTracer(model.parameters(), lr=0.1, momentum=0.9)
loss = opt.step(lambda: loss_of(batch))
"""

from gtracer.optim import (
    SAM,
    AdamTracer,
    AdamWTracer,
    NonFiniteError,
    RhoScheduler,
    SGDTracer,
    Stats,
    Tracer,
    linear_warmup,
)
from gtracer.penalty import TracerPenalty

__version__ = "0.1.0"

__all__ = [
    "SAM",
    "AdamTracer",
    "AdamWTracer",
    "NonFiniteError",
    "RhoScheduler",
    "SGDTracer",
    "Stats",
    "Tracer",
    "TracerPenalty",
    "linear_warmup",
]
