"""What griffe, which reads the source without running it, has to be told of it."""

from __future__ import annotations

import re

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
