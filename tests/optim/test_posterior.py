"""The posterior against its closed form, and predictions averaged over it."""

import pytest
import torch
from torch import nn

from gtracer import AdamTracer, SGDTracer
from gtracer.calibration import calibration
from support.networks import make, mlp


def trained(kind=SGDTracer, steps=3, **options):
    made = make(mlp)
    opt = kind(made.params, lr=0.05, rho=0.02, delta=0.1, **options)
    for _ in range(steps):
        opt.step(made.loss_of)
    return made, opt


def draws(made, opt, count, **options):
    torch.manual_seed(0)
    rows = []
    for _ in range(count):
        with opt.sampled_weights(**options):
            rows.append(torch.cat([p.detach().flatten() for p in made.params]))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("options", "scale"),
    [({}, 0.02), ({"examples": 50}, 1 / 50), ({"examples": 50, "temperature": 0.25}, 0.25 / 50)],
)
def test_draws_have_the_posteriors_mean_and_variance(options, scale):
    made, opt = trained()
    rows = draws(made, opt, 4000, **options)
    variance = torch.cat([(scale / (opt.state[p]["f"] + 0.1)).flatten() for p in made.params])
    mean = torch.cat([p.detach().flatten() for p in made.params])
    assert ((rows.mean(0) - mean).abs() < 5 * (variance / 4000) ** 0.5).all()
    assert ((rows.var(0) / variance - 1).abs() < 5 * (2 / 4000) ** 0.5).all()


def test_weights_come_back_also_after_an_error():
    made, opt = trained()
    before = [p.detach().clone() for p in made.params]
    moved = []

    def fail():
        with opt.sampled_weights():
            moved.append(not torch.equal(made.params[0], before[0]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert moved == [True]
    assert all(torch.equal(a, b) for a, b in zip(before, made.params, strict=True))


def test_adams_second_moment_is_its_precision():
    made, opt = trained(AdamTracer)
    rows = draws(made, opt, 4000)
    f = torch.cat([(opt.state[p]["exp_avg_sq"] / (1 - 0.999**3)).flatten() for p in made.params])
    assert ((rows.var(0) / (0.02 / (f + 0.1)) - 1).abs() < 5 * (2 / 4000) ** 0.5).all()


def test_at_temperature_zero_the_prediction_is_the_models():
    made, opt = trained()
    found = opt.predict(made.model, made.x, samples=3, temperature=0.0)
    assert torch.allclose(found, torch.softmax(made.model(made.x), 1), rtol=1e-12)


def test_predictions_are_means_over_draws():
    made, opt = trained()
    torch.manual_seed(4)
    found = opt.predict(made.model, made.x, samples=3, activation=torch.exp)
    torch.manual_seed(4)
    parts = []
    for _ in range(3):
        with opt.sampled_weights(), torch.no_grad():
            parts.append(torch.exp(made.model(made.x)))
    assert torch.allclose(found, sum(parts) / 3, rtol=1e-12)
    assert not found.requires_grad


def test_predictions_are_made_in_evaluation_mode():
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.BatchNorm1d(3).eval())
    opt = SGDTracer(model.parameters(), lr=0.1)
    opt.step(lambda: model(torch.randn(5, 4)).square().mean())
    seen = []
    model[1].register_forward_hook(lambda module, x, y: seen.append(module.training))
    opt.predict(model, torch.randn(2, 4), samples=2)
    assert seen == [False, False]
    assert model.training
    assert model[1].training
    assert not model[2].training


def test_a_mapping_is_taken_apart_and_logits_are_found():
    """As Hugging Face's models want and give it."""

    class Output:
        def __init__(self, logits):
            self.logits = logits

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, features):
            return Output(self.inner(features))

    model, x = Model(), torch.randn(2, 4)
    opt = SGDTracer(model.parameters(), lr=0.1)
    opt.step(lambda: model(x).logits.square().mean())
    found = opt.predict(model, {"features": x}, temperature=0)
    assert torch.allclose(found, torch.softmax(model(x).logits, 1))


def test_averaging_calibrates_an_overconfident_net():
    """A net that has memorised random labels is sure of itself; its posterior is less so."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
    x, y, fresh = torch.randn(60, 8), torch.randint(3, (60,)), torch.randn(300, 8)
    labels = torch.randint(3, (300,))
    opt = SGDTracer(model.parameters(), lr=0.2, momentum=0.9, rho=1e-4)
    for _ in range(200):
        opt.step(lambda: nn.functional.cross_entropy(model(x), y))
    alone = calibration(torch.softmax(model(fresh), 1).detach(), labels)
    averaged = calibration(opt.predict(model, fresh, 50, temperature=2.0), labels)
    assert averaged["nll"] < alone["nll"]
    assert averaged["ece"] < alone["ece"]


@pytest.mark.parametrize(
    "options", [{"examples": 0}, {"examples": 1.5}, {"temperature": -1.0}, {"temperature": float("nan")}]
)
def test_bad_numbers_are_refused(options):
    made, opt = trained()
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"), opt.sampled_weights(**options):
        pass
    with pytest.raises(ValueError, match="samples must be"):
        opt.predict(made.model, made.x, samples=0)


def test_an_untrained_optimiser_has_no_posterior():
    _, opt = trained(steps=0)
    with pytest.raises(RuntimeError, match="no step yet"), opt.sampled_weights():
        pass
