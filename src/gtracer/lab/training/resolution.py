"""What a run's options came to: read off the optimiser and the model that were built, before the first step."""

from __future__ import annotations

from typing import Any

import torch

from gtracer.experimental import PartialBatch, Precondition, PreviousStep, Ridge
from gtracer.lab.training import optimizers
from gtracer.lab.training.run import Run
from gtracer.optim import SAM, TwoPassOptimizer
from gtracer.optim.methods import TraceRatio
from gtracer.optim.reuse import Decayed
from gtracer.optim.rules import AdamRule

OF_TORCH = ("lr", "momentum", "dampening", "nesterov", "weight_decay", "betas", "eps")


def of(run: Run) -> dict[str, Any]:
    """Plain values by the names of the options, where there is one of that name."""
    config, task = run.config, {"examples": len(run.labels), "test_examples": len(run.test.labels)}
    if run.holdout is not None:
        task["holdout_examples"] = len(run.holdout.labels)
    return {
        **task,
        "model": run.model_name,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        **_of_optimizer(run.optimizer),
        "clip": config.clip,  # of torch's own optimisers the loop clips
        "batch_size": min(config.batch_size, len(run.labels)),
        "batches": run.steps_an_epoch,
        "steps": run.steps_an_epoch * config.epochs,
        "device": str(run.device),
        "kernels": config.kernels,
        "precision": config.precision,
    }


def _of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The hyper-parameters of its first group, and of what is around it."""
    group = optimizer.param_groups[0]
    found = {name: _plain(group.get(f"initial_{name}", group[name])) for name in OF_TORCH if name in group}
    if not isinstance(optimizer, TwoPassOptimizer):
        return {"optimizer": type(optimizer).__name__, **found}
    hyper = optimizer.hyperparameters(group)
    found |= {name: _plain(hyper[name]) for name in ("rho", "delta", "beta", "f0") if name in hyper}
    found["rho"] = "auto" if optimizer.sets_rho else _plain(group.get("initial_rho", hyper["rho"]))
    about = {"optimizer": type(optimizer).__name__, "base": type(optimizer.base).__name__, **found}
    about |= {"interval": optimizer.interval, "implementation": optimizer.implementation}
    if isinstance(optimizer, SAM):
        method: Any = optimizer.method
        return about | ({"eta": method.eta} if method.adaptive else {})
    return about | _of_tracer(optimizer)


def _of_tracer(optimizer: TwoPassOptimizer) -> dict[str, Any]:
    method, rule = optimizer.method, optimizer.rule
    assert isinstance(method, TraceRatio)
    engine = method.engine
    about: dict[str, Any] = {"scale_free": method.scale_free}
    about["engine"] = "exact" if engine.is_exact else "finite-difference"
    if not engine.is_exact:
        about |= {"radius": method.radius, "difference": "central" if method.central else "forward"}
    about["share"] = engine.share if isinstance(engine, PartialBatch) else 1.0
    about["curvature"] = _name(method.curvature.numerator)
    about["average"] = _name(method.curvature.average)
    if isinstance(rule, AdamRule):
        about["second_moment"] = "total" if rule.of_total else "loss"
    reuse = optimizer.reuse
    about["reuse"] = "previous" if isinstance(reuse, PreviousStep) else None
    if isinstance(reuse, Decayed):
        about["reuse"] = reuse.decay
    about["preconditioned"] = any(isinstance(each, Precondition) for each in optimizer.transforms)
    about["eta"] = next((each.eta for each in optimizer.transforms if isinstance(each, Ridge)), None)
    return about


def _name(estimator: Any) -> str:
    """By which the lab calls it."""
    size = getattr(estimator, "size", None)
    known = {id(made): name for name, made in optimizers.ESTIMATORS.items()}
    plain = f"micro-batch-{size}" if size else getattr(estimator, "__name__", repr(estimator))
    return known.get(id(estimator), plain)


def _plain(value: Any) -> Any:
    """As JSON can hold it."""
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value
