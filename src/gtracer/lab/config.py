"""A run's configuration: frozen, checked, and the same in a file, in a record and on the command line."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field, ValidationError, create_model

from gtracer.lab import files
from gtracer.lab.errors import LabError, one_line, shown
from gtracer.lab.schema import (
    STRICT,
    AtLeastZero,
    Count,
    Flag,
    Name,
    Number,
    Positive,
    Share,
    ShareAboveZero,
    ShareBelowOne,
    Units,
    must_be,
    one_of,
    problems,
)

# Of torch's optimisers, to know their names however they are written; the others go by theirs in small letters.
PLAIN = {"adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd"}
PLAIN |= {"muon", "nadam", "radam", "rmsprop", "rprop", "sgd"}
Schedule = Annotated[str, one_of("cosine", "linear", "constant")]
Precision = Annotated[str, one_of("fp32", "bf16")]
LONGEST = 40  # of a task's name in that of a folder, in characters of up to four bytes
CLASSES, REAL = ("cross-entropy",), ("mse", "huber")  # losses
Loss = Annotated[str, one_of(*CLASSES, *REAL)]
Init = Annotated[str, one_of("own", "torch")]
Kernels = Annotated[str, one_of("torch", "compiled", "fused")]
Engine = Annotated[str, one_of("finite-difference", "exact")]
Difference = Annotated[str, one_of("forward", "central")]
SecondMoment = Annotated[str, one_of("total", "loss")]
First = Annotated[
    Literal["first-gradient"] | AtLeastZero | None, must_be("'first-gradient' or a finite number in [0, inf]")
]
Strength = Annotated[Literal["auto"] | AtLeastZero | None, must_be("'auto' or a finite number in [0, inf]")]
Reuse = Annotated[Literal["previous"] | Share | None, must_be("'previous' or a finite number in [0, 1]")]
# Generators are seeded with a million times of it, and numpy's take 32 bits.
Seed = Annotated[int, Field(ge=0, lt=2**32), must_be(f"a whole number of at least 0 (and at most {2**32 - 1})")]
# How encoders are fine-tuned where nothing else is said: by BERT's recipe (Devlin et al., 2019), learning rate, epochs
# and optimiser being the paper's.
FINE_TUNING: dict[str, Any] = {
    "optimizer": "adam-tracer",
    "lr": 2e-5,
    "schedule": "linear",
    "warmup": 0.1,
    "batch_size": 32,
    "epochs": 5,
    "clip": 1.0,
}


# Options that older runs did not have: where they are not set, runs are called what they were called.
LATER = {"loss": None, "ema": 0.0, "sharpness": None}


def option(default: Any, text: str) -> Any:
    """A field with the help text that the command line shows."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Config:
    """Everything that decides a run's result. `None` leaves a value to the optimiser or model."""

    task: Name = option(
        "digits",
        "digits, fashion-mnist, cifar10, cifar100, boolq, wic, rte; or your own: a folder of images in class folders, "
        "a csv, parquet or jsonl file of a table or of texts, a folder of two or three such files, or MODULE:FUNCTION "
        "that returns Datasets",
    )
    data: Name | None = option(None, "folder with the task's official files (default: ~/.cache/gtracer)")
    text_columns: Name = option("text", "columns with the texts to classify: one, or two separated by a comma")
    label_column: Name = option("label", "column with the label")
    drop: Name | None = option(None, "columns of a table to ignore, separated by commas")
    image_size: Units | None = option(None, "side in pixels to which the images of a folder are scaled and cropped")
    max_length: Count = option(256, "longest text, in tokens")
    label_noise: Share = option(0.0, "share of the training labels to replace by a different class")
    train_share: ShareAboveZero = option(1.0, "share of the training data to use")
    holdout: ShareBelowOne = option(
        0.0,
        "share of the training data to hold out, with labels as noisy as the rest (default: 0.0; for your own data, "
        "compare and tune: 0.1)",
    )
    augment: Flag = option(False, "random crops and flips of images")
    model: Name | None = option(
        None,
        "mlp, mlp-bn, mlp-ln, resnet20/32/56, resnet20-gn, wrn-28-K, timm/NAME, MODULE:FUNCTION that takes shape and "
        "classes and returns a torch.nn.Module; for texts a name on Hugging Face's hub or a folder",
    )
    pretrained: Flag = option(False, "fine-tune timm's pretrained weights")
    weights: Name | None = option(None, "fine-tune the weights in this file (.safetensors, .pt)")
    width: Units = option(256, "units in each hidden layer of an mlp")
    depth: Units = option(2, "hidden layers of an mlp")
    init: Init = option("own", "initial weights: own (those of the network, He et al.'s) or torch's default ones")
    optimizer: Name = option(
        "sgd-tracer", "an optimiser of torch.optim, such as adamw, alone or followed by -tracer, -sam or -asam"
    )
    lr: Positive = option(0.02, "learning rate")
    loss: Loss | None = option(
        None, "cross-entropy for classes; mse or huber for real numbers (default: mse if a label has a fraction)"
    )
    label_smoothing: ShareBelowOne = option(0.0, "share of each label to spread over all classes")
    class_weights: Flag = option(False, "give rare classes more weight in the loss")
    momentum: ShareBelowOne = option(0.9, "momentum of SGD, and of other optimisers that have one")
    dampening: Number = option(0.0, "dampening of SGD")
    nesterov: Flag = option(False, "Nesterov momentum in SGD")
    weight_decay: AtLeastZero = option(0.0, "weight decay: decoupled in AdamW, otherwise coupled")
    betas: tuple[ShareBelowOne, ShareBelowOne] = option((0.9, 0.999), "betas of Adam")
    eps: AtLeastZero = option(1e-8, "eps of Adam")
    clip: Positive | None = option(None, "clip the gradient of L + ρT to this norm (default: no clipping; for texts 1)")
    rho: Strength = option(None, "ρ: strength of TRACER's penalty, a number or auto; for SAM its radius")
    beta: Share | None = option(None, "β: rate of TRACER's average")
    delta: AtLeastZero | None = option(None, "δ: TRACER's damping")
    f0: First = option(None, "TRACER's f₀: first-gradient or a number")
    curvature: Name | None = option(
        None, "TRACER's F: gradient-magnitude, micro-batch-M, per-example, monte-carlo-fisher, gauss-newton, hutchinson"
    )
    average: Name | None = option(None, "another estimator, for the average f alone")
    engine: Engine | None = option(None, "how TRACER differentiates T: finite-difference or exact")
    radius: Positive | None = option(None, "displacement of TRACER's finite difference")
    difference: Difference | None = option(None, "TRACER's finite difference: forward or central")
    interval: Count = option(1, "number of steps from one second pass to the next")
    reuse: Reuse = option(
        None, "previous: TRACER in one pass; a number: use the last penalty between second passes, times this factor"
    )
    share: ShareAboveZero = option(1.0, "share of the batch in TRACER's second pass")
    preconditioned: Flag = option(False, "divide TRACER's gradient by f + δ")
    eta: AtLeastZero | None = option(None, "η: variance of the prior in TRACER's ridge term, or ASAM's offset of |w|")
    second_moment: SecondMoment | None = option(
        None, "what feeds Adam-TRACER's second moment: total (∇[L + ρT]) or loss (∇L)"
    )
    scale_free: Flag = option(False, "TRACER: measure T in the direction of the weights before batch norm")
    rho_warmup: Share = option(0.0, "share of the steps over which ρ rises to its value")
    ema: ShareBelowOne = option(
        0.0, "decay of an average of the weights, to evaluate and keep instead of the last ones (0: none)"
    )
    epochs: Count = option(100, "passes over the training data")
    batch_size: Count = option(128, "examples in a step")
    schedule: Schedule = option("cosine", "schedule of the learning rate")
    warmup: Share = option(0.0, "share of the steps over which the learning rate rises")
    seed: Seed = option(0, "seed of the splits, the label noise, the weights and the batches")
    device: Name = option("auto", "cpu, cuda, mps, … or auto")
    kernels: Kernels = option(
        "torch",
        "torch; compiled: torch.compile; fused: gtracer's on a GPU, for a resnet with batch norm or a BERT",
    )
    precision: Precision = option("fp32", "precision of the computation; weights stay fp32")
    sharpness: Count | None = option(
        None, "measure sharpness every N epochs (every=20, or 20), without changing the training"
    )

    def __post_init__(self) -> None:
        values = Config.checked(vars(self))
        for name in ("betas", "optimizer"):  # as they are compared; what was a whole number stays one
            object.__setattr__(self, name, values[name])

    @classmethod
    def checked(cls, values: Any) -> dict[str, Any]:
        """Some of its values, checked whole, in the form that they have in it."""
        if not isinstance(values, dict):
            raise LabError(f"a configuration is a mapping of names to values, got {type(values).__name__}")
        # YAML reads 1e-3, which everybody writes, as a word; it wants 1.0e-3.
        read = {name: _number(value) if name in numeric() else value for name, value in values.items()}
        if isinstance(read.get("betas"), list):
            read["betas"] = tuple(read["betas"])
        try:
            _validator().validate_python(read)
        except ValidationError as error:
            raise problems(error, "configuration key", OPTIONS) from error
        return read | ({"optimizer": canonical(read["optimizer"])} if "optimizer" in read else {})

    def to_mapping(self) -> dict[str, Any]:
        """Plain values, for JSON and YAML."""
        return asdict(self) | {"betas": list(self.betas)}

    @classmethod
    def from_mapping(cls, values: Any) -> Config:
        """The inverse; a key that is no field is an error."""
        return cls(**cls.checked(values))

    def write(self, path: Path) -> None:
        """As YAML, or as JSON where the name ends so."""
        values = self.to_mapping()
        as_json = path.suffix == ".json"
        text = json.dumps(values, indent=2) if as_json else _yaml().safe_dump(values, sort_keys=False)
        files.write(path, (text.rstrip() + "\n").encode())

    @classmethod
    def read(cls, path: Path) -> Config:
        """From a YAML or JSON file. What it leaves out takes the defaults."""
        values = parsed(path)
        try:
            return cls.from_mapping({} if values is None else values)
        except LabError as error:
            raise LabError(f"{path}: {error}") from error

    @property
    def identity(self) -> Config:
        """The run wherever it is made: data folder, device and kernels are the machine's business."""
        return replace(self, data=None, device="auto", kernels="torch")

    @property
    def folder(self) -> str:
        """A folder name that tells the run and is its own: the other options as a checksum after the seed."""
        return self._folder(name_of(self.task))

    def place(self, runs: Path, prefix: str = "") -> Path:
        """Where among others it is, or is to be."""
        return place(runs, f"{prefix}{self.folder}", f"{prefix}{self._folder(Path(self.task).stem)}")

    def _folder(self, task: str) -> str:
        options = {name: x for name, x in self.to_mapping().items() if name not in LATER or x != LATER[name]}
        mark = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:8]
        return f"{task}-{self.optimizer}-seed{self.seed}-{mark}"


