"""The report: its numbers against independent ones, its files against kept ones, its refusals in one line.

The kept files in tests/golden/ are written anew by GTRACER_GOLDEN=write pytest tests/lab/results/test_report.py;
look at the difference before it is committed.
"""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from gtracer.cli import main
from gtracer.lab.errors import LabError
from gtracer.lab.results import report, summary
from gtracer.lab.results.record import Record
from gtracer.lab.results.report import figures
from gtracer.lab.results.report.svg import inlined
from gtracer.lab.results.report.tables import Table
from gtracer.lab.results.statistics import TEST, read
from gtracer.lab.sweeps.study import Study
from support.places import TESTS
from support.records import HOSTILE, damage, detailed, fill, numbers, small, varied

GOLDEN = TESTS / "golden"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The small study's report."""
    runs = tmp_path_factory.mktemp("runs")
    small(runs)
    return report.write(runs, runs / "report").parent


def kept(name, text):
    path = GOLDEN / name
    if os.environ.get("GTRACER_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"not as in {path}: see this file's first lines"


@pytest.mark.parametrize("kind", ["md", "tex", "csv"])
def test_tables_are_as_kept(written, kind):
    kept(f"results.{kind}", (written / "tables" / f"results.{kind}").read_text(encoding="utf-8"))


def test_page_is_as_kept(written):
    """But for the drawings, which differ with matplotlib's version."""
    page = (written / "index.html").read_text(encoding="utf-8")
    kept("index.html", re.sub(r'(<svg [^>]*class="chart"[^>]*>).*?</svg>', r"\1</svg>", page, flags=re.DOTALL))


def test_same_records_make_the_same_bytes(written, tmp_path):
    shutil.copytree(written.parent, tmp_path / "runs", ignore=shutil.ignore_patterns("report"))
    again = report.write(tmp_path / "runs", tmp_path / "runs" / "report").parent
    for path in (p for p in written.rglob("*") if p.is_file()):
        assert path.read_bytes() == (again / path.relative_to(written)).read_bytes(), path


def rows_of(written):
    lines = (written / "tables" / "results.csv").read_text(encoding="utf-8").splitlines()
    return {(row["setting"], row["method"]): row for row in csv.DictReader(lines)}


def test_numbers_are_numpys_and_scipys(written):
    """From the records' files to the table's cells, by another way."""
    rows = rows_of(written)
    of = {}
    for path in sorted(written.parent.rglob("record.json")):  # by seed
        run = json.loads(path.read_text())
        if run["finished"]:
            key = (run["config"]["label_noise"], run["config"]["optimizer"])
            of.setdefault(key, []).append(run["curves"])
    sgd, tracer = (100 * np.array([c["test_accuracy"] for c in of[0.5, name]]) for name in ("sgd", "sgd-tracer"))
    row = rows["half wrong", "SGD-TRACER"]
    assert float(row["last"]) == pytest.approx(tracer[:, -1].mean())
    assert float(row["last_error"]) == pytest.approx(stats.sem(tracer[:, -1]))
    assert float(row["last_deviation"]) == pytest.approx(tracer[:, -1].std(ddof=1))
    assert float(row["best"]) == pytest.approx(tracer.max(1).mean())
    assert float(row["best_error"]) == pytest.approx(stats.sem(tracer.max(1)))
    assert float(row["difference"]) == pytest.approx(tracer[:, -1].mean() - sgd[:, -1].mean())
    assert float(row["p"]) == pytest.approx(stats.ttest_rel(tracer[:, -1], sgd[:, -1]).pvalue)
    assert row["against"] == "SGD"
    memorised = 100 * np.array([c["memorised"] for c in of[0.5, "sgd-tracer"]])[:, -1]
    assert float(row["memorised"]) == pytest.approx(memorised.mean())
    assert float(row["memorised_error"]) == pytest.approx(stats.sem(memorised))
    assert [float(row[key]) for key in ("paper", "paper_error")] == [51.62, 0.18]
    assert float(row["relative_cost"]) == pytest.approx(
        float(row["seconds"]) / float(rows["half wrong", "SGD"]["seconds"])
    )


def test_a_cell_says_what_was_not_run(written):
    rows = rows_of(written)
    assert rows["half wrong", HOSTILE]["state"] == "not run"
    assert rows["half wrong", HOSTILE]["last"] == ""
    assert rows["clean", "SGD-TRACER"]["state"] == "1 of 3 diverged"
    assert rows["clean", "SGD-TRACER"]["n"] == "2"
    markdown = (written / "tables" / "results.md").read_text(encoding="utf-8").splitlines()
    assert any("not run" in line and "alert" in line for line in markdown)
    assert any("1 of 3 diverged" in line and "SGD-TRACER" in line for line in markdown)
    assert any(TEST in line for line in markdown)


def test_a_row_says_with_which_kernels_where_they_differ(tmp_path):
    """Others draw other dropout masks: the pairs of a comparison then share less than a seed."""
    small(tmp_path)
    for path in tmp_path.rglob("record.json"):
        run = json.loads(path.read_text())
        if run["config"]["optimizer"] == "sgd-tracer" and run["config"]["label_noise"] == 0.0:
            run["config"]["kernels"] = "compiled"
            path.write_text(json.dumps(run))
    rows = rows_of(report.write(tmp_path, tmp_path / "report").parent)
    assert rows["clean", "SGD-TRACER"]["state"] == "1 of 3 diverged, kernels compiled"
    assert rows["clean", "SGD"]["state"] == "kernels torch"
    assert rows["half wrong", "SGD-TRACER"]["state"] == ""
    assert rows["half wrong", HOSTILE]["state"] == "not run"
    printed = Console(width=200)
    with printed.capture() as seen:
        printed.print(summary.table(read(tmp_path)[0]))
    assert sorted(re.findall(r"kernels (\w+)", seen.get())) == ["compiled", "torch", "torch"]


def test_columns_without_a_number_are_left_out(tmp_path):
    fill(
        Study.from_mapping({"title": "one", "base": {"epochs": 2}, "methods": {"SGD": {"optimizer": "sgd"}}}), tmp_path
    )
    headings = [column.heading for column in Table(read(tmp_path)[0]).columns]
    assert headings == ["Method", "n", "Last epoch, %", "Best epoch, %", "Seconds per epoch", "Relative cost"]


def test_a_page_of_real_numbers_speaks_of_r2_alone(tmp_path):
    """In its sentences, notes, captions and runs; held-out RMSE chooses the epoch."""
    numbers(tmp_path)
    page = report.write(tmp_path, tmp_path / "report")
    text = re.sub(r"<style>.*?</style>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert not re.search("accuracy|entropy", text, re.IGNORECASE)
    assert (
        "SGD-TRACER is best by held-out data, with R² of 81.0 ± 1.0 % on test data at each run&#39;s best epoch by it, "
        "10.0 points above SGD" in text
    )
    assert "Last epoch: R² on the test set" in text
    assert "50 test examples: a single outlier can move R² by points." in text
    assert "72.0" in re.findall(r'<td class="number">([\d.]+)</td><td>3 epochs</td>', text)
    assert {p.stem for p in (tmp_path / "report" / "figures").glob("*.svg")} == {
        *("test-r2", "holdout-r2", "test-rmse", "test-loss", "cost")
    }
    row = rows_of(page.parent)["", "SGD-TRACER"]
    assert [float(row[key]) for key in ("last", "by_held_out", "best")] == [71.0, 81.0, 81.0]
    printed = Console(width=200)
    with printed.capture() as seen:
        printed.print(summary.table(read(tmp_path)[0]))
    assert "R² on test data in %" in seen.get()


def test_figures_are_png_and_svg(written):
    names = {path.stem for path in (written / "figures").iterdir()}
    assert names == {
        "epochs-1-clean",
        "epochs-2-half-wrong",
        "memorised-2-half-wrong",
        "cost-1-clean",
        "cost-2-half-wrong",
    }
    for name in names:
        assert (written / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        root = ElementTree.parse(written / "figures" / f"{name}.svg").getroot()
        assert root.tag == f"{SVG}svg"


def test_vertices_are_the_data(tmp_path):
    """A line's path in the SVG is the data under an affine map; under a logarithm where the axis has one."""
    study = varied(tmp_path)
    results, _ = read(tmp_path)
    pictures = {picture.name: picture for picture in figures.pictures(results)}
    sam = [r for r in results.all if r.point.method == "SAM"]
    x = np.log([r.point.config.rho for r in sam])
    y = np.array([r.accuracy.mean for r in sam])
    assert_affine(vertices(pictures["varied"], "SAM"), x, y)
    chosen = max(sam, key=lambda r: r.accuracy.mean)
    curves = np.array([r.curves["test_accuracy"] for r in chosen.records])
    assert_affine(
        vertices(pictures["epochs"], chosen.point.label),
        np.arange(1, study.points()[0].config.epochs + 1),
        100 * curves.mean(0),
    )


def test_losses_rho_and_t_have_axes_of_their_own(tmp_path):
    """Where they span a decade, of powers; a ρ of 0 is not on it."""
    detailed(tmp_path)
    made = {picture.name: picture for picture in figures.pictures(read(tmp_path)[0])}
    assert_affine(vertices(made["train-loss"], "SGD"), np.arange(4), 2.3 / (1 + np.arange(4)))
    assert_affine(vertices(made["test-loss"], "SGD"), np.arange(4), np.log(2.0 / (1 + 20 * np.arange(4))))
    assert_affine(vertices(made["rho"], "SGD-TRACER"), np.arange(3), np.log([1e-5, 1e-4, 2e-3]))
    assert_affine(vertices(made["trace-ratio"], "SGD-TRACER"), np.arange(4), np.log([100, 10, 5, 4.5]))
    assert made["rho"].series[0].points == ["epoch 2: 1e-05 ± 0", "epoch 3: 0.0001 ± 0", "epoch 4: 0.002 ± 0"]
    assert [series.name for series in made["rho"].series] == ["SGD-TRACER"]


def test_confusions_are_added_up_and_calibration_pooled(tmp_path):
    detailed(tmp_path)
    made = {picture.name: picture for picture in figures.pictures(read(tmp_path)[0])}
    matrix = [text.strip() for text in ElementTree.fromstring(made["confusion"].svg).itertext() if text.strip()]
    assert "<i>dog</i>" in matrix
    shares = [round(100 * n / total) for n, total in ((39, 41), (2, 41), (10, 40), (30, 40))]
    assert [int(text) for text in matrix if text.isdigit()] == shares * 2
    lines = made["calibration"].series
    assert [line.name for line in lines] == ["SGD: error 6.2 %", "SGD-TRACER: error 2.5 %"]
    assert lines[0].points == ["50 % sure: 40.0 % right of 20", "90 % sure: 95.0 % right of 60"]
    assert_affine(vertices(made["calibration"], lines[0].name), np.array([50, 90]), np.array([40, 95]))


def test_of_many_classes_the_page_says_what_was_confused(tmp_path):
    """Added up over the runs; names are text."""
    detailed(tmp_path)
    for path in tmp_path.glob("run #0-*/record.json"):
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {"evaluation": {"confused": [["<b>", "dog", 7], ["a", "b", 9]]}}))
    page = report.write(tmp_path, tmp_path / "report").read_text(encoding="utf-8")
    assert "<dt>SGD</dt>\n<dd>b for a (18), dog for &lt;b&gt; (14)</dd>" in page
    assert page.count("<h2>Confused most often</h2>") == 1


@pytest.mark.parametrize("wrong", [{"confusion": [[1, 2]], "classes": ["a", "b"]}, {"confusion": [[1]]}, {"bins": []}])
def test_an_evaluation_that_fits_nothing_is_left_out(tmp_path, wrong):
    detailed(tmp_path)
    for path in tmp_path.rglob("record.json"):
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {"evaluation": wrong}))
    names = [picture.name for picture in figures.pictures(read(tmp_path)[0])]
    assert "epochs" in names
    assert not {"confusion", "calibration"} & set(names)


