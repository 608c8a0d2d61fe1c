"""A small training, and what it leaves: for one process, or its share of one for each of several."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from gtracer import SAM, AdamWTracer, SGDTracer

OPTIMIZERS = {
    "SGDTracer": lambda params, **own: SGDTracer(params, lr=0.1, momentum=0.9, rho=0.02, delta=0.05, **own),
    "AdamWTracer": lambda params, **own: AdamWTracer(params, lr=0.01, rho=0.02, delta=0.05, **own),
    "SAM": lambda params, **own: SAM(torch.optim.SGD(params, lr=0.1, momentum=0.9), rho=0.1, **own),
}


STEPS, BATCH = 4, 12


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batches():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, BATCH, 5, dtype=torch.float64, generator=generator)
    return list(zip(x, torch.randint(3, (STEPS, BATCH), generator=generator), strict=True))


def flat(tensors):
    return torch.cat(
        [t.detach().full_tensor().flatten() if isinstance(t, DTensor) else t.detach().flatten() for t in tensors]
    )


def averages(opt):
    """f, whatever it is called."""
    return [value for state in opt.state.values() for key, value in sorted(state.items()) if key in ("f", "exp_avg_sq")]


def trained(model, opt, rows=slice(None), **words):
    for x, y in batches():
        opt.step(lambda x, y: cross_entropy(model(x), y), x[rows], y[rows], **words)
    return flat(model.parameters()), flat(averages(opt)) if averages(opt) else torch.zeros(0)


def alone(name, make=network, **own):
    model = make()
    return trained(model, OPTIMIZERS[name](model.parameters(), **own))


def half(rank):
    return slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)


def agree(found, expected, tolerance=1e-9):
    for weights, f in found:
        torch.testing.assert_close(weights, expected[0], rtol=tolerance, atol=1e-12)
        torch.testing.assert_close(f, expected[1], rtol=tolerance, atol=1e-12)
    assert all(torch.equal(found[0][i], other[i]) for other in found for i in (0, 1))
