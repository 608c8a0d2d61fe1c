"""Texts as numbers: made once, kept on disk, cut and padded batch by batch."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from gtracer.lab import files
from gtracer.lab.data.task import Texts
from gtracer.lab.errors import LabError

STEP = 16  # batches are as wide as their longest text, up to a multiple of this: few widths, few CUDA graphs
FORMAT = 1  # of what is kept
WINDOW = 50  # batches among which texts of like length come together

_memory: dict[str, Tokens] = {}


@dataclass(frozen=True)
class Tokens:
    """The texts of a split, padded to the longest; a batch of them is as wide as it needs to be.

    Attributes:
        columns: What the model takes: input_ids, attention_mask and the like, a row for each text.
        lengths: How long each text is, on the CPU.
        cut: How many were longer than the limit.
    """

    columns: dict[str, Tensor]
    lengths: Tensor
    cut: int

    def to(self, device: torch.device) -> Tokens:
        return replace(self, columns={key: value.to(device) for key, value in self.columns.items()})

    def width(self, rows: Tensor) -> int:
        """How wide a batch of these texts is."""
        longest = int(self.lengths[rows.cpu()].max())
        return min(-(-longest // STEP) * STEP, self.columns["input_ids"].shape[1])

    def __call__(self, rows: Tensor, width: int | None = None) -> dict[str, Tensor]:
        width = width or self.width(rows)
        rows = rows.to(self.columns["input_ids"].device)
        return {key: value[rows, :width] for key, value in self.columns.items()}

    def sorted(self, rows: Tensor) -> Tensor:
        """These texts with the short ones first."""
        return rows[self.lengths[rows].argsort(stable=True)]

    def grouped(self, rows: Tensor, size: int, generator: torch.Generator) -> Tensor:
        """These texts in batches of like length: little padding, and still a random order of batches."""
        batches = [
            batch
            for window in torch.split(rows, WINDOW * size)
            for batch in torch.split(window[self.lengths[window].argsort(stable=True)], size)
        ]
        whole = [batch for batch in batches if len(batch) == size]
        order = torch.randperm(len(whole), generator=generator).tolist()
        # The one that is not full stays last, as without groups.
        return torch.cat([*(whole[i] for i in order), *(batch for batch in batches if len(batch) < size)])


def tokens(tokenizer: Any, texts: Texts, limit: int) -> Tokens:
    """Made with this tokenizer, at most `limit` tokens a text; once for all runs of a process, and kept on disk."""
    mark = hashlib.sha256(repr((FORMAT, _identity(tokenizer), limit, texts)).encode()).hexdigest()
    if mark not in _memory:
        path = Path.home() / ".cache" / "gtracer" / "tokens" / f"{mark[:32]}.pt"
        found = _read(path)
        if found is None:
            found = _made(tokenizer, texts, limit)
            _keep(path, found)
        _memory[mark] = found
    return _memory[mark]


def _identity(tokenizer: Any) -> str:
    """What decides its tokens; not how it last cut and padded, which it would otherwise tell too."""
    kind = getattr(tokenizer, "backend_tokenizer", None)
    if kind is None:
        return repr(tokenizer)
    kind.no_truncation()
    kind.no_padding()
    return str(kind.to_str())


def _made(tokenizer: Any, texts: Texts, limit: int) -> Tokens:
    tokenizer.padding_side = "right"
    pieces = [list(column) for column in zip(*texts, strict=True)]
    encoded = tokenizer(*pieces, truncation=True, max_length=limit, padding=True)
    columns = {key: torch.from_numpy(numpy.array(rows)) for key, rows in encoded.items()}  # torch takes lists slowly
    # Only tokenizers in Rust know what they left out; of others a text that fills the limit is taken for cut.
    lengths = columns["attention_mask"].sum(1)
    several = encoded.encodings
    cut = sum(bool(e.overflowing) for e in several) if several else int((lengths >= limit).sum())
    return Tokens(columns, lengths, cut)


def _read(path: Path) -> Tokens | None:
    """What was kept; whatever is wrong with it, it can be made again."""
    try:
        kept = torch.load(BytesIO(path.read_bytes()), weights_only=True)
        return Tokens(kept["columns"], kept["lengths"], kept["cut"])
    except Exception:  # a damaged file can raise anything; it is made anew
        return None


def _keep(path: Path, made: Tokens) -> None:
    buffer = BytesIO()
    torch.save({"columns": made.columns, "lengths": made.lengths, "cut": made.cut}, buffer)
    with suppress(LabError):  # a home that cannot be written to is no reason not to train
        files.write(path, buffer.getvalue())
