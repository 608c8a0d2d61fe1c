"""`gtracer bench loading`: what reading images from files costs, beside a plain DataLoader that does the same."""

from __future__ import annotations

import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image, ImageOps
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gtracer.lab.benchmarks import measurement
from gtracer.lab.data import pictures, streams
from gtracer.lab.data.pictures import Pictures
from gtracer.lab.data.streams import read_ahead

SIDE = 224
IMAGES = 10_000


class Plain(Dataset[Tensor]):
    """As one writes it by hand."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        mean, deviation = pictures.IMAGENET
        self.mean, self.deviation = (torch.tensor(each)[:, None, None] for each in (mean, deviation))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, place: int) -> Tensor:
        with Image.open(self.paths[place]) as image:
            fitted = ImageOps.fit(image.convert("RGB"), (SIDE, SIDE), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(numpy.array(fitted)).permute(2, 0, 1)
        found: Tensor = (pixels - self.mean) / self.deviation
        return found


def loading(
    *, batch_size: int, rounds: int, device: str, out: Path | None, console: Console, images: int = IMAGES
) -> dict[str, Any]:
    """Seconds, and seconds of all cores, to read all images once, in random order; printed and written."""
    place = measurement.place_of(device)
    with tempfile.TemporaryDirectory() as folder:
        paths = _make_up(Path(folder), images)
        ways = {"a plain DataLoader": _plainly, "gtracer train": _by_us}
        found: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "of_cores": []} for name in ways}
        for turn in track(range(rounds), description="rounds", transient=True, console=console):
            order = torch.randperm(images, generator=torch.Generator().manual_seed(turn))
            for name, read in ways.items():
                seconds, of_cores = _timed(partial(read, paths, order, batch_size, place))
                found[name]["seconds"].append(seconds)
                found[name]["of_cores"].append(of_cores)
    workers = streams.workers(-(-images // batch_size))
    numbers = {"images": images, "side": SIDE, "batch_size": batch_size, "rounds": rounds, "workers": workers}
    result = measurement.result_of("loading", place, **numbers, ways=found)
    table = measurement.table_of(
        measurement.title(result, f"{images} JPEGs of {SIDE} × {SIDE}", f"batches of {batch_size}"),
        ("", "seconds", "seconds of all cores"),
        caption=f"Median (least to most) of {rounds} rounds, in turn; {workers} processes read.",
    )
    for name, times in found.items():
        table.add_row(name, *(_in_words(times[what]) for what in ("seconds", "of_cores")))
    measurement.publish(result, [table], out, console)
    return result


def _in_words(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def _plainly(paths: list[Path], order: Tensor, size: int, place: torch.device) -> None:
    workers = streams.workers(-(-len(paths) // size))
    pinned = place.type == "cuda"
    for batch in DataLoader(Plain(paths), size, sampler=order.tolist(), num_workers=workers, pin_memory=pinned):
        batch.to(place, non_blocking=True)


def _by_us(paths: list[Path], order: Tensor, size: int, place: torch.device) -> None:
    for _ in read_ahead(Pictures((SIDE, SIDE), *pictures.IMAGENET).items(paths), torch.split(order, size), place):
        pass


def _timed(read: Callable[[], None]) -> tuple[float, float]:
    """Of a clock; and of all cores, those of processes that have ended among them."""
    before, start = _of_cores(), time.perf_counter()
    read()
    return time.perf_counter() - start, _of_cores() - before


def _of_cores() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _make_up(folder: Path, images: int) -> list[Path]:
    """Clouds with some noise, as JPEGs."""
    draws = numpy.random.default_rng(0)
    paths = [folder / f"{number}.jpg" for number in range(images)]
    for path in paths:
        cloud = Image.fromarray(draws.integers(0, 255, (28, 28, 3), dtype=numpy.uint8)).resize((SIDE, SIDE))
        noisy = numpy.asarray(cloud) + draws.integers(-12, 12, (SIDE, SIDE, 3))
        Image.fromarray(noisy.clip(0, 255).astype(numpy.uint8)).save(path, quality=90)
    return paths
