"""Which labels are wrong: on data whose mislabelled examples are known."""

import csv
import json
import re
from dataclasses import replace

import numpy
import pytest
import torch
from cleanlab.filter import find_label_issues
from sklearn.metrics import roc_auc_score

import gtracer
from gtracer import cli
from gtracer.lab import data
from gtracer.lab.config import Config
from gtracer.lab.errors import Interrupted, LabError
from gtracer.lab.inference import label_errors
from gtracer.lab.inference.trained import load
from gtracer.lab.results.record import Record
from gtracer.lab.training.trainer import train
from gtracer.lab.training.weights import best_epoch
from support.films import config as on_films

NOISY = Config(epochs=8, width=64, label_noise=0.2, optimizer="sgd-sam", rho=0.5, lr=0.05, holdout=0.1, device="cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("noisy") / "run"
    train(NOISY, folder, [], model=True)
    return folder


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_cleanlab_on_the_model_s_own_probabilities(run, capsys):
    assert cli.main(["find-label-errors", str(run)]) == 0
    out = capsys.readouterr().out
    task = data.load(NOISY)
    parts = (task.train, task.holdout)
    labels, truth = (torch.cat([getattr(part, name) for part in parts]).numpy() for name in ("labels", "truth"))
    wrong = labels != truth
    p = torch.cat([gtracer.load(run).probabilities(part) for part in parts]).double().numpy()
    p /= p.sum(1, keepdims=True)
    told = rows(run / "label-errors" / "label-errors.csv")
    order = [int(row["example"]) for row in told]
    assert sorted(order) == list(range(len(labels)))
    held_out = [int(row["example"]) for row in told if row["part"] == "held out"]
    assert sorted(held_out) == list(range(len(task.train.labels), len(labels)))
    given = p[numpy.arange(len(labels)), labels]
    assert (numpy.diff(given[order]) >= 0).all()
    flagged = {int(row["example"]) for row in told if row["wrong"] == "yes"}
    assert flagged == set(numpy.flatnonzero(find_label_issues(labels, p, n_jobs=1)))
    assert [row["suggested"] for row in told] == [str(i) for i in p.argmax(1)[order]]
    auc = roc_auc_score(wrong, -given)
    assert auc > 0.9
    precision, recall = len(flagged & set(numpy.flatnonzero(wrong))) / len(flagged), None
    recall = len(flagged & set(numpy.flatnonzero(wrong))) / wrong.sum()
    assert f"area under the ROC {auc:.3f}, precision {precision:.1%}, recall {recall:.1%}" in out
    page = (run / "label-errors" / "label-errors.html").read_text()
    assert page.count('<img src="data:image/png;base64,') == label_errors.SHOWN


def test_folds_are_judged_by_models_that_have_not_seen_them(run, tmp_path):
    trained = load(run)
    found = label_errors.find(trained, 2, tmp_path)
    task = data.load(NOISY)
    parts = [json.loads((tmp_path / f"fold-{k}-of-2" / "record.json").read_text()) for k in (1, 2)]
    assert sum(part["resolved"]["examples"] for part in parts) == len(task.train.labels)
    models = [load(tmp_path / f"fold-{k}-of-2").probabilities(task.train) for k in (1, 2)]
    given = torch.stack([p[torch.arange(len(p)), task.train.labels] for p in models]).double()
    quality, unseen = torch.tensor(found.quality).split([len(task.train.labels), len(task.holdout.labels)])
    own = trained.probabilities(task.holdout)[torch.arange(len(unseen)), task.holdout.labels]
    assert ((unseen - own.double()).abs() < 1e-6).all()
    is_first = (quality - given[0]).abs() < 1e-6
    assert ((quality - given[1]).abs() < 1e-6)[~is_first].all()
    assert parts[1]["resolved"]["examples"] == pytest.approx(int(is_first.sum()), abs=3)


def test_training_on_what_is_left(run, tmp_path, capsys):
    """Without the flagged examples, in either part; the record says so, and so does the command."""
    out = tmp_path / "out"
    assert cli.main(["find-label-errors", str(run), "--retrain", "--out", str(out)]) == 0
    flagged = [row["part"] for row in rows(out / "label-errors.csv") if row["wrong"] == "yes"]
    record = Record.read(out / "cleaned")
    task = data.load(NOISY)
    assert record.resolved["examples"] == len(task.train.labels) - flagged.count("training")
    assert record.resolved["holdout_examples"] == len(task.holdout.labels) - flagged.count("held out")
    assert f"{len(flagged)} examples with labels that are likely wrong left out" in record.notes
    now, then = (r.curves["test_accuracy"][best_epoch(r) - 1] for r in (record, Record.read(run)))
    assert f"without them: {now:.2%} on test data, {then:.2%} with them" in capsys.readouterr().out
    assert load(out / "cleaned").classes == load(run).classes


def test_models_of_other_data_are_not_used_again(run, tmp_path):
    """What is left after another judgement is trained on anew, and the same is not; what is not ours stays."""
    trained, task = load(run), data.load(NOISY)
    flagged = numpy.arange(len(task.train.labels) + len(task.holdout.labels)) < 10
    found = label_errors.Suspects(task, trained.classes, [], None, flagged, [])
    record, place = label_errors.retrain(found, trained, tmp_path)
    (place / "kept").touch()
    assert label_errors.retrain(found, trained, tmp_path)[0] == record
    assert (place / "kept").exists()
    fewer, _ = label_errors.retrain(
        replace(found, flagged=flagged | (numpy.arange(len(flagged)) < 20)), trained, tmp_path
    )
    assert fewer.resolved["examples"] == record.resolved["examples"] - 10
    assert not (place / "kept").exists()
    (place / label_errors.MARK).unlink()
    with pytest.raises(LabError, match="holds another run"):
        label_errors.retrain(found, trained, tmp_path)


def test_ctrl_c_says_how_to_go_on(run, tmp_path, monkeypatch):
    """By this command: `gtracer train --resume` on a fold would take all of the data."""

    def cut(*_, **__):
        raise Interrupted("go on with gtracer train --resume")

    monkeypatch.setattr(label_errors, "train", cut)
    with pytest.raises(Interrupted, match="give the same command again"):
        label_errors.find(load(run), 2, tmp_path)


def test_what_is_left_has_no_flagged_example(run):
    """Row for row, where the first ten to train on and all that is held out are flagged."""
    task = data.load(NOISY)
    count = len(task.train.labels)
    flagged = numpy.arange(count + len(task.holdout.labels)) < 10
    flagged[count:] = True
    left = label_errors.Suspects(task, (), [], None, flagged, []).cleaned()
    assert torch.equal(left.train.inputs, task.train.inputs[10:])
    assert torch.equal(left.train.labels, task.train.labels[10:])
    assert left.holdout is None
    with pytest.raises(LabError, match=f"all {count} training examples are flagged"):
        label_errors.Suspects(task, (), [], None, flagged | True, []).cleaned()


def test_a_table_s_rows_are_those_of_the_file(tmp_path):
    """With values that are missing, and a name that would be a tag."""
    lines = ["<i>age,height,town,label"]
    lines += [
        f"{20 + n % 40},{'' if n % 7 == 0 else 1.5 + n / 300},{('Bonn', 'Köln', '')[n % 3]},{n % 2}" for n in range(90)
    ]
    (tmp_path / "people.csv").write_text("\n".join(lines) + "\n")
    config = Config(task=str(tmp_path / "people.csv"), model="mlp", width=8, epochs=1, optimizer="sgd", device="cpu")
    train(config, tmp_path / "run", [], model=True)
    label_errors.find(load(tmp_path / "run"), 1, tmp_path / "out")
    page = (tmp_path / "out" / "label-errors.html").read_text()
    assert "&lt;i&gt;age" in page
    assert "<i>" not in page
    seen = re.findall(r"<table>(.*?)</table>.*?<small>people.csv: row (\d+)", page, re.DOTALL)
    assert len(seen) == 72
    for table, number in seen:
        age, height, town, _ = lines[int(number)].split(",")
        told = re.findall(r"<td>([^<]*)</td></tr>", table)
        assert told == [age, f"{float(height):.6g}" if height else "–", town or "–"]


def test_classes_that_are_not_the_model_s(tmp_path, capsys):
    """A label that was renamed after training would otherwise be taken for another."""
    path = tmp_path / "people.csv"
    path.write_text("age,label\n" + "".join(f"{n / 2},{'yes' if n % 2 else 'no'}\n" for n in range(40)))
    config = Config(task=str(path), model="mlp", width=8, epochs=1, optimizer="sgd", device="cpu")
    train(config, tmp_path / "run", [], model=True)
    path.write_text(path.read_text().replace("no", "zero"))
    assert cli.main(["find-label-errors", str(tmp_path / "run")]) == 1
    assert "has other classes than the model ('" in capsys.readouterr().err


def test_texts_on_the_page_are_text(tmp_path):
    config = replace(on_films(tmp_path), epochs=1)
    path = tmp_path / "films.csv"
    path.write_text(path.read_text().replace("film,", "<script>film,"))
    train(config, tmp_path / "run", [], model=True)
    assert cli.main(["find-label-errors", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "label-errors" / "label-errors.html").read_text()
    assert "&lt;script&gt;film" in page
    assert "<script>" not in page
    assert {row["example"] for row in rows(tmp_path / "run" / "label-errors" / "label-errors.csv")} <= {
        f"films.csv: row {n}" for n in range(1, 61)
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--folds", "5000"], "folds = 5000 are more than the"),
        (["--folds", "0"], "--folds: must be a whole number of at least 1"),
    ],
)
def test_one_clear_line(run, words, message, capsys):
    try:
        code = cli.main(["find-label-errors", str(run), *words])
    except SystemExit as stopped:
        code = stopped.code
    error = capsys.readouterr().err
    assert code in (1, 2)
    assert message in error
    assert error.count("\n") == 1
