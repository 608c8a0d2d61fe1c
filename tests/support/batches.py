"""A small net in float64 with batches for it, and an optimiser of every kind that takes them in parts."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer import SAM, AdamWTracer, SGDTracer, Tracer

TRACER = {"rho": 0.02, "delta": 0.05}


OPTIMIZERS = {
    "SGDTracer": lambda params, **own: SGDTracer(params, lr=0.1, momentum=0.9, **TRACER, **own),
    "AdamWTracer": lambda params, **own: AdamWTracer(params, lr=0.01, **TRACER, **own),
    "Tracer": lambda params, **own: Tracer(torch.optim.RMSprop(params, lr=0.01), **TRACER, **own),
    "SAM": lambda params, **own: SAM(torch.optim.SGD(params, lr=0.1, momentum=0.9), rho=0.1, **own),
}


everyone = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


class Setting:
    """A small net in float64, and batches of 12 for it."""

    def __init__(self, dtype=torch.float64, *layers):
        torch.manual_seed(0)
        self.start = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), *layers, nn.Linear(7, 3)).to(dtype)
        self.x, self.y = torch.randn(4, 12, 5, dtype=dtype), torch.randint(3, (4, 12))

    def weights(self, make, step, **own):
        """After four steps, `step(opt, loss_of, x, y)` each."""
        model = copy.deepcopy(self.start)
        opt = make(model.parameters(), **own)
        torch.manual_seed(1)
        for x, y in zip(self.x, self.y, strict=True):
            step(opt, lambda x, y: cross_entropy(model(x), y), x, y)
        return nn.utils.parameters_to_vector(model.parameters()).detach()


def plain(opt, loss_of, x, y):
    return opt.step(loss_of, x, y)


def cut(x, y, *sizes):
    return list(zip(x.split(sizes), y.split(sizes), strict=True))
