"""What `gtracer sharpness` has measured of the runs, as a table of the report. It needs no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtracer.lab.errors import LabError, one_line
from gtracer.lab.results import archive

NAME, FORMAT = "sharpness.json", 1


@dataclass(frozen=True)
class Measured:
    """A row for each measure, a column for each run.

    Attributes:
        runs: Their names.
        rows: A measure's words, its number in each run as it is shown, and whether it is invariant to rescaling.
    """

    runs: list[str]
    rows: list[tuple[str, list[str], bool]]

    def markdown(self) -> str:
        """The same for a text."""
        heads = ["", *(run.replace("|", "\\|") for run in self.runs), "invariant"]
        lines = [heads, ["---"] * len(heads)]
        for text, cells, invariant in self.rows:
            lines.append([text.replace("|", "\\|"), *cells, "yes" if invariant else "no"])
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def read(runs: Path, tell: Callable[[str], None]) -> Measured | None:
    """Of a folder of runs, or an archive of one; nothing where nothing was measured."""
    found: dict[str, dict[str, Any]] = {}
    for folder, content in archive.contents(runs, NAME):
        try:
            written = json.loads(content())
            if written["format"] != FORMAT:
                raise ValueError(f"it has format {written['format']}, this gtracer reads {FORMAT}")
            name = folder.parent.name if folder.parent.name not in found else str(folder.parent)
            found[name] = {row["name"]: (row["text"], row["invariant"], _cell(row)) for row in written["rows"]}
        except (LabError, ValueError, KeyError, TypeError, RecursionError) as error:
            tell(f"{folder / NAME} is damaged ({one_line(error)}): measure that run again")
    if not found:
        return None
    known = {name: row[:2] for rows in found.values() for name, row in rows.items()}
    return Measured(
        list(found),
        [
            (text, [rows[name][2] if name in rows else "" for rows in found.values()], invariant)
            for name, (text, invariant) in known.items()
        ],
    )


def _cell(row: dict[str, Any]) -> str:
    """A number that is not finite is null there."""
    if row["value"] is None:
        return "not finite"
    return shown(row["value"], row["error"])


def shown(value: float, error: float | None) -> str:
    """A number and its error, if it has one.

    >>> shown(548.49, 13.7), shown(0.25, None)
    ('548.5 ± 14', '0.25')
    """
    if not error:
        return f"{value:.4g}"
    return f"{value:.4g} ± {error:.0f}" if 99.5 <= error < 1e4 else f"{value:.4g} ± {error:.2g}"
