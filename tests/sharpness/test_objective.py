"""What a measurement leaves behind: nothing. What it refuses, and what it does with any kind of batches."""

import copy
import os
import random
import signal

import numpy
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from gtracer.sharpness import SplitLoss, classification, line, measure
from gtracer.sharpness.progress import Telling
from support.dense import batches, matrices

FEW = {"top": 1, "steps": 3, "probes": 2, "samples": 1, "ascent": 2, "progress": False}


class Net(nn.Module):
    """Batch norm, dropout, and a buffer that every pass counts up."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3))
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return self.inner(x)


@pytest.fixture
def net():
    torch.manual_seed(0)
    model = Net().double()
    model.inner[1].eval()  # modes of its own
    cross_entropy(model(torch.randn(7, 5).double()), torch.randint(3, (7,))).backward()
    model.inner[4].bias.grad = None
    return model


def everything(model):
    return {
        "state": copy.deepcopy(model.state_dict()),
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "places": [(p.data_ptr(), None if p.grad is None else id(p.grad)) for p in model.parameters()],
        "modes": [m.training for m in model.modules()],
        "random": (torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()),
        "handler": signal.getsignal(signal.SIGINT),
    }


torch_equal = torch.testing.assert_close


@pytest.mark.parametrize("train_mode", [False, True])
def test_everything_is_as_it_was(net, train_mode):
    given, before = batches(), everything(net)
    found = measure(net, classification(net), given, train_mode=train_mode, **FEW)
    assert found.hessian.top is not None
    same(everything(net), before)


def same(found, expected):
    assert found.keys() == expected.keys()
    for name in ("places", "modes", "handler"):
        assert found[name] == expected[name], name
    torch_equal(found["state"], expected["state"], rtol=0, atol=0)
    for a, b in zip(found["grads"], expected["grads"], strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
    assert torch.equal(found["random"][0], expected["random"][0])
    assert found["random"][1:] == expected["random"][1:]


def failing(net, at, failure):
    """A loss that fails in its n-th call."""
    calls = [0]
    plain = classification(net)

    def loss_on(outputs, batch):
        calls[0] += 1
        if calls[0] == at:
            failure()
        return plain.loss_on(outputs, batch)

    return SplitLoss(plain.outputs_of, loss_on), calls


def test_after_an_error_too(net):
    """At any call, so also at displaced weights."""
    given, before = batches(), everything(net)
    loss_of, calls = failing(net, -1, None)
    measure(net, loss_of, given, **FEW)
    total = calls[0]

    def fail():
        torch.rand(3)
        random.random()
        raise RuntimeError("the network is down")

    for at in range(1, total + 1, 3):
        with pytest.raises(RuntimeError, match="the network is down"):
            measure(net, failing(net, at, fail)[0], given, **FEW)
        same(everything(net), before)


def test_after_ctrl_c_too(net):
    given, before = batches(), everything(net)

    def interrupt():
        return os.kill(os.getpid(), signal.SIGINT)

    for at in (1, 8, 40):
        with pytest.raises(KeyboardInterrupt):
            measure(net, failing(net, at, interrupt)[0], given, **FEW)
        same(everything(net), before)


def test_under_no_grad_and_in_any_mode_the_same_numbers(net):
    given = batches()
    found = measure(net, classification(net), given, **FEW)
    with torch.no_grad():
        assert measure(net.eval(), classification(net), given, **FEW) == found


def test_the_seed_decides_all(net):
    given = batches()
    torch.manual_seed(5)
    found = measure(net, classification(net), given, seed=3, **FEW)
    torch.manual_seed(6)
    assert measure(net, classification(net), given, seed=3, **FEW) == found
    assert measure(net, classification(net), given, seed=4, **FEW).expected != found.expected


def test_a_shuffling_loader_gives_the_same_batches_in_every_sweep(net):
    """Else products would be of another matrix each time, as m-sharpness' batches are."""
    x, y = (torch.cat(part) for part in zip(*batches(), strict=True))
    given = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    own = torch.Generator().manual_seed(3)
    other = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, generator=own)
    dense = matrices(net, [(x, y)])[0]
    for loader in (given, other):
        state = own.get_state()
        found = measure(net, classification(net), loader, **FEW | {"steps": 40, "top": 2})
        assert found.top_eigenvalue == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=1e-3)
        assert torch.equal(own.get_state(), state)


