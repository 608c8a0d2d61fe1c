"""What is counted in a scope is forgotten after it, in the same containers."""

from collections import Counter, defaultdict, deque

import pytest
import torch
from torch import nn

from gtracer.integrations.records import MANY, held


class Host:
    def __init__(self):
        self.number, self.text, self.nothing, self.losses = 1, "a", None, [0.5]
        self.metrics = {"train": defaultdict(list, loss=[1.0]), "eval": defaultdict(list)}
        self.last, self.seen, self.counts = deque([1, 2], maxlen=2), {1}, Counter("ab")
        self.total, self.data = torch.ones(2), list(range(3 * MANY))


def touch(host):
    host.number, host.text, host.nothing, host.new = 2, "b", 0, 1
    host.losses.append(2.0)
    host.metrics["train"]["loss"].append(2.0)
    host.metrics["train"]["more"].append(2.0)
    host.metrics["other"] = {}
    host.last.append(3)
    host.seen.add(2)
    host.counts.update("b")
    host.total += 1


def told(host):
    return {name: x for name, x in vars(host).items() if name not in ("total", "new")}


@pytest.mark.parametrize("fails", [False, True])
def test_records_are_as_they_were(fails):
    host, twin = Host(), Host()
    there = dict(vars(host))
    inner = host.metrics["train"], host.metrics["train"]["loss"]
    try:
        with held(host):
            touch(host)
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert told(host) == told(twin)
    assert torch.equal(host.total, twin.total)
    assert all(vars(host)[name] is x for name, x in there.items())
    assert (host.metrics["train"], host.metrics["train"]["loss"]) == inner
    assert host.metrics["train"] is inner[0]
    assert host.metrics["train"]["loss"] is inner[1]
    touch(host)
    assert host.metrics["train"] == {"loss": [1.0, 2.0], "more": [2.0]}


def test_weights_and_buffers_of_modules_are_left_alone():
    net = nn.BatchNorm1d(2)
    net.count = 1
    with held(net):
        net(torch.randn(4, 2))
        net.count += 1
        with torch.no_grad():
            net.weight += 1
    assert net.num_batches_tracked == 1
    assert net.count == 1
    assert torch.equal(net.weight, torch.full((2,), 2.0))


def test_metrics_inside_a_module():
    torchmetrics = pytest.importorskip("torchmetrics")
    net = nn.Module()
    net.metrics = torchmetrics.MetricCollection(
        {"mean": torchmetrics.MeanMetric(), "all": torchmetrics.CatMetric(), "max": torchmetrics.MaxMetric()}
    )
    net.metrics.update(torch.tensor([1.0]))
    with held(net):
        net.metrics.update(torch.tensor([5.0]))
        net.metrics.compute()
    net.metrics.update(torch.tensor([2.0]))
    found = net.metrics.compute()
    assert found["mean"] == 1.5
    assert found["max"] == 2
    assert found["all"].tolist() == [1.0, 2.0]
