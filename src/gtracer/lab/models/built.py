"""A model that is ready to be trained, or to be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gtracer.lab.data.batches import Batch
from gtracer.lab.data.task import Found, Split


@dataclass(frozen=True)
class Architecture:
    """What a model is made from, so that it can be made again without the data it was trained on.

    Attributes:
        kind: Of its inputs: "vector", "image" or "text".
        name: By which `models.build` knows it.
        outputs: How many.
        shape: Of an input, where it has one.
        width: Of an mlp.
        depth: Likewise.
        max_length: Tokens of a text, at most.
    """

    kind: str
    name: str
    outputs: int
    shape: tuple[int, ...] = ()
    width: int = 256
    depth: int = 2
    max_length: int = 256

    @classmethod
    def of(cls, described: dict[str, Any]) -> Architecture:
        return cls(**described | {"shape": tuple(described["shape"])})


@dataclass(frozen=True)
class Built:
    """A model, how to feed it, and how it is made again."""

    model: nn.Module
    batches: Callable[[Split | Found, torch.device], Batch]
    architecture: Architecture
    inputs: tuple[str, ...] = ()  # names of its tensors, where it takes several
    notes: list[str] = field(default_factory=list)  # what the user should know about them
    save: Callable[[Path], None] = lambda folder: None  # what else than weights it takes to make it again

    @property
    def name(self) -> str:
        return self.architecture.name
