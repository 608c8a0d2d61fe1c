"""The approximate posterior that a trained optimiser holds: N(w, s (f + δ)⁻¹), drawn from and averaged over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gtracer import checks
from gtracer.curvature import inverse
from gtracer.optim.partwise import PartwiseOptimizer
from gtracer.scopes import displaced
from gtracer.tensors import Tensors


def probabilities(logits: Tensor) -> Tensor:
    """What a classifier's outputs say, as something that can be averaged."""
    return torch.softmax(logits, -1)


class PosteriorOptimizer(PartwiseOptimizer):
    """An optimiser whose state holds f, and with it a posterior; how f is kept is left to the subclass."""

    scale_free = False

    def trained(self, p: Tensor) -> bool:
        """Whether f of this parameter is in the state."""
        raise NotImplementedError

    def average_of(self, group: dict[str, Any], params: Tensors) -> Tensors:
        """f of parameters that have been trained before."""
        raise NotImplementedError

    @contextmanager
    def sampled_weights(self, *, examples: int | None = None, temperature: float = 1.0) -> Iterator[None]:
        """Weights drawn from the approximate posterior N(w, s (f + δ)⁻¹) for the time of a `with`.

        Args:
            examples: Size of the training set, for Bayes's posterior: s = 1/examples. Without it s is ρ, the
                temperature that the penalty was trained with.
            temperature: A factor on s. Below 1 the posterior is a cold one.
        """
        spread = self._deviation(examples, temperature)
        with torch.no_grad():
            noise = [s * torch.randn_like(s) for s in spread.values()]
        with displaced(list(spread), noise):
            yield

    @torch.no_grad()
    def predict(
        self,
        model: nn.Module,
        x: Any,
        samples: int = 10,
        *,
        examples: int | None = None,
        temperature: float = 1.0,
        activation: Callable[[Tensor], Tensor] = probabilities,
    ) -> Tensor:
        """The model's prediction for x, averaged over weights drawn from the posterior; in evaluation mode.

        Args:
            model: Whose weights are optimised here.
            x: What it is called with (a mapping: its keyword arguments).
            samples: Number of draws.
            examples, temperature: As for `sampled_weights`.
            activation: From the model's output to what is averaged: by default logits to probabilities.
        """
        checks.count("samples", samples)
        total: Tensor | None = None
        with _evaluating(model):
            for _ in range(samples):
                with self.sampled_weights(examples=examples, temperature=temperature):
                    output = model(**x) if isinstance(x, Mapping) else model(x)
                prediction = activation(getattr(output, "logits", output)) / samples
                total = prediction if total is None else total + prediction
        assert total is not None
        return total

    def _deviation(self, examples: int | None, temperature: float) -> dict[Tensor, Tensor]:
        """The standard deviation of each weight that has been trained."""
        if examples is not None:
            checks.count("examples", examples)
        checks.number("temperature", temperature, low=0)
        if self.scale_free:
            raise RuntimeError(
                "the posterior N(w, s (f + δ)⁻¹) is that of the weights, and scale_free=True measures by directions: "
                "train with scale_free=False to draw from it"
            )
        found: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            knobs = self.knobs(group)
            trained = [p for p in group["params"] if self.trained(p)]
            scale = temperature * (knobs["rho"] if examples is None else 1 / examples)
            if trained:
                variance = torch._foreach_mul(inverse(self.average_of(group, trained), knobs["delta"]), scale)
                found |= zip(trained, torch._foreach_sqrt(variance), strict=True)
        if not found:
            raise RuntimeError("the posterior is that of a trained optimiser, and this one has made no step yet")
        return found


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
