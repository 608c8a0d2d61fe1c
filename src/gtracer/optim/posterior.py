"""The approximate posterior that a trained optimiser holds: N(w, s (f + δ)⁻¹), drawn from and averaged over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gtracer import checks, tensors
from gtracer.scopes import displaced

if TYPE_CHECKING:
    from gtracer.optim.optimizer import TwoPassOptimizer


def probabilities(logits: Tensor) -> Tensor:
    """What a classifier's outputs say, as something that can be averaged."""
    return torch.softmax(logits, -1)


@contextmanager
def sampled_weights(opt: TwoPassOptimizer, examples: int | None, temperature: float) -> Iterator[None]:
    """Weights drawn from the posterior that an optimiser holds; arguments as for its method."""
    spread = deviation(opt, examples, temperature)
    with torch.no_grad():
        noise = [s * torch.randn_like(s) for s in spread.values()]
    with displaced(list(spread), noise):
        yield


@torch.no_grad()
def predict(
    opt: TwoPassOptimizer,
    model: nn.Module,
    x: Any,
    samples: int,
    examples: int | None,
    temperature: float,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """The model's prediction, averaged over weights so drawn; arguments as for the optimiser's method."""
    checks.count("samples", samples)
    total: Tensor | None = None
    with _evaluating(model):
        for _ in range(samples):
            with sampled_weights(opt, examples, temperature):
                output = model(**x) if isinstance(x, Mapping) else model(x)
            prediction = activation(getattr(output, "logits", output)) / samples
            total = prediction if total is None else total + prediction
    assert total is not None
    return total


def deviation(opt: TwoPassOptimizer, examples: int | None, temperature: float) -> dict[Tensor, Tensor]:
    """The standard deviation of each weight that has been trained."""
    if examples is not None:
        checks.count("examples", examples)
    checks.number("temperature", temperature, low=0)
    if not opt.rule.keeps_average:
        raise RuntimeError(f"{type(opt).__name__} keeps no f: the posterior N(w, s (f + δ)⁻¹) is that of TRACER")
    if getattr(opt.method, "scale_free", False):
        raise RuntimeError(
            "the posterior N(w, s (f + δ)⁻¹) is that of the weights, and scale_free=True measures by directions: "
            "train with scale_free=False to draw from it"
        )
    found: dict[Tensor, Tensor] = {}
    for group in opt.param_groups:
        hyper = opt.hyperparameters(group)
        trained = [p for p in group["params"] if opt.rule.is_trained(p)]
        scale = temperature * (opt.rho_of(group) if examples is None else 1 / examples)
        if trained:
            variance = torch._foreach_mul(tensors.inverse(opt.average_of(group, trained), hyper["delta"]), scale)
            found |= zip(trained, torch._foreach_sqrt(variance), strict=True)
    if not found:
        raise RuntimeError("the posterior is that of a trained optimiser, and this one has made no step yet")
    return found


@torch.no_grad()
def damped_share(opt: TwoPassOptimizer) -> Tensor:
    """Share of the coordinates where δ > f, now."""
    below, size = torch.zeros(()), 0
    for group in opt.param_groups:
        trained = [p for p in group["params"] if opt.rule.is_trained(p)]
        for f in opt.average_of(group, trained) if trained else ():
            below = below + (f < opt.hyperparameters(group)["delta"]).sum().cpu()
            size += f.numel()
    return below / size


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards each module is in its own mode again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
