"""Every kind of optimiser, and what one holds."""

import pytest
import torch

from gtracer import SAM, AdamTracer, AdamWTracer, FiniteDifference, SGDTracer, Tracer

MAKERS = {
    "sgd": lambda p, **k: SGDTracer(p, lr=0.1, momentum=0.9, rho=0.01, **k),
    "central": lambda p, **k: SGDTracer(p, lr=0.1, rho=0.01, engine=FiniteDifference(central=True), **k),
    "adam": lambda p, **k: AdamTracer(p, lr=0.01, rho=0.01, **k),
    "adamw": lambda p, **k: AdamWTracer(p, lr=0.01, rho=0.01, **k),
    "rmsprop": lambda p, **k: Tracer(torch.optim.RMSprop(p, lr=0.01), rho=0.01, **k),
    "sam": lambda p, **k: SAM(torch.optim.SGD(p, lr=0.1, momentum=0.9), rho=0.05, **k),
    "asam": lambda p, **k: SAM(torch.optim.SGD(p, lr=0.1), rho=0.5, adaptive=True, **k),
}


every_optimiser = pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)


def snapshot(opt):
    """All that `state_dict` has, copied."""
    state = opt.state_dict()
    tensors = {
        (i, k): v.clone() if isinstance(v, torch.Tensor) else v for i, s in state["state"].items() for k, v in s.items()
    }
    return tensors, [dict(g) for g in state["param_groups"]]


def same(a, b):
    return (
        a[1] == b[1]
        and a[0].keys() == b[0].keys()
        and all(torch.equal(v, b[0][k]) if isinstance(v, torch.Tensor) else v == b[0][k] for k, v in a[0].items())
    )


def with_plain_closure(opt, loss_of):
    return opt.step(loss_of)


def with_torch_closure(opt, loss_of):
    def closure():
        opt.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    return opt.step(closure)


def without_closure(opt, loss_of):
    opt.zero_grad()
    loss = loss_of()
    loss.backward()
    for _ in range(2 if opt.is_central else 1):
        with opt.perturbed():
            loss_of().backward()
    opt.step()
    return loss
