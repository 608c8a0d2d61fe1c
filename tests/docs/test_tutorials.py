"""Every tutorial runs as it stands, prints what it says, and draws the figures that it shows."""

import re

import pytest
import torch
from PIL import Image

from support import tutorials
from support.places import ROOT

DOCS = ROOT / "docs"
PAGES = [DOCS / "start" / "five-minutes.md", *sorted((DOCS / "tutorials").glob("*.md"))]
NEEDS = {"fine-tuning": ["transformers", "accelerate"], "lora": ["transformers", "peft"], "label-errors": ["cleanlab"]}
PINNED = re.search(r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]


def five_minutes(names):
    """SGD memorises, TRACER does not."""
    last = {name: curve[-1] for name, curve in names["curves"].items()}
    assert last["SGD"] < 75
    assert last["SGD-TRACER"] > 85


def noisy_images(names):
    """With ρ auto as SGD, with the smaller ρ above both."""
    last = {name: names["test_accuracy"](name)[-1] for name in ("sgd", "auto", "found")}
    assert last["found"] > max(last["sgd"], last["auto"]) + 3


def noisy_table(names):
    assert names["last"]["sgd-tracer"] > max(names["last"]["sgd"], names["last"]["sgd-sam"]) + 4


def fine_tuning(names):
    """Both have learnt, and neither is said to be better."""
    assert min(names["found"]["AdamW"] + names["found"]["AdamW-TRACER"]) > 60


def lora(names):
    assert min(curve[-1] for curve in names["curves"].values()) > 80


def label_errors(names):
    assert names["hits"] / len(names["flagged"]) > 0.9
    assert names["hits"] / len(names["wrong"]) > 0.6


def sharpness(names):
    """TRACER's minimum is the flatter one by each of the three."""
    sgd, ours = names["found"]["SGD"], names["found"]["TRACER"]
    assert ours.top_eigenvalue < sgd.top_eigenvalue
    assert ours.trace < sgd.trace
    assert ours.expected_adaptive.value < sgd.expected_adaptive.value


CLAIMS = [five_minutes, noisy_images, noisy_table, fine_tuning, lora, label_errors, sharpness]


def test_each_has_its_claim():
    assert {path.stem.replace("-", "_") for path in PAGES} == {claim.__name__ for claim in CLAIMS}


@pytest.mark.filterwarnings("ignore")  # other people's libraries
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_it_runs(path, tmp_path, monkeypatch):
    """What it prints is compared on the version of torch that it was written with: others draw other numbers."""
    for module in NEEDS.get(path.stem, []):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    page, names = path.read_text(), {}
    outputs = tutorials.run(page, names)
    (claim,) = (claim for claim in CLAIMS if claim.__name__ == path.stem.replace("-", "_"))
    claim(names)
    assert outputs
    for told, printed in outputs:
        assert told.strip()
        if torch.__version__.split("+")[0] == PINNED:
            assert tutorials.differences(told, printed, points=6) == []
    shown = tutorials.figures(page)
    assert len(shown) == 1
    for name in shown:
        assert shape(tmp_path / name) == shape(DOCS / "figures" / name)
        assert (DOCS / "figures" / name).stat().st_size < 60_000


def shape(figure):
    if figure.suffix == ".svg":
        return re.search(r'<svg[^>]* viewBox="([^"]+)"', figure.read_text())[1]
    with Image.open(figure) as image:
        return image.size


def test_what_it_prints_is_compared():
    told = "SGD: 63.1 % in 2 s, trace 640\n"
    assert tutorials.differences(told, "SGD: 60.0 % in 30 s, trace 500\n", points=6) == []
    assert tutorials.differences(told, "SGD: 40.0 % in 2 s, trace 640\n", points=6) == ["63.1 is 40.0 now"]
    assert tutorials.differences(told, "SGD: 63.1 % in 2 s, trace 300\n", points=6) == ["640.0 is 300.0 now"]
    assert tutorials.differences(told, "nothing of the kind\n", points=6)
