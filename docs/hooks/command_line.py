"""The page on the command line, from the parser itself."""

from __future__ import annotations

import argparse
import html
import re
from collections.abc import Iterator

from gtracer import cli

MARK = "<!-- every command -->"
PLACEHOLDER = re.compile(r"([|*_<>])")
LONG = 20  # options of a group


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put the commands where a page has the mark."""
    return markdown.replace(MARK, "\n".join(_sections(cli.parser(), set()))) if MARK in markdown else markdown


def _sections(parser: argparse.ArgumentParser, shown: set[str], path: tuple[str, ...] = ("gtracer",)) -> Iterator[str]:
    """A command and those below it; a long group of options that has been `shown` is folded."""
    actions = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    inner = [action for action in actions if isinstance(action, argparse._SubParsersAction)]
    if len(path) > 1:
        yield from (f"{'#' * len(path)} {' '.join(path)}", "", _text(parser.description), "")
        for group in () if inner else parser._action_groups:
            inside = [action for action in group._group_actions if action in actions]
            table, flags = _table(parser, group.title or "", inside), str([action.option_strings for action in inside])
            yield from _folded(table, group.title) if flags in shown else table
            shown |= {flags} if len(inside) > LONG else set()
        if parser.epilog:
            yield from ("", "```sh", parser.epilog.removeprefix("example: ").strip(), "```", "")
    for action in inner:
        for name, command in action.choices.items():
            yield from _sections(command, shown, (*path, name))


def _folded(table: Iterator[str], title: str | None) -> Iterator[str]:
    yield from ("", '<details markdown="1">', f"<summary>{title}: the options of gtracer train</summary>", "")
    yield from table
    yield from ("", "</details>", "")


def _table(parser: argparse.ArgumentParser, title: str, actions: list[argparse.Action]) -> Iterator[str]:
    """A group of options, if it has any."""
    actions = [action for action in actions if not isinstance(action, argparse._HelpAction)]
    yield from ("", f"| {title} | |", "| --- | --- |") if actions else ()
    formatter = parser._get_formatter()
    for action in actions:
        takes = formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
        names = [f"{name} {takes}".strip() for name in action.option_strings] or [takes]
        shown = "<br>".join(f"<code>{html.escape(name).replace('|', '&#124;')}</code>" for name in names)
        yield f"| {shown} | {_text(formatter._expand_help(action) if action.help else '')} |"


def _text(words: str | None) -> str:
    """As Markdown, in which nothing is markup."""
    return PLACEHOLDER.sub(r"\\\1", " ".join((words or "").replace("%%", "%").split()))
