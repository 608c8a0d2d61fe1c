"""Products with one batch's matrices: J v by forward mode where that is right, and without it where it is not."""

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.nn.functional import cross_entropy, mse_loss

from gtracer.sharpness import SplitLoss, classification, measure
from gtracer.sharpness.products import GGN, HESSIAN, Products
from support.dense import batches, matrices


class Square(Function):
    """x², whose author knows no forward mode."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, up):
        (x,) = ctx.saved_tensors
        return 2 * x * up


class Halved(Square):
    """The same, and half of its tangent."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x * x

    @staticmethod
    def jvp(ctx, tangent):
        (x,) = ctx.saved_tensors
        return x * tangent


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.one, self.two, self.function = nn.Linear(3, 6), nn.Linear(6, 3), function

    def forward(self, x):
        return self.two(self.function(self.one(x)))


KINDS = {"tanh": (torch.tanh, True), "no jvp": (Square.apply, False), "wrong jvp": (Halved.apply, False)}


def pieces(flat, params):
    parts = torch.split(flat, [p.numel() for p in params])
    return [x.view(p.shape) for x, p in zip(parts, params, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_the_dense_matrices_whichever_mode(kind):
    function, pushes = KINDS[kind]
    torch.manual_seed(0)
    net, (batch,) = Net(function).double(), batches((3,), (8,))
    params, (H, G) = list(net.parameters()), matrices(net, [batch])
    before = [p.detach().clone() for p in params]
    products = Products(classification(net), params)
    vectors = torch.randn(2, len(G), dtype=torch.float64)
    split = [pieces(v, params) for v in vectors]
    products.look(batch, split[0])
    assert products.pushes == pushes
    for forced in {pushes, False}:
        products.pushes = forced
        loss, found = products.of(GGN, batch, split)
        torch.testing.assert_close(torch.stack([torch.cat([x.flatten() for x in each]) for each in found]), vectors @ G)
        torch.testing.assert_close(loss.detach(), cross_entropy(net(batch[0]), batch[1]).detach())
    _, found = products.of(HESSIAN, batch, split)
    torch.testing.assert_close(torch.stack([torch.cat([x.flatten() for x in each]) for each in found]), vectors @ H)
    assert all(torch.equal(p, was) for p, was in zip(params, before, strict=True))


def test_what_draws_other_random_numbers_by_forward_mode_is_measured_without_it():
    """Dropout of a model in evaluation mode, written so that dual numbers draw once more."""

    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x):
            if torch.autograd.forward_ad.unpack_dual(self.layer.weight).tangent is not None:
                torch.rand(1)
            return self.layer(nn.functional.dropout(x, 0.5, training=True))

    torch.manual_seed(0)
    net = Drops().double()
    given = batches()
    found = measure(net, classification(net), given, matrices="ggn", progress=False, samples=0, ascent=0)
    again = measure(net, classification(net), given, matrices="hessian", progress=False, samples=0, ascent=0)
    assert found.ggn.top == pytest.approx(again.hessian.top, rel=1e-6)  # a linear model's are the same matrix


def test_a_loss_that_is_linear_in_the_outputs_has_no_gauss_newton_matrix():
    net, (batch,) = Net(torch.tanh).double(), batches((3,), (8,))
    linear = SplitLoss(lambda b: net(b[0]), lambda o, b: o.mean())
    square = SplitLoss(lambda b: net(b[0]), lambda o, b: mse_loss(o, torch.zeros_like(o)))
    options = {"matrices": "ggn", "progress": False, "samples": 0, "ascent": 0}
    assert measure(net, linear, [batch], **options).ggn.top == 0
    assert measure(net, square, [batch], **options).ggn.top > 0
