"""`gtracer sweep`: the runs of a study that are not there yet, in parallel, through deaths and interrupts."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gtracer.lab import data, files
from gtracer.lab.config import Config
from gtracer.lab.errors import Interrupted, LabError, shown
from gtracer.lab.results.record import Record
from gtracer.lab.sweeps.launchers.local import Event, Job
from gtracer.lab.sweeps.study import Study
from gtracer.lab.training import effects, optimizers

LONGEST = 1000  # characters of a label
Engine = Callable[[list[Job]], Iterator[Event]]  # trains runs, and tells what becomes of them


def sweep(
    study: Study,
    folder: Path,
    engine: Engine,
    console: Console,
    settings: Collection[str] = (),
    models: bool = False,
) -> None:
    """Run what the folder does not hold of the study. Finished runs, and those that diverged, are not run again.

    Args:
        study: What the folder is for.
        folder: Of the runs.
        engine: Makes them.
        console: Is told how far it is.
        settings: Those of the study that are wanted now; all, if none is named.
        models: Whether the runs that are made leave their models too.

    Raises:
        LabError: At the start, where the study cannot be run or the folder not be used; at the end, where runs failed
            otherwise than by diverging.
        Interrupted: On Ctrl-C, after the runs under way were saved.
    """
    cells = study.configs(settings)
    check_labels(study)
    for config in dict.fromkeys(replace(config, seed=0) for config in study.configs()):
        check(config)
    check_effects(study)
    with files.locked(folder, "sweep"):
        study.write(folder)
        run_missing(cells, folder, engine, console, models)


def check(config: Config) -> None:
    """Refuse names that nobody knows before anything is run."""
    data.check(config.task)
    optimizers.check(config)


def check_labels(study: Study) -> None:
    """Refuse what cannot be printed; a report of records that are there shows it as well as it can."""
    for label in (*study.settings, *study.methods):
        if len(label) > LONGEST or {unicodedata.category(c) for c in label} & {"Cc", "Cs"}:
            raise LabError(f"a label must be at most {LONGEST} characters that can be printed, got {shown(label)}")
    for text in (study.title, study.about):
        if any(unicodedata.category(c) == "Cs" for c in text):
            raise LabError(f"title and about must be whole characters, got {shown(text)}")


def check_effects(study: Study) -> None:
    """Refuse options that change nothing in any of the runs that they are for.

    Methods share the options of `base` and of a setting, so what one run has no use for may be for another.
    """
    points = [(point.method, point.setting, effects.idle(point.config)) for point in study.points()]
    for place, options, methods, settings in study.places():
        reached = [idle for method, setting, idle in points if method in methods and setting in settings]
        for name, value in effects.set_in(Config.checked(options)).items():
            if reached and all(name in idle for idle in reached):
                raise LabError(f"{place}: {effects.refused(name, value, reached[0][name])}")


def run_missing(
    cells: Iterable[Config], folder: Path, engine: Engine, console: Console, models: bool = False
) -> dict[Config, Record]:
    """Run those that the folder does not hold yet; give the records of all, by `Config.identity`."""
    wanted = {config.identity: config for config in cells}
    there = RunsFolder.of(folder)
    missing = [Job(config, there.place(config), models) for config in wanted.values() if not there.has(config)]
    failures = _watched(engine, missing, len(wanted) - len(missing), console) if missing else []
    if failures:
        raise LabError(_in_one_line(failures, len(wanted)))
    made = {job.config.identity: Record.read(job.folder) for job in missing}
    return {cell: made[cell] if cell in made else there.records[cell][0] for cell in wanted}


@dataclass(frozen=True)
class RunsFolder:
    """The runs that a folder holds, whatever their folders are called."""

    folder: Path
    records: dict[Config, tuple[Record, Path]]

    @classmethod
    def of(cls, folder: Path) -> RunsFolder:
        """Of a folder, or of an archive, from which runs are read alone."""
        found = {}
        for place, read in Record.read_all(folder, deep=False):
            if isinstance(read, Record):  # whoever wants one that cannot be read will be told when it is to be trained
                found[read.config.identity] = (read, place)
        return cls(folder, found)

    def all(self) -> list[Record]:
        return [read for read, _ in self.records.values()]

    def has(self, config: Config) -> bool:
        """Whether there is nothing to do for this run."""
        if config.identity not in self.records:
            return False
        read, _ = self.records[config.identity]
        return read.finished or read.failure is not None

    def place(self, config: Config) -> Path:
        """Where the run is, or is to be."""
        return (
            self.records[config.identity][1]
            if config.identity in self.records
            else self.folder / config.identity.folder
        )


def _watched(engine: Engine, missing: list[Job], already: int, console: Console) -> list[Event]:
    """Let the engine train, show how far it is, and give the failures."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    places = {job.config: job.folder for job in missing}
    done: Counter[Config] = Counter()
    total = sum(job.config.epochs for job in missing)
    ended, failures = 0, []
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=total)
        try:
            with closing(engine(missing)) as events:  # type: ignore[type-var]
                for event in events:
                    done[event.config] = event.config.epochs if event.ended else event.epochs
                    ended += event.ended
                    failures += [event] if event.failure is not None else []
                    line = f"{already + ended}/{already + len(missing)} runs"
                    progress.update(bar, completed=done.total(), description=line)
                    if event.ended and not console.is_terminal:
                        console.out(f"{line}  {places[event.config].name}", highlight=False)
        except KeyboardInterrupt as error:
            raise Interrupted("what was under way is saved; give the same command again to go on") from error
    return [event for event in failures if not _is_recorded(places[event.config])]


def _is_recorded(folder: Path) -> bool:
    """Whether the record tells of the failure: a run that diverged is a result."""
    try:
        return Record.read(folder).failure is not None
    except LabError:
        return False


def _in_one_line(failures: list[Event], of: int) -> str:
    reasons = Counter(event.failure for event in failures)
    each = "; ".join(f"{reason}{f' ({n} runs)' if n > 1 else ''}" for reason, n in reasons.items())
    return f"{len(failures)} of {of} runs failed, the others are kept: {each}"
