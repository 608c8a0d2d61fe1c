"""Checkpoints of the version before (0.1.0, commit 336ad16) load and go on as they would have gone on there.

`fixtures/checkpoints-0.1.0.pt.xz` was written by that version, for each of the optimisers below: model and optimiser
after five steps of `train`, and after five more from seed 8; with what `plain` came to on that machine.
"""

import io
import lzma

import pytest
import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy

from gtracer import SAM, AdamTracer, AdamWTracer, Clip, FiniteDifference, SGDTracer, Tracer
from gtracer.curvature import micro_batch, per_example
from gtracer.experimental import PreviousStep, loss_gradient
from support.places import TESTS

FIXTURE = TESTS / "fixtures" / "checkpoints-0.1.0.pt.xz"
CENTRAL = FiniteDifference(0.02, central=True)
CASES = {
    "sgd": lambda p, m: SGDTracer(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-3, rho=0.01, model=m),
    "sgd, central": lambda p, m: SGDTracer(p, lr=0.1, rho=0.01, engine=CENTRAL, model=m),
    "sgd, exact": lambda p, m: SGDTracer(p, lr=0.1, momentum=0.9, rho=0.01, engine="exact", model=m),
    "sgd, reused": lambda p, m: SGDTracer(p, lr=0.1, momentum=0.9, rho=0.01, interval=3, reuse=0.8, model=m),
    "sgd, previous": lambda p, m: SGDTracer(p, lr=0.1, rho=0.01, reuse=PreviousStep(), model=m),
    "sgd, scale-free, clipped": lambda p, m: SGDTracer(
        p, lr=0.1, rho=0.01, scale_free=True, clip=Clip(norm=0.5), model=m
    ),
    "sgd, per example": lambda p, m: SGDTracer(p, lr=0.1, rho=0.01, curvature=per_example, model=m),
    "sgd, micro-batches": lambda p, m: SGDTracer(p, lr=0.1, rho=0.01, curvature=micro_batch(3), model=m),
    "adam": lambda p, m: AdamTracer(p, lr=0.01, rho=0.01, weight_decay=0.01, model=m),
    "adam, loss": lambda p, m: AdamTracer(p, lr=0.01, rho=0.01, f0=0.5, average=loss_gradient, model=m),
    "adamw": lambda p, m: AdamWTracer(p, lr=0.01, rho=0.01, model=m),
    "rmsprop": lambda p, m: Tracer(optim.RMSprop(p, lr=0.01), rho=0.01, model=m),
    "adadelta": lambda p, m: Tracer(optim.Adadelta(p), rho=0.01, model=m),
    "sam": lambda p, m: SAM(optim.SGD(p, lr=0.1, momentum=0.9), rho=0.05, model=m),
    "asam": lambda p, m: SAM(optim.Adam(p, lr=0.01), rho=0.5, adaptive=True, interval=2, model=m),
}


@pytest.fixture(scope="module")
def written():
    return torch.load(io.BytesIO(lzma.decompress(FIXTURE.read_bytes())), weights_only=True)


def net(norm):
    torch.manual_seed(0)
    between = [nn.BatchNorm1d(7)] if norm else []
    return nn.Sequential(nn.Linear(5, 7), *between, nn.Tanh(), nn.Dropout(0.25), nn.Linear(7, 3)).double()


def train(model, opt, steps):
    generator = torch.Generator()
    for step in steps:
        generator.manual_seed(step)
        x = torch.randn(12, 5, dtype=torch.double, generator=generator)
        y = torch.randint(3, (12,), generator=generator)
        opt.step(lambda x, y: cross_entropy(model(x), y), x, y)


def plain():
    """Weights that torch alone has trained: whether this machine's arithmetic is that of the one that wrote them."""
    model = net(norm=True)
    opt, generator = optim.SGD(model.parameters(), lr=0.1), torch.Generator()
    for step in range(10):
        generator.manual_seed(step)
        torch.manual_seed(step)
        x = torch.randn(12, 5, dtype=torch.double, generator=generator)
        y = torch.randint(3, (12,), generator=generator)
        opt.zero_grad()
        cross_entropy(model(x), y).backward()
        opt.step()
    return model.state_dict()


def test_every_case_is_there(written):
    assert set(written["cases"]) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_it_goes_on(name, written):
    case = written["cases"][name]
    model = net(norm="per example" not in name)
    opt = CASES[name](model.parameters(), model)
    model.load_state_dict(case["checkpoint"]["model"])
    opt.load_state_dict(case["checkpoint"]["optimizer"])
    torch.manual_seed(8)
    train(model, opt, range(5, 10))
    found, expected = model.state_dict(), case["later"]["model"]
    for i, state in case["later"]["state"].items():
        found |= {f"{i} {key}": value for key, value in opt.state_dict()["state"][i].items()}
        expected = expected | {f"{i} {key}": value for key, value in state.items()}
    assert found.keys() == expected.keys()
    # To the bit, where the arithmetic is the same: on another processor a product of matrices may
    # round otherwise, which a difference of gradients makes larger.
    same = all(torch.equal(written["plain"][key], value) for key, value in plain().items())
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0 if same else 1e-5, atol=0 if same else 1e-7, msg=key)
