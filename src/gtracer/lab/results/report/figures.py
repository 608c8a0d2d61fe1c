"""The figures of a study, drawn once: for the eye as PNG and SVG, for the page also what each of their points is."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from gtracer.lab.results.statistics import Estimate, Result, Results
from gtracer.lab.sweeps.study import SYMBOLS

INK, GROUND = "#1d2129", "#ffffff"  # the page puts its own in their place
# Okabe and Ito's colours, which the colour-blind can tell apart, without the two that vanish on white or on black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c")
DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 2)),
    (0, (1.5, 1.5)),
    (0, (6, 2, 1.5, 2)),
    (0, (3, 1)),
    (0, (1, 3)),
    (0, (8, 4)),
)
MOST_LINES = 8
SPAN = 1.0  # per cent that an axis of curves covers, at the least
DECADE = 10  # ratio of two values from which on their axis is logarithmic
MOST_MATRICES = 4
BESIDE = 4  # classes, up to which two matrices have room beside each other
NUMBERED = 12  # classes of a matrix that has room for numbers
BINS = 15  # of calibration, as in the records
LONGEST_NAME = 14  # of a class, on an axis
LONGEST_LINE = 48  # across a figure
LONGEST_LABEL = 24  # beside a bar
STYLE: dict[str, Any] = {
    "figure.figsize": (4.9, 3.5),  # so many points as a telephone has for it: text has its size there
    "figure.constrained_layout.use": True,
    "font.size": 11,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "legend.fontsize": 11,
    "axes.titlesize": 11.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.alpha": 0.13,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "text.parse_math": False,  # a label may hold a dollar
    "path.simplify": False,  # the page counts on a vertex for every point
    "svg.fonttype": "none",
    "svg.hashsalt": "gtracer",
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), INK
    ),
    "figure.facecolor": GROUND,
    "axes.facecolor": "none",
}


@dataclass(frozen=True)
class Series:
    """A line in a figure: its name, and what is to be said of each of its vertices."""

    name: str
    points: list[str]


@dataclass
class Drawing:
    """A figure under way."""

    setting: str
    figure: Figure
    axes: Axes
    caption: str = ""
    series: list[Series] = field(default_factory=list)
    by: str = "both"  # the direction in which the page looks for the nearest point: both, or y alone
    is_made: bool = False  # without any series

    def line(self, name: str, x: Sequence[float], y: Sequence[float], points: list[str], **look: Any) -> None:
        """A line that the page can find again."""
        self.axes.plot(x, y, gid=f"series-{len(self.series)}", **look)
        self.series.append(Series(name, points))

    def saved(self, kind: str) -> bytes:
        out = io.BytesIO()
        metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # a label may have signs that matplotlib's font lacks
            self.figure.savefig(out, format=kind, dpi=200, metadata=metadata)
        return out.getvalue()


@dataclass(frozen=True)
class Picture:
    """A finished figure; in its SVG the series go by their places: series-0, series-1 and so on."""

    name: str  # of its files
    heading: str
    setting: str
    caption: str
    png: bytes
    svg: bytes
    series: list[Series]
    by: str


def pictures(results: Results) -> list[Picture]:
    """Every figure that the records have numbers for: kind by kind, in each the settings in the study's order."""
    made = []
    with style.context(["default", STYLE]):
        for kind, heading, draw in _kinds(results):
            for index, setting in enumerate(results.study.settings, 1):
                drawing = _blank(setting)
                draw(drawing, results)
                if drawing.series or drawing.is_made:
                    name = f"{kind}-{index}-{_slug(setting)}".rstrip("-") if len(results.study.settings) > 1 else kind
                    files = drawing.saved("png"), drawing.saved("svg")
                    made.append(Picture(name, heading, setting, drawing.caption, *files, drawing.series, drawing.by))
    return made


def _kinds(results: Results) -> Iterator[tuple[str, str, Callable[[Drawing, Results], None]]]:
    option = varied_option(results)
    if option is not None:
        yield (
            "varied",
            f"{_capital(results.metric)} against {SYMBOLS.get(option, option)}",
            partial(_draw_varied, option=option),
        )
    for name, heading, curve, label in CURVES:
        yield name, f"{heading} by epoch", partial(_draw_curves, curve=curve, label=label)
    yield "confusion", "Confusion", _draw_confusion
    yield "calibration", "Calibration", _draw_calibration
    yield "cost", "Time per epoch", _draw_cost


