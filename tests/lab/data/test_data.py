"""Tasks from files in their official layouts, made small here; damaged ones; downloads from a local server."""

import functools
import gzip
import hashlib
import http.server
import json
import pickle
import tarfile
import threading
import zipfile
from collections import Counter
from dataclasses import replace

import numpy
import pytest
import torch

from gtracer.lab import data, files
from gtracer.lab.config import Config
from gtracer.lab.data import download, text, vision
from gtracer.lab.data.download import Source
from gtracer.lab.data.label_noise import mislabelled
from gtracer.lab.errors import LabError
from support.datasets import cifar_pickle, task_of


class TestNoise:
    def test_as_many_as_asked_for_all_wrong_and_even(self):
        y = torch.randint(10, (1000,))
        noisy = mislabelled(y, 0.5, 10, seed=0)
        wrong = noisy != y
        assert wrong.sum() == 500
        shifts = torch.bincount((noisy - y)[wrong] % 10, minlength=10)
        assert shifts[0] == 0
        assert shifts[1:].min() > 30  # 500/9 ≈ 56 expected

    def test_seeded(self):
        y = torch.randint(10, (100,))
        assert torch.equal(mislabelled(y, 0.3, 10, 1), mislabelled(y, 0.3, 10, 1))
        assert not torch.equal(mislabelled(y, 0.3, 10, 1), mislabelled(y, 0.3, 10, 2))

    def test_none(self):
        y = torch.randint(10, (100,))
        assert torch.equal(mislabelled(y, 0.0, 10, 1), y)


