"""skorch steps its optimiser with a closure that calls backward(): a net of skorch's takes TRACER as any optimiser."""

import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer import Clip, SGDTracer

skorch = pytest.importorskip("skorch")

from skorch.callbacks import GradientNormClipping  # noqa: E402

from gtracer.integrations.skorch import TracerCallback  # noqa: E402

BATCH = 16


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.head = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.body(x))))


def data():
    x = np.random.RandomState(0).randn(4 * BATCH, 5).astype("float32")
    return x, (x.sum(1) > 0).astype("int64")


def fitted(*callbacks, **own):
    net = skorch.NeuralNetClassifier(
        Net,
        criterion=nn.CrossEntropyLoss,
        optimizer=SGDTracer,
        optimizer__rho=0.05,
        lr=0.1,
        max_epochs=2,
        batch_size=BATCH,
        train_split=None,
        verbose=0,
        callbacks=list(callbacks),
        **own,
    )
    return net.fit(*data())


@pytest.mark.parametrize("clip", [None, Clip(norm=0.1)])
@pytest.mark.parametrize("told", [True, False])
def test_the_plain_loop(clip, told):
    """Weights, statistics, and the losses at the weights of the steps."""
    net, twin = fitted(*([TracerCallback()] if told else []), optimizer__clip=clip), Net()
    opt, losses = SGDTracer(twin.parameters(), lr=0.1, rho=0.05, clip=clip, model=twin if told else None), []
    for _ in range(2):
        for x, y in zip(*(torch.tensor(t).split(BATCH) for t in data()), strict=True):
            losses.append(opt.step(lambda x, y: cross_entropy(twin(x), y), x, y).item())
    torch.testing.assert_close(net.module_.state_dict(), twin.state_dict())
    found = [batch["train_loss"] for epoch in net.history for batch in epoch["batches"]]
    assert found == pytest.approx(losses)


def test_its_clipping_is_refused():
    with pytest.raises(RuntimeError, match=r"clip=gtracer\.Clip"):
        fitted(("clip", GradientNormClipping(0.1)))


def test_the_optimiser_is_told_how_long_an_epoch_is():
    net = fitted(TracerCallback())
    assert net.optimizer_.steps_per_epoch == 4
    assert net.get_params()["optimizer"] is SGDTracer  # it can be cloned
    pickle.loads(pickle.dumps(net)).partial_fit(*data())


def test_other_optimisers_may_have_the_callback():
    words = {"criterion": nn.CrossEntropyLoss, "max_epochs": 1, "verbose": 0, "callbacks": [TracerCallback()]}
    skorch.NeuralNetClassifier(Net, train_split=None, **words).fit(*data())
