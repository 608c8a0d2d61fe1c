"""The figures of docs/results that no report draws, from the records.

    python studies/result_figures.py --out docs/figures

cifar100.svg and superglue.svg: accuracies of Tables 1, 2 and 3. label-errors-area.svg: the areas under the ROC of
studies/label_errors.py. depths.svg: how ρ carries over, by studies/depths.py. speed.svg: the time of a step, by
records/bench.
"""

import argparse
import json
import statistics
from collections.abc import Iterable
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from gtracer.lab.results import statistics as results
from gtracer.lab.results.report.figures import COLOURS, STYLE
from gtracer.lab.results.statistics import Estimate, Result
from gtracer.lab.sweeps.study import load

RECORDS = Path(__file__).parents[1] / "records"
BLUE, ORANGE, GREEN, PINK = COLOURS[:4]
METHODS = {"SGD": BLUE, "Adam": BLUE, "SAM": ORANGE, "SGD-TRACER": GREEN, "Adam-TRACER": GREEN}
VISION = ["SGD", "SAM", "SGD-TRACER"]
CIFAR = {  # by study: its settings, as an axis has room for them
    "table1": {None: "50% noise,\nno decay"},
    "table2": {
        "50% label noise, no augmentation": "50% noise",
        "no augmentation": "clean",
        "augmentation": "clean,\naugmented",
    },
}
JUDGES = {"SGD": BLUE, "SGD, 5 folds": ORANGE, "TRACER": PINK, "TRACER, ρ tuned": GREEN}
PROBLEMS = {"digits": "digits", "a tenth of Fashion-MNIST": "Fashion-MNIST", "cifar100": "CIFAR-100"}
STEPS = {  # file of records/bench: what an axis has room for
    "steps-wrn-28-10-h200": "WRN-28-10",
    "steps-encoder-110m-back-to-back-h200": "encoder, 110M",
    "steps-resnet20-back-to-back-h200": "ResNet-20",
    "steps-cnn-cpu": "small net, CPU",
    "steps-resnet20-cpu": "ResNet-20, CPU",
}
TIMED = {"SAM of pytorch_optimizer": ORANGE, "SGD-TRACER": GREEN, "AdamW-TRACER": PINK}
APART = 0.2  # of what lies between two rows: methods within one


def cifar100() -> Figure:
    """Accuracy of the three methods in each setting; a ring is the paper's."""
    rows = [
        (short, result)
        for study, settings in CIFAR.items()
        for setting, short in settings.items()
        for result in _found(study, f"cifar100/{study}")
        if setting in (None, result.point.setting)
    ]
    places = {short: place for place, short in enumerate(dict.fromkeys(short for short, _ in rows))}
    figure, axes = _blank(places, "test accuracy at the last epoch, %", 3.6)
    for short, result in rows:
        place = places[short] + APART * (VISION.index(result.point.method) - 1)
        colour = METHODS[result.point.method]
        _point(axes, result.accuracy, place, colour)
        if result.paper is not None:
            axes.plot(result.paper[0], place, "o", markerfacecolor="none", markeredgecolor=colour, alpha=0.8)
    _legend(figure, {name: METHODS[name] for name in VISION}, ring="the paper's")
    return figure


def superglue() -> Figure:
    """What SAM and Adam-TRACER gain over Adam with the same seeds, for each encoder and setting."""
    gains = {}
    for encoder in ("MiniLM", "mpnet"):
        study = f"table3-{encoder.lower()}"
        found = _found(study, f"superglue/{study}")
        base = {result.point.setting: result.by_seed() for result in found if result.point.method == "Adam"}
        for result in found:
            if result.point.method != "Adam":
                name = f"{encoder}: {_short(result.point.setting)}"
                gains.setdefault(name, {})[result.point.method] = _beside(result, base[result.point.setting])
    figure, axes = _blank(gains, "points above Adam, same seeds", 5.2)
    axes.axvline(0, color=STYLE["axes.edgecolor"], linewidth=1)
    for place, methods in enumerate(gains.values()):
        for offset, (method, gain) in zip((-0.5, 0.5), methods.items(), strict=True):
            _point(axes, gain, place + APART * offset, METHODS[method])
    _legend(figure, {name: METHODS[name] for name in ("SAM", "Adam-TRACER")})
    return figure


