"""Optimisers with everything at once, drawn at random: step by step each is its slow twin."""

import copy
import random
from dataclasses import dataclass

import pytest
import torch
from torch.nn.functional import cross_entropy

from gtracer import SAM, AdamTracer, AdamWTracer, Clip, FiniteDifference, SGDTracer, Tracer
from gtracer.curvature import micro_batch
from gtracer.experimental import loss_gradient
from support.bases import BASES
from support.batches import Setting, cut
from support.optimizers import with_plain_closure, with_torch_closure, without_closure
from support.problems import PROBLEMS, Problem, make, relative_error
from support.twin import AdamTwin, BaseTwin, SGDTwin, Twin, by_difference, exactly, sharpness

STEPS = 4
STYLES = {"closure": with_plain_closure, "torch's closure": with_torch_closure, "loop": without_closure}
SAMS, ADAMS = ("SAM", "ASAM"), {"AdamTracer": AdamTracer, "AdamWTracer": AdamWTracer}
# Rprop goes by signs, which rounding may turn where a gradient is next to nothing.
OTHERS = sorted(set(BASES) - {"Rprop", "SGD", "Adam", "AdamW"})


@dataclass(frozen=True)
class Configuration:
    """Of one run. Pairs are of the two parameter groups."""

    optimizer: str
    problem: str
    lr: tuple[float, float]
    own: dict  # the base optimiser's other arguments
    decay: tuple[float, float]
    rho: tuple[float, float]
    delta: tuple[float, float]
    beta: tuple[float, float]
    f0: tuple[float | str, float | str]
    engine: str  # exact, forward or central; SAM has none
    radius: float
    interval: int
    reuse: float | None
    clip: Clip | None
    takes: str  # a batch in parts: whole or each, as `penalty` says, or micro-batches of the estimator
    parts: tuple[int, ...]  # their sizes, twelve together
    style: str  # how a step without parts is handed over
    maximize: bool
    frozen: bool  # whether the first parameter is


def drawn(seed: int) -> Configuration:
    """The configuration of this number."""
    chance = random.Random(seed)
    pick, maybe = chance.choice, lambda share: chance.random() < share

    def between(low, high):
        return low * (high / low) ** chance.random()

    def pair(draw):
        first = draw()
        return (first, draw() if maybe(0.4) else first)

    optimizer = pick(["SGDTracer", "AdamTracer", "AdamWTracer", pick(OTHERS), "SAM", "ASAM"])
    is_sam, is_adam, is_sgd = (optimizer in some for some in (SAMS, ADAMS, ("SGDTracer", *SAMS)))
    own = {}
    if is_sgd and maybe(0.7):
        own["momentum"] = pick([0.5, 0.9])
        own |= pick([{}, {"nesterov": True}, {"dampening": 0.3}])
    if is_adam:
        own = {"betas": (pick([0.0, 0.5, 0.9]), pick([0.5, 0.9, 0.999])), "eps": pick([1e-3, 1e-2])}
        if maybe(0.2):
            own["average"] = "loss"
    takes = pick(["", "", "", "whole", "each", "micro-batches"])
    if (is_sam and takes == "micro-batches") or "average" in own:
        takes = ""
    parts = ()
    if takes == "micro-batches":
        size = pick([3, 4, 5, 6])
        parts = tuple(min(size, 12 - at) for at in range(0, 12, size))
    elif takes:
        parts = pick([(6, 6), (4, 4, 4), (7, 5), (1, 11), (2, 3, 7)])
    engine = "sharpness" if is_sam else pick(["exact", "forward", "central"])
    style = pick(list(STYLES)) if engine != "exact" and not takes else "closure"
    interval = pick([1, 1, 2, 3])
    clip = None
    if maybe(0.4):
        bounds = pick([{"norm": between(0.05, 2)}, {"value": between(0.01, 0.5)}, {"norm": 0.5, "value": 0.05}])
        clip = Clip(**bounds, of=pick(["total", "loss"]))
    return Configuration(
        optimizer=optimizer,
        problem="batches" if takes else pick([problem.__name__ for problem in PROBLEMS]),
        lr=pair(lambda: between(1e-3, 0.05)),
        own=own,
        decay=pair(lambda: pick([0.0, 1e-3, 0.1])) if is_sgd or is_adam else (0.0, 0.0),
        rho=pair(lambda: pick([0.0, between(0.01, 0.3)]) if is_sam else pick([0.0, *[between(1e-4, 0.03)] * 3])),
        delta=pair(lambda: between(0.02, 5)),
        beta=pair(lambda: pick([0.0, 0.1, 0.5, 1.0])),
        f0=pair(lambda: between(0.01, 3)) if maybe(0.5) else ("first-gradient", "first-gradient"),
        engine=engine,
        radius=between(1e-3, 0.1),
        interval=interval,
        reuse=pick([None, 0.0, 0.5, 1.0]) if interval > 1 and not is_sam else None,
        clip=clip,
        takes=takes,
        parts=parts,
        style=style,
        maximize=maybe(0.15) and (is_sgd or is_adam),
        frozen=maybe(0.15),
    )


