"""What the user named is printed as it is: labels, titles, folders and notes are not rich's markup or emoji."""

import ast
import io
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from gtracer import cli, lab
from gtracer.lab import demo
from gtracer.lab.config import Config
from gtracer.lab.inference import sharpness
from gtracer.lab.results import summary
from gtracer.lab.results.statistics import Results
from gtracer.lab.sweeps import tune
from gtracer.lab.sweeps.launchers.cuda_graphs import CudaGraphs
from gtracer.lab.sweeps.study import Study
from gtracer.lab.sweeps.sweep import RunsFolder, sweep
from gtracer.lab.training.callbacks import ProgressBar
from gtracer.sharpness.result import Row
from support.records import made_up

# A closing tag that closes nothing is an error in rich; an opening one vanishes; an emoji's name becomes its picture.
WORDS = ["[/bold]", "[red]", "a[/x]b", ":warning:", "[link=x]", r"back\[slash]", "[0]"]
FOLDERS = ["[/bold]", "a[/x]b [red] :warning:"]
BASE = {"task": "digits", "width": 8, "epochs": 1, "batch_size": 512, "device": "cpu"}


def printing():
    return Console(file=io.StringIO(), width=200)


def printed(console):
    return console.file.getvalue()


@pytest.mark.parametrize("word", WORDS)
def test_the_table_of_a_study(word, tmp_path):
    study = Study.from_mapping(
        {
            "title": f"title {word}",
            "base": BASE,
            "seeds": 1,
            "settings": {f"setting {word}": {}, "other": {"label_noise": 0.5}},
            "methods": {f"SGD {word}": {"optimizer": "sgd"}, "SAM": {"optimizer": "sam", "rho": 0.1}},
        }
    )
    records = [made_up(config, 0) for config in study.configs()]
    console = printing()
    console.print(summary.table(Results(study, records)))
    for name in ("title", "setting", "SGD"):
        assert f"{name} {word}" in printed(console)


@pytest.mark.parametrize("word", FOLDERS)
def test_a_sweep(word, tmp_path, capsys, monkeypatch):
    """Its folder's runs one by one, and the table of the command."""
    monkeypatch.setattr(Config, "folder", property(lambda config: f"run {word.replace('/', '|')}"))
    study = Study.from_mapping({"base": BASE, "seeds": 1, "methods": {"SGD": {"optimizer": "sgd"}}})
    console = printing()
    sweep(study, tmp_path / word, CudaGraphs(1), console)
    assert printed(console) == f"1/1 runs  run {word.replace('/', '|')}\n"
    assert [record.finished for record in RunsFolder.of(tmp_path / word).all()] == [True]


def test_the_command_of_a_sweep(tmp_path, capsys):
    word = " ".join(WORDS)
    path = tmp_path / "study.yaml"
    path.write_text(f"base: {BASE}\nseeds: 1\nmethods: {{'SGD {word}': {{optimizer: sgd}}}}\n")
    words = ["sweep", str(path), "--out", str(tmp_path / "[/x]"), "--engine", "cuda-graphs", "--processes", "1"]
    assert cli.main(words) == 0
    assert f"SGD {word}" in capsys.readouterr().out


@pytest.mark.parametrize("word", FOLDERS)
def test_a_run(word, tmp_path, capsys):
    words = [f"--{name.replace('_', '-')}={value}" for name, value in BASE.items()]
    assert cli.main(["train", *words, "--out", str(tmp_path / word)]) == 0
    assert f": {tmp_path / word / 'record.json'}" in re.sub(r"\s+", " ", capsys.readouterr().out)


@pytest.mark.parametrize("word", WORDS)
def test_the_notes_of_a_run(word):
    run = SimpleNamespace(notes=[f"texts were cut {word}"], optimizer=None, epoch=0, step=1, steps_an_epoch=2)
    console = printing()
    ProgressBar(console, 1).step(run, 0.5)
    assert printed(console) == f"texts were cut {word}\n"


@pytest.mark.parametrize("word", FOLDERS)
def test_a_search(word, tmp_path):
    config = Config(**BASE, optimizer="sgd", holdout=0.1)
    console = printing()
    tune.tune(config, [tune.Range("lr", 0.01, 0.1)], 2, 1, tmp_path / word, CudaGraphs(1), console)
    assert printed(console).endswith(f"train with it: gtracer train --config {tmp_path / word / 'best.yaml'}\n")


@pytest.mark.parametrize("word", FOLDERS)
def test_the_demo(word, tmp_path, monkeypatch):
    page = tmp_path / word / "index.html"
    monkeypatch.setattr(demo, "sweep", lambda study, folder, *_: None)
    monkeypatch.setattr(demo.RunsFolder, "of", lambda folder: RunsFolder(folder, {}))
    monkeypatch.setattr(demo, "over_both", lambda *_: [1.0])
    monkeypatch.setattr(demo.report, "write", lambda *_: page)
    console = printing()
    demo.run(1, 1, tmp_path / word, console)
    assert printed(console).endswith(f"Report with curves: {page}\n")


@pytest.mark.parametrize("word", FOLDERS)
def test_sharpness(word):
    measured = SimpleNamespace(rows=lambda: [Row("trace", "trace", 1.0, None, False)])
    console = printing()
    console.print(sharpness.table([(word, measured)]))
    assert word in printed(console).replace("\n", "")


def calls():
    """Every call in the lab and the command line: the name that is called, and the call."""
    for path in [*Path(lab.__file__).parent.rglob("*.py"), Path(cli.__file__)]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield ast.unparse(node.func), node


def test_nothing_else_prints_text():
    """What goes to a console as it is, is a table; words go by `out`. Titles are `Text`; bars read no markup."""
    printed, titles, columns = [], [], []
    for name, call in calls():
        named = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name.endswith("onsole.print"):
            printed.append(ast.unparse(getattr(call.args[0], "func", call.args[0])))
        elif name == "Table" and "title" in named:
            titles.append(named["title"])
        elif name == "TextColumn" and "{" in ast.unparse(call.args[0]):
            columns.append(named.get("markup"))
    assert set(printed) == {"summary.table", "sharpness.table", "table", "_table", "found.table"}
    assert titles
    assert all(title.startswith("Text(") for title in titles)
    assert columns == ["False"] * 3
