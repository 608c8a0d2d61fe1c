"""`find_rho`: which ρ suits a model and its data, from short branches of the training run that is to come.

Every candidate trains a branch from the same weights, on the same batches, with the same random numbers, ρ = 0 among
them; what tells them apart is the loss on held-out data at the end. Then all is put back. How far short branches can
be believed was measured: docs/how-to/choosing-rho.md.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from gtracer import checks
from gtracer.optim import NonFiniteError, SGDTracer, TwoPassOptimizer
from gtracer.optim.snapshot import Snapshot
from gtracer.scopes import Signals, generators_of, uninterrupted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRACER = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
SAM = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
PASSES, FEWEST_STEPS, MOST_STEPS = 10, 100, 1000  # of a branch, where no number of steps is given
HELD_OUT, FEWEST = 8, 4  # one batch in so many is set aside where no held-out ones are given; and so many at least
KEPT = 0.5  # of what the best branch has learnt: one that has learnt less has collapsed

Loss = Callable[[Any], Tensor]
Optimizer = TwoPassOptimizer | Callable[[nn.Module], TwoPassOptimizer]


@dataclass(frozen=True)
class Branch:
    """A candidate and the results of its branch.

    Attributes:
        rho: ρ.
        held_out: The loss on the held-out batches after the last step, batch by batch; NaN where it diverged.
        train: The mean loss over the last tenth of its steps.
    """

    rho: float
    held_out: tuple[float, ...]
    train: float

    @property
    def loss(self) -> float:
        """The mean held-out loss."""
        return statistics.fmean(self.held_out)

    def above(self, other: Branch) -> tuple[float, float]:
        """The difference of its held-out loss from another's, and its standard error over the batches.

        >>> one, other = Branch(0.1, (1.0, 3.0), 0.0), Branch(0.0, (0.5, 1.5), 0.0)
        >>> one.above(other)
        (1.0, 0.5)
        """
        differences = [mine - its for mine, its in zip(self.held_out, other.held_out, strict=True)]
        return statistics.fmean(differences), _standard_error(differences)


@dataclass(frozen=True)
class RhoCurve:
    """The result of `find_rho`.

    Attributes:
        rho: The recommended ρ; 0 if the branches cannot tell.
        reason: Why, in a sentence.
        branches: One for each candidate, in the order of ρ, the first being ρ = 0.
        collapsed: The candidates that diverged or learnt next to nothing; none of them is recommended.
        chance: The loss of a model that has learnt nothing.
        steps: Of a branch.
    """

    rho: float
    reason: str
    branches: tuple[Branch, ...]
    collapsed: tuple[float, ...]
    chance: float
    steps: int

    @property
    def rhos(self) -> tuple[float, ...]:
        """The candidates, 0 first."""
        return tuple(branch.rho for branch in self.branches)

    @property
    def losses(self) -> tuple[float, ...]:
        """The mean held-out loss of each."""
        return tuple(branch.loss for branch in self.branches)

    @property
    def errors(self) -> tuple[float, ...]:
        """The standard error of each one's difference from the loss at ρ = 0, over the held-out batches."""
        return tuple(branch.above(self.branches[0])[1] for branch in self.branches)

    @property
    def base_loss(self) -> float:
        """The mean held-out loss at ρ = 0."""
        return self.branches[0].loss

    def __str__(self) -> str:
        lines = [f"{'ρ':>9}  {'held-out loss':>13}  {'against ρ = 0':>18}  {'training loss':>13}"]
        for branch, error in zip(self.branches, self.errors, strict=True):
            against = f"{branch.loss - self.base_loss:+.4f} ± {error:.4f}" if branch.rho else ""
            mark = "  collapsed" if branch.rho in self.collapsed else "  ←" if branch.rho == self.rho else ""
            lines.append(f"{branch.rho:>9g}  {branch.loss:>13.4f}  {against:>18}  {branch.train:>13.4f}{mark}")
        return "\n".join([*lines, self.reason])

    def plot(self, where: str | Path | Axes) -> Axes:
        """Draw the held-out loss against ρ, into a file or on given axes."""
        return _draw(self, where)


