"""Convolutions and batch norm under SecondDerivatives, against torch's own double backward."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from gtracer import SGDTracer
from gtracer.curvature import SecondDerivatives, gradient_magnitude, hutchinson
from gtracer.lab.models import network

LAYERS = [
    (lambda: nn.Conv1d(2, 4, 3, stride=2, padding=1), (3, 2, 7)),
    (lambda: nn.Conv2d(2, 4, 3, padding=1, bias=False), (3, 2, 5, 6)),
    (lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2), (2, 4, 7, 8)),
    (lambda: nn.Conv2d(2, 3, 3, padding="same"), (2, 2, 5, 5)),
    (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 2, 5, 5)),
    (lambda: nn.Conv2d(2, 3, 3), (2, 5, 5)),  # no batch
    (lambda: nn.Conv3d(1, 2, 2), (2, 1, 3, 4, 3)),
    (lambda: nn.BatchNorm1d(3), (5, 3)),
    (lambda: nn.BatchNorm1d(3), (4, 3, 5)),
    (lambda: nn.BatchNorm2d(3, momentum=0.3, eps=1e-2), (4, 3, 2, 3)),
    (lambda: nn.BatchNorm2d(3, momentum=None), (4, 3, 2, 3)),
    (lambda: nn.BatchNorm2d(3, affine=False), (4, 3, 2, 3)),
    (lambda: nn.BatchNorm2d(3, track_running_stats=False), (4, 3, 2, 3)),
    (lambda: nn.BatchNorm2d(3).eval(), (4, 3, 2, 3)),
]
TRAINED = {"all": (True, True), "input": (False, True), "weights": (True, False)}


def curved(layer, x, scope):
    """Loss, gradients, the Hessian times a vector by all that is trained, and the buffers."""
    used = [p for p in [*layer.parameters(), x] if p.requires_grad]
    with scope:
        loss = (layer(x) + 1).sin().square().sum()
    slopes = torch.autograd.grad(loss, used, create_graph=True)
    torch.manual_seed(1)
    products = torch.autograd.grad(slopes, used, [torch.randn_like(s) for s in slopes])
    return [loss, *slopes, *products, *layer.buffers()]


@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize(("make", "shape"), LAYERS, ids=[repr(make()) for make, _ in LAYERS])
def test_a_layer_is_torchs(make, shape, trained):
    weights, by_input = TRAINED[trained]

    def found(scope):
        torch.manual_seed(0)
        layer, x = make().double(), torch.randn(shape, dtype=torch.float64, requires_grad=by_input)
        if not weights or not list(layer.parameters()):
            x.requires_grad_()
        for p in layer.parameters():
            nn.init.normal_(p).requires_grad_(weights)
        return curved(layer, x, scope)

    torch.testing.assert_close(found(SecondDerivatives()), found(nullcontext()))


def small_net(dtype=torch.float64):
    torch.manual_seed(0)
    net = network("resnet8", (3, 8, 8), 5).to(dtype)
    return net, torch.randn(6, 3, 8, 8, dtype=dtype), torch.randint(5, (6,))


def products_of(net, x, y, scope, autocast=False):
    with scope, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = functional.cross_entropy(net(x), y)
    params = list(net.parameters())
    slopes = torch.autograd.grad(loss, params, create_graph=True)
    return torch.cat([h.flatten() for h in torch.autograd.grad(slopes, params, [s.detach() for s in slopes])])


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_a_net_is_torchs_also_compiled():
    expected = products_of(*small_net(), nullcontext())
    torch.testing.assert_close(products_of(*small_net(), SecondDerivatives()), expected)
    compiled = SecondDerivatives(lambda function: torch.compile(function, dynamic=False))
    torch.testing.assert_close(products_of(*small_net(), compiled), expected)


def test_under_autocast_it_is_as_close_as_torchs():
    expected = products_of(*small_net(), nullcontext())

    def error(scope):
        found = products_of(*small_net(torch.float32), scope, autocast=True).double()
        return (found - expected).norm() / expected.norm()

    theirs, ours = error(nullcontext()), error(SecondDerivatives())
    assert 1e-4 < ours < 1.5 * theirs


def test_torch_func_sees_torchs_own_operations():
    net, x, y = small_net()
    params = dict(net.named_parameters())
    net.eval()

    def loss_of(params, x, y):
        return functional.cross_entropy(torch.func.functional_call(net, params, (x[None],)), y[None])

    each = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))
    with SecondDerivatives():
        found = each(params, x, y)
    torch.testing.assert_close(found, each(params, x, y))


class Kernels(TorchDispatchMode):
    """Sizes of the kernels that are slid over images."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("convolution", "convolution_backward"):
            weight = args[1] if name == "convolution" else args[2]
            made = 1 if name == "convolution" else sum(args[-1][:2])
            self.sizes += [weight.shape[-1]] * made
        return func(*args, **(kwargs or {}))


