"""`gtracer sharpness`: of runs and of a function of one's own, as a table, numbers and figures."""

import json
import math
import re
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import huber_loss, mse_loss

import gtracer
from gtracer import cli
from gtracer.lab import data
from gtracer.lab.config import Config
from gtracer.lab.inference.sharpness import subject
from gtracer.lab.training.trainer import train
from gtracer.sharpness import classification, measure
from gtracer.sharpness.result import INVARIANT

SMALL = Config(label_noise=0.5, epochs=2, width=16, rho=0.01, batch_size=64, lr=0.05)
QUICK = ["--examples", "96", "--steps", "4", "--probes", "2", "--samples", "1", "--ascent", "2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    for name, options in {"tracer": {}, "sgd": {"optimizer": "sgd", "rho": None}}.items():
        train(replace(SMALL, **options), place / name, [], model=True)
    return place


def told(path):
    return json.loads(path.read_text())


def test_the_numbers_are_measure_s_on_training_examples_with_the_labels_they_were_trained_on(runs, capsys):
    assert cli.main(["sharpness", str(runs / "tracer"), *QUICK]) == 0
    out = capsys.readouterr().out
    found = told(runs / "tracer" / "sharpness" / "sharpness.json")
    trained = gtracer.load(runs / "tracer")
    its = subject(trained, examples=96)
    assert [len(labels) for _, labels in its.batches] == [64, 32]
    expected = measure(
        trained.model,
        classification(trained.model),
        its.batches,
        steps=4,
        probes=2,
        samples=1,
        ascent=2,
        progress=False,
    )
    assert {row["name"]: row["value"] for row in found["rows"]} == {row.name: row.value for row in expected.rows()}
    assert {row["name"] for row in found["rows"]} == set(INVARIANT)
    assert found["sharpness"]["hessian"]["eigenvalues"] == list(expected.hessian.eigenvalues)
    assert (runs / "tracer" / "sharpness" / "density.png").stat().st_size > 1000
    assert re.search(r"invariant", out)
    assert f"{expected.top_eigenvalue:.4g}" in out


def test_the_examples_are_a_fair_sample_of_the_noisy_labels(runs):
    """Not those whose labels are wrong, which are drawn by the run's seed."""
    config = gtracer.load(runs / "tracer").config
    for seed in (0, 1):
        trained = replace(gtracer.load(runs / "tracer"), config=replace(config, seed=seed))
        its = subject(trained, examples=400)
        task = data.load(trained.config)
        given = {tuple(x.tolist()): i for i, x in enumerate(task.train.inputs)}
        rows = torch.tensor([given[tuple(x.tolist())] for inputs, _ in its.batches for x in inputs])
        labels = torch.cat([labels for _, labels in its.batches])
        assert torch.equal(task.train.labels[rows], labels)
        wrong = (labels != task.train.truth[rows]).double().mean()
        assert wrong == pytest.approx(0.5, abs=0.1)


def test_several_runs_side_by_side_and_the_way_between_them(runs, tmp_path, capsys):
    words = [str(runs / "tracer"), str(runs / "sgd"), "--landscape", "--between", "--points", "3", "--split", "test"]
    assert cli.main(["sharpness", *words, *QUICK, "--out", str(tmp_path)]) == 0
    assert "tracer" in capsys.readouterr().out
    figures = {path.name for path in (tmp_path / "sgd").iterdir()}
    lines = {
        "density.png",
        "line.png",
        "plane.png",
        "plane-accuracy.png",
        "eigenvectors.png",
        "eigenvectors-accuracy.png",
    }
    assert figures == lines | {"from-tracer.png", "sharpness.json"}
    found = told(tmp_path / "sgd" / "sharpness.json")["landscapes"]
    way = found["from-tracer"]
    assert way["positions"] == [0, 0.5, 1]
    assert len(found["plane"]["losses"]) == 3
    middle = found["plane"]["losses"][1][1]
    assert middle == pytest.approx(found["line"]["losses"][1]) == pytest.approx(found["eigenvectors"]["losses"][1][1])


@pytest.mark.parametrize(("loss", "distance"), [("mse", mse_loss), ("huber", huber_loss)])
def test_of_real_numbers_it_is_of_training_s_loss(tmp_path, monkeypatch, capsys, loss, distance):
    monkeypatch.chdir(tmp_path)
    lines = [f"{n % 7},{n % 5},{(n % 7) * 2 + (n % 5) ** 2 / 3}" for n in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,label", *lines]))
    config = Config(task="t.csv", loss=loss, epochs=1, width=8, optimizer="sgd", device="cpu")
    train(config, tmp_path / "run", [], model=True)
    assert cli.main(["sharpness", "run", *QUICK]) == 0
    capsys.readouterr()
    model, train_data = gtracer.load("run").model, data.load(config).train
    values = model(train_data.inputs).squeeze(1)
    gradients = torch.autograd.grad(distance(values, train_data.labels), list(model.parameters()))
    rows = {row["name"]: row["value"] for row in told(tmp_path / "run" / "sharpness" / "sharpness.json")["rows"]}
    length = math.sqrt(sum(g.double().square().sum().item() for g in gradients))
    assert rows["gradient_norm"] == pytest.approx(length, rel=1e-4)
    its = subject(gtracer.load("run"), batch_size=16)
    options = {"matrices": [], "samples": 1, "ascent": 0, "progress": False}
    apart, merged = (its.measured(merge=most, **options).expected.value for most in (0, 64))
    assert merged == pytest.approx(apart, rel=1e-3)


def test_a_function_of_one_s_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def problem():\n"
        "    torch.manual_seed(0)\n"
        "    model = torch.nn.Linear(3, 1)\n"
        "    return model, lambda b: (model(b[0]) - b[1]).square().mean(), [(torch.ones(4, 3), torch.zeros(4, 1))]\n"
        "def wrong():\n"
        "    return torch.nn.Linear(3, 1)\n"
    )
    assert cli.main(["sharpness", "mine:problem", *QUICK]) == 0
    rows = {row["name"]: row["value"] for row in told(tmp_path / "sharpness-problem" / "sharpness.json")["rows"]}
    assert rows["hessian.top"] == pytest.approx(8)  # 2 x xᵀ of four ones
    assert rows["hessian.trace"] == pytest.approx(8)
    assert cli.main(["sharpness", "mine:wrong", *QUICK]) == 1
    assert "must give a model, its loss of a batch, and batches" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "nowhere"),
        (["RUN", "--between"], "--between needs two models at least, got 1"),
        (["RUN", "--points", "1"], "--points must be at least 2, got 1"),
        (["RUN", "--steps", "0"], "must be a whole number of at least 1"),
        (["RUN", "--radius", "0"], "must be a number above 0, got '0'"),
        (["RUN", "--split", "holdout"], "invalid choice"),
        (["no_such_module:function"], "no_such_module:function cannot be imported"),
    ],
)
def test_one_clear_line(runs, words, said, capsys):
    words = [str(runs / "tracer") if word == "RUN" else word for word in words]
    with suppress(SystemExit):  # argparse's
        assert cli.main(["sharpness", *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith("gtracer: ")
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("fails()", "mine:given raises OSError: a b (mine.py, line 4)"),
        ("(net, lambda batch: 1 / 0, [x])", "given raises ZeroDivisionError: division by zero (mine.py, line 10)"),
        ("(net, lambda batch: batch.y, [x])", "given raises AttributeError: 'Tensor' object has no attribute 'y'"),
        ("(net, lambda batch: net(batch).sum(), fails)", "given: batches must be a DataLoader or a list of batches"),
    ],
)
def test_a_function_of_one_s_own_that_fails(given, message, tmp_path, monkeypatch, capsys):
    lines = ["import torch", "from torch import nn", "def fails(*_):", "    raise OSError('a\\nb')"]
    lines += ["net, x = nn.Linear(2, 1), torch.ones(2, 2)", "", "", "", "def given():", f"    return {given}"]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sharpness", "mine:given", *QUICK[2:]]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"gtracer: {message}")
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["mine.py"]


