"""A step of SGD-TRACER in the plane, drawn: where its second pass looks, and where it goes instead of SGD.

    python studies/step.py --out docs/figures/step.svg

The loss is a valley that is steep at the top and wide at the bottom, L = ½ exp(2y) x² + y²/20. All arrows are what the
optimiser computes there.
"""

import argparse
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure

import gtracer
from gtracer.sharpness.picture import BLUE, ORANGE, STYLE

START = (0.55, 0.5)
RADIUS, LR, RHO = 0.25, 0.22, 0.06
COLOURS = {"SGD": BLUE, "second": "#8c8c8c", "TRACER": ORANGE}


def loss_at(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Steeper across the higher up."""
    return torch.exp(2 * y) * x**2 / 2 + y**2 / 20


def step(rho: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Where a step ends, and the weights at which gradients were taken on the way."""
    w = torch.nn.Parameter(torch.tensor(START, dtype=torch.float64))
    seen = []

    def closure() -> torch.Tensor:
        seen.append(w.detach().clone())
        return loss_at(*w)

    engine = gtracer.FiniteDifference(radius=RADIUS)
    gtracer.SGDTracer([w], lr=LR, rho=rho, delta=1.0, f0=0.0, engine=engine).step(closure)
    return w.detach(), seen


def draw() -> Figure:
    """The valley's contours, the two passes, and both steps."""
    figure = Figure(figsize=(4.9, 3.9), layout="constrained")
    axes = figure.add_subplot()
    x, y = torch.meshgrid(
        torch.linspace(-0.9, 1.1, 141).double(), torch.linspace(-0.45, 0.85, 86).double(), indexing="xy"
    )
    levels = [0.01, 0.03, 0.08, 0.2, 0.4, 0.7, 1.1, 1.6, 2.2, 3.0]
    axes.contour(x, y, loss_at(x, y), levels=levels, colors="#c8c8c8", linewidths=0.8)
    plain, _ = step(0.0)
    ours, (start, displaced) = step(RHO)
    arrow(axes, start, displaced, COLOURS["second"], "second pass: the gradient at w + εu", dashes="dashed")
    arrow(axes, start, plain, COLOURS["SGD"], "SGD: −α∇L")
    arrow(axes, start, ours, COLOURS["TRACER"], "TRACER: −α(∇L + ρ∇T)")
    axes.plot(*start, "ko", markersize=5)
    axes.annotate("w", start, xytext=(6, -12), textcoords="offset points")
    axes.plot(*displaced, "o", color=COLOURS["second"], markersize=5)
    axes.set(xlabel="across the valley", ylabel="steep above, wide below", xticks=[], yticks=[])
    axes.legend(loc="lower left", frameon=False)
    return figure


def arrow(axes, start, end, colour, label, dashes="solid") -> None:
    """With a line of its own, for the legend."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.8, "linestyle": dashes})
    axes.plot([], [], color=colour, lw=1.8, linestyle=dashes, label=label)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("docs/figures/step.svg"), metavar="FILE")
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": "gtracer", "font.size": 11}):
        draw().savefig(options.parse_args().out, metadata={"Date": None, "Creator": None})
