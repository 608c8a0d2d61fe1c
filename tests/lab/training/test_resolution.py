"""A record says what its configuration came to, read off what was built."""

from dataclasses import replace

import pytest
import torch

from gtracer.lab.config import Config
from gtracer.lab.results.record import Record
from gtracer.lab.training import resolution
from gtracer.lab.training.run import Run
from gtracer.lab.training.trainer import train

SMALL = Config(epochs=1, width=8, batch_size=512)


def resolved(**options):
    return resolution.of(Run(replace(SMALL, **options)))


def test_what_was_left_open():
    found = resolved()
    assert found["optimizer"] == "SGDTracer"
    assert (found["rho"], found["delta"], found["beta"], found["f0"]) == ("auto", 0.01, 0.1, "first-gradient")
    assert (found["engine"], found["radius"], found["difference"]) == ("finite-difference", 0.05, "forward")
    assert (found["model"], found["device"], found["kernels"]) == ("mlp-bn", "cpu", "torch")
    assert (found["examples"], found["test_examples"], found["batches"], found["steps"]) == (1347, 450, 3, 3)
    assert found["parameters"] == sum(p.numel() for p in Run(SMALL).model.parameters())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"optimizer": "sgd", "lr": 0.5, "warmup": 0.9}, {"optimizer": "SGD", "lr": 0.5, "momentum": 0.9}),
        ({"optimizer": "sam"}, {"optimizer": "SAM", "base": "SGD", "rho": 0.05}),
        ({"optimizer": "asam"}, {"rho": 0.05, "eta": 0.01}),
        ({"rho": 0.2, "rho_warmup": 0.9}, {"rho": 0.2}),
        ({"optimizer": "adamw-tracer"}, {"base": "AdamW", "second_moment": "total", "betas": [0.9, 0.999]}),
        ({"optimizer": "adam-tracer", "second_moment": "loss"}, {"second_moment": "loss"}),
        ({"optimizer": "adadelta-tracer", "rho": 0.2}, {"rho": 0.2, "base": "Adadelta"}),
        ({"engine": "exact", "model": "mlp"}, {"engine": "exact", "model": "mlp"}),
        (
            {"share": 0.5, "radius": 0.2, "difference": "central"},
            {"share": 0.5, "radius": 0.2, "difference": "central"},
        ),
        ({"curvature": "micro-batch-32"}, {"curvature": "micro-batch-32", "average": "micro-batch-32"}),
        ({"average": "hutchinson", "model": "mlp"}, {"curvature": "gradient-magnitude", "average": "hutchinson"}),
        ({"reuse": "previous"}, {"reuse": "previous"}),
        ({"reuse": 0.5, "interval": 4}, {"reuse": 0.5, "interval": 4}),
        ({"preconditioned": True, "eta": 2.0}, {"preconditioned": True, "eta": 2.0}),
        ({"clip": 1, "holdout": 0.1}, {"clip": 1, "holdout_examples": 135}),
    ],
)
def test_what_was_asked_is_what_was_built(options, expected):
    found = resolved(**options)
    assert expected.items() <= found.items()


def test_what_was_trained_before_has_a_number_unless_rho_is_to_set_itself(tmp_path):
    weights = str(tmp_path / "weights.pt")
    torch.save(Run(SMALL).model.state_dict(), weights)
    assert resolved(weights=weights)["rho"] == 6e-5
    assert resolved(weights=weights, rho="auto")["rho"] == "auto"


def test_it_is_in_the_record_and_the_configuration_is_what_was_asked(tmp_path):
    train(SMALL, tmp_path, [])
    record = Record.read(tmp_path)
    assert record.config == SMALL
    assert record.config.delta is None
    assert record.resolved == resolved()


def test_an_older_record_has_none(tmp_path):
    train(SMALL, tmp_path, [])
    text = (tmp_path / "record.json").read_text()
    start = text.index(' "resolved"')
    (tmp_path / "record.json").write_text(text[:start] + text[text.index(' "summary"') :])
    assert Record.read(tmp_path).resolved == {}
