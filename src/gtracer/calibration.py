"""How far a classifier's probabilities can be believed: negative log-likelihood and expected calibration error."""

from __future__ import annotations

import torch
from torch import Tensor

from gtracer import checks

BINS = 15
TOLERANCE = 5e-3  # of a row's sum: bfloat16 rounds it by nearly as much


def calibration(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """Negative log-likelihood (`nll`) and expected calibration error (`ece`, top label, 15 bins).

    Args:
        probabilities: A matrix with one row for each example and one column for each class.
        labels: The examples' classes, counted from 0.

    Raises:
        ValueError: If the arguments are not probabilities and labels that match.
        ImportError: If torchmetrics is not installed.
    """
    _check(probabilities, labels)
    try:
        from torchmetrics.functional.classification import multiclass_calibration_error
    except ModuleNotFoundError as error:
        raise ImportError("calibration needs torchmetrics: pip install 'gtracer-optim[calibration]'") from error
    p, y = probabilities.detach().float(), labels.to(probabilities.device, torch.int64)
    nll = -p.gather(1, y[:, None]).clamp(min=torch.finfo(p.dtype).tiny).log().mean()
    # torchmetrics gives a certainty of 1 a bin of its own, and takes a matrix with more than 1 in it for logits.
    below_one = 1 - torch.finfo(p.dtype).eps / 2
    ece = multiclass_calibration_error(p.clamp(0, below_one), y, p.shape[1], n_bins=BINS)
    return {"nll": nll.item(), "ece": ece.item()}


def _check(probabilities: Tensor, labels: Tensor) -> None:
    checks.kind("probabilities", probabilities, Tensor)
    checks.kind("labels", labels, Tensor)
    shape, dtype = tuple(probabilities.shape), probabilities.dtype
    if len(shape) != 2 or shape[1] < 2 or not dtype.is_floating_point:
        raise ValueError(f"probabilities must be a matrix of two or more classes, got shape {shape} of {dtype}")
    if not shape[0]:
        raise ValueError(f"probabilities must have at least one row, got shape {shape}")
    if labels.ndim != 1 or labels.dtype == torch.bool or labels.is_floating_point():
        raise ValueError(f"labels must be a vector of integers, got shape {tuple(labels.shape)} of {labels.dtype}")
    if len(labels) != shape[0]:
        raise ValueError(f"labels must be as many as rows of probabilities, got {len(labels)} for {shape[0]}")
    off = ((labels < 0) | (labels >= shape[1])).nonzero()
    if len(off):
        raise ValueError(f"labels must be in [0, {shape[1] - 1}], got {labels[off[0]].item()}")
    sums, least = probabilities.detach().float().sum(1), probabilities.detach().min(1).values
    right = ((sums - 1).abs() <= TOLERANCE) & (least >= 0)  # False for NaN
    if not right.all():
        row = int((~right).nonzero()[0])
        found = f"row {row} with sum {sums[row].item():g} and least value {least[row].item():g}"
        raise ValueError(f"probabilities must be rows of numbers from 0 that sum to 1, got {found}")
