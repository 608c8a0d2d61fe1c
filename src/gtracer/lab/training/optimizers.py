"""Optimisers by name: torch's own, alone or under TRACER, SAM or ASAM."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import nn

from gtracer import checks, experimental
from gtracer.curvature import (
    Estimator,
    gauss_newton,
    gradient_magnitude,
    hutchinson,
    micro_batch,
    monte_carlo_fisher,
    per_example,
)
from gtracer.lab.config import Config
from gtracer.lab.errors import LabError, unknown
from gtracer.lab.models import was_trained_before
from gtracer.optim import SAM, AdamTracer, AdamWTracer, Clip, Exact, FiniteDifference, SGDTracer, Tracer
from gtracer.penalty import RHO_FINE_TUNING

ALIASES = {"sam": "sgd-sam", "asam": "sgd-asam"}
SCHEMES = ("tracer", "sam", "asam")
TRACER = ("rho", "delta", "f0", "scale_free")
BASES: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): cls
    for name, cls in vars(torch.optim).items()
    # These need other gradients than a training step gives.
    if isinstance(cls, type) and name not in ("Optimizer", "LBFGS", "SparseAdam")
}
ESTIMATORS: dict[str, Estimator] = {
    "gradient-magnitude": gradient_magnitude,
    "per-example": per_example,
    "monte-carlo-fisher": monte_carlo_fisher(),
    "gauss-newton": gauss_newton(),
    "hutchinson": hutchinson(),
}
# These keep f and Adam's second moment in one buffer, or follow Algorithm 1 to the letter.
OWN: dict[str, type[SGDTracer | AdamTracer | AdamWTracer]] = {
    "sgd": SGDTracer,
    "adam": AdamTracer,
    "adamw": AdamWTracer,
}


def names() -> list[str]:
    """Every name that `build` takes."""
    return [*ALIASES, *BASES, *(f"{base}-{scheme}" for base in BASES for scheme in SCHEMES)]


def build(config: Config, model: nn.Module, **own: Any) -> torch.optim.Optimizer:
    """The configuration's optimiser on the model's parameters; with arguments of torch's own, if need be.

    One of torch's own does not clip: who calls it has to.
    """
    base, scheme = parsed(config.optimizer)
    clip = None if config.clip is None else Clip(norm=config.clip)
    params = [p for p in model.parameters() if p.requires_grad]
    if config.second_moment is not None and (base, scheme) not in (("adam", "tracer"), ("adamw", "tracer")):
        raise LabError(
            f"second_moment = {config.second_moment!r} is for adam-tracer and adamw-tracer, not {config.optimizer}"
        )
    try:
        if scheme == "tracer" and base in OWN:
            mine = _of_tracer(config) | (_given(config, "beta") if base == "sgd" else _second_moment(config))
            given = _accepted(OWN[base], config) | own
            return OWN[base](params, **given, **mine, interval=config.interval, model=model, clip=clip)
        plain = BASES[base](params, **_accepted(BASES[base], config) | own)
        if scheme == "tracer":
            mine = _of_tracer(config) | _given(config, "beta")
            return Tracer(plain, **mine, interval=config.interval, model=model, clip=clip)
        if scheme:
            mine = _given(config, "rho", "eta")
            return SAM(plain, adaptive=scheme == "asam", **mine, interval=config.interval, model=model, clip=clip)
        return plain
    except (ValueError, TypeError) as error:
        raise LabError(f"optimizer {config.optimizer!r}: {error}") from error


def check(config: Config) -> None:
    """Refuse an optimiser or estimator that nobody knows."""
    parsed(config.optimizer)
    _estimators(config)


def parsed(name: str) -> tuple[str, str]:
    """torch's optimiser, and the scheme around it."""
    base, _, scheme = ALIASES.get(name, name).partition("-")
    if base not in BASES or scheme not in ("", *SCHEMES):
        raise unknown("optimizer", name, names())
    return base, scheme


def estimator(name: str) -> Estimator:
    """An estimator of the curvature by its name."""
    if size := re.fullmatch("micro-batch-([1-9][0-9]{0,8})", name):
        return micro_batch(int(size[1]))
    if name not in ESTIMATORS:
        raise unknown("curvature", name, [*ESTIMATORS, "micro-batch-32"])
    return ESTIMATORS[name]


def _of_tracer(config: Config) -> dict[str, Any]:
    """Its options, whatever the optimiser. A model that was trained before wants less of ρ."""
    own: dict[str, Any] = {"rho": RHO_FINE_TUNING} if was_trained_before(config) else {}
    own |= _given(config, *TRACER) | _estimators(config) | {"engine": _engine(config)}
    own["reuse"] = experimental.PreviousStep() if config.reuse == "previous" else config.reuse
    transforms: list[Any] = [] if config.eta is None else [experimental.Ridge(config.eta)]
    own["transforms"] = [*transforms, experimental.Precondition()] if config.preconditioned else transforms
    return own


def _engine(config: Config) -> Any:
    """How T is differentiated; None leaves it to the optimiser."""
    if config.engine is not None:
        checks.choice("engine", config.engine, ("finite-difference", "exact"))
    if config.difference is not None:
        checks.choice("difference", config.difference, ("forward", "central"))
    if config.engine == "exact":
        return Exact()
    own = _given(config, "radius") | {"central": config.difference == "central"}
    if config.share < 1:
        return experimental.PartialBatch(config.share, **own)
    varied = own != {"central": False} or config.engine is not None
    return FiniteDifference(**own) if varied else None


def _second_moment(config: Config) -> dict[str, Any]:
    """What feeds Adam-TRACER's."""
    if config.second_moment == "total" and (config.curvature or config.average) not in (None, "gradient-magnitude"):
        raise ValueError(
            f"second_moment = 'total' is for squared gradients, got {config.curvature or config.average}: leave one out"
        )
    estimated = {config.curvature, config.average} - {None, "gradient-magnitude"}  # feeds it anyway
    return {"average": experimental.loss_gradient} if config.second_moment == "loss" and not estimated else {}


def _estimators(config: Config) -> dict[str, Any]:
    return {name: estimator(value) for name, value in _given(config, "curvature", "average").items()}


def _given(config: Config, *names: str) -> dict[str, Any]:
    """Those of the named values that are not left to the optimiser."""
    return {name: getattr(config, name) for name in names if getattr(config, name) is not None}


def _accepted(cls: type, config: Config) -> dict[str, Any]:
    """The common hyper-parameters that this optimiser has."""
    common = ("lr", "momentum", "dampening", "nesterov", "weight_decay", "betas", "eps")
    own = set(inspect.signature(cls).parameters)
    if "betas" not in own:  # `eps` is then not Adam's: Adafactor has a pair, Adagrad another default
        own.discard("eps")
    return {name: getattr(config, name) for name in common if name in own}
