"""Where a run was made: commit, versions, hardware."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "numpy", "scikit-learn", "transformers", "tokenizers")


def describe(device: torch.device, processes: int = 1, in_parallel: int = 1) -> dict[str, Any]:
    """What a reader of the record needs to judge or repeat it."""
    from gtracer import __version__

    versions = {"gtracer": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    hardware = {"machine": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    # Only where it is not one, so that older records are of the same machine.
    hardware |= {name: n for name, n in (("processes", processes), ("runs_side_by_side", in_parallel)) if n > 1}
    if device.type == "cuda":
        hardware["gpu"] = torch.cuda.get_device_name(device)
    return {"commit": commit(), "versions": versions, "hardware": hardware | {"device": device.type}}


def commit() -> str | None:
    """The commit of the source that runs, with `+changes` where it is not as committed; None outside a checkout.

    An installed copy may lie inside some other project's checkout, whose commit says nothing of ours.
    """
    here = Path(__file__).parent
    try:
        _git(here, "ls-files", "--error-unmatch", __file__)
        head = _git(here, "rev-parse", "HEAD")
        changed = _git(here, "status", "--porcelain", "--", str(here.parent))
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}+changes" if changed else head


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def peak_memory(device: torch.device) -> int:
    """Bytes at the highest: of the GPU's memory, else of the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024
