"""Labels: classes by their names, or real numbers, from all kinds of data."""

import json

import numpy
import pandas
import pytest
import torch

from gtracer import cli
from gtracer.lab import data
from gtracer.lab.config import Config
from gtracer.lab.data.labels import Target, encoded, numbers
from gtracer.lab.data.task import stratified
from gtracer.lab.errors import LabError


@pytest.mark.parametrize(
    ("values", "loss", "real"),
    [
        (["1", "2"], None, False),
        (["1", "2.0"], None, False),
        (["1", "2.5"], None, True),
        (["1", "2"], "mse", True),
        (["1", "2.5"], "cross-entropy", False),
        ([1, 2.5], "huber", True),
        ([True, False], None, False),
        (["1.5", "x"], None, False),
        (["1.5", "nan"], None, False),
    ],
)
def test_numbers_are_to_be_predicted_where_one_has_a_fraction_or_the_loss_says_so(values, loss, real):
    found = numbers(values, loss, "f: column 'y'")
    assert (found is not None) == real
    if found is not None:
        assert found.tolist() == [float(value) for value in values]


@pytest.mark.parametrize("wrong", ["x", "nan", "1e999", True, None])
def test_what_is_no_number_is_named(wrong):
    with pytest.raises(LabError, match=r"^f: column 'y', row 2: .* is no number, and numbers are to be predicted$"):
        numbers(["1", wrong], "mse", "f: column 'y'")


def test_classes_by_their_names(tmp_path):
    files = {"train": tmp_path / "train.csv", "test": tmp_path / "test.csv"}
    labels, names = encoded({"train": ["b", "a", "01"], "test": ["a"]}, files, "y", None)
    assert names == ("01", "a", "b")
    assert {part: found.tolist() for part, found in labels.items()} == {"train": [2, 1, 0], "test": [1]}
    with pytest.raises(LabError, match="class 'c' has no rows for training, only others"):
        encoded({"train": ["a", "b"], "test": ["c"]}, files, "y", None)


def test_one_of_each_may_be_numbers(tmp_path):
    with pytest.raises(LabError, match=r"class '3' has one example, and 2 others: .* --loss mse"):
        encoded({"": ["3", "7", "9"]}, {"": tmp_path / "f.csv"}, "y", None)


def test_a_target_is_standardised_and_back():
    values = torch.tensor([1e6, 1e6 + 1, 1e6 + 5], dtype=torch.float64)
    target = Target.fitted("y", values)
    made = target.standardised(values)
    torch.testing.assert_close(made.double().mean().item(), 0.0, atol=1e-6, rtol=0)
    torch.testing.assert_close(made.double().std(correction=0).item(), 1.0, atol=1e-6, rtol=0)
    torch.testing.assert_close(target.restored(made), values, rtol=0, atol=1e-5)
    with pytest.raises(LabError, match="y has the same number 3 in all training rows"):
        Target.fitted("y", torch.full((4,), 3.0))


@pytest.mark.parametrize("count", [2, 7, 100])
def test_real_numbers_are_split_from_the_smallest_to_the_largest(count):
    values = torch.randn(count, generator=torch.Generator().manual_seed(0)).exp()
    first, second = stratified(values, 0.2, seed=1)
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(count))
    assert len(second) == max(1, round(0.2 * count))
    if count == 100:  # two of each ten
        place = values.argsort().argsort()[second] // 10
        assert torch.bincount(place).tolist() == [2] * 10


def houses(folder, suffix="csv", count=120):
    draws = numpy.random.default_rng(0)
    size, rooms = draws.normal(100, 20, count), draws.choice(["few", "many"], count)
    price = 1000 * size + 20000 * (rooms == "many") + 0.25
    frame = pandas.DataFrame({"size": size, "rooms": rooms, "price": price})
    path = folder / f"houses.{suffix}"
    frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(path)
    return path, frame


class TestData:
    @pytest.mark.parametrize("suffix", ["csv", "parquet"])
    def test_a_table(self, tmp_path, suffix):
        path, frame = houses(tmp_path, suffix)
        task = data.load(Config(task=str(path), label_column="price", holdout=0.1))
        assert (task.outputs, task.names) == (1, ())
        rows = [int(name.split()[-1]) - 1 for name in task.test.ids]
        torch.testing.assert_close(
            task.target.restored(task.test.labels), torch.tensor(frame["price"].to_numpy()[rows]), rtol=1e-6, atol=0
        )
        everything = torch.cat([task.train.labels, task.holdout.labels]).double()
        assert everything.mean().item() == pytest.approx(0, abs=1e-6)
        assert len(task.test.labels) == 20

    def test_texts(self, tmp_path):
        rows = [json.dumps({"text": "x" * i, "label": i / 2}) for i in range(1, 40)]
        (tmp_path / "f.jsonl").write_text("\n".join(rows))
        task = data.load(Config(task=str(tmp_path / "f.jsonl")))
        found = dict(zip(task.train.inputs, task.target.restored(task.train.labels).tolist(), strict=True))
        assert all(value == pytest.approx(len(text) / 2) for (text,), value in found.items())
        (tmp_path / "g.jsonl").write_text("\n".join(rows * 2))
        assert data.load(Config(task=str(tmp_path / "g.jsonl"), loss="cross-entropy")).classes == 39

    def test_python(self, tmp_path, monkeypatch):
        (tmp_path / "mynumbers.py").write_text(
            "import torch\nfrom torch.utils.data import TensorDataset\n"
            "x = torch.arange(40.0)[:, None]\n"
            "def column():\n    return TensorDataset(x, x / 4)\n"  # labels of shape (40, 1)
        )
        monkeypatch.chdir(tmp_path)
        task = data.load(Config(task="mynumbers:column"))
        torch.testing.assert_close(
            task.target.restored(task.train.labels), task.train.inputs[:, 0].double() / 4, rtol=1e-6, atol=1e-6
        )

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--label-smoothing", "0.1"], "label_smoothing = 0.1 is for classes, the labels here are real numbers"),
            (["--class-weights"], "class_weights = True is for classes"),
            (["--curvature", "gauss-newton"], "curvature = 'gauss-newton' is of the cross-entropy"),
            (["--loss", "cross-entropy"], "has one example, and 119 others"),
            (["--loss", "mae"], "loss must be one of 'cross-entropy', 'mse', 'huber'"),
        ],
    )
    def test_what_is_for_classes_is_refused(self, tmp_path, monkeypatch, capsys, words, message):
        monkeypatch.chdir(tmp_path)
        houses(tmp_path)
        assert cli.main(["train", "--task", "houses.csv", "--label-column", "price", "--out", "run", *words]) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1

    def test_a_loss_of_numbers_on_classes(self, capsys, tmp_path):
        assert cli.main(["train", "--task", "digits", "--loss", "mse", "--out", str(tmp_path)]) == 1
        assert "loss = 'mse' is for real numbers, task 'digits' has 10 classes" in capsys.readouterr().err
