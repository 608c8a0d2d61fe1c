"""Copies of a model's buffers: in the same memory from step to step, and still all of them."""

import pytest
import torch
from torch import nn

from gtracer import SGDTracer
from gtracer.scopes import Buffers, Copies, PooledStatistics, frozen_statistics


class Counting(nn.Module):
    """Its buffers are put in the place of others, shared, and made late."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("nothing", None)
        self.norm.register_buffer("same", self.seen)

    def forward(self, x):
        self.seen = self.seen + 1  # another tensor every time
        if "late" not in self._buffers:
            self.register_buffer("late", torch.zeros(1))
        self.late.add_(1)
        return self.norm(x)


def contents(model):
    return [b.clone() for b in model.buffers()]


def test_the_same_memory_is_used_again():
    model, copies = nn.BatchNorm1d(3), Copies()
    first = copies.of(model, "a")
    memory = [b.data_ptr() for b in first.saved]
    model(torch.randn(4, 3))
    again = copies.of(model, "a")
    assert [b.data_ptr() for b in again.saved] == memory
    torch.testing.assert_close(list(again.saved), list(model.buffers()))
    assert [b.data_ptr() for b in copies.of(model, "b").saved] != memory


def test_what_a_pass_changes_replaces_or_adds_is_put_back():
    model, copies = Counting(), Copies()
    model(torch.randn(4, 3))  # the late one is there
    for _ in range(3):
        before = contents(model)
        with frozen_statistics(copies.of(model, "a")):
            model(torch.randn(4, 3))
        torch.testing.assert_close(contents(model), before)
        model(torch.randn(4, 3))
        assert model.seen[0] == before[0][0] + 1


def test_another_model_or_dtype_has_memory_of_its_own():
    model, copies = nn.BatchNorm1d(3), Copies()
    copies.of(model, "a")
    model.double()
    model(torch.randn(4, 3).double())
    assert {b.dtype for b in copies.of(model, "a").saved} == {torch.float64, torch.int64}
    model.running_mean.data = torch.full((3,), 0.1, dtype=torch.float32)  # the same tensor, of another kind
    with frozen_statistics(copies.of(model, "a")):
        model.running_mean.fill_(7)
    assert model.running_mean.dtype == torch.float32
    assert {b.dtype for b in copies.of(model, "a").saved} == {torch.float32, torch.float64, torch.int64}
    other = nn.BatchNorm1d(2)
    assert [b.shape for b in copies.of(other, "a").saved] == [b.shape for b in other.buffers()]
    assert copies.of(None, "a").saved == []


def test_a_step_after_the_model_was_moved_or_changed():
    """Between steps a layer is added and the model cast: statistics still see one pass a step."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    opt = SGDTracer(model.parameters(), model=model)
    x = torch.randn(8, 3)
    opt.step(lambda: model(x).square().mean())
    model.append(nn.BatchNorm1d(3))
    opt.add_param_group({"params": list(model[2].parameters())})
    for count in (2, 3):
        opt.step(lambda: model(x).square().mean())
        assert model[1].num_batches_tracked == count
        assert model[2].num_batches_tracked == count - 1


