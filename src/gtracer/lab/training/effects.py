"""Options that would change nothing in a run: refused where somebody has set them, who expects something of them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gtracer.lab import data, models
from gtracer.lab.config import Config
from gtracer.lab.errors import LabError, shown
from gtracer.lab.training import optimizers

DEFAULTS = {item.name: item.default for item in fields(Config)}
TRACER = ("delta", "f0", "curvature", "average", "engine", "reuse", "preconditioned", "scale_free")


def idle(config: Config) -> dict[str, str]:
    """The options that have no effect here, each with what it is for, and what this is instead."""
    optimizer = _of_optimizer(config)
    rows = [
        *((name, holds, f"{what}, not optimizer {config.optimizer}") for name, holds, what in optimizer),
        *((name, holds, f"{what}, not task {config.task}") for name, holds, what in _of_task(config)),
        *((name, holds, f"{what}, not {_model(config)}") for name, holds, what in _of_model(config)),
    ]
    return {name: what for name, holds, what in rows if not holds}


def _of_optimizer(config: Config) -> list[tuple[str, bool, str]]:
    base, scheme = optimizers.parsed(config.optimizer)
    takes = set(inspect.signature(optimizers.BASES[base]).parameters)
    tracer, adam = scheme == "tracer", base in ("adam", "adamw")
    finite = tracer and config.engine != "exact"
    moving = config.momentum > 0
    return [
        ("momentum", "momentum" in takes, "optimisers with momentum, such as sgd"),
        ("dampening", "dampening" in takes and moving, "sgd with momentum"),
        ("nesterov", "nesterov" in takes and moving and not config.dampening, "sgd with momentum and no dampening"),
        ("weight_decay", "weight_decay" in takes, "optimisers with weight decay"),
        ("betas", "betas" in takes, "Adam and its kin"),
        ("eps", {"betas", "eps"} <= takes, "Adam and its kin"),
        *((name, bool(scheme), "-tracer, -sam and -asam") for name in ("rho", "rho_warmup", "interval")),
        *((name, tracer, "-tracer") for name in TRACER),
        *((name, finite, "-tracer with a finite difference") for name in ("radius", "difference", "share")),
        ("beta", tracer and not adam, "-tracer, but for Adam's, whose own average it is"),
        ("eta", scheme in ("tracer", "asam"), "-tracer and -asam"),
        ("second_moment", tracer and adam, "adam-tracer and adamw-tracer"),
    ]


def _of_task(config: Config) -> list[tuple[str, bool, str]]:
    kind, own = data.kind(config.task, config.text_columns), config.task not in data.TASKS
    return [
        ("data", not own or kind == "text", "tasks with official files, or encoders beside them"),
        ("text_columns", own and kind == "text", "files of texts"),
        ("label_column", own and kind in ("text", "table"), "files of texts or tables"),
        ("drop", kind == "table", "tables"),
        ("image_size", own and kind == "image", "folders of images"),
        ("max_length", kind == "text", "texts"),
        ("augment", kind in ("image", "python"), "images"),
    ]


def _of_model(config: Config) -> list[tuple[str, bool, str]]:
    kind, mlp = data.kind(config.task, config.text_columns), _model(config).startswith("mlp")
    return [
        ("width", mlp, "an mlp"),
        ("depth", mlp, "an mlp"),
        ("init", not mlp and kind != "text", "networks with convolutions"),
        ("pretrained", _model(config).startswith("timm/"), "models timm/NAME"),
        ("weights", kind != "text", "models but encoders of texts, which bring their own"),
    ]


def _model(config: Config) -> str:
    """What it is called, or by what it goes where nothing is said."""
    kind = data.kind(config.task, config.text_columns)
    return "an encoder of texts" if kind == "text" else config.model or models.DEFAULTS.get(kind, "mlp-bn")


def check(config: Config, given: Mapping[str, Any]) -> None:
    """Refuse options that were set, to something else than they are anyway, for nothing."""
    found = idle(config)
    wrong = [refused(name, value, found[name]) for name, value in set_in(given).items() if name in found]
    if wrong:
        raise LabError("; ".join(wrong))


def set_in(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are not what they would be anyway."""
    return {name: value for name, value in given.items() if value != DEFAULTS[name]}


def refused(name: str, value: Any, what: str) -> str:
    return f"{name} = {shown(value)} has no effect: it is for {what}"