CURVES = (
    ("epochs", "Test accuracy", "test_accuracy", "test accuracy, %"),
    ("holdout", "Held-out accuracy", "holdout_accuracy", "held-out accuracy, %"),
    ("test-r2", "Test R²", "test_r2", "test R², %"),
    ("holdout-r2", "Held-out R²", "holdout_r2", "held-out R², %"),
    ("test-rmse", "Test RMSE", "test_rmse", "test RMSE"),
    ("memorised", "Memorised", "memorised", "memorised, %"),
    ("train-loss", "Training loss", "train_loss", "training loss"),
    ("test-loss", "Test loss", "test_loss", "test loss"),
    ("rho", "ρ", "rho", "ρ"),
    ("trace-ratio", "T", "trace_ratio", "T, trace ratio"),
)
ABOUT = {
    "train_loss": "Loss without penalty, before each step of an epoch",
    "test_loss": "Cross-entropy on test data",
    "holdout_accuracy": "Accuracy on held-out data, against labels as they are in training",
    "test_r2": "Share of the test labels' variance that predictions explain, below 0 where their mean would be better",
    "holdout_r2": "The same share on held-out data, against labels as they are in training",
    "test_rmse": "Root of the mean squared error on test data, in the labels' unit",
    "rho": "Strength of TRACER's penalty at the end of each epoch",
    "trace_ratio": "Trace ratio, of which TRACER adds ρ times to the loss",
}
ABOUT_NUMBERS = "Loss on test data, of labels scaled to mean 0 and deviation 1 in training"


def _blank(setting: str) -> Drawing:
    figure = Figure()
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_title(_plain(setting, LONGEST_LINE))
    return Drawing(setting, figure, axes)


def varied_option(results: Results) -> str | None:
    """The option that the study varies, where it is one alone and a number."""
    options = {name for result in results.all for name, _ in result.point.varied}
    if len(options) != 1:
        return None
    (option,) = options
    values = [getattr(r.point.config, option) for r in results.all if r.point.varied]
    return option if all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values) else None


def _draw_varied(drawing: Drawing, results: Results, option: str) -> None:
    """Points with error bars where the option is varied, level lines where it is not."""
    there = [r for r in results.within(drawing.setting) if r.accuracy is not None]
    symbol = SYMBOLS.get(option, option)
    values = sorted({float(getattr(r.point.config, option)) for r in there if r.point.varied})
    if not values:
        return
    _scale(drawing.axes, values)
    for method, index in _methods(results).items():
        mine = [r for r in there if r.point.method == method]
        colour = COLOURS[index % len(COLOURS)]
        if any(r.point.varied for r in mine):
            pairs = [(float(getattr(r.point.config, option)), r.accuracy) for r in mine if r.accuracy]
            _draw_points(drawing, method, sorted(pairs, key=lambda pair: pair[0]), symbol, colour)
        for level in (r.accuracy for r in mine if not r.point.varied and r.accuracy):
            _draw_level(drawing, method, values, level, colour)
    drawing.axes.set(xlabel=symbol, ylabel=f"test {results.metric}, %")
    drawing.caption = f"Test {results.metric} at the last epoch against {symbol}; bars and bands: ± standard error."
    _legend(drawing)


def _scale(axes: Axes, values: list[float]) -> None:
    """A logarithmic axis where the values span a decade."""
    low, high = values[0], values[-1]
    if low > 0 and high / low >= DECADE:
        axes.set_xscale("log")
        steps = (1.0,) if high / low > 300 else (1.0, 2.0, 5.0)
        axes.xaxis.set_major_locator(LogLocator(subs=steps))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        margin = (high / low) ** 0.06
        axes.set_xlim(low / margin, high * margin)
    else:
        margin = (high - low) * 0.06 or abs(high) * 0.5 or 1.0
        axes.set_xlim(low - margin, high + margin)


def _draw_points(drawing: Drawing, name: str, pairs: list[tuple[float, Estimate]], symbol: str, colour: str) -> None:
    x, estimates = [value for value, _ in pairs], [estimate for _, estimate in pairs]
    y = [estimate.mean for estimate in estimates]
    points = [f"{symbol} {value:g}: {_said(estimate)}" for value, estimate in pairs]
    drawing.line(name, x, y, points, color=colour, marker="o")
    bars = [(value, e.mean, e.error) for value, e in pairs if e.error is not None]
    if bars:
        where, means, errors = zip(*bars, strict=True)
        drawing.axes.errorbar(where, means, errors, fmt="none", ecolor=colour, elinewidth=1.4, capsize=2.5)


