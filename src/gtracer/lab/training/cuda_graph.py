"""CUDA graphs: what is done again and again is captured once, and replayed without the CPU."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gtracer.lab.errors import LabError
from gtracer.scopes import drawing_from, twin_of_capture


def capture(
    action: Callable[[], Any], *, generators: Sequence[torch.Generator] = (), **place: Any
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """What is done in it as a graph, and what it gives, in memory that a replay fills anew.

    Args:
        action: Has been done at least once, so that all state exists and all kernels are chosen.
        generators: Of the random numbers that it draws, beside the device's own.
        **place: torch.cuda.graph's stream and pool.
    """
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    # Others may allocate meanwhile: only this thread's mistakes count.
    with torch.cuda.graph(graph, capture_error_mode="thread_local", **place):
        made = action()
    return graph, made


class GraphStream:
    """A stream of the device with random numbers of its own, and the graphs that were captured on it."""

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
        """Do it; the first time as it is, from the second on as a captured graph. Gives what it gives."""
        if self._on_gpu:  # what was done as it is has moved only one of the two
            self._twin.set_state(self._drawn.get_state())
        with self.active():
            if not self._on_gpu or name not in self._done:
                self._done[name] = action()
            else:
                if name not in self._graphs:
                    self._graphs[name], self._done[name] = self._captured(action)
                self._graphs[name].replay()
        return self._done[name]

    def _captured(self, action: Callable[[], Any]) -> tuple[Any, Any]:
        token = twin_of_capture.set(self._twin)
        try:
            return capture(action, generators=self._generators, pool=self._pool, stream=self._stream)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            first = str(error).strip().splitlines()[0]
            raise LabError(f"its step cannot be captured as a CUDA graph ({first}): use --engine local") from error
        finally:
            twin_of_capture.reset(token)

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
