"""G-TRACER for PyTorch: train to a flat minimum by changing one line.

opt = SGDTracer(model.parameters(), lr=0.1, momentum=0.9)
loss = opt.step(lambda: loss_of(batch))
"""

import importlib
import os
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
        joint_perturbed,
        joint_step,
        linear_warmup,
    )
    from gtracer.penalty import TracerPenalty
    from gtracer.scopes import second_pass

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
    "joint_perturbed",
    "joint_step",
    "linear_warmup",
    "second_pass",
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
    "sharpness",
    "tensors",
    "variational",
)
ELSEWHERE = {
    "second_pass": "scopes",
    "TracerPenalty": "penalty",
    "find_rho": "finder",
    "RhoCurve": "finder",
}  # than in `optim`


def load(run: str | os.PathLike[str], *, device: str = "auto", last: bool = False) -> Any:
    """Load the model that `gtracer train` saved in a folder, with its preprocessing.

    Args:
        run: Folder of the run.
        device: Device to compute on.
        last: Load the last epoch's weights instead of the best ones by held-out data.

    Returns:
        An object with `model`, in evaluation mode; `preprocessing`, whose `read(path)` returns inputs for the model;
        `classes`; and `predict(path)`, which returns the probabilities of the examples in a file or folder.
    """
    try:
        trained = importlib.import_module("gtracer.lab.inference.trained")
    except ModuleNotFoundError as error:
        raise ImportError(f"gtracer.load needs {error.name}: pip install 'gtracer-optim[lab]'") from error
    return trained.load(os.fspath(run), device=device, last=last)


def __getattr__(name: str) -> Any:
    """Names and rooms on first use: reading records, and the command line's help, need no torch."""
    if name in ROOMS:
        return importlib.import_module(f"gtracer.{name}")
    if name in __all__:
        return getattr(importlib.import_module(f"gtracer.{ELSEWHERE.get(name, 'optim')}"), name)
    raise AttributeError(f"module 'gtracer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, *ROOMS])
