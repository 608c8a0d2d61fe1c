"""G-TRACER for PyTorch: train to a flat minimum by changing one line.

opt = SGDTracer(model.parameters(), lr=0.1, momentum=0.9)
loss = opt.step(lambda: loss_of(batch))
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gtracer.finder import RhoCurve, find_rho
    from gtracer.optim import (
        SAM,
        AdamTracer,
        AdamWTracer,
        Clip,
        Exact,
        FiniteDifference,
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
    "Clip",
    "Exact",
    "FiniteDifference",
    "NonFiniteError",
    "RhoCurve",
    "RhoScheduler",
    "SGDTracer",
    "Stats",
    "Tracer",
    "TracerPenalty",
    "find_rho",
    "linear_warmup",
]

ROOMS = (
    "calibration",
    "curvature",
    "experimental",
    "finder",
    "optim",
    "penalty",
    "presets",
    "scopes",
    "tensors",
    "variational",
)
ELSEWHERE = {"TracerPenalty": "penalty", "find_rho": "finder", "RhoCurve": "finder"}  # than in `optim`


def __getattr__(name: str) -> Any:
    """Names and rooms on first use: reading records, and the command line's help, need no torch."""
    if name in ROOMS:
        return importlib.import_module(f"gtracer.{name}")
    if name in __all__:
        return getattr(importlib.import_module(f"gtracer.{ELSEWHERE.get(name, 'optim')}"), name)
    raise AttributeError(f"module 'gtracer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, *ROOMS])