def _draw_level(drawing: Drawing, name: str, values: list[float], level: Estimate, colour: str) -> None:
    low, high = drawing.axes.get_xlim()
    x = [low, *values, high]
    drawing.line(name, x, [level.mean] * len(x), [_said(level)] * len(x), color=colour, linestyle=DASHES[1])
    if level.error is not None:
        ends = (level.mean - level.error, level.mean + level.error)
        drawing.axes.axhspan(*ends, color=colour, alpha=0.14, linewidth=0)


def _draw_curves(drawing: Drawing, results: Results, curve: str, label: str) -> None:
    """The mean over seeds by epoch, in a band of its standard error."""
    within = [r for r in results.within(drawing.setting) if any(r.curves.get(curve) for r in _runs(r))]
    if curve == "rho":  # SAM's is a radius, and stays as it is
        within = [r for r in within if r.is_tracer]
    chosen = shown(within)
    in_percent = label.endswith("%")
    factor, in_words = (100, _said) if in_percent else (1, _number)
    in_decades = not in_percent and _spans_decade(
        [v for r in chosen for x in _runs(r) for v in x.curves.get(curve, [])]
    )
    for result, look in _looks(chosen, results):
        runs = [r.curves[curve] for r in _runs(result) if r.curves.get(curve)]
        means = [Estimate.of([factor * share for share in shares]) for shares in zip(*runs, strict=False)]
        epochs = [
            (epoch, e) for epoch, e in enumerate(means, 1) if math.isfinite(e.mean) and (e.mean or not in_decades)
        ]
        if not epochs:
            continue
        x, y = [epoch for epoch, _ in epochs], [e.mean for _, e in epochs]
        points = [f"epoch {epoch}: {in_words(e)}" for epoch, e in epochs]
        name = result.point.label if result.finished else f"{result.point.label} ({result.state})"
        drawing.line(name, x, y, points, marker="o" if len(x) == 1 else None, **look)
        spread = [e.error or 0.0 for _, e in epochs]
        if any(spread):
            below, above = ([m + sign * s for m, s in zip(y, spread, strict=True)] for sign in (-1, 1))
            if in_decades:  # where there is no room for less than nothing
                below = [max(m - s, m / DECADE) for m, s in zip(y, spread, strict=True)]
            drawing.axes.fill_between(x, below, above, color=look["color"], alpha=0.16, linewidth=0)
    drawing.axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if in_percent:
        bottom, top = drawing.axes.get_ylim()
        if top - bottom < SPAN:  # a difference that nobody could measure is not to look like one
            bottom, top = (bottom + top - SPAN) / 2, (bottom + top + SPAN) / 2
        drawing.axes.set_ylim(bottom, min(top, 100 + SPAN / 2))
    else:
        drawing.axes.set_yscale("log" if in_decades else "linear")
        drawing.axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        drawing.axes.yaxis.set_minor_formatter(NullFormatter())
    drawing.axes.set(xlabel="epoch", ylabel=label)
    several = any(len(_runs(result)) > 1 for result in chosen)
    of = "mean over seeds, in a band of ± standard error" if several else "one run each"
    about = ABOUT.get(curve, _capital(label.removesuffix(", %")))
    if curve == "test_loss" and any(r.metrics - {"accuracy"} for r in within):
        about = ABOUT_NUMBERS
    drawing.caption = f"{about}: {of}."
    _finish(drawing, within, chosen)
    _legend(drawing)


def _spans_decade(values: list[float]) -> bool:
    """Whether an axis for these is to be logarithmic; zeros, such as of a ρ that has not begun, are then left out."""
    there = [value for value in values if value > 0]
    return bool(there) and min(values) >= 0 and max(there) / min(there) >= DECADE


