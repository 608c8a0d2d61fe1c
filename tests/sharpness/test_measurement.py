"""Every measure against dense matrices and closed forms in float64, and against rescaled twins of a network."""

import copy
import math
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from gtracer import SGDTracer
from gtracer.sharpness import Settings, SplitLoss, classification, eigenvectors, measure, picture
from gtracer.sharpness.bound import inverse_kl
from gtracer.sharpness.result import INVARIANT
from support.dense import batches, flat, matrices
from support.problems import Vector, spd

QUIET = {"progress": False}
NOTHING = {"matrices": [], "samples": 0, "ascent": 0, **QUIET}


def tanh_mlp():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def conv_batch_norm():
    layers = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.SiLU(), nn.Conv2d(3, 3, 3, stride=2, groups=3)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(3, 3)).double()
    model(torch.randn(32, 2, 4, 4).double())  # statistics other than those of the start
    return model


NETS = {"tanh mlp": (tanh_mlp, (5,)), "conv, batch norm": (conv_batch_norm, (2, 4, 4))}


@pytest.fixture(params=NETS)
def net(request):
    torch.manual_seed(0)
    make, shape = NETS[request.param]
    return make(), batches(shape)


def mean_loss(model, given):
    x, y = (torch.cat(part) for part in zip(*given, strict=True))
    return cross_entropy(model(x), y)


def test_eigenvalues_and_trace_are_the_dense_matrices(net):
    model, given = net
    found = measure(model, classification(model), given, steps=30, probes=30, samples=0, ascent=0, top=3, **QUIET)
    for spectrum, dense in zip((found.hessian, found.ggn), matrices(model, given), strict=True):
        true = torch.linalg.eigvalsh(dense).flip(0)
        assert spectrum.top == pytest.approx(float(true[0]), rel=1e-3)
        for value, residual, its in zip(spectrum.eigenvalues, spectrum.residuals, true, strict=False):
            assert abs(value - its) <= residual + 1e-9
        assert spectrum.lowest == pytest.approx(float(true[-1]), abs=1e-3 * float(true[0]))
        assert abs(spectrum.trace - float(true.sum())) <= 4 * spectrum.trace_error + 1e-9


def test_all_steps_give_the_trace_and_the_effective_dimension_exactly(net):
    model, given = net
    size = sum(p.numel() for p in model.parameters())
    options = {"steps": size, "tolerance": 0.0, "samples": 0, "ascent": 0, **QUIET}
    found = measure(model, classification(model), given, prior=2.0, **options)
    H, G = matrices(model, given)
    assert (found.trace, found.hessian.trace_error) == (pytest.approx(float(H.trace())), 0.0)
    assert found.ggn.trace == pytest.approx(float(G.trace()))
    values = torch.linalg.eigvalsh(G).clamp(min=0)
    alpha = 1 / 38
    assert found.effective_dimension.value == pytest.approx(float((values / (values + alpha)).sum()), rel=1e-6)
    own = measure(model, classification(model), given, matrices="ggn", **options).effective_dimension.value
    alpha = 1 / (19 * float(flat(model.parameters()).square().mean()))
    assert own == pytest.approx(float((values / (values + alpha)).sum()), rel=1e-6)


def test_of_the_hessian_where_the_loss_is_in_one_piece(net):
    model, given = net

    def loss_of(batch):
        return cross_entropy(model(batch[0]), batch[1])

    found = measure(model, loss_of, given, samples=0, ascent=0, **QUIET)
    assert found.ggn is None
    assert found.accuracy is None
    assert found.top_eigenvalue == pytest.approx(float(torch.linalg.eigvalsh(matrices(model, given)[0])[-1]), rel=1e-3)
    assert found.effective_dimension is not None