def test_dropout_is_replayed_in_training_mode(net):
    """The function of the weights is one: its Hessian's products are symmetric, which those of two are not."""
    net.inner[2].p = 0.5
    given, every = batches(), {"train_mode": True, "params": list(net.inner[0].parameters()), "steps": 60}
    one, other = (
        measure(net, classification(net), given, **FEW | every | {"seed": seed, "tolerance": 0.0}) for seed in (0, 9)
    )
    assert one.hessian.trace_error == other.hessian.trace_error == 0
    assert one.trace == pytest.approx(other.trace, rel=1e-9)
    assert one.hessian.runs[0][0] == pytest.approx(other.hessian.runs[0][0], abs=1e-9)


def test_a_loss_that_changes_from_sweep_to_sweep_is_refused(net):
    generator = torch.Generator().manual_seed(0)  # nobody else knows it

    def loss_of(batch):
        return cross_entropy(net(batch[0] + torch.randn(5, generator=generator).double()), batch[1])

    with pytest.raises(RuntimeError, match=r"was \d.* and is \d.* now: batches or loss_of change"):
        measure(net, loss_of, batches(), **FEW)


def test_batches_of_many_kinds(net):
    x, y = torch.randn(6, 5).double(), torch.randint(3, (6,))

    def loss_of(batch):
        return cross_entropy(net(batch["x"]), batch["more"][0])

    as_mapping = [{"x": x[:4], "more": [y[:4]], "scale": torch.tensor(1.0)}, {"x": x[4:], "more": [y[4:]], "scale": 2}]
    found = measure(net, loss_of, as_mapping, **FEW)
    assert found.examples == 6
    plain = measure(net, lambda b: cross_entropy(net(b[0]), b[1]), [(x[:4], y[:4]), (x[4:], y[4:])], **FEW)
    assert found == plain


def test_examples_can_be_counted_by_the_caller(net):
    """Words, say, where sentences are the rows: the mean is over what is counted."""
    given = batches()

    def loss_of(batch):
        return cross_entropy(net(batch[0]), batch[1])

    options = {"matrices": [], "samples": 0, "ascent": 0, "progress": False}
    each = [measure(net, loss_of, [batch], **options).loss for batch in given]
    found = measure(net, loss_of, given, examples_of=lambda batch: 1, **options)
    assert found.loss == pytest.approx(sum(each) / 3)
    assert found.examples == 3


def test_unused_and_tied_parameters_and_a_loss_that_is_linear_in_some(net):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.unused = nn.Linear(3, 3), nn.Linear(2, 2)
            self.two = nn.Linear(3, 3)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(torch.tanh(self.one(x)))

    model, given = Odd().double(), batches((3,))
    found = measure(model, classification(model), given, **FEW | {"steps": 30, "tolerance": 0.0})
    dense = matrices(model, given)[0]
    assert found.parameters == len(dense)
    assert found.trace == pytest.approx(float(dense.trace()), rel=1e-6)
    linear = nn.Linear(3, 1).double()
    flat = measure(linear, lambda b: linear(b[0]).mean(), given, **FEW)
    assert (flat.hessian.top, flat.trace) == (0, 0)
    assert flat.worst.value == pytest.approx(0.05 * flat.gradient_norm)


