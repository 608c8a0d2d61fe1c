"""Named settings whose numbers come from searches: `SGDTracer(params, lr=0.1, **presets.fine_tuning())`.

Each returns keyword arguments for any TRACER optimiser. Its docstring says where the numbers come from. There is no
preset for label noise in general: the best ρ ranges from 1e-4 to 0.016 with network and data, and the best for one
leaves another at chance. `gtracer.find_rho` finds it (docs/how-to/choosing-rho.md).

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
    """For training from scratch without a search: ρ adapts during training, starting at zero.

    It does not leave a network at chance where a fixed 0.003 does (docs/how-to/choosing-rho.md, small problems).
    """
    return {"rho": AUTO}


def fine_tuning() -> Settings:
    """For a pretrained encoder: ρ 6e-5, and the total gradient clipped to a norm of 1.

    From searches on held-out data with all-MiniLM-L6-v2 and all-mpnet-base-v2 on BoolQ, WiC and RTE. The best ρ was
    1.5e-5 to 2e-4 (docs/explanation/defaults.md; records/superglue).
    """
    return {"rho": RHO_FINE_TUNING, "clip": Clip(norm=1.0)}


def adapters() -> Settings:
    """For LoRA and other adapters: ρ 0.0002, and the total gradient clipped to a norm of 1.

    From a small network on digits (docs/explanation/defaults.md); no search was made on a language model.
    """
    return {"rho": RHO_ADAPTERS, "clip": Clip(norm=1.0)}


def cifar() -> Settings:
    """For a residual network on images like CIFAR's, clean labels, weight decay, no augmentation: ρ 0.003.

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
    """For the same network with weight decay and 50% label noise, no augmentation: ρ 0.004.

    Best of 0.003 to 0.005, by held-out data (the same records).
    """
    return {"rho": 0.004}


def cifar_label_noise_without_weight_decay() -> Settings:
    """For the same without weight decay: ρ 0.016.

    Best of 0.003 to 0.026, by held-out data (the same records).
    """
    return {"rho": 0.016}
