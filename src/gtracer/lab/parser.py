"""argparse that says in one line what is wrong with a word, and what may have been meant."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from gtracer.lab.errors import one_line, shown, similar

MOST = 1_000_000  # of whatever is counted on the command line
LARGEST = 1e38  # of numbers: 32 bits hold little more


class Parser(argparse.ArgumentParser):
    """One that says in one line what is wrong, and what may have been meant."""

    def error(self, message: str) -> NoReturn:
        wrong = re.match(r"unrecognized arguments: (-\S+)|.*invalid choice: '([^']*)' \(choose from (.*)\)", message)
        option, word, choices = wrong.groups() if wrong else (None, None, None)
        near = similar(option, self._options()) if option else similar(word, re.findall(r"[\w.-]+", choices or ""))
        self.exit(2, f"gtracer: {': '.join(filter(None, [shortened(message), near]))} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        for word in args or ():
            if re.fullmatch("--[^=]+=--", word):  # argparse takes it for no value, and makes an empty list of it
                self.error(f"argument {word[:-3]}: expected one argument")
        return super().parse_known_args(args, namespace)

    def _options(self) -> set[str]:
        """Its own, and those of its commands: what none of them knows comes back to the first."""
        commands = [a.choices.values() for a in self._actions if isinstance(a, argparse._SubParsersAction)]
        parsers = [self, *(command for each in commands for command in each)]
        return {flag for parser in parsers for flag in parser._option_string_actions}


def shortened(message: str) -> str:
    """A message that may repeat words of any length."""
    return " ".join(word if len(word) < 200 else f"{word[:60]}…" for word in one_line(message).split(" "))


def at_least_one(text: str) -> int:
    return whole(text, 1)


def whole(text: str, least: int = 0) -> int:
    wanted = f"a whole number of at least {least} (and at most {MOST})"
    if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"must be {wanted}, got {shown(text)}")
    return int(text)


def at_least_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= LARGEST:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0 (and at most {LARGEST:g}), got {shown(text)}")
    return value


def above_zero(text: str) -> float:
    value = at_least_zero(text)
    if not value:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {shown(text)}")
    return value


def number(text: str) -> Any:
    """A number where it is one, as above."""
    try:
        return float(text)
    except ValueError:
        return text


def integer(text: str) -> Any:
    """A whole number where it is one: the configuration says what is wrong with others."""
    return int(text) if re.fullmatch("-?[0-9]{1,18}", text) else text
