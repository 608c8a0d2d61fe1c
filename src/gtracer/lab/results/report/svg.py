"""matplotlib's SVG made fit to stand inside a page, beside others, in the page's own colours and fonts."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from gtracer.lab.results.report.figures import GROUND, INK

NAMESPACE = "{http://www.w3.org/2000/svg}"
LINK = "{http://www.w3.org/1999/xlink}href"


def inlined(svg: bytes, prefix: str, label: str) -> str:
    """The drawing alone: ids after a prefix, ink in the text's colour, no ground, as wide as there is room."""
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.removeprefix(NAMESPACE) in ("metadata", "style"):
                parent.remove(child)  # matplotlib's style would hold for the whole page
    for element in root.iter():
        element.tag = element.tag.removeprefix(NAMESPACE)
        element.attrib = {
            "href" if name == LINK else name: _value(name, value, prefix) for name, value in element.attrib.items()
        }
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": label, "class": "chart"}
    return ElementTree.tostring(root, encoding="unicode")


def _value(name: str, value: str, prefix: str) -> str:
    if name == "id":
        return f"{prefix}-{value}"
    if name == LINK:
        return value.replace("#", f"#{prefix}-", 1)
    if name == "style":
        value = value.replace(INK, "currentColor").replace(f"fill: {GROUND}", "fill: none")
        value = re.sub(r"font: [^;]*?([\d.]+px)[^;]*", r"font-size: \1", value)
    return value.replace("url(#", f"url(#{prefix}-")