def label_errors() -> Figure:
    """The area under the ROC of each judge on each problem."""
    rows = [json.loads(line) for line in (RECORDS / "label-errors" / "rows.jsonl").read_text().splitlines()]
    cells = {}
    for row in rows:
        if row["judge"] in JUDGES:
            cell = cells.setdefault(f"{PROBLEMS[row['problem']]}, {row['noise']:.0%}", {})
            cell.setdefault(row["judge"], []).append(row["auc"])
    figure, axes = _blank(cells, "area under the ROC", 3.9)
    for place, cell in enumerate(cells.values()):
        for offset, (judge, colour) in enumerate(JUDGES.items()):
            if judge in cell:
                _point(axes, Estimate.of(cell[judge]), place + APART * (offset - 1.5), colour)
    _legend(figure, {name if name != "TRACER" else "TRACER, ρ auto": colour for name, colour in JUDGES.items()})
    return figure


def depths() -> Figure:
    """What ρ gives where it was tuned, and rings where it is used with another number of layers."""
    found = json.loads((RECORDS / "depths" / "result.json").read_text())["accuracy"]
    layers = (2, 3, 4, 5)
    figure, axes = _blank([f"{used} layers" for used in layers], "test accuracy at the last epoch, %", 3.4)
    for place, used in enumerate(layers):
        for offset, (key, name) in zip((-0.5, 0.5), {"sam": "SAM", "sgd-tracer": "SGD-TRACER"}.items(), strict=True):
            for tuned in layers:
                accuracy = Estimate.of([100 * share for share in found[f"{key} tuned {tuned} used {used}"]])
                inside = {} if tuned == used else {"markerfacecolor": "none"}
                _point(axes, accuracy, place + APART * offset, METHODS[name], **inside)
    _legend(figure, {name: METHODS[name] for name in ("SAM", "SGD-TRACER")}, ring="ρ of another depth")
    return figure


def speed() -> Figure:
    """Medians of the rounds over the base optimiser's, with quartiles; a step alone and as a CUDA graph."""
    rows = {}
    for file, name in STEPS.items():
        bench = json.loads((RECORDS / "bench" / f"{file}.json").read_text())
        for seconds, row in ((bench["seconds"], name), (bench.get("graphs"), f"{name}, graph")):
            if seconds:
                rows[row] = {
                    method: [second / statistics.median(seconds[bench["over"][method]]) for second in seconds[method]]
                    for method in TIMED
                    if method in seconds
                }
    figure, axes = _blank(rows, "step time ÷ the base optimiser's", 4.3)
    axes.axvline(2, color=STYLE["axes.edgecolor"], linewidth=1)
    for place, methods in enumerate(rows.values()):
        for offset, (method, colour) in enumerate(TIMED.items(), -1):
            if method in methods:
                low, _, high = statistics.quantiles(methods[method], n=4, method="inclusive")
                axes.plot([low, high], [place + APART * offset] * 2, color=colour, linewidth=1.4)
                axes.plot(statistics.median(methods[method]), place + APART * offset, "o", color=colour)
    _legend(figure, TIMED)
    return figure


def _found(study: str, records: str) -> list[Result]:
    return results.read(RECORDS / f"{records}.jsonl.xz", load(study))[0].all


def _short(setting: str) -> str:
    replaced = {"half of the labels drawn at random": "noise", "a tenth of the data": "a tenth"}
    for long, short in replaced.items():
        setting = setting.replace(long, short)
    return setting


def _beside(result: Result, base: dict[int, float]) -> Estimate:
    return Estimate.of([value - base[seed] for seed, value in result.by_seed().items() if seed in base])


def _blank(names: Iterable[str], label: str, height: float) -> tuple[Figure, Axes]:
    """Rows from top to bottom."""
    names = list(names)
    figure = Figure(figsize=(STYLE["figure.figsize"][0], height))
    FigureCanvasSVG(figure)
    axes = figure.add_subplot(xlabel=label, ylim=(len(names) - 0.5, -0.5))
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    return figure, axes


def _point(axes: Axes, estimate: Estimate | None, place: float, colour: str, **look: str) -> None:
    assert estimate is not None
    axes.errorbar(estimate.mean, place, xerr=estimate.error, fmt="o", color=colour, elinewidth=1.4, **look)


def _legend(figure: Figure, colours: dict[str, str], ring: str | None = None) -> None:
    axes = figure.axes[0]
    handles = [axes.plot([], [], "o", color=colour, label=name)[0] for name, colour in colours.items()]
    if ring is not None:
        handles += axes.plot([], [], "o", markerfacecolor="none", markeredgecolor="black", label=ring)
    figure.legend(handles=handles, loc="outside lower left", ncols=2)


FIGURES = {
    "cifar100": cifar100,
    "superglue": superglue,
    "label-errors-area": label_errors,
    "depths": depths,
    "speed": speed,
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("docs/figures"), metavar="DIR")
    asked = options.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    with matplotlib.style.context(["default", STYLE]):
        for name, draw in FIGURES.items():
            draw().savefig(asked.out / f"{name}.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
