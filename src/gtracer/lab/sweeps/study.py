"""A study: a question put as data. Methods × settings × seeds, with the paper's numbers beside where it has them."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from gtracer.lab import files
from gtracer.lab.config import Config, Seed, parsed
from gtracer.lab.errors import LabError, shown, unknown
from gtracer.lab.results import archive
from gtracer.lab.schema import STRICT, Number, must_be, problems

NAME = "study.json"
SHIPPED = Path(__file__).parent / "studies"
KEYS = ("title", "about", "base", "seeds", "settings", "methods", "paper")
MOST = 100_000  # runs: more are a slip of the pen, and would never end


def _label(value: Any) -> Any:
    """As text: YAML takes a label such as 0.5 for a number."""
    return shown(value) if value is None or isinstance(value, bool | int | float) else value


# What a study's file may say. Its options are looked at one by one, by the configuration whose they are.
Text = Annotated[str, must_be("text")]
Label = Annotated[Text, BeforeValidator(_label)]
Options = Annotated[dict[str, Any] | None, must_be("a mapping of options")]
Seeds = Annotated[
    Annotated[int, Field(ge=1, le=MOST)] | Annotated[list[Seed], Field(min_length=1, max_length=MOST)],
    must_be("a whole number of at least 1, or a list of whole numbers of at least 0"),
]
Values = Annotated[list[Any], Field(min_length=1), must_be("a list of values")]
OfPaper = Annotated[
    list[Number], Field(min_length=2, max_length=2), must_be("[accuracy, standard error], two numbers in per cent")
]
Method = TypedDict("Method", {"vary": dict[str, Values], "in": dict[Label, Options]}, total=False)
Method.__pydantic_config__ = STRICT | {"extra": "allow"}  # type: ignore[attr-defined]


class Setting(TypedDict, total=False):
    __pydantic_config__ = STRICT | {"extra": "allow"}  # type: ignore[misc]
    seeds: Seeds


class Content(TypedDict, total=False):
    __pydantic_config__ = STRICT  # type: ignore[misc]
    title: Text
    about: Text
    base: Options
    seeds: Seeds
    settings: dict[Label, Setting | None] | None
    methods: dict[Label, Method | None]
    paper: dict[Label, dict[Label, OfPaper]] | None


CONTENT = TypeAdapter(Content)


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


SYMBOLS = {"rho": "ρ", "delta": "δ", "beta": "β", "eta": "η", "f0": "f₀"}


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
        vary, special = own.pop("vary", {}), own.pop("in", {}).get(setting) or {}
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
        try:
            read: Any = CONTENT.validate_python(values)
        except ValidationError as error:
            raise problems(error, "key of a study", KEYS) from error
        settings = {label: options or {} for label, options in (read.get("settings") or {"": {}}).items()}
        methods = {label: options or {} for label, options in read.get("methods", {}).items()}
        if not methods:
            raise LabError("a study needs methods: labels with options of gtracer train")
        title, about, paper = read.get("title", ""), read.get("about", ""), read.get("paper") or {}
        seeds = _seeds(read.get("seeds", 1))
        study = cls(title, about, read.get("base") or {}, seeds, settings, methods, paper)
        study._check_labels()
        study._check_options()
        study._check_points()
        return study

    def _check_labels(self) -> None:
        """Refuse labels of settings and methods that there are not."""
        for method, options in self.methods.items():
            for setting in options.get("in", {}):
                if setting not in self.settings:
                    raise unknown(f"setting of method {method!r}", setting, self.settings)
        for method, row in self.paper.items():
            if method not in self.methods:
                raise unknown("method in the paper's numbers", method, self.methods)
            for setting in row:
                if setting not in self.settings:
                    raise unknown("setting in the paper's numbers", setting, self.settings)

    def places(self) -> Iterator[tuple[str, dict[str, Any], Collection[str], Collection[str]]]:
        """Where options stand, with the methods and settings that they are for; of what is varied each value alone."""
        yield "base", self.base, self.methods, self.settings
        for setting, options in self.settings.items():
            yield f"settings: {setting!r}", _without(options, {"seeds": None}), self.methods, [setting]
        for method, options in self.methods.items():
            place = f"methods: {method!r}"
            yield place, {k: v for k, v in options.items() if k not in ("vary", "in")}, [method], self.settings
            for setting, special in options.get("in", {}).items():
                yield f"{place}: in {setting!r}", special or {}, [method], [setting]
            for name, values in options.get("vary", {}).items():
                for value in values:
                    yield f"{place}: vary", {name: value}, [method], self.settings

    def _check_options(self) -> None:
        """Refuse what no run may have, also where something else overrides it."""
        for place, options, _, _ in self.places():
            try:
                Config.checked(options)
            except LabError as error:
                raise LabError(f"{place}: {error}") from error

    def _check_points(self) -> None:
        """Refuse points of one label, and more of them than anybody can wait for."""
        varied = [math.prod(map(len, options.get("vary", {}).values())) for options in self.methods.values()]
        runs = sum(varied) * sum(map(len, self._seeds().values()))
        if runs > MOST:
            raise LabError(f"{shown(runs)} runs are asked for, of at most {MOST}")
        places = Counter((point.label, point.setting) for point in self.points())
        for (label, setting), times in places.items():
            if times > 1:
                raise LabError(f"{label!r} stands {times} times in setting {setting!r}: each needs a label of its own")

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
            return cls.read(records / NAME) if files.exists(records / NAME) else None
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
        if not files.exists(Path(name)):
            raise LabError(f"cannot read {name}: there is no such study")
        return Study.read(Path(name))
    if "/" in name:
        raise LabError(f"there is no study {name}: give a YAML or JSON file, or one of {', '.join(shipped())}")
    raise unknown("study", name, shipped())


def _without(values: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Options without those that are given otherwise."""
    left = {name: value for name, value in values.items() if name not in given}
    for part in ("vary", "in"):
        if part in left:
            inner = {
                k: _without(v or {}, given) if part == "in" else v for k, v in left[part].items() if k not in given
            }
            left[part] = inner
    return left


def _seeds(value: list[int] | int) -> tuple[int, ...]:
    return tuple(value if isinstance(value, list) else range(value))