def test_a_regression_s_gauss_newton_matrix():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    given = [(torch.randn(n, 4).double(), torch.randn(n, 2).double()) for n in (6, 2)]
    loss_of = SplitLoss(lambda b: model(b[0]), lambda out, b: mse_loss(out, b[1]))
    found = measure(model, loss_of, given, matrices="ggn", steps=44, samples=0, ascent=0, **QUIET)
    assert found.hessian is None
    dense = matrices(model, given, mse_loss)[1]
    assert found.ggn.trace == pytest.approx(float(dense.trace()), abs=4 * found.ggn.trace_error + 1e-9)
    assert found.ggn.top == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=1e-3)


def test_eigenvectors_are_the_matrix_s(net):
    model, given = net
    values, vectors = eigenvectors(
        model, classification(model), given, top=2, tolerance=1e-8, steps=60, settings=Settings(progress=False)
    )
    H = matrices(model, given)[0]
    for value, vector in zip(values, vectors, strict=True):
        assert [v.shape for v in vector] == [p.shape for p in model.parameters()]
        x = flat(vector)
        torch.testing.assert_close(H @ x, value * x, atol=1e-6, rtol=0)
        assert float(x.norm()) == pytest.approx(1)


def test_loss_accuracy_gradient_and_its_noise_over_unequal_batches(net):
    model, given = net
    found = measure(model.eval(), classification(model), given, **NOTHING)
    loss = mean_loss(model, given)
    x, y = (torch.cat(part) for part in zip(*given, strict=True))
    assert found.loss == pytest.approx(loss.item())
    assert found.accuracy == pytest.approx(float((model(x).argmax(1) == y).double().mean()))
    mean = flat(torch.autograd.grad(loss, list(model.parameters())))
    assert found.gradient_norm == pytest.approx(float(mean.norm()))
    each = [(len(b[1]), flat(torch.autograd.grad(mean_loss(model, [b]), list(model.parameters())))) for b in given]
    noise = sum(n * float((g - mean).square().sum()) for n, g in each) / 2
    assert found.gradient_noise == pytest.approx(noise)
    assert found.noise_scale == pytest.approx(noise / float(mean.norm()) ** 2)
    assert found.examples == 19
    assert found.batches == (3, 8)


def test_the_noise_is_the_examples_own():
    """Its mean over random batches is the trace of the examples' covariance, whatever the batches' sizes."""
    model = Vector([0.0, 0.0]).double()

    def loss_of(batch):
        return (model.w * batch[0]).sum(1).mean()  # an example's gradient is the example

    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(400):
        drawn = [torch.randn(n, 2, generator=generator).double() * torch.tensor([1.0, 3.0]) for n in (2, 7, 4, 4)]
        found.append(measure(model, loss_of, [(x,) for x in drawn], **NOTHING).gradient_noise)
    found = torch.tensor(found)
    assert abs(found.mean() - 10) < 4 * found.std() / 20


# Closed forms on quadratics.


@pytest.fixture
def quadratic():
    model, A = Vector([1.0, -2.0, 0.5]).double(), spd(3)
    b = torch.tensor([0.3, 0.1, -0.2], dtype=torch.float64)
    given = [(torch.ones(2, 1),), (torch.ones(1, 1),)]
    return model, A, b, lambda batch: model.w @ A @ model.w / 2 + b @ model.w, given


def test_a_quadratic_s_spectrum_and_expected_sharpness(quadratic):
    model, A, _, loss_of, given = quadratic
    found = measure(model, loss_of, given, samples=3000, sigma=0.5, adaptive_sigma=0.3, ascent=0, **QUIET)
    assert found.hessian.eigenvalues == pytest.approx(torch.linalg.eigvalsh(A).flip(0).tolist())
    assert found.trace == pytest.approx(float(A.trace()))
    w = model.w.detach()
    for estimate, true in (
        (found.expected, 0.5**2 / 2 * A.trace()),
        (found.expected_adaptive, 0.3**2 / 2 * (A.diagonal() * w**2).sum()),
    ):
        assert abs(estimate.value - float(true)) < 4 * estimate.error
        assert estimate.error < 0.05 * float(true)