def problem_of(config: Configuration) -> tuple[Problem, list]:
    """With batches of its own where they are taken in parts."""
    if config.problem != "batches":
        return make({problem.__name__: problem for problem in PROBLEMS}[config.problem]), []
    setting = Setting()
    model = copy.deepcopy(setting.start)
    batches = list(zip(setting.x, setting.y, strict=True))
    return Problem(model, lambda x, y: cross_entropy(model(x), y)), batches


def groups_of(params: list, **pairs) -> list[dict]:
    """The first half of the parameters, and the others."""
    half = (len(params) + 1) // 2
    halves = [part for part in (params[:half], params[half:]) if part]
    return [{"params": part} | {k: v[i] for k, v in pairs.items()} for i, part in enumerate(halves)]


def ours(config: Configuration, model):
    """The optimiser, as a user makes it."""
    own = {k: v for k, v in config.own.items() if k != "average"}
    base_of = {"lr": config.lr, "weight_decay": config.decay}
    if config.maximize:
        own["maximize"] = True
    extra = {"interval": config.interval, "clip": config.clip, "model": model}
    params = list(model.parameters())
    if config.optimizer in SAMS:
        base = torch.optim.SGD(groups_of(params, rho=config.rho, **base_of), **own)
        return SAM(base, adaptive=config.optimizer == "ASAM", eta=0.1, **extra)
    difference = FiniteDifference(config.radius, central=config.engine == "central")
    extra["engine"] = "exact" if config.engine == "exact" else difference
    if config.takes == "micro-batches":
        extra["curvature"] = micro_batch(config.parts[0])
    if config.own.get("average"):
        extra["average"] = loss_gradient
    extra["reuse"] = config.reuse
    of_tracer = {"rho": config.rho, "delta": config.delta, "f0": config.f0}
    if config.optimizer in ADAMS:
        return ADAMS[config.optimizer](groups_of(params, **of_tracer, **base_of), **own, **extra)
    of_tracer["beta"] = config.beta
    if config.optimizer == "SGDTracer":
        return SGDTracer(groups_of(params, **of_tracer, **base_of), **own, **extra)
    base = BASES[config.optimizer](groups_of(params, lr=config.lr))
    opt = Tracer(base, rho=0.0, **extra)
    for group, *values in zip(opt.param_groups, *of_tracer.values(), strict=False):
        group |= {f"gtracer_{k}" if f"gtracer_{k}" in group else k: v for k, v in zip(of_tracer, values, strict=True)}
    return opt


