"""Optimisers: TRACER on SGD, Adam and any torch optimiser, SAM, and schedules of ρ."""

from gtracer.optim.adam import AdamTracer, AdamWTracer
from gtracer.optim.engines import Exact, FiniteDifference
from gtracer.optim.joint import joint_perturbed, joint_step
from gtracer.optim.optimizer import TwoPassOptimizer
from gtracer.optim.sam import SAM
from gtracer.optim.schedule import RhoScheduler, linear_warmup
from gtracer.optim.stats import NonFiniteError, Stats
from gtracer.optim.tracer import SGDTracer, Tracer
from gtracer.optim.transforms import Clip

__all__ = [
    "SAM",
    "AdamTracer",
    "AdamWTracer",
    "Clip",
    "Exact",
    "FiniteDifference",
    "NonFiniteError",
    "RhoScheduler",
    "SGDTracer",
    "Stats",
    "Tracer",
    "TwoPassOptimizer",
    "joint_perturbed",
    "joint_step",
    "linear_warmup",
]
