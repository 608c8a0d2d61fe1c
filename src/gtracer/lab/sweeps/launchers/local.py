"""Runs in parallel on this machine: processes that train one run after the other, and may die."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gtracer.lab.config import Config
from gtracer.lab.errors import LabError, one_line

if TYPE_CHECKING:
    from gtracer.lab.data.task import Task

RETRIES = 2


class Job(NamedTuple):
    """A run that is to be made.

    Attributes:
        config: The run.
        folder: Its own.
        model: Whether it leaves its model in the folder too.
        task: Its data, where that is not just what the configuration says.
    """

    config: Config
    folder: Path
    model: bool = False
    task: Task | None = None


@dataclass(frozen=True)
class Event:
    """What became of a run: so many epochs are done; or it ended, well or with a failure."""

    config: Config
    epochs: int = 0
    ended: bool = False
    failure: str | None = None


class Local:
    """Trains runs in processes of this machine.

    A run whose process dies goes on, from its last epoch, in a new one; after `retries` deaths it is given up.

    Args:
        processes: How many at a time; by default one for each GPU, or core where there is none.
        retries: How often a run is tried again when its process dies.
    """

    def __init__(self, processes: int | None = None, retries: int = RETRIES) -> None:
        self.processes, self.retries = processes, retries

    def __call__(self, jobs: list[Job]) -> Iterator[Event]:
        """Train all of them. Whoever closes the generator stops the processes, which save first."""
        pool = _Pool(jobs, self.retries)
        cores, gpus = os.cpu_count() or 1, _gpus()
        processes = self.processes or gpus or cores
        threads = max(1, cores // processes)  # by what was asked: the last run alone has as many as the first
        places = [(threads, i % gpus if gpus else None) for i in range(min(processes, len(jobs)))]
        crew = [threading.Thread(target=pool.work, args=place) for place in places]
        for thread in crew:
            thread.start()
        try:
            left = len(jobs)
            while left:
                event = pool.events.get()
                if isinstance(event, Exception):
                    raise LabError(f"cannot train in other processes: {one_line(event)}") from event
                left -= event.ended
                yield event
        finally:
            pool.stop()
            for thread in crew:
                thread.join()


class Process:
    """A child process at the other end of a pipe.

    It leads a session of its own: Ctrl-C reaches it through `interrupt` alone, once.
    """

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads, or CUDA, may hang
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_apart, args=(target, theirs, *arguments))
        with _interrupts_blocked():
            self._process.start()
        theirs.close()  # so that its death ends the pipe

    def receive(self) -> Any:
        """The next message; EOFError when the process is gone."""
        try:
            return self.pipe.recv()
        except ConnectionResetError as error:
            raise EOFError from error

    def interrupt(self) -> None:
        if self._process.is_alive() and self._process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGINT)

    def end(self, grace: float | None = None) -> int | None:
        """Wait for its end, for so many seconds at most; its exit code."""
        self.pipe.close()
        self._process.join(grace)
        self._process.kill()
        self._process.join()
        return self._process.exitcode


class _Pool:
    """The queue of runs, and the threads that each keep one process busy with it."""

    def __init__(self, jobs: list[Job], retries: int) -> None:
        self.events: queue.SimpleQueue[Event | Exception] = queue.SimpleQueue()
        self._todo = iter(jobs)
        self._retries = retries
        self._lock = threading.Lock()
        self._stopped = False
        self._processes: set[Process] = set()

    def work(self, threads: int, gpu: int | None) -> None:
        try:
            self._work(threads, gpu)
        except Exception as error:  # nobody else would end the wait for this thread's runs
            self.events.put(error)

    def _work(self, threads: int, gpu: int | None) -> None:
        process: Process | None = None
        while (job := self._next()) is not None:
            for attempt in range(self._retries + 1):
                process = process or self._start(threads, gpu)
                if process is None or self._train(process, job):
                    break
                code = self._end(process)
                process = None
                if attempt == self._retries and not self._stopped:
                    reason = f"its process died {attempt + 1} times, at last with exit code {code}"
                    self.events.put(Event(job[0], ended=True, failure=reason))
        if process is not None:
            self._end(process)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            for process in self._processes:
                process.interrupt()

    def _next(self) -> Job | None:
        with self._lock:
            return None if self._stopped else next(self._todo, None)

    def _start(self, threads: int, gpu: int | None) -> Process | None:
        with self._lock:
            if self._stopped:
                return None
            process = Process(_serve, threads, gpu)
            self._processes.add(process)
            return process

    def _end(self, process: Process) -> int | None:
        with self._lock:
            self._processes.discard(process)
        return process.end()

    def _train(self, process: Process, job: Job) -> bool:
        """Whether the process lived to tell the end."""
        try:
            process.pipe.send(job)
            while True:
                event: Event = process.receive()
                self.events.put(event)
                if event.ended:
                    return True
        except (EOFError, BrokenPipeError):
            return False


class PipeCallback:
    """Tells a run's epochs through the pipe, and leaves off when nobody is at its other end any more."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def step(self, run: Any, loss: float) -> None:
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            raise SystemExit(1)

    def epoch(self, run: Any, row: dict[str, float]) -> None:
        self._pipe.send(Event(run.config, run.epoch))


def _apart(target: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    with suppress(KeyboardInterrupt, BrokenPipeError, EOFError):
        if hasattr(os, "setsid"):
            os.setsid()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        target(pipe, *arguments)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """A child inherits the block: a Ctrl-C while it is being born would be a traceback."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection, threads: int, gpu: int | None) -> None:
    """Train what comes through the pipe, until nothing comes any more."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    import torch

    torch.set_num_threads(threads)
    while True:
        job = Job(*pipe.recv())
        pipe.send(Event(job.config, ended=True, failure=failure_of(job, [PipeCallback(pipe)])))


def failure_of(job: Job, callbacks: list[Any]) -> str | None:
    """Train the run, or go on with it; why it failed, if it did."""
    from gtracer.lab.training.trainer import train

    try:
        train(job.config, job.folder, callbacks, resume=None, model=job.model, task=job.task)
    except Exception as error:  # a run that fails must not take the others with it
        return reason(error, job.folder)
    return None


def reason(error: Exception, folder: Path) -> str:
    """Why a run failed, in one line."""
    if isinstance(error, LabError):
        return str(error)
    return f"{type(error).__name__}: {error}; gtracer train --resume {folder} shows where".replace("\n", " ")


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
