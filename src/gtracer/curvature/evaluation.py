"""The loss at the current weights, and what an estimator of curvature may ask of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gtracer.curvature.layers import Layer, layer_at, path_of, vectorised_squares
from gtracer.curvature.recording import INSTEAD, Call, Recording
from gtracer.tensors import Tensors, is_sharded, leaves


class Evaluation:
    """A loss with its graph, the parameters it depends on, and their gradients.

    Args:
        loss: The mean over the examples of a batch.
        params: Parameters to differentiate by; `params` and `gradients` then hold those that the loss depends on.
        recording: The recording of the pass that gave the loss, if an estimator needs the layers.
        differentiable: Whether gradients and estimates carry their own graph.
        by_examples: Compute the gradients of the layers' parameters from those of the examples, if these are needed
            anyway. This saves a product over the batch and gives the same to rounding.
        losses: The examples' losses, if an estimator needs them one by one.
    """

    def __init__(
        self,
        loss: Tensor,
        params: Tensors,
        recording: Recording | None = None,
        *,
        differentiable: bool = False,
        by_examples: bool = False,
        losses: Tensor | None = None,
    ) -> None:
        self.loss, self.losses, self.differentiable = loss, losses, differentiable
        self._recording = recording
        self._layers: dict[str, Layer] = {}  # by name, where the examples' gradients are kept
        self.params: Tensors = params
        inside = self._layers_own(params) if by_examples else set()
        direct, edges = [p for p in params if p not in inside], self._edges()
        found = torch.autograd.grad(
            loss, [*direct, *edges], create_graph=differentiable, retain_graph=True, allow_unused=True
        )
        self._cotangents = found[len(direct) :]
        slopes: dict[Tensor, Tensor | None] = dict(zip(direct, found[: len(direct)], strict=True))
        if inside:
            slopes |= self._examples_gradients(inside)
        _check_reached(loss, params, [p for p in params if slopes.get(p) is None])
        self.params = [p for p in params if slopes.get(p) is not None]
        self.gradients: Tensors = [slope for p in self.params if (slope := slopes[p]) is not None]

    def _layers_own(self, params: Tensors) -> set[Tensor]:
        """Those that the loss depends on through one call of their layer and not otherwise, as through a ridge."""
        uses = Counter(getattr(node, "variable", None) for node in nodes_used(self.loss))
        own = {p for call in self._calls() if path_of(call) for p in call.layer.parameters()}
        return {p for p in params if p in own and uses[p] == 1}

    @torch.no_grad()
    def _examples_gradients(self, inside: set[Tensor]) -> dict[Tensor, Tensor | None]:
        slopes: dict[Tensor, Tensor | None] = {}
        for call, mine, names in self._used(self._cotangents):
            layer = layer_at(call, mine, self.recording.examples)
            if layer is not None:
                self._layers[call.name] = layer
                slopes |= {p: layer.gradient(name).to(p.dtype) for name, p in names.items() if p in inside}
        return slopes

    def _edges(self) -> list[Any]:
        return [edge for call in self._calls() for edge in call.edges]

    def _calls(self) -> list[Call]:
        return self._recording.calls if self._recording else []

    def gradients_with_graph(self) -> Tensors:
        """∇L with its graph, even if the estimates need none."""
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
            output_slopes: The gradient at the model's output, one row per example (default: that of the loss).
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
        examples = self.recording.examples
        squares: dict[Tensor, Tensor] = {}
        home: dict[Tensor, str] = {}
        for call, mine, names in self._used(cotangents):
            known = self._layers.get(call.name) if cotangents is self._cotangents else None
            layer = known or layer_at(call, mine, examples)
            if layer is None:
                found = vectorised_squares(call, mine, set(names), examples)
            else:
                found = {name: layer.squares(name) for name in names}
                if cotangents is self._cotangents and not self.differentiable:
                    self._layers[call.name] = layer
            for name, p in names.items():
                if p in home:
                    raise ValueError(
                        f"the parameters of layer {call.name!r} are used twice in one pass (the other time in layer "
                        f"{home[p]!r}), so their gradients per example add up before they are squared: {INSTEAD}"
                    )
                squares[p], home[p] = found[name], call.name
        for p in self.params:
            if p not in squares:
                raise ValueError(
                    f"a parameter of shape {tuple(p.shape)} has a gradient but is in no layer of model=: pass the "
                    f"whole model, or {INSTEAD}"
                )
        return squares

    def _used(
        self, cotangents: tuple[Tensor | None, ...]
    ) -> Iterator[tuple[Call, list[Tensor | None], dict[str, Tensor]]]:
        """The calls that the loss depends on, with the gradients at their outputs and their parameters by name."""
        wanted, rest = set(self.params), list(cotangents)
        for call in self.recording.calls:
            mine, rest = rest[: len(call.edges)], rest[len(call.edges) :]
            names: dict[str, Tensor] = {name: p for name, p in call.layer.named_parameters() if p in wanted}
            if names and any(b is not None for b in mine):
                yield call, mine, names

    def shifts(self, weights: dict[Tensor, Tensor]) -> Shifts:
        """Each example's own displacement along weights ∘ g_i, for a pass in which each example has its own
        parameters.

        `per_example_squares` must have been called before.
        """
        layers = []
        for call, _, names in self._used(self._cotangents):
            if call.name not in self._layers:
                kind = type(call.layer).__name__
                raise ValueError(f"layer {call.name!r} ({kind}) has no difference per example: use engine='exact'")
            # g_i = examples · c_i, as above.
            own = {name: self.recording.examples * weights[p] for name, p in names.items()}
            layers.append((call.layer, self._layers[call.name], own))
        return Shifts(layers)


class Shifts:
    """Displacements of the parameters, one for each example, layer by layer."""

    def __init__(self, layers: list[tuple[nn.Module, Layer, dict[str, Tensor]]]) -> None:
        self._layers = layers

    @contextmanager
    def made(self, scale: Tensor) -> Iterator[None]:
        """Inside, the model's layers compute with displaced parameters; `scale` multiplies all displacements."""
        try:
            for layer, at, weights in self._layers:
                layer.forward = _moved(at, {name: scale * weight for name, weight in weights.items()})
            yield
        finally:
            for layer, _, _ in self._layers:
                layer.__dict__.pop("forward", None)