def test_digits():
    task = data.load(Config(label_noise=0.5, seed=3))
    assert len(task.train.labels) + len(task.test.labels) == 1797
    assert (task.train.labels != task.train.truth).sum() == round(len(task.train.labels) / 2)
    assert torch.equal(task.test.labels, task.test.truth)
    other = data.load(Config(seed=4))
    assert not torch.equal(task.train.inputs, other.train.inputs)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_cifar100(tmp_path, protocol):
    pixels, labels = cifar_pickle(tmp_path / "cifar-100-python/train", 200, "fine_labels", 100, protocol)
    cifar_pickle(tmp_path / "cifar-100-python/test", 100, "fine_labels", 100, protocol)
    task = data.load(Config(task="cifar100", data=str(tmp_path)))
    assert task.classes == 100
    assert task.train.inputs.shape == (200, 3, 32, 32)
    assert task.train.labels.tolist() == labels
    torch.testing.assert_close(task.train.inputs.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(task.train.inputs.std((0, 2, 3)), torch.ones(3), atol=1e-5, rtol=0)
    # Row 7, channel 1, pixel (2, 3) stands at 1024 + 2 · 32 + 3 of the official row.
    x = torch.tensor(pixels[:, 1024:2048].astype("float32"))
    expected = (x[7, 2 * 32 + 3] - x.mean()) / x.std()
    assert task.train.inputs[7, 1, 2, 3].item() == pytest.approx(expected.item(), rel=1e-4)


def test_cifar10(tmp_path):
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        cifar_pickle(tmp_path / "cifar-10-batches-py" / name, 20, "labels", 10)
    task = data.load(Config(task="cifar10", data=str(tmp_path)))
    assert task.train.inputs.shape == (100, 3, 32, 32)
    assert task.test.inputs.shape == (20, 3, 32, 32)


def examples(split):
    """An example's content, its label and its true label, as a list that can be compared."""
    inputs = split.inputs if isinstance(split.inputs, list) else [x.numpy().tobytes() for x in split.inputs]
    return list(zip(inputs, split.labels.tolist(), split.truth.tolist(), strict=True))


@pytest.mark.parametrize("kind", ["vector", "image", "text"])
class TestHoldout:
    def test_a_share_of_the_training_data_and_nothing_else(self, kind, tmp_path):
        """What is held out is not trained on; together they are the training data, with the labels it had."""
        config = task_of(kind, tmp_path, label_noise=0.5, seed=3)
        whole, task = data.load(config), data.load(replace(config, holdout=0.25))
        assert task.kind == kind
        assert whole.holdout is None
        trained, held, everything = (examples(split) for split in (task.train, task.holdout, whole.train))
        assert len({x for x, *_ in everything}) == len(everything)
        share = sum(round(n / 4) for n in Counter(truth for *_, truth in everything).values())  # of each class
        assert len(held) == (share if kind == "text" else round(0.25 * len(everything)))
        assert sorted(trained + held) == sorted(everything)
        assert examples(task.test) == examples(whole.test)

    def test_only_the_seed_decides(self, kind, tmp_path):
        config = task_of(kind, tmp_path, holdout=0.25, seed=3)
        first = data.load(config)
        torch.manual_seed(99)
        changed = {"label_noise": 0.5, "model": "mlp", "optimizer": "sgd", "epochs": 7, "batch_size": 3, "lr": 1.0}
        again = data.load(replace(config, **changed))
        for split in ("train", "holdout"):
            ours, theirs = (examples(getattr(task, split)) for task in (first, again))
            assert [(x, truth) for x, _, truth in ours] == [(x, truth) for x, _, truth in theirs]
        other = data.load(replace(config, seed=4))
        assert {x for x, *_ in examples(other.holdout)} != {x for x, *_ in examples(first.holdout)}

    @pytest.mark.parametrize(("share", "held"), [(1e-6, "0"), (1 - 1e-6, "all")])
    def test_both_sides_need_some(self, kind, tmp_path, share, held):
        if kind == "text":
            pytest.skip("of each class one at least is held out, and one at least is not")
        config = task_of(kind, tmp_path)
        n = len(data.load(config).train.labels)
        with pytest.raises(LabError, match=f"holdout = {share} keeps {n if held == 'all' else 0} of {n} training"):
            data.load(replace(config, holdout=share))
        assert len(data.load(replace(config, holdout=1 / n)).holdout.labels) == 1


@pytest.mark.parametrize("kind", ["vector", "image", "text"])
def test_a_share_of_the_training_data(kind, tmp_path):
    """Seeded; half of its labels are wrong, as asked; and a part of it, not of the rest, is held out."""
    config = task_of(kind, tmp_path, seed=3)
    whole, some = data.load(config), data.load(replace(config, train_share=0.3, label_noise=0.5, holdout=0.25))
    n = round(0.3 * len(whole.train.labels))
    chosen = examples(some.train) + examples(some.holdout)
    assert len(chosen) == n
    assert {(x, truth) for x, _, truth in chosen} <= {(x, truth) for x, _, truth in examples(whole.train)}
    assert sum(label != truth for _, label, truth in chosen) == round(0.5 * n)
    other = data.load(replace(config, train_share=0.3, seed=4))
    assert {x for x, *_ in examples(other.train)} != {x for x, *_ in chosen}
    assert examples(some.test) == examples(whole.test)
    with pytest.raises(LabError, match="train_share = 1e-06 leaves 0 of"):
        data.load(replace(config, train_share=1e-6))


def test_held_out_labels_are_as_wrong_as_the_rest():
    """Also not the wrong ones by preference, though both are drawn from one seed."""
    for seed in range(3):
        task = data.load(Config(label_noise=0.4, holdout=0.4, seed=seed))
        for split in (task.train, task.holdout):
            assert (split.labels != split.truth).float().mean().item() == pytest.approx(0.4, abs=0.06)


def idx(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    head = bytes([0, 0, 8, values.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in values.shape)
    path.write_bytes(gzip.compress(head + values.astype(numpy.uint8).tobytes()))


@pytest.mark.parametrize("where", ["fashion-mnist", "."])
def test_fashion_mnist(tmp_path, where):
    folder = tmp_path / where
    for part, n in (("train", 60), ("t10k", 20)):
        idx(folder / f"{part}-images-idx3-ubyte.gz", numpy.random.default_rng(0).integers(0, 256, (n, 28, 28)))
        idx(folder / f"{part}-labels-idx1-ubyte.gz", numpy.arange(n) % 10)
    task = data.load(Config(task="fashion-mnist", data=str(tmp_path)))
    assert task.train.inputs.shape == (60, 1, 28, 28)
    assert task.test.labels.tolist() == [i % 10 for i in range(20)]


def test_fashion_mnist_beside_mnist(tmp_path):
    """The files have the same names: those in the folder of that name are meant."""
    for folder, n in ((tmp_path, 10), (tmp_path / "fashion-mnist", 20)):
        for part in ("train", "t10k"):
            idx(folder / f"{part}-images-idx3-ubyte.gz", numpy.random.default_rng(0).integers(0, 256, (n, 28, 28)))
            idx(folder / f"{part}-labels-idx1-ubyte.gz", numpy.arange(n) % 10)
    assert len(data.load(Config(task="fashion-mnist", data=str(tmp_path))).train.labels) == 20


def test_some_files_beside_the_folder_are_not_all_that_is_wanted(tmp_path, monkeypatch):
    """What is missing is downloaded into a folder of its own, not between them."""
    idx(tmp_path / "train-labels-idx1-ubyte.gz", numpy.arange(10))
    asked = []

    def ensure(folder, names, sources):
        asked.append(folder)
        raise LabError("offline")

    monkeypatch.setattr(vision, "ensure", ensure)
    with pytest.raises(LabError, match="offline"):
        data.load(Config(task="fashion-mnist", data=str(tmp_path)))
    assert asked == [tmp_path / "fashion-mnist"]


class Evil:
    def __reduce__(self):
        return (print, ("this code must not run",))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a pickle",
        pickle.dumps({"data": numpy.zeros((2, 3072), numpy.uint8)}),
        pickle.dumps({"data": numpy.zeros((2, 100), numpy.uint8), "fine_labels": [0, 1]}),
        pickle.dumps({"data": numpy.zeros((2, 3072), numpy.uint8), "fine_labels": [0, 100]}),
        pickle.dumps({"data": numpy.zeros((2, 3072), numpy.uint8), "fine_labels": [0]}),
        pickle.dumps({"data": numpy.zeros((9, 3072), numpy.uint8), "fine_labels": [0] * 9})[:5000],
        pickle.dumps(Evil()),
    ],
)
def test_damaged_cifar(tmp_path, content, capsys):
    cifar_pickle(tmp_path / "cifar-100-python/test", 100, "fine_labels", 100)
    (tmp_path / "cifar-100-python/train").write_bytes(content)
    with pytest.raises(LabError, match=r"cifar-100-python/train is damaged"):
        data.load(Config(task="cifar100", data=str(tmp_path)))
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(b"\0\0\x08\x03\0\0"), gzip.compress(b"x" * 99)[:20]],
    ids=["empty", "no gzip", "too short", "cut"],
)
def test_damaged_idx(tmp_path, content):
    path = tmp_path / "x.gz"
    path.write_bytes(content)
    with pytest.raises(LabError, match=r"x\.gz is damaged"):
        vision._idx(path, 3)


def lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


SUPERGLUE = {
    "boolq": ("BoolQ", {"question": "is it", "passage": "It is.", "label": True}, ("is it", "It is."), 1),
    "rte": (
        "RTE",
        {"premise": "It rains.", "hypothesis": "It is wet.", "label": "not_entailment"},
        ("It rains.", "It is wet."),
        1,
    ),
    "wic": (
        "WiC",
        {
            "sentence1": "Run rogue.",
            "sentence2": "She ran.",
            "start1": 0,
            "end1": 3,
            "start2": 4,
            "end2": 7,
            "label": False,
        },
        ('"Run" rogue.', 'She "ran".'),
        0,
    ),
}


@pytest.mark.parametrize("name", SUPERGLUE)
def test_superglue(name, tmp_path):
    folder, row, expected, label = SUPERGLUE[name]
    for split in ("train", "val"):
        lines(tmp_path / folder / f"{split}.jsonl", [row] * 4)
    task = data.load(Config(task=name, data=str(tmp_path)))
    assert task.kind == "text"
    assert task.classes == 2
    assert task.train.inputs[0] == expected
    assert task.test.labels.tolist() == [label] * 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "a", "label": true}', "row 1 has no 'passage'"),
        ('{"question": "a", "passage": "b"}', "row 1 has no 'label'"),
        ('{"question": "a", "passage": "b", "label": "maybe"}', "row 1 has the unknown label 'maybe'"),
        ('{"question": "a", "pass', "line 1 is not JSON"),
        ("[1, 2]", "line 1 is not an object"),
        ("", "empty training split"),
        (b"\xff\xfe\xff", "damaged"),
    ],
)
def test_damaged_superglue(text, message, tmp_path):
    lines(tmp_path / "BoolQ/val.jsonl", [SUPERGLUE["boolq"][1]])
    path = tmp_path / "BoolQ/train.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(LabError, match=message):
        data.load(Config(task="boolq", data=str(tmp_path)))


