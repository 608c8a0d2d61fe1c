"""A figure of an evaluation, written whole as PNG."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gtracer.lab import files


def write(path: Path, draw: Callable[[Any], None]) -> None:
    """What `draw` draws into a figure of matplotlib's, or what was there before."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    draw(figure)
    with files.replacing(path) as part:
        figure.savefig(part, format="png", dpi=120)
