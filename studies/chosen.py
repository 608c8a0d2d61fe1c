"""From a search to a study: for each setting and optimiser the values that were best on held-out data.

    gtracer sweep SEARCH.yaml --out RUNS
    python studies/chosen.py SEARCH.yaml RUNS STUDY -o CHOSEN.json
    gtracer sweep CHOSEN.json

The accuracy is that of the last epoch, the mean over the search's seeds; of equals the first one that the search lists
is taken. Settings go by their names, which search and study share.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from gtracer.lab import files
from gtracer.lab.errors import LabError
from gtracer.lab.sweeps.study import Point, Study, load
from gtracer.lab.sweeps.sweep import RunsFolder


def accuracy(point: Point, there: RunsFolder) -> float:
    """On held-out data, mean over the seeds that were run; a run that diverged has learnt nothing."""
    made = [there.records[cell.identity][0] for cell in point.configs() if there.has(cell)]
    if not made:
        raise LabError(f"{there.folder} has no finished run of {point.label!r} in setting {point.setting!r}")
    return statistics.mean(record.curves["holdout_accuracy"][-1] if record.finished else 0.0 for record in made)


def best(search: Study, there: RunsFolder) -> dict[tuple[str, str], tuple[float, dict[str, Any]]]:
    """For each setting and optimiser the best accuracy, and the options that made it."""
    found: dict[tuple[str, str], tuple[float, dict[str, Any]]] = {}
    for point in search.points():
        value, place = accuracy(point, there), (point.setting, point.config.optimizer)
        if place not in found or value > found[place][0]:
            own = {k: v for k, v in search.methods[point.method].items() if k not in ("vary", "in", "optimizer")}
            found[place] = value, own | dict(point.varied)
    return found


def chosen(search: Study, there: RunsFolder, study: Study) -> Study:
    """The study with what the search chose."""
    found, content = best(search, there), study.to_mapping()
    for point in study.points():
        place = (point.setting, point.config.optimizer)
        if place in found:
            value, options = found[place]
            content["methods"][point.method].setdefault("in", {})[point.setting] = options
            print(f"{point.setting}: {point.method} {options}, held out {100 * value:.2f}")
    return Study.from_mapping(content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("search", help="the search's study, by name or file")
    parser.add_argument("runs", type=Path, help="the folder with its runs, or an archive of it")
    parser.add_argument("study", help="the study that is to have the values, by name or file")
    parser.add_argument("-o", "--out", type=Path, required=True, help="where to write it, as JSON")
    words = parser.parse_args()
    made = chosen(load(words.search), RunsFolder.of(words.runs), load(words.study))
    files.write(words.out, (json.dumps(made.to_mapping(), indent=1, ensure_ascii=False) + "\n").encode())


if __name__ == "__main__":
    main()
