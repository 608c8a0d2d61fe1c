"""Data files in their official layouts, made small."""

import pickle

import numpy

from gtracer.lab.config import Config


def cifar_pickle(path, n, key, classes, protocol=2):
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = numpy.random.default_rng(0)
    pixels = rng.integers(0, 256, (n, 3072), dtype=numpy.uint8)
    labels = [int(i % classes) for i in range(n)]
    path.write_bytes(pickle.dumps({"data": pixels, key: labels}, protocol=protocol))
    return pixels, labels


def local_texts(path, n=40):
    rows = "".join(f"text {i},{i % 4}\n" for i in range(n))
    path.mkdir(parents=True, exist_ok=True)
    for name in ("train", "test"):
        (path / f"{name}.csv").write_text("text,label\n" + rows)


def task_of(kind, folder, **options):
    """The configuration of a small task of every kind; examples are all different, and come in a fixed order."""
    if kind == "text":
        local_texts(folder / "texts")
        return Config(task=str(folder / "texts"), **options)
    if kind == "image":
        for name in ("train", "test"):
            cifar_pickle(folder / "cifar-100-python" / name, 200, "fine_labels", 100)
        return Config(task="cifar100", data=str(folder), **options)
    return Config(**options)
