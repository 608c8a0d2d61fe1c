"""The average of the weights, against torch's own, and in a run."""

from dataclasses import replace

import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

import gtracer
from gtracer.lab import data
from gtracer.lab.config import Config
from gtracer.lab.training.average import Average
from gtracer.lab.training.trainer import train

DIGITS = Config(epochs=3, width=16, batch_size=256, device="cpu")


def test_it_is_torch_s_with_the_same_decay():
    """Of weights and buffers; one that counts batches is no average."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    ours = Average(model, 0.7)
    theirs = AveragedModel(model, use_buffers=True, avg_fn=lambda mean, now, n: mean + (now - mean) * (1 - decay(n)))
    theirs.n_averaged += 1  # the first weights count as averaged, as ours do

    def decay(n):
        return min(0.7, (n.item()) / (9 + n.item()))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(30):
        optimizer.zero_grad()
        model(torch.randn(8, 3, dtype=torch.float64)).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ours.update()
        theirs.update_parameters(model)
    live = {name: value.clone() for name, value in model.state_dict().items()}
    wanted = theirs.module.state_dict()
    with ours.inside():
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                torch.testing.assert_close(value, wanted[name], rtol=1e-12, atol=1e-12)
            else:
                assert torch.equal(value, live[name])
    assert all(torch.equal(value, live[name]) for name, value in model.state_dict().items())


def test_it_goes_on_from_what_was_saved():
    """With its count of steps, by which the first ones weigh more."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    whole, resumed = Average(model, 0.9), Average(model, 0.9)

    def walk():
        for p in model.parameters():
            p.data += torch.randn_like(p)

    walk()
    whole.update()
    resumed.load_state_dict(whole.state_dict())
    for _ in range(2):
        walk()
        whole.update()
        resumed.update()
    assert whole.steps == resumed.steps == 3
    assert all(map(torch.equal, whole.means, resumed.means))


def test_what_is_evaluated_is_what_is_kept(tmp_path):
    config = replace(DIGITS, ema=0.95, optimizer="sgd")
    record = train(config, tmp_path / "ema", [], model=True)
    plain = train(replace(config, ema=0.0), tmp_path / "plain", [], model=True)
    assert record.curves["train_loss"] == plain.curves["train_loss"]  # training does not know of it
    assert record.curves["test_loss"] != plain.curves["test_loss"]
    test = data.load(config).test
    right = gtracer.load(tmp_path / "ema").probabilities(test).argmax(1) == test.labels
    assert right.double().mean().item() == record.curves["test_accuracy"][-1]
    weights = [load_file(tmp_path / name / "model.safetensors")["7.weight"] for name in ("ema", "plain")]
    assert not torch.equal(*weights)
