"""The model that is measured: refused where nothing can be, and kept so that a measurement leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parameter import is_lazy

from gtracer import checks, tensors
from gtracer.scopes import AllRandomness, Buffers, generators_of
from gtracer.sharpness.products import short
from gtracer.sharpness.progress import Progress
from gtracer.tensors import Tensors


@dataclass(frozen=True)
class Settings:
    """How an `Objective` is evaluated; all of it can be left out.

    Attributes:
        params: The parameters by which the loss is seen as a function (default: those that are trained).
        examples_of: How many examples a batch holds (default: the length of its tensors).
        train_mode: Have the model in training mode: batch norm by each batch's own statistics, dropout replayed.
        progress: Called with what is being done and which share of all is done; True: a line on the terminal.
        merge: Most examples of a batch that is merged from several, where `loss_of` says how; 0: never (default: 1,024
            on a GPU, 0 elsewhere).
    """

    params: Iterable[Tensor] | None = None
    examples_of: Callable[[Any], float] | None = None
    train_mode: bool = False
    progress: bool | Progress = True
    merge: int | None = None


class Kept:
    """What a measurement could change in a model and around it, to be put back: into the same tensors, bit for bit."""

    def __init__(self, model: nn.Module, params: Tensors, batches: Any) -> None:
        self.params, self.saved = params, tensors.clone(params)
        self._grads = [(p, p.grad) for p in dict.fromkeys([*model.parameters(), *params])]
        self._modes = [(module, module.training) for module in model.modules()]
        self._model, self._buffers = model, Buffers(model)
        self._held = self._buffers
        self._devices = {x.device for x in (*params, *self._buffers.buffers)}
        self._generators = generators_of(batches)
        self._random = self._draws()

    def _draws(self) -> AllRandomness:
        return AllRandomness(self._devices, self._generators)

    def forget_gradients(self) -> None:
        """A loss that calls backward() itself is not to add to the caller's."""
        for p, _ in self._grads:
            p.grad = None

    def restart(self) -> None:
        """Random numbers and buffers alone: every sweep is the same function of the weights."""
        torch.clear_autocast_cache()  # of weights that have moved since, where the caller's autocast is around all
        self._random.restore()
        self._held.restore()

    def hold_buffers(self) -> None:
        """Let sweeps begin with the buffers as they are now."""
        self._held = Buffers(self._model)

    def restore(self) -> None:
        """All of it."""
        with torch.no_grad():
            tensors.copy_(self.params, self.saved)
        for p, grad in self._grads:
            p.grad = grad
        for module, training in self._modes:
            module.training = training
        self._held = self._buffers
        self.restart()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A sweep within another, which afterwards goes on with its own random numbers."""
        after = self._draws()
        try:
            yield
        finally:
            after.restore()


def checked(model: nn.Module, loss_of: Any, batches: Any, settings: Settings) -> list[Tensor]:
    """The parameters; refused where nothing can be measured."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {short(model)}")
    if not callable(loss_of):
        raise ValueError(f"loss_of must be a function of a batch that gives its loss, got {loss_of!r}")
    if not isinstance(batches, Iterable) or isinstance(batches, Tensor | Mapping):
        raise ValueError(f"batches must be a DataLoader or a list of batches, got a {type(batches).__name__}")
    if isinstance(batches, tuple) and len({(x.dtype, x.ndim) for x in batches if isinstance(x, Tensor)}) > 1:
        raise ValueError(
            "batches is a tuple of tensors of several kinds, which looks like one batch: pass a list of them"
        )
    if isinstance(batches, Iterator):  # not by iter(), which draws random numbers and starts a loader's workers
        raise ValueError(
            f"batches can be read only once, being a {type(batches).__name__}, and it takes many sweeps: pass a "
            "DataLoader or a list"
        )
    if settings.examples_of is not None and not callable(settings.examples_of):
        raise ValueError(f"examples_of must be a function of a batch, got {settings.examples_of!r}")
    checks.flag("train_mode", settings.train_mode)
    if settings.merge is not None:
        checks.whole("merge", settings.merge)
    if not isinstance(settings.progress, bool | None) and not callable(settings.progress):
        raise ValueError(
            f"progress must be True, False or a function of what is done and its share, got {settings.progress!r}"
        )
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise RuntimeError(
            f"sharpness in {distributed.get_world_size()} processes: each would measure its own share of the data. "
            "Save the weights and measure in one process"
        )
    if settings.params is None:
        params: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    else:
        params = list(dict.fromkeys(settings.params))
        if not all(isinstance(p, Tensor) and p.requires_grad and p.is_leaf for p in params):
            raise ValueError("params must be parameters of the model that require gradients")
    if not params:
        raise ValueError(f"{type(model).__name__} has no parameters that require gradients: nothing can be sharp")
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    for index, p in enumerate(params):
        name = names.get(p, f"number {index}")
        if is_lazy(p) or p.is_inference():
            kind = (
                "not initialized yet: call the model once"
                if is_lazy(p)
                else "of inference mode: copy the model outside"
            )
            raise ValueError(f"parameter {name} is {kind}")
        if p.is_complex():
            raise ValueError(f"parameter {name} is complex: sharpness is measured of real weights")
        if p.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"parameter {name} is {str(p.dtype).removeprefix('torch.')}, too coarse for the differences that "
                "sharpness is made of: measure model.float(), under autocast if it must be fast"
            )
        if p.device.type == "meta" or tensors.is_sharded(p):
            raise ValueError(f"parameter {name} is not all here (meta or sharded): measure a model that is whole")
    return params
