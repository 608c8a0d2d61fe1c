"""Several processes on one device, each with runs side by side: a run that is being started holds up its process."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import closing, suppress
from multiprocessing.connection import Connection, wait

from gtracer.lab.config import Config
from gtracer.lab.sweeps.launchers.local import Cell, Event, Process


class Crowd:
    """Trains runs in several processes that share a device; each is handed the next run when one of its own has ended.

    On an NVIDIA GPU they take turns unless its MPS runs (`nvidia-cuda-mps-control -d`).

    Args:
        processes: How many.
        runs: How many runs at a time, in all of them together.
    """

    def __init__(self, processes: int, runs: int) -> None:
        self.processes, self.width = processes, math.ceil(runs / processes)

    def __call__(self, cells: list[Cell]) -> Iterator[Event]:
        """Train all of them. Whoever closes the generator stops the processes, which save first."""
        todo = iter(cells)
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
            for config, _ in todo:
                yield Event(config, ended=True, failure="all processes have died")
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

    def take(self, cell: Cell | None) -> None:
        """Hand it this run; None is the end of them."""
        with suppress(BrokenPipeError):  # its end is told when it is read
            self.process.pipe.send(cell)
        if cell is not None:
            self.runs.append(cell[0])

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


def _serve(pipe: Connection, width: int, beside: int, threads: int) -> None:
    """Train what comes through the pipe, several at a time, until None comes."""
    import torch

    from gtracer.lab.sweeps.launchers.cuda_graphs import Abreast

    torch.set_num_threads(threads)
    with closing(Abreast(width, beside)(iter(pipe.recv, None))) as events:  # type: ignore[type-var]
        for event in events:
            pipe.send(event)
