"""Options without effect: what a run does with an option, and what this says of it, are one."""

from dataclasses import fields

import pytest
import torch
from torch import nn

from gtracer.lab.config import Config
from gtracer.lab.errors import LabError
from gtracer.lab.training import effects, optimizers

# Another value than an option has anyway.
OTHERS = {
    "momentum": 0.5,
    "weight_decay": 0.1,
    "betas": (0.5, 0.9),
    "eps": 1e-4,
    "rho": 0.3,
    "beta": 0.3,
    "delta": 0.3,
    "f0": 0.3,
    "interval": 2,
    "eta": 0.3,
    "dampening": 0.5,
    "nesterov": True,
}


def built(config):
    """Everything that the optimiser was given."""
    optimizer = optimizers.build(config, nn.Linear(2, 2))
    group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    around = [getattr(optimizer, name, None) for name in ("interval", "method", "rule", "transforms")]
    rule = around[2]
    return group, around[0], around[1], getattr(rule, "of_total", None), around[3]


@pytest.mark.parametrize(
    "name", [*optimizers.BASES, "sam", "asam", "sgd-tracer", "adam-tracer", "adamw-sam", "rmsprop-tracer"]
)
def test_an_option_is_idle_where_nothing_takes_it(name):
    config = Config(optimizer=name, lr=1e-3)
    idle = effects.idle(config)
    for option, value in OTHERS.items():
        try:
            changes = built(Config(optimizer=name, lr=1e-3, **{option: value})) != built(config)
        except LabError:  # it is refused: there is something that it would have changed
            continue
        if option == "eta" and name in ("sam", "adamw-sam"):  # SAM holds it for ASAM
            continue
        assert changes == (option not in idle), option


def test_defaults_are_never_refused():
    for name in optimizers.names():
        config = Config(optimizer=name)
        effects.check(config, config.to_mapping() | {"betas": config.betas})


def test_a_record_is_never_refused():
    """It was run: what had no effect then is part of what it is called."""
    assert Config.from_mapping({"optimizer": "sgd", "rho": 0.1, "delta": 0.2}).rho == 0.1


def test_every_option_of_which_it_knows_is_one():
    known = {item.name for item in fields(Config)}
    for config in (Config(optimizer="sgd"), Config(task="rte", model="x"), Config(optimizer="adam")):
        assert effects.idle(config).keys() <= known


def test_the_line_says_what_it_is_for():
    config = Config(optimizer="sgd", rho=0.1)
    with pytest.raises(
        LabError, match=r"rho = 0\.1 has no effect: it is for -tracer, -sam and -asam, not optimizer sgd"
    ):
        effects.check(config, {"rho": 0.1})
    assert torch.optim.SGD is optimizers.BASES["sgd"]