class TestLocalTexts:
    def test_one_csv(self, tmp_path):
        rows = "".join(f'"text, number {i}",{"good" if i % 2 else "bad"}\n' for i in range(10))
        (tmp_path / "reviews.csv").write_text("text,label\n" + rows)
        task = data.load(Config(task=str(tmp_path / "reviews.csv")))
        assert (len(task.train.labels), len(task.test.labels), task.classes) == (8, 2, 2)
        for split in (task.train, task.test):
            for (words,), label in zip(split.inputs, split.labels.tolist(), strict=True):
                assert label == int(words.split()[-1]) % 2  # "bad" is 0, "good" is 1

    def test_a_folder_with_two_columns(self, tmp_path):
        for name in ("train", "val"):
            lines(tmp_path / f"{name}.jsonl", [{"a": "x", "b": "y", "class": c} for c in (3, 5, 9)])
        config = Config(task=str(tmp_path), text_columns="a,b", label_column="class")
        task = data.load(config)
        assert task.train.inputs == [("x", "y")] * 3
        assert task.test.labels.tolist() == [0, 1, 2]

    def test_refusals(self, tmp_path):
        (tmp_path / "one.csv").write_text("text,label\na,same\nb,same\n")
        with pytest.raises(LabError, match="1 classes in column 'label'"):
            data.load(Config(task=str(tmp_path / "one.csv")))
        with pytest.raises(LabError, match="cannot read"):
            data.load(Config(task=str(tmp_path / "none.csv")))
        with pytest.raises(LabError, match="needs a train and a test"):
            data.load(Config(task=str(tmp_path)))
        (tmp_path / "two.csv").write_text("text,label\n" + "a,x\nb,y\n" * 5)
        with pytest.raises(
            LabError, match="two.csv has no column 'body': name one of 'text, label' with --text-columns"
        ):
            data.load(Config(task=str(tmp_path / "two.csv"), text_columns="body"))

    @pytest.mark.parametrize(
        ("third", "expected"),
        [("c", "has no 'label'"), ("c, d,x", "has more values than the 2 columns")],
    )
    def test_a_row_is_named_by_its_place_in_the_file(self, tmp_path, third, expected):
        """Though some of its rows, in random order, are for testing."""
        rows = ["a,x", "b,y", third, *["a,x", "b,y"] * 5]
        (tmp_path / "films.csv").write_text("\n".join(["text,label", *rows]))
        for seed in range(3):
            with pytest.raises(LabError, match=f"row 3 {expected}"):
                data.load(Config(task=str(tmp_path / "films.csv"), seed=seed))

    def test_only_a_new_line_ends_a_row(self, tmp_path):
        rows = [json.dumps({"text": "two\u2028lines\x85", "label": c}, ensure_ascii=False) for c in "xyxyx"]
        (tmp_path / "films.jsonl").write_bytes("\r\n".join(rows).encode())
        assert data.load(Config(task=str(tmp_path / "films.jsonl"))).train.inputs == [("two\u2028lines\x85",)] * 3

    def test_null_is_no_label(self, tmp_path):
        lines(tmp_path / "films.jsonl", [{"text": "a", "label": c} for c in ("x", "y", None, "x")])
        with pytest.raises(LabError, match="row 3 has no 'label'; it has text"):
            data.load(Config(task=str(tmp_path / "films.jsonl")))


