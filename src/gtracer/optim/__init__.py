"""Optimisers: TRACER on SGD, Adam and any torch optimiser, SAM, and schedules of ρ."""

from gtracer.optim.adam import AdamTracer, AdamWTracer
from gtracer.optim.clip import Clip
from gtracer.optim.sam import SAM
from gtracer.optim.schedule import RhoScheduler, linear_warmup
from gtracer.optim.stats import Stats
from gtracer.optim.tracer import SGDTracer, Tracer
from gtracer.optim.two_pass import NonFiniteError

__all__ = [
    "SAM",
    "AdamTracer",
    "AdamWTracer",
    "Clip",
    "NonFiniteError",
    "RhoScheduler",
    "SGDTracer",
    "Stats",
    "Tracer",
    "linear_warmup",
]
