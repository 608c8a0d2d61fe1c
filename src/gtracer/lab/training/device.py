"""Where to compute."""

from __future__ import annotations

import torch

from gtracer.lab.errors import LabError


def device_of(name: str) -> torch.device:
    """The named device, or a GPU where there is one."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        torch.zeros(1, device=device).item()  # not every kind of device holds numbers
    except (RuntimeError, AssertionError, ValueError, NotImplementedError, ImportError) as error:
        raise LabError(f"device {name!r} cannot be used here: {str(error).strip().splitlines()[0]}") from error
    return device