OPTIONS = tuple(item.name for item in fields(Config))


def name_of(task: str) -> str:
    """A task in the name of a folder: its last part without ending, of letters, digits, underscores, dots and dashes.

    >>> [name_of(task) for task in ("digits", "./my photos.v1/", "..", "code/films.py:make")]
    ['digits', 'my-photos', 'data', 'films']
    """
    last = re.split(r"[/\\]", task.rstrip("/\\"))[-1]
    return re.sub(r"[^\w.-]+", "-", Path(last).stem)[:LONGEST].strip("-.") or "data"


def place(runs: Path, name: str, former: str) -> Path:
    """The folder of this name; or that of its former name, from before names were plain, where there is one."""
    return runs / former if files.is_folder(runs / former) else runs / name


@cache
def _validator() -> Any:
    """Of a configuration's values, by the types of its fields."""
    kinds = get_type_hints(Config, include_extras=True)
    values: dict[str, Any] = {name: (kinds[name], None) for name in OPTIONS}
    return create_model("Values", __config__=STRICT, **values).__pydantic_validator__


@cache
def numeric() -> frozenset[str]:
    """The options that take a number with a fraction."""
    return frozenset(name for name in OPTIONS if _takes(name, 0.5))


@cache
def whole() -> frozenset[str]:
    """The options that take a whole number."""
    return frozenset(name for name in OPTIONS if _takes(name, 5) and not _takes(name, 0.5) and not _takes(name, "5"))