def _draw_confusion(drawing: Drawing, results: Results) -> None:
    """A matrix for each method: the share of each class that was taken for another, over all finished runs."""
    found = {id(r): _summed(r) for r in results.within(drawing.setting)}
    within = [r for r in results.within(drawing.setting) if found[id(r)] is not None]
    chosen = sorted(shown(within), key=_height, reverse=True)[:MOST_MATRICES]
    if not chosen:
        return
    figure, columns = drawing.figure, min(2, len(chosen))
    if any(len(names) > BESIDE for names, _ in filter(None, found.values())):
        columns = 1
    rows = math.ceil(len(chosen) / columns)
    figure.clear()
    figure.suptitle(_plain(drawing.setting, LONGEST_LINE), x=0.01, ha="left", fontsize=STYLE["axes.titlesize"])
    for place, result in enumerate(chosen):
        axes = figure.add_subplot(rows, columns, place + 1)
        names, counts = found[id(result)] or ([], [])
        _draw_matrix(axes, [_plain(name, LONGEST_NAME) for name in names], counts)
        axes.set_title(_plain(result.point.label, LONGEST_LABEL))
        axes.set(xlabel="predicted", ylabel="label" if place % columns == 0 else "")
    figure.set_figheight(0.4 + rows * (2.7 if columns == 2 else 4.6))
    drawing.is_made = True
    drawing.caption = "Each label's test examples by the class that the last epoch's model gives them, in %; all runs."
    if len(chosen) < len(results.within(drawing.setting)):
        drawing.caption += f" Of {len(results.within(drawing.setting))} variants, the best {len(chosen)} by accuracy."


def _summed(result: Result) -> tuple[list[str], list[list[int]]] | None:
    """The matrices of a method's runs, added up; none where they have none, or one of other classes."""
    evaluations = [r.evaluation for r in result.finished if r.evaluation.get("confusion")]
    if not evaluations or any(each.get("classes") != evaluations[0].get("classes") for each in evaluations):
        return None
    names, matrices = evaluations[0].get("classes") or [], [each["confusion"] for each in evaluations]
    if any(len(matrix) != len(names) or {*map(len, matrix)} != {len(names)} for matrix in matrices):
        return None
    rows = zip(*matrices, strict=True)
    return names, [[sum(cells) for cells in zip(*row, strict=True)] for row in rows]


def _draw_matrix(axes: Axes, names: list[str], counts: list[list[int]]) -> None:
    """As cells of one ink, the darker the more; in numbers where there is room."""
    shares = [[n / max(1, sum(row)) for n in row] for row in counts]
    size = len(names)
    axes.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5), aspect="equal")
    axes.grid(visible=False)
    for row, line in enumerate(shares):
        for column, share in enumerate(line):
            if counts[row][column]:
                ink = COLOURS[0] if row == column else COLOURS[1]
                axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, color=ink, alpha=0.08 + 0.62 * share, lw=0))
                if size <= NUMBERED:
                    text = f"{100 * share:.0f}" if share >= 0.005 else "<1"
                    axes.text(column, row, text, ha="center", va="center")
    turned = 90 if max(map(len, names)) > 2 else 0
    axes.set_xticks(range(size), names, rotation=turned)
    axes.set_yticks(range(size), names)
    axes.tick_params(length=0)


def _draw_calibration(drawing: Drawing, results: Results) -> None:
    """How often a prediction is right against how sure the model was of it."""
    within = [r for r in results.within(drawing.setting) if any(x.evaluation.get("bins") for x in r.finished)]
    chosen = shown(within)
    if not chosen:
        return
    drawing.axes.plot([0, 100], [0, 100], color=INK, alpha=0.35, linewidth=1, linestyle=DASHES[2])
    for result, look in _looks(chosen, results):
        bins = _pooled([bins for r in result.finished for bins in r.evaluation.get("bins", [])])
        total = sum(n for n, _, _ in bins)
        error = sum(n * abs(right - sure) for n, sure, right in bins) / total
        name = f"{result.point.label}: error {100 * error:.1f} %"
        points = [f"{100 * sure:.0f} % sure: {100 * right:.1f} % right of {n:g}" for n, sure, right in bins]
        x, y = [100 * sure for _, sure, _ in bins], [100 * right for _, _, right in bins]
        drawing.line(name, x, y, points, marker="o", **look)
    drawing.axes.set(xlabel="how sure the model is, %", ylabel="right, %", xlim=(-2, 102), ylim=(-2, 102))
    drawing.caption = (
        "Predictions for the test data, in bins by how probable the last epoch's model finds them; all runs. On the "
        "dotted line it is as often right as it is sure. Error: the mean distance from it (expected calibration error)."
    )
    _finish(drawing, within, chosen)
    _legend(drawing)


