"""The loss at the current weights, and what an estimator of curvature may ask of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gtracer.curvature.layers import squared_contributions
from gtracer.curvature.recording import INSTEAD, Call, Recording
from gtracer.tensors import Tensors


class Evaluation:
    """A loss with its graph, the parameters it depends on, and their gradients.

    Args:
        loss: The mean over the examples of a batch.
        params: Those to differentiate by; `params` and `gradients` then hold those that the loss depends on.
        recording: Of the pass that gave the loss, where an estimator needs the layers.
        differentiable: Whether gradients and estimates carry their own graph.
        losses: The examples' losses, where an estimator needs them one by one.
    """

    def __init__(
        self,
        loss: Tensor,
        params: Tensors,
        recording: Recording | None = None,
        *,
        differentiable: bool = False,
        losses: Tensor | None = None,
    ) -> None:
        self.loss, self.losses, self.differentiable = loss, losses, differentiable
        self._recording = recording
        inputs = [*params, *self._edges()]
        found = torch.autograd.grad(loss, inputs, create_graph=differentiable, retain_graph=True, allow_unused=True)
        pairs = [(p, g) for p, g in zip(params, found[: len(params)], strict=True) if g is not None]
        self.params: Tensors = [p for p, _ in pairs]
        self.gradients: Tensors = [g for _, g in pairs]
        self._cotangents = found[len(params) :]

    def _edges(self) -> list[Any]:
        return [edge for call in self._calls() for edge in call.edges]

    def _calls(self) -> list[Call]:
        return self._recording.calls if self._recording else []

    def gradients_with_graph(self) -> Tensors:
        """∇L, to be differentiated again, also where the estimates need no graph."""
        if self.differentiable:
            return self.gradients
        return torch.autograd.grad(self.loss, list(self.params), create_graph=True, materialize_grads=True)

    @property
    def recording(self) -> Recording:
        if self._recording is None:
            raise ValueError("this curvature looks into the layers of the model: pass model=")
        if not self._recording.calls:
            raise ValueError(
                f"the closure has not called the model that was passed as model=: pass that one, or {INSTEAD}"
            )
        return self._recording

    def per_example_squares(self, output_slopes: Tensor | None = None) -> Tensors:
        """mean_i g_i², with g_i the gradient of example i.

        Args:
            output_slopes: What to send back from the model's output, a row an example; the slope of its loss if None.
        """
        examples = self.recording.examples
        cotangents = self._cotangents
        if output_slopes is not None:
            cotangents = torch.autograd.grad(
                model_output(self.recording),
                self._edges(),
                output_slopes / examples,
                create_graph=self.differentiable,
                retain_graph=True,
                allow_unused=True,
            )
        with torch.set_grad_enabled(self.differentiable):
            squares = self._squares(cotangents)
        # What is sent back has the mean's 1/examples in it: g_i = examples · c_i.
        return torch._foreach_mul([squares[p] for p in self.params], examples)

    def _squares(self, cotangents: tuple[Tensor | None, ...]) -> dict[Tensor, Tensor]:
        """Σ_i c_i² of every parameter."""
        examples, wanted = self.recording.examples, set(self.params)
        squares: dict[Tensor, Tensor] = {}
        home: dict[Tensor, str] = {}
        rest = list(cotangents)
        for call in self.recording.calls:
            mine, rest = rest[: len(call.edges)], rest[len(call.edges) :]
            names: dict[str, Tensor] = {name: p for name, p in call.layer.named_parameters() if p in wanted}
            if not names or all(b is None for b in mine):
                continue
            for name, square in squared_contributions(call, mine, set(names), examples).items():
                p = names[name]
                if p in home:
                    raise ValueError(
                        f"the parameters of layer {call.name!r} are used twice in one pass (the other time in layer "
                        f"{home[p]!r}), so their gradients per example add up before they are squared: {INSTEAD}"
                    )
                squares[p], home[p] = square, call.name
        for p in self.params:
            if p not in squares:
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} has a gradient but is in no layer of model=: pass the "
                    f"whole model, or {INSTEAD}"
                )
        return squares


def model_output(recording: Recording) -> Tensor:
    """What the model gave: a tensor, or an object that has one as `logits` (Hugging Face)."""
    output = getattr(recording.output, "logits", recording.output)
    if not isinstance(output, Tensor):
        raise ValueError(
            f"the model gives a {type(output).__name__}, and the output distribution is known for tensors (or an "
            "object with `logits`) only: use curvature=per_example, which needs no output"
        )
    return output
