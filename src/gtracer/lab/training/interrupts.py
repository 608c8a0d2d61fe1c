"""Ctrl-C while a run is trained."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Let the step under way be finished on the first Ctrl-C; a second one stops at once.

    Not one in the same second: it is the first again, from the terminal and from torchrun.
    """
    seen: float | None = None

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen is not None and time.monotonic() - seen > 1:
            raise KeyboardInterrupt
        seen = seen or time.monotonic()

    if threading.current_thread() is not threading.main_thread():  # only the main thread may catch signals
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: seen is not None
    finally:
        signal.signal(signal.SIGINT, before)
