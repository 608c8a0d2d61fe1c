"""A run's configuration: frozen, checked, and the same in a file, in a record and on the command line."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from gtracer import checks
from gtracer.lab import files
from gtracer.lab.errors import LabError, unknown

SCHEDULES = ("cosine", "linear", "constant")
PRECISIONS = ("fp32", "bf16")
INITS = ("own", "torch")
KERNELS = ("torch", "compiled", "fused")
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


def option(default: Any, text: str, choices: tuple[str, ...] = ()) -> Any:
    """A field with the help text that the command line shows."""
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class Config:
    """Everything that decides a run's result. `None` leaves a value to the optimiser or model."""

    task: str = option(
        "digits", "digits, fashion-mnist, cifar10, cifar100, boolq, wic, rte; a csv/jsonl file or folder"
    )
    data: str | None = option(None, "folder with the task's official files (default: ~/.cache/gtracer)")
    text_columns: str = option("text", "a text file's columns to classify: one, or two with a comma")
    label_column: str = option("label", "a text file's column with the class")
    max_length: int = option(256, "tokens of a text, at most")
    label_noise: float = option(0.0, "share of training labels replaced by a different class")
    train_share: float = option(1.0, "share of the training data that is used")
    holdout: float = option(
        0.0, "share of the training data kept out of training, its labels as wrong as the rest, to tune on"
    )
    augment: bool = option(False, "random crops and flips of images")
    model: str | None = option(
        None, "mlp, mlp-bn, mlp-ln, resnet20/32/56, resnet20-gn, wrn-28-K, or a Hugging Face name or folder"
    )
    width: int = option(256, "units of an mlp's hidden layers")
    depth: int = option(2, "number of an mlp's hidden layers")
    init: str = option("own", "a network's first weights: its own (He et al.'s) or torch's default ones", INITS)
    optimizer: str = option("sgd-tracer", "one of torch.optim, such as adamw; behind it -tracer, -sam or -asam")
    lr: float = option(0.02, "learning rate")
    momentum: float = option(0.9, "of SGD, and of others that have one")
    dampening: float = option(0.0, "of SGD")
    nesterov: bool = option(False, "Nesterov momentum in SGD")
    weight_decay: float = option(0.0, "coupled; decoupled in AdamW")
    betas: tuple[float, float] = option((0.9, 0.999), "Adam's")
    eps: float = option(1e-8, "Adam's")
    clip: float | None = option(
        None, "scale gradients down to this norm, those of L + ρT (default: leave them; for texts 1)"
    )
    rho: float | None = option(None, "ρ: strength of TRACER's penalty, or SAM's radius")
    beta: float | None = option(None, "β: rate of TRACER's average")
    delta: float | None = option(None, "δ: TRACER's damping")
    f0: str | float | None = option(None, "TRACER's f₀: first-gradient or a number")
    curvature: str | None = option(
        None, "TRACER's F: gradient-magnitude, micro-batch-M, per-example, monte-carlo-fisher, gauss-newton, hutchinson"
    )
    average: str | None = option(None, "another of these for the average f alone")
    engine: str | None = option(None, "TRACER's: finite-difference or exact")
    radius: float | None = option(None, "displacement of TRACER's finite difference")
    difference: str | None = option(None, "TRACER's: forward or central")
    interval: int = option(1, "make the second pass every so many steps")
    reuse: str | float | None = option(
        None, "TRACER's for less: previous (one pass in all), or a factor on the last penalty between two intervals"
    )
    share: float = option(1.0, "of the batch that TRACER's second pass sees")
    preconditioned: bool = option(False, "divide TRACER's gradient by f + δ")
    eta: float | None = option(None, "η: variance of the prior in TRACER's ridge term, or ASAM's offset of |w|")
    second_moment: str | None = option(None, "what feeds Adam-TRACER's: total (∇[L + ρT]) or loss (∇L alone)")
    scale_free: bool = option(False, "TRACER: measure weights before batch norm by their direction")
    rho_warmup: float = option(0.0, "share of the steps over which ρ rises to its value")
    epochs: int = option(100, "passes over the training data")
    batch_size: int = option(128, "examples a step")
    schedule: str = option("cosine", "of the learning rate", SCHEDULES)
    warmup: float = option(0.0, "share of the steps over which the learning rate rises")
    seed: int = option(0, "of the splits, the wrong labels, the weights and the batches")
    device: str = option("auto", "cpu, cuda, mps, … or auto")
    kernels: str = option(
        "torch",
        "torch's; compiled: torch.compile; fused: our own on a GPU, for a resnet with batch norm or a BERT",
        KERNELS,
    )
    precision: str = option("fp32", "of the computation; weights are fp32", PRECISIONS)

    def __post_init__(self) -> None:
        if isinstance(self.betas, list):
            object.__setattr__(self, "betas", tuple(self.betas))
        try:
            self._check()
        except ValueError as error:
            raise LabError(str(error)) from error

    def _check(self) -> None:
        for item in fields(self):
            if item.metadata["choices"]:
                checks.choice(item.name, getattr(self, item.name), item.metadata["choices"])
        for name in ("task", "text_columns", "label_column", "optimizer", "device"):
            checks.kind(name, getattr(self, name), str)
        for name in ("data", "model", "curvature", "average", "engine", "difference"):
            checks.kind(name, getattr(self, name), (str, type(None)))
        for name in ("max_length", "width", "depth", "interval", "epochs", "batch_size"):
            checks.count(name, getattr(self, name))
        for name in ("augment", "nesterov", "preconditioned", "scale_free"):
            checks.flag(name, getattr(self, name))
        for name in ("label_noise", "rho_warmup", "warmup"):
            checks.number(name, getattr(self, name), low=0, high=1)
        checks.number("share", self.share, low=0, high=1, open_low=True)
        checks.number("train_share", self.train_share, low=0, high=1, open_low=True)
        checks.number("holdout", self.holdout, low=0, high=1, open_high=True)
        for name in ("lr", "momentum", "weight_decay", "eps"):
            checks.number(name, getattr(self, name), low=0)
        for name in ("rho", "beta", "delta", "radius", "eta"):
            if getattr(self, name) is not None:
                checks.number(name, getattr(self, name), low=0)
        if self.clip is not None:
            checks.number("clip", self.clip, low=0, open_low=True)
        checks.number("dampening", self.dampening)
        checks.betas(self.betas)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed must be a whole number of at least 0, got {self.seed!r}")

    def to_mapping(self) -> dict[str, Any]:
        """Plain values, for JSON and YAML."""
        return asdict(self) | {"betas": list(self.betas)}

    @classmethod
    def from_mapping(cls, values: Any) -> Config:
        """The inverse; a key that is no field is an error."""
        if not isinstance(values, dict):
            raise LabError(f"a configuration is a mapping of names to values, got {type(values).__name__}")
        kinds = {item.name: str(item.type) for item in fields(cls)}
        for key in values:
            if key not in kinds:
                raise unknown("configuration key", str(key), kinds)
        # YAML reads 1e-3, which everybody writes, as a word; it wants 1.0e-3.
        read: dict[str, Any] = {k: _number(v) if "float" in kinds[k] else v for k, v in values.items()}
        return cls(**read)

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
        """A folder name that tells the run and is its own: the options behind the seed by a checksum."""
        mark = hashlib.sha256(json.dumps(self.to_mapping(), sort_keys=True).encode()).hexdigest()[:8]
        return f"{Path(self.task).stem}-{self.optimizer}-seed{self.seed}-{mark}"


def parsed(path: Path) -> Any:
    """What a YAML or JSON file says."""
    text = files.read(path)
    yaml = _yaml()
    try:
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        where = getattr(error, "problem_mark", None)
        raise LabError(f"{path} is neither YAML nor JSON{f': line {where.line + 1}' if where else ''}") from error


def _number(value: Any) -> Any:
    """The number that a word stands for, where it does."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _yaml() -> Any:
    import yaml

    return yaml
