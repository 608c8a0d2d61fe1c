"""The command line: one sub-command is one call of a function."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from gtracer import __version__


def parser() -> argparse.ArgumentParser:
    """Every sub-command with its defaults and an example."""
    top = argparse.ArgumentParser(prog="gtracer", description="G-TRACER: train to a flat minimum.")
    top.add_argument("--version", action="version", version=f"gtracer {__version__}")
    commands = top.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="SGD against SAM against SGD-TRACER on digits with half of the labels wrong",
        description="Train one net with SGD, SAM and SGD-TRACER on digits of which half are labelled wrongly, and "
        "print a table of the test accuracies. Takes about a minute.",
        epilog="example: gtracer demo --seeds 5",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--seeds", type=_at_least_one, default=3, metavar="N", help="number of runs for each optimiser")
    demo.add_argument("--epochs", type=_at_least_one, default=100, metavar="N", help="passes over the data")
    return top


def _at_least_one(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; without one, the demo. Returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    chosen = parser().parse_args(words or ["demo"])
    if chosen.command is None:
        parser().print_help()
        return 2
    try:
        from gtracer.lab import demo
    except ModuleNotFoundError as missing:
        print(f"gtracer demo needs {missing.name}: pip install 'gtracer-optim[demo]'", file=sys.stderr)
        return 1
    try:
        demo.run(seeds=chosen.seeds, epochs=chosen.epochs)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0
