"""`measure`: how sharp a minimum is, by the measures of the field."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gtracer import checks, tensors
from gtracer.penalty import DELTA
from gtracer.sharpness import lanczos, neighbourhood
from gtracer.sharpness.bound import PacBayes, pac_bayes
from gtracer.sharpness.losses import Loss
from gtracer.sharpness.model import Settings
from gtracer.sharpness.objective import Objective, opened
from gtracer.sharpness.products import GGN, HESSIAN, check_matrices
from gtracer.sharpness.progress import Progress
from gtracer.sharpness.result import Estimate, Sharpness, Spectrum, TraceRatio

CROOKED = 0.01  # of the largest eigenvalue; bfloat16 has some thousandths


def measure(
    model: nn.Module,
    loss_of: Loss,
    batches: Iterable[Any],
    *,
    matrices: Iterable[str] | None = None,
    top: int = 3,
    steps: int = 40,
    tolerance: float = lanczos.TOLERANCE,
    runs: int = 1,
    probes: int = 8,
    samples: int = 8,
    sigma: float = 0.01,
    adaptive_sigma: float = 0.1,
    ascent: int = 8,
    radius: float = 0.05,
    adaptive_radius: float = 0.5,
    f: Mapping[Any, Tensor] | None = None,
    delta: float = DELTA,
    start: Mapping[str, Tensor] | None = None,
    confidence: float = 0.95,
    prior: float | None = None,
    params: Iterable[Tensor] | None = None,
    examples_of: Callable[[Any], float] | None = None,
    train_mode: bool = False,
    seed: int = 0,
    progress: bool | Progress = True,
    merge: int | None = None,
) -> Sharpness:
    """Measure how sharp the loss is at the model's weights.

        found = gtracer.sharpness.measure(model, classification(model), loader)
        print(found)
        found.top_eigenvalue, found.trace, found.worst_adaptive

    The cost is proportional to the data, and to `steps + probes` for each matrix, `2 · samples`, and four times
    `ascent`; 0 leaves a measure out. It needs memory for `steps` copies of the weights. Weights, gradients, buffers,
    modes and random numbers are restored, also after an error or Ctrl-C. Measures that depend on the scale of the
    weights cannot compare models: see `Sharpness.is_invariant` and docs/how-to/sharpness.md.

    Args:
        model: The model to measure, in evaluation mode.
        loss_of: The mean loss of a batch by this model, as `find_rho` and the optimisers take it. The Gauss-Newton
            matrix, the accuracy and the PAC-Bayes bound need a `SplitLoss`, such as `classification(model)`.
        batches: Batches that can be read several times: a DataLoader or a list. Means are over examples. For the
            gradient's noise, T and m-sharpness, draw the batches at random, with the size used in training.
        matrices: "hessian", "ggn" or both (default: all that the loss allows).
        top: Number of largest eigenvalues.
        steps: Most steps of Lanczos' method.
        tolerance: Tolerance of the eigenvalues, relative to the largest; 0 makes all steps, for a finer spectral
            density.
        runs: Runs of Lanczos' method, for the spectral density and the effective dimension.
        probes: Random vectors for the trace.
        samples: Pairs of random displacements for the expected sharpness.
        sigma: Their standard deviation σ.
        adaptive_sigma: The same in units of |w|.
        ascent: Gradient steps to the worst point of a ball.
        radius: Radius of the ball.
        adaptive_radius: The same in units of |w|.
        f: TRACER's average, by parameter or by name (default: the batches' mean squared gradient). From an optimiser:
            `{p: x for g in opt.param_groups for p, x in zip(g["params"], opt.average_of(g, g["params"]))}`.
        delta: δ of T.
        start: Weights that do not depend on the data, by name: the prior of the PAC-Bayes bound (default: zeros).
        confidence: Confidence of the bound.
        prior: Variance of the weights' prior in the effective dimension, whose α is 1/(examples · prior) (default: the
            weights' mean square). Eigenvalues far below the largest over `steps`² cannot be told from zero.
        params: Parameters to differentiate by (default: all that are trained).
        examples_of: Returns the number of examples in a batch (default: the length of its tensors).
        train_mode: Keep the model in training mode: batch norm with each batch's statistics, dropout replayed.
        seed: Seed of all random numbers.
        progress: Called with the current task and the share of all work done; True: a line on a terminal.
        merge: Most examples of a batch that is merged from consecutive ones, for the measures that do not depend on the
            size of the batches; 0: never (default: 1,024 on a GPU, 0 elsewhere). It needs a loss that says how, such as
            `classification(model)`, and is not done where merged batches have other outputs.

    Raises:
        ValueError: If an argument cannot be used, or there is no data.
        RuntimeError: If the loss cannot be differentiated (twice), or several processes train.
        FloatingPointError: If the loss is not finite.
    """
    kinds = check_matrices(matrices, loss_of)
    for name, count in {"top": top, "steps": steps, "runs": runs}.items():
        checks.count(name, count)
    for name, count in {"probes": probes, "samples": samples, "ascent": ascent, "seed": seed}.items():
        checks.whole(name, count)
    positive = {"sigma": sigma, "adaptive_sigma": adaptive_sigma, "radius": radius, "adaptive_radius": adaptive_radius}
    for name, number in (positive | ({} if prior is None else {"prior": prior})).items():
        checks.number(name, number, low=0, open_low=True)
    checks.number("tolerance", tolerance, low=0, high=1)
    checks.number("delta", delta, low=0)
    checks.number("confidence", confidence, low=0, high=1, open_low=True, open_high=True)
    settings = Settings(params, examples_of, train_mode, progress, merge)
    with opened(model, loss_of, batches, settings) as objective:
        objective.plan(1 + len(kinds) * (runs * steps + bool(probes)) + 4 * samples + bool(ascent) * (4 * ascent + 1))
        averages = None if f is None else _averages(model, objective, f)
        centre = None if start is None else _start(model, objective, start)
        found, gradient = _first_order(model, objective, averages, delta)
        objective.settle()
        for kind in kinds:
            found[kind] = _spectrum(objective, kind, top, steps, tolerance, runs, probes, seed)
        scales = {"": torch.ones_like(gradient), "_adaptive": objective.weights().abs()}
        if samples:
            found |= _expected(objective, scales, (sigma, adaptive_sigma), samples, seed, centre, confidence)
        if ascent:
            found |= _worst(objective, scales, (radius, adaptive_radius), ascent, gradient, seed)
        prior = prior or float(objective.weights().square().mean())
        if kinds and prior:  # a model of zeros tells of none
            alpha = 1 / (objective.examples * prior)
            found["effective_dimension"] = found[GGN if GGN in kinds else HESSIAN].effective_dimension(alpha)
        numbers = {"steps": steps, "tolerance": tolerance, "probes": probes, "samples": samples, "ascent": ascent}
        return Sharpness(
            **found,
            examples=objective.examples,
            batches=(len(objective.counts), max(objective.counts)),
            parameters=objective.size,
            passes=objective.passes,
            settings={**positive, **numbers, "prior": prior, "train_mode": train_mode, "seed": seed},
        )


def eigenvectors(
    model: nn.Module,
    loss_of: Loss,
    batches: Iterable[Any],
    *,
    matrix: str = HESSIAN,
    top: int = 2,
    steps: int = 40,
    tolerance: float = lanczos.TOLERANCE,
    seed: int = 0,
    settings: Settings | None = None,
) -> tuple[list[float], list[list[Tensor]]]:
    """The largest eigenvalues in falling order, and their unit eigenvectors in the shape of the parameters."""
    check_matrices([matrix], loss_of)
    checks.count("top", top)
    checks.count("steps", steps)
    with opened(model, loss_of, batches, settings) as objective:
        objective.plan(steps)
        objective.doing(f"eigenvectors of the {matrix}", steps)
        made = _krylov(objective, matrix, top, steps, tolerance, seed)
        values, vectors, _ = made.ritz()
        count = min(top, made.steps)
        found = []
        for column in range(made.steps - 1, made.steps - 1 - count, -1):
            vector = torch.zeros_like(made.basis[0])
            for weight, q in zip(vectors[:, column].tolist(), made.basis, strict=True):
                vector.add_(q, alpha=weight)
            found.append(objective.pieces(vector / torch.linalg.vector_norm(vector)))
        return values.flip(0)[:count].tolist(), found


# First derivatives.


def _first_order(
    model: nn.Module, objective: Objective, averages: Tensor | None, delta: float
) -> tuple[dict[str, Any], Tensor]:
    """Loss, accuracy, gradient, its noise and T: one sweep."""
    objective.doing("gradient")
    mean, F = (torch.zeros(objective.size, dtype=objective.dtype, device=objective.home) for _ in range(2))
    inverse = None if averages is None else _inverse(averages, delta)
    each, norms, ratios = [], [], []
    for told, g in objective.gradients():
        each.append(told)
        mean.add_(g, alpha=told.examples)
        g.square_()
        F.add_(g, alpha=told.examples)
        norms.append(g.sum())
        if inverse is not None:
            ratios.append(torch.dot(g, inverse))
    value = objective.mean(each)
    n, batches = objective.examples, len(objective.counts)
    objective.at_weights = value.loss
    norm = float(torch.linalg.vector_norm(mean.div_(n)))
    found: dict[str, Any] = {"loss": value.loss, "accuracy": value.accuracy, "gradient_norm": norm}
    if batches > 1:
        squares = math.fsum(m * x for m, x in zip(objective.counts, objective.read(norms), strict=True))
        # Of batches of nᵢ examples, Σ nᵢ‖gᵢ − g‖²/(batches − 1) is tr Σ on average, whatever the nᵢ.
        noise = max(0.0, (squares - n * norm**2) / (batches - 1))
        found |= {"gradient_noise": noise, "noise_scale": noise / norm**2 if norm else math.inf}
    pairs = list(zip(objective.counts, objective.read(ratios), strict=False))
    error = neighbourhood.weighted_mean(pairs)[1] if pairs else None
    F.div_(n)
    shares = F * (_inverse(F, delta) if inverse is None else inverse)
    layers = _by_layer(model, objective, shares)
    found["trace_ratio"] = TraceRatio(math.fsum(layers.values()), error, layers, delta, averages is None)
    return found, mean


def _inverse(f: Tensor, delta: float) -> Tensor:
    return tensors.inverse([f], delta)[0]


def _by_layer(model: nn.Module, objective: Objective, shares: Tensor) -> dict[str, float]:
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    layers: dict[str, float] = {}
    for index, (p, part) in enumerate(zip(objective.params, objective.pieces(shares), strict=True)):
        name = names.get(p, f"parameter {index}")
        layer = name.rpartition(".")[0] or name
        layers[layer] = layers.get(layer, 0.0) + float(part.sum(dtype=torch.float64))
    return layers


def _averages(model: nn.Module, objective: Objective, f: Mapping[Any, Tensor]) -> Tensor:
    checks.kind("f", f, Mapping, " of parameters, or their names, to tensors")
    return objective.flat(_looked_up("f", model, objective, f))


def _start(model: nn.Module, objective: Objective, start: Mapping[str, Tensor]) -> Tensor:
    checks.kind("start", start, Mapping, " of the parameters' names to tensors, as a state_dict")
    return objective.flat(_looked_up("start", model, objective, start))


def _looked_up(what: str, model: nn.Module, objective: Objective, given: Mapping[Any, Tensor]) -> list[Tensor]:
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    found = []
    for index, p in enumerate(objective.params):
        name = names.get(p, f"parameter {index}")
        x = given[p] if p in given else given.get(name)
        if not isinstance(x, Tensor) or x.shape != p.shape:
            got = tuple(x.shape) if isinstance(x, Tensor) else x
            raise ValueError(f"{what} must hold a tensor of shape {tuple(p.shape)} for {name!r}, got {got}")
        found.append(x)
    return found


# Second derivatives.


def _krylov(objective: Objective, kind: str, top: int, steps: int, tolerance: float, seed: int) -> lanczos.Krylov:
    generator = torch.Generator().manual_seed(seed)
    made = lanczos.lanczos(
        lambda v: objective.products(kind, [v])[0],
        lambda: objective.random(generator),
        objective.size,
        steps,
        top,
        tolerance,
    )
    if made.asymmetry > CROOKED:
        warnings.warn(
            f"products with the {kind} are not symmetric, by {made.asymmetry:.1%} of its largest eigenvalue: a layer's "
            "derivatives are wrong, or the numbers too coarse. Measure in float32",
            stacklevel=2,
        )
    return made


def _spectrum(
    objective: Objective, kind: str, top: int, steps: int, tolerance: float, runs: int, probes: int, seed: int
) -> Spectrum:
    objective.doing(f"eigenvalues of the {kind}", steps * runs)
    made = _krylov(objective, kind, top, steps, tolerance, seed)
    values, _, residuals = (x.flip(-1) for x in made.ritz())
    quadratures = [made.quadrature(tolerance)]
    for run in range(1, runs):
        another = _krylov(objective, kind, top, steps, tolerance, seed + run)
        quadratures.append(another.quadrature(tolerance))
    trace: tuple[float | None, float | None] = (None, None)
    if probes or made.steps == made.size:
        objective.doing(f"trace of the {kind}", 1)
        generator = torch.Generator().manual_seed(seed + runs)
        draw = partial(objective.random, generator, signs=True)
        trace = lanczos.trace(partial(objective.products, kind), draw, made, probes)
    return Spectrum(
        tuple(values[:top].tolist()),
        tuple(residuals[:top].tolist()),
        float(values[-1]),
        float(residuals[-1]),
        *trace,
        tuple((tuple(nodes), tuple(weights)) for nodes, weights in quadratures),
    )


# Around the weights.


def _expected(
    objective: Objective,
    scales: dict[str, Tensor],
    sigmas: tuple[float, float],
    samples: int,
    seed: int,
    centre: Tensor | None,
    confidence: float,
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for (name, scale), sigma in zip(scales.items(), sigmas, strict=True):
        objective.doing("expected sharpness", 2 * samples)
        rises, accuracies = neighbourhood.expected(objective, scale, sigma, samples, seed)
        found[f"expected{name}"] = Estimate(*lanczos.mean_and_error(rises))
        if accuracies and not name:
            found["pac_bayes"] = _bound(objective, accuracies, sigma, centre, confidence)
    return found


def _bound(
    objective: Objective, accuracies: list[float], sigma: float, centre: Tensor | None, confidence: float
) -> PacBayes:
    pairs = zip(accuracies[::2], accuracies[1::2], strict=True)  # of a draw and its negative, which are not independent
    rate, error = lanczos.mean_and_error([1 - (one + other) / 2 for one, other in pairs])
    away = objective.weights() if centre is None else objective.weights() - centre
    distance = float(torch.linalg.vector_norm(away)) ** 2
    return pac_bayes(rate, error, distance, sigma, objective.examples, confidence)


def _worst(
    objective: Objective,
    scales: dict[str, Tensor],
    radii: tuple[float, float],
    ascent: int,
    gradient: Tensor,
    seed: int,
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    loss = objective.at_weights or 0.0
    for (name, scale), radius in zip(scales.items(), radii, strict=True):
        objective.doing("worst point of a ball", ascent)
        found[f"worst{name}"] = Estimate(neighbourhood.worst(objective, scale, radius, ascent, loss, gradient, seed))
    objective.doing("m-sharpness", 2 * ascent + 1, 2 * ascent + 1)
    balls = list(zip(scales.values(), radii, strict=True))
    of_batches = neighbourhood.worst_of_batches(objective, balls, ascent, seed)
    return found | {f"m_worst{name}": Estimate(*each) for name, each in zip(scales, of_batches, strict=True)}
