"""What a second pass over the same batch must not leave behind: moved weights, statistics, random numbers."""

from __future__ import annotations

import random
import signal
import sys
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # signal's own take ten times as long for their enums
from _signal import signal as set_signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from gtracer import tensors
from gtracer.tensors import Tensors

SIZE = attrgetter("nbytes")  # of a tensor
MOST_STATISTICS = 2**16  # numbers in a frozen parameter that may be a statistic: those are vectors


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


# Whether a closure that gives None, or a loss without a graph, wants no step. Elsewhere it has forgotten something.
skips: ContextVar[bool] = ContextVar("skips", default=False)


def second_pass() -> bool:
    """Whether the calling code runs in a second pass over the same batch, at displaced weights.

    Ask it before anything that counts or logs once per batch: a metric, the tokens seen, `self.log`.

    >>> second_pass()
    False
    """
    return passes_again.get() is not None


class Buffers:
    """A copy of a model's buffers (batch-norm statistics and the like), to put back later.

    Args:
        model: Whose buffers.
        frozen: Which of its frozen parameters are statistics too.
    """

    def __init__(self, model: nn.Module | None, frozen: FrozenStatistics | None = None) -> None:
        self._model, self._frozen = model, frozen
        self._held: list[tuple[dict[str, Any], dict[str, Any]]] = []  # by each module: where, and what it was
        self._lie: list[int] = []
        self._is_plain = True
        self._rooms: list[_Room] = []
        self.save()

    def save(self) -> None:
        """Copy them; into the same memory as before, if they lie where they lay."""
        self._held = [(where, where.copy()) for where in _buffers_in(self._model)]
        if self._frozen is not None:
            self._held += [(where, {name: p}) for p, (where, name) in self._frozen.found.values()]
        found = [b for _, was in self._held for b in was.values() if b is not None]
        lie = [*map(Tensor.data_ptr, found), *map(SIZE, found)]
        # Nothing else can have come to where they lay: the rooms keep that memory. What is odd has no address.
        if lie != self._lie or not self._is_plain:
            self._lie, self._is_plain = lie, all(map(_is_plain, found))
            self._rooms = _rooms([_words(b) for b in tensors.local(self.buffers)])
        for room in self._rooms:
            room.save()

    @property
    def _places(self) -> list[tuple[dict[str, Any], str]]:
        """One for each buffer, in their order."""
        held = ((where, name, b) for where, was in self._held for name, b in was.items())
        return list({id(b): (where, name) for where, name, b in held if b is not None}.values())

    @property
    def buffers(self) -> list[Tensor]:
        """Each once."""
        return list({id(b): b for _, was in self._held for b in was.values() if b is not None}.values())

    @property
    def saved(self) -> Tensors:
        """The copies, in the order of the buffers."""
        copies = {i: copy for room in self._rooms for i, copy in zip(room.indices, room.copies, strict=True)}
        return [copies[i].view(b.dtype).view(b.shape) for i, b in enumerate(tensors.local(self.buffers))]

    def now(self) -> Tensors:
        """The model's current buffers. A forward pass may change or replace them."""
        there = zip(self._places, self.buffers, strict=True)
        return [b if (found := where.get(name)) is None else found for (where, name), b in there]

    def restore(self) -> None:
        """Put the buffers and their values back into the model."""
        for where, was in self._held:
            for name, b in was.items():
                if where.get(name) is not b and b is not None:
                    where[name] = b
        for room in self._rooms:
            room.restore()

    def lay_out(self) -> None:
        """Let the model work on other copies, which a graph can hold; `restore` puts its own back."""
        for (where, name), saved in zip(self._places, self.saved, strict=True):
            where[name] = saved.clone()

    def restore_unless(self, healthy: Tensor, now: Buffers) -> None:
        """Restore them if `healthy` is 0, on the device, with two kernels for all.

        Args:
            healthy: One number.
            now: A copy of what the model has, which is used up.
        """
        same = self._is_plain and now._lie == self._lie
        for room, other in zip(self._rooms, now._rooms if same else map(_Room.another, self._rooms), strict=True):
            room.restore_unless(healthy, other)


class _Room:
    """Copies of those of some tensors that are of one kind, side by side in one piece of memory."""

    def __init__(self, originals: Tensors, indices: list[int]) -> None:
        self.originals, self.indices = originals, indices
        # At even places, where numbers twice as long may begin.
        *starts, size = accumulate((x.numel() + x.numel() % 2 for x in originals), initial=0)
        self._flat = torch.empty(size, dtype=originals[0].dtype, device=originals[0].device)
        pairs = zip(starts, originals, strict=True)
        self.copies = [self._flat[start : start + x.numel()].view(x.shape) for start, x in pairs]

    def another(self) -> _Room:
        """With a copy of what they hold now."""
        made = _Room(self.originals, self.indices)
        made.save()
        return made

    def save(self) -> None:
        torch._foreach_copy_(self.copies, self.originals)

    def restore(self) -> None:
        torch._foreach_copy_(self.originals, self.copies)

    def restore_unless(self, healthy: Tensor, now: _Room) -> None:
        torch.where(healthy.to(now._flat.device, torch.bool), now._flat, self._flat, out=now._flat)
        now.restore()