def test_the_best_of_a_setting_are_bold_in_every_table(written):
    """The small study's best accuracies are SGD-TRACER's, and what it has memorised is the least."""
    markdown = (written / "tables" / "results.md").read_text(encoding="utf-8").splitlines()
    bold = [re.findall(r"\*\*([^*]+)\*\*", line) for line in markdown if line.startswith("| ")]
    assert bold == [[], [], [], [], ["31.6 ± 0.6", "32.0 ± 0.3"], [], [], ["44.5 ± 0.3", "45.8 ± 0.2", "10.5 ± 0.3"]]
    latex = (written / "tables" / "results.tex").read_text(encoding="utf-8")
    assert latex.count(r"\textbf{") == 5
    assert (written / "index.html").read_text(encoding="utf-8").count('<td class="number" data-value') > 5


def test_links_lead_to_the_runs(tmp_path):
    """From wherever the page is; names with signs that addresses have no room for; nothing of a packed run."""
    detailed(tmp_path / "a folder")
    (tmp_path / "a folder" / "run #0-0" / "label-errors").mkdir()
    (tmp_path / "a folder" / "run #0-0" / "label-errors" / "label-errors.html").touch()
    page = report.write(tmp_path / "a folder", tmp_path / "other" / "place")
    found = re.findall(r'href="(\.\./[^"]+)"', page.read_text(encoding="utf-8"))
    assert len(found) == 5
    for link in found:
        assert (page.parent / unquote(link)).is_file(), link
    assert main(["records", "pack", str(tmp_path / "a folder"), "-o", str(tmp_path / "all.jsonl.xz")]) == 0
    packed = report.write(tmp_path / "all.jsonl.xz", tmp_path / "packed").read_text(encoding="utf-8")
    assert 'href="../' not in packed
    assert "run #0-0" in packed


