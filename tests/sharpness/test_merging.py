"""Merged batches: the numbers of the caller's own, in fewer passes, and only where they are the same."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer.sharpness import Settings, classification, eigenvectors, line, measure
from gtracer.sharpness.losses import concatenated
from support.dense import batches, flat, matrices

FEW = {"steps": 4, "probes": 2, "samples": 1, "ascent": 2, "progress": False}


class Counted(nn.Module):
    """Remembers how many examples each pass had."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.sizes = inner, []

    def forward(self, x):
        self.sizes.append(len(x))
        return self.inner(x)


def conv_batch_norm():
    layers = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.SiLU(), nn.Flatten(), nn.Linear(48, 3)
    model = nn.Sequential(*layers).double()
    model(torch.randn(32, 2, 4, 4).double())
    return model


NETS = {
    "mlp, dropout": (lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(), nn.Tanh(), nn.Linear(8, 3)).double(), (5,)),
    "conv, batch norm": (conv_batch_norm, (2, 4, 4)),
}


@pytest.fixture(params=NETS)
def net(request):
    torch.manual_seed(0)
    make, shape = NETS[request.param]
    return Counted(make()), batches(shape, (4, 4, 4, 4, 3))


@pytest.mark.parametrize("most", [8, 1024])
def test_every_number_is_that_of_the_batches_as_they_are(net, most):
    model, given = net
    options = {"steps": 30, "tolerance": 0.0, "probes": 4, "samples": 2, "ascent": 3, "progress": False}
    apart = measure(model, classification(model), given, merge=0, **options)
    assert max(model.sizes) == 4
    together = measure(model, classification(model), given, merge=most, **options)
    assert max(model.sizes) == min(most, 19)
    assert together.batches == apart.batches
    extra = {kind: count - apart.passes[kind] for kind, count in together.passes.items()}
    assert extra == {"gradient": 0, "hessian": 0, "ggn": 0, "evaluation": 3}  # whether merging is right, and the loss
    for row, other in zip(together.rows(), apart.rows(), strict=True):
        assert row.value == pytest.approx(other.value, rel=1e-8, abs=1e-11), row.name
    for spectrum, dense in zip((together.hessian, together.ggn), matrices(model, given), strict=True):
        assert spectrum.top == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=1e-3)
        assert abs(spectrum.trace - float(dense.trace())) <= 4 * spectrum.trace_error + 1e-9


def test_vectors_and_landscapes_too(net):
    model, given = net
    found = {}
    for most in (0, 16):
        settings = Settings(progress=False, merge=most)
        model.sizes.clear()
        values, vectors = eigenvectors(model, classification(model), given, settings=settings)
        losses = line(model, classification(model), given, vectors[0], points=3, settings=settings).losses
        found[most] = torch.tensor([*values, *losses], dtype=torch.float64), flat(vectors[0]).abs()
        assert max(model.sizes) == max(most, 4)
    for one, other in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-6)


def test_few_large_passes_take_the_place_of_many_small_ones():
    torch.manual_seed(0)
    model, given = Counted(nn.Linear(5, 3).double()), batches((5,), (2,) * 20)
    options = FEW | {"matrices": ["hessian"], "ascent": 0, "tolerance": 0.0}
    counts = []
    for merge in (None, 40):  # on a CPU, none by default
        model.sizes.clear()
        measure(model, classification(model), given, merge=merge, **options)
        counts.append(len(model.sizes))
    sweeps = 1 + 4 + 1 + 4  # gradient, Lanczos, trace, expected
    assert counts == [20 * sweeps, 20 + (20 + 1) + 1 + (sweeps - 1)]  # in the middle: whether merging is right


def normalised_by_the_batch():
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3))


def ignoring(given):
    """Labels that cross-entropy leaves out of its mean, more in one batch than in the others."""
    given[0][1][:3] = -100
    return given


def of_two_widths(given):
    return [(torch.cat([x, x], 1) if i % 2 else x, y) for i, (x, y) in enumerate(given)]


class AnyWidth(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 3)

    def forward(self, x):
        return self.layer(x.mean(1, keepdim=True))


SEPARATE = {
    "training mode": (lambda: nn.Linear(5, 3), lambda b: b, {"train_mode": True}),
    "weights of the caller's": (lambda: nn.Linear(5, 3), lambda b: b, {"examples_of": lambda b: 2.0 * len(b[1])}),
    "statistics of the batch": (normalised_by_the_batch, lambda b: b, {}),
    "ignored labels": (lambda: nn.Linear(5, 3), ignoring, {}),
    "widths": (AnyWidth, of_two_widths, {}),
}