@pytest.mark.parametrize("mode", [torch.bfloat16, torch.float16])
def test_under_autocast(mode):
    """Coarser numbers, of float32 weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 3))
    given = [(x.float(), y) for x, y in batches()]
    plain = classification(model)

    def outputs_of(batch):
        with torch.autocast("cpu", mode):
            return plain.outputs_of(batch)

    rough = SplitLoss(outputs_of, plain.loss_on, plain.correct_on)
    exact = measure(model, plain, given, progress=False)
    found = measure(model, rough, given, progress=False)
    for kind in ("hessian", "ggn"):
        assert getattr(found, kind).top == pytest.approx(getattr(exact, kind).top, rel=0.03)
    assert found.worst.value == pytest.approx(exact.worst.value, rel=0.05)


def test_progress_rises_to_the_end(net, capsys):
    told = []
    measure(net, classification(net), batches(), **FEW | {"progress": lambda what, share: told.append((what, share))})
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.2
    assert told[-1] == ("done", 1)
    assert shares[-2] == pytest.approx(1)
    assert {"gradient", "eigenvalues of the hessian", "trace of the ggn", "m-sharpness"} <= {what for what, _ in told}
    measure(net, classification(net), batches(), **FEW | {"progress": True})
    assert capsys.readouterr().err == ""  # it is no terminal


def test_progress_is_the_share_of_the_sweeps_that_were_planned():
    """Of 5: two of one, of which one is made; one of two; and one that nobody had planned."""
    told = []
    telling = Telling(lambda what, share: told.append((what, share)))
    telling.begin("alone", 1, 1.0)
    telling.batch(1, 4)
    telling = Telling(lambda what, share: told.append((what, share)))
    telling.total = 5
    telling.begin("a", 2, 1.0)
    telling.batch(1, 2)
    telling.swept()
    telling.begin("b", 2, 2.0)
    telling.batch(1, 4)
    telling.swept()
    telling.batch(1, 4)
    telling.begin("c", 2, 1.0)
    telling.swept()
    telling.batch(1, 2)
    telling.end()
    assert told == [("alone", 0.25), ("a", 0.1), ("b", 0.5), ("b", 0.8), ("c", 1.0), ("done", 1.0)]


# Refusals: one clear line each.


def loss_of_batch(net):
    return lambda batch: cross_entropy(net(batch[0]), batch[1])


def backward_itself(net):
    def loss_of(batch):
        loss = cross_entropy(net(batch[0]), batch[1])
        loss.backward()
        return loss

    return loss_of


def made_in_inference_mode():
    with torch.inference_mode():
        return nn.Linear(5, 3)


def checkpointed(net):
    def loss_of(batch):
        return cross_entropy(checkpoint(net, batch[0].clone().requires_grad_(), use_reentrant=True), batch[1])

    return loss_of


REFUSED = {
    "no data": (lambda n: (n, loss_of_batch(n), []), ValueError, "batches holds no batch"),
    "a generator": (lambda n: (n, loss_of_batch(n), (b for b in batches())), ValueError, "can be read only once"),
    "no batches": (lambda n: (n, loss_of_batch(n), 3), ValueError, "must be a DataLoader or a list"),
    "an empty batch": (
        lambda n: (n, loss_of_batch(n), [(torch.zeros(0, 5), torch.zeros(0))]),
        ValueError,
        "batch 0 of batches holds 0 examples",
    ),
    "unequal lengths": (
        lambda n: (n, loss_of_batch(n), [(torch.zeros(2, 5), torch.zeros(3))]),
        ValueError,
        r"tensors of 2 lengths \(\[2, 3\]\): pass examples_of=",
    ),
    "no tensor": (lambda n: (n, loss_of_batch(n), ["a"]), ValueError, "a str has no tensor: pass examples_of="),
    "no graph": (lambda n: (n, lambda b: loss_of_batch(n)(b).detach(), batches()), RuntimeError, "a loss with a graph"),
    "a number": (lambda n: (n, lambda b: 1.0, batches()), RuntimeError, "the loss as a tensor, got 1.0"),
    "not reduced": (
        lambda n: (n, lambda b: cross_entropy(n(b[0]), b[1], reduction="none"), batches()),
        RuntimeError,
        "a scalar loss",
    ),
    "NaN": (
        lambda n: (n, lambda b: loss_of_batch(n)(b) * float("nan"), batches()),
        FloatingPointError,
        "the loss of batch 0 is nan",
    ),
    "bfloat16": (
        lambda n: (n.bfloat16(), loss_of_batch(n), batches()),
        ValueError,
        r"parameter inner.0.weight is bfloat16, too coarse .*: measure model.float\(\)",
    ),
    "another model": (
        lambda n: (n, classification(nn.Linear(5, 3).double()), batches()),
        RuntimeError,
        "depends on none of the model's parameters",
    ),
    "frozen": (lambda n: (n.requires_grad_(False), loss_of_batch(n), batches()), ValueError, "no parameters that"),
    "an optimiser": (
        lambda n: (torch.optim.SGD(n.parameters()), loss_of_batch(n), batches()),
        ValueError,
        "model must be a torch.nn.Module, got a SGD",
    ),
    "no function": (lambda n: (n, None, batches()), ValueError, "loss_of must be a function of a batch"),
    "its own backward": (lambda n: (n, backward_itself(n), batches()), RuntimeError, "loss_of has called backward"),
    "meta": (lambda n: (n.to("meta"), loss_of_batch(n), batches()), ValueError, "not all here"),
    "a tensor of batches": (lambda n: (n, classification(n), torch.zeros(3, 5)), ValueError, "batches, got a Tensor$"),
    "one batch": (
        lambda n: (n, classification(n), (torch.zeros(3, 5), torch.zeros(3).long())),
        ValueError,
        "looks like one batch: pass a list",
    ),
    "not initialized": (
        lambda n: (nn.LazyLinear(3), loss_of_batch(n), batches()),
        ValueError,
        "parameter weight is not initialized yet",
    ),
    "inference mode": (
        lambda n: (made_in_inference_mode(), loss_of_batch(n), batches()),
        ValueError,
        "parameter weight is of inference mode",
    ),
    "complex": (
        lambda n: (nn.Linear(5, 3, dtype=torch.complex64), loss_of_batch(n), batches()),
        ValueError,
        "parameter weight is complex",
    ),
    "reentrant checkpoints": (
        lambda n: (n, checkpointed(n), batches()),
        RuntimeError,
        "does checkpointing, if there is any, have use_reentrant=False",
    ),
    "outputs": (
        lambda n: (n, SplitLoss(lambda b: (n(b[0]),), lambda o, b: cross_entropy(o[0], b[1])), batches()),
        ValueError,
        "outputs_of must give a tensor with its graph, got a tuple",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_refusals_are_one_line(net, name):
    made, kind, said = REFUSED[name]
    arguments = made(net)
    with pytest.raises(kind, match=said) as caught:
        measure(*arguments, **FEW)
    assert "\n" not in str(caught.value)


def test_one_number_of_any_shape_is_a_loss_and_several_are_none(net):
    plain, given = loss_of_batch(net), batches()
    one, other = (measure(net, loss, given, **FEW).rows() for loss in (plain, lambda b: plain(b).reshape(1)))
    assert list(one) == list(other)
    assert line(net, lambda b: plain(b).item(), given, points=3) == line(net, plain, given, points=3)
    with pytest.raises(RuntimeError, match=r"sharpness needs a scalar loss, got shape \(8, 3\)"):
        line(net, lambda b: net(b[0]), given)


def test_gauss_newton_of_a_loss_in_one_piece_is_refused(net):
    with pytest.raises(ValueError, match=r"pass loss_of=SplitLoss\(outputs_of, loss_on\)"):
        measure(net, loss_of_batch(net), batches(), matrices=["ggn"], **FEW)


def test_a_layer_that_cannot_be_differentiated_twice_is_refused_and_the_rest_can_be_measured():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, up):
            return up * ctx.saved_tensors[0].cos()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 3)

        def forward(self, x):
            return Once.apply(self.inner(x))

    model = Model().double()
    with pytest.raises(RuntimeError, match=r"differentiated twice: .*or matrices=\[\]") as caught:
        measure(model, classification(model), batches(), **FEW)
    assert "\n" not in str(caught.value)
    assert measure(model, classification(model), batches(), matrices=[], **FEW).worst.value > 0


def test_attention_is_differentiated_twice():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.out = nn.Linear(4, 12), nn.Linear(4, 3)

        def forward(self, x):
            q, k, v = self.inner(x).unsqueeze(1).chunk(3, -1)
            return self.out(nn.functional.scaled_dot_product_attention(q, k, v).mean((1, 2)))

    torch.manual_seed(0)
    model, given = Attention().double(), batches((5, 4))
    found = measure(model, classification(model), given, **FEW | {"steps": 90, "tolerance": 0.0})
    with sdpa_kernel(SDPBackend.MATH):
        dense = matrices(model, given)
    for kind, its in zip((found.hessian, found.ggn), dense, strict=True):
        assert kind.trace == pytest.approx(float(its.trace()), rel=1e-6)


def test_batches_that_change_their_number_are_refused(net):
    class Shrinking(list):
        def __iter__(self):
            whole = super().__iter__()
            yield from list(whole)[: 3 - self.times]
            self.times = 1

    given = Shrinking(batches())
    given.times = 0
    with pytest.raises(ValueError, match="held 19 examples at first and 16 now"):
        measure(net, classification(net), given, **FEW)


def test_several_processes_are_refused(net, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(RuntimeError, match="sharpness in 4 processes"):
        measure(net, classification(net), batches(), **FEW)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert measure(net, classification(net), batches(), **FEW).loss > 0


@pytest.mark.parametrize("mode", [torch.bfloat16, torch.float16])
def test_autocast_around_a_measurement_is_autocast_in_the_loss(mode):
    """Autocast keeps the weights that it has rounded, while they are displaced and while they are dual numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 3))
    given = [(x.float(), y) for x, y in batches()]
    plain = classification(model)

    def outputs_of(batch):
        with torch.autocast("cpu", mode):
            return plain.outputs_of(batch)

    within = measure(model, SplitLoss(outputs_of, plain.loss_on, plain.correct_on), given, progress=False)
    with torch.autocast("cpu", mode):
        around = measure(model, plain, given, progress=False)
    assert around.expected.value > 0
    for row, other in zip(within.rows(), around.rows(), strict=True):
        assert row.value == pytest.approx(other.value, rel=1e-6), row.name