def vertices(picture, name):
    index = [series.name for series in picture.series].index(name)
    root = ElementTree.fromstring(picture.svg)
    group = next(g for g in root.iter(f"{SVG}g") if g.get("id") == f"series-{index}")
    numbers = re.findall(r"-?[\d.]+", group.find(f"{SVG}path").get("d"))
    assert len(numbers) == 2 * len(picture.series[index].points)
    return np.array(numbers, dtype=float).reshape(-1, 2)


def assert_affine(pixels, x, y):
    for seen, told, direction in ((pixels[:, 0], x, 1), (pixels[:, 1], y, -1)):
        slope, start = np.polyfit(told, seen, 1)
        assert np.sign(slope) == direction
        np.testing.assert_allclose(seen, slope * told + start, atol=1e-4)


def test_too_many_lines_are_each_methods_best(tmp_path):
    varied(tmp_path)
    results, _ = read(tmp_path)
    curves = next(picture for picture in figures.pictures(results) if picture.name == "epochs")
    assert [series.name for series in curves.series] == ["SGD", "SAM, ρ 2.0", "SGD-TRACER, ρ 0.006"]
    assert "each method's best" in curves.caption
    small(tmp_path / "few")
    results, _ = read(tmp_path / "few")
    assert not any("each method's best" in picture.caption for picture in figures.pictures(results))


