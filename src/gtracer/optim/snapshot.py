"""All that training changes, kept to be put back: what branches of a run start from."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gtracer.optim.optimizer import TwoPassOptimizer
from gtracer.scopes import AllRandomness, Buffers

SHARED = ("param_groups", "state")  # by an optimiser and the one that it wraps: the very objects have to stay


class Snapshot:
    """Weights, buffers, gradients, modes, an optimiser's state and settings, random numbers, as they are now.

    `restore` puts all of it back, bit for bit and into the same tensors, as often as it is called. What a module keeps
    in plain attributes is not known to it.

    Args:
        optimizer: Whose state it is.
        model: Whose weights, buffers and modes.
        generators: Random number generators beside torch's own, such as a DataLoader's.
    """

    def __init__(self, optimizer: TwoPassOptimizer, model: nn.Module, generators: list[torch.Generator] | None = None):
        in_groups = [p for group in optimizer.param_groups for p in group["params"]]
        params = list(dict.fromkeys([*model.parameters(), *in_groups]))
        buffers = Buffers(model)
        self._buffers = buffers
        self._params = [(p, _copied(p), p.requires_grad, p.grad, _copied(p.grad)) for p in params]
        self._modes = [(module, module.training) for module in model.modules()]
        self._optimizer = optimizer
        self._entries = [(p, entry, Values(entry)) for p, entry in optimizer.state.items()]
        self._groups = [(group, Values(group)) for group in optimizer.param_groups]
        self._settings = [(owner, _settings(owner)) for owner in (optimizer, optimizer.base, *optimizer.notes)]
        self._random = AllRandomness({x.device for x in (*params, *buffers.buffers)}, generators or [])

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        for p, value, wanted, grad, gradient in self._params:
            p.copy_(value)
            p.requires_grad_(wanted)
            if grad is not None:
                grad.copy_(gradient)
            p.grad = grad
        self._buffers.restore()
        for module, training in self._modes:
            module.training = training
        for owner, settings in self._settings:
            for name in vars(owner).keys() - settings.keys() - set(SHARED):
                delattr(owner, name)
            vars(owner).update({name: list(x) if type(x) is list else x for name, x in settings.items()})
        state = self._optimizer.state
        state.clear()
        for p, entry, values in self._entries:
            values.restore(entry)
            state[p] = entry
        for group, values in self._groups:
            values.restore(group)
        self.restore_random()

    def restore_random(self) -> None:
        """Put the random numbers back alone."""
        self._random.restore()


class Values:
    """What a mapping of an optimiser holds: the tensors themselves, and copies of what is in them."""

    def __init__(self, mapping: Mapping[Any, Any]) -> None:
        self._there = dict(mapping)
        # A group's parameters are kept elsewhere.
        self._copies = {key: _copied(value) for key, value in mapping.items() if key != "params"}

    def restore(self, mapping: dict[Any, Any]) -> None:
        mapping.clear()
        mapping.update(self._there)
        for key, value in self._copies.items():
            if isinstance(value, Tensor):
                mapping[key].copy_(value)
            elif isinstance(value, list | dict):  # may have changed inside
                mapping[key] = copy.deepcopy(value)


def _copied(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else copy.deepcopy(x)


def _settings(owner: Any) -> dict[str, Any]:
    return {n: list(x) if type(x) is list else x for n, x in vars(owner).items() if n not in SHARED}
