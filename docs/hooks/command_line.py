"""The page on the command line, from the parser itself."""

from __future__ import annotations

import argparse
import html
import re
from collections.abc import Iterator

from gtracer import cli

MARK = "<!-- every command -->"
PLACEHOLDER = re.compile(r"([|*_<>])")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put the commands where a page has the mark."""
    return markdown.replace(MARK, "\n".join(_sections(cli.parser()))) if MARK in markdown else markdown


def _sections(parser: argparse.ArgumentParser, path: tuple[str, ...] = ("gtracer",)) -> Iterator[str]:
    actions = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    inner = [action for action in actions if isinstance(action, argparse._SubParsersAction)]
    if len(path) > 1:
        yield from (f"{'#' * len(path)} {' '.join(path)}", "", _text(parser.description), "")
        for group in () if inner else parser._action_groups:
            yield from _table(parser, group.title or "", [a for a in group._group_actions if a in actions])
        if parser.epilog:
            yield from ("", "```sh", parser.epilog.removeprefix("example: ").strip(), "```", "")
    for action in inner:
        for name, command in action.choices.items():
            yield from _sections(command, (*path, name))


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
