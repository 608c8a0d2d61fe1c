"""Images from files: whatever Pillow reads, resized, normalised."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy
import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.utils.data import Dataset

from gtracer.lab import files
from gtracer.lab.data.rows import TRAIN, parts_of
from gtracer.lab.data.streams import Items
from gtracer.lab.data.task import TEST_SHARE, Found, Split, Task, stratified
from gtracer.lab.errors import LabError, one_line, shown
from gtracer.lab.schema import Number, Positive, Units

MODES = {1: "L", 3: "RGB"}
GREY = ("1", "L", "LA", "I", "F")  # and those of 16 bits, which go on from I
NO_PICTURES = ("BUFR", "GRIB", "HDF5", "MPEG", "PALM", "PDF")  # which Pillow knows the names of, and cannot read
GAP = 2  # times the size that is wanted, at which a JPEG is decoded at least
LARGEST = 64  # pixels of a side, where nothing is said: what nets that start from nothing learn in reasonable time
PRETRAINED = 224  # what nets that were trained on ImageNet have seen, and its mean and deviation
IMAGENET = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
SAMPLE = 1000  # images that mean and deviation are taken from


@dataclass(frozen=True)
class Pictures:
    """Scaled and cut in the middle to one size, then (pixel − mean) / deviation, channel by channel.

    Attributes:
        size: Height and width.
        mean: Of the training data's pixels, from 0 to 255; a number for each channel.
        deviation: Likewise.
        flat: As a vector.
    """

    size: tuple[Units, Units]
    mean: tuple[Number, ...]
    deviation: tuple[Positive, ...]
    flat: bool = False

    @classmethod
    def of_imagenet(cls) -> Pictures:
        """What nets were trained with, where nothing else is known."""
        return cls((PRETRAINED, PRETRAINED), *IMAGENET)

    def __call__(self, path: Path) -> Tensor:
        """Read one."""
        return self.finish(self.opened(path)[None])[0]

    def opened(self, path: Path) -> Tensor:
        """Its bytes, scaled and cut."""
        return opened(path, self.size, len(self.mean))

    def finish(self, pixels: Tensor) -> Tensor:
        """Of a batch's bytes what the model takes."""
        mean, deviation = (
            torch.tensor(each, device=pixels.device)[:, None, None] for each in (self.mean, self.deviation)
        )
        made = pixels.float().sub_(mean).div_(deviation)
        return made.flatten(1) if self.flat else made

    def items(self, paths: list[Path]) -> Items:
        """These files, as they are wanted."""
        return Items(Files(paths, self.opened), finish=self.finish)

    def read(self, path: Path) -> Found:
        """One file; the files of a folder; of class folders, with their labels, or of those in its test folder.

        A folder with images of its own is no folder of class folders, whatever else is in it.
        """
        if path.is_file():
            return Found(self(path)[None], [path.name])
        folder = splits(path).get("test", path)
        found = [] if any(map(is_picture, folder.iterdir())) else of_classes(folder)
        paths = [p for p, _ in found] or pictures_in(folder)
        if not paths:
            raise LabError(f"{path} holds no images")
        ids = [str(p.relative_to(path)) for p in paths]
        return Found(self.items(paths), ids, [name for _, name in found] or None)

    def pixels(self, made: Tensor) -> Tensor:
        """Back from what was made of an image: bytes, channels first."""
        mean, deviation = (torch.tensor(each)[:, None, None] for each in (self.mean, self.deviation))
        shaped = made.cpu().reshape(len(self.mean), *self.size)
        return (shaped * deviation + mean).round().clamp(0, 255).to(torch.uint8)

    def described(self) -> dict[str, Any]:
        return {"kind": "pictures", **asdict(self)}

    @classmethod
    def of(cls, described: dict[str, Any]) -> Pictures:
        return TypeAdapter(cls).validate_python(described)


