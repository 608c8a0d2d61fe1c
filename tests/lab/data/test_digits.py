import numpy as np
import pytest
from sklearn import datasets

from gtracer.lab.data import digits


@pytest.mark.parametrize("found", [True, False])
def test_examples_are_scikit_learns(found, monkeypatch):
    """Whether its file is read, or it is asked because the file is elsewhere."""
    if not found:
        monkeypatch.setattr(digits.Path, "exists", lambda _: False)
    pixels, labels = digits.examples()
    np.testing.assert_array_equal(pixels, datasets.load_digits().data)
    np.testing.assert_array_equal(labels, datasets.load_digits().target)


def test_its_file_is_found_without_the_package(monkeypatch):
    monkeypatch.setattr(datasets, "load_digits", None)
    assert digits.examples()[0].shape == (1797, 64)
