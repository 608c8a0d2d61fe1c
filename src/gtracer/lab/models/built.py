"""A model that is ready to be trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from gtracer.lab.data.batches import Batch
from gtracer.lab.data.task import Split


@dataclass(frozen=True)
class Built:
    """A model, how to feed it, and what it is called."""

    model: nn.Module
    batches: Callable[[Split, torch.device], Batch]
    notes: list[str] = field(default_factory=list)  # what the user should know about them
    name: str = ""
