"""Runs side by side in one process, for a GPU that a small run leaves idle: their steps are CUDA graphs on streams."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gtracer.lab import files
from gtracer.lab.config import Config
from gtracer.lab.data import is_text
from gtracer.lab.errors import DivergedError, LabError
from gtracer.lab.results import provenance
from gtracer.lab.results.record import NAME, Record
from gtracer.lab.sweeps.launchers.local import Cell, Event, told
from gtracer.lab.training import optimizers, resolution
from gtracer.lab.training.run import CHECKPOINT, Run, device_of
from gtracer.lab.training.trainer import record_in, stop_on_interrupt
from gtracer.optim import TwoPassOptimizer
from gtracer.optim.step import COUNT
from gtracer.scopes import drawing_from, twin_of_capture

WIDTH = 8
TURN = 8  # steps that a run hands to the device before the next one's turn
SAVE_SECONDS = 30.0  # a checkpoint takes as long as some steps


class Full(Event):
    """The end of a run for which there was no memory."""


class Abreast:
    """Trains runs side by side on one device, in turns, each as it would be trained alone.

    One that finds no memory left beside the others waits until one of them has ended, and goes on from its checkpoint.

    Args:
        width: How many at a time.
        beside: How many there are on the device, with those of other processes.
    """

    def __init__(self, width: int = WIDTH, beside: int | None = None) -> None:
        self.width, self.beside = width, beside or width

    def __call__(self, cells: Iterable[Cell]) -> Iterator[Event]:
        """Train all of them. Whoever closes the generator stops them, and they save; Ctrl-C does so between turns."""
        torch.backends.cudnn.benchmark = True
        width, waiting, postponed = self.width, iter(cells), list[Cell]()
        lives = dict[Generator[Event | None], Cell]()
        try:
            with stop_on_interrupt() as stopped:
                while True:
                    free = width - len(lives)
                    again, postponed = postponed[:free], postponed[free:]
                    lives |= {_life(*cell, self.beside): cell for cell in again}
                    lives |= {_life(*cell, self.beside): cell for cell in islice(waiting, free - len(again))}
                    if not lives:
                        return
                    for life, cell in list(lives.items()):
                        event = next(life)
                        if stopped():
                            raise KeyboardInterrupt
                        if event is None:
                            continue
                        if event.ended:
                            del lives[life]
                        if isinstance(event, Full) and lives:
                            width, postponed = len(lives), [*postponed, cell]
                        else:
                            yield event
        finally:
            for life in lives:
                life.close()


def _life(config: Config, folder: Path, width: int) -> Generator[Event | None]:
    """One run from beginning to end, a few steps at a time; whatever befalls it befalls it alone."""
    kind, failure = Event, None
    try:
        yield from _trained(config, folder, width)
    except Exception as error:
        failure = told(error, folder)
        kind = Full if isinstance(error, torch.OutOfMemoryError) else Event
    gc.collect()  # or its memory on the device would be there until some later time
    if kind is Full:
        torch.cuda.empty_cache()  # what it held is for its neighbours, in other processes too
    yield kind(config, ended=True, failure=failure)


def _trained(config: Config, folder: Path, width: int) -> Generator[Event | None]:
    resume = (folder / NAME).exists()
    record = record_in(folder, config, resume)
    if record is not None and record.finished:
        return
    with files.locked(folder, "run"):
        replayed = Replayed(config)
        run = replayed.run
        where = provenance.describe(run.device, abreast=width)
        record = record or Record(config, where, notes=run.notes, resolved=resolution.of(run))
        if resume and (folder / CHECKPOINT).exists():
            record.take(replayed.load(folder))
        record.write(folder)
        try:
            yield from _epochs(replayed, record, folder)
        except DivergedError as error:
            record.failure = str(error)
            record.write(folder)
            raise
        except GeneratorExit:
            replayed.save(folder, record.results())
            raise
        record.write(folder)
        (folder / CHECKPOINT).unlink(missing_ok=True)


def _epochs(replayed: Replayed, record: Record, folder: Path) -> Generator[Event | None]:
    run, saved = replayed.run, time.monotonic()
    while run.epoch < run.config.epochs:
        start = time.perf_counter()
        try:
            yield from replayed.rest_of_epoch()
            row = yield from replayed.finished_epoch()
        finally:
            run.seconds += time.perf_counter() - start
        record.add(row, run.seconds)
        record.peak_memory = max(record.peak_memory, provenance.peak_memory(run.device))
        run.seconds = 0.0
        if time.monotonic() - saved > SAVE_SECONDS:
            replayed.save(folder, record.results())
            record.write(folder)
            saved = time.monotonic()
        yield Event(run.config, run.epoch)


class Replayed:
    """A run whose steps, from the batch to the update, are replayed on the device without the CPU.

    What is done for the first time is done as it is, so that all state exists and all kernels are chosen; the second
    time it is recorded. On a CPU it is done as it is every time: the same arithmetic, with nothing gained.
    """

    def __init__(self, config: Config) -> None:
        _refuse_what_cannot_be_replayed(config)
        device = device_of(config.device)
        self.rate = torch.tensor(config.lr, device=device)
        self.run = Run(config, lr=self.rate, **_own_arguments(config, device))
        # Its own random numbers: those of the device are everybody's.
        self.run.generator = torch.Generator(device).manual_seed(config.seed)
        if isinstance(self.run.optimizer, TwoPassOptimizer):
            self.run.optimizer.nonfinite = "ignore"  # at the end of the epoch is early enough
            self.run.optimizer.phases = config.interval
        size, n = config.batch_size, len(self.run.labels)
        self.sizes = [size] * (n // size) + [n % size] * (n % size > 0)
        total = len(self.sizes) * config.epochs
        (factor,) = self.run.schedule.lr_lambdas
        self.table = torch.tensor([config.lr * factor(step) for step in range(total + 1)], device=device)
        self.order, self.counting = (torch.arange(n, device=device) for _ in range(2))
        self.place, self.count = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        # Last: what it is to find on the device has been asked for by then.
        self.lane = Lane(device, self.run.generator, config.seed)

    def rest_of_epoch(self) -> Generator[None]:
        """Hand the steps that are left of this epoch to the device, with a pause for others now and then."""
        run, order = self.run, self.run.order()
        widths = [run.train_batch.width(rows) for rows in torch.split(order, run.config.batch_size)]
        with self.lane.active():
            self.order.copy_(order, non_blocking=True)
            self.place.fill_(run.step * run.config.batch_size)
            self.count.fill_(run.epoch * len(self.sizes) + run.step)
            self.sums.copy_(torch.tensor(list(run.sums.values()), dtype=torch.float64))
        for shape in list(zip(self.sizes, widths, strict=True))[run.step :]:
            done = self._count()
            self.lane.do((*shape, done % run.config.interval), partial(self._step, *shape))
            run.step += 1
            if run.step % TURN == 0:
                yield

    def _count(self) -> int:
        """How many steps are made; the optimiser is told, since a replay does not count."""
        run = self.run
        done = run.epoch * len(self.sizes) + run.step
        if isinstance(run.optimizer, TwoPassOptimizer):
            for group in run.optimizer.param_groups:
                group[COUNT] = done
        return done

    def _step(self, size: int, width: int | None) -> Tensor:
        run = self.run
        run.model.train()
        rows = self.order.index_select(0, self.place + self.counting[:size])
        inputs, labels = run.batch(rows, width)
        self.rate.copy_(self.table.index_select(0, self.count).reshape(()))
        loss = run.update(inputs, labels, size)
        stats = run.optimizer.stats if isinstance(run.optimizer, TwoPassOptimizer) else None
        told = torch.stack([loss, loss * 0, loss * 0]) if stats is None else stats.on_device()
        self.sums.add_(told)
        self.place.add_(size)
        self.count.add_(1)
        return loss

    def finished_epoch(self) -> Generator[None, None, dict[str, float]]:
        """Evaluate, with pauses until the device is done; the epoch's row of the record."""
        run = self.run
        measured = self.lane.do("measured", run.measured)
        with self.lane.active():
            numbers = torch.cat([self.sums, *(value.reshape(1) for value in measured.values())])
        values = yield from self.lane.read(numbers)
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
        self.lane.wait()
        if self.run.step:
            self._account(self.sums.tolist())
        with self.lane.active():
            self.run.save(folder, results)

    def load(self, folder: Path) -> dict[str, Any]:
        """Go on where `save` left off; gives the results it was handed."""
        with self.lane.active():
            results = self.run.load(folder)
        for group in self.run.optimizer.param_groups:  # a checkpoint brings a tensor of its own
            self.rate.copy_(torch.as_tensor(group["lr"]))
            group["lr"] = self.rate
        return results


