"""A run's steps as CUDA graphs, so that several runs can share a device that one of them leaves idle."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gtracer.lab.config import Config
from gtracer.lab.data.streams import Items
from gtracer.lab.data.task import Task
from gtracer.lab.errors import LabError
from gtracer.lab.training import checkpoint, optimizers
from gtracer.lab.training.cuda_graph import GraphStream
from gtracer.lab.training.device import device_of
from gtracer.lab.training.run import Run
from gtracer.optim import TwoPassOptimizer

TURN = 8  # steps that a run hands to the device before the next one's turn


class Captured:
    """Steps that are replayed on the device, from the batch to the update, without the CPU.

    What is done for the first time is done as it is, so that all state exists and all kernels are chosen; the second
    time it is captured. On a CPU it is done as it is every time: the same arithmetic, with nothing gained.
    """

    def __init__(self, config: Config, task: Task | None = None) -> None:
        _refuse_what_cannot_be_captured(config)
        device = device_of(config.device)
        self.rate = torch.tensor(config.lr, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)
        self.run = Run(config, task=task, lr=self.rate, **_own_arguments(config, device))
        if isinstance(getattr(self.run.train_batch, "x", None), Items):
            raise LabError("data that is read for each batch cannot be captured as CUDA graphs: use --engine local")
        # Its own random numbers: those of the device are everybody's.
        self.run.generator = torch.Generator(device).manual_seed(config.seed)
        if isinstance(self.run.optimizer, TwoPassOptimizer):  # whether the loss is finite is asked after each epoch
            self.run.optimizer.prepare_capture()
        total, n = self.run.steps_an_epoch * config.epochs, len(self.run.labels)
        (factor,) = self.run.schedule.lr_lambdas
        self.table = torch.tensor([config.lr * factor(step) for step in range(total + 1)], device=device)
        self.order, self.counting = (torch.arange(n, device=device) for _ in range(2))
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        # Last: what it is to find on the device has been asked for by then.
        self.stream = GraphStream(device, self.run.generator, config.seed)

    def rest_of_epoch(self) -> Generator[None]:
        """Hand the steps that are left of this epoch to the device, with a pause for others now and then."""
        run, order = self.run, self.run.order()
        widths = [run.train_batch.width(rows) for rows in torch.split(order, run.sizes)]
        with self.stream.active():
            self.order.copy_(order, non_blocking=True)
            self.place.fill_(run.step * run.config.batch_size)
            self.count.fill_(run.epoch * len(run.sizes) + run.step)
            self.sums.copy_(torch.tensor(list(run.sums.values()), dtype=torch.float64))
        for shape in list(zip(run.sizes, widths, strict=True))[run.step :]:
            done = self._count()
            self.stream.do((*shape, done % run.config.interval), partial(self._step, *shape))
            run.step += 1
            if run.step % TURN == 0:
                yield

    def _count(self) -> int:
        """How many steps are made; the optimiser is told, since a replay does not count."""
        run = self.run
        done = run.steps
        if isinstance(run.optimizer, TwoPassOptimizer):
            run.optimizer.steps = done
        return done

    def _step(self, size: int, width: int | None) -> Tensor:
        run = self.run
        run.model.train()
        rows = self.order.index_select(0, self.place + self.counting[:size])
        inputs, labels = run.batch(rows, width)
        self.rate.copy_(self.table.index_select(0, self.count).reshape(()))
        loss = run.update(inputs, labels, size)
        stats = run.optimizer.stats if isinstance(run.optimizer, TwoPassOptimizer) else None
        counted = torch.stack([loss, loss * 0, loss * 0]) if stats is None else stats.on_device()
        self.sums.add_(counted)
        self.place.add_(size)
        self.count.add_(1)
        return loss

    def finish_epoch(self) -> Generator[None, None, dict[str, float]]:
        """Evaluate, with pauses until the device is done; the epoch's row of the record."""
        run = self.run
        measured = self.stream.do("measured", run.measured)
        with self.stream.active():
            numbers = torch.cat([self.sums, *(value.reshape(1) for value in measured.values())])
        values = yield from self.stream.read(numbers)
        self._account(values[:3])
        run.require_finite(run.sums["train_loss"])
        return run.row(dict(zip(measured, values[3:], strict=True)))

    def _account(self, sums: list[float]) -> None:
        """What the run itself would have counted in so many steps."""
        run = self.run
        run.sums = dict(zip(run.sums, sums, strict=True))
        done = self._count()
        self.rate.copy_(self.table[done])
        run.schedule.load_state_dict(run.schedule.state_dict() | {"last_epoch": done, "_step_count": done + 1})

    def save(self, folder: Path, results: dict[str, Any]) -> None:
        """Write the checkpoint, with the results so far."""
        self.stream.wait()
        if self.run.step:
            self._account(self.sums.tolist())
        with self.stream.active():
            checkpoint.save(self.run, folder, results)

    def load(self, folder: Path) -> dict[str, Any]:
        """Go on where `save` left off; gives the results it was handed."""
        with self.stream.active():
            results = checkpoint.load(self.run, folder)
        for group in self.run.optimizer.param_groups:  # a checkpoint brings a tensor of its own
            self.rate.copy_(torch.as_tensor(group["lr"]))
            group["lr"] = self.rate
        return results


def _own_arguments(config: Config, device: torch.device) -> dict[str, Any]:
    """Those of the optimiser that let a step be captured, and be short: one that counts has to count on the device."""
    base, scheme = optimizers.parsed(config.optimizer)
    on_gpu = device.type == "cuda"
    own: dict[str, Any] = {} if base == "sgd" else {"capturable": on_gpu}
    if scheme != "tracer" or base == "sgd":  # the update is torch's
        own["fused"] = True
    return own


def _refuse_what_cannot_be_captured(config: Config) -> None:
    base, _ = optimizers.parsed(config.optimizer)
    reasons = {
        f"optimizer {config.optimizer!r} counts its steps on the CPU": base not in ("sgd", "adam", "adamw"),
        "rho_warmup changes ρ on the CPU": config.rho_warmup > 0,
        "ema counts its steps on the CPU": config.ema > 0,
        "sharpness is measured outside of the graphs": config.sharpness is not None,
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise LabError(f"cannot be trained in parallel as CUDA graphs: {'; '.join(found)}; use --engine local")