class Buffered(nn.Module):
    """One buffer of each kind; a pass over a part is `model.moves(…)`."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor([1.0, -2.0]))
        self.register_buffer("phase", torch.tensor([1.0 + 1.0j]))
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("seen", torch.tensor([True, True, False, False]))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def moves(self, by):
        self.mean = self.mean + by  # another tensor in its place
        self.phase.add_(by * 1.0j)
        self.count.add_(3)
        self.seen.copy_(torch.tensor([True, False, False, True]))


def test_pooled_statistics_of_every_kind():
    """Means of the moves; counters and flags as after one pass."""
    model = Buffered()
    mean, mask = model.mean, model.mask
    pooled = PooledStatistics(model)
    for share, by in ((0.25, 4.0), (0.75, 8.0)):
        with pooled.part(share):
            # Every part starts from the same statistics.
            assert model.mean is mean
            assert model.count == 5
            assert model.mean.tolist() == [1.0, -2.0]
            model.moves(by)
    pooled.conclude()
    assert model.mean is mean
    assert model.mean.tolist() == [8.0, 5.0]  # + 0.25 · 4 + 0.75 · 8
    assert model.phase.item() == 1.0 + 8.0j
    assert model.count == 8
    assert model.count.dtype == torch.int64
    assert model.seen.tolist() == [True, False, False, True]
    assert model.seen.dtype == torch.bool
    assert model.mask is mask
    assert model.mask.tolist() == [0.0, -torch.inf]  # −∞ has not moved, and is no NaN


@pytest.mark.parametrize("contiguous", [True, False])
def test_restored_unless_a_number_on_the_device_says_all_is_well(contiguous):
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(2))
    model.register_buffer("table", torch.arange(6.0).view(2, 3) if contiguous else torch.arange(6.0).view(3, 2).T)
    before = contents(model)
    kept = Buffers(model)
    model[0](torch.randn(5, 3))
    model.table.add_(1)
    after = contents(model)
    kept.restore_unless(torch.ones(()), Buffers(model))
    assert all(map(torch.equal, contents(model), after))
    kept.restore_unless(torch.zeros(()), Buffers(model))
    assert all(map(torch.equal, contents(model), before))
    assert not all(map(torch.equal, after, before))


def test_most_kinds_are_copied_by_one_kernel():
    """As numbers of 32 bits, of which a count has two, at an even place. Others have memory of their own."""
    model = Buffered()
    model.register_buffer("odd", torch.arange(3.0))
    model.register_buffer("long", torch.tensor([1 / 3, -torch.inf, torch.nan], dtype=torch.float64))
    model.register_buffer("short", torch.ones(3, dtype=torch.float16))
    before = contents(model)
    kept = Buffers(model)
    assert len(kept._rooms) == 4  # complex numbers, flags, float16
    for saved, one in zip(kept.saved, before, strict=True):
        torch.testing.assert_close(saved, one, rtol=0, atol=0, equal_nan=True)
    for b in model.buffers():
        b.zero_()
    kept.restore()
    for now, one in zip(contents(model), before, strict=True):
        torch.testing.assert_close(now, one, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("change", ["data", "shape", "other tensor"])
def test_buffers_that_lie_elsewhere(change):
    """The same tensor with other memory, more numbers at the same address, another tensor."""
    model, copies = nn.BatchNorm1d(3), Copies()
    model.register_buffer("table", torch.zeros(6)[:3])
    copies.of(model, "a")
    if change == "data":
        model.running_mean.data = torch.ones(3)
    elif change == "shape":
        model.table.data = model.table.as_strided((6,), (1,))
    else:
        model.running_var = torch.ones(3)
    before = contents(model)
    with frozen_statistics(copies.of(model, "a")):
        for b in model.buffers():
            b.add_(1)
    assert all(map(torch.equal, contents(model), before))


def test_restored_unless_where_a_pass_has_added_a_buffer():
    """It is the later copy's alone; what both know is put back."""
    model = nn.BatchNorm1d(3)
    kept, before = Buffers(model), contents(model)
    model.register_buffer("late", torch.ones(2))
    model(torch.randn(4, 3))
    kept.restore_unless(torch.tensor(False), Buffers(model))
    assert all(map(torch.equal, contents(model)[:3], before))
    assert model.late.tolist() == [1.0, 1.0]


class KeepsItsMean(nn.Module):
    """As models of Keras: statistics are frozen parameters, beside frozen weights that nobody writes to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.frozen = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
        self.mean = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x):
        z = torch.tanh(self.linear(self.frozen(x)))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(z.mean(0), alpha=0.1)
        return z - z.mean(0)


@pytest.mark.parametrize("by", ["closure", "scope"])
def test_frozen_parameters_that_a_pass_writes_to_are_statistics(by):
    model, x = KeepsItsMean(), torch.randn(4, 5, 3)
    opt = SGDTracer(model.parameters(), lr=0.1, rho=0.05, model=model)
    twin, means = KeepsItsMean(), []
    other = SGDTracer(twin.linear.parameters(), lr=0.1, rho=0.05)
    for batch in x:
        with torch.no_grad():  # one pass, at the weights of the step
            kept = twin.mean.clone()
            twin(batch)
            means.append(twin.mean.clone())
            twin.mean.copy_(kept)
        other.step(lambda batch=batch: twin(batch).square().mean())
        twin.mean.data.copy_(means[-1])
        if by == "closure":
            opt.step(lambda batch=batch: model(batch).square().mean())
        else:
            opt.zero_grad()
            model(batch).square().mean().backward()
            with opt.perturbed():
                model(batch).square().mean().backward()
            opt.step()
        assert torch.equal(model.mean, means[-1])
    assert torch.equal(model.linear.weight, twin.linear.weight)
    assert [entry[0] is model.mean for entry in opt._copies.frozen.found.values()] == [True]


def test_large_frozen_parameters_are_never_copied():
    model = nn.Sequential(nn.Linear(300, 300).requires_grad_(False), nn.Linear(300, 2))
    opt = SGDTracer(model.parameters(), lr=0.1, rho=0.05, model=model)
    assert not any(p.numel() > 300 for p, _ in opt._copies.of(model, "a")._frozen.found.values())
