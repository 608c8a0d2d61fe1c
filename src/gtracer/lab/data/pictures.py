"""Images from files: whatever Pillow reads, resized, normalised."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from gtracer.lab import files
from gtracer.lab.data.task import Found
from gtracer.lab.errors import LabError, one_line

# Where a folder has been split already; where there are two of a kind the first is taken.
TRAIN, HELD_OUT, TEST = ("train", "training"), ("val", "valid", "validation", "dev"), ("test",)
MODES = {1: "L", 3: "RGB"}


@dataclass(frozen=True)
class Pictures:
    """Scaled and cut in the middle to one size, then (pixel − mean) / deviation, channel by channel.

    Attributes:
        size: Height and width.
        mean: Of the training data's pixels, from 0 to 255; a number for each channel.
        deviation: Likewise.
        flat: As a vector.
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    flat: bool = False

    def __call__(self, path: Path) -> Tensor:
        """Read one."""
        pixels = opened(path, self.size, len(self.mean))
        mean, deviation = (torch.tensor(each)[:, None, None] for each in (self.mean, self.deviation))
        made = (pixels - mean) / deviation
        return made.flatten() if self.flat else made

    def read(self, path: Path) -> Found:
        """One file; the files of a folder; of class folders, with their labels, or of those in its test folder."""
        if path.is_file():
            return Found(self(path)[None], [path.name])
        folder = next((path / name for name in (*TEST, *HELD_OUT) if (path / name).is_dir()), path)
        found = of_classes(folder)
        paths = [p for p, _ in found] or pictures_in(folder)
        if not paths:
            raise LabError(f"{path} holds no images")
        ids = [str(p.relative_to(path)) for p in paths]
        return Found(torch.stack([self(p) for p in paths]), ids, [name for _, name in found] or None)

    def described(self) -> dict[str, Any]:
        return {"kind": "pictures", **asdict(self)}

    @classmethod
    def of(cls, described: dict[str, Any]) -> Pictures:
        height, width = described["size"]
        return cls((height, width), tuple(described["mean"]), tuple(described["deviation"]), described["flat"])


def opened(path: Path, size: tuple[int, int], channels: int) -> Tensor:
    """An image's pixels as bytes: channels, height, width."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image).convert(MODES[channels])
            fitted = ImageOps.fit(upright, size[::-1], Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(numpy.array(fitted))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # what Pillow's readers raise
        why = files.reason(error) if isinstance(error, OSError | ValueError) else str(error)
        raise LabError(f"cannot read the image {path}: {one_line(why)}: remove or replace it") from error
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()


def of_classes(folder: Path) -> list[tuple[Path, str]]:
    """The images in a folder's class folders, each with the name of its class."""
    folders = sorted(p for p in folder.iterdir() if p.is_dir() and p.name[0] != ".")
    return [(path, inner.name) for inner in folders for path in pictures_in(inner)]


def pictures_in(folder: Path) -> list[Path]:
    """All images below it."""
    return sorted(p for p in folder.rglob("*") if is_picture(p))


def is_picture(path: Path) -> bool:
    """By its name; what it holds may still be something else."""
    from PIL import Image

    return path.suffix.lower() in Image.registered_extensions() and path.name[0] != "." and path.is_file()
