"""What suits data and model where nothing is said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gtracer.lab import data
from gtracer.lab.config import FINE_TUNING, Config

# Of data of one's own: by what else is the best epoch to be told?
OWN = {"holdout": 0.1}


def recipe(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Options, which those that were asked for override."""
    task, text_columns = (asked.get(name, getattr(Config, name)) for name in ("task", "text_columns"))
    is_text = data.is_text(task, text_columns)
    found = dict(FINE_TUNING) if is_text or asked.get("pretrained") or asked.get("weights") else {}
    return found if task in data.TASKS else OWN | found
