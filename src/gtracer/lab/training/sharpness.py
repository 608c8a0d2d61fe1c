"""How sharp the loss is while a model is trained: a few measures after some of the epochs, as curves of the record."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gtracer.lab.data.task import sampled
from gtracer.lab.errors import LabError
from gtracer.lab.training.run import Run
from gtracer.sharpness import SplitLoss, concatenated, measure

EXAMPLES = 500  # of the training data, the same ones each time
CHEAP: dict[str, Any] = {"matrices": ["hessian"], "top": 1, "steps": 15, "tolerance": 0.01, "probes": 4, "ascent": 0}
CHEAP |= {"samples": 4, "progress": False}
CURVES = {
    "sharpness_top": "hessian.top",
    "sharpness_trace": "hessian.trace",
    "sharpness_adaptive": "expected_adaptive",
    "sharpness_gradient": "gradient_norm",
    "sharpness_trace_ratio": "trace_ratio",
}


def row(run: Run) -> dict[str, float]:
    """What belongs into the record of the epoch that has just ended: not a number where nothing is measured."""
    every = run.config.sharpness
    if every is None:
        return {}
    found: dict[str, float] = {}
    if run.epoch % every == 0 or run.epoch == run.config.epochs:
        try:
            found = {each.name: each.value for each in measure(run.model, _loss(run), _batches(run), **CHEAP).rows()}
        except FloatingPointError:  # training goes on, and says so itself if it diverges
            found = {}
        except torch.OutOfMemoryError as error:
            raise LabError(
                f"sharpness = {every}: there is not enough memory to differentiate a batch of {run.config.batch_size} "
                "twice: choose a smaller batch_size, or measure afterwards (gtracer sharpness --batch-size)"
            ) from error
    return {name: found.get(measure_name, math.nan) for name, measure_name in CURVES.items()}


def _loss(run: Run) -> SplitLoss:
    """In float32, whatever it is trained in."""

    def outputs_of(batch: Any) -> Tensor:
        outputs: Tensor = run.model(batch[0]).float()
        return outputs

    return SplitLoss(outputs_of, lambda outputs, batch: run.loss(outputs, batch[1]), merge=concatenated)


def _batches(run: Run) -> list[tuple[Any, Tensor]]:
    """Without augmentation, which would be drawn anew."""
    parts = torch.split(sampled(len(run.labels), EXAMPLES), run.config.batch_size)
    return [
        (run.train_batch(rows.to(run.device), run.train_batch.width(rows)), run.labels[rows.to(run.device)])
        for rows in parts
    ]
