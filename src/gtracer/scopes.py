"""What a second pass over the same batch must not leave behind: moved weights, statistics, random numbers."""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from gtracer import tensors
from gtracer.tensors import Tensors


@contextmanager
def displaced(params: Tensors, displacement: Tensors, seed: int = 0) -> Iterator[None]:
    """Add `displacement` to the weights inside; they come back bit for bit, whatever happens.

    They are restored from a copy, because subtracting would leave rounding errors, which add up. Weights in bfloat16
    are rounded stochastically, with the random numbers of `seed`.

    >>> w = torch.tensor([1.0])
    >>> with displaced([w], [torch.tensor([0.1])]):
    ...     print(w)
    tensor([1.1000])
    >>> w
    tensor([1.])
    """
    saved = tensors.clone(params)
    try:
        with torch.no_grad():
            tensors.displace_(params, displacement, seed)
        yield
    finally:
        with torch.no_grad():
            tensors.copy_(params, saved)


@contextmanager
def moved(params: Tensors, displacement: Tensors, again: Callable[[], Tensors]) -> Iterator[None]:
    """The same without a copy of the weights: what was added is computed `again` and subtracted.

    They come back to within one rounding.

    >>> w = torch.tensor([1.0])
    >>> with moved([w], [torch.tensor([0.1])], lambda: [torch.tensor([0.1])]):
    ...     print(w)
    tensor([1.1000])
    >>> w
    tensor([1.])
    """
    with torch.no_grad():
        torch._foreach_add_(params, displacement)
    if isinstance(displacement, list):
        displacement.clear()  # it can be computed again
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_sub_(params, again())


# What the pass under way finds, where it is not a step's first over its batch. Set by who makes it.
passes_again: ContextVar[Any] = ContextVar("passes_again", default=None)


# Whether a closure that gives None without a backward pass wants no step. Elsewhere it has forgotten its return.
skips: ContextVar[bool] = ContextVar("skips", default=False)


def second_pass() -> bool:
    """Whether the calling code runs in a second pass over the same batch, at displaced weights.

    Ask it before anything that counts or logs once per batch: a metric, the tokens seen, `self.log`.

    >>> second_pass()
    False
    """
    return passes_again.get() is not None


class Buffers:
    """A copy of a model's buffers (batch-norm statistics and the like), to put back later."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self.buffers: list[Tensor] = []
        self._kinds: list[Any] = []
        self._places: list[tuple[dict[str, Any], str]] = []
        self._rooms: list[_Room] = []
        self.save()

    @torch.no_grad()
    def save(self) -> None:
        """Copy them; into the same memory as before, if they are the same."""
        once = _buffers_in(self._model)
        self._places = [place for _, place in once.values()]
        now = [b for b, _ in once.values()]
        kinds = [(id(b), b.dtype, b.shape, b.device) for b in now]
        if kinds != self._kinds:
            self._kinds, self.buffers = kinds, now
            self._rooms = _rooms(tensors.local(now))
        for room in self._rooms:
            room.save()

    @property
    def saved(self) -> Tensors:
        """The copies, in the order of the buffers."""
        copies = {i: copy for room in self._rooms for i, copy in zip(room.indices, room.copies, strict=True)}
        return [copies[i] for i in range(len(copies))]

    def now(self) -> Tensors:
        """The model's current buffers. A forward pass may change or replace them."""
        there = zip(self._places, self.buffers, strict=True)
        return [b if (found := where.get(name)) is None else found for (where, name), b in there]

    @torch.no_grad()
    def restore(self) -> None:
        """Put the buffers and their values back into the model."""
        for (where, name), buffer in zip(self._places, self.buffers, strict=True):
            if where.get(name) is not buffer:
                where[name] = buffer
        for room in self._rooms:
            room.restore()

    def lay_out(self) -> None:
        """Let the model work on other copies, which a graph can hold; `restore` puts its own back."""
        for (where, name), saved in zip(self._places, self.saved, strict=True):
            where[name] = saved.clone()

    @torch.no_grad()
    def restore_unless(self, healthy: Tensor) -> None:
        """Restore them if `healthy` is 0, on the device, with a few kernels for all."""
        for room in self._rooms:
            room.restore_unless(healthy)


class _Room:
    """Copies of those of some tensors that are of one kind, side by side in one piece of memory."""

    def __init__(self, xs: Tensors, indices: list[int]) -> None:
        self.indices, self.originals = indices, [xs[i] for i in indices]
        self._flat, self.copies = self._piece()
        self._second: tuple[Tensor, Tensors] | None = None

    def _piece(self) -> tuple[Tensor, Tensors]:
        sizes, kind = [x.numel() for x in self.originals], self.originals[0]
        flat = torch.empty(sum(sizes), dtype=kind.dtype, device=kind.device)
        return flat, [part.view(x.shape) for part, x in zip(torch.split(flat, sizes), self.originals, strict=True)]

    def save(self) -> None:
        torch._foreach_copy_(self.copies, self.originals)

    def restore(self) -> None:
        torch._foreach_copy_(self.originals, self.copies)

    def restore_unless(self, healthy: Tensor) -> None:
        flat, there = self._second = self._second or self._piece()
        torch._foreach_copy_(there, self.originals)
        torch.where(healthy.to(flat.device, torch.bool), flat, self._flat, out=flat)
        torch._foreach_copy_(self.originals, there)


