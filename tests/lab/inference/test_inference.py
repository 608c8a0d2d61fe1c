"""What a run leaves for use: its model, rebuilt without its data; predictions, an evaluation, exports."""

import csv
import json
import shutil
from dataclasses import replace

import numpy
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from sklearn.metrics import accuracy_score, confusion_matrix

import gtracer
from gtracer import cli
from gtracer.lab import data
from gtracer.lab.config import Config
from gtracer.lab.data.task import Found
from gtracer.lab.errors import Interrupted, LabError
from gtracer.lab.inference import export, figure
from gtracer.lab.inference.evaluation import Evaluation
from gtracer.lab.inference.residuals import Residuals
from gtracer.lab.inference.trained import load
from gtracer.lab.models import saved
from gtracer.lab.results.record import Record
from gtracer.lab.training.trainer import train
from support.films import config as on_films
from support.runs import StopAfter

DIGITS = Config(epochs=3, width=16, batch_size=256)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A run on digits, and digits as images in class folders."""
    folder = tmp_path_factory.mktemp("digits")
    train(DIGITS, folder / "run", [], model=True)
    test = data.load(DIGITS).test
    for i, (x, label) in enumerate(zip(test.inputs[:60], test.labels[:60].tolist(), strict=True)):
        inner = folder / "images" / str(label)
        inner.mkdir(parents=True, exist_ok=True)
        pixels = (x.reshape(8, 8) * 255).round().to(torch.uint8).numpy()
        Image.fromarray(pixels).save(inner / f"{i}.{'bmp' if i % 2 else 'png'}")
    return folder


@pytest.fixture(scope="module")
def films(tmp_path_factory):
    """A run of a small BERT on texts."""
    folder = tmp_path_factory.mktemp("films")
    train(replace(on_films(folder), epochs=1, holdout=0.2), folder / "run", [], model=True)
    return folder


def facts(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


class TestWhatARunLeaves:
    def test_the_last_weights_where_nothing_is_held_out(self, digits):
        trained = gtracer.load(digits / "run")
        test = data.load(DIGITS).test
        accuracy = (trained.probabilities(test).argmax(1) == test.labels).double().mean().item()
        assert accuracy == pytest.approx(Record.read(digits / "run").curves["test_accuracy"][-1], abs=1e-12)
        assert facts(digits / "run" / saved.WEIGHTS)["epoch"] == "3"
        assert not (digits / "run" / saved.LAST).exists()
        assert not trained.model.training

    def test_the_best_by_held_out_data_and_the_last(self, tmp_path):
        """Of a rate so high that accuracy goes up and down; each file is of the epoch that it says."""
        config = replace(DIGITS, holdout=0.2, epochs=6, lr=2.0, schedule="constant", optimizer="sgd", model="mlp-ln")
        record = train(config, tmp_path, [], model=True)
        held_out = record.curves["holdout_accuracy"]
        best = max(range(6), key=held_out.__getitem__)
        assert best != 5
        assert facts(tmp_path / saved.WEIGHTS)["epoch"] == str(best + 1)
        task = data.load(config)
        for last, epoch in ((False, best), (True, 5)):
            found = load(tmp_path, last=last).probabilities(task.holdout).argmax(1)
            assert (found == task.holdout.labels).double().mean().item() == pytest.approx(held_out[epoch], abs=1e-12)

    def test_a_run_that_was_cut_leaves_the_same(self, tmp_path):
        config = replace(DIGITS, holdout=0.2, epochs=4)
        train(config, tmp_path / "whole", [], model=True)
        with pytest.raises(Interrupted):
            train(config, tmp_path / "cut", [StopAfter(11)], model=True)
        train(config, tmp_path / "cut", [], resume=True, model=True)
        for name in (saved.WEIGHTS, saved.LAST, saved.DESCRIPTION):
            assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()

    def test_a_sweep_leaves_none(self, tmp_path):
        train(replace(DIGITS, epochs=1), tmp_path, [])
        assert not list(tmp_path.glob("*.safetensors"))

    def test_an_encoder_needs_neither_its_data_nor_the_hub(self, films, tmp_path):
        shutil.copytree(films / "run", tmp_path / "run")
        trained, config = gtracer.load(tmp_path / "run"), on_films(films)
        test = data.load(replace(config, epochs=1, holdout=0.2)).test
        found = (trained.probabilities(test).argmax(1) == test.labels).double().mean().item()
        assert found == pytest.approx(Record.read(films / "run").curves["test_accuracy"][-1], abs=1e-12)
        splits = json.loads((films / "run" / "splits.json").read_text())
        every = [name for part in splits.values() for name in part]
        assert len(set(every)) == len(every) == 60
        assert {part: len(names) for part, names in splits.items()} == {"train": 38, "holdout": 10, "test": 12}


class TestPredict:
    def test_images(self, digits, tmp_path):
        """Class folders, a folder without classes, one file: the same images, the same probabilities."""
        out = tmp_path / "p.csv"
        assert cli.main(["predict", str(digits / "run"), str(digits / "images"), "--out", str(out)]) == 0
        told = rows(out)
        assert list(told[0]) == ["example", "label", "predicted", *map(str, range(10))]
        model = gtracer.load(digits / "run").model
        for row in told:
            assert row["label"] == row["example"].split("/")[0]
            with Image.open(digits / "images" / row["example"]) as image:
                pixels = torch.tensor(numpy.array(image)) / 255
            p = model(pixels.reshape(1, 64)).softmax(1)[0]
            assert row["predicted"] == str(p.argmax().item())
            assert [float(row[str(i)]) for i in range(10)] == pytest.approx(p.tolist(), abs=1e-5)
        (tmp_path / "loose").mkdir()
        shutil.copy(digits / "images" / told[0]["example"], tmp_path / "loose")
        (one,) = (tmp_path / "loose").iterdir()
        for place in (tmp_path / "loose", one):
            assert cli.main(["predict", str(digits / "run"), str(place), "--out", str(out)]) == 0
            (row,) = rows(out)
            assert row == {k: v for k, v in told[0].items() if k not in ("label", "example")} | {"example": one.name}

    def test_texts_without_labels(self, films, tmp_path):
        (tmp_path / "new.jsonl").write_text('{"text": "very good film"}\n{"text": "bad film", "more": 1}\n')
        assert cli.main(["predict", str(films / "run"), str(tmp_path / "new.jsonl"), "--out", str(tmp_path / "p")]) == 0
        told = rows(tmp_path / "p")
        assert [list(row) for row in told] == [["example", "predicted", "0", "1"]] * 2
        trained = gtracer.load(films / "run")
        p = trained.probabilities(Found([("very good film",), ("bad film",)], ["", ""]))
        assert [[float(row["0"]), float(row["1"])] for row in told] == [pytest.approx(q, abs=1e-5) for q in p.tolist()]


class TestEvaluate:
    def test_against_labels(self, digits, tmp_path, capsys):
        out = tmp_path / "out"
        assert cli.main(["evaluate", str(digits / "run"), str(digits / "images"), "--out", str(out)]) == 0
        told = json.loads((out / "evaluation.json").read_text())
        assert cli.main(["predict", str(digits / "run"), str(digits / "images"), "--out", str(tmp_path / "p")]) == 0
        predicted = rows(tmp_path / "p")
        labels, found = ([row[name] for row in predicted] for name in ("label", "predicted"))
        assert told["accuracy"] == pytest.approx(accuracy_score(labels, found))
        assert told["confusion"] == confusion_matrix(labels, found, labels=list("0123456789")).tolist()
        sure = [float(row[row["label"]]) for row in predicted]
        assert told["nll"] == pytest.approx(-numpy.log(sure).mean(), abs=1e-4)
        for row in told["classes"]:
            right = sum(a == b == row["class"] for a, b in zip(labels, found, strict=True))
            assert row["recall"] == pytest.approx(right / labels.count(row["class"]))
        for name in ("confusion.png", "calibration.png"):
            with Image.open(out / name) as image:
                assert image.size == (840, 720)
        assert f"accuracy {told['accuracy']:.2%} of 60 examples" in capsys.readouterr().out

    def test_on_the_run_s_own_test_data(self, digits):
        assert cli.main(["evaluate", str(digits / "run")]) == 0
        told = json.loads((digits / "run" / "evaluation" / "evaluation.json").read_text())
        assert told["accuracy"] == pytest.approx(Record.read(digits / "run").curves["test_accuracy"][-1])
        assert told["examples"] == 450


class TestExport:
    def exported(self, run, kind, out):
        assert cli.main(["export", str(run), "--format", kind, "--out", str(out)]) == 0
        return out

    def test_onnx_of_a_net(self, digits, tmp_path):
        onnxruntime = pytest.importorskip("onnxruntime")
        session = onnxruntime.InferenceSession(self.exported(digits / "run", "onnx", tmp_path / "m.onnx"))
        for count in (1, 5):
            x = torch.rand(count, 64)
            (found,) = session.run(None, {"input": x.numpy()})
            expected = gtracer.load(digits / "run").model(x)
            torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-5)

    def test_onnx_of_an_encoder(self, films, tmp_path):
        onnxruntime = pytest.importorskip("onnxruntime")
        session = onnxruntime.InferenceSession(self.exported(films / "run", "onnx", tmp_path / "m.onnx"))
        batch = self.tokens(films)
        (found,) = session.run(None, {name: values.numpy() for name, values in batch.items()})
        expected = gtracer.load(films / "run").model(batch)
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.filterwarnings("ignore:`torch.jit.load` is deprecated")
    def test_torchscript(self, digits, films, tmp_path):
        x = torch.rand(5, 64)
        script = torch.jit.load(self.exported(digits / "run", "torchscript", tmp_path / "m.pt"))
        torch.testing.assert_close(script(x), gtracer.load(digits / "run").model(x))
        script = torch.jit.load(self.exported(films / "run", "torchscript", tmp_path / "n.pt"))
        batch = self.tokens(films)
        torch.testing.assert_close(script(*batch.values()), gtracer.load(films / "run").model(batch))

    def test_hugging_face(self, films, tmp_path):
        transformers = pytest.importorskip("transformers")
        folder = self.exported(films / "run", "hf", tmp_path / "hf")
        classify = transformers.pipeline("text-classification", str(folder), top_k=None)
        (told,) = classify(["very good film"])
        trained = gtracer.load(films / "run")
        expected = trained.probabilities(Found([("very good film",)], [""]))[0]
        assert {each["label"]: each["score"] for each in told} == {
            name: pytest.approx(p, abs=1e-5) for name, p in zip(trained.classes, expected.tolist(), strict=True)
        }

    def tokens(self, films):
        """Of texts of unequal lengths, in another number than it was exported with."""
        trained = gtracer.load(films / "run")
        texts = Found([("good film",), ("very bad bad film",)], ["", ""])
        return trained.built.batches(texts, torch.device("cpu"))(torch.arange(2), 7)


def a_label_of_another(folder):
    (folder / "images" / "cat").mkdir(parents=True)
    Image.new("L", (8, 8)).save(folder / "images" / "cat" / "1.png")
    return ["evaluate", "run", "images"]


def an_image_cut_short(folder):
    (folder / "images").mkdir()
    Image.effect_noise((64, 64), 50).save(folder / "images" / "1.png")
    content = (folder / "images" / "1.png").read_bytes()
    (folder / "images" / "1.png").write_bytes(content[: len(content) // 2])
    return ["predict", "run", "images"]


def an_empty_image(folder):
    (folder / "1.png").touch()
    return ["predict", "run", "1.png"]


def weights_cut_short(folder):
    content = (folder / "run" / saved.WEIGHTS).read_bytes()
    (folder / "run" / saved.WEIGHTS).write_bytes(content[: len(content) // 2])
    return ["evaluate", "run"]


def another_head(folder):
    about = json.loads((folder / "run" / saved.DESCRIPTION).read_text())
    about["model"]["outputs"], about["classes"] = 7, about["classes"][:7]
    (folder / "run" / saved.DESCRIPTION).write_text(json.dumps(about))
    return ["evaluate", "run"]


def no_weights(folder):
    (folder / "run" / saved.WEIGHTS).unlink()
    return ["evaluate", "run"]


def a_damaged_description(folder):
    (folder / "run" / saved.DESCRIPTION).write_text('{"format": 1}')
    return ["evaluate", "run"]


def no_labels(folder):
    Image.new("L", (8, 8)).save(folder / "1.png")
    return ["evaluate", "run", "1.png"]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (a_label_of_another, "label 'cat' was never seen in training: the model knows 0, 1, 2"),
        (an_image_cut_short, "cannot read the image images/1.png"),
        (an_empty_image, "cannot read the image 1.png: it is empty: remove or replace it"),
        (weights_cut_short, "model.safetensors is damaged"),
        (another_head, "model.safetensors is of another model: 'size mismatch for 7.weight"),
        (no_weights, "run holds no model.safetensors yet: go on with gtracer train --resume run"),
        (a_damaged_description, "model.json is damaged (there is no model; there is no classes"),
        (no_labels, "1.png has no labels to compare with, or not for every example: use gtracer predict"),
        (lambda _: ["predict", "run", "none"], "cannot read none: there is no such file or folder"),
        (lambda _: ["predict", "elsewhere", "none"], "elsewhere holds no model.json: gtracer train leaves one"),
        (lambda _: ["export", "run", "--format", "hf"], "hf is for encoders of texts, not model mlp-bn"),
        (lambda _: ["export", "run", "--out", "no/folder.txt/x"], "cannot write no/folder.txt/x"),
    ],
)
def test_one_clear_line(made, message, digits, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no").mkdir()
    (tmp_path / "no" / "folder.txt").touch()
    shutil.copytree(digits / "run", tmp_path / "run")
    assert cli.main(made(tmp_path)) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.fixture(scope="module")
def houses(tmp_path_factory):
    """A run that predicts a real number from a table, with its file."""
    folder = tmp_path_factory.mktemp("houses")
    draws = numpy.random.default_rng(0)
    x = draws.normal(size=(120, 2))
    lines = [f"{a:.6f},{b:.6f},{200 + 30 * a - 10 * b:.6f}" for a, b in x]
    (folder / "houses.csv").write_text("\n".join(["a,b,price", *lines]))
    config = Config(task=str(folder / "houses.csv"), label_column="price", epochs=30, width=16, device="cpu")
    train(config, folder / "run", [], model=True)
    return folder


class TestRealNumbers:
    def test_predictions_are_in_their_own_unit(self, houses, tmp_path):
        assert cli.main(["predict", str(houses / "run"), str(houses / "houses.csv"), "--out", str(tmp_path / "p")]) == 0
        told = rows(tmp_path / "p")
        assert list(told[0]) == ["example", "label", "predicted"]
        found = gtracer.load(houses / "run").predict(houses / "houses.csv")
        assert [float(row["predicted"]) for row in told] == pytest.approx(found.tolist(), rel=1e-6)
        wanted = numpy.array([float(row["label"]) for row in told])
        assert numpy.corrcoef(wanted, found.numpy())[0, 1] > 0.9
        assert abs(found.mean().item() - wanted.mean()) < 10

    def test_evaluated_by_scikit_learn_s_scores(self, houses, tmp_path, capsys):
        from sklearn.metrics import mean_absolute_error, r2_score

        words = [str(houses / "run"), str(houses / "houses.csv"), "--out", str(tmp_path)]
        assert cli.main(["evaluate", *words]) == 0
        told = json.loads((tmp_path / "evaluation.json").read_text())
        wanted = [float(line.split(",")[2]) for line in (houses / "houses.csv").read_text().splitlines()[1:]]
        given = gtracer.load(houses / "run").predict(houses / "houses.csv").tolist()
        assert told["r2"] == pytest.approx(r2_score(wanted, given))
        assert told["mae"] == pytest.approx(mean_absolute_error(wanted, given))
        assert [part["examples"] for part in told["parts"]] == [24] * 5
        assert told["parts"][0]["from"] == pytest.approx(min(wanted))
        for name in ("predicted.png", "residuals.png"):
            with Image.open(tmp_path / name) as image:
                assert image.size == (840, 720)
        said = capsys.readouterr().out
        assert f"R² {told['r2']:.3f}" in said
        assert "of 120 examples, against the labels as they are" in said

    def test_on_its_own_test_data(self, houses):
        assert cli.main(["evaluate", str(houses / "run")]) == 0
        told = json.loads((houses / "run" / "evaluation" / "evaluation.json").read_text())
        assert told["r2"] == pytest.approx(Record.read(houses / "run").curves["test_r2"][-1], rel=1e-5)

    @pytest.mark.filterwarnings("ignore:`torch.jit.load` is deprecated")
    def test_exports_give_the_number(self, houses, tmp_path, capsys):
        trained = gtracer.load(houses / "run")
        found = trained.read(houses / "houses.csv")
        path = str(tmp_path / "m.pt")
        assert cli.main(["export", str(houses / "run"), "--format", "torchscript", "--out", path]) == 0
        given = torch.jit.load(path)(found.inputs).squeeze(1)
        torch.testing.assert_close(given.double(), trained.numbers(found), rtol=1e-5, atol=1e-4)
        assert "its outputs are the model's" in capsys.readouterr().out

    def test_it_knows_no_classes(self, houses):
        trained = gtracer.load(houses / "run")
        with pytest.raises(LabError, match=r"predicts real numbers \(price\), no classes"):
            trained.probabilities(trained.read(houses / "houses.csv"))


@pytest.mark.parametrize("count", [2, 12, 30])
def test_pictures_have_room_for_any_names(tmp_path, count):
    """Without a warning, which is an error here, from layout, fonts or formulas; and names stay different."""
    names = tuple(f"{'a name $x_{' * 40}\n\t猫🙂 {i}" for i in range(count))
    assert len(set(map(figure.name, names))) == count
    draws = torch.Generator().manual_seed(0)
    made = Evaluation(
        names, torch.randint(count, (60,), generator=draws), torch.rand(60, count, generator=draws).softmax(1)
    )
    made.write(tmp_path)
    with Image.open(tmp_path / "confusion.png") as picture:
        pixels = numpy.asarray(picture.convert("RGB"), dtype=int)
    blue = (pixels[..., 2] - pixels[..., 0] > 20).any(0)  # the matrix, or the colours beside it
    assert blue.mean() > 0.4
    Residuals(names[0], torch.rand(9), torch.rand(9)).write(tmp_path / "numbers")


def test_hugging_face_s_model_of_a_real_number(tmp_path):
    """Its own last layer gives the number in its unit."""
    transformers = pytest.importorskip("transformers")
    base = on_films(tmp_path)
    lines = [f"{'good ' * (i % 9)}film,{i % 9 + 0.5}" for i in range(40)]
    (tmp_path / "films.csv").write_text("\n".join(["text,label", *lines]))
    train(replace(base, epochs=1), tmp_path / "run", [], model=True)
    assert cli.main(["export", str(tmp_path / "run"), "--format", "hf", "--out", str(tmp_path / "hf")]) == 0
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")(["good film"], return_tensors="pt")
    expected = gtracer.load(tmp_path / "run").numbers(Found([("good film",)], [""]))
    torch.testing.assert_close(model(**words).logits[0].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["onnx", "torchscript", "hf"])
@pytest.mark.parametrize("before", [None, "mine"])
@pytest.mark.parametrize("fault", ["other outputs", "unreadable"])
def test_an_export_that_fails_its_check_leaves_what_was_there(
    digits, films, tmp_path, monkeypatch, capsys, kind, before, fault
):
    """Such as a model that torch.jit.trace fixes to what it saw."""
    run, out = (films if kind == "hf" else digits) / "run", tmp_path / "out"
    file = out / "config.json" if kind == "hf" else out
    if before is not None:
        file.parent.mkdir(exist_ok=True)
        file.write_text(before)
    name, write, _ = export.FORMATS[kind]

    def read(trained, place):
        if fault == "unreadable":
            raise RuntimeError("it has no beginning")
        return lambda x, *_: torch.zeros(len(x), len(trained.classes))

    monkeypatch.setitem(export.FORMATS, kind, (name, write, read))
    assert cli.main(["export", str(run), "--format", kind, "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    if fault == "unreadable":
        assert f"cannot be exported as {kind} and read again: it has no beginning" in error
    else:
        assert f"as {kind} the model gives other outputs than it does here" in error
        assert error.endswith("nothing is written\n")
    assert [p.read_text() for p in tmp_path.rglob("*") if p.is_file()] == ([] if before is None else [before])
