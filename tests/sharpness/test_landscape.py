"""Landscapes against closed forms and against weights set by hand; their figures."""

import copy
import math

import pytest
import torch
from matplotlib import image
from matplotlib.figure import Figure
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer.sharpness import (
    Line,
    Settings,
    Surface,
    between,
    classification,
    eigenvectors,
    filter_normalised,
    line,
    measure,
    picture,
    plane,
)
from support.dense import batches
from support.problems import Vector, spd

QUIET = Settings(progress=False)


@pytest.fixture
def quadratic():
    model, A = Vector([1.0, -2.0, 0.5]).double(), spd(3)
    return model, A, lambda batch: model.w @ A @ model.w / 2, [(torch.ones(2, 1),)]


@pytest.fixture
def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()
    for x, _ in batches():
        model(x)
    return model, batches()


def test_a_quadratic_s_line_and_plane(quadratic):
    model, A, loss_of, given = quadratic
    w = model.w.detach().clone()
    d, e = torch.tensor([1.0, 0.0, 2.0]).double(), torch.tensor([0.5, -1.0, 0.0]).double()
    found = line(model, loss_of, given, [d], reach=2.0, points=5, settings=QUIET)
    assert found.positions == (-2.0, -1.0, 0.0, 1.0, 2.0)
    assert found.losses == pytest.approx([float((w + t * d) @ A @ (w + t * d) / 2) for t in found.positions])
    assert found.accuracies is None
    surface = plane(model, loss_of, given, [[d], [e]], points=3, settings=QUIET)
    points = [[w + s * d + t * e for s in surface.x] for t in surface.y]
    for row, its in zip(surface.losses, points, strict=True):
        assert row == pytest.approx([float(v @ A @ v / 2) for v in its])
    assert torch.equal(model.w, w)


def test_along_eigenvectors_the_loss_curves_by_the_eigenvalues(quadratic):
    model, _A, loss_of, given = quadratic
    values, vectors = eigenvectors(model, loss_of, given, top=2, settings=QUIET)
    for value, vector in zip(values, vectors, strict=True):
        left, middle, right = line(model, loss_of, given, vector, reach=0.1, points=3, settings=QUIET).losses
        assert (left + right - 2 * middle) / 0.01 == pytest.approx(value)


def test_filters_are_as_long_as_the_weights_own():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4))
    params = list(model.parameters())
    made = filter_normalised(params, [torch.randn_like(p) for p in params])
    for p, d in zip(params, made, strict=True):
        if p.ndim > 1:
            torch.testing.assert_close(d.flatten(1).norm(dim=1), p.detach().flatten(1).norm(dim=1))
        else:
            assert not d.any()


