"""Settings by name, for where a number was searched: `SGDTracer(params, lr=0.1, **presets.fine_tuning())`.

Each gives keyword arguments of every TRACER optimiser here; its docstring says where the numbers come from. There is
none for label noise in general: the best ρ there goes from 1e-4 to 0.016 with net and data, and what is best on one
ends at chance on another. `gtracer.find_rho` finds it (docs/how-to/choosing-rho.md).

>>> import torch
>>> from gtracer import AdamWTracer, presets
>>> opt = AdamWTracer(torch.nn.Linear(2, 1).parameters(), lr=2e-5, **presets.fine_tuning())
"""

from __future__ import annotations

from typing import Any

from gtracer.optim import Clip
from gtracer.optim.auto import AUTO
from gtracer.penalty import RHO_ADAPTERS, RHO_FINE_TUNING

Settings = dict[str, Any]


def from_scratch() -> Settings:
    """For training from scratch where nothing was searched: ρ sets itself, from zero on.

    It does not end at chance where a fixed 0.003 does (docs/how-to/choosing-rho.md, small problems).
    """
    return {"rho": AUTO}


def fine_tuning() -> Settings:
    """For an encoder that was trained before: ρ 6e-5, and the total's norm clipped to 1.

    From searches with all-MiniLM-L6-v2 and all-mpnet-base-v2 on BoolQ, WiC and RTE by held-out data: best ρ 1.5e-5 to
    2e-4 (docs/explanation/defaults.md; records/superglue).
    """
    return {"rho": RHO_FINE_TUNING, "clip": Clip(norm=1.0)}


def adapters() -> Settings:
    """For LoRA and its like beside frozen weights: ρ 0.0002, and the total's norm clipped to 1.

    From a small net on digits (docs/explanation/defaults.md); a language model's were not searched.
    """
    return {"rho": RHO_ADAPTERS, "clip": Clip(norm=1.0)}


def cifar() -> Settings:
    """For a residual net on images such as CIFAR's with weight decay and clean labels, not augmented: ρ 0.003.

    ResNet-20, CIFAR-100, SGD at learning rate 0.1, weight decay 5e-4: best of 0.001 to 0.0065 over 100 epochs (0.0065
    of 0.003 to 0.009 over 200), by held-out data (docs/explanation/defaults.md; records/cifar100).
    """
    return {"rho": 0.003}


def cifar_augmented() -> Settings:
    """The same with crops and flips: ρ 0.001.

    Best of 0.0002 to 0.002 over 100 epochs, by held-out data (the same records).
    """
    return {"rho": 0.001}


def cifar_label_noise() -> Settings:
    """For the same net with weight decay and 50% label noise, not augmented: ρ 0.004.

    Best of 0.003 to 0.005, by held-out data (the same records).
    """
    return {"rho": 0.004}


def cifar_label_noise_without_weight_decay() -> Settings:
    """For the same without weight decay: ρ 0.016.

    Best of 0.003 to 0.026, by held-out data (the same records).
    """
    return {"rho": 0.016}