def find_rho(
    model: nn.Module | TwoPassOptimizer,
    loss_of: Loss,
    batches: Iterable[Any],
    held_out: Iterable[Any] | None = None,
    *,
    optimizer: Optimizer | None = None,
    candidates: Iterable[float] | None = None,
    steps: int | None = None,
    chance: float | None = None,
    figure: str | Path | None = None,
    tell: Callable[[str], Any] | None = print,
) -> RhoCurve:
    """Recommend a ρ from a short branch of training for each candidate, and restore everything afterwards.

        found = gtracer.find_rho(model, loss_of, train_loader, held_out_loader, optimizer=opt, figure="rho.png")
        opt = SGDTracer(model.parameters(), lr=0.1, momentum=0.9, rho=found.rho, model=model)

    Call it before training, with the learning rate that you train with: the best ρ depends on it. Longer branches give
    better advice; a fifth of the training was measured. After an error, or after Ctrl-C at the end of the current step,
    everything is restored too: weights, buffers, gradients, modes, the optimiser's state and the random numbers of
    torch, Python and NumPy. Only an iterator that can be read once stays read.

    Args:
        model: The model to train, or an optimiser that was made with `model=`.
        loss_of: Computes the loss of a batch with this model, with a graph. It is called in the model's current modes
            for training, and in evaluation mode for held-out batches. It may compute in bfloat16 under
            `torch.autocast`; a scaler for float16 is not supported.
        batches: Training batches, as a DataLoader or a list. If they can be read several times, every branch reads them
            again with the same random numbers.
        held_out: Batches that are used neither for these branches nor for training, with labels as noisy as the rest.
            At least four, better more: the uncertainty comes from their scatter. Without it, every eighth batch of one
            pass over `batches` is set aside, at least four. The branches then repeat the others of that pass, so
            augmentation is not drawn again.
        optimizer: An optimiser of gtracer, or a function that makes one for the model (default:
            `SGDTracer(model.parameters(), lr=0.1, momentum=0.9, model=model)`). If groups have different ρ, the largest
            takes the candidates' values, and the others keep their ratio to it.
        candidates: Values of ρ; 0 is always added (default: 1e-5 to 0.03 for TRACER, 0.01 to 2 for SAM).
        steps: Steps of a branch (default: ten passes over the batches, at least 100 and at most 1000).
        chance: The loss of a model that has learnt nothing, by which collapse is recognised (default: the entropy of
            the labels if the last tensor of a batch is one-dimensional integers, otherwise the loss at the start).
        figure: A file for the curve.
        tell: A function that is called with the result in words; None for silence.

    Returns:
        The curve, with its `rho` and the `reason`. It is the largest candidate that has not collapsed and whose
        held-out loss is within one standard error of the lowest.

    Raises:
        ValueError: If an argument cannot be used.
        RuntimeError: If several processes train the model, since each would find another ρ.
    """
    checks.kind("model", model, (nn.Module, TwoPassOptimizer))
    model, optimizer = _model_and_optimizer(model, optimizer)
    _check(model, optimizer, loss_of, steps, chance)
    rhos = _candidates(optimizer, candidates)
    with uninterrupted() as signals:
        saved = Snapshot(optimizer, model, [*generators_of(batches), *generators_of(held_out)])
        try:
            training, held = _split(batches, held_out, steps)
            steps = steps or _steps(training)
            reference = _reference(model, loss_of, training, held, signals) if chance is None else chance
            made = []
            for rho in rhos:
                saved.restore()
                made.append(_branch(optimizer, model, loss_of, training, held, rho, steps, signals))
        finally:
            saved.restore()
    found = _judged(made, reference, steps)
    if tell is not None:
        tell(str(found))
    if figure is not None:
        found.plot(figure)
    return found


# A branch.