def _rooms(xs: Tensors) -> list[_Room]:
    """One for each kind."""
    alike: dict[Any, list[int]] = {}
    for i, x in enumerate(xs):
        alike.setdefault((x.dtype, x.device), []).append(i)
    return [_Room(xs, indices) for indices in alike.values()]


def _buffers_in(model: nn.Module | None) -> dict[int, tuple[Tensor, tuple[dict[str, Any], str]]]:
    """By their ids, each with where it is; shared ones once."""
    found = {}
    ahead = [model]
    while ahead:  # model.modules() takes ten times as long, twice a step
        module = ahead.pop()
        if module is None:
            continue
        if module._buffers:
            for name, b in module._buffers.items():
                if b is not None:
                    found[id(b)] = (b, (module._buffers, name))
        if module._modules:
            ahead.extend(module._modules.values())
    return found


class Copies:
    """Copies of a model's buffers that use the same memory from step to step."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[nn.Module, Buffers]] = {}

    def of(self, model: nn.Module | None, name: str) -> Buffers:
        """The copy of this name, made now."""
        if model is None or is_capturing():  # a graph would go on writing into memory that may be somebody else's
            return Buffers(model)
        owner, known = self._known.get(name, (None, None))
        if known is None or owner is not model:
            known = Buffers(model)
            self._known[name] = (model, known)
        else:
            known.save()
        return known


@contextmanager
def frozen_statistics(buffers: Buffers) -> Iterator[None]:
    """Leave a model's buffers as they were copied: batch-norm statistics see one pass, not two.

    Copying covers every kind of statistic (momentum, cumulative average, counters, spectral norm's
    vectors), where switching the momentum of batch norm off would cover one.
    """
    try:
        yield
    finally:
        buffers.restore()


class PooledStatistics:
    """A model's buffers after several passes over parts of one batch, as if it had been one pass.

    Each part starts from the same statistics; at the end they have moved by the mean of the parts' moves. Counters
    have counted one pass.

    Args:
        model: Whose buffers.
        one_graph: Whether the passes are differentiated together, when all have been made.
    """

    def __init__(self, model: nn.Module | None, *, one_graph: bool = False) -> None:
        self._start, self._one_graph = Buffers(model), one_graph
        self._moved: Tensors = [torch.zeros_like(b) for b in self._start.buffers]

    @contextmanager
    def part(self, share: float) -> Iterator[None]:
        """A pass over this share of the batch."""
        if self._one_graph:
            self._start.lay_out()
        else:
            self._start.restore()
        yield
        with torch.no_grad():
            for moved, now, before in zip(self._moved, self._start.now(), self._start.saved, strict=True):
                if now.is_floating_point() or now.is_complex():
                    # A mask's −∞ has not moved.
                    moved.add_(torch.where(now == before, torch.zeros_like(now), now - before), alpha=share)
                else:
                    moved.copy_(now ^ before if now.dtype == torch.bool else now - before)

    @torch.no_grad()
    def conclude(self) -> None:
        """Leave the pooled statistics in the model."""
        self._start.restore()
        for now, moved in zip(self._start.buffers, self._moved, strict=True):
            now.copy_(now ^ moved if now.dtype == torch.bool else now + moved)


class RandomState:
    """The state of torch's random number generators: the CPU's and those of the given devices.

    Args:
        devices: Devices whose state is saved too.
        others: Also save that of Python's `random` and of `numpy.random`, which takes longer.
    """

    def __init__(self, devices: set[torch.device], *, others: bool = False) -> None:
        self.others = (random.getstate(), numpy_state()) if others else None
        self._cpu = torch.get_rng_state()
        # "meta" has no generator and draws nothing; a graph under capture may not be asked.
        asked = [d for d in devices if d.type not in ("cpu", "meta") and not is_capturing()]
        self._devices = {d: _generator(d).get_rng_state(*_index(d)) for d in asked}

    def restore(self) -> None:
        """Set the generators to the saved state."""
        torch.set_rng_state(self._cpu)
        for device, state in self._devices.items():
            _generator(device).set_rng_state(state, *_index(device))
        if self.others is not None:
            restore_others(*self.others)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RandomState):
            return NotImplemented
        return torch.equal(self._cpu, other._cpu) and all(
            device in other._devices and torch.equal(state, other._devices[device])
            for device, state in self._devices.items()
        )

    __hash__ = None  # type: ignore[assignment]


class AllRandomness:
    """The same with Python's and NumPy's generators, and any others that reading batches may draw from.

    Args:
        devices: Devices whose generators of torch are saved.
        generators: Further ones, such as a DataLoader's.
    """

    def __init__(self, devices: set[torch.device], generators: list[torch.Generator]) -> None:
        self._torch = RandomState(devices, others=True)
        self._others = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        """Set the generators to the saved state."""
        self._torch.restore()
        for generator, state in self._others:
            generator.set_state(state)


def generators_of(batches: Any) -> list[torch.Generator]:
    """The generators that a DataLoader draws the order of its examples from, if it has its own."""
    found = [getattr(owner, "generator", None) for owner in _samplers(batches)]
    return [generator for generator in dict.fromkeys(found) if isinstance(generator, torch.Generator)]


def _samplers(batches: Any) -> Iterator[Any]:
    yield batches
    for name in ("sampler", "batch_sampler"):
        if (inner := getattr(batches, name, None)) is not None:
            yield from _samplers(inner)


def numpy_state() -> Any:
    """The state of `numpy.random`, if numpy is imported."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()