def _is_plain(x: Tensor) -> bool:
    """Whether all that it holds lies at its address, one after the other."""
    return type(x) in (Tensor, nn.Parameter) and x.is_contiguous()


def _words(x: Tensor) -> Tensor:
    """The same memory, as whole numbers of 32 bits where it fits, so that one kernel copies counts and statistics."""
    x, fits = x.detach(), _is_plain(x) and x.element_size() in (4, 8) and not x.is_complex()
    return x.view(-1).view(torch.int32) if fits else x


def _rooms(xs: Tensors) -> list[_Room]:
    """One for each kind."""
    alike: dict[Any, list[int]] = {}
    for i, x in enumerate(xs):
        alike.setdefault((x.dtype, x.device), []).append(i)
    return [_Room([xs[i] for i in indices], indices) for indices in alike.values()]


def _buffers_in(model: nn.Module | None) -> list[dict[str, Any]]:
    """Where they are: those of each module that has some."""
    found, ahead = [], [model]
    for module in ahead:  # which grows; model.modules() takes ten times as long, twice a step
        if module is not None:
            if module._buffers:
                found.append(module._buffers)
            if module._modules:
                ahead.extend(module._modules.values())
    return found


class FrozenStatistics:
    """Frozen parameters that a forward pass writes to, as models of Keras keep batch norm's moving means.

    The first displaced pass tells which they are. Until then every small one is copied; large ones never are.

    Args:
        model: Whose parameters.

    Attributes:
        found: They, and where they are.
        is_settled: Whether a displaced pass has been made.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.found = {id(p): (p, (owner._parameters, name)) for p, owner, name in _small_frozen(model)}
        self.is_settled = False
        self._versions = {i: p._version for i, (p, _) in self.found.items()}

    def settle(self) -> None:
        """Keep those that have been written to."""
        self.found = {i: entry for i, entry in self.found.items() if entry[0]._version != self._versions[i]}
        self.is_settled = True


def _small_frozen(model: nn.Module) -> Iterator[tuple[Tensor, Any, str]]:
    for owner in model.modules():
        for name, p in owner._parameters.items():
            # A subclass holds what is quantised or sharded.
            if type(p) is nn.Parameter and not (p.requires_grad or p.is_inference()) and p.numel() <= MOST_STATISTICS:
                yield p, owner, name


class Copies:
    """Copies of a model's buffers that use the same memory from step to step.

    Attributes:
        frozen: Which of its frozen parameters are statistics too.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[nn.Module, Buffers]] = {}
        self.frozen: FrozenStatistics | None = None

    def of(self, model: nn.Module | None, name: str) -> Buffers:
        """The copy of this name, made now."""
        if model is None:
            return Buffers(None)
        frozen = self.frozen
        if frozen is None or frozen.model is not model:
            frozen = self.frozen = FrozenStatistics(model)
        if is_capturing():  # a graph would go on writing into memory that may be somebody else's
            return Buffers(model, frozen)
        owner, known = self._known.get(name, (None, None))
        if known is None or owner is not model:
            known = Buffers(model, frozen)
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
        self._devices = {d: _random_state(d) for d in asked}

    def restore(self) -> None:
        """Set the generators to the saved state."""
        torch.set_rng_state(self._cpu)
        for device, state in self._devices.items():
            _set_random_state(device, state)
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


def _random_state(device: torch.device) -> Tensor:
    generator = _generator(device)
    return generator.get_state() if generator else torch.get_device_module(device).get_rng_state(*_index(device))


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if generator := _generator(device):
        generator.set_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, *_index(device))


def _generator(device: torch.device) -> torch.Generator | None:
    """A GPU's own, where it can be had: torch's functions for it take several times as long, four times a step."""
    started = device.type == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.default_generators[device.index] if started and device.index is not None else None


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
    if threading.current_thread() is threading.main_thread() and callable(found := getsignal(signal.SIGINT)):
        signals.handler = found
        set_signal(signal.SIGINT, signals)
    try:
        yield signals
    finally:
        if signals.handler is not None:
            handler: Callable[[int, FrameType | None], Any] = signals.handler
            if getsignal(signal.SIGINT) == signals:  # unless the caller's code has set another
                set_signal(signal.SIGINT, handler)
            if signals.held is not None:
                handler(*signals.held)


def _is_entering_or_leaving(frame: FrameType | None) -> bool:
    """Whether a scope is on its way in or out, where an exception would pass its clean-up by."""
    name = "" if frame is None else frame.f_globals.get("__name__", "")
    return name == "contextlib" or name.startswith(("gtracer.optim", "gtracer.scopes", "gtracer.tensors"))
