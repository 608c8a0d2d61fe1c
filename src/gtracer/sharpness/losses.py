"""What the sharpness is of: a loss, and where Gauss-Newton or accuracy are wanted, a loss in two parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Loss = Callable[[Any], Tensor]


@dataclass(frozen=True)
class SplitLoss:
    """A loss in two parts, the model and the loss of its outputs, as the Gauss-Newton matrix needs it.

    >>> loss_of = SplitLoss(lambda batch: 2 * batch, lambda outputs, batch: (outputs - batch).square().mean())
    >>> loss_of(torch.tensor([1.0, 3.0]))
    tensor(5.)

    Attributes:
        outputs_of: The model's outputs for a batch, a tensor with an example in each row.
        loss_on: The mean loss of these outputs over the batch's examples.
        correct_on: Which examples these outputs get right, for the accuracy and the PAC-Bayes bound.
        merge: Puts batches into one, whose loss is the mean over all their examples, or gives None where they do not
            fit together; such as `concatenated`. On a GPU, small batches are then merged where this changes nothing.
    """

    outputs_of: Callable[[Any], Tensor]
    loss_on: Callable[[Tensor, Any], Tensor]
    correct_on: Callable[[Tensor, Any], Tensor] | None = None
    merge: Callable[[Sequence[Any]], Any] | None = None

    def __call__(self, batch: Any) -> Tensor:
        """The loss, for an optimiser too."""
        return self.loss_on(self.outputs_of(batch), batch)


def classification(model: nn.Module) -> SplitLoss:
    """The cross-entropy of batches of inputs and class labels, on any device."""

    def to_model(x: Any) -> Any:
        home = next(model.parameters()).device
        return x.to(home) if isinstance(x, Tensor) and x.device != home else x

    def outputs_of(batch: Any) -> Tensor:
        found = model(to_model(batch[0]))
        outputs: Tensor = getattr(found, "logits", found)  # Hugging Face's
        return outputs

    def loss_on(outputs: Tensor, batch: Any) -> Tensor:
        # In float32 at least: under autocast the outputs are not.
        return cross_entropy(outputs.to(torch.promote_types(outputs.dtype, torch.float32)), to_model(batch[1]))

    def correct_on(outputs: Tensor, batch: Any) -> Tensor:
        right: Tensor = outputs.argmax(1) == to_model(batch[1])
        return right

    return SplitLoss(outputs_of, loss_on, correct_on, concatenated)


def concatenated(batches: Sequence[Any]) -> Any | None:
    """Batches as one, by the first axes of their tensors; None where these differ in more than their lengths.

    >>> concatenated([(torch.zeros(2, 3), torch.zeros(2)), (torch.zeros(1, 3), torch.zeros(1))])[0].shape
    torch.Size([3, 3])
    >>> concatenated([torch.zeros(2, 3), torch.zeros(2, 4)]) is None
    True
    """
    first = batches[0]
    if any(type(batch) is not type(first) for batch in batches):
        return None
    if isinstance(first, Tensor):
        kinds = {(x.shape[1:], x.dtype, x.device, x.layout, x.ndim > 0) for x in batches}
        return torch.cat(list(batches)) if len(kinds) == 1 and first.ndim else None
    if type(first) is dict:
        if any(batch.keys() != first.keys() for batch in batches):
            return None
        columns = {name: concatenated([batch[name] for batch in batches]) for name in first}
        return None if any(x is None for x in columns.values()) else columns
    if type(first) in (tuple, list):
        if any(len(batch) != len(first) for batch in batches):
            return None
        parts = [concatenated(column) for column in zip(*batches, strict=True)]
        return None if any(x is None for x in parts) else type(first)(parts)
    return None


def examples_in(batch: Any) -> int:
    """How many examples a batch holds: the length on which all of its tensors agree.

    >>> examples_in({"x": torch.zeros(3, 2), "y": [torch.zeros(3)]})
    3
    """
    lengths = set(_lengths(batch))
    if len(lengths) != 1:
        found = f"tensors of {len(lengths)} lengths ({sorted(lengths)})" if lengths else "no tensor"
        raise ValueError(
            f"batches must tell how many examples they hold, a {type(batch).__name__} has {found}: pass examples_of=, "
            "a function of a batch that gives the number"
        )
    return lengths.pop()


def _lengths(batch: Any) -> list[int]:
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return [int(shape[0])] if len(shape) else []
    inside = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return [length for part in inside for length in _lengths(part)]