def in_ball(A, g, radius):
    """The maximum of gᵀu + uᵀAu/2 over a sphere: by the multiplier of its Lagrangian, for a positive definite A."""
    values, basis = torch.linalg.eigh(A)
    c = basis.T @ g
    low, high = float(values[-1]), float(values[-1]) + float(g.norm()) / radius + 1
    for _ in range(200):
        middle = (low + high) / 2
        longer = float((c / (middle - values)).norm()) > radius
        low, high = (middle, high) if longer else (low, middle)
    u = basis @ (c / (high - values))
    return float(g @ u + u @ A @ u / 2)


def test_a_quadratic_s_worst_point(quadratic):
    model, A, b, loss_of, given = quadratic
    found = measure(model, loss_of, given, matrices=[], samples=0, ascent=200, radius=2.0, adaptive_radius=1.5, **QUIET)
    w = model.w.detach()
    g, D = A @ w + b, torch.diag(w.abs())
    assert found.worst.value == pytest.approx(in_ball(A, g, 2.0), rel=1e-6)
    assert found.worst_adaptive.value == pytest.approx(in_ball(D @ A @ D, D @ g, 1.5), rel=1e-6)
    # All batches have the same loss.
    assert found.m_worst.value == pytest.approx(found.worst.value)
    assert found.m_worst.error == pytest.approx(0, abs=1e-12)


def test_the_worst_point_of_a_minimum_lies_along_the_largest_eigenvector(quadratic):
    model, A, _, _, given = quadratic
    torch.nn.init.zeros_(model.w)

    def loss_of(batch):
        return model.w @ A @ model.w / 2

    found = measure(model, loss_of, given, matrices=[], samples=0, ascent=300, radius=0.1, **QUIET)
    assert found.worst.value == pytest.approx(0.005 * float(torch.linalg.eigvalsh(A)[-1]), rel=1e-6)


def test_m_sharpness_is_the_mean_of_the_batches_own(net):
    model, given = net
    loss_of = classification(model)
    options = {"matrices": [], "samples": 0, "ascent": 3, "radius": 0.3, **QUIET}
    whole = measure(model, loss_of, given, **options)
    each = [measure(model, loss_of, [batch], **options).worst.value for batch in given]
    assert whole.m_worst.value == pytest.approx(sum(n * x for n, x in zip((8, 8, 3), each, strict=True)) / 19)
    assert whole.m_worst.value > whole.worst.value


def test_one_ascent_step_is_sam_s(net):
    model, given = net
    found = measure(model, classification(model), given, matrices=[], samples=0, ascent=1, radius=0.2, **QUIET)
    model.eval()
    loss = mean_loss(model, given)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for p, g in zip(model.parameters(), gradients, strict=True):
            p.add_(0.2 * g / flat(gradients).norm())
    assert found.worst.value == pytest.approx(mean_loss(model, given).item() - loss.item())


# TRACER's T.


def test_the_trace_ratio_with_an_optimiser_s_average(net):
    """By the optimiser's own arithmetic: what its next step says is T of that batch."""
    model, given = net

    def loss_of(batch):
        return cross_entropy(model(batch[0]), batch[1])

    opt = SGDTracer(model.eval().parameters(), lr=0.1, rho=0.01, delta=0.02)
    for batch in given:
        opt.step(loss_of, batch)
    f = {p: x for g in opt.param_groups for p, x in zip(g["params"], opt.average_of(g, g["params"]), strict=True)}
    found = measure(model, loss_of, given, f=f, delta=0.02, **NOTHING).trace_ratio
    kept = copy.deepcopy(model.state_dict())
    expected = []
    for batch in given:
        twin = SGDTracer(model.parameters(), lr=0.1, rho=0.01, delta=0.02)
        twin.load_state_dict(copy.deepcopy(opt.state_dict()))
        twin.step(loss_of, batch)
        expected.append(twin.stats.trace_ratio)
        model.load_state_dict(kept)
    assert found.total == pytest.approx(sum(n * t for n, t in zip((8, 8, 3), expected, strict=True)) / 19)
    assert sum(found.layers.values()) == pytest.approx(found.total)
    assert set(found.layers) == {n.rpartition(".")[0] for n, _ in model.named_parameters()}
    assert found.error > 0
    assert not found.measured
    by_name = {name: f[p] for name, p in model.named_parameters()}
    assert measure(model, loss_of, given, f=by_name, delta=0.02, **NOTHING).trace_ratio == found