def test_next_to_nothing_does_not_look_like_a_difference(tmp_path):
    """Runs that differ by a thousandth of a point: the axis still covers a whole one."""
    fill(Study.from_mapping({"base": {"epochs": 3}, "methods": {"SGD": {"optimizer": "sgd"}}}), tmp_path)
    (folder,) = (path.parent for path in tmp_path.glob("*/record.json"))
    content = json.loads((folder / "record.json").read_text())
    content["curves"]["test_accuracy"] = [0.62172, 0.62172, 0.62173]
    (folder / "record.json").write_text(json.dumps(content))
    curves = next(picture for picture in figures.pictures(read(tmp_path)[0]) if picture.name == "epochs")
    words = [text.strip() for text in ElementTree.fromstring(curves.svg).itertext()]
    ticks = [float(word) for word in words if re.fullmatch(r"6\d\.\d+", word)]
    assert max(ticks) - min(ticks) > 0.5


def test_an_option_that_is_no_number_makes_no_axis(tmp_path):
    methods = {"TRACER": {"optimizer": "sgd-tracer", "vary": {"engine": ["exact", "finite-difference"]}}}
    fill(Study.from_mapping({"base": {"epochs": 2}, "methods": methods}), tmp_path)
    assert figures.varied_option(read(tmp_path)[0]) is None


