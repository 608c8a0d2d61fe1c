"""Algebra on lists against torch's on one long vector."""

import pytest
import torch

from gtracer import tensors

XS = [torch.tensor([1.0, -2.0], dtype=torch.float64), torch.tensor([[3.0], [0.5]], dtype=torch.float64)]
YS = [torch.tensor([0.5, -1.0], dtype=torch.float64), torch.tensor([[2.0], [4.0]], dtype=torch.float64)]


def flat(xs):
    return torch.cat([x.reshape(-1) for x in xs])


def test_norms_and_products():
    assert tensors.norm(XS).item() == pytest.approx(flat(XS).norm().item())
    assert tensors.dot(XS, YS).item() == pytest.approx((flat(XS) @ flat(YS)).item())
    assert tensors.aligned(XS, YS).item() == pytest.approx((flat(XS) @ flat(YS)).item())
    assert [tensors.norm([]), tensors.dot([], []), tensors.aligned([], [])] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("sizes", [(3,), (tensors.SMALL,), (3, tensors.SMALL, 4), (tensors.SMALL, 5)])
def test_products_of_small_and_large_tensors(sizes):
    xs = [torch.rand(n, dtype=torch.float64) for n in sizes]
    ys = [torch.rand(n, dtype=torch.float64) for n in sizes]
    assert tensors.aligned(xs, ys).item() == pytest.approx((flat(xs) @ flat(ys)).item())


def test_lists_of_different_lengths_are_refused():
    for product in (tensors.dot, tensors.aligned):
        with pytest.raises(ValueError, match="zip"):
            product(XS, YS[:1])


@pytest.mark.parametrize("delta", [0.0, 0.5])
def test_the_inverse_of_zero_is_that_of_a_pseudo_inverse(delta):
    found = tensors.inverse([torch.tensor([0.0, 2.0])], delta)
    assert found[0].tolist() == [0.0 if delta == 0 else 2.0, pytest.approx(1 / (2 + delta))]


def test_a_list_is_given_a_length():
    xs = tensors.clone(XS)
    assert tensors.shorten_(xs, 0.3).item() == pytest.approx(flat(XS).norm().item())
    torch.testing.assert_close(flat(xs), 0.3 * flat(XS) / flat(XS).norm())
    nothing = [torch.zeros(2)]
    assert tensors.shorten_(nothing, 0.3) == 0
    assert nothing[0].tolist() == [0.0, 0.0]


def test_what_is_no_number_stays_unless_it_is_to_go():
    for safely in (False, True):
        xs = [torch.tensor([torch.inf, 1.0])]
        tensors.shorten_(xs, 0.3, safely=safely)
        assert xs[0].isfinite().all() == safely
    xs = [torch.tensor([torch.nan, torch.inf, -torch.inf, 2.0])]
    tensors.finite_(xs)
    assert xs[0].tolist() == [0.0, 0.0, 0.0, 2.0]


def test_differences():
    xs = tensors.clone(XS)
    tensors.subtract_(xs, YS, torch.tensor(3.0, dtype=torch.float64))
    torch.testing.assert_close(flat(xs), 3 * (flat(XS) - flat(YS)))
    tensors.scale_([], torch.tensor(2.0))


def test_copies_of_several_kinds_share_nothing():
    xs = [torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(1, requires_grad=True), torch.tensor([True])]
    copies = tensors.clone(xs)
    assert [(c.dtype, c.requires_grad) for c in copies] == [(x.dtype, False) for x in xs]
    assert all(c.data_ptr() != x.data_ptr() and torch.equal(c, x) for c, x in zip(copies, xs, strict=True))
    assert [len(some) for some, _ in tensors.paired(copies, xs)] == [2, 1, 1]
    with pytest.raises(ValueError, match="zip"):
        tensors.paired(copies, xs[:3])


def test_without_processes_gradients_are_kept_as_they_are():
    assert tensors.kept(XS) is XS
    assert tensors.whole(XS[0]) is XS[0]
