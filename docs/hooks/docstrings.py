"""What griffe, which reads the source without running it, has to be told of it."""

from __future__ import annotations

import importlib
import operator
import re
from typing import Any

import griffe

from gtracer.optim.documentation import TEXTS

PAGE = re.compile(r"\bdocs/([\w/-]+)\.md")
DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Written(griffe.Extension):
    """Docstrings as a page has them."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """The texts that optimisers share, as `documented` puts them there; links to pages; doctests as code."""
        if obj.docstring is None:
            return
        text = obj.docstring.value
        for name, shared in TEXTS.items():
            text = text.replace(f"{{{name}}}", shared.replace("\n", "\n    "))
        text = DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", text)
        obj.docstring.value = PAGE.sub(r"[\1](../\1.md)", text)

    def on_function_instance(self, *, func: griffe.Function, **_: object) -> None:
        """Numbers for the constants that are defaults: `0.01`, not `DELTA`."""
        for parameter in func.parameters:
            parameter.default = _shown(parameter.default, func)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: object) -> None:
        """Those of a dataclass too."""
        if attr.parent is not None and attr.parent.is_class:
            attr.value = _shown(attr.value, attr)


def _shown(default: Any, of: griffe.Object) -> Any:
    if isinstance(default, griffe.ExprName | griffe.ExprAttribute) and str(default).rpartition(".")[2].isupper():
        value = operator.attrgetter(str(default))(importlib.import_module(of.module.path))
        return repr(value) if isinstance(value, int | float | str) else default
    return default
