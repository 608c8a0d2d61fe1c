"""The loss along lines and planes through weight space: around a model, and from one to another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path as File
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gtracer import checks
from gtracer.sharpness.losses import Loss
from gtracer.sharpness.model import Settings
from gtracer.sharpness.objective import Objective, Value, opened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Direction = Sequence[Tensor]
STATISTICS = ("interpolated", "reestimated")


@dataclass(frozen=True)
class Line:
    """The loss along a line.

    Attributes:
        positions: Positions along the line; between two models 0 is the first and 1 the second.
        losses: The loss at each position.
        accuracies: The accuracy at each position, if the loss gives it.
        label: Label of the axis.
    """

    positions: tuple[float, ...]
    losses: tuple[float, ...]
    accuracies: tuple[float, ...] | None = None
    label: str = "position"

    @property
    def barrier(self) -> float:
        """The largest rise of the loss above the straight line between its ends (Frankle et al., 2020).

        >>> Line((0.0, 0.5, 1.0), (1.0, 4.0, 3.0)).barrier
        2.0
        """
        return _barrier(self.positions, self.losses)

    @property
    def accuracy_barrier(self) -> float | None:
        """The largest drop of the accuracy below the straight line between its ends."""
        return None if self.accuracies is None else _barrier(self.positions, [-x for x in self.accuracies])

    def plot(self, where: str | File | BinaryIO | Axes, **look: Any) -> Axes:
        """Draw loss and accuracy into a file, or the loss on given axes, which several lines can share."""
        from gtracer.sharpness import picture

        return picture.line(self, where, **look)

    def to_mapping(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Surface:
    """The loss on a plane.

    Attributes:
        x: Positions along the first direction.
        y: Positions along the second direction.
        losses: One row for each y.
        accuracies: One row for each y, if the loss gives them.
        labels: Labels of the axes.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]
    accuracies: tuple[tuple[float, ...], ...] | None = None
    labels: tuple[str, str] = ("first direction", "second direction")

    def plot(self, where: str | File | BinaryIO | Axes, **look: Any) -> Axes:
        """Draw its contours, into a file or on given axes."""
        from gtracer.sharpness import picture

        return picture.surface(self, where, **look)

    def to_mapping(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def filter_normalised(params: Iterable[Tensor], direction: Direction) -> list[Tensor]:
    """Scale a direction so that its filters are as long as those of the weights (Li et al., 2018).

    Networks can then be compared. Each filter of a convolution and each row of a linear layer gets the length of its
    counterpart in the weights. Biases and the parameters of norms, which have a single axis, do not move.

    >>> filter_normalised([torch.tensor([[3.0, 4.0]])], [torch.tensor([[1.0, 0.0]])])
    [tensor([[5., 0.]])]
    """
    made = []
    for w, d in zip(params, direction, strict=True):
        if w.ndim < 2:
            made.append(torch.zeros_like(d))
            continue
        axes = list(range(1, w.ndim))
        length = torch.linalg.vector_norm(d, dim=axes, keepdim=True)
        wanted = torch.linalg.vector_norm(w.detach(), dim=axes, keepdim=True)
        made.append(torch.where(length > 0, d * (wanted / length), 0.0))
    return made


def line(
    model: nn.Module,
    loss_of: Loss,
    batches: Iterable[Any],
    direction: Direction | None = None,
    *,
    reach: float = 1.0,
    points: int = 21,
    seed: int = 0,
    label: str | None = None,
    settings: Settings | None = None,
) -> Line:
    """The loss at w + t·d for t from −reach to reach.

    Args:
        model: The model, in evaluation mode; it is restored afterwards.
        loss_of: As for `measure`; accuracies come from a `SplitLoss`.
        batches: Likewise.
        direction: d, a tensor for each trained parameter (default: drawn at random, filter by filter as long as w).
        reach: The largest t.
        points: Number of points, at least two; an odd number has w itself in the middle.
        seed: Seed of the random direction.
        label: Label of the axis.
        settings: As for `measure`.
    """
    with _around(model, loss_of, batches, [direction], reach, points, seed, settings) as (objective, (d,)):
        positions = _positions(-reach, reach, points)
        values = [objective.value(t * d) for t in positions]
    label = label or ("random direction, filters normalised" if direction is None else "position")
    return Line(positions, *_columns(values), label)


def plane(
    model: nn.Module,
    loss_of: Loss,
    batches: Iterable[Any],
    directions: Sequence[Direction] | None = None,
    *,
    reach: float = 1.0,
    points: int = 21,
    seed: int = 0,
    labels: tuple[str, str] | None = None,
    settings: Settings | None = None,
) -> Surface:
    """The loss at w + s·d + t·e for s and t from −reach to reach; arguments as for `line`.

    For the directions of largest curvature: `plane(…, directions=eigenvectors(model, loss_of, batches)[1])`.
    """
    if directions is not None and len(directions) != 2:
        raise ValueError(f"directions must be two, got {len(directions)}")
    given: list[Direction | None] = [None, None] if directions is None else list(directions)
    with _around(model, loss_of, batches, given, reach, points, seed, settings, points**2) as (objective, (d, e)):
        positions = _positions(-reach, reach, points)
        columns = [_columns([objective.value(s * d + t * e) for s in positions]) for t in positions]
    losses, rights = zip(*columns, strict=True)
    accuracies = None if None in rights else tuple(rights)
    drawn = (
        ("random direction, filters normalised", "another random direction") if directions is None else Surface.labels
    )
    return Surface(positions, positions, losses, accuracies, labels or drawn)


def between(
    model: nn.Module,
    loss_of: Loss,
    batches: Iterable[Any],
    first: Mapping[str, Tensor] | nn.Module,
    second: Mapping[str, Tensor] | nn.Module,
    *,
    points: int = 21,
    beyond: float = 0.0,
    statistics: str = "interpolated",
    settings: Settings | None = None,
) -> Line:
    """The loss at (1 − t)·first + t·second. Its `barrier` says whether the two are linearly connected.

    Args:
        model: A model of the same kind to compute with; it is restored afterwards.
        loss_of: As for `measure`.
        batches: Likewise.
        first: A model, or its state_dict.
        second: Likewise.
        points: Number of points, including both ends.
        beyond: Distance to continue beyond both ends, in units of the distance between them.
        statistics: Batch norm's statistics between the ends: "interpolated" like the weights, or "reestimated" from
            the batches at each point, which averaged weights often need.
        settings: As for `measure`.
    """
    checks.choice("statistics", statistics, STATISTICS)
    checks.number("beyond", beyond, low=0)
    _check_points(points)
    ends = _state("first", model, first), _state("second", model, second)
    positions = _positions(-beyond, 1 + beyond, points)
    with opened(model, loss_of, batches, settings) as objective, _restored(model):
        objective.plan(points * (2 if statistics == "reestimated" else 1))
        objective.doing("between two models", points * 2)
        values = []
        for t in positions:
            _place(model, *ends, t)
            objective.kept.hold_buffers()
            if statistics == "reestimated":
                _reestimate(model, objective)
            values.append(objective.value_here())
            objective.at_weights = values[0].loss  # from here on a loss may be infinite
    return Line(positions, *_columns(values), "from the first model (0) to the second (1)")


# Directions.


@contextmanager
def _around(
    model: nn.Module,
    loss_of: Loss,
    batches: Iterable[Any],
    directions: list[Direction | None],
    reach: float,
    points: int,
    seed: int,
    settings: Settings | None,
    sweeps: int | None = None,
) -> Iterator[tuple[Objective, list[Tensor]]]:
    """The objective, and the directions as vectors."""
    checks.number("reach", reach, low=0, open_low=True)
    _check_points(points)
    with opened(model, loss_of, batches, settings) as objective:
        objective.plan(1 + (sweeps or points))
        objective.doing("landscape", 1 + (sweeps or points))
        generator = torch.Generator().manual_seed(seed)
        vectors = [_vector(objective, each, generator) for each in directions]
        objective.at_weights = objective.value().loss
        yield objective, vectors


def _vector(objective: Objective, direction: Direction | None, generator: torch.Generator) -> Tensor:
    if direction is None:
        drawn = objective.pieces(objective.random(generator))
        found = objective.flat(filter_normalised(objective.params, drawn))
        if not bool(found.any()):
            raise ValueError("a random direction needs weights with filters that are not zero: pass a direction")
        return found
    shapes, wanted = [tuple(d.shape) for d in direction], [tuple(p.shape) for p in objective.params]
    if shapes != wanted:
        raise ValueError(f"direction must have tensors of shapes {wanted}, got {shapes}")
    return objective.flat(list(direction))


def _check_points(points: int) -> None:
    checks.count("points", points)
    if points < 2:
        raise ValueError(f"points must be at least 2, got {points}")


def _positions(low: float, high: float, points: int) -> tuple[float, ...]:
    return tuple(torch.linspace(low, high, points, dtype=torch.float64).tolist())


def _columns(values: list[Value]) -> tuple[tuple[float, ...], tuple[float, ...] | None]:
    rights = tuple(v.accuracy for v in values if v.accuracy is not None)
    return tuple(v.loss for v in values), rights if len(rights) == len(values) else None


# From one model to another.


def _state(what: str, model: nn.Module, given: Any) -> dict[str, Tensor]:
    state = given.state_dict() if isinstance(given, nn.Module) else given
    checks.kind(what, state, Mapping, ", a state_dict or a model")
    own = {name: x.shape for name, x in model.state_dict().items()}
    other = {name: x.shape for name, x in state.items() if isinstance(x, Tensor)}
    if own != other:
        differing = sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name))
        raise ValueError(f"{what} is of another model: it differs in {', '.join(differing[:3])}")
    return {name: x.detach().clone() for name, x in state.items()}


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Of the parameters also those that are not trained."""
    state = model.state_dict(keep_vars=True)
    saved = {name: x.detach().clone() for name, x in state.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, x in state.items():
                x.copy_(saved[name])


@torch.no_grad()
def _place(model: nn.Module, first: dict[str, Tensor], second: dict[str, Tensor], t: float) -> None:
    """Put the weights, and statistics, on the line; what is no fraction is the nearer end's."""
    for name, x in model.state_dict(keep_vars=True).items():
        one, other = (end[name].to(x.device) for end in (first, second))
        # The ends themselves to the bit.
        x.copy_(torch.lerp(one, other, t) if x.is_floating_point() and t not in (0, 1) else other if t >= 0.5 else one)


@torch.no_grad()
def _reestimate(model: nn.Module, objective: Objective) -> None:
    """Batch norm's statistics by a sweep at these weights, the mean over batches."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    momenta = [m.momentum for m in norms]
    for norm in norms:
        norm.reset_running_stats()
    objective.kept.hold_buffers()
    try:
        for norm in norms:
            norm.momentum = None  # a cumulative mean
            norm.train()
        for batch, _ in objective.sweep():
            objective.loss_of(batch)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            norm.eval()
    objective.kept.hold_buffers()


def _barrier(positions: Sequence[float], heights: Sequence[float]) -> float:
    known = dict(zip(positions, heights, strict=True))
    start, end = (known.get(t, heights[i]) for t, i in ((0.0, 0), (1.0, -1)))
    inside = [h - ((1 - t) * start + t * end) for t, h in known.items() if 0 <= t <= 1]
    return math.inf if any(math.isnan(x) for x in inside) else max(0.0, *inside)
