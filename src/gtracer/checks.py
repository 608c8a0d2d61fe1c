"""Checks of arguments: every refusal is a ValueError that names the argument and its value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from numbers import Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def number(
    name: str,
    value: Any,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Refuse what is not a finite real number between `low` and `high` (inclusive, unless open)."""
    wanted = f"a finite number in {'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} must be {wanted}, got {value!r} ({type(value).__name__})")
    at_open_end = (open_low and value == low) or (open_high and value == high)
    if not math.isfinite(value) or not low <= float(value) <= high or at_open_end:
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


def count(name: str, value: Any) -> None:
    """Refuse what is not a whole number of at least one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def whole(name: str, value: Any) -> None:
    """Refuse what is not a whole number of at least zero."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a whole number of at least 0, got {value!r}")
    if value >= 2**63:
        raise ValueError(f"{name} must be below 2**63, got {value}")


def flag(name: str, value: Any) -> None:
    """Refuse what is not a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Refuse what is not one of the named choices."""
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def kind(name: str, value: Any, wanted: type | tuple[type, ...], hint: str = "") -> None:
    """Refuse what is not an instance of the wanted type."""
    if not isinstance(value, wanted):
        names = wanted.__name__ if isinstance(wanted, type) else " or ".join(w.__name__ for w in wanted)
        raise ValueError(f"{name} must be a {names}{hint}, got {value!r} ({type(value).__name__})")


def learning_rate(value: Any) -> None:
    """Refuse a learning rate that is no number; a tensor is left to torch, which knows where it allows one."""
    from torch import Tensor  # the rest of these checks is for files and command lines too

    if not isinstance(value, Tensor):
        number("lr", value, low=0)


def betas(value: Any) -> None:
    """Refuse what is not Adam's pair of decay rates."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"betas must be a pair of numbers in [0, 1), got {value!r}")
    for index, beta in enumerate(value):
        number(f"betas[{index}]", beta, low=0, high=1, open_high=True)


def parameters(value: Any) -> Any:
    """Refuse what no optimiser can take; return the parameters (or groups) as a list.

    torch says the same with a TypeError; one kind of error for every bad argument is easier to catch.
    """
    from torch import Tensor

    if isinstance(value, Tensor) or not isinstance(value, Iterable):
        raise ValueError(f"params must be an iterable of tensors or of groups, got {type(value).__name__}")
    listed = list(value)
    if not listed:
        raise ValueError("params is empty: there is nothing to optimise (a generator can be read only once)")
    for item in listed:
        if not isinstance(item, Tensor | dict | tuple):
            raise ValueError(f"params must hold tensors, (name, tensor) pairs or groups, got {item!r}")
    return listed


def labelled(group: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a group with what to call them in an error."""
    names = group.get("param_names")
    for index, p in enumerate(group["params"]):
        yield f"parameter {names[index]!r}" if names else f"parameter {index} of its group {tuple(p.shape)}", p


def hyperparameters(group: dict[str, Any]) -> None:
    """Refuse ρ, β, δ or f₀ out of range; Adam's groups have no β of their own, SAM's have ρ alone."""
    for name, high in (("rho", math.inf), ("delta", math.inf), ("beta", 1.0)):
        if name in group:
            number(name, group[name], low=0, high=high)
    if isinstance(group.get("f0"), str):
        choice("f0", group["f0"], ["first-gradient"])
    elif "f0" in group:
        number("f0", group["f0"], low=0)


def loss(value: Any, who: str) -> None:
    """Refuse what cannot be differentiated."""
    from torch import Tensor

    if not isinstance(value, Tensor):
        raise RuntimeError(f"{who} needs the loss as a tensor, got {value!r} ({type(value).__name__})")
    if not value.requires_grad:
        raise RuntimeError(
            f"{who} needs a loss with a graph, got {value!r}: compute it with gradients enabled and do not detach it"
        )
    if value.numel() != 1:
        raise RuntimeError(f"{who} needs a scalar loss, got shape {tuple(value.shape)}: average it over the batch")
