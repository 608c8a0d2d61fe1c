"""Optimisers and estimators by name; every hyper-parameter arrives."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from gtracer import SAM, AdamTracer, AdamWTracer, Clip, Exact, FiniteDifference, SGDTracer, Tracer, curvature
from gtracer.experimental import PartialBatch, Precondition, PreviousStep, Ridge
from gtracer.lab.config import Config
from gtracer.lab.errors import LabError
from gtracer.lab.training import optimizers
from gtracer.lab.training.trainer import train
from gtracer.optim import TwoPassOptimizer
from support.runs import SMALL


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sgd", torch.optim.SGD),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
        ("sam", SAM),
        ("asam", SAM),
        ("adamw-sam", SAM),
        ("sgd-tracer", SGDTracer),
        ("adam-tracer", AdamTracer),
        ("adamw-tracer", AdamWTracer),
        ("rmsprop-tracer", Tracer),
        ("adadelta-tracer", Tracer),
        ("adafactor-tracer", Tracer),
    ],
)
def test_optimisers_by_name(name, kind, tmp_path):
    config = replace(SMALL, optimizer=name, epochs=1, lr=1e-3, weight_decay=0.1, rho=0.001)
    model = nn.Linear(2, 2)
    built = optimizers.build(config, model)
    assert type(built) is kind
    assert built.param_groups[0]["lr"] == 1e-3
    assert built.param_groups[0]["weight_decay"] == 0.1
    if isinstance(built, TwoPassOptimizer):
        assert getattr(built.method, "adaptive", False) == name.endswith("asam")
        assert built.hyperparameters(built.param_groups[0])["rho"] == 0.001
        assert built.model is model
    train(config, tmp_path, [])


def test_every_hyperparameter_reaches_the_optimiser():
    groups = {"rho": 0.1, "beta": 0.2, "delta": 0.3, "f0": 0.4}
    asked = groups | {"preconditioned": True, "eta": 9.0, "radius": 0.5, "difference": "central"}
    built = optimizers.build(replace(SMALL, **asked, interval=3, momentum=0.7, nesterov=True), nn.Linear(2, 2))
    assert groups.items() <= built.param_groups[0].items()
    assert built.transforms == (Ridge(9.0), Precondition())
    assert built.method.engine == FiniteDifference(0.5, central=True)
    assert built.interval == 3
    for own, engine in (
        ({"engine": "exact"}, Exact()),
        ({"share": 0.5, "radius": 0.2}, PartialBatch(0.5, 0.2)),
        ({}, FiniteDifference()),
    ):
        assert optimizers.build(replace(SMALL, **own), nn.Linear(2, 2)).method.engine == engine
    assert optimizers.build(replace(SMALL, reuse="previous"), nn.Linear(2, 2)).reuse == PreviousStep()
    for own in ({"engine": "double"}, {"difference": "backward"}, {"reuse": "next"}):
        with pytest.raises(LabError, match=f"{next(iter(own))} must be"):
            optimizers.build(replace(SMALL, **own), nn.Linear(2, 2))
    assert built.param_groups[0]["momentum"] == 0.7
    assert built.param_groups[0]["nesterov"] is True
    adam = optimizers.build(
        replace(SMALL, optimizer="adam-tracer", betas=(0.8, 0.9), eps=1e-4, rho=0.1), nn.Linear(2, 2)
    )
    assert (adam.param_groups[0]["betas"], adam.param_groups[0]["eps"]) == ((0.8, 0.9), 1e-4)
    fed = replace(SMALL, optimizer="adamw-tracer", second_moment="loss")
    assert not optimizers.build(fed, nn.Linear(2, 2)).rule.of_total
    assert optimizers.build(replace(fed, second_moment="total"), nn.Linear(2, 2)).rule.of_total
    with pytest.raises(LabError, match="second_moment = 'total' is for squared gradients"):
        optimizers.build(replace(fed, second_moment="total", curvature="hutchinson"), nn.Linear(2, 2))
    for other in ("adamw", "adam-sam", "sgd-tracer", "rmsprop-tracer"):
        with pytest.raises(LabError, match=f"second_moment = 'loss' is for adam-tracer .*, not {other}"):
            optimizers.build(replace(fed, optimizer=other), nn.Linear(2, 2))
    for name in ("sgd-tracer", "adamw-tracer", "rmsprop-tracer"):  # texts are for encoders that were trained before
        for task, rho in (("digits", "auto"), ("rte", 6e-5), ("films.csv", 6e-5)):
            for given, expected in ((None, rho), (0.1, 0.1)):
                built = optimizers.build(Config(task=task, optimizer=name, rho=given), nn.Linear(2, 2))
                assert ("auto" if built.sets_rho else built.param_groups[0]["rho"]) == expected
    asam = optimizers.build(replace(SMALL, optimizer="asam", eta=0.7), nn.Linear(2, 2))
    assert asam.method.eta == 0.7
    for name in ("adam-tracer", "rmsprop-tracer", "asam"):
        assert optimizers.build(replace(SMALL, optimizer=name, clip=0.5), nn.Linear(2, 2)).clip == Clip(norm=0.5)


@pytest.mark.parametrize(
    ("name", "estimator"),
    [
        ("gradient-magnitude", curvature.gradient_magnitude),
        ("micro-batch-7", curvature.micro_batch(7)),
        ("per-example", curvature.per_example),
        ("monte-carlo-fisher", curvature.monte_carlo_fisher()),
        ("gauss-newton", curvature.gauss_newton()),
        ("hutchinson", curvature.hutchinson()),
    ],
)
def test_estimators_by_name(name, estimator, tmp_path):
    """For the numerator and for the average, and each of them trains."""
    config = replace(SMALL, model="mlp", curvature=name, epochs=1, rho=1e-5)
    built = optimizers.build(config, nn.Linear(2, 2))
    assert built.method.curvature.numerator == built.method.curvature.average == estimator
    record = train(config, tmp_path / name, [])
    assert math.isfinite(record.curves["train_loss"][-1])
    apart = optimizers.build(replace(config, optimizer="rmsprop-tracer", curvature=None, average=name), nn.Linear(2, 2))
    assert apart.method.curvature.numerator is curvature.gradient_magnitude
    assert apart.method.curvature.average == estimator


@pytest.mark.parametrize("name", ["per-exemple", "micro-batch-0", "micro-batch-", "micro-batch-x"])
def test_an_unknown_estimator_lists_the_near_ones(name):
    with pytest.raises(LabError, match="per-example|micro-batch-32"):
        optimizers.build(replace(SMALL, curvature=name), nn.Linear(2, 2))
