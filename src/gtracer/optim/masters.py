"""Weights in bfloat16: the update is made of their float32 masters, for lack of which small updates would be lost.

A master is the weight in the model and sixteen bits more, which the state keeps: exactly float32, at the memory of one
further copy in bfloat16. The base optimiser finds the masters where it looks for parameters, so that its arithmetic and
its state are float32's. Whoever writes into the weights between steps moves the masters with them.

Without master weights the sixteen bits are not kept: weights and state are in bfloat16, and what an update makes of
them is rounded up or down by chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gtracer import tensors
from gtracer.optim.step import COUNT, Step

if TYPE_CHECKING:
    from gtracer.optim.rules import Rule

REST = "rest"  # in the state: the bits that a master has beyond the weight


def is_narrow(p: Tensor) -> bool:
    """Whether a weight is in bfloat16."""
    return p.dtype == torch.bfloat16


@contextmanager
def updated(step: Step, rule: Rule) -> Iterator[None]:
    """Where an update is made: of the masters, which are then rounded into the weights."""
    base = rule.base
    masters: dict[Tensor, Tensor] = {}
    for p in step.params:
        if p.dtype == torch.bfloat16:
            own = base.state.get(p, {})
            rest = own.get(REST)
            if rest is None:
                # In bfloat16 it is without masters, by Adagrad's __init__, or from before the optimiser was wrapped.
                own.update({name: tensors.wide([x])[0] for name, x in own.items() if isinstance(x, Tensor)})
            # Not in p.data: autograd would forget who listens to p's gradients, as DistributedDataParallel does.
            masters[p] = nn.Parameter(p.detach().float() if rest is None else joined(p, rest))
            tensors.leave([masters[p]], tensors.wide([p.grad] if p.grad is not None else []))
    _stand_in(masters, step, base)
    try:
        yield
    finally:
        _stand_in({master: p for p, master in masters.items()}, step, base)
    # Not before the first update: many optimisers fill a state only while it is empty.
    if rule.master_weights:
        for p, master in masters.items():
            rounded, base.state[p][REST] = split(master.detach())
            p.copy_(rounded)
        return
    chance = tensors.Chance(-1 - base.param_groups[0][COUNT])  # displacements draw by the number itself
    for p, master in masters.items():
        own = base.state[p]
        own.pop(REST, None)
        p.copy_(chance.rounded(master.detach()))
        for name, x in own.items():
            if isinstance(x, Tensor) and x.shape == p.shape and x.dtype == torch.float32 and name != "step":
                own[name] = chance.rounded(x)


def _stand_in(others: dict[Tensor, Tensor], step: Step, base: torch.optim.Optimizer) -> None:
    """Put others in the place of parameters, wherever an update looks for them."""
    for group in (*base.param_groups, *(vars(part) for part in step.slices)):
        group["params"][:] = [others.get(p, p) for p in group["params"]]
    for p, other in others.items():
        if p in base.state:
            base.state[other] = base.state.pop(p)


def load(opt: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Take the state as it was saved: torch has made all of it the weights' type, whole numbers and float32 too."""
    saved = [i for group in state_dict["param_groups"] for i in group["params"]]
    params = [p for group in opt.param_groups for p in group["params"]]
    for i, p in zip(saved, params, strict=True):
        for name, value in state_dict["state"].get(i, {}).items():
            # A subclass knows its own: torchao's quantised states look like float32.
            if type(value) is Tensor and name != "step" and (is_narrow(p) or not value.is_floating_point()):
                opt.state[p][name] = value.to(p.device, copy=True)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest bfloat16, and the bits that are then missing.

    >>> weight, rest = split(torch.tensor([1.001]))
    >>> weight, joined(weight, rest)
    (tensor([1.], dtype=torch.bfloat16), tensor([1.0010]))
    """
    bits = master.view(torch.int32)
    # Half is rounded away from zero: to even, as torch does, it would take a seventeenth bit to say which way.
    upper = (bits + 2**15) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def joined(weight: Tensor, rest: Tensor) -> Tensor:
    """The master."""
    return ((weight.detach().view(torch.int16).int() << 16) + rest).view(torch.float32)