def test_numbers_written_as_words_are_numbers(tmp_path):
    """YAML's 1e-3 is a word; and values within a decade stand on a straight axis."""
    methods = {"SAM": {"optimizer": "sam", "vary": {"rho": ["1e-1", "2e-1"]}}}
    fill(Study.from_mapping({"base": {"epochs": 2}, "methods": methods}), tmp_path)
    picture = figures.pictures(read(tmp_path)[0])[0]
    assert picture.series[0].points[0].startswith("ρ 0.1: ")


def test_runs_under_way_are_drawn_as_far_as_they_came(tmp_path):
    study = Study.from_mapping({"base": {"epochs": 4}, "methods": {"SGD": {"optimizer": "sgd"}}})
    fill(study, tmp_path, diverged=[("SGD", "", 0)])
    pictures = figures.pictures(read(tmp_path)[0])
    assert [picture.name for picture in pictures] == ["epochs"]
    assert (pictures[0].series[0].name, len(pictures[0].series[0].points)) == ("SGD (diverged)", 2)


def test_strange_labels_are_drawn(tmp_path):
    """A dollar, an underscore in front, signs that no font has, a long one."""
    methods = {
        name: {"optimizer": "sgd", "lr": 0.1 + i}
        for i, name in enumerate(["_a b", "$x^", "日本", "\U000f0000", "w" * 200])
    }
    study = Study.from_mapping({"title": "\U000f0000", "base": {"epochs": 2}, "methods": methods})
    for index, point in enumerate(study.points()):
        Record(point.config, {}, {"test_accuracy": [0.1, 0.2]}, [1.0, 1.0]).write(tmp_path / str(index))
    (tmp_path / "study.json").write_text(json.dumps(study.to_mapping()))
    report.write(tmp_path, tmp_path / "report")
    text = "".join(ElementTree.parse(tmp_path / "report" / "figures" / "epochs.svg").getroot().itertext())
    assert "_a b" in text
    assert "$x^" in text
    assert "日本" in text


def test_inlined_drawings_share_no_names():
    svg = f'<svg xmlns="{SVG[1:-1]}" xmlns:l="http://www.w3.org/1999/xlink" viewBox="0 0 1 1"><style>*{{}}</style>'
    svg += (
        '<g id="a" clip-path="url(#b)" style="fill: #1d2129; font: 10px \'DejaVu Sans\'"><use l:href="#c"/></g></svg>'
    )
    made = inlined(svg.encode(), "one", '"<x>')
    root = ElementTree.fromstring(made)
    assert root.get("aria-label") == '"<x>'
    group = root.find("g")
    assert group.attrib == {"id": "one-a", "clip-path": "url(#one-b)", "style": "fill: currentColor; font-size: 10px"}
    assert group.find("use").attrib == {"href": "#one-c"}
    assert root.find("style") is None


