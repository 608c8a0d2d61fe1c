"""How far a measurement is, told to whoever asked, or on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

Progress = Callable[[str, float], Any]


class Telling:
    """How far a measurement is."""

    def __init__(self, progress: bool | Progress) -> None:
        self._call = _on_terminal if progress is True and sys.stderr.isatty() else progress
        self.total, self._done, self._ahead, self._made = 1.0, 0.0, 0.0, 0.0
        self._what, self._weight = "", 1.0

    def begin(self, what: str, sweeps: float, weight: float) -> None:
        """The sweeps to come; those that were planned before and not made are not coming."""
        self._done += self._ahead
        self._what, self._ahead, self._made, self._weight = what, sweeps, 0.0, weight

    def batch(self, number: int, of: int) -> None:
        if callable(self._call):
            inside = min(self._made + self._weight * number / max(of, number), self._ahead)
            self._call(self._what, min(1.0, (self._done + inside) / self.total))

    def swept(self) -> None:
        self._made += self._weight

    def end(self) -> None:
        if callable(self._call):
            self._call("done", 1.0)


def _on_terminal(what: str, share: float) -> None:
    bar = "━" * round(30 * share)
    sys.stderr.write(f"\r{bar:<30} {share:4.0%} {what:<40.40}" + ("\r\x1b[K" if share >= 1 else ""))
    sys.stderr.flush()
