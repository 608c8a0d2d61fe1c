"""The layers of a model as one pass went through them: what came in, and where the gradient will come out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

INSTEAD = "use curvature=micro_batch(m), which takes any model"


@dataclass
class Call:
    """A layer at work in one pass."""

    name: str
    layer: nn.Module
    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    # Of each tensor that came out. Edges, not tensors: a ReLU in place after the layer would change those.
    edges: list[GradientEdge] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # of these tensors among all that came out


class Recording:
    """Hooks on a model that record each layer's call. A layer is the outermost module with parameters of its own.

    As a context it records what happens inside; `start()` does so until `stop()`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layers = list(_layers(model))
        self._hooks: list[Any] = []
        self.forget()

    def forget(self) -> None:
        """Drop the recording, and with it the graphs."""
        self.calls: list[Call] = []
        self.examples = 0
        self.output: Any = None

    def start(self) -> None:
        """Record the passes from now on that have gradients."""
        for name, layer in self.layers:
            if isinstance(layer, nn.Embedding):
                self._hooks.append(layer.register_forward_pre_hook(self._repeat_positions))
            self._hooks.append(layer.register_forward_hook(self._note(name), with_kwargs=True))
        # Registered last, so that it sees the model's call before a layer that is the model itself.
        self._hooks.append(self.model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
        self._hooks.append(self.model.register_forward_hook(self._leave))

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __enter__(self) -> Recording:
        self.forget()
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def check(self) -> None:
        """Refuse a model whose examples affect each other."""
        for name, module in self.model.named_modules():
            if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
                raise ValueError(
                    f"layer {name!r} ({type(module).__name__}) mixes the examples of a batch, so there is no gradient "
                    f"per example: use GroupNorm or LayerNorm, freeze it with eval(), or {INSTEAD}"
                )

    # The hooks.

    def _enter(self, model: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.check()
            shapes = [x.shape for x in tree_leaves((inputs, keywords)) if isinstance(x, Tensor) and x.ndim]
            if not shapes:
                raise ValueError("model= was called without a tensor, so there is no batch to tell the examples by")
            self.examples = shapes[0][0]

    def _leave(self, model: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if torch.is_grad_enabled():
            self.output = output

    def _repeat_positions(self, layer: nn.Module, inputs: tuple[Any, ...]) -> Any:
        """Positions are looked up once for the whole batch (BERT); each example needs a gradient of its own."""
        index = inputs[0]
        if torch.is_grad_enabled() and len(inputs) == 1 and index.ndim > 1 and len(index) == 1:
            return (index.expand(self.examples, *index.shape[1:]),)
        return None

    def _note(self, name: str) -> Any:
        def note(layer: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
            if not torch.is_grad_enabled():
                return
            call = Call(name, layer, inputs, keywords)
            for place, tensor in enumerate(tree_leaves(output)):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    call.edges.append(get_gradient_edge(tensor))
                    call.places.append(place)
            self.calls.append(call)

        return note


def _layers(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules with parameters of their own."""
    if next(module.parameters(recurse=False), None) is not None:
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _layers(child, f"{name}.{child_name}" if name else child_name)
