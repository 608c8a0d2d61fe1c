"""How sharp a minimum is: eigenvalues, traces, worst cases and landscapes of the loss around the weights."""

from gtracer.sharpness.landscape import Line, Surface, between, filter_normalised, line, plane
from gtracer.sharpness.losses import SplitLoss, classification, concatenated
from gtracer.sharpness.measurement import eigenvectors, measure
from gtracer.sharpness.model import Settings
from gtracer.sharpness.result import Estimate, Row, Sharpness, Spectrum, TraceRatio

__all__ = [
    "Estimate",
    "Line",
    "Row",
    "Settings",
    "Sharpness",
    "Spectrum",
    "SplitLoss",
    "Surface",
    "TraceRatio",
    "between",
    "classification",
    "concatenated",
    "eigenvectors",
    "filter_normalised",
    "line",
    "measure",
    "plane",
]