def test_a_random_line_does_not_see_how_a_layer_is_scaled():
    """That is what the normalisation is for: the same picture of the same function."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    given, twin = batches(), copy.deepcopy(model)
    with torch.no_grad():
        for p in model[0].bias, twin[0].bias:
            p.zero_()
        twin[0].weight.mul_(5)
        twin[2].weight.div_(5)
    one, other = (line(m, classification(m), given, points=5, settings=QUIET) for m in (model, twin))
    assert one.losses == pytest.approx(other.losses)
    assert one.accuracies == pytest.approx(other.accuracies)
    assert line(model, classification(model), given, points=5, seed=1, settings=QUIET).losses != one.losses


def test_the_middle_is_the_model_itself_and_nothing_is_left_behind(net):
    model, given = net
    before = copy.deepcopy(model.state_dict())
    found = plane(model, classification(model), given, points=3, settings=QUIET)
    itself = measure(model, classification(model), given, matrices=[], samples=0, ascent=0, progress=False)
    assert found.losses[1][1] == pytest.approx(itself.loss)
    assert found.accuracies[1][1] == pytest.approx(itself.accuracy)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.training


def other_net(model, given):
    """Trained further, so that its statistics and counters differ too."""
    twin = copy.deepcopy(model)
    opt = torch.optim.SGD(twin.parameters(), lr=0.5)
    for x, y in given * 3:
        opt.zero_grad()
        cross_entropy(twin(x), y).backward()
        opt.step()
    return twin


def test_between_two_models_weights_and_statistics_are_interpolated(net):
    model, given = net
    twin, before = other_net(model, given), copy.deepcopy(model.state_dict())
    found = between(model, classification(model), given, model, twin.state_dict(), points=5, settings=QUIET)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.training
    x, y = (torch.cat(part) for part in zip(*given, strict=True))
    for t, loss, right in zip(found.positions, found.losses, found.accuracies, strict=True):
        made = copy.deepcopy(model).eval()
        other = twin.state_dict()
        mixed = {k: (1 - t) * v + t * other[k] if v.is_floating_point() else v for k, v in before.items()}
        made.load_state_dict(mixed)
        assert loss == pytest.approx(cross_entropy(made(x), y).item())
        assert right == pytest.approx((made(x).argmax(1) == y).double().mean().item())


def test_statistics_can_be_estimated_anew(net):
    model, given = net
    twin = other_net(model, given)
    before, momentum = copy.deepcopy(model.state_dict()), model[1].momentum
    made = copy.deepcopy(model).eval()
    for i, loss in enumerate(
        between(
            model, classification(model), given, model, twin, points=3, statistics="reestimated", settings=QUIET
        ).losses
    ):
        mixed = {
            k: torch.lerp(v, twin.state_dict()[k], i / 2) if v.is_floating_point() else v for k, v in before.items()
        }
        made.load_state_dict(mixed)
        inner = [made[0](x) for x, _ in given]
        made[1].running_mean = torch.stack([h.mean(0) for h in inner]).mean(0).detach()
        made[1].running_var = torch.stack([h.var(0) for h in inner]).mean(0).detach()
        x, y = (torch.cat(part) for part in zip(*given, strict=True))
        assert loss == pytest.approx(cross_entropy(made(x), y).item())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model[1].momentum == momentum


def test_a_permuted_twin_is_the_same_function_and_not_linearly_connected():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    given, twin = batches(), copy.deepcopy(model)
    order = torch.tensor([3, 4, 5, 0, 1, 2])
    with torch.no_grad():
        for p in (*model.parameters(), *twin.parameters()):
            p.mul_(3)
        twin[0].weight.copy_(twin[0].weight[order])
        twin[0].bias.copy_(twin[0].bias[order])
        twin[2].weight.copy_(twin[2].weight[:, order])
    y = model[2](model[1](model[0](given[0][0]))).argmax(1)
    given = [(given[0][0], y)]
    found = between(model, classification(model), given, model, twin, settings=QUIET)
    assert found.losses[0] == pytest.approx(found.losses[-1])
    assert found.barrier == pytest.approx(max(found.losses) - found.losses[0])
    assert found.barrier > 0.05
    assert found.accuracy_barrier > 0
    itself = between(model, classification(model), given, model, model, points=5, settings=QUIET)
    assert itself.barrier == pytest.approx(0, abs=1e-12)


def test_what_is_not_trained_moves_too_and_comes_back(net):
    model, given = net
    twin = other_net(model, given)
    for m in (model, twin):
        m[0].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    found = between(model, classification(model), given, model, twin, points=2, settings=QUIET)
    end = measure(twin, classification(twin), given, matrices=[], samples=0, ascent=0, progress=False)
    assert found.losses[1] == pytest.approx(end.loss)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_where_the_loss_overflows_there_is_a_gap(quadratic, tmp_path):
    model, _, _, given = quadratic

    def loss_of(batch):
        return (model.w**2).sum().exp()

    found = line(model, loss_of, given, [torch.ones(3).double()], reach=40.0, points=5, settings=QUIET)
    assert math.isinf(found.losses[0])
    assert math.isfinite(found.losses[2])
    assert Line((0.0, 0.5, 1.0), (1.0, math.nan, 1.0)).barrier == math.inf
    found.plot(tmp_path / "line.png")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"points": 1}, "points must be at least 2, got 1"),
        ({"reach": 0}, r"reach must be a finite number in \(0, inf\], got 0"),
        ({"direction": [torch.zeros(2)]}, r"direction must have tensors of shapes \[\(3,\)\], got \[\(2,\)\]"),
        ({}, "a random direction needs weights with filters"),
    ],
)
def test_wrong_arguments_are_named(quadratic, wrong, said):
    model, _, loss_of, given = quadratic
    with pytest.raises(ValueError, match=said):
        line(model, loss_of, given, settings=QUIET, **wrong)


def test_other_models_are_refused(net):
    model, given = net
    with pytest.raises(ValueError, match=r"second is of another model: it differs in 3.bias, 3.weight"):
        between(model, classification(model), given, model, nn.Sequential(*list(model)[:3]))
    with pytest.raises(ValueError, match="directions must be two, got 1"):
        plane(model, classification(model), given, [list(model.parameters())])
    with pytest.raises(ValueError, match="statistics must be one of"):
        between(model, classification(model), given, model, model, statistics="new")


# Figures.


def drawn(path):
    """Its pixels; a figure with something on it has many colours."""
    pixels = image.imread(path)
    assert len({tuple(p) for p in (pixels[::7, ::7, :3] * 255).astype(int).reshape(-1, 3).tolist()}) > 3
    return pixels


def test_figures_are_written(net, tmp_path):
    model, given = net
    loss_of = classification(model)
    line(model, loss_of, given, points=5, settings=QUIET).plot(tmp_path / "line.png")
    surface = plane(model, loss_of, given, points=5, settings=QUIET)
    surface.plot(tmp_path / "plane.png")
    surface.plot(tmp_path / "accuracy.png", accuracy=True)
    found = measure(model, loss_of, given, samples=0, ascent=0, progress=False)
    picture.density({"Hessian": found.hessian, "Gauss-Newton": found.ggn}, tmp_path / "density.png")
    for name in ("line", "plane", "accuracy", "density"):
        drawn(tmp_path / f"{name}.png")


def test_several_lines_on_axes_of_one_s_own():
    axes = Figure().add_subplot()
    for name, height in (("one", 1.0), ("other", 2.0)):
        assert Line((0.0, 1.0), (height, height), label="t").plot(axes, label=name) is axes
    assert [made.get_label() for made in axes.get_lines()] == ["one", "other"]
    assert [list(made.get_ydata()) for made in axes.get_lines()] == [[1, 1], [2, 2]]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("t", "loss")


def test_odd_surfaces_are_drawn_or_refused(tmp_path):
    flat = Surface((0.0, 1.0), (0.0, 1.0), ((1.0, 1.0), (1.0, 1.0)))
    flat.plot(tmp_path / "flat.png")
    steep = Surface((0.0, 1.0), (0.0, 1.0), ((1e-4, 1.0), (math.nan, 1e3)))
    steep.plot(tmp_path / "steep.png")
    nothing = Surface((0.0, 1.0), (0.0, 1.0), ((math.nan, math.nan), (math.inf, math.nan)))
    with pytest.raises(ValueError, match="no finite loss on this plane"):
        nothing.plot(tmp_path / "nothing.png")
    with pytest.raises(ValueError, match="needs accuracies"):
        flat.plot(tmp_path / "flat.png", accuracy=True)
