"""A study: a question put as data. Methods × settings × seeds, with the paper's numbers beside where it has them."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gtracer import checks
from gtracer.lab import files
from gtracer.lab.config import Config, parsed
from gtracer.lab.errors import LabError, unknown
from gtracer.lab.results import archive

NAME = "study.json"
SHIPPED = Path(__file__).parent / "studies"
KEYS = ("title", "about", "base", "seeds", "settings", "methods", "paper")


@dataclass(frozen=True)
class Point:
    """A cell of a table, or a point of a curve: what is repeated with every seed."""

    method: str
    setting: str
    varied: tuple[tuple[str, Any], ...]  # the options that the study varies, and their values here
    config: Config  # with the first seed
    seeds: tuple[int, ...] = (0,)

    @property
    def label(self) -> str:
        """The method, with the values that tell it from its neighbours.

        >>> Point("SAM", "", (("rho", 0.1),), Config()).label
        'SAM, ρ 0.1'
        """
        return ", ".join([self.method, *(f"{SYMBOLS.get(name, name)} {value}" for name, value in self.varied)])

    def configs(self) -> list[Config]:
        """The runs that make it."""
        return [replace(self.config, seed=seed) for seed in self.seeds]


SYMBOLS = {"rho": "ρ", "delta": "δ", "beta": "β", "eta": "η"}


@dataclass(frozen=True)
class Study:
    """What is to be run, in the form of its file.

    Attributes:
        title: What the table or figure is called.
        about: What a reader should know.
        base: Options of `gtracer train` that all runs share.
        seeds: One run each.
        settings: Columns: a label, and the options that make it; `seeds` of its own among them.
        methods: Rows: a label and its options; under `vary` lists of values, each of which is a point of its own; under
            `in` a setting's label with options for it alone.
        paper: A method's label, a setting's label, and [accuracy, standard error] in per cent.
    """

    title: str
    about: str
    base: dict[str, Any]
    seeds: tuple[int, ...]
    settings: dict[str, dict[str, Any]]
    methods: dict[str, dict[str, Any]]
    paper: dict[str, dict[str, list[float]]]

    def points(self) -> list[Point]:
        """Every cell of the table, setting by setting."""
        return [
            Point(method, setting, varied, Config.from_mapping(values | {"seed": seeds[0]}), seeds)
            for setting, seeds in self._seeds().items()
            for method in self.methods
            for varied, values in self._variants(method, setting)
        ]

    def _seeds(self) -> dict[str, tuple[int, ...]]:
        """Of each setting: its own, or the study's."""
        return {label: _seeds(options.get("seeds", list(self.seeds))) for label, options in self.settings.items()}

    def _variants(self, method: str, setting: str) -> Iterator[tuple[tuple[tuple[str, Any], ...], dict[str, Any]]]:
        own = dict(self.methods[method])
        vary, special = own.pop("vary", {}), own.pop("in", {}).get(setting, {})
        common = self.base | _without(self.settings[setting], {"seeds": None}) | own | special
        for values in itertools.product(*vary.values()):
            yield tuple(zip(vary, values, strict=True)), common | dict(zip(vary, values, strict=True))

    def configs(self, settings: Collection[str] = ()) -> list[Config]:
        """Every run once, seed by seed, so that an early look at the table has something of every cell.

        Args:
            settings: The labels of those that are wanted, where not all are.
        """
        for label in settings:
            if label not in self.settings:
                raise unknown("setting", label, self.settings)
        points = [point for point in self.points() if not settings or point.setting in settings]
        rounds = itertools.zip_longest(*(point.configs() for point in points))
        return list(dict.fromkeys(config for cells in rounds for config in cells if config is not None))

    def of_paper(self, point: Point) -> list[float] | None:
        """The paper's accuracy and standard error, where it has them. A method that is varied has no single one."""
        return None if point.varied else self.paper.get(point.method, {}).get(point.setting)

    def changed(self, *, seeds: int | None = None, **options: Any) -> Study:
        """With so many seeds, and options (those not None) that override all others."""
        given = {name: value for name, value in options.items() if value is not None}
        of_own = {} if seeds is None else {"seeds": None}
        settings = {label: _without(values, of_own) | given for label, values in self.settings.items()}
        methods = {label: _without(values, given) for label, values in self.methods.items()}
        return Study.from_mapping(
            self.to_mapping() | {"settings": settings, "methods": methods, "seeds": seeds or list(self.seeds)}
        )

    def to_mapping(self) -> dict[str, Any]:
        """Plain values, for JSON and YAML."""
        return deepcopy({key: getattr(self, key) for key in KEYS} | {"seeds": list(self.seeds)})

    @classmethod
    def from_mapping(cls, values: Any) -> Study:
        """Checked as a whole: every run's configuration is made once."""
        if not isinstance(values, dict):
            raise LabError(f"a study is a mapping of names to values, got {type(values).__name__}")
        for key in values:
            if key not in KEYS:
                raise unknown("key of a study", str(key), KEYS)
        _check_shapes(values)
        settings = {str(k): v or {} for k, v in (values.get("settings") or {"": {}}).items()}
        methods = {str(k): v or {} for k, v in values["methods"].items()}
        paper = values.get("paper") or {}
        _check_labels(settings, methods, paper)
        base = values.get("base") or {}
        study = cls(
            values.get("title", ""),
            values.get("about", ""),
            base,
            _seeds(values.get("seeds", 1)),
            settings,
            methods,
            paper,
        )
        places = Counter((point.label, point.setting) for point in study.points())
        for (label, setting), times in places.items():
            if times > 1:
                raise LabError(f"{label!r} stands {times} times in setting {setting!r}: each needs a label of its own")
        return study

    def write(self, folder: Path) -> None:
        """Beside the records, for the report; as theirs, it does not say where the data lies."""
        content = self.to_mapping() | {"base": _without(self.base, {"data": None})}
        for part in ("settings", "methods"):
            content[part] = {label: _without(values, {"data": None}) for label, values in content[part].items()}
        files.write(folder / NAME, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> Study:
        """From a YAML or JSON file."""
        try:
            return cls.from_mapping(parsed(path))
        except LabError as error:
            raise LabError(str(error) if str(path) in str(error) else f"{path}: {error}") from error

    @classmethod
    def beside(cls, records: Path) -> Study | None:
        """The one that was written beside these records, in their folder or archive, if there is one."""
        if not archive.is_packed(records):
            return cls.read(records / NAME) if (records / NAME).exists() else None
        content = archive.unpacked(records).get(NAME)
        try:
            return None if content is None else cls.from_mapping(json.loads(content))
        except (LabError, ValueError) as error:
            raise LabError(f"{records / NAME}: {error}") from error


def shipped() -> dict[str, Path]:
    """The studies that come with gtracer, by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.yaml"))}


def load(name: str) -> Study:
    """A shipped study by its name, or one's own by its file."""
    if name in shipped():
        return Study.read(shipped()[name])
    if Path(name).suffix in (".yaml", ".yml", ".json"):
        return Study.read(Path(name))
    raise unknown("study", name, shipped())


def _without(values: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Options without those that are given otherwise."""
    left = {name: value for name, value in values.items() if name not in given}
    for part in ("vary", "in"):
        if part in left:
            inner = {k: _without(v, given) if part == "in" else v for k, v in left[part].items() if k not in given}
            left[part] = inner
    return left


def _check_shapes(values: dict[str, Any]) -> None:
    for key in ("title", "about"):
        if not isinstance(values.get(key, ""), str):
            raise LabError(f"{key} must be text, got {values[key]!r}")
    for key in ("base", "settings", "methods", "paper"):
        if not isinstance(values.get(key) or {}, dict):
            raise LabError(f"{key} must be a mapping, got {values[key]!r}")
    if not values.get("methods"):
        raise LabError("a study needs methods: labels with options of gtracer train")
    for key in ("settings", "methods"):
        for label, options in (values.get(key) or {}).items():
            if not isinstance(options or {}, dict):
                raise LabError(f"{key}: {label!r} must be a mapping of options, got {options!r}")
    for label, options in values["methods"].items():
        for part in ("vary", "in"):
            if not isinstance((options or {}).get(part, {}), dict):
                raise LabError(f"{part!r} of method {label!r} must be a mapping, got {options[part]!r}")
        for name, several in (options or {}).get("vary", {}).items():
            if not isinstance(several, list) or not several:
                raise LabError(f"method {label!r} varies {name!r} over a list of values, got {several!r}")


def _check_labels(settings: dict[str, Any], methods: dict[str, Any], paper: dict[str, Any]) -> None:
    for method, options in methods.items():
        for setting in options.get("in", {}):
            if setting not in settings:
                raise unknown(f"setting of method {method!r}", str(setting), settings)
    for method, row in paper.items():
        if method not in methods:
            raise unknown("method in the paper's numbers", str(method), methods)
        for setting, value in row.items():
            if setting not in settings:
                raise unknown("setting in the paper's numbers", str(setting), settings)
            if not isinstance(value, list) or len(value) != 2:
                raise LabError(f"the paper's number is [accuracy, standard error], got {value!r} for {method!r}")


def _seeds(value: Any) -> tuple[int, ...]:
    try:
        if isinstance(value, list) and value:
            return tuple(value)
        checks.count("seeds", value)
    except ValueError as error:
        raise LabError(str(error)) from error
    return tuple(range(value))