def test_the_trace_ratio_with_a_measured_average(net):
    model, given = net
    found = measure(model, classification(model), given, delta=0.05, **NOTHING).trace_ratio
    model.eval()
    squares = sum(
        len(b[1]) / 19 * flat(torch.autograd.grad(mean_loss(model, [b]), list(model.parameters()))) ** 2 for b in given
    )
    assert found.total == pytest.approx(float((squares / (squares + 0.05)).sum()))
    assert found.measured


# The bound.


def test_the_bound_is_maurer_s(net):
    model, given = net
    start = {name: p + 0.001 for name, p in model.named_parameters()}
    found = measure(
        model, classification(model), given, matrices=[], ascent=0, samples=5, sigma=0.5, start=start, **QUIET
    ).pac_bayes
    size = sum(p.numel() for p in model.parameters())
    assert found.kl == pytest.approx(size * 1e-6 / (2 * 0.25))
    room = (found.kl + math.log(2 * math.sqrt(19) / 0.05)) / 19
    q, p = found.error_rate, found.bound
    assert 0 < q < p < 1
    assert q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)) == pytest.approx(room, rel=1e-6)
    zero = measure(model, classification(model), given, matrices=[], ascent=0, samples=1, sigma=0.5, **QUIET).pac_bayes
    assert zero.kl == pytest.approx(float(flat(model.parameters()).square().sum()) / 0.5)


def test_the_inverse_of_kl_at_its_ends():
    assert inverse_kl(1.0, 0.1) == 1
    assert inverse_kl(0.3, 0.0) == pytest.approx(0.3)
    assert inverse_kl(0.3, 1e9) == pytest.approx(1)


# Which measures know how the weights are scaled.