def test_an_exact_step_is_nine_convolutions_a_layer():
    """SGD's step has three; torch's double backward slides gradients as large as the image."""
    net, x, y = small_net()
    opt = SGDTracer(net.parameters(), rho=0.003, model=net, engine="exact")
    opt.step(lambda: functional.cross_entropy(net(x), y))
    with Kernels() as kernels:
        opt.step(lambda: functional.cross_entropy(net(x), y))
    layers = sum(isinstance(layer, nn.Conv2d) for layer in net.modules())
    assert set(kernels.sizes) == {3}
    assert len(kernels.sizes) == 9 * layers - 5  # the images are not trained


def test_batch_norm_in_the_numerator_of_hutchinson_is_still_refused():
    net, x, y = small_net()
    opt = SGDTracer(net.parameters(), rho=0.003, model=net, curvature=hutchinson(), average=gradient_magnitude)
    with pytest.raises(ValueError, match="third derivative of BatchNorm"):
        opt.step(lambda: functional.cross_entropy(net(x), y))


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_what_a_convolution_does_where_nothing_is_said(dimensions):
    """As a function, called with input and weight alone, or with one number or a list of one for all axes."""
    convolution = getattr(functional, f"conv{dimensions}d")
    x, w = torch.randn(2, 2, *[6] * dimensions).double(), torch.randn(4, 2, *[3] * dimensions).double()
    for words in ({}, {"stride": 2}, {"padding": 2}, {"dilation": 2}, {"stride": [2], "padding": [1], "dilation": [2]}):
        with SecondDerivatives():
            found = convolution(x, w, **words)
        torch.testing.assert_close(found, convolution(x, w, **words), rtol=0, atol=0)


@pytest.mark.parametrize("words", [{}, {"momentum": 0.3}, {"eps": 0.5}], ids=str)
def test_what_batch_norm_does_where_nothing_is_said(words):
    """In training with scale and offset; anything less is torch's own affair, as is what it refuses."""
    x, scale, offset = torch.randn(4, 3).double(), torch.rand(3).double(), torch.rand(3).double()
    found, expected = (
        (torch.zeros(3).double(), torch.ones(3).double()),
        (torch.zeros(3).double(), torch.ones(3).double()),
    )
    with SecondDerivatives():
        outputs = [
            functional.batch_norm(x, *found, scale, offset, training=True, **words),
            functional.batch_norm(x, *found, scale, offset, **words),
            functional.batch_norm(x, *found, training=True, **words),
        ]
        with pytest.raises(ValueError, match="more than 1 value"):
            functional.batch_norm(x[:1], *found, scale, offset, training=True)
    plain = [
        functional.batch_norm(x, *expected, scale, offset, training=True, **words),
        functional.batch_norm(x, *expected, scale, offset, **words),
        functional.batch_norm(x, *expected, training=True, **words),
    ]
    torch.testing.assert_close(outputs, plain)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dim", [0, 1, None])
def test_weight_norm_has_the_second_derivatives_of_its_formula(dim):
    """Those of torch's own are not symmetric."""
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4), dim=dim).double()
    x, used = torch.randn(5, 3, dtype=torch.float64), list(layer.parameters())
    weights = [p.detach().flatten() for p in used]

    def slopes(flat):
        for p, part in zip(used, flat.split([w.numel() for w in weights]), strict=True):
            p.data.copy_(part.view(p.shape))
        return torch.cat([g.flatten() for g in torch.autograd.grad(layer(x).sin().square().sum(), used)])

    at = torch.cat(weights)
    numeric = torch.stack([(slopes(at + 1e-6 * e) - slopes(at - 1e-6 * e)) / 2e-6 for e in torch.eye(len(at)).double()])
    slopes(at)
    with SecondDerivatives():
        found = torch.autograd.grad(layer(x).sin().square().sum(), used, create_graph=True)
    rows = [torch.autograd.grad(g, used, retain_graph=True) for part in found for g in part.flatten()]
    torch.testing.assert_close(
        torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]), numeric, atol=1e-7, rtol=1e-6
    )


def test_batch_norm_in_evaluation_has_third_derivatives_too():
    """As Hutchinson's penalty wants them: against a difference of vᵀHv."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2)).double()
    net(torch.randn(20, 4, dtype=torch.float64))
    net.eval()
    x, params = torch.randn(6, 4, dtype=torch.float64), list(net.parameters())
    v, along = ([torch.randn_like(p) for p in params] for _ in range(2))

    def curved(step):
        with torch.no_grad():
            torch._foreach_add_(params, along, alpha=step)
        with SecondDerivatives():
            slopes = torch.autograd.grad(net(x).pow(3).mean(), params, create_graph=True)
            products = torch.autograd.grad(slopes, params, v, create_graph=True)
        return sum((a * b).sum() for a, b in zip(products, v, strict=True))

    third = torch.autograd.grad(curved(0.0), params)
    expected = (curved(1e-5) - curved(-2e-5)).detach() / 2e-5
    assert float(sum((a * b).sum() for a, b in zip(third, along, strict=True))) == pytest.approx(
        float(expected), rel=1e-6
    )