class Lane:
    """A stream of the device with random numbers of its own, and what was recorded on it."""

    def __init__(self, device: torch.device, generator: torch.Generator, seed: int) -> None:
        self._on_gpu = device.type == "cuda"
        self._done: dict[Any, Any] = {}
        self._graphs: dict[Any, Any] = {}
        # As in a run alone: dropout draws from the device's generator, which starts from the seed.
        self._drawn = torch.Generator(device).manual_seed(seed)
        if self._on_gpu:
            self._twin = self._drawn.clone_state()
            self._generators = (generator, self._drawn, self._twin)
            self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))
            self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Work on this stream, with these random numbers."""
        if self._on_gpu:
            with torch.cuda.stream(self._stream), drawing_from(self._drawn):
                yield
            return
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._drawn.get_state())
            yield
            self._drawn.set_state(torch.get_rng_state())

    def do(self, name: Any, action: Callable[[], Any]) -> Any:
        """Do it; the first time as it is, from the second on as a recorded graph. Gives what it gives."""
        if self._on_gpu:  # what was done as it is has moved only one of the two
            self._twin.set_state(self._drawn.get_state())
        with self.active():
            if not self._on_gpu or name not in self._done:
                self._done[name] = action()
            else:
                if name not in self._graphs:
                    self._graphs[name], self._done[name] = self._recorded(action)
                self._graphs[name].replay()
        return self._done[name]

    def _recorded(self, action: Callable[[], Any]) -> tuple[Any, Any]:
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        token = twin_of_capture.set(self._twin)
        try:
            # Other runs may allocate while this one is recorded: only this thread's mistakes count.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                made = action()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            first = str(error).strip().splitlines()[0]
            raise LabError(f"its step cannot be recorded as a CUDA graph ({first}): use --engine local") from error
        finally:
            twin_of_capture.reset(token)
        return graph, made

    def read(self, numbers: Tensor) -> Generator[None, None, list[float]]:
        """Their values, with pauses until they are there."""
        if not self._on_gpu:
            return numbers.tolist()
        with self.active():
            copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            copy.copy_(numbers, non_blocking=True)
            there: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            there.record(self._stream)
        while not there.query():
            yield
        return copy.tolist()

    def wait(self) -> None:
        if self._on_gpu:
            self._stream.synchronize()


def _own_arguments(config: Config, device: torch.device) -> dict[str, Any]:
    """Those of the optimiser that let a step be recorded, and be short: one that counts has to count on the device."""
    base, scheme = optimizers.parsed(config.optimizer)
    on_gpu = device.type == "cuda"
    own: dict[str, Any] = {} if base == "sgd" else {"capturable": on_gpu}
    if scheme != "tracer" or base == "sgd":  # the update is torch's
        own["fused"] = True
    return own


def _refuse_what_cannot_be_replayed(config: Config) -> None:
    base, scheme = optimizers.parsed(config.optimizer)
    by_itself = scheme == "tracer" and config.rho is None and not is_text(config.task)
    reasons = {
        "a ρ that sets itself changes on the CPU, set rho": by_itself and device_of(config.device).type == "cuda",
        f"optimizer {config.optimizer!r} counts its steps on the CPU": base not in ("sgd", "adam", "adamw"),
        "rho_warmup changes ρ on the CPU": config.rho_warmup > 0,
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise LabError(f"cannot be trained side by side with others: {'; '.join(found)}; use --engine local")