def rescaled(model, by):
    """The same function: the first layer times a number, the second divided by it, with a ReLU in between."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.mul_(by)
        twin[0].bias.mul_(by)
        twin[2].weight.div_(by)
    return twin


def test_what_is_said_to_be_invariant_is_and_what_is_not_is_not():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    given, options = batches(), {"radius": 0.3, "sigma": 0.1, "steps": 70, "tolerance": 0.0, **QUIET}
    # A prior so narrow that the bound says something.
    start = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    twin = rescaled(model, 4.0)
    one = {row.name: row for row in measure(model, classification(model), given, start=start, **options).rows()}
    other = {row.name: row for row in measure(twin, classification(twin), given, start=start, **options).rows()}
    assert set(one) == set(INVARIANT)
    for name, row in one.items():
        if row.invariant:
            assert other[name].value == pytest.approx(row.value, rel=1e-6), name
        elif name != "pac_bayes":  # by its KL, below: the bound itself is 1 here
            assert abs(other[name].value / row.value - 1) > 0.02, name
    bounds = [measure(m, classification(m), given, **options).pac_bayes.kl for m in (model, twin)]
    assert bounds[1] > 2 * bounds[0]


def test_the_scale_of_weights_before_batch_norm_is_not_seen_by_adaptive_measures():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8, eps=1e-12), nn.ReLU(), nn.Linear(8, 3)).double()
    given = batches()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.mul_(3)
        twin[0].bias.mul_(3)
    options = {"train_mode": True, "matrices": [], "adaptive_radius": 0.2, **QUIET}
    one, other = (measure(m, classification(m), given, **options) for m in (model, twin))
    for name in ("worst_adaptive", "expected_adaptive", "m_worst_adaptive"):
        assert getattr(other, name).value == pytest.approx(getattr(one, name).value, rel=1e-6)
    assert other.worst.value < 0.9 * one.worst.value


def test_subsets_of_the_parameters(net):
    model, given = net
    last = list(model[-1].parameters())
    found = measure(
        model, classification(model), given, params=last, samples=0, ascent=0, steps=80, tolerance=0.0, **QUIET
    )
    H = matrices(model, given)[0]
    count = sum(p.numel() for p in last)
    assert found.parameters == count
    assert found.trace == pytest.approx(float(H[-count:, -count:].trace()), rel=1e-6)
    for p in model[0].parameters():
        p.requires_grad_(False)
    rest = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = measure(model, classification(model), given, samples=0, ascent=0, steps=90, tolerance=0.0, **QUIET)
    assert frozen.parameters == rest
    assert frozen.trace == pytest.approx(float(H[-rest:, -rest:].trace()), rel=1e-6)
    assert not model[0].weight.requires_grad


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"top": 0}, "top must be a whole number of at least 1, got 0"),
        ({"probes": -1}, "probes must be a whole number of at least 0, got -1"),
        ({"sigma": 0.0}, r"sigma must be a finite number in \(0, inf\], got 0.0"),
        ({"radius": math.nan}, "radius must be a finite number"),
        ({"confidence": 1.0}, "confidence must be"),
        ({"matrices": ["fisher"]}, "matrices must be one of 'hessian', 'ggn', got 'fisher'"),
        ({"matrices": 3}, "matrices must be a list of 'hessian' and 'ggn', got 3"),
        ({"seed": 2**63}, "seed must be below"),
        ({"f": [1]}, "f must be a Mapping of parameters"),
        ({"f": {"0.weight": torch.zeros(2)}}, "f must hold a tensor of shape"),
        ({"start": {}}, "start must hold a tensor of shape"),
        ({"train_mode": 1}, "train_mode must be True or False"),
        ({"progress": "yes"}, "progress must be True, False or a function of what is done and its share, got 'yes'"),
        ({"params": []}, "no parameters that require gradients"),
    ],
)
def test_wrong_arguments_are_named(wrong, said):
    model = tanh_mlp()
    with pytest.raises(ValueError, match=said) as caught:
        measure(model, classification(model), batches(), **(QUIET | wrong))
    assert "\n" not in str(caught.value)


def test_in_plain_values_a_number_stays_and_what_is_none_is_null():
    torch.manual_seed(0)
    model = tanh_mlp()
    found = measure(model, classification(model), batches((5,)), **NOTHING)
    plain = replace(found, gradient_noise=math.nan).to_mapping()
    assert (plain["loss"], plain["gradient_norm"]) == (found.loss, found.gradient_norm)
    assert plain["gradient_noise"] is None


def test_progress_goes_from_the_first_batch_to_the_whole():
    torch.manual_seed(0)
    model, shares = tanh_mlp(), []
    few = {"steps": 3, "probes": 1, "samples": 1, "ascent": 1}
    measure(model, classification(model), batches((5,)), **few, progress=lambda what, share: shares.append(share))
    assert 0 < shares[0] < 0.1
    assert shares == sorted(shares)
    assert 0.5 < shares[-1] <= 1.0


def test_without_matplotlib_drawing_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    needs = r"drawing needs matplotlib.*: pip install 'gtracer-optim\[lab\]'"
    with pytest.raises(ModuleNotFoundError, match=needs), picture.axes(tmp_path / "x.png"):
        pass


def test_wrong_second_derivatives_are_told():
    """Of a function whose derivative takes a part of itself for a constant, so that the matrix is not symmetric."""

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx, u, v):
            ctx.save_for_backward(u, v)
            return u * v

        @staticmethod
        def backward(ctx, up):
            u, v = ctx.saved_tensors
            return up * v, up * u.detach()

    torch.manual_seed(0)
    net = nn.Bilinear(3, 3, 1).double()
    x = torch.randn(9, 9, dtype=torch.float64)

    def loss_of(batch):
        w = net.weight.flatten()
        return (batch @ Times.apply(w, w.flip(0))).square().mean()

    with pytest.warns(UserWarning, match=r"products with the hessian are not symmetric, by \d+\.\d% of its largest"):
        measure(net, loss_of, [x], tolerance=0.0, progress=False, samples=0, ascent=0)