def _takes(name: str, value: Any) -> bool:
    try:
        _validator().validate_python({name: value})
    except ValidationError:
        return False
    return True


def canonical(optimizer: str) -> str:
    """An optimiser's name as the lab has it, from any way to write it.

    >>> canonical("SGDTracer"), canonical("AdamW"), canonical("rmsprop_SAM"), canonical("ASAM")
    ('sgd-tracer', 'adamw', 'rmsprop-sam', 'asam')
    """
    plain = re.sub(r"[\s_-]", "", optimizer.lower())
    for scheme in ("tracer", "asam", "sam"):
        base = plain.removesuffix(scheme)
        if base in PLAIN and base != plain:
            return f"{base}-{scheme}"
    return plain if plain in PLAIN | {"sam", "asam"} else optimizer


def parsed(path: Path) -> Any:
    """What a YAML or JSON file says."""
    text = files.read(path)
    yaml = _yaml()
    try:
        return json.loads(text, object_pairs_hook=_once) if path.suffix == ".json" else yaml.load(text, _loader())
    except LabError as error:
        raise LabError(f"{path}: {error}") from error
    except RecursionError as error:
        raise LabError(f"{path} is nested too deep") from error
    except Exception as error:  # whatever YAML's constructors come across: `!!bool maybe` is a KeyError
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark else shown(one_line(error))
        raise LabError(f"{path} is neither YAML nor JSON: {where}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A mapping whose names differ: of two equal ones the first would be lost without a word."""
    for name, times in Counter(name for name, _ in pairs).items():
        if times > 1:
            raise LabError(f"{shown(name)} stands {times} times in one mapping")
    return dict(pairs)


@cache
def _loader() -> Any:
    """YAML's safe loader, which takes a name once, as above."""
    yaml = _yaml()

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            if isinstance(node, yaml.MappingNode):
                _once([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
            return super().construct_mapping(node, deep)

    return Loader


def _number(value: Any) -> Any:
    """The number that a word stands for, where it does."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _yaml() -> Any:
    import yaml

    return yaml
