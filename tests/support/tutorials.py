"""Pages that run as they stand: their blocks in order, and what they print beside what the page says.

    python tests/support/tutorials.py docs/tutorials/noisy-table.md

runs a page, writes what it printed into it, and puts the figures that it draws into docs/figures.
"""

import contextlib
import difflib
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from gtracer import cli

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
PROGRESS = re.compile(r"^epoch \d+/.*\n", re.MULTILINE)  # as often as the machine is slow
FIGURE = re.compile(r"!\[[^\]]*\]\(\.\./figures/([^)]+)\)")


def run(page: str, names: dict | None = None) -> list[tuple[str, str]]:
    """Run its Python and its commands here; each block of text, and what the block before it printed."""
    names, found, printed = {} if names is None else names, [], io.StringIO()
    for language, body in BLOCK.findall(page):
        if language == "text":
            found.append((body, PROGRESS.sub("", printed.getvalue())))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if language == "python":
                exec(compile(body, "page", "exec"), names)
            elif language == "sh":
                for line in body.splitlines():
                    program, *words = shlex.split(line)
                    assert program == "gtracer", line
                    assert cli.main(words) == 0, line
    return found


def figures(page: str) -> list[str]:
    """Those that it shows."""
    return FIGURE.findall(page)


def differences(told: str, printed: str, *, points: float) -> list[str]:
    """Where words differ in earnest, or numbers by that much and by a third; seconds are the machine's."""
    told, printed = (re.sub(r"\b\d+ s\b", "s", text) for text in (told, printed))
    words = [NUMBER.sub("0", text).split() for text in (told, printed)]
    if difflib.SequenceMatcher(None, *words).ratio() < 0.75:
        return [f"told:\n{told}\nprinted:\n{printed}"]
    pairs = [[float(number) for number in NUMBER.findall(text)] for text in (told, printed)]
    if len(pairs[0]) != len(pairs[1]):
        return []
    return [f"{a} is {b} now" for a, b in zip(*pairs, strict=True) if abs(a - b) > max(points, abs(a) / 3)]


def write(path: Path) -> None:
    """Run a page in a folder of its own, and keep what it printed and drew."""
    page = path.read_text()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        outputs = iter([printed for _, printed in run(page)])
        for name in figures(page):
            shutil.copy(name, FIGURES)
    page = BLOCK.sub(lambda b: f"```text\n{next(outputs).rstrip()}\n```" if b[1] == "text" else b[0], page)
    path.write_text(page)


if __name__ == "__main__":
    os.environ["COLUMNS"] = "100"
    for path in [Path(name).resolve() for name in sys.argv[1:]]:
        write(path)