def _pooled(bins: list[list[float]]) -> list[tuple[float, float, float]]:
    """Those of several runs in one, from the least sure to the surest."""
    made: dict[int, tuple[float, float, float]] = {}
    for n, sure, right in bins:
        place = min(BINS - 1, int(sure * BINS))
        total, sures, rights = made.get(place, (0.0, 0.0, 0.0))
        made[place] = (total + n, sures + n * sure, rights + n * right)
    return [(n, sures / n, rights / n) for _, (n, sures, rights) in sorted(made.items()) if n]


def _draw_cost(drawing: Drawing, results: Results) -> None:
    """A bar for each method, with its factor to the first."""
    within = [r for r in results.within(drawing.setting) if r.seconds is not None]
    chosen = shown(within)
    for place, (result, look) in enumerate(_looks(chosen, results)):
        seconds, cost = result.seconds or 0.0, results.relative_cost(result)
        text = f"{seconds:.3g} s" if cost is None else f"{seconds:.3g} s, {cost:.2f}×"
        drawing.axes.barh(place, seconds, color=look["color"], height=0.62)
        drawing.axes.annotate(text, (seconds, place), (5, 0), textcoords="offset points", va="center")
        drawing.line(result.point.label, [seconds], [place], [text], color=look["color"], alpha=0)
    drawing.axes.set_yticks(range(len(chosen)), [_plain(r.point.label, LONGEST_LABEL) for r in chosen])
    drawing.axes.invert_yaxis()
    drawing.axes.grid(visible=False, axis="y")
    drawing.axes.spines["left"].set_visible(False)
    drawing.axes.tick_params(axis="y", length=0)
    drawing.axes.set_xmargin(0.3)
    drawing.axes.set(xlabel="seconds per epoch")
    drawing.figure.set_figheight(1.1 + 0.42 * max(1, len(chosen)))
    drawing.by = "y"
    drawing.caption = "Median over all epochs of the finished runs; after it, the factor to the first method's."
    _finish(drawing, within, chosen)


def _runs(result: Result) -> Sequence[Any]:
    """Finished runs; where there is none, as far as the others came."""
    return result.finished or result.records


def shown(within: list[Result]) -> list[Result]:
    """All of a setting's results, or where they are too many each method's best variant."""
    if len(within) <= MOST_LINES:
        return within
    best: dict[str, Result] = {}
    for result in within:
        rival = best.get(result.point.method)
        if rival is None or _height(result) > _height(rival):
            best[result.point.method] = result
    return list(best.values())


def _height(result: Result) -> float:
    return result.accuracy.mean if result.accuracy else -math.inf


def _finish(drawing: Drawing, within: list[Result], chosen: list[Result]) -> None:
    if len(chosen) < len(within):
        drawing.caption += f" Of {len(within)} variants, each method's best by its mean at the last epoch is shown."


def _looks(chosen: list[Result], results: Results) -> Iterator[tuple[Result, dict[str, Any]]]:
    """A method's colour is its own in all figures; its variants differ in their dashes."""
    methods = _methods(results)
    variants: dict[str, int] = {}
    for result in chosen:
        turn = variants[result.point.method] = variants.get(result.point.method, -1) + 1
        index = methods[result.point.method]
        dashes = DASHES[(turn + index // len(COLOURS)) % len(DASHES)]
        yield result, {"color": COLOURS[index % len(COLOURS)], "linestyle": dashes}


def _methods(results: Results) -> dict[str, int]:
    return {method: index for index, method in enumerate(results.study.methods)}


def _legend(drawing: Drawing) -> None:
    names = [_plain(series.name, LONGEST_LINE - 6) for series in drawing.series]
    if not names:
        return
    columns = max(1, min(len(names), LONGEST_LINE // (max(map(len, names)) + 6)))
    drawing.figure.set_figheight(3.3 + 0.22 * math.ceil(len(names) / columns))
    handles = [line for line in drawing.axes.get_lines() if str(line.get_gid()).startswith("series-")]
    # With names in the call, matplotlib would leave out those that begin with an underscore.
    legend = drawing.figure.legend(handles, ["x"] * len(names), loc="outside lower left", ncols=columns)
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(name)


def _said(estimate: Estimate) -> str:
    return f"{estimate} %"


def _number(estimate: Estimate) -> str:
    """Of a loss, ρ or T, which may be of any size."""
    error = "" if estimate.error is None else f" ± {estimate.error:.2g}"
    return f"{estimate.mean:.3g}{error}"


def _plain(text: str, most: int) -> str:
    """One line without control characters, which SVG cannot hold, and not too long."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= most else line[: most - 1] + "…"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
