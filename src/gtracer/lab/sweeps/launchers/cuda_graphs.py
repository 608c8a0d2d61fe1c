"""Runs in parallel on one device, for a GPU that a small run leaves idle: their steps are CUDA graphs on streams."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from itertools import islice
from multiprocessing.connection import Connection, wait

import torch

from gtracer.lab.config import Config
from gtracer.lab.sweeps.launchers.local import Event, Job, Process, reason
from gtracer.lab.training.captured import Captured
from gtracer.lab.training.interrupts import stop_on_interrupt
from gtracer.lab.training.trainer import begun, claimed, fit

WIDTH = 8
SAVE_SECONDS = 30.0  # a checkpoint takes as long as some steps


class Full(Event):
    """The end of a run for which there was no memory."""


class CudaGraphs:
    """Trains runs in parallel on one device, in turns, each as it would be trained alone.

    One that finds no memory left waits until another has ended, and goes on from its checkpoint.

    Args:
        width: How many at a time.
        sharing: How many there are on the device, with those of other processes.
    """

    def __init__(self, width: int = WIDTH, sharing: int | None = None) -> None:
        self.width, self.sharing = width, sharing or width

    def __call__(self, jobs: Iterable[Job]) -> Iterator[Event]:
        """Train all of them. Whoever closes the generator stops them, and they save; Ctrl-C does so between turns."""
        torch.backends.cudnn.benchmark = True
        width, waiting, postponed = self.width, (Job(*job) for job in jobs), list[Job]()
        lives = dict[Generator[Event | None], Job]()
        try:
            with stop_on_interrupt() as stopped:
                while True:
                    free = width - len(lives)
                    again, postponed = postponed[:free], postponed[free:]
                    lives |= {_life(job, self.sharing): job for job in again}
                    lives |= {_life(job, self.sharing): job for job in islice(waiting, free - len(again))}
                    if not lives:
                        return
                    for life, job in list(lives.items()):
                        event = next(life)
                        if stopped():
                            raise KeyboardInterrupt
                        if event is None:
                            continue
                        if event.ended:
                            del lives[life]
                        if isinstance(event, Full) and lives:
                            width, postponed = len(lives), [*postponed, job]
                        else:
                            yield event
        finally:
            for life in lives:
                life.close()


def _life(job: Job, width: int) -> Generator[Event | None]:
    """One run from beginning to end, a few steps at a time; a failure ends only this run."""
    kind, failure = Event, None
    try:
        yield from _trained(job, width)
    except Exception as error:
        failure = reason(error, job.folder)
        kind = Full if isinstance(error, torch.OutOfMemoryError) else Event
    if torch.cuda.is_available():
        gc.collect()  # or its memory on the device would be there until some later time
        if kind is Full:
            torch.cuda.empty_cache()  # what it held is for its neighbours, in other processes too
    yield kind(job.config, ended=True, failure=failure)


def _trained(job: Job, width: int) -> Generator[Event | None]:
    config, folder = job.config, job.folder
    with ExitStack() as lock:
        found = claimed(folder, config, None, lock)
        if found is not None and found.finished:
            return
        steps = Captured(config, job.task)
        record = begun(steps, folder, found, in_parallel=width)
        progress = fit(steps, record, folder, SAVE_SECONDS, model=job.model)
        try:
            for at in progress:
                yield Event(config, steps.run.epoch) if isinstance(at, dict) else None
        except GeneratorExit:
            progress.close()
            steps.save(folder, record.results())
            raise


class Processes:
    """Trains runs in several processes that share a device; each is handed the next run when one of its own has ended.

    On an NVIDIA GPU they take turns unless its MPS runs (`nvidia-cuda-mps-control -d`).

    Args:
        processes: How many.
        runs: How many runs at a time, in all of them together.
    """

    def __init__(self, processes: int, runs: int) -> None:
        self.processes, self.width = processes, math.ceil(runs / processes)

    def __call__(self, jobs: list[Job]) -> Iterator[Event]:
        """Train all of them. Whoever closes the generator stops the processes, which save first."""
        todo = iter(jobs)
        threads = max(1, (os.cpu_count() or 1) // self.processes)
        words = (self.width, self.processes * self.width, threads)
        crew = [_Member(Process(_serve, *words)) for _ in range(self.processes)]
        try:
            for _ in range(self.width):
                for member in crew:
                    member.take(next(todo, None))
            while busy := [member for member in crew if member.runs]:
                ready = wait([member.process.pipe for member in busy])
                for member in busy:
                    for event in member.events() if member.process.pipe in ready else ():
                        if event.ended and not member.is_gone:
                            member.take(next(todo, None))
                        yield event
            for job in todo:
                yield Event(job[0], ended=True, failure="all processes have died")
        finally:
            for member in crew:
                if member.runs:  # the others are about to end by themselves
                    member.process.interrupt()
            for member in crew:
                member.process.end()


class _Member:
    """A process, and the runs that it has under way."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.runs: list[Config] = []
        self.is_gone = False

    def take(self, job: Job | None) -> None:
        """Hand it this run; None is the end of them."""
        with suppress(BrokenPipeError):  # its end is told when it is read
            self.process.pipe.send(job)
        if job is not None:
            self.runs.append(job[0])

    def events(self) -> list[Event]:
        """What it has to tell; at its death, that its runs have ended."""
        try:
            event: Event = self.process.receive()
        except EOFError:
            self.is_gone = True
            lost, self.runs = self.runs, []
            reason = "its process died: give the same command again to go on from its last checkpoint"
            return [Event(config, ended=True, failure=reason) for config in lost]
        if event.ended:
            self.runs.remove(event.config)
        return [event]


def _serve(pipe: Connection, width: int, sharing: int, threads: int) -> None:
    """Train what comes through the pipe, several at a time, until None comes."""
    torch.set_num_threads(threads)
    with closing(CudaGraphs(width, sharing)(iter(pipe.recv, None))) as events:  # type: ignore[type-var]
        for event in events:
            pipe.send(event)