def restore_others(python: Any, numpy: Any) -> None:
    """Restore the state of Python's and NumPy's random numbers."""
    random.setstate(python)
    if numpy is not None:
        sys.modules["numpy"].random.set_state(numpy)


def have_moved(others: tuple[Any, Any]) -> bool:
    """Whether Python's or NumPy's random numbers have been drawn from since."""
    python, numpy = others
    now = numpy_state()
    same = now is None if numpy is None else all(map(_same, numpy, now))
    return not same or random.getstate() != python


def _same(a: Any, b: Any) -> bool:
    return bool((a == b).all()) if hasattr(a, "all") else bool(a == b)


def is_capturing() -> bool:
    """Whether the work is being captured as a CUDA graph."""
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return started and torch.cuda.is_current_stream_capturing()


def _generator(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    # Apple's back end has one device and takes no index.
    return () if device.type == "mps" else (device,)


@contextmanager
def replayed_random(state: RandomState, devices: set[torch.device]) -> Iterator[RandomState | None]:
    """Replay the random numbers that followed `state`; afterwards continue as if nothing had been drawn.

    Dropout masks then agree between the passes of one step. Yields the state that they continue from, if it can be
    read.
    """
    twin = twin_of_capture.get()
    if twin is not None and is_capturing():
        with drawing_from(twin):
            yield None
        return
    after = RandomState(devices, others=state.others is not None)
    state.restore()
    try:
        yield after
    finally:
        after.restore()


# A graph cannot go back in its random numbers. But while one is captured, a second pass can draw from a twin of the
# device's generator: where both start a replay at the same place, so do the two passes. Set by who captures.
twin_of_capture: ContextVar[torch.Generator | None] = ContextVar("twin_of_capture", default=None)


@contextmanager
def drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Let everything on this CUDA device draw from `generator`, also while a graph is captured."""
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    everybodys = default.graphsafe_get_state()
    default.graphsafe_set_state(generator)
    try:
        yield
    finally:
        default.graphsafe_set_state(everybodys)


class Signals:
    """Ctrl-C while a step is made: let through where the caller's own code runs, held back everywhere else."""

    handler: Callable[[int, FrameType | None], Any] | None = None  # whose it is outside
    held: tuple[int, FrameType | None] | None = None
    _is_open = False

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Where the caller's own code runs."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._is_open and self.handler is not None and not _is_entering_or_leaving(frame):
            self.handler(number, frame)
        else:
            self.held = number, frame


@contextmanager
def uninterrupted() -> Iterator[Signals]:
    """Finish what Ctrl-C would interrupt, and let it through at the end.

    A signal is handled between two lines of Python, so also between saving weights and entering the scope that puts
    them back. With this around a whole step, KeyboardInterrupt comes out of the caller's own code, or after the step.
    In threads, which get no signals, and where SIGINT is not Python's to handle, it does nothing.
    """
    signals = Signals()
    if threading.current_thread() is threading.main_thread() and callable(found := signal.getsignal(signal.SIGINT)):
        signals.handler = found
        signal.signal(signal.SIGINT, signals)
    try:
        yield signals
    finally:
        if signals.handler is not None:
            handler: Callable[[int, FrameType | None], Any] = signals.handler
            if signal.getsignal(signal.SIGINT) == signals:  # unless the caller's code has set another
                signal.signal(signal.SIGINT, handler)
            if signals.held is not None:
                handler(*signals.held)


def _is_entering_or_leaving(frame: FrameType | None) -> bool:
    """Whether a scope is on its way in or out, where an exception would pass its clean-up by."""
    name = "" if frame is None else frame.f_globals.get("__name__", "")
    return name == "contextlib" or name.startswith(("gtracer.optim", "gtracer.scopes", "gtracer.tensors"))
