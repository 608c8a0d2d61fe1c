"""What `gtracer sharpness` costs with its defaults: seconds of each part, and passes over the data.

    python studies/measuring.py --device cuda --data DIR --out records/sharpness/speed.json
    python studies/measuring.py --device cuda --data DIR --once

ResNet-20 on 5,000 examples of CIFAR-100, after one epoch of SGD, or `--run DIR` of a `gtracer train`. On a GPU batches
are merged by default; it is measured so, with the batches of training as they are, and once more without TF32, which
rounds what convolutions multiply to eleven bits. `--once` makes the first of these alone. A short warm-up comes before,
in which kernels are loaded and chosen. Each part's seconds are printed as soon as it ends.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import gtracer
from gtracer.lab.config import Config
from gtracer.lab.inference.sharpness import Subject, subject
from gtracer.lab.results import provenance
from gtracer.lab.training.trainer import train

WARM_UP = {"steps": 1, "top": 1, "probes": 1, "samples": 1, "ascent": 2}


class Clock:
    """Seconds of each part of a measurement, as it tells its progress. Every part ends with numbers that are read."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since, self._part = time.perf_counter(), ""

    def __call__(self, what: str, share: float) -> None:
        if self._part and what != self._part:
            print(f"  {self._part}: {self.seconds[self._part]:.2f} s", flush=True)
        now = time.perf_counter()
        self._part = what
        self.seconds[what] = self.seconds.get(what, 0.0) + now - self._since
        self._since = now


def timed(it: Subject, **options: Any) -> dict[str, Any]:
    """Measure it; what that took and what came out."""
    is_on_gpu = next(it.model.parameters()).is_cuda
    if is_on_gpu:
        torch.cuda.reset_peak_memory_stats()
    clock, since = Clock(), time.process_time()
    found = it.measured(progress=clock, **options)
    rows = {row.name: [row.value, row.error] for row in found.rows()}
    made = {"seconds": sum(clock.seconds.values()), "processor": time.process_time() - since, "parts": clock.seconds}
    if is_on_gpu:
        made["memory"] = torch.cuda.max_memory_allocated()
    return made | {"passes": dict(found.passes), "batches": found.batches, "measures": rows}


def trained(asked: argparse.Namespace) -> Subject:
    """The model and its examples."""
    where = {"data": asked.data, "device": asked.device}
    config = Config(task="cifar100", model="resnet20", optimizer="sgd", lr=0.1, batch_size=128, epochs=1, **where)
    with nullcontext(asked.run) if asked.run else tempfile.TemporaryDirectory() as folder:
        if asked.run is None:
            train(config, Path(folder), [], resume=None, model=True)
        model = gtracer.load(folder, device=asked.device)
        return subject(model, examples=asked.examples, batch_size=asked.batch_size, folder=asked.data)


def told(name: str, each: dict[str, Any]) -> str:
    passes = ", ".join(f"{count:g} of {kind}" for kind, count in each["passes"].items())
    top, trace = (each["measures"][kind][0] for kind in ("hessian.top", "hessian.trace"))
    memory = f", {each['memory'] / 2**30:.2f} GiB" if "memory" in each else ""
    seconds = f"{each['seconds']:.1f} s ({each['processor']:.1f} of the processor){memory}"
    return f"{name}: {seconds}; passes: {passes}; λ {top:.5g}, trace {trace:.5g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=5000)
    parser.add_argument("--batch-size", type=int, help="default: that of training, 128")
    parser.add_argument("--run", type=Path, help="folder of a trained model, in place of training one")
    parser.add_argument("--data", help="folder of CIFAR-100's official files")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--once", action="store_true", help="the defaults alone")
    parser.add_argument("--out", type=Path, help="for all of it as JSON")
    asked = parser.parse_args()
    is_on_gpu = asked.device.startswith("cuda")
    begun = time.perf_counter()
    it = trained(asked)
    print(f"the model: {time.perf_counter() - begun:.1f} s", flush=True)
    timed(it, **WARM_UP)
    there = provenance.describe(torch.device(asked.device))
    numbers: dict[str, Any] = {"examples": asked.examples, "environment": there, "measurements": {}}
    ways: dict[str, dict[str, Any]] = {"defaults": {}}
    if is_on_gpu and not asked.once:
        ways |= {"batches as they are": {"merge": 0}, "without TF32": {}}
    for name, options in ways.items():
        torch.backends.cudnn.allow_tf32 = name != "without TF32"
        numbers["measurements"][name] = each = timed(it, **options)
        print(told(name, each), flush=True)
        if asked.out is not None:
            asked.out.write_text(json.dumps(numbers, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