@dataclass(frozen=True)
class Files(Dataset[Tensor]):
    """Images that are read when they are wanted."""

    paths: list[Path]
    read: Callable[[Path], Tensor]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, place: int) -> Tensor:
        return self.read(self.paths[place])


def local(folder: Path, size: int | None, seed: int, trained: Pictures | None = None) -> Task:
    """A folder of class folders; or of two or three of those, such as train and test, where they are split already."""
    found = {part: of_classes(source) for part, source in (splits(folder) or {"": _whole(folder)}).items()}
    _check(folder, found)
    names = sorted({name for listed in found.values() for _, name in listed})
    places = {name: place for place, name in enumerate(names)}
    are_split = "" not in found
    if not are_split:
        listed = found[""]
        both = stratified(torch.tensor([places[name] for _, name in listed]), TEST_SHARE, seed)
        found = {part: [listed[i] for i in rows.tolist()] for part, rows in zip(("train", "test"), both, strict=True)}
    fitted, note = _fitted([path for path, _ in found["train"]], size, seed, trained)

    def split(listed: list[tuple[Path, str]]) -> Split:
        labels = torch.tensor([places[name] for _, name in listed], dtype=torch.int64)
        ids = [str(path.relative_to(folder)) for path, _ in listed]
        return Split.clean(fitted.items([path for path, _ in listed]).loaded(), labels, ids)

    parts = {part: split(listed) for part, listed in found.items()}
    where = "read for each batch" if isinstance(parts["train"].inputs, Items) else "kept in memory"
    notes = [f"{folder}: images in {len(names)} classes, {note}, {where}"]
    train, test, held_out = parts["train"], parts["test"], parts.get("holdout")
    if untested := sorted(set(names) - {names[label] for label in test.labels.tolist()}):
        others = f", nor of {len(untested) - 1} more" if len(untested) > 1 else ""
        notes.append(f"{folder}: there are no test images of class {shown(untested[0])}{others}")
    if not are_split and (empty := [path.name for path in _folders(_whole(folder)) if not pictures_in(path)]):
        others = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        notes.append(f"{folder}: no class, since there are no images in it: {shown(empty[0])}{others}")
    return Task("image", len(names), train, test, held_out, tuple(names), fitted, True, tuple(notes))


def _whole(folder: Path) -> Path:
    """Where the class folders are of a folder that is not split: in it, or in its train folder, where that is all."""
    inner = _folders(folder)
    is_all = len(inner) == 1 and inner[0].name.lower() in TRAIN
    return inner[0] if is_all else folder


def _check(folder: Path, found: dict[str, list[tuple[Path, str]]]) -> None:
    counts = Counter(name for listed in found.values() for _, name in listed)
    if len(counts) < 2:
        raise LabError(f"{folder} has {len(counts)} folders with images, two at least are needed, one for each class")
    lonely = sorted(name for name, count in counts.items() if count < 2)
    if "" in found and lonely:
        others = f", and {len(lonely) - 1} others" if len(lonely) > 1 else ""
        raise LabError(
            f"{folder}: class {shown(lonely[0])} has one example{others}: two at least are needed, to train and to test"
        )
    if "" not in found:
        trained = {name for _, name in found["train"]}
        if unseen := sorted(counts.keys() - trained):
            raise LabError(f"{folder}: class {shown(unseen[0])} has no images for training, only others")