def _check_reached(loss: Tensor, params: Tensors, without: Tensors) -> None:
    """Refuse shards that have no gradient because the loss is computed from gathered copies of them."""
    if sharded := [p for p in without if is_sharded(p)]:  # of a tensor-parallel model one may be out of use
        copies = {x.shape for x in leaves(loss, besides=params)}
        if any(p.shape in copies for p in sharded):
            raise RuntimeError(
                "the model is sharded by fully_shard, whose copies of the weights backward() alone can trace back: "
                "use curvature=gradient_magnitude with engine='finite-difference'"
            )


def _moved(at: Layer, weights: dict[str, Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: at.moved(x, weights)


def nodes_used(loss: Tensor) -> Iterator[Any]:
    """Every node of the loss's graph, as often as it is used."""
    rest: list[Any] = [loss.grad_fn]
    seen = set()
    while rest:
        node = rest.pop()
        if node is not None:
            yield node
            if node not in seen:
                seen.add(node)
                rest += [following for following, _ in node.next_functions]


def model_output(recording: Recording) -> Tensor:
    """What the model gave: a tensor, or an object that has one as `logits` (Hugging Face)."""
    output = getattr(recording.output, "logits", recording.output)
    if not isinstance(output, Tensor):
        raise ValueError(
            f"the model gives a {type(output).__name__}, and the output distribution is known for tensors (or an "
            "object with `logits`) only: use curvature=per_example, which needs no output"
        )
    return output