@pytest.mark.parametrize("name", SEPARATE)
def test_what_would_change_is_not_merged(name):
    torch.manual_seed(0)
    make, change, more = SEPARATE[name]
    model, given = Counted(make().double()), change(batches((5,), (4, 4, 4, 3)))
    found = [measure(model, classification(model), given, merge=most, **FEW, **more) for most in (0, 1024)]
    assert list(found[0].rows()) == list(found[1].rows())


def test_a_loss_that_does_not_say_how_is_not_merged(net):
    model, given = net
    unsaid = replace(classification(model), merge=None)
    for loss_of in (unsaid, lambda batch: cross_entropy(model(batch[0]), batch[1])):
        measure(model, loss_of, given, merge=1024, **FEW)
        assert max(model.sizes) == 4


class Small(Counted):
    """On a device that has room for so many examples."""

    room = 8
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def forward(self, x):
        if len(x) > self.room:
            raise self.error
        return super().forward(x)


ON_A_CPU = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 80000 bytes.")


IN_A_LIBRARY = RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")


@pytest.mark.parametrize("error", [Small.error, ON_A_CPU, IN_A_LIBRARY])
def test_where_memory_runs_out_fewer_batches_are_merged(net, error):
    given = net[1]
    model = Small(net[0].inner)
    model.error = error
    found = measure(model, classification(model), given, merge=1024, **FEW)
    assert max(model.sizes) == 8
    expected = measure(model, classification(model), given, merge=0, **FEW)
    for row, other in zip(found.rows(), expected.rows(), strict=True):
        assert row.value == pytest.approx(other.value, rel=1e-8, abs=1e-11), row.name


class Rounding(Counted):
    """Adds up in another order where batches are large; of a small loss that is more than a thousandth."""

    def forward(self, x):
        return super().forward(x) * (1 + 2e-3 * (len(x) > 4) - 1e-3 * (len(x) > 8))


@pytest.mark.parametrize("kinds", [[], ["hessian", "ggn"]])
@pytest.mark.parametrize("room", [16, 8])
def test_what_rounding_makes_of_merged_batches_is_no_change_of_the_loss(kinds, room):
    torch.manual_seed(0)
    inner, given = nn.Linear(5, 3).double(), batches((5,), (4, 4, 4, 4))
    labelled = [(x, inner(x).argmax(1)) for x, _ in given]
    with torch.no_grad():
        inner.weight.mul_(30), inner.bias.mul_(30)
    model = Rounding(inner)

    def outputs_of(batch):
        """With memory for so many examples and their graph."""
        if len(batch[0]) > room and torch.is_grad_enabled():
            raise Small.error
        return model(batch[0])

    loss_of = replace(classification(model), outputs_of=outputs_of)
    found = measure(model, loss_of, labelled, merge=16, matrices=kinds, sigma=1e-6, **FEW)
    assert max(model.sizes) == 16
    assert found.loss < 0.5
    assert abs(found.expected.value) < 1e-8


def test_any_other_error_is_told_at_once(net):
    model = Small(net[0].inner)
    model.error = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        measure(model, classification(model), net[1], merge=1024, **FEW)


@pytest.mark.parametrize("fewer", [False, True])
def test_where_it_runs_out_for_a_batch_itself_one_line_says_what_to_do(net, fewer):
    given = net[1]
    model = Small(net[0].inner)
    model.room = 3
    before = copy.deepcopy(model.state_dict())
    options = {"matrices": [], "samples": 0, "ascent": 0, "progress": False} if fewer else FEW
    with pytest.raises(torch.OutOfMemoryError, match=r"batches of 4 examples .*: pass smaller batches") as caught:
        measure(model, classification(model), given, merge=1024, **options)
    assert "\n" not in str(caught.value)
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]), name


def test_batches_of_any_kind_are_put_together_or_not_at_all():
    x, y = torch.zeros(2, 3), torch.ones(1, 3)
    merged = concatenated([{"x": [x], "y": (x,)}, {"x": [y], "y": (y,)}])
    assert torch.equal(merged["x"][0], torch.cat([x, y]))
    assert isinstance(merged["y"], tuple)
    kinds = [(x, x.double()), (x, [x]), ((x,), (x, x)), ({"x": x}, {"y": x}), (x, x[:, :2]), (x[0, 0], x[0, 0])]
    assert [concatenated(pair) for pair in [*kinds, ("a", "b")]] == [None] * 7


def test_bad_values_are_refused(net):
    with pytest.raises(ValueError, match="merge must be a whole number of at least 0, got -1"):
        measure(net[0], classification(net[0]), net[1], merge=-1, **FEW)
