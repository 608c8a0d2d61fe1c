"""The studies' scripts, on a single epoch: what they choose, and what they print of it."""

import functools
import importlib
import json
import math
import re
import runpy
import shutil
import statistics
import subprocess
import sys

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from gtracer.lab.data import text
from gtracer.lab.results import archive
from gtracer.lab.results import statistics as results
from gtracer.lab.results.record import Record
from gtracer.lab.results.report.figures import pictures
from gtracer.lab.results.report.tables import Table
from gtracer.lab.results.statistics import Estimate
from gtracer.lab.sweeps.launchers.cuda_graphs import CudaGraphs
from gtracer.lab.sweeps.study import Study, load
from gtracer.lab.sweeps.sweep import RunsFolder, sweep
from support.encoders import tiny_bert
from support.films import films
from support.places import ROOT

STUDIES, RECORDS = ROOT / "studies", ROOT / "records"
README = " ".join((ROOT / "README.md").read_text().split())  # wherever its lines break


def script(name, *words):
    """`python studies/NAME.py …`: what it prints."""
    command = [sys.executable, str(STUDIES / f"{name}.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def study(monkeypatch, capsys):
    """A function: the same in this process, which makes the runs too."""
    monkeypatch.syspath_prepend(str(STUDIES))
    runs = importlib.import_module("runs")
    monkeypatch.setattr(runs, "Local", lambda _: runs.in_turn)

    def printed(name, *words):
        monkeypatch.setattr(sys, "argv", [name, *words])
        capsys.readouterr()
        runpy.run_path(str(STUDIES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return printed


def records(folder):
    return RunsFolder.of(folder).all()


@pytest.fixture
def adapters(monkeypatch):
    """The study of adapters, on made-up films."""
    monkeypatch.syspath_prepend(str(STUDIES))
    module = importlib.import_module("adapters")
    monkeypatch.setattr(module, "TASKS", {"films": lambda folder: text.local(folder, ("text",), "label", 0)})
    module.task_of.cache_clear()
    return module


def test_the_study_of_adapters_runs(tmp_path, adapters, monkeypatch, capsys):
    words = {"--model": tiny_bert(tmp_path / "bert"), "--data": films(tmp_path), "--out": tmp_path / "out"}
    words |= {"--tasks": "films", "--noise": "0.4", "--seeds": "2", "--epochs": "1", "--examples": "12"}
    arguments = ["adapters", *(str(word) for pair in words.items() for word in pair), "--rhos", "0", "2e-3"]
    monkeypatch.setattr(sys, "argv", arguments)
    tables = []
    for _ in range(2):  # the second time nothing is trained
        adapters.main()
        tables.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("|")])
        monkeypatch.setattr(adapters, "trained", None)
    assert tables[0] == tables[1]
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    assert all((row["ratio"] > 0) == (row["rho"] > 0) for row in rows)
    few, all_weights = ({row["weights"] for row in rows if row["method"] == name} for name in adapters.METHODS)
    assert max(few) < min(all_weights)
    assert [line.split("|")[5].strip() for line in tables[0][2:]] == ["2"] * 4  # seeds


def test_its_adapters_are_those_of_peft(tmp_path, adapters):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    folder, cls = tiny_bert(tmp_path), transformers.AutoModelForSequenceClassification
    words = torch.randint(5, (3, 7))
    net = adapters.adapted(cls.from_pretrained(folder).eval(), "LoRA")
    target = ["query", "value"]
    config = peft.LoraConfig(task_type="SEQ_CLS", r=adapters.RANK, lora_alpha=2 * adapters.RANK, target_modules=target)
    twin = peft.get_peft_model(cls.from_pretrained(folder), config).eval()
    trained = {name for name, p in net.named_parameters() if p.requires_grad}
    assert len(trained) == len([p for p in twin.parameters() if p.requires_grad])
    for mine, other in zip(
        (m for m in net.modules() if isinstance(m, adapters.Adapted)),
        (m for m in twin.modules() if isinstance(m, peft.tuners.lora.Linear)),
        strict=True,
    ):
        bound = mine.layer.in_features**-0.5  # PEFT's first weights are uniform within it
        assert other.lora_A["default"].weight.abs().max() <= bound
        assert 0.8 * bound < mine.down.abs().max() <= bound
        torch.nn.init.normal_(mine.up)
        other.lora_A["default"].weight.data.copy_(mine.down.data)
        other.lora_B["default"].weight.data.copy_(mine.up.data)
    torch.testing.assert_close(net(words).logits, twin(words).logits)


def test_the_study_of_estimators_runs(tmp_path, study):
    """One epoch, two methods: tuned on held-out data, then trained on all of it."""
    words = ["--epochs", "1", "--seeds", "1", "--tuning-seeds", "1", "--out", str(tmp_path)]
    words += ["--methods", "SGD", "per-example"]
    printed = study("estimators", *words)
    result = json.loads((tmp_path / "result.json").read_text())["methods"]
    assert len(result["per-example"]["holdout"]) == 11
    best = max(result["per-example"]["holdout"], key=lambda rho: result["per-example"]["holdout"][rho])
    assert float(best) == result["per-example"]["rho"]
    assert f"| per-example | {result['per-example']['rho']:g}" in printed
    (final,) = [r for r in records(tmp_path / "final") if r.config.curvature == "per-example"]
    assert (final.config.rho, final.config.holdout) == (result["per-example"]["rho"], 0)
    assert final.curves["test_accuracy"][-1] == result["per-example"]["accuracies"][0]


def test_the_study_of_depths_runs(tmp_path, study):
    """Each method's ρ for each depth is the best of its seven on held-out data, and is used on the other depth."""
    printed = study("depths", "--epochs", "1", "--seeds", "1", "--depths", "2", "3", "--out", str(tmp_path))
    result = json.loads((tmp_path / "result.json").read_text())
    rho = result["rho"]["sam 2"]
    tuning = [r for r in records(tmp_path / "tuning") if (r.config.optimizer, r.config.depth) == ("sam", 2)]
    held = {r.config.rho: r.curves["holdout_accuracy"][-1] for r in tuning}
    assert sorted(held) == [0.05, 0.1, 0.2, 0.5, 1.0, 1.5, 2.0]
    assert held[rho] == max(held.values())
    final = {(r.config.optimizer, r.config.depth, r.config.rho): r for r in records(tmp_path / "final")}
    used = final["sam", 3, rho]
    assert used.config.holdout == 0.0
    assert result["accuracy"]["sam tuned 2 used 3"] == [used.curves["test_accuracy"][-1]]
    others = [result["accuracy"][f"sam tuned {d} used {5 - d}"][0] for d in (2, 3)]
    assert result["elsewhere"]["sam"] == [sum(others) / 2]
    assert f"sam, on depths that it was not tuned for: {100 * sum(others) / 2:.1f}" in printed


def test_the_study_of_the_posterior_runs(study):
    lines = study("posterior", "--epochs", "1", "--seeds", "1").splitlines()
    assert len(lines) == 2 + 4 * 5
    assert lines[2].startswith("| 0% label noise | 0 | weights alone |")


@pytest.mark.parametrize(
    ("encoder", "final", "line"),
    [
        ("minilm", "table3-minilm", "RTE: Adam-TRACER {'delta': 0.01, 'rho': '2e-5'}, held out 55.22"),
        (
            "minilm-loss",
            str(STUDIES / "superglue" / "table3-minilm-loss.yaml"),
            "{'second_moment': 'loss', 'delta': 0.01, 'rho': '6e-5'}, held out 54.89",
        ),
        ("mpnet", "table3-mpnet", "RTE: Adam-TRACER {'delta': 0.01, 'rho': 1.5e-05}, held out 66.67"),
    ],
    ids=["minilm", "minilm-loss", "mpnet"],
)
def test_a_study_with_what_its_search_chose(tmp_path, study, encoder, final, line):
    """Table 3's values are those of the records of its search, whose test data had no say."""
    search, out = str(STUDIES / "superglue" / f"search-{encoder}.yaml"), tmp_path / "chosen.json"
    runs = RECORDS / "superglue" / f"search-{encoder}.jsonl.xz"
    printed = study("chosen", search, str(runs), final, "-o", str(out))
    assert load(str(out)).configs() == load(final).configs()
    assert line in printed


def test_a_search_that_was_not_run_chooses_nothing(tmp_path):
    search = str(STUDIES / "superglue" / "search-minilm.yaml")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        script("chosen", search, str(tmp_path), "table3-minilm", "-o", str(tmp_path / "chosen.json"))
    assert "has no finished run of 'SAM, ρ 0.003' in setting 'BoolQ'" in caught.value.stderr


def test_every_record_that_is_kept_here_can_be_read():
    found = [read for _, read in Record.read_all(RECORDS)]
    assert len(found) > 1500
    assert {type(read) for read in found} == {Record}


def test_records_are_kept_one_file_for_a_study():
    """As `gtracer records pack` leaves them, and records alone."""
    assert not list(RECORDS.rglob("record.json"))
    for path in RECORDS.rglob("*.jsonl.xz"):
        names = list(archive.unpacked(path))
        assert all(re.fullmatch(r"study\.json|([^/]+/)+record\.json", name) for name in names), path


DECAY_TOO = {  # settings of Table 2, as the overview of docs/results/benchmarks.md has them
    "50% label noise, no augmentation": "50% label noise, weight decay",
    "no augmentation": "clean labels, weight decay",
    "augmentation": "clean labels, weight decay, augmentation",
}


def overview(name):
    """A row for each setting of a table: n, and the accuracy of the three methods; CIFAR-100's with the paper's."""
    folder, prefix = {"minilm": ("superglue", "MiniLM: "), "mpnet": ("superglue", "mpnet: ")}.get(
        name.removeprefix("table3-"), ("cifar100", "")
    )
    found, _ = results.read(RECORDS / folder / f"{name}.jsonl.xz", load(name))
    for setting in found.study.settings:
        within = found.within(setting)
        label = {"table1": "50% label noise, no weight decay", "table2": DECAY_TOO.get(setting)}.get(
            name, prefix + setting
        )
        cells = [label, str(within[0].accuracy.n), *(str(result.accuracy) for result in within)]
        if not prefix:
            cells.append(str(Estimate(*within[-1].paper, n=0)))
        yield f"| {' | '.join(cells)} |"


def test_the_results_in_the_docs_are_those_of_the_records():
    docs = (STUDIES.parent / "docs" / "results" / "benchmarks.md").read_text().splitlines()
    made = []
    for name, folder in (
        ("table1", "cifar100/table1"),
        ("table2", "cifar100/table2"),
        (str(STUDIES / "cifar100" / "variants.yaml"), "cifar100/variants"),
        ("table3-minilm", "superglue/table3-minilm"),
        (str(STUDIES / "superglue" / "table3-minilm-loss.yaml"), "superglue/table3-minilm-loss"),
        ("table3-mpnet", "superglue/table3-mpnet"),
        (str(STUDIES / "superglue" / "clipping-mpnet.yaml"), "superglue/clipping-mpnet"),
    ):
        found, problems = results.read(RECORDS / f"{folder}.jsonl.xz", load(name))
        assert problems == []
        for result in found.all if folder.startswith("cifar100") else ():
            if result.paper is not None:
                assert f"| {result.accuracy} | {Estimate(*result.paper, n=0)} |" in README.replace("*", "")
            elif "8th" in result.point.label:
                assert f"has {result.accuracy} in the second row" in README
        made += [line for line in Table(found).markdown().splitlines() if line.startswith("|")]
    assert [line for line in docs if line in made] == made
    others = [line.replace("*", "") for line in docs if line.startswith("|") and "±" in line and line not in made]
    tables = "table1", "table2", "table3-minilm", "table3-mpnet"
    assert sorted(others) == sorted(row for name in tables for row in overview(name))


def test_what_the_docs_say_of_label_smoothing_is_in_its_records():
    """The share that is best by held-out data, and the usual one; beside the others with the same seeds."""

    def shown(study, folder):
        found, problems = results.read(RECORDS / f"{folder}.jsonl.xz", load(study))
        assert problems == []
        return found.all

    search = shown(str(STUDIES / "digits" / "smoothing-search.yaml"), "digits/smoothing-search")
    best = max(search, key=lambda result: statistics.mean(result.last("holdout_accuracy")))
    assert best.point.config.label_smoothing == 0.8
    usual, tuned = shown(str(STUDIES / "digits" / "smoothing.yaml"), "digits/smoothing")
    page = " ".join((ROOT / "docs" / "how-to" / "studies.md").read_text().split())
    assert f"label smoothing reaches {tuned.accuracy} in the setting" in page
    assert f"and {usual.accuracy} with the usual 0.1" in page
    assert f"memorises {statistics.mean(tuned.last('memorised')):.0f}% of" in page
    sgd, sam, tracer = (f"{result.accuracy.mean:.1f}" for result in shown("table1-digits", "miniatures/table1-digits"))
    assert f"[{tuned.accuracy} on noisy digits]" in README
    assert f"(n = 5), TRACER {tracer}, SAM {sam}, SGD {sgd}." in README


def test_the_second_moments_in_the_docs_are_those_of_the_records():
    """For each of the table's rows the two δ, each at its best ρ by held-out data and beside it."""
    study = load(str(STUDIES / "digits" / "second-moment.yaml"))
    found, problems = results.read(RECORDS / "digits" / "second-moment.jsonl.xz", study)
    assert problems == []
    text = (STUDIES.parent / "docs" / "explanation" / "deviations.md").read_text().replace("*", "")
    section = text[text.index("## What feeds") :]
    seen = {result.point.label: str(result.accuracy) for result in found.all}
    assert f"Adam has {seen['Adam']} there and SAM {seen['SAM, ρ 1.0']} (ρ 1" in section
    for name in ("Total", "Loss"):
        coarse = [f"{name}, δ 0.01, ρ {rho}" for rho in (0.003, 0.01, 0.03)]
        fine = [f"{name}, δ 1e-6, ρ {rho}" for rho in (("3e-5", "1e-5") if name == "Total" else ("1e-5", "3e-6"))]
        cells = [seen[label] for label in coarse + fine]
        best = f"({fine[0].split()[-1]})"
        row = f"| the {name.lower()} | {cells[0]} | {cells[1]} (0.01) | {cells[2]} | {cells[3]} {best} | {cells[4]} |"
        assert row in section


@functools.cache
def kept(folder):
    return [record for _, record in Record.read_all(RECORDS / f"{folder}.jsonl.xz")]


NOISY, DECAY = {"label_noise": 0.5}, {"weight_decay": 5e-4}


@pytest.mark.parametrize(
    ("label", "folder", "options"),
    [
        ("CIFAR-100, weight decay, 50% label noise", "cifar100/search-long", NOISY | DECAY),
        ("CIFAR-100, no weight decay, 50% label noise", "cifar100/search-long", NOISY | {"weight_decay": 0.0}),
        ("CIFAR-100, weight decay, clean labels", "cifar100/search-clean-long", DECAY),
        ("CIFAR-100, weight decay, clean labels, augmentation", "cifar100/search-clean", DECAY | {"augment": True}),
        ("digits, 50% label noise, Adam", "digits/second-moment", NOISY | {"second_moment": "total"}),
        ("MiniLM, BoolQ", "superglue/search-minilm", {"task": "boolq", "label_noise": 0.0}),
        ("MiniLM, BoolQ, half of the labels drawn at random", "superglue/search-minilm", {"label_noise": 0.25}),
        ("MiniLM, WiC", "superglue/search-minilm", {"task": "wic"}),
        ("MiniLM, RTE", "superglue/search-minilm", {"task": "rte"}),
        ("mpnet, BoolQ", "superglue/search-mpnet", {"task": "boolq", "label_noise": 0.0, "clip": None}),
        ("mpnet, BoolQ, clipped", "superglue/search-mpnet", {"task": "boolq", "clip": 1}),
        ("mpnet, BoolQ, half of the labels drawn at random", "superglue/search-mpnet", {"label_noise": 0.25}),
        ("mpnet, BoolQ, a tenth of the data", "superglue/search-mpnet", {"train_share": 0.1}),
        ("mpnet, WiC", "superglue/search-mpnet", {"task": "wic", "clip": None}),
        ("mpnet, WiC, clipped", "superglue/search-mpnet", {"task": "wic", "clip": 1}),
        ("mpnet, RTE", "superglue/search-mpnet", {"task": "rte", "clip": None}),
        ("mpnet, RTE, clipped", "superglue/search-mpnet", {"task": "rte", "clip": 1}),
    ],
)
def test_the_ratios_in_the_docs_are_those_of_the_records(label, folder, options):
    """At the best ρ by held-out data, the smaller of equals, in the middle of training, mean over seeds."""
    fixed = {"delta": 0.01, "train_share": 1.0, "scale_free": False, "curvature": None, "radius": None} | options
    found = {}
    for record in kept(folder):
        wanted = all(getattr(record.config, name) == value for name, value in fixed.items())
        if wanted and record.config.optimizer.endswith("tracer") and record.finished:
            found.setdefault(record.config.rho, []).append(record.curves)
    best = max(sorted(found), key=lambda rho: statistics.mean(curves["holdout_accuracy"][-1] for curves in found[rho]))
    ratios = [curves["penalty_ratio"][len(curves["penalty_ratio"]) // 2] for curves in found[best]]
    text = (STUDIES.parent / "docs" / "explanation" / "defaults.md").read_text()
    assert len(found) > 2
    assert f"| {label} | {best:g} | {statistics.mean(ratios):.2f} |" in text


def test_the_span_of_the_ratios_is_that_of_their_table():
    """Fine-tuning's; MiniLM's RTE, next to chance, is told apart."""
    text = (STUDIES.parent / "docs" / "explanation" / "defaults.md").read_text()
    rows = re.findall(r"^\| ((?:MiniLM|mpnet), .*) \| \S+ \| (\d\.\d\d) \|$", text, re.MULTILINE)
    ratios = [float(ratio) for label, ratio in rows if label != "MiniLM, RTE"]
    assert f"{min(ratios)} to {max(ratios):.1f} in fine-tuning" in " ".join(text.split())


@pytest.mark.parametrize(
    ("name", "folder", "picture"), [("figure1", "search-long", "varied"), ("figure2", "table1", "epochs")]
)
def test_the_figures_in_the_docs_are_drawn_from_the_records(name, folder, picture):
    found, problems = results.read(RECORDS / "cifar100" / f"{folder}.jsonl.xz", load(name))
    assert problems == []
    drawn = {made.name: made.svg for made in pictures(found)}[picture]
    assert (STUDIES.parent / "docs" / "figures" / f"{name}.svg").read_bytes() == drawn


def test_the_figures_of_the_results_are_drawn_from_the_records(tmp_path, study):
    study("result_figures", "--out", str(tmp_path))
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == ["cifar100.svg", "depths.svg", "label-errors-area.svg", "speed.svg", "superglue.svg"]
    for name in drawn:
        assert (STUDIES.parent / "docs" / "figures" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_the_figure_of_a_step_is_drawn(tmp_path, study):
    """By the optimiser: from one point SGD's step, and TRACER's, which goes further down."""
    study("step", "--out", str(tmp_path / "step.svg"))
    assert (STUDIES.parent / "docs" / "figures" / "step.svg").read_bytes() == (tmp_path / "step.svg").read_bytes()


def test_the_table_of_rho_auto_is_that_of_its_runs(capsys, monkeypatch):
    """docs/how-to/choosing-rho.md, to the digit, and the sentences that follow from it, there and in the README."""
    monkeypatch.syspath_prepend(str(STUDIES))
    module = importlib.import_module("rho_auto")
    runs = [json.loads(line) for line in (RECORDS / "rho-auto" / "runs.jsonl").read_text().splitlines()]
    module.print_table(runs, module.METHODS)
    rows = capsys.readouterr().out.splitlines()[2:]
    text = (STUDIES.parent / "docs" / "how-to" / "choosing-rho.md").read_text()
    assert len(rows) == 23
    assert all(row in text for row in rows)
    tests = {}
    for run in runs:
        tests.setdefault((run["problem"], run["method"]), []).append(run["test"])
    mean = {key: statistics.fmean(x for x in found if x is not None) for key, found in tests.items()}

    def beside(method, other):
        pairs = [(name, other) for name, of in mean if of == method and (name, other) in mean]
        return sorted(mean[name, method] - mean[name, other] for name, _ in pairs if not name.startswith("images"))

    gains = beside("auto", "base")
    assert (len(gains), round(-gains[0], 1), round(gains[-1])) == (21, 0.2, 44)
    short = beside("auto", "best fixed")
    assert (len(short), sum(x >= -1 for x in short), sum(x > 1 for x in short)) == (21, 16, 5)
    assert [round(-x, 1) for x in short[:5]] == [12.3, 10.8, 5.5, 2.9, 1.5]
    old = beside("0.003", "base")
    assert (round(-old[0]), round(-old[5]), sum(x < -2 for x in old)) == (53, 24, 6)
    fresh = [json.loads(line) for line in (RECORDS / "rho-auto" / "fresh.jsonl").read_text().splitlines()]
    module.print_table(fresh, ["base", "auto"])
    assert all(row in text for row in capsys.readouterr().out.splitlines()[2:])
    scores = {}
    for run in fresh:
        scores.setdefault((run["problem"], run["method"]), []).append(run["test"])
    moved = sorted(
        statistics.fmean(found) - statistics.fmean(scores[name, "base"])
        for (name, method), found in scores.items()
        if method == "auto"
    )
    assert (len(moved), round(-moved[0], 1), round(moved[-1])) == (21, 0.2, 32)
    assert "on 21 small problems it ends at most 0.2 points below the base optimiser and up to 32 above" in README


def test_the_table_of_rho_finder_is_that_of_its_runs(capsys, monkeypatch):
    """docs/how-to/choosing-rho.md, to the digit, and the sentence that follows from it."""
    monkeypatch.syspath_prepend(str(STUDIES))
    module = importlib.import_module("rho_finder")
    text = (STUDIES.parent / "records" / "rho-finder" / "runs.jsonl").read_text()
    module.print_table([json.loads(line) for line in text.splitlines()])
    rows = capsys.readouterr().out.splitlines()
    page = (STUDIES.parent / "docs" / "how-to" / "choosing-rho.md").read_text()
    assert len(rows) == 20
    assert all(row in page for row in rows[2:17])
    told = re.findall(r"[+-]?\d+\.\d", rows[-1])
    assert [float(x) for x in told] == [-2.0, -14.4, 11.9, -14.4]
    assert "2.0 points below the best fixed ρ and 11.9 above ρ = 0" in page
    assert float(re.findall(r"[+-]\d+\.\d", rows[17])[3]) == -36.7


def test_the_table_of_label_errors_is_that_of_its_runs(monkeypatch):
    """docs/results/label-errors.md, to the digit."""
    monkeypatch.syspath_prepend(str(STUDIES))
    module = importlib.import_module("label_errors")
    text = (RECORDS / "label-errors" / "rows.jsonl").read_text()
    rows = module.table([json.loads(line) for line in text.splitlines()]).splitlines()
    page = (STUDIES.parent / "docs" / "results" / "label-errors.md").read_text()
    assert len(rows) == 2 + 4 * 9 + 2 * 7
    assert all(row in page for row in rows)
    cells = [re.sub(r" ± [\d.]+", "", row).strip("| ").split(" | ") for row in rows[2:]]
    cells, cifar = cells[: 4 * 9], cells[4 * 9 :]
    areas, gains = {}, {}
    for where, judge, _, area, _, recall, *rest in cells:
        if judge.startswith("all labels"):
            whole = [float(x) for x in rest]
        elif rest[0] != "–":
            key = where.split(", ")[1], "truth" if judge.startswith("the truth") else "judged"
            for trainer, x, y in zip(("SGD", "TRACER"), rest, whole, strict=True):
                gains.setdefault((*key, trainer), []).append(round(float(x) - y, 1))
        if area != "–":
            areas.setdefault(where, {})[judge] = float(area)
        assert "last epoch" not in judge or "tuned" in judge or float(recall) < 12
    assert [max(of, key=of.get) for of in areas.values()] == ["TRACER, ρ tuned"] * 4
    assert min(min(gains["20%", "judged", of]) for of in ("SGD", "TRACER")) == -1.1
    assert max(max(gains["20%", "judged", of]) for of in ("SGD", "TRACER")) == 1.8
    spans = [(min(found), max(found)) for found in (gains["50%", "judged", "SGD"], gains["50%", "judged", "TRACER"])]
    assert spans == [(2.1, 6.2), (-2.3, 2.4)]
    most = gains["50%", "truth", "SGD"] + gains["50%", "truth", "TRACER"]
    assert (min(most), max(most)) == (5.5, 12.8)
    for noise, of in (("20%", cifar[:7]), ("50%", cifar[7:])):
        whole, *judged, truth = [[float(x) for x in row[6:8]] for row in of if row[6] != "–"]
        lost = [round(x - y, 1) for row in judged for x, y in zip(row, whole, strict=True)]
        best = [round(x - y, 1) for x, y in zip(truth, whole, strict=True)]
        assert (min(lost), max(lost), *best) == {"20%": (-2.4, 0.2, 3.3, 3.6), "50%": (-1.9, 1.8, 8.9, 9.3)}[noise]


def test_the_study_of_label_errors_runs(tmp_path, study):
    """Two epochs: its rows are what find-label-errors says, and accuracies those of the records."""
    words = ["--problems", "digits", "--noise", "0.2", "--seeds", "0", "--epochs", "2", "--out", str(tmp_path)]
    printed = study("label_errors", *words, "--parallel", "3")
    rows = {row["judge"]: row for row in map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())}
    assert len(rows) == 9
    cell = tmp_path / "digits-20-seed-0"
    record = Record.read(cell / "TRACER" / "SGD" / "cleaned")
    assert record.config.optimizer == "sgd"
    assert record.resolved["examples"] + record.resolved["holdout_examples"] == 1347 - rows["TRACER"]["flagged"]
    assert rows["TRACER"]["accuracy"]["SGD"]["last"] == record.curves["test_accuracy"][-1]
    assert (rows["the truth"]["precision"], rows["the truth"]["recall"]) == (1.0, 1.0)
    assert rows["the truth"]["flagged"] == 269
    assert f"| {rows['SGD']['auc']:.3f} | {100 * rows['SGD']['precision']:.1f} |" in printed
    assert study("label_errors", *words) == printed[printed.index("|") :]


def test_the_study_of_sharpness_runs(tmp_path, study):
    """One epoch, two methods; a second time nothing is made again."""
    words = ["--problems", "digits, clean", "--methods", "SGD", "TRACER", "--epochs", "1", "--seeds", "1"]
    words += ["--examples", "64", "--steps", "2", "--out", str(tmp_path)]
    printed = study("flatness", *words)
    file = tmp_path / "results.jsonl"
    before = file.read_bytes()
    rows = [json.loads(line) for line in before.splitlines()]
    assert [row["method"] for row in rows] == ["SGD", "TRACER"]
    tuning = {r.config.rho: r.curves["holdout_accuracy"][-1] for r in records(tmp_path / "digits-clean" / "tuning")}
    assert tuning[rows[1]["rho"]] == max(tuning.values())
    last = Record.read(tmp_path / "digits-clean" / rows[1]["run"]).curves["test_accuracy"][-1]
    assert rows[1]["last"]["test_accuracy"] == last
    assert f"| 1 epochs, n = 1 | SGD | TRACER, ρ {rows[1]['rho']:g} |" in printed
    assert (tmp_path / "digits-clean.svg").exists()
    again = study("flatness", *words)
    assert file.read_bytes() == before
    assert again.split("digits, clean\n")[-1] == printed.split("digits, clean\n")[-1]


def test_the_study_of_sharpness_is_cut_and_made_in_parts(tmp_path, study):
    """By a limit of time, in the middle of a line, and on a machine that has results.jsonl alone."""
    words = ["--problems", "digits, 50% noise", "--methods", "SGD", "SAM", "--epochs", "1", "--examples", "64"]
    words += ["--steps", "2", "--out", str(tmp_path)]
    assert "2 of 2 models are left" in study("flatness", *words, "--only-seeds", "1", "--seconds", "0")
    assert not (tmp_path / "results.jsonl").exists()
    study("flatness", *words, "--only-seeds", "1")
    file = tmp_path / "results.jsonl"
    first = file.read_text()
    shutil.rmtree(tmp_path / "digits-50-noise")
    file.write_text(first + first.splitlines()[0][:100])
    printed = study("flatness", *words, "--seeds", "2")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert file.read_text().startswith(first)
    assert [(row["method"], row["seed"]) for row in rows] == [("SGD", 1), ("SAM", 1), ("SGD", 0), ("SAM", 0)]
    assert "| 1 epochs, n = 2 | SGD | SAM, ρ 1 |" in printed
    assert (tmp_path / "digits-50-noise.svg").exists()


def test_the_study_of_sharpness_goes_on_after_a_model_that_cannot_be_measured(tmp_path, study):
    words = ["--problems", "digits, 50% noise", "--methods", "SGD", "SAM", "--epochs", "1", "--examples", "64"]
    words += ["--steps", "2", "--seeds", "1", "--out", str(tmp_path)]
    study("flatness", *words)
    (weights,) = tmp_path.glob("digits-50-noise/digits-sgd-*/model.safetensors")
    save_file(
        {name: x.fill_(math.nan) if x.is_floating_point() else x for name, x in load_file(weights).items()}, weights
    )
    (tmp_path / "results.jsonl").unlink()
    printed = study("flatness", *words)
    assert "there is no sharpness to measure at these weights" in printed
    assert "| 1 epochs, n = 1 | SAM, ρ 1 |" in printed


def test_the_study_of_sharpness_in_parallel_takes_what_a_sweep_has_left(tmp_path, study):
    """Of three models one is a sweep's; trained as CUDA graphs and measured by two processes, the rows are the same."""
    words = ["--problems", "digits, 50% noise", "--methods", "SGD", "SAM", "TRACER", "--epochs", "1", "--seeds", "1"]
    words += ["--examples", "64", "--steps", "2"]
    study("flatness", *words, "--out", str(tmp_path / "plain"))
    runs = tmp_path / "parallel" / "digits-50-noise"
    base = {"task": "digits", "model": "mlp-bn", "lr": 0.02, "epochs": 1, "label_noise": 0.5}
    swept = Study.from_mapping(
        {"title": "SAM", "base": base, "seeds": 1, "methods": {"SAM": {"optimizer": "sam", "rho": 1.0}}}
    )
    sweep(swept, runs, CudaGraphs(1), Console(quiet=True), models=True)
    (made,) = runs.glob("digits-sam-*/record.json")
    stamp = made.stat().st_mtime_ns
    script("flatness", *words, "--parallel", "2", "--measuring", "2", "--out", str(tmp_path / "parallel"))
    assert made.stat().st_mtime_ns == stamp
    plain, other = (
        {row["method"]: row for row in map(json.loads, (tmp_path / name / "results.jsonl").read_text().splitlines())}
        for name in ("plain", "parallel")
    )
    assert plain.keys() == other.keys() == {"SGD", "SAM", "TRACER"}
    for method, row in plain.items():
        assert other[method]["last"] == pytest.approx(row["last"], rel=1e-4)
        for name, (value, _) in row["measures"].items():
            assert other[method]["measures"][name][0] == pytest.approx(value, rel=1e-2), name


@pytest.mark.parametrize("name", ["digits", "fashion"])
def test_what_the_docs_say_of_sharpness_is_in_its_records(monkeypatch, name):
    monkeypatch.syspath_prepend(str(STUDIES))
    module = importlib.import_module("flatness")
    rows = [json.loads(line) for line in (RECORDS / "sharpness" / f"{name}.jsonl").read_text().splitlines()]
    assert len(rows) == 30
    page = (ROOT / "docs" / "results" / "sharpness.md").read_text().split("## What came out")[1]
    for kind, heading in {"50% noise": "50% label noise", "clean": "clean labels"}.items():
        printed = module.table([row for row in rows if row["problem"] == f"{name}, {kind}"]).splitlines()
        title = {"digits": "Digits", "fashion": "Fashion-MNIST"}[name]
        section = page.split(f"### {title}, {heading}")[1].split("###")[0]
        shown = [line for line in section.splitlines() if line.startswith("|")]
        assert len(shown) >= 10
        assert set(shown) <= set(printed)
    with_models = results.read(RECORDS / "sharpness" / f"{name}-runs.jsonl.xz")[0]
    assert with_models.given >= 30


def test_what_the_docs_say_of_auto_on_a_gpu_is_in_its_records():
    page = (ROOT / "docs" / "how-to" / "choosing-rho.md").read_text()
    wanted = load(str(STUDIES / "superglue" / "auto-minilm.yaml"))
    found = results.Results(wanted, records(RECORDS / "superglue" / "auto-minilm.jsonl.xz"))
    for method in wanted.methods:
        cells = [str(result.accuracy) for result in found.all if result.point.method == method]
        assert len(cells) == 3
        assert f"| {method} | {' | '.join(cells)} |" in page
