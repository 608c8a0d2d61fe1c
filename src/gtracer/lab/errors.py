"""Errors that the user can mend: the command line prints them as one line."""

from __future__ import annotations

import difflib
import reprlib
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class LabError(Exception):
    """Something outside the program is wrong: a name, a file, a disk."""


class DivergedError(LabError):
    """The loss is not finite any more: the same run would end so again."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C; the run was saved and can be resumed."""


def unknown(what: str, name: Any, choices: Iterable[str]) -> LabError:
    """For a name that is none of the choices: the near matches first, all of them where nothing is near.

    >>> str(unknown("task", "digit", ["digits", "cifar10"]))
    "unknown task 'digit': did you mean digits?"
    """
    known = sorted(choices)
    hint = similar(name, known) or f"choose from {', '.join(known)}"
    return LabError(f"unknown {what} {shown(name)}: {hint}")


def similar(name: Any, choices: Iterable[str]) -> str:
    """The question whether one of the choices was meant; nothing where none is near.

    >>> similar("--optmizer", ["--optimizer", "--out"])
    'did you mean --optimizer?'
    """
    near = difflib.get_close_matches(name.lower(), choices, n=3, cutoff=0.6) if isinstance(name, str) else []
    return f"did you mean {' or '.join(near)}?" if near else ""


def shown(value: Any) -> str:
    """A value as an error shows it: on one line, and short, whatever it holds.

    >>> shown([[[1]], 10**5000, "a line" * 100])
    "[[[...]], a number of 5001 digits, 'a linea linea linea linea ...ea linea linea linea line']"
    """
    return _SHORT.repr(value)


def one_line(text: object) -> str:
    """A message without line breaks and other characters that are not printed."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())


def raised(error: Exception) -> str:
    """What somebody else's code raised, and where: a line for the message, since no traceback is shown."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not {"site-packages", "gtracer"} & {*Path(frame.filename).parts}] or frames
    where = f" ({Path(theirs[-1].filename).name}, line {theirs[-1].lineno})" if theirs else ""
    message = one_line(error)
    return f"{type(error).__name__}{': ' * bool(message)}{message}{where}"


class _Short(reprlib.Repr):
    def repr_int(self, value: int, level: int) -> str:
        digits = int(value.bit_length() * 0.30103) + 1  # Python itself refuses to write more than 4,300
        return f"a number of {digits} digits" if digits > 40 else repr(value)


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxlevel = 2
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 4
