"""Data of one's own: images in folders, tables, data sets from Python, on files that are made on the spot."""

import json
from collections import Counter
from dataclasses import replace

import numpy
import pandas
import pytest
import torch
from PIL import Image
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import gtracer
from gtracer import cli
from gtracer.lab import data
from gtracer.lab.config import Config
from gtracer.lab.data import pictures, streams
from gtracer.lab.data.streams import Items, read_ahead
from gtracer.lab.data.task import stratified
from gtracer.lab.errors import Interrupted, LabError
from gtracer.lab.results.record import Record
from gtracer.lab.training.trainer import train
from support.runs import StopAfter

DRAWS = numpy.random.default_rng(0)


def images(folder, counts, size=(12, 10)):
    """So many in each class folder, in turn as PNG, JPEG, TIFF and WebP; those of one class are brighter."""
    for shade, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = DRAWS.integers(0, 100, (*size[::-1], 3), dtype=numpy.uint8) + 60 * (shade % 3)
            suffix = ("png", "jpg", "tif", "webp")[number % 4]
            Image.fromarray(pixels.astype(numpy.uint8)).save(folder / name / f"{number}.{suffix}")
    return Config(task=str(folder), epochs=1, batch_size=16)


def people(path, count=200):
    """A table with numbers, of which some are missing, categories, a constant and names."""
    age = DRAWS.integers(18, 80, count).astype(float)
    income = numpy.where(DRAWS.random(count) < 0.2, numpy.nan, 1000 + 10 * age)
    frame = pandas.DataFrame(
        {
            "age": age,
            "income": income,
            "town": DRAWS.choice(["Ulm", "Bonn", None], count),
            "planet": "earth",
            "name": [f"person {i}" for i in range(count)],
            "label": numpy.where(age > 50, "old", "young"),
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(path, index=False) if path.suffix == ".csv" else frame.to_parquet(path)
    return frame


def test_each_class_has_its_share():
    labels = torch.tensor([0] * 100 + [1] * 10 + [2] * 2)[torch.randperm(112)]
    first, second = stratified(labels, 0.2, seed=3)
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(112))
    assert torch.bincount(labels[second]).tolist() == [20, 2, 1]
    again, _ = stratified(labels, 0.2, seed=3)
    other, _ = stratified(labels, 0.2, seed=4)
    assert torch.equal(first, again)
    assert not torch.equal(first.sort().values, other.sort().values)


class TestImages:
    def test_split_stratified_and_normalised_by_the_training_images(self, tmp_path):
        config = images(tmp_path / "photos", {"cat": 40, "dog": 20, "newt": 5})
        task = data.load(replace(config, holdout=0.1))
        assert (task.kind, task.names) == ("image", ("cat", "dog", "newt"))
        assert torch.bincount(task.test.labels).tolist() == [8, 4, 1]
        assert torch.bincount(task.holdout.labels).tolist() == [3, 2, 1]
        whole = data.load(config).train.inputs
        assert whole.shape == (52, 3, 10, 10)
        torch.testing.assert_close(whole.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
        torch.testing.assert_close(whole.std((0, 2, 3)), torch.ones(3), atol=1e-5, rtol=0)
        assert task.notes == (
            f"{tmp_path / 'photos'}: images in 3 classes, RGB, scaled and cut to 10 × 10, "
            "normalised by the training images' mean and deviation, kept in memory",
            "labels are taken as they are, and may be wrong: results are against them",
        )

    def test_an_image_is_its_pixels(self, tmp_path):
        """Upright, the middle of the longer side, (pixel − mean) / deviation."""
        pixels = numpy.arange(48, dtype=numpy.uint8).reshape(4, 12)
        exif = Image.Exif()
        exif[0x0112] = 6  # turned by 90° clockwise to be shown
        Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
        found = pictures.Pictures((4, 4), (10.0,), (2.0,))(tmp_path / "a.png")
        shown = torch.tensor(numpy.rot90(pixels, -1).copy()).float()
        torch.testing.assert_close(found[0], (shown[4:8] - 10) / 2)

    @pytest.mark.parametrize(
        ("parts", "expected"),
        [
            (("train", "test"), {"train": 8, "test": 4}),
            (("train", "val"), {"train": 8, "test": 4}),
            (("train", "val", "test"), {"train": 8, "holdout": 4, "test": 4}),
        ],
    )
    def test_folders_that_are_split_stay_so(self, tmp_path, parts, expected):
        for part in parts:
            images(tmp_path / part, dict.fromkeys(("a", "b"), 4 if part == "train" else 2))
        task = data.load(Config(task=str(tmp_path)))
        for part, count in expected.items():
            split = getattr(task, part)
            assert len(split.labels) == count
            wanted = "train" if part == "train" else "val" if part == "holdout" or "test" not in parts else "test"
            assert {name.split("/")[0] for name in split.ids} == {wanted}

    def test_streamed_is_the_same_run(self, tmp_path, monkeypatch):
        """Read for each batch by other processes, or kept: the same numbers; also cut and gone on with."""
        config = replace(images(tmp_path / "photos", {"a": 40, "b": 40}), epochs=2, holdout=0.2, augment=True)
        kept = train(config, tmp_path / "kept", [])
        monkeypatch.setattr(streams, "IN_MEMORY", 0)
        assert isinstance(data.load(config).train.inputs, Items)
        streamed = train(config, tmp_path / "streamed", [])
        with pytest.raises(Interrupted):
            train(config, tmp_path / "cut", [StopAfter(6)])
        cut = train(config, tmp_path / "cut", [], resume=True)
        assert streamed.curves == kept.curves
        assert cut.curves == kept.curves
        assert "read for each batch" in streamed.notes[0]

    def test_what_cannot_be_read_while_training_is_one_line(self, tmp_path, monkeypatch):
        monkeypatch.setattr(streams, "IN_MEMORY", 0)
        task = data.load(images(tmp_path, {"a": 8, "b": 8}))
        paths = task.train.inputs.dataset.paths
        paths[5].write_bytes(paths[5].read_bytes()[:60])
        with pytest.raises(LabError, match=f"^cannot read the image {paths[5]}: .*: remove or replace it$"):
            list(read_ahead(task.train.inputs, [torch.arange(4), torch.arange(4, 8)], torch.device("cpu")))

    def test_from_a_folder_to_predictions(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        images(tmp_path / "photos", {"cat": 30, "dog": 30})
        words = ["--task", "photos", "--epochs", "2", "--batch-size", "16", "--out", "run"]
        assert cli.main(["train", *words]) == 0
        assert "photos: images in 2 classes, RGB, scaled and cut to 10 × 10" in capsys.readouterr().out
        record = Record.read(tmp_path / "run")
        assert record.config.holdout == 0.1
        assert record.resolved["model"] == "resnet20"
        splits = json.loads((tmp_path / "run" / "splits.json").read_text())
        assert Counter(len(names) for names in splits.values()) == Counter([44, 4, 12])
        names = [name for part in splits.values() for name in part]
        assert sorted(names) == sorted(
            str(p.relative_to(tmp_path / "photos")) for p in (tmp_path / "photos").rglob("*.*")
        )
        assert cli.main(["predict", "run", "photos/cat"]) == 0
        assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 31
        (tmp_path / "none").mkdir()
        assert cli.main(["predict", "run", "none"]) == 1
        assert capsys.readouterr().err == "gtracer: none holds no images\n"
        (tmp_path / "run" / "splits.json").write_text("[]")
        assert cli.main(["evaluate", "run"]) == 1
        assert "splits.json is damaged (list indices must be" in capsys.readouterr().err


class TestTables:
    @pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
    def test_as_scikit_learn_makes_it_of_the_training_rows(self, tmp_path, suffix):
        path = tmp_path / f"people.{suffix}"
        frame = people(path.with_suffix(".csv"))
        if suffix == "parquet":
            frame.to_parquet(path)
        elif suffix == "jsonl":
            frame.to_json(path, orient="records", lines=True)
        task = data.load(Config(task=str(path)))
        rows = [int(name.split()[-1]) - 1 for name in task.train.ids]
        standard = make_pipeline(SimpleImputer(strategy="median", add_indicator=True), StandardScaler())
        one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
        twin = ColumnTransformer([("n", standard, ["age", "income"]), ("c", one_hot, ["town"])])
        wanted = frame.assign(town=frame["town"].fillna(""))
        expected = torch.tensor(twin.fit(wanted.iloc[rows]).transform(wanted.iloc[rows])).float()
        torch.testing.assert_close(task.train.inputs, expected)
        tested = [int(name.split()[-1]) - 1 for name in task.test.ids]
        torch.testing.assert_close(task.test.inputs, torch.tensor(twin.transform(wanted.iloc[tested])).float())
        assert [task.names[y] for y in task.test.labels.tolist()] == frame["label"].iloc[tested].tolist()
        assert any("column 'planet' has one value alone and is left out" in note for note in task.notes)
        assert any(
            "column 'name' has other words in each row (texts: --text-columns) and is left out" in note
            for note in task.notes
        )
        assert "2 columns of numbers and 1 of categories" in task.notes[0]

    def test_from_a_table_to_predictions(self, tmp_path, monkeypatch, capsys):
        """Rows that have no label, in another order of columns, with a town and gaps that were never seen."""
        monkeypatch.chdir(tmp_path)
        people(tmp_path / "people.csv")
        assert cli.main(["train", "--task", "people.csv", "--drop", "name", "--epochs", "20", "--out", "run"]) == 0
        assert Record.read(tmp_path / "run").curves["test_accuracy"][-1] > 0.9
        new = pandas.DataFrame({"town": ["Ulm", "Rom"], "income": [None, 1200.0], "age": [75.0, 20.0], "more": 1})
        new.to_csv("new.csv", index=False)
        assert cli.main(["predict", "run", "new.csv"]) == 0
        told = pandas.read_csv("predictions.csv")
        assert list(told) == ["example", "predicted", "old", "young"]
        assert told["predicted"].tolist() == ["old", "young"]
        assert cli.main(["evaluate", "run", "people.csv"]) == 0
        trained = gtracer.load("run")
        found = trained.read(tmp_path / "people.csv")
        right = [trained.classes[i] for i in trained.probabilities(found).argmax(1).tolist()]
        share = numpy.mean(numpy.array(right) == numpy.array(found.labels))
        assert f"accuracy {share:.2%} of 200 examples" in capsys.readouterr().out

    def test_whole_numbers_are_classes(self, tmp_path):
        people(tmp_path / "p.csv").assign(label=DRAWS.integers(3, 6, 200)).to_csv(tmp_path / "p.csv", index=False)
        assert data.load(Config(task=str(tmp_path / "p.csv"))).names == ("3", "4", "5")

    def test_which_files_are_texts(self, tmp_path):
        (tmp_path / "a.csv").write_text("text,age,label\ngood,1,x\nbad,2,y\n")
        (tmp_path / "b.csv").write_text("words,age,label\ngood,1,x\nbad,2,y\n")
        assert data.kind(str(tmp_path / "a.csv")) == "text"
        assert data.kind(str(tmp_path / "b.csv")) == "table"
        assert data.kind(str(tmp_path / "b.csv"), "words") == "text"


MODULE = """
import torch
from torch.utils.data import TensorDataset

def shapes():
    x = torch.randn(60, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())

def three():
    return shapes(), torch.utils.data.Subset(shapes(), range(10)), torch.utils.data.Subset(shapes(), range(20))

def words():
    return TensorDataset(torch.randn(4, 3), torch.rand(4))

nothing = None
"""


class TestPython:
    @pytest.fixture(autouse=True)
    def _module(self, tmp_path, monkeypatch):
        (tmp_path / "mydata.py").write_text(MODULE)
        monkeypatch.chdir(tmp_path)

    def test_one_data_set_is_split(self):
        task = data.load(Config(task="mydata:shapes"))
        assert (task.kind, task.classes, len(task.train.labels), len(task.test.labels)) == ("image", 2, 48, 12)
        assert torch.equal(task.train.labels, (task.train.inputs.mean((1, 2, 3)) > 0).long())

    def test_three_are_as_given(self):
        task = data.load(Config(task="mydata:three", holdout=0.1))
        assert [len(split.labels) for split in (task.train, task.holdout, task.test)] == [60, 10, 20]

    def test_a_run(self, tmp_path, capsys):
        words = ["--task", "mydata:shapes", "--model", "mlp", "--epochs", "1", "--out", "run"]
        assert cli.main(["train", *words]) == 0
        assert cli.main(["evaluate", "run"]) == 0
        assert cli.main(["predict", "run", "."]) == 1
        assert "run was trained on data sets from Python" in capsys.readouterr().err


def one_example(folder):
    images(folder / "d", {"cat": 3, "dog": 1})
    return ["--task", "d"]


def too_few_to_hold_out(folder):
    images(folder / "d", {"cat": 2, "dog": 2})
    return ["--task", "d"]


def one_class(folder):
    images(folder / "d", {"cat": 3})
    return ["--task", "d"]


def an_empty_image(folder):
    images(folder / "d", {"cat": 3, "dog": 3})
    (folder / "d" / "cat" / "0.png").write_bytes(b"")
    return ["--task", "d"]


def no_text_at_all(folder):
    (folder / "d.csv").touch()
    return ["--task", "d.csv"]


def no_image_at_all(folder):
    images(folder / "d", {"cat": 3, "dog": 3})
    (folder / "d" / "cat" / "0.png").write_text("not an image")
    return ["--task", "d"]


def a_class_to_test_alone(folder):
    images(folder / "d" / "train", {"cat": 3, "dog": 3})
    images(folder / "d" / "test", {"cat": 3, "newt": 3})
    return ["--task", "d"]


def many_classes(folder):
    frame = pandas.DataFrame({"x": numpy.arange(400_000) / 2, "label": numpy.arange(400_000) // 4})
    frame.to_csv(folder / "d.csv", index=False)
    return ["--task", "d.csv"]


def table(change, *words):
    def made(folder):
        change(people(folder / "d.csv")).to_csv(folder / "d.csv", index=False)
        return ["--task", "d.csv", *words]

    return made


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (one_example, "d: class 'dog' has one example: two at least are needed, to train and to test"),
        (too_few_to_hold_out, "holdout = 0.1: no class has two training examples, one of which could be held out"),
        (one_class, "d has 1 folders with images, two at least are needed"),
        (an_empty_image, "cannot read the image d/cat/0.png: it is empty: remove or replace it"),
        (no_image_at_all, "cannot read the image d/cat/0.png: cannot identify image file"),
        (a_class_to_test_alone, "d: class 'newt' has no images for training, only others"),
        (many_classes, "there are 100,000 classes: outputs for 100,000 examples would take 37 GiB; is the label"),
        (table(lambda f: f.rename(columns={"label": "y"})), "d.csv has no column 'label': name one of"),
        (table(lambda f: f, "--drop", "agee"), "d.csv has no column 'agee': name one of"),
        (table(lambda f: f.assign(label="same")), "d.csv has 1 classes in column 'label'"),
        (
            table(lambda f: f.assign(label=f["age"]), "--loss", "mse", "--label-noise", "0.1"),
            "label_noise = 0.1 is for",
        ),
        (table(lambda f: f, "--loss", "huber"), "d.csv: column 'label', row 1: '"),
        (
            table(lambda f: f.assign(label=[*f["label"][:-1], None])),
            "1 rows have no label (nothing, NA, None and the like), such as row 200",
        ),
        (table(lambda f: f.assign(label=["new", *f["label"][:-1]])), "d.csv: class 'new' has one example"),
        (table(lambda f: f.assign(age=[numpy.inf, *f["age"][1:]])), "column 'age' holds infinity"),
        (table(lambda f: f[:0]), "d.csv is empty: it has no row with a label"),
        (no_text_at_all, "d.csv is empty: it has no row with a text and its class"),
        (table(lambda f: f, "--model", "resnet20"), "model 'resnet20' wants images"),
        (table(lambda f: f, "--augment"), "augment = True has no effect: it is for images"),
        (lambda _: ["--task", "nomodule:f"], "nomodule:f cannot be imported: No module named 'nomodule'"),
        (lambda _: ["--task", "json:nothing"], "json:nothing cannot be imported"),
        (lambda _: ["--task", "json:dumps"], "json:dumps is called with no arguments, which it does not take"),
    ],
)
def test_one_clear_line(made, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = made(tmp_path)
    assert cli.main(["train", *words, "--epochs", "1", "--out", "run"]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.glob("run/*.safetensors"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.drop(columns="age"), "new.csv has no column 'age', which the model was trained with"),
        (lambda f: f.assign(age="old"), "column 'age' holds 'old', where the model was trained on numbers"),
    ],
)
def test_a_table_of_another_kind_than_trained_on(change, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    frame = people(tmp_path / "people.csv")
    train(Config(task="people.csv", epochs=1), tmp_path / "run", [], model=True)
    change(frame).to_csv("new.csv", index=False)
    assert cli.main(["predict", "run", "new.csv"]) == 1
    assert message in capsys.readouterr().err
