"""Functions of the user's own that do not give what they should: a line each, which names the place."""

import pytest

from gtracer.lab import data
from gtracer.lab.config import Config
from gtracer.lab.data import streams
from gtracer.lab.errors import LabError
from gtracer.lab.models import own
from gtracer.lab.models.built import Architecture

MODULE = """
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

x = torch.randn(30, 3)
y = (x[:, 0] > 0).long()

def raises():
    raise RuntimeError("no disk" + chr(10) + "at all")

class Endless(IterableDataset):
    def __len__(self): return 30
    def __iter__(self): yield x[0], 0

class Broken(Dataset):
    targets = y.tolist()
    def __len__(self): return 30
    def __getitem__(self, i):
        if i == 7: raise KeyError("row 7")
        return x[i], 0

class Unlabelled(Dataset):
    def __len__(self): return 30
    def __getitem__(self, i): return x[i]

class Ragged(Broken):
    def __getitem__(self, i): return x[0].repeat(1 + i % 2), 0

def holed():
    hole = x.clone()
    hole[5, 1] = float("nan")
    return TensorDataset(hole, y)

def net_raises(shape, classes):
    raise ValueError("no net")

def net_of_others(shape, classes):
    class Net(nn.Linear):
        def forward(self, x):
            assert x.shape[1] == 99, "want 99"
    return Net(3, 2)

def net_of_two(shape, classes):
    class Net(nn.Linear):
        def forward(self, x): return super().forward(x), 1
    return Net(3, 2)

endless, broken, unlabelled, ragged = (lambda kind=kind: kind() for kind in (Endless, Broken, Unlabelled, Ragged))
of_one_class = lambda: TensorDataset(x, y * 0)
with_gaps = lambda: TensorDataset(x, y * 1000)
negative = lambda: TensorDataset(x, y - 1)
flat = lambda: TensorDataset(x[:, 0], y)
whole = lambda: TensorDataset((x * 20 + 100).to(torch.uint8), y.bool())
"""


@pytest.fixture(autouse=True)
def _module(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "boom.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)


CASES = [
    ("mine:raises", "mine:raises raises RuntimeError: no disk at all (mine.py, line 10)"),
    ("boom:f", "boom:f cannot be imported: boom raises ZeroDivisionError: division by zero (boom.py, line 1)"),
    ("mine:endless", "with a length and examples by their number (no IterableDataset)"),
    ("mine:broken", "mine:broken: example 7 cannot be read: KeyError: 'row 7' (mine.py, line 20)"),
    ("mine:unlabelled", "examples must be pairs of an input and a label"),
    ("mine:ragged", "examples have shapes (3,) and (6,), all must have the same"),
    ("mine:holed", "mine:holed: example 5 holds NaN or infinity"),
    ("mine:of_one_class", "labels must be numbers of two classes at least, from 0 without gaps: all are of class 0"),
    ("mine:with_gaps", "they go up to 1,000, and there are 30 examples"),
    ("mine:negative", "labels must be whole numbers from 0, or real numbers (--loss mse), got -1"),
    ("mine:flat", "an example must be a tensor with a dimension at least"),
]


@pytest.mark.parametrize(("name", "message"), CASES)
def test_one_clear_line(name, message):
    with pytest.raises(LabError) as told:
        data.load(Config(task=name))
    if name != "mine:ragged":  # of which either shape may come first
        assert message in str(told.value)
    assert "\n" not in str(told.value)


def test_bytes_and_truth_values_are_taken():
    task = data.load(Config(task="mine:whole"))
    assert (task.classes, task.train.inputs.dtype.is_floating_point) == (2, True)


def test_what_is_read_for_each_batch_says_it_too(monkeypatch):
    monkeypatch.setattr(streams, "IN_MEMORY", 0)
    task = data.load(Config(task="mine:broken"))
    part = task.train if "7" in task.train.ids else task.test
    with pytest.raises(LabError, match="example 7 cannot be read: KeyError"):
        part.inputs.gathered(range(len(part.labels)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine:net_raises", "mine:net_raises raises ValueError: no net (mine.py, line"),
        ("mine:net_of_others", r"does not take examples of shape (3,): AssertionError: want 99 (mine.py, line"),
        ("mine:net_of_two", "gives a tuple, not one for each of 2 classes"),
    ],
)
def test_models_that_do_not_fit(name, message):
    with pytest.raises(LabError) as told:
        own.made(Architecture("vector", name, 2, (3,)))
    assert message in str(told.value)