def _branch(
    optimizer: TwoPassOptimizer,
    model: nn.Module,
    loss_of: Loss,
    training: Iterable[Any],
    held: Iterable[Any],
    rho: float,
    steps: int,
    signals: Signals,
) -> Branch:
    """Train from where things are; they are left as the branch leaves them."""
    _set_rho(optimizer, rho)
    if not model.training:
        model.train()
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = None
    losses: list[float] = []
    try:
        for batch in islice(_endless(training), steps):
            losses.append(float(optimizer.step(loss_of, batch)))
            _stop_if_asked(signals)
    except NonFiniteError:
        losses.append(math.nan)
    diverged = not math.isfinite(losses[-1])
    train = statistics.fmean(losses[-max(1, steps // 10) :])
    found = _evaluated(model, loss_of, held, signals)
    return Branch(rho, tuple(math.nan for _ in found) if diverged else found, train)


def _set_rho(optimizer: TwoPassOptimizer, rho: float) -> None:
    """Everywhere, in proportion; a ρ that sets itself is a number from here on."""
    key = optimizer.rho_key
    own = [1.0 if group.get("rho_is_auto") else float(group[key]) for group in optimizer.param_groups]
    largest = max(own)
    for group, value in zip(optimizer.param_groups, own, strict=True):
        group[key] = rho * (value / largest if largest else 1.0)
        group.pop("rho_is_auto", None)


@torch.no_grad()
def _evaluated(model: nn.Module, loss_of: Loss, held: Iterable[Any], signals: Signals) -> tuple[float, ...]:
    """The loss of each held-out batch, in evaluation mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    found = []
    for batch in held:
        found.append(float(loss_of(batch)))
        _stop_if_asked(signals)
    for module, training in modes:
        module.training = training
    return tuple(found)


def _endless(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from batches


def _stop_if_asked(signals: Signals) -> None:
    if signals.held is not None:
        raise KeyboardInterrupt


# What it is made from.


def _model_and_optimizer(
    given: nn.Module | TwoPassOptimizer, optimizer: Optimizer | None
) -> tuple[nn.Module, TwoPassOptimizer]:
    if isinstance(given, TwoPassOptimizer):
        if optimizer is not None:
            raise ValueError(
                f"optimizer = {optimizer!r} beside an optimiser in the model's place: pass the model first"
            )
        if given.model is None:
            raise ValueError(f"{given!r} does not know its model: make it with model=, or pass find_rho(model, …)")
        return given.model, given
    if optimizer is None:
        return given, SGDTracer(given.parameters(), lr=0.1, momentum=0.9, model=given)
    made = optimizer if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer) else optimizer(given)
    if not isinstance(made, TwoPassOptimizer):
        raise ValueError(
            f"optimizer must be of this package, or a function of the model that makes one, got {made!r}: wrap "
            "torch's, lambda model: Tracer(torch.optim.RMSprop(model.parameters()), model=model)"
        )
    return given, made


def _check(model: nn.Module, optimizer: TwoPassOptimizer, loss_of: Any, steps: Any, chance: Any) -> None:
    if not callable(loss_of):
        raise ValueError(f"loss_of must be a function of a batch that gives its loss, got {loss_of!r}")
    if steps is not None:
        checks.count("steps", steps)
    if chance is not None:
        checks.number("chance", chance)
    ours = {p for group in optimizer.param_groups for p in group["params"]}
    if not any(p in ours for p in model.parameters()):
        raise ValueError(f"optimizer = {optimizer!r} trains none of the parameters of {type(model).__name__}")
    if optimizer.is_mid_step:
        raise RuntimeError("find_rho in the middle of a step, after perturbed(): call opt.step() first")
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise RuntimeError(
            f"find_rho in {distributed.get_world_size()} processes: each would find another ρ. Call it in one, before "
            "init_process_group, and pass its ρ to all"
        )


def _candidates(optimizer: TwoPassOptimizer, given: Iterable[float] | None) -> list[float]:
    """In the order of ρ, 0 first."""
    if given is None:
        return [0.0, *(TRACER if optimizer.rule.keeps_average else SAM)]
    listed = list(given)
    for i, rho in enumerate(listed):
        checks.number(f"candidates[{i}]", rho, low=0)
    if not any(listed):
        raise ValueError(f"candidates must hold a ρ above 0, got {listed}")
    return sorted({0.0, *map(float, listed)})


def _split(
    batches: Iterable[Any], held_out: Iterable[Any] | None, steps: int | None
) -> tuple[Iterable[Any], Iterable[Any]]:
    """What is trained on and what is not, both to be read several times."""
    if held_out is not None:
        training, held = _readable(batches, steps or MOST_STEPS), _readable(held_out, None)
        if next(iter(training), None) is None or next(iter(held), None) is None:
            raise ValueError("batches and held_out must hold at least one batch each")
        return training, held
    once = list(islice(batches, max(2 * FEWEST, 2 * (steps or MOST_STEPS))))
    kept = max(FEWEST, len(once) // HELD_OUT)
    if len(once) < 2 * kept:
        raise ValueError(
            f"batches must be at least {2 * FEWEST}, got {len(once)}: without held_out some are set aside. Take "
            "smaller batches, or pass held_out="
        )
    every = len(once) // kept
    aside = set(range(0, kept * every, every))
    return [b for i, b in enumerate(once) if i not in aside], [b for i, b in enumerate(once) if i in aside]


def _readable(batches: Iterable[Any], most: int | None) -> Iterable[Any]:
    """An iterator can be read but once."""
    return list(islice(batches, most)) if iter(batches) is batches else batches


def _steps(training: Any) -> int:
    length = len(training) if hasattr(training, "__len__") else sum(1 for _ in islice(training, MOST_STEPS))
    return min(MOST_STEPS, max(FEWEST_STEPS, PASSES * length))


def _reference(
    model: nn.Module, loss_of: Loss, training: Iterable[Any], held: Iterable[Any], signals: Signals
) -> float:
    """The loss of a model that has learnt nothing: that of the labels' frequencies, or the one at the start."""
    counts: Counter[int] = Counter()
    for batch in islice(training, MOST_STEPS):
        labels = _labels(batch)
        if labels is None:
            return statistics.fmean(_evaluated(model, loss_of, held, signals))
        counts.update(labels.tolist())
        _stop_if_asked(signals)
    return -sum(n / counts.total() * math.log(n / counts.total()) for n in counts.values())


def _labels(batch: Any) -> Tensor | None:
    """Class labels, where a batch has some."""
    last = batch.get("labels") if isinstance(batch, Mapping) else batch[-1] if isinstance(batch, tuple | list) else None
    whole = isinstance(last, Tensor) and last.ndim == 1 and last.dtype in (torch.int64, torch.int32)
    return last if whole else None


# What it means.


def _judged(branches: list[Branch], chance: float, steps: int) -> RhoCurve:
    """The recommendation."""
    finite = [branch for branch in branches if math.isfinite(branch.loss)]
    best = min(finite, key=lambda branch: branch.loss, default=None)
    if best is None or best.loss >= chance - _standard_error(best.held_out):
        reason = (
            f"ρ = 0, since nothing can be told: after {steps} steps no branch has learnt more than chance "
            f"({chance:.4f}). Give more steps, or a learning rate that learns"
        )
        return RhoCurve(0.0, reason, tuple(branches), tuple(b.rho for b in branches if b not in finite), chance, steps)
    needed = chance - KEPT * (chance - best.loss)
    # What memorises has a poor held-out loss too, but learns.
    sound = [branch for branch in finite if min(branch.loss, branch.train) <= needed]
    level = [branch for branch in sound if _is_within(branch, best)]
    chosen = max(level, key=lambda branch: branch.rho)
    collapsed = tuple(branch.rho for branch in branches if branch not in sound)
    return RhoCurve(chosen.rho, _reason(chosen, best, branches, collapsed), tuple(branches), collapsed, chance, steps)


def _is_within(branch: Branch, best: Branch) -> bool:
    distance, error = branch.above(best)
    return distance <= error


def _reason(chosen: Branch, best: Branch, branches: list[Branch], collapsed: tuple[float, ...]) -> str:
    base = branches[0]
    if chosen is best:
        told = f"ρ = {chosen.rho:g} has the lowest held-out loss ({chosen.loss:.4f}), and no larger one is as low"
    else:
        told = f"ρ = {chosen.rho:g} is the largest whose held-out loss ({chosen.loss:.4f}) is "
        told += f"within one standard error of the lowest ({best.loss:.4f} at {best.rho:g})"
    if chosen is not base:
        distance, error = chosen.above(base)
        told += f", {abs(distance):.4f} ± {error:.4f} {'below' if distance < 0 else 'above'} that at ρ = 0"
    if len(chosen.held_out) < FEWEST:
        told += f"; {len(chosen.held_out)} held-out batches say little of the error, so give more and smaller ones"
    if collapsed:
        told += f"; from ρ = {min(collapsed):g} on" if _is_tail(collapsed, branches) else "; at some ρ"
        told += " training collapses"
    elif chosen is branches[-1]:
        told += "; it is the largest of the candidates, so try larger ones"
    return told


def _is_tail(collapsed: tuple[float, ...], branches: list[Branch]) -> bool:
    return collapsed == tuple(branch.rho for branch in branches)[-len(collapsed) :]


def _standard_error(values: Sequence[float]) -> float:
    if not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


# The picture.


def _draw(curve: RhoCurve, where: str | Path | Axes) -> Axes:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"drawing needs {error.name}: pip install 'gtracer-optim[lab]'", name=error.name
        ) from error
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot() if isinstance(where, str | Path) else where
    drawn = [
        (b, e) for b, e in zip(curve.branches, curve.errors, strict=True) if b.rho and b.rho not in curve.collapsed
    ]
    axes.errorbar(
        [b.rho for b, _ in drawn],
        [b.loss for b, _ in drawn],
        [e for _, e in drawn],
        marker="o",
        capsize=3,
        label="held out",
    )
    axes.axhline(curve.base_loss, color="grey", linestyle="--", label="held out, ρ = 0")
    axes.axhline(curve.chance, color="lightgrey", linestyle=":", label="chance")
    for rho in (rho for rho in curve.collapsed if rho):
        axes.axvline(rho, color="tab:red", alpha=0.4, linewidth=1)
    if curve.rho:
        axes.axvline(curve.rho, color="tab:green", label=f"ρ = {curve.rho:g}")
    axes.set(xscale="log", xlabel="ρ (red: collapsed)", ylabel=f"loss after {curve.steps} steps")
    axes.legend(frameon=False)
    if isinstance(where, str | Path):
        figure.savefig(where, dpi=150)
    return axes
