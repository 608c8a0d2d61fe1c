"""Figures of landscapes and spectra, as for a paper. They need matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtracer.sharpness.result import Spectrum

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gtracer.sharpness.landscape import Line, Surface

Place = Any  # a path, an open file, or matplotlib's axes
# Okabe and Ito's colours, which the colour-blind can tell apart.
BLUE, ORANGE, GREEN, PINK = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": f"cycler('color', {[BLUE, ORANGE, GREEN, PINK, '#e69f00', '#56b4e9', '#8c8c8c']})",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}
DASHES = ("-", (0, (4, 2)), (0, (1, 1)))  # of lines that may hide each other
LEVELS, SPAN = 16, 30.0  # of contours; with a larger ratio of losses the scale is logarithmic


def plain(text: str) -> str:
    """A label of the user's own, in which a dollar is no formula."""
    return text.replace("$", r"\$")


@contextmanager
def axes(where: Place, width: float = 4.2, height: float = 3.1) -> Iterator[Axes]:
    """Those that are given, or new ones whose figure is written to the file at the end."""
    try:
        from matplotlib import style
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"drawing needs {error.name}: pip install 'gtracer-optim[lab]'", name=error.name
        ) from error
    if not _is_file(where):
        yield where
        return
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure.add_subplot()
        figure.savefig(where, dpi=200)


def _is_file(where: Any) -> bool:
    """By its path, or one that is open."""
    return isinstance(where, str | Path) or hasattr(where, "write")


def line(found: Line, where: Place, **look: Any) -> Axes:
    """The loss, and in a file of its own the accuracy beside it; between two models also the barrier."""
    with axes(where) as drawn:
        drawn.plot(found.positions, found.losses, **{"color": BLUE} | look if _is_file(where) else look)
        drawn.set(xlabel=plain(found.label), ylabel="loss")
        if _is_file(where):
            _mark_barrier(drawn, found)
            if found.accuracies is not None:
                _add_accuracy(drawn, found)
    return drawn


def _mark_barrier(drawn: Axes, found: Line) -> None:
    if {0.0, 1.0} <= set(found.positions) and math.isfinite(found.barrier):
        ends = [found.losses[found.positions.index(t)] for t in (0.0, 1.0)]
        drawn.plot([0, 1], ends, color="grey", linestyle="--", linewidth=1)
        drawn.set_title(f"barrier {found.barrier:.3g}", loc="left")


def _add_accuracy(drawn: Axes, found: Line) -> None:
    other = drawn.twinx()
    other.plot(found.positions, [100 * x for x in found.accuracies or ()], color=ORANGE, linestyle=(0, (5, 2)))
    other.set_ylabel("accuracy, %")
    other.set_ylim(-3, 103)
    for axis, colour, side in ((drawn, BLUE, "left"), (other, ORANGE, "right")):
        axis.yaxis.label.set_color(colour)
        axis.tick_params(axis="y", colors=colour)
        axis.spines["right"].set_visible(side == "right")
        axis.spines[side].set_color(colour)


def surface(found: Surface, where: Place, *, accuracy: bool = False, **look: Any) -> Axes:
    """Contours of the loss, or of the accuracy; the model itself is the dot in the middle."""
    import numpy
    from matplotlib.colors import LogNorm

    if accuracy and found.accuracies is None:
        raise ValueError("accuracy = True needs accuracies: pass a SplitLoss with correct_on")
    shares = found.accuracies or ()
    heights = numpy.array([[100 * x for x in row] for row in shares] if accuracy else found.losses)
    heights = numpy.ma.masked_invalid(heights)
    if heights.count() == 0:
        raise ValueError("there is no finite loss on this plane: choose a smaller reach")
    low, high = float(heights.min()), float(heights.max())
    is_log = not accuracy and low > 0 and high / low > SPAN
    levels: Any
    if high <= low:
        levels = [low - 1e-6, low + 1e-6]
    else:
        levels = (numpy.geomspace if is_log else numpy.linspace)(low, high, LEVELS)
    with axes(where, 4.4, 3.6) as drawn:
        options: dict[str, Any] = {"cmap": "viridis" if accuracy else "viridis_r", "levels": levels} | look
        filled = drawn.contourf(found.x, found.y, heights, norm=LogNorm(low, high) if is_log else None, **options)
        drawn.contour(found.x, found.y, heights, levels=levels, colors="black", linewidths=0.4, alpha=0.5)
        drawn.plot([0], [0], marker="o", color="white", markeredgecolor="black", markersize=5)
        ticks = [float(f"{x:.2g}") for x in levels[:: max(1, len(levels) // 5)]]
        bar = drawn.figure.colorbar(filled, ax=drawn, label="accuracy, %" if accuracy else "loss", ticks=ticks)
        bar.ax.minorticks_off()
        bar.ax.set_yticklabels([f"{t:g}" for t in ticks])
        drawn.set(xlabel=plain(found.labels[0]), ylabel=plain(found.labels[1]))
        drawn.set_aspect("equal")
    return drawn


def density(spectra: Mapping[str, Spectrum], where: Place, points: int = 400) -> Axes:
    """Spectral densities on a logarithmic scale, with the largest eigenvalues as marks on the axis."""
    runs = [x for spectrum in spectra.values() for run in spectrum.runs for x in run[0]]
    if not runs:
        raise ValueError("there is no spectral density to draw: measure with matrices=")
    margin = 0.05 * (max(runs) - min(runs)) or 1e-3
    low, high = min(runs) - margin, max(runs) + margin
    at = [low + (high - low) * i / (points - 1) for i in range(points)]
    with axes(where) as drawn:
        highest = 0.0
        for dashes, (name, spectrum) in zip(cycle(DASHES), spectra.items(), strict=False):
            heights = spectrum.density(at, width=(high - low) / 80)
            highest = max(highest, *heights)
            drawn.plot(at, heights, label=plain(name), linestyle=dashes)
        parameters = max(sum(run[1]) for spectrum in spectra.values() for run in spectrum.runs)
        # A single eigenvalue's bell is as high as this; a tenth of it is nothing.
        single = 80 / ((high - low) * math.sqrt(2 * math.pi) * parameters)
        drawn.set_yscale("log")
        drawn.set_ylim(single / 10, 3 * highest)
        for index, spectrum in enumerate(spectra.values()):
            colour = drawn.get_lines()[index].get_color()
            marks = list(spectrum.eigenvalues)
            drawn.plot(marks, [single / 10] * len(marks), "|", color=colour, markersize=12, clip_on=False)
        drawn.set(xlabel="eigenvalue", ylabel="density")
        if len(spectra) > 1 or "" not in spectra:
            drawn.legend()
    return drawn
