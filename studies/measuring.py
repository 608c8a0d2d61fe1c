"""What `gtracer.sharpness.measure` costs with its defaults: seconds of each part, and passes over the data.

    python studies/measuring.py --device cuda --data DIR --out records/sharpness/speed.json

ResNet-20 on examples of CIFAR-100, after one epoch of SGD. It is measured twice, since at first kernels are chosen, and
on a GPU once more without TF32, which rounds what convolutions multiply to eleven bits.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import gtracer
from gtracer.lab.config import Config
from gtracer.lab.inference.sharpness import Subject, subject
from gtracer.lab.results import provenance
from gtracer.lab.training.trainer import train


class Clock:
    """Seconds of each part of a measurement, as it tells its progress. Every part ends with numbers that are read."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def __call__(self, what: str, share: float) -> None:
        now = time.perf_counter()
        self.seconds[what] = self.seconds.get(what, 0.0) + now - self._since
        self._since = now


def timed(it: Subject) -> dict[str, Any]:
    """Measure it; what that took and what came out."""
    clock = Clock()
    found = it.measured(progress=clock)
    rows = {row.name: [row.value, row.error] for row in found.rows()}
    return {"seconds": sum(clock.seconds.values()), "parts": clock.seconds, "passes": found.passes, "measures": rows}


def trained(asked: argparse.Namespace) -> Subject:
    where = {"data": asked.data, "device": asked.device}
    config = Config(task="cifar100", model="resnet20", optimizer="sgd", lr=0.1, batch_size=128, epochs=1, **where)
    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder), [], resume=None, model=True)
        model = gtracer.load(folder, device=asked.device)
        return subject(model, examples=asked.examples, batch_size=asked.batch_size, folder=asked.data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=5000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--data", help="folder of CIFAR-100's official files")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="for all of it as JSON")
    asked = parser.parse_args()
    it = trained(asked)
    found = {"first": timed(it), "second": timed(it)}
    if asked.device.startswith("cuda"):
        torch.backends.cudnn.allow_tf32 = False
        found["without TF32"] = timed(it)
    for name, each in found.items():
        parts = ", ".join(f"{what} {seconds:.1f}" for what, seconds in each["parts"].items())
        passes = ", ".join(f"{count:g} of {kind}" for kind, count in each["passes"].items())
        top, trace = (each["measures"][kind][0] for kind in ("hessian.top", "hessian.trace"))
        print(f"{name}: {each['seconds']:.1f} s ({parts}); passes: {passes}; λ {top:.5g}, trace {trace:.5g}")
    if asked.out is not None:
        there = provenance.describe(torch.device(asked.device))
        numbers = {"examples": asked.examples, "batch size": asked.batch_size, "measurements": found}
        asked.out.write_text(json.dumps(numbers | {"environment": there}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
