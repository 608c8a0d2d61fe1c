"""Keyword arguments of the optimisers: old names work for one version more, misspelt ones are named."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Given = dict[str, Any]


def checked_keywords(init: Callable[P, R]) -> Callable[P, R]:
    """An `__init__` that takes yesterday's keywords with a DeprecationWarning, and suggests the one that was meant.

    Its signature stays what it is, for `help()`, IDEs and type checkers.
    """
    known = inspect.signature(init).parameters

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        given: Given = dict(kwargs)
        for name, (needed, rename) in RENAMED.items():
            if name in given and name not in known and needed in known:
                rename(given, known)
        for name in given:
            if name not in known:
                raise TypeError(f"{type(args[0]).__name__} has no argument {name!r}{_meant(name, list(known)[1:])}")
        for name, replace in VALUES.items():
            if name in given and name in known:
                replace(given)
        return init(*args, **given)

    return checked


def _meant(name: str, known: list[str]) -> str:
    plain = {candidate.replace("_", ""): candidate for candidate in known}
    name = {"learning_rate": "lr", "wd": "weight_decay"}.get(name.lower(), name)
    found = [name] if name in known else difflib.get_close_matches(name.lower().replace("_", ""), plain, n=1)
    close = [plain.get(candidate, candidate) for candidate in found]
    return f": did you mean {close[0]}?" if close else f"; it takes {', '.join(known)}"


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} will be removed in the next version: use {new}", DeprecationWarning, stacklevel=4)


def _implementation(given: Given, known: Any) -> None:
    from gtracer import checks

    for name in ("compiled", "lean"):
        checks.flag(name, given.get(name, False))
    asked = [name for name in ("compiled", "lean") if given.pop(name, False)]
    if not asked:
        _warn("compiled=False or lean=False", "neither")
        return
    new = "auto" if len(asked) == 2 else "compiled"
    _warn(", ".join(f"{name}=True" for name in asked), f"implementation={new!r}")
    given.setdefault("implementation", new)


def _engine(given: Given, known: Any) -> None:
    from gtracer import checks
    from gtracer.optim.engines import FiniteDifference

    radius, difference = given.pop("radius", FiniteDifference.radius), given.pop("difference", "forward")
    checks.choice("difference", difference, ("forward", "central"))
    made = FiniteDifference(radius=radius, central=difference == "central")
    if given.get("engine") in (None, "finite-difference"):
        _warn("radius= and difference=", f"engine={made!r}")
        given["engine"] = made
    else:
        _warn("radius= and difference=", f"engine={given['engine']!r} alone, which has neither")


def _transform(name: str) -> Callable[[Given, Any], None]:
    def rename(given: Given, known: Any) -> None:
        from gtracer import checks
        from gtracer.optim import experimental

        value = given.pop(name)
        if name == "eta":
            if value is None:
                return
            made: Any = experimental.Ridge(value)
        else:
            checks.flag(name, value)
            if not value:
                return
            made = experimental.Precondition()
        _warn(f"{name}={value!r}", f"transforms=[gtracer.experimental.{made!r}]")
        given["transforms"] = [*given.get("transforms", ()), made]

    return rename


def _share(given: Given, known: Any) -> None:
    from gtracer.optim import experimental
    from gtracer.optim.engines import FiniteDifference

    share, engine = given.pop("share"), given.get("engine")
    if share == 1:
        return
    if isinstance(engine, str) and engine != "finite-difference":
        raise ValueError(f"share = {share} is of the second pass of engine='finite-difference', got engine={engine!r}")
    found = engine if isinstance(engine, FiniteDifference) else FiniteDifference()
    made = experimental.PartialBatch(share, radius=found.radius, central=found.central)
    _warn(f"share={share}", f"engine=gtracer.experimental.{made!r}")
    given["engine"] = made


def _second_moment(given: Given, known: Any) -> None:
    from gtracer import checks
    from gtracer.curvature import gradient_magnitude
    from gtracer.optim import experimental

    value = given.pop("second_moment")
    if value is None:
        return
    checks.choice("second_moment", value, ("total", "loss"))
    if value == "loss":
        _warn("second_moment='loss'", "average=gtracer.experimental.loss_gradient")
        own = [given.get(name) for name in ("curvature", "average")]
        if all(estimator in (None, gradient_magnitude) for estimator in own):  # any other feeds it anyway
            given["average"] = experimental.loss_gradient
    else:
        _warn("second_moment='total'", "nothing, it is the default")


def _reuse(given: Given) -> None:
    if given["reuse"] == "previous":
        from gtracer.optim import experimental

        _warn("reuse='previous'", "reuse=gtracer.experimental.PreviousStep()")
        given["reuse"] = experimental.PreviousStep()


# Of the version before. Each takes its old keyword out of what was given, and puts the new one in.
# Each for those that have the argument named beside it.
RENAMED: dict[str, tuple[str, Callable[[Given, Any], None]]] = {
    "compiled": ("implementation", _implementation),
    "lean": ("implementation", _implementation),
    "radius": ("engine", _engine),
    "difference": ("engine", _engine),
    "eta": ("transforms", _transform("eta")),  # before the next, as in the derivation
    "preconditioned": ("transforms", _transform("preconditioned")),
    "share": ("engine", _share),
    "second_moment": ("betas", _second_moment),
}
VALUES: dict[str, Callable[[Given], None]] = {"reuse": _reuse}
