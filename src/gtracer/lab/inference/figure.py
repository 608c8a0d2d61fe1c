"""A figure of an evaluation, written whole as PNG."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gtracer.lab import files
from gtracer.lab.errors import one_line

LONGEST = 24  # of a name, in characters


def write(path: Path, draw: Callable[[Any], None]) -> None:
    """What `draw` draws into a figure of matplotlib's, or what was there before."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    draw(figure)
    with files.replacing(path) as part, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a name may have signs that matplotlib's font lacks
        figure.savefig(part, format="png", dpi=120)


def name(text: str) -> str:
    r"""The user's own name of something: on one line, with room for it, and a dollar sign is no formula.

    >>> print(name("a very long name that ends in 17 $"))
    a very long…ends in 17 \$
    """
    line = one_line(text)
    if len(line) > LONGEST:  # names that are alike often differ at their ends
        line = f"{line[: LONGEST // 2 - 1]}…{line[-LONGEST // 2 :]}"
    return line.replace("$", r"\$")
