"""The README's code runs as it stands; its two commands are run by CI."""

import importlib
import re
import shlex
import subprocess
import textwrap
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from torch import distributed, nn
from torch.nn.functional import cross_entropy

import gtracer
from gtracer import cli
from gtracer.lab.sweeps import study
from gtracer.lab.sweeps.launchers import local
from support.encoders import tiny_bert
from support.places import ROOT

DATA = """
import torch
from torch.utils.data import TensorDataset

def signals():
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long())
"""
NET = """
from torch import nn

def net(shape, classes):
    return nn.Sequential(nn.Linear(shape[0], 8), nn.Tanh(), nn.Linear(8, classes))
"""
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIALS = [page for page in PAGES if page.parent.name == "tutorials"]  # run by test_tutorials.py
HOW_TO = ["accumulation", "collapse", "ddp", "fsdp2", "mixed-precision", "timm", "training", "your-trainer"]


def blocks(language: str, page: str = README) -> list[str]:
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```", page, flags=re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for block in found]


def surroundings(folder: Path) -> dict:
    """What the README's reader has: a model with batch norm and dropout, batches, a loss."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
    batches = [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(3)]
    return {
        "gtracer": gtracer,
        "torch": torch,
        "cross_entropy": cross_entropy,
        "model": model,
        "batches": batches,
        "batch": batches[0],
        "loss_of": lambda batch: cross_entropy(model(batch[0]), batch[1]),
        "path": folder / "checkpoint.pt",
    }


def test_python_blocks_run(tmp_path, capsys):
    names = surroundings(tmp_path)
    before = [p.detach().clone() for p in names["model"].parameters()]
    for block in blocks("python"):
        exec(block, names)
    assert "Stats(loss=" in capsys.readouterr().out
    assert names["path"].exists()
    assert not torch.equal(before[0], next(names["model"].parameters()))


WARN = {"your-trainer": [pytest.mark.filterwarnings("ignore")]}  # the frameworks, of small machines and old calls


@pytest.mark.parametrize("page", [pytest.param(page, marks=WARN.get(page, [])) for page in HOW_TO])
def test_the_python_of_a_how_to_page_runs(page, tmp_path):
    """In order, on the reader's model."""
    names = surroundings(tmp_path)
    before = [p.detach().clone() for p in names["model"].parameters()]
    found = blocks("python", (ROOT / "docs" / "how-to" / f"{page}.md").read_text())
    assert found
    for block in found:
        exec(block, names)
    if "worker" in names:  # what each of several processes does, by one
        with alone(tmp_path):
            names["worker"](names["model"], names["batches"])
    assert not torch.equal(before[0], full(next(names["model"].parameters())))


def test_every_how_to_page_with_python_is_run():
    pages = {page.stem for page in PAGES if page.parent.name == "how-to" and blocks("python", page.read_text())}
    assert pages == {*HOW_TO, "choosing-rho", "sharpness"}


@contextmanager
def alone(folder):
    """A group of one process."""
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'group'}", rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def full(weights):
    return weights.to_local() if hasattr(weights, "to_local") else weights


def test_the_python_of_the_page_on_choosing_rho_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = surroundings(tmp_path)
    names["SGDTracer"] = gtracer.SGDTracer
    names["opt"] = gtracer.SGDTracer(names["model"].parameters(), lr=0.1, momentum=0.9, model=names["model"])
    names["held_out_batches"] = names["batches"]
    page = (ROOT / "docs" / "how-to" / "choosing-rho.md").read_text()
    (block,) = [b for b in blocks("python", page) if "find_rho" in b]
    exec(block.replace("steps=200", "steps=2"), names)
    assert "against ρ = 0" in capsys.readouterr().out
    assert (tmp_path / "rho.png").exists()


def test_the_docs_commands_run(tmp_path, monkeypatch):
    """Every `gtracer …` line of README and docs, with fewer epochs; runs of a sweep are made in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "studies"))
    monkeypatch.setattr(local, "Local", lambda *_: importlib.import_module("runs").in_turn)
    found = [block for page in PAGES if page not in TUTORIALS for block in blocks("sh", page.read_text())]
    lines = [line for block in found for line in block.splitlines()]
    commands = [shlex.split(line.removeprefix("gtracer ")) for line in lines if line.startswith("gtracer ")]
    assert commands
    quick = {
        "compare": ["--epochs", "1", "--seeds", "1"],
        "bench": ["--rounds", "1", "--batch-size", "4", "--micro-batch", "2", "--device", "cpu"],
        "sweep": ["--epochs", "1", "--seeds", "1"],
        "tune": ["--epochs", "1", "--trials", "2"],
        "find-rho": ["--epochs", "1", "--steps", "2"],
        "sharpness": ["--examples", "64", "--steps", "2", "--points", "3", "--samples", "1", "--ascent", "1"],
        **{command: [] for command in ("report", "records", "predict", "evaluate", "export", "find-label-errors")},
    }
    own_data(tmp_path)
    for words in commands:
        assert cli.main([*words, *quick.get(words[0], ["--epochs", "1"])]) == 0


def own_data(folder):
    """Images in class folders, new ones without, tables, texts with an encoder, functions."""
    draws = numpy.random.default_rng(0)
    for number in range(24):
        inner = folder / ("new-photos" if number < 2 else f"photos/{('cat', 'dog')[number % 2]}")
        inner.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draws.integers(0, 256, (20, 30, 3), dtype=numpy.uint8)).save(inner / f"{number}.png")
    rows = [f"{draws.integers(18, 80)},person {i},{('Ulm', 'Bonn')[i % 2]}" for i in range(40)]
    (folder / "people.csv").write_text("\n".join(["age,name,town", *rows]))
    sizes = draws.normal(100, 20, 60).round(1)
    (folder / "houses.csv").write_text("\n".join(["size,price", *(f"{size},{1000 * size + 0.5}" for size in sizes)]))
    (folder / "new-houses.csv").write_text("size\n95.5\n")
    texts = [f"{('good', 'bad')[i % 2]} film,{('yes', 'no')[i % 2]}" for i in range(40)]
    (folder / "films.csv").write_text("\n".join(["text,label", *texts]))
    (folder / "new-films.jsonl").write_text('{"text": "good film"}\n')
    tiny_bert(folder / "my-bert")
    (folder / "mydata.py").write_text(DATA)
    (folder / "mynet.py").write_text(NET)


def test_the_example_of_a_study_is_one(tmp_path):
    (block,) = blocks("yaml", (ROOT / "docs" / "how-to" / "studies.md").read_text())
    (tmp_path / "mine.yaml").write_text(block)
    mine = study.load(str(tmp_path / "mine.yaml"))
    assert len(mine.configs()) == 3 * 2 * 4
    assert [p.config.lr for p in mine.points() if p.label == "SAM, ρ 0.3"] == [0.02, 0.08]


def test_every_shipped_study_is_in_the_docs():
    page = (ROOT / "docs" / "how-to" / "studies.md").read_text()
    assert all(f"`{name}`" in page for name in study.shipped())


def test_the_derivation_s_example_runs(capsys):
    (block,) = blocks("python", (ROOT / "docs" / "explanation" / "derivation.md").read_text())
    names: dict = {}
    exec(block, names)
    assert "tensor(" in capsys.readouterr().out
    torch.testing.assert_close(names["q"].mean, torch.full((2,), 0.86, dtype=torch.float64), rtol=0, atol=0.005)


def test_the_curvature_s_examples_run(tmp_path):
    """In a net without batch norm, in order: the last optimiser made is the one that is drawn from."""
    names = surroundings(tmp_path)
    model = names["model"] = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    names["x"], names["y"] = names["batch"]
    names["loss_of"] = lambda batch: cross_entropy(model(batch[0]), batch[1])
    start = model[0].weight.detach().clone()
    for block in blocks("python", (ROOT / "docs" / "explanation" / "curvature.md").read_text()):
        exec(block, names)
    assert not torch.equal(start, model[0].weight)
    torch.testing.assert_close(names["p"].sum(1), torch.ones(6))


def test_the_sharpness_s_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = surroundings(tmp_path)
    found = blocks("python", (ROOT / "docs" / "how-to" / "sharpness.md").read_text())
    for block in found:
        exec(block, names)
    assert "m-sharpness, adaptive" in capsys.readouterr().out
    assert all((tmp_path / f"{name}.png").exists() for name in ("line", "plane", "eigenvectors", "between", "density"))


def test_both_sides_of_the_diff_run(tmp_path):
    (diff,) = blocks("diff")
    for side in "-+":
        names = surroundings(tmp_path)
        start = names["model"][0].weight.detach().clone()
        exec("\n".join(line[2:] for line in diff.splitlines() if line[:1] in (side, " ", "")), names)
        assert not torch.equal(start, names["model"][0].weight)


def test_ci_runs_the_two_commands():
    """`.ci/run` finds them after their markers: the very lines, the test command last."""
    script = (ROOT / ".ci" / "run").read_text()
    function = script[script.index("command_of()") : script.index("for name in")]
    for name, block in zip(("install-and-run", "install-and-test"), blocks("sh")[:2], strict=True):
        assert name in script
        done = subprocess.run(
            ["bash", "-c", f"{function}\ncommand_of {name}"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert done.stdout == block


def test_tests_that_are_named_exist():
    pages = [page.read_text() for page in PAGES if page.name != "log.md"]  # which tells of what has gone
    named = [name for page in pages for name in re.findall(r"`(tests/[\w/]+\.py)`", page)]
    assert len(named) > 60
    for name in named:
        assert (ROOT / name).exists()


def test_the_readme_is_short():
    assert len(README.split()) <= 900


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