def test_unknown_task():
    with pytest.raises(LabError, match="unknown task 'cifar': did you mean cifar10 or cifar100"):
        data.load(Config(task="cifar"))


@pytest.fixture
def server(tmp_path_factory):
    """Serves a folder on this machine."""
    folder = tmp_path_factory.mktemp("server")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


class TestDownload:
    def test_archive_is_fetched_checked_and_unpacked(self, server, tmp_path, monkeypatch):
        served, url = server
        cifar_pickle(served / "cifar-100-python/train", 200, "fine_labels", 100)
        cifar_pickle(served / "cifar-100-python/test", 100, "fine_labels", 100)
        with tarfile.open(served / "cifar-100-python.tar.gz", "w:gz") as tar:
            tar.add(served / "cifar-100-python", "cifar-100-python")
        md5 = hashlib.md5((served / "cifar-100-python.tar.gz").read_bytes()).hexdigest()
        monkeypatch.setattr(vision, "TORONTO", url)
        monkeypatch.setattr(vision, "Source", lambda url, checksum: Source(url, f"md5:{md5}"))
        task = data.load(Config(task="cifar100", data=str(tmp_path / "new")))
        assert len(task.train.labels) == 200

    def test_wrong_checksum(self, server, tmp_path):
        served, url = server
        (served / "a.zip").write_bytes(b"something else")
        with pytest.raises(LabError, match="the checksum is not md5:00.*--data"):
            download.ensure(tmp_path, ["a.txt"], [Source(f"{url}/a.zip", "md5:00")])
        assert [path.name for path in tmp_path.iterdir()] == [files.TURN]

    def test_wrong_checksum_inside(self, server, tmp_path):
        served, url = server
        with zipfile.ZipFile(served / "a.zip", "w") as archive:
            archive.writestr("a.txt", "changed")
        with pytest.raises(LabError, match=r"a\.txt: the checksum is not"):
            download.ensure(tmp_path, ["a.txt"], [Source(f"{url}/a.zip")], {"a.txt": "sha256:00"})
        assert not (tmp_path / "a.txt").exists()

    def test_not_there(self, server, tmp_path):
        with pytest.raises(LabError, match=r"a\.txt is missing and could not be downloaded .*not found.*--data"):
            download.ensure(tmp_path, ["a.txt"], [Source(f"{server[1]}/a.zip", "md5:00")])

    def test_no_archive_at_all(self, server, tmp_path):
        served, url = server
        (served / "a.zip").write_bytes(b"no zip")
        with pytest.raises(LabError, match="cannot be unpacked"):
            download.ensure(tmp_path, ["a.txt"], [Source(f"{url}/a.zip")])

    def test_the_real_checksums_are_those_of_the_files(self):
        """Shape of every pinned checksum: an algorithm that exists, and as many digits as it has."""
        pins = [*vision.FASHION.values(), *(f"sha256:{c}" for c in text.CHECKSUMS.values())]
        for pin in pins:
            algorithm, _, digits = pin.partition(":")
            assert len(digits) == hashlib.new(algorithm).digest_size * 2
