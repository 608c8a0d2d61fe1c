"""What was run: the options that all runs share, and those in which they differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gtracer.lab.config import OPTIONS, Config
from gtracer.lab.results.report.tables import NONE
from gtracer.lab.results.statistics import Result, Results
from gtracer.lab.sweeps.study import SYMBOLS

OF_THE_MACHINE = ("seed", "data", "device", "kernels")
OF_FILES = ("text_columns", "label_column", "max_length")  # said where they are other than the default


@dataclass(frozen=True)
class Configuration:
    """Options by their names, as plain text.

    Attributes:
        shared: Names and values that all runs have.
        headings: The names of the others.
        rows: A method in a setting, and its values of these.
    """

    shared: list[tuple[str, str]]
    headings: list[str]
    rows: list[tuple[str, list[str]]]


def configuration(results: Results) -> Configuration:
    """What was asked; where nothing was, what that came to."""
    names = [name for name in OPTIONS if name not in OF_THE_MACHINE]
    values = {name: [_value(result, name) for result in results.all] for name in names}
    differing = [name for name in names if len(set(values[name])) > 1]
    shared = [
        (_name(name), values[name][0])
        for name in names
        if name not in differing and values[name][0] not in (NONE, "no")
        if name not in OF_FILES or values[name][0] != text(getattr(Config, name))
    ]
    rows = [(_label(r, results), [values[name][i] for name in differing]) for i, r in enumerate(results.all)]
    return Configuration(shared, [_name(name) for name in differing], rows if differing else [])


def _value(result: Result, name: str) -> str:
    asked = getattr(result.point.config, name)
    if asked is not None:
        return text(asked)
    found = dict.fromkeys(text(value) for value in result.resolved.get(name, []) if value is not None)
    return " or ".join(found) or NONE


def text(value: Any) -> str:
    """As a reader wants it.

    >>> text(0.00010), text(True), text((0.9, 0.999))
    ('0.0001', 'yes', '0.9, 0.999')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _name(option: str) -> str:
    return SYMBOLS.get(option, option.replace("_", " "))


def _label(result: Result, results: Results) -> str:
    setting = f"{result.point.setting}: " if len(results.study.settings) > 1 else ""
    return setting + result.point.label
