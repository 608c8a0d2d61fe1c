"""Fabric wraps the optimiser in a class that inherits from it: scopes and closures go to the optimiser itself."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer import SAM, FiniteDifference, SGDTracer

lightning = pytest.importorskip("lightning")

pytestmark = pytest.mark.filterwarnings("ignore")
MAKERS = {
    "sgd": lambda p, **k: SGDTracer(p, lr=0.1, momentum=0.9, rho=0.05, **k),
    "central": lambda p, **k: SGDTracer(p, lr=0.1, rho=0.05, engine=FiniteDifference(central=True), **k),
    "sam": lambda p, **k: SAM(torch.optim.SGD(p, lr=0.1), rho=0.05, **k),
}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))


def batches():
    torch.manual_seed(1)
    return list(zip(torch.randn(4, 12, 5), torch.randint(3, (4, 12)), strict=True))


def by_scope(opt, backward, loss_of):
    opt.zero_grad()
    backward(loss_of())
    for _ in range(1 + opt.is_central):
        with opt.perturbed():
            backward(loss_of())
    opt.step()


def by_closure(opt, backward, loss_of):
    def closure():
        opt.zero_grad()
        loss = loss_of()
        backward(loss)
        return loss

    opt.step(closure)


def state(model):
    return [t.detach() for t in model.state_dict().values()]


@pytest.mark.parametrize("step", [by_scope, by_closure])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_plain_loop(make, step):
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    net, twin = network(), network()
    opt, expected = make(net.parameters(), model=net), make(twin.parameters(), model=twin)
    model, wrapped = fabric.setup(net, opt)
    for i, (x, y) in enumerate(batches()):
        torch.manual_seed(i)
        step(wrapped, fabric.backward, lambda x=x, y=y: cross_entropy(model(x), y))
        torch.manual_seed(i)
        expected.step(lambda x=x, y=y: cross_entropy(twin(x), y))
    torch.testing.assert_close(state(net), state(twin))
    assert wrapped.stats.penalty_ratio == opt.stats.penalty_ratio > 0
    assert wrapped.steps == 4