def twin_of(config: Configuration, model) -> Twin:
    """The same, with one number for each parameter in place of groups."""
    params = list(model.parameters())
    half = (len(params) + 1) // 2
    trained = [i for i, p in enumerate(params) if p.requires_grad]

    def spread(both):
        return [both[int(i >= half)] for i in trained]

    own = {k: v for k, v in config.own.items() if k != "average"}
    numbers = {"lr": spread(config.lr), "weight_decay": spread(config.decay)}
    f0 = None if config.f0[0] == "first-gradient" else spread(config.f0)
    weights = [params[i] for i in trained]
    if config.optimizer in ADAMS:
        fed = "loss" if config.own.get("average") else "total"
        decoupled = config.optimizer == "AdamWTracer"
        updates = AdamTwin(weights, f0=f0, second_moment=fed, decoupled=decoupled, **own, **numbers)
    elif config.optimizer in ("SGDTracer", *SAMS):
        updates = SGDTwin(weights, f0=f0, beta=spread(config.beta), **own, **numbers)
    else:
        groups = [{"params": [p], "lr": lr} for p, lr in zip(weights, numbers["lr"], strict=True)]
        updates = BaseTwin(BASES[config.optimizer](groups), beta=spread(config.beta), f0=f0)
    added = {
        "exact": exactly,
        "forward": by_difference(config.radius, False),
        "central": by_difference(config.radius, True),
        "sharpness": sharpness(config.optimizer == "ASAM", 0.1),
    }[config.engine]
    return Twin(
        updates,
        added,
        rho=spread(config.rho),
        delta=spread(config.delta),
        interval=config.interval,
        reuse=config.reuse,
        clip=config.clip,
        sign=-1.0 if config.maximize else 1.0,
    )


def follow(config: Configuration) -> int:
    """Compare the weights after every step, and f at the end; how many steps that were."""
    (mine, batches), (other, _) = problem_of(config), problem_of(config)
    for made in (mine, other):
        first, *more = made.model.parameters()
        first.requires_grad_(not (config.frozen and more))
    opt, twin = ours(config, mine.model), twin_of(config, other.model)
    for i in range(STEPS):
        if batches:
            x, y = batches[i]
            pieces = [(x, y)] if config.takes == "whole" else cut(x, y, *config.parts)
            twin.step([(len(b) / len(y), lambda a=a, b=b: other.loss_of(a, b)) for a, b in pieces])
        else:
            twin.step([(1.0, lambda i=i: seeded(i, other.loss_of))])
        if not all(w.isfinite().all() and w.abs().max() < 100 for w in other.weights()):
            return i  # it diverges, and rounding with it
        torch.manual_seed(i)
        if not batches:
            STYLES[config.style](opt, lambda i=i: mine.loss_of(i))
        elif config.takes == "micro-batches":
            opt.step(mine.loss_of, x, y)
        else:
            opt.step(mine.loss_of, batches=cut(x, y, *config.parts), penalty=config.takes)
        error = relative_error(mine.weights(), other.weights())
        assert error < 1e-8, f"step {i}: {error}"
    if config.optimizer not in SAMS:
        params = [p for p in mine.model.parameters() if p.requires_grad]
        key = "exp_avg_sq" if isinstance(twin.updates, AdamTwin) else "f"
        expected = twin.updates.v if key == "exp_avg_sq" else twin.updates.f
        assert relative_error([opt.state[p][key] for p in params], expected) < 1e-7
    return STEPS


def seeded(i, loss_of):
    """With the same random numbers in every pass of a step."""
    torch.manual_seed(i)
    return loss_of(i)


def compare(seeds) -> None:
    steps = 0
    for seed in seeds:
        config = drawn(seed)
        try:
            steps += follow(config)
        except Exception as error:
            pytest.fail(f"configuration {seed}: {error!r}\n{config}")
    assert steps > 0.9 * STEPS * len(seeds)  # few of them diverge


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_forty(first):
    compare(range(first, first + 10))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 2000, 100))
def test_two_thousand(first):
    compare(range(first, first + 100))