def test_page_fetches_nothing_and_escapes(written):
    page = (written / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"https?://|//cdn|@import|url\((?!#)", page)
    assert HOSTILE not in page
    ids = re.findall(r'\sid="([^"]*)"', page)
    assert len(ids) == len(set(ids))


def test_command_line(tmp_path, capsys):
    small(tmp_path)
    damage(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.out == f"Report: {tmp_path / 'report' / 'index.html'}\n"
    problems = said.err.splitlines()
    assert len(problems) == 2
    assert "damaged" in problems[0]
    assert "format 99" in problems[1]
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert "damaged" in page
    assert "format 99" in page


def test_settings_with_seeds_of_their_own(tmp_path):
    settings = {"clean": {}, "few": {"label_noise": 0.5, "seeds": 2}}
    methods = {"SGD": {"optimizer": "sgd"}}
    study = {"title": "t", "base": {"epochs": 2}, "seeds": 3, "settings": settings, "methods": methods}
    fill(Study.from_mapping(study), tmp_path / "runs")
    page = report.write(tmp_path / "runs", tmp_path / "report").read_text(encoding="utf-8")
    assert all(fact in page for fact in ("2 settings", "up to 3 seeds", "5 of 5 runs finished"))


def test_records_of_other_runs_are_counted(tmp_path):
    small(tmp_path)
    stranger = next(tmp_path.rglob("record.json"))
    content = json.loads(stranger.read_text())
    content["config"]["lr"] = 0.5
    (tmp_path / "stranger").mkdir()
    (tmp_path / "stranger" / "record.json").write_text(json.dumps(content))
    page = report.write(tmp_path, tmp_path / "report").read_text(encoding="utf-8")
    assert "1 more in the folder that the study does not ask for" in page


def test_a_study_of_which_nothing_was_run(tmp_path):
    Study.from_mapping({"methods": {"SGD": {"optimizer": "sgd"}}}).write(tmp_path)
    page = report.write(tmp_path, tmp_path / "report").read_text(encoding="utf-8")
    assert ">not run</td>" in page
    assert "<svg" not in page


def test_a_folder_without_a_study(tmp_path):
    small(tmp_path)
    (tmp_path / "study.json").unlink()
    text = report.write(tmp_path, tmp_path / "report").read_text(encoding="utf-8")
    assert "sgd-tracer" in text


def refused(capsys, *words):
    assert main(["report", *map(str, words)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_missing_folder(tmp_path, capsys):
    assert "is no folder" in refused(capsys, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_empty_folder(tmp_path, capsys):
    assert "nothing to report" in refused(capsys, tmp_path)


def test_damaged_records_alone(tmp_path, capsys):
    damage(tmp_path)
    assert "damaged" in refused(capsys, tmp_path)


def test_damaged_study(tmp_path, capsys):
    (tmp_path / "study.json").write_text('{"methods": ')
    assert "study.json" in refused(capsys, tmp_path)


def test_out_that_cannot_be_written(tmp_path, capsys):
    small(tmp_path / "runs")
    (tmp_path / "file").write_text("not a folder")
    assert "cannot write" in refused(capsys, tmp_path / "runs", "-o", tmp_path / "file" / "report")
    with pytest.raises(LabError, match="cannot write"):
        report.write(tmp_path / "runs", Path(os.devnull))


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write anywhere")
def test_out_that_may_only_be_read(tmp_path, capsys):
    small(tmp_path / "runs")
    (tmp_path / "out").mkdir(mode=0o500)
    assert "cannot write" in refused(capsys, tmp_path / "runs", "-o", tmp_path / "out")


def test_needs_no_torch(tmp_path):
    small(tmp_path)
    code = "import sys; from gtracer.cli import main; code = main(sys.argv[1:]); "
    code += "sys.exit(code or 'torch' in sys.modules or 'matplotlib.pyplot' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, "report", str(tmp_path)], check=True, capture_output=True)
