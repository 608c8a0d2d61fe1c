"""Sequence classifiers of Hugging Face's transformers: any name or folder that holds a model and its tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gtracer.lab.errors import LabError
from gtracer.lab.models import Batch, Built
from gtracer.lab.tasks.task import Split, Texts


class Classifier(nn.Module):
    """A transformers model that takes a batch and gives its logits, as every other model here does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        logits: Tensor = self.model(**batch).logits
        return logits


def build(name: str, classes: int, max_length: int) -> Built:
    """Load model and tokenizer; the head is made anew for the task's classes."""
    if not name:
        raise LabError("a text task needs --model, a Hugging Face name or folder such as bert-base-uncased")
    try:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
    except ModuleNotFoundError as error:
        raise LabError(f"a text task needs {error.name}: pip install 'gtracer-optim[text]'") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForSequenceClassification.from_pretrained(
            name, num_labels=classes, ignore_mismatched_sizes=True, dtype=torch.float32
        )
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LabError(f"model {name!r} could not be loaded: {first}") from error
    return Built(Classifier(model), batches_with(tokenizer, max_length))


def batches_with(tokenizer: Any, max_length: int) -> Callable[[Split, torch.device], Batch]:
    """Tokenise a split once; pad each batch to its longest text."""

    def batches(split: Split, device: torch.device) -> Batch:
        assert isinstance(split.inputs, list)
        encoded = encode(tokenizer, split.inputs, max_length)

        def batch(rows: Tensor) -> dict[str, Tensor]:
            chosen = [{key: values[i] for key, values in encoded.items()} for i in rows.tolist()]
            padded = tokenizer.pad(chosen, return_tensors="pt")
            return {key: value.to(device) for key, value in padded.items()}

        return batch

    return batches


def encode(tokenizer: Any, texts: Texts, max_length: int) -> dict[str, list[list[int]]]:
    columns = [list(column) for column in zip(*texts, strict=True)]
    limit = min(max_length, tokenizer.model_max_length)
    return dict(tokenizer(*columns, truncation=True, max_length=limit))
