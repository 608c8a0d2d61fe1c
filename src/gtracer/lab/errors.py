"""Errors that the user can mend: the command line prints them as one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LabError(Exception):
    """Something outside the program is wrong: a name, a file, a disk."""


class DivergedError(LabError):
    """The loss is not finite any more: the same run would end so again."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C; the run was saved and can be resumed."""


def unknown(what: str, name: str, choices: Iterable[str]) -> LabError:
    """For a name that is none of the choices: the near matches first, all of them where nothing is near.

    >>> str(unknown("task", "digit", ["digits", "cifar10"]))
    "unknown task 'digit': did you mean digits?"
    """
    known = sorted(choices)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(known)}"
    return LabError(f"unknown {what} {name!r}: {hint}")