def _fitted(paths: list[Path], size: int | None, seed: int, trained: Pictures | None) -> tuple[Pictures, str]:
    """What suits these images, or the model, where it was trained before; and in words."""
    headers = [_header(path) for path in paths]
    grey = all(mode in GREY or mode.startswith("I;") for mode, _ in headers) and trained is None
    usual = min(LARGEST, median_low(min(shape) for _, shape in headers)) if trained is None else trained.size[0]
    side = size or usual
    channels = 1 if grey else 3
    note = f"{'grey' if grey else 'RGB'}, scaled and cut to {side} × {side}"
    if trained is not None:
        return replace(trained, size=(side, side)), f"{note}, normalised as the model was trained"
    order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(seed))[:SAMPLE]
    pixels = torch.stack([opened(paths[i], (side, side), channels) for i in order.tolist()]).float()
    mean, deviation = pixels.mean((0, 2, 3)), pixels.std((0, 2, 3))
    if (deviation == 0).any():
        raise LabError(f"{paths[0].parent.parent}: all images are of one colour, there is nothing to learn from them")
    of = "the training images'" if len(paths) <= SAMPLE else f"{SAMPLE} training images'"
    pictures = Pictures((side, side), tuple(mean.tolist()), tuple(deviation.tolist()))
    return pictures, f"{note}, normalised by {of} mean and deviation"


def _header(path: Path) -> tuple[str, tuple[int, int]]:
    """An image's mode and size, without its pixels."""
    from PIL import Image

    with _reading(path), Image.open(path) as image:
        return image.mode, image.size


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What Pillow's readers raise, in one line."""
    from PIL import Image

    try:
        with warnings.catch_warnings():  # of large images, odd palettes, damaged EXIF data: they can be read
            warnings.simplefilter("ignore")
            yield
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        why = "it is empty" if path.stat().st_size == 0 else one_line(getattr(error, "strerror", None) or error)
        raise LabError(f"cannot read the image {path}: {why}: remove or replace it") from error


def opened(path: Path, size: tuple[int, int], channels: int) -> Tensor:
    """An image's pixels as bytes: channels, height, width."""
    from PIL import Image, ImageOps

    with _reading(path), Image.open(path) as image:
        image.draft(None, (GAP * max(size),) * 2)  # of a JPEG no more is decoded than it takes
        ImageOps.exif_transpose(image, in_place=True)
        upright = _in_eight_bits(image).convert(MODES[channels])
        fitted = ImageOps.fit(upright, size[::-1], Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(numpy.array(fitted))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()


def _in_eight_bits(image: Any) -> Any:
    """Deeper pixels, which Pillow cuts off at 255, on the scale of the others: 16 bits, or real numbers from 0 to 1."""
    from PIL import Image

    if not image.mode.startswith(("I", "F")):
        return image
    pixels: Any = numpy.asarray(image, dtype=numpy.float32)
    if image.mode != "F":
        pixels = pixels / 257
    elif pixels.max() <= 1:
        pixels = pixels * 255
    return Image.fromarray(numpy.nan_to_num(pixels).clip(0, 255).round().astype(numpy.uint8))


def splits(folder: Path) -> dict[str, Path]:
    """The folders that it is split into: train, test and holdout; none where it is not split."""
    there = {path.name: path for path in folder.iterdir() if path.is_dir()}
    return parts_of(there) if any(name.lower() in TRAIN for name in there) else {}


def are_in(folder: Path) -> bool:
    """Whether it holds images in folders."""
    return any(is_picture(path) for inner in folder.iterdir() if inner.is_dir() for path in inner.rglob("*"))


def of_classes(folder: Path) -> list[tuple[Path, str]]:
    """The images in a folder's class folders, each with the name of its class."""
    return [(path, inner.name) for inner in _folders(folder) for path in pictures_in(inner)]


def _folders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and p.name[0] != ".")


def pictures_in(folder: Path) -> list[Path]:
    """All images below it, but for hidden ones."""
    found = sorted(p for p in folder.rglob("*") if is_picture(p) and not _is_hidden(p.relative_to(folder)))
    if wrong := [p for p in found if not files.is_text(str(p))]:
        raise LabError(f"the name {shown(str(wrong[0]))} is not UTF-8: rename it")
    return found


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def is_picture(path: Path) -> bool:
    """By its name; what it holds may still be something else."""
    from PIL import Image

    kind = Image.registered_extensions().get(path.suffix.lower(), NO_PICTURES[0])
    return kind not in NO_PICTURES and path.name[0] != "." and path.is_file()
