"""scikit-learn's handwritten digits: 1,797 images of 8 × 8, embedded in the package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gtracer.lab.data.pictures import Pictures
from gtracer.lab.data.task import Split, Task


def load(seed: int) -> Task:
    """A seeded split, three quarters for training."""
    pixels, labels = examples()
    x = torch.tensor(pixels, dtype=torch.float32) / 16
    y = torch.tensor(labels, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, test = order[: len(x) * 3 // 4], order[len(x) * 3 // 4 :]
    pictures = Pictures((8, 8), (0.0,), (255.0,), flat=True)
    return Task("vector", 10, Split.clean(x[train], y[train]), Split.clean(x[test], y[test]), preprocessing=pictures)


def examples() -> tuple[Any, Any]:
    """All images and labels.

    From scikit-learn's own file, if it is where it used to be: to import the package takes each process of a sweep as
    long as to import torch.
    """
    package = find_spec("sklearn")
    for folder in (package and package.submodule_search_locations) or ():
        path = Path(folder, "datasets", "data", "digits.csv.gz")
        if path.exists():
            table = np.loadtxt(path, delimiter=",")
            return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits

    data = load_digits()
    return data.data, data.target