def test_weights_that_are_no_numbers(runs, tmp_path, capsys):
    trained = gtracer.load(runs / "tracer")
    its = subject(trained, examples=64)
    with torch.no_grad():
        next(trained.model.parameters()).fill_(math.nan)
    with pytest.raises(gtracer.lab.errors.LabError, match="tracer: the loss of batch 0 is nan"):
        its.measured(progress=False)


def test_without_enough_memory_one_line_says_which_option_to_change(runs, monkeypatch):
    its = subject(gtracer.load(runs / "tracer"), examples=96)

    def fails(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(its.model, "forward", fails)
    with pytest.raises(gtracer.lab.errors.LabError) as caught:
        its.measured(progress=False)
    said = "tracer: there is not enough memory for batches of 64: choose a smaller --batch-size, or fewer --steps"
    assert str(caught.value) == said


def test_where_batches_are_merged_the_numbers_stay(runs):
    its = subject(gtracer.load(runs / "tracer"), examples=96, batch_size=16)
    sizes = []
    its.model.register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    found = {most: its.measured(merge=most, steps=4, tolerance=0.0, progress=False) for most in (0, 96)}
    assert set(sizes) == {16, 96}
    for row, other in zip(*(each.rows() for each in found.values()), strict=True):
        assert other.value == pytest.approx(row.value, rel=1e-3, abs=1e-6), row.name


def test_the_report_has_a_section_of_it(runs, tmp_path, capsys):
    for name in ("tracer", "sgd"):
        assert cli.main(["sharpness", str(runs / name), *QUICK]) == 0
    assert cli.main(["report", str(runs), "-o", str(tmp_path / "with")]) == 0
    page = (tmp_path / "with" / "index.html").read_text()
    found = told(runs / "sgd" / "sharpness" / "sharpness.json")["rows"]
    assert ">Sharpness</h2>" in page
    for row in found:
        assert f"{row['value']:.4g}" in page
    table = (tmp_path / "with" / "tables" / "sharpness.md").read_text().splitlines()
    assert table[0] == "|  | sgd | tracer | invariant |"
    assert len(table) == 2 + len(found)
    (runs / "sgd" / "sharpness" / "sharpness.json").write_text("[]")
    (runs / "tracer" / "sharpness" / "sharpness.json").unlink()
    capsys.readouterr()
    assert cli.main(["report", str(runs), "-o", str(tmp_path / "without")]) == 0
    assert "sharpness.json is damaged" in capsys.readouterr().err
    assert "Sharpness</h2>" not in (tmp_path / "without" / "index.html").read_text()
