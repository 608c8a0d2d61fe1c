"""Calibration against sums written out by hand, and what is no probability or no label."""

import math
import sys

import pytest
import torch

from gtracer.calibration import calibration

torchmetrics = pytest.importorskip("torchmetrics")


def by_hand(probabilities, labels):
    """One example at a time: 15 bins of top probability, the last of which includes 1."""
    bins, nll = [[] for _ in range(15)], 0.0
    for row, label in zip(probabilities.tolist(), labels.tolist(), strict=True):
        top = max(row)
        bins[min(14, int(top * 15))].append((top, row.index(top) == label))
        nll -= math.log(max(row[label], torch.finfo(torch.float32).tiny)) / len(labels)
    gaps = [abs(sum(right for _, right in b) - sum(top for top, _ in b)) for b in bins]
    return {"nll": nll, "ece": sum(gaps) / len(labels)}


def made(n=400, classes=5, scale=3.0):
    """Random predictions, right more often where they are surer."""
    probabilities = torch.softmax(scale * torch.randn(n, classes), 1)
    guess = torch.multinomial(probabilities, 1).flatten()
    return probabilities, torch.where(torch.rand(n) < 0.7, guess, torch.randint(classes, (n,)))


@pytest.mark.parametrize(("n", "classes", "scale"), [(1, 2, 1.0), (7, 3, 1.0), (400, 5, 3.0), (400, 100, 20.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_by_hand(n, classes, scale, dtype):
    probabilities, labels = made(n, classes, scale)
    found = calibration(probabilities.to(dtype), labels.to(torch.int32))
    assert found == pytest.approx(by_hand(probabilities, labels), rel=1e-4, abs=1e-6)


def test_known_values():
    """Two of three right at a certainty of 0.9; a wrong one at 0.6."""
    probabilities = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.9, 0.1], [0.4, 0.6]])
    found = calibration(probabilities, torch.tensor([0, 1, 1, 0]))
    assert found["ece"] == pytest.approx((abs(2 - 2.7) + 0.6) / 4)
    assert found["nll"] == pytest.approx(-(2 * math.log(0.9) + math.log(0.1) + math.log(0.4)) / 4)


def test_certainty_shares_the_last_bin():
    """1, and what rounding puts above it, is in one bin with 0.95: over- and underconfidence cancel there."""
    probabilities = torch.tensor([[1.0000001, 0.0], [0.0, 1.0], [0.95, 0.05], [0.95, 0.05]])
    labels = torch.tensor([0, 0, 0, 0])
    assert calibration(probabilities, labels)["ece"] == pytest.approx(abs(3 - 3.9) / 4)


def test_impossible_is_finite():
    found = calibration(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
    assert found["nll"] == pytest.approx(-math.log(torch.finfo(torch.float32).tiny))
    assert found["ece"] == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    probabilities, labels = made()
    found = calibration(probabilities.to(dtype), labels)
    assert found == pytest.approx(calibration(probabilities, labels), abs=0.02)


def test_no_graph_is_needed_or_kept():
    logits = torch.randn(4, 3, requires_grad=True)
    assert all(isinstance(v, float) for v in calibration(logits.softmax(1), torch.tensor([0, 1, 2, 0])).values())


GOOD = torch.tensor([[0.5, 0.5], [0.2, 0.8]])


@pytest.mark.parametrize(
    ("probabilities", "labels", "message"),
    [
        (GOOD[0], torch.tensor([0, 1]), r"probabilities must be a matrix .* got shape \(2,\)"),
        (GOOD[None], torch.tensor([0, 1]), r"probabilities must be a matrix .* got shape \(1, 2, 2\)"),
        (torch.ones(2, 1), torch.tensor([0, 0]), r"probabilities must be a matrix .* got shape \(2, 1\)"),
        (torch.eye(2, dtype=torch.int64), torch.tensor([0, 1]), "probabilities must be .* torch.int64"),
        (GOOD.tolist(), torch.tensor([0, 1]), "probabilities must be a Tensor"),
        (GOOD, [0, 1], "labels must be a Tensor"),
        (GOOD[:0], torch.tensor([], dtype=torch.int64), r"at least one row, got shape \(0, 2\)"),
        (GOOD, torch.tensor([0]), "as many as rows of probabilities, got 1 for 2"),
        (GOOD, torch.tensor([[0], [1]]), r"labels must be a vector of integers, got shape \(2, 1\)"),
        (GOOD, torch.tensor([0.0, 1.0]), "labels must be a vector of integers, .* torch.float32"),
        (GOOD, torch.tensor([True, False]), "labels must be a vector of integers, .* torch.bool"),
        (GOOD, torch.tensor([0, 2]), r"labels must be in \[0, 1\], got 2"),
        (GOOD, torch.tensor([-1, 0]), r"labels must be in \[0, 1\], got -1"),
        (torch.tensor([[0.5, 0.5], [0.2, 0.9]]), torch.tensor([0, 1]), "sum to 1, got row 1 with sum 1.1"),
        (torch.tensor([[1.5, -0.5]]), torch.tensor([0]), "got row 0 with sum 1 and least value -0.5"),
        (torch.tensor([[math.nan, 0.5]]), torch.tensor([0]), "got row 0 with sum nan"),
    ],
)
def test_refusals(probabilities, labels, message):
    with pytest.raises(ValueError, match=message) as caught:
        calibration(probabilities, labels)
    assert "\n" not in str(caught.value)


def test_without_torchmetrics(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics.functional.classification", None)
    with pytest.raises(ImportError, match=r"pip install 'gtracer-optim\[calibration\]'"):
        calibration(GOOD, torch.tensor([0, 1]))
