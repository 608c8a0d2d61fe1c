"""Fashion-MNIST, CIFAR-10 and CIFAR-100 from their official files, without torchvision."""

from __future__ import annotations

import gzip
import io
import pickle
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from gtracer.lab import files
from gtracer.lab.data.download import Source, ensure
from gtracer.lab.data.pictures import Pictures
from gtracer.lab.data.task import Split, Task
from gtracer.lab.errors import LabError, one_line
from gtracer.lab.schema import STRICT, Place, problems

TORONTO = "https://www.cs.toronto.edu/~kriz"
ZALANDO = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
FASHION = {
    "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
}


def fashion_mnist(folder: Path) -> Task:
    """60,000 + 10,000 grey images of 28 × 28, from `FOLDER/fashion-mnist/*-ubyte.gz` or `FOLDER/*-ubyte.gz`."""
    sources = [Source(f"{ZALANDO}/{name}", checksum) for name, checksum in FASHION.items()]
    # The official files come without a folder of their own; MNIST's, of the same names, may lie beside it.
    own = folder / "fashion-mnist"
    here = not own.exists() and all((folder / name).exists() for name in FASHION)
    paths = ensure(folder if here else own, list(FASHION), sources)
    x, y, x_test, y_test = (_idx(path, axes) for path, axes in zip(paths, (3, 1, 3, 1), strict=True))
    return _task(10, (x[:, None], y, paths[0]), (x_test[:, None], y_test, paths[2]), (1, 28, 28))


def cifar10(folder: Path) -> Task:
    """50,000 + 10,000 images of 32 × 32 in 10 classes, from `FOLDER/cifar-10-batches-py/`."""
    names = [f"cifar-10-batches-py/{name}" for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")]
    source = Source(f"{TORONTO}/cifar-10-python.tar.gz", "md5:c58f30108f718f92721af3b95e74349a")
    paths = ensure(folder, names, [source])
    parts = [_cifar(path, "labels") for path in paths]
    x, y = (torch.cat([part[i] for part in parts[:-1]]) for i in (0, 1))
    return _task(10, (x, y, paths[0]), (*parts[-1], paths[-1]), (3, 32, 32))


@lru_cache(maxsize=1)  # for the runs of a sweep that share a process
def cifar100(folder: Path) -> Task:
    """50,000 + 10,000 images of 32 × 32 in 100 classes, from `FOLDER/cifar-100-python/`."""
    source = Source(f"{TORONTO}/cifar-100-python.tar.gz", "md5:eb9058c3a382ffc7106e4002c42a8d85")
    train, test = ensure(folder, ["cifar-100-python/train", "cifar-100-python/test"], [source])
    return _task(100, (*_cifar(train, "fine_labels"), train), (*_cifar(test, "fine_labels"), test), (3, 32, 32))


def _task(
    classes: int, train: tuple[Tensor, Tensor, Path], test: tuple[Tensor, Tensor, Path], shape: tuple[int, ...]
) -> Task:
    """Check what was read and normalise it, channel by channel, with the training set's mean and deviation."""
    for x, y, path in (train, test):
        if tuple(x.shape[1:]) != shape or y.shape != x.shape[:1] or not len(y):
            raise LabError(f"{path} is damaged: images of shape {tuple(x.shape)} with labels of shape {tuple(y.shape)}")
        if y.min() < 0 or y.max() >= classes:
            least, most = int(y.min()), int(y.max())
            raise LabError(f"{path} is damaged: labels from {least} to {most} where there are {classes} classes")
    x = train[0].float()
    mean, deviation = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    return Task(
        "image",
        classes,
        Split.clean((x - mean) / deviation, train[1]),
        Split.clean((test[0].float() - mean) / deviation, test[1]),
        preprocessing=Pictures(
            (shape[1], shape[2]), tuple(mean.flatten().tolist()), tuple(deviation.flatten().tolist())
        ),
    )


def _idx(path: Path, axes: int) -> Tensor:
    """Yann LeCun's IDX format: two zero bytes, a type, the number of axes, their sizes, the bytes."""
    try:
        content = gzip.decompress(files.read(path))
        if content[:4] != bytes([0, 0, 8, axes]):
            raise ValueError(f"it begins with {content[:4].hex()}, not with 000008{axes:02x}")
        sizes = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(axes)]
        values = numpy.frombuffer(content, dtype=numpy.uint8, offset=4 + 4 * axes).reshape(sizes)
    except (OSError, EOFError, ValueError, MemoryError, zlib.error) as error:
        raise LabError(f"{path} is damaged: {one_line(error)}") from error
    whole = torch.from_numpy(values.copy())
    return whole.long() if axes == 1 else whole


# What numpy's own pickles call to make an array, wherever this version keeps it.
_EMPTY: Any = numpy.zeros(0)
_MAKERS = {maker.__name__: maker for maker in (_EMPTY.__reduce__()[0], _EMPTY.__reduce_ex__(5)[0])}


class _Arrays(pickle.Unpickler):
    """Unpickles arrays and plain values, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        allowed: dict[str, Any] = {"ndarray": numpy.ndarray, "dtype": numpy.dtype, **_MAKERS}
        if module.split(".")[0] == "numpy" and name in allowed:
            return allowed[name]
        if (module, name) == ("_codecs", "encode"):  # bytes in Python 2's pickles
            return lambda text, encoding: text.encode(encoding)
        raise pickle.UnpicklingError(f"it holds a {module}.{name}")


LABELS = TypeAdapter(list[Place], config=STRICT)


def _cifar(path: Path, labels: str) -> tuple[Tensor, Tensor]:
    """One of CIFAR's pickles: rows of 3,072 bytes, channels first."""
    try:
        content = _Arrays(io.BytesIO(files.read(path)), encoding="latin1").load()
        data, y = content["data"], LABELS.validate_python(content[labels])
        if not isinstance(data, numpy.ndarray) or data.dtype != numpy.uint8 or data.shape != (len(y), 3072):
            raise ValueError(f"data are {_kind(data)}, not {len(y)} rows of 3072 bytes")
        return torch.from_numpy(data).reshape(-1, 3, 32, 32), torch.tensor(y)
    except LabError:
        raise
    except ValidationError as error:
        raise LabError(f"{path} is damaged: {labels}: {problems(error)}") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise LabError(f"{path} is damaged: {type(error).__name__}: {one_line(error)}") from error


def _kind(data: Any) -> str:
    return f"{data.dtype} of shape {data.shape}" if isinstance(data, numpy.ndarray) else type(data).__name__
