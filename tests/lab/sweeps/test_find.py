"""`gtracer find-rho`: branches of a run, on held-out data; found once, it is read."""

import json
import math

import pytest
import torch

from gtracer import cli
from gtracer.lab.config import Config
from gtracer.lab.errors import LabError
from gtracer.lab.sweeps import find
from gtracer.lab.training.run import Run
from gtracer.lab.training.steps import Eager

BASE = Config(label_noise=0.5, epochs=3, width=8, batch_size=128)


def test_it_is_what_find_rho_says_of_the_run(tmp_path):
    """The branches are the first steps of the run itself, at a constant learning rate."""
    curve = find.find(BASE, tmp_path, steps=3, candidates=[0.001, 0.01])
    assert curve.rhos == (0.0, 0.001, 0.01)
    run = Run(find.branched(BASE))
    for group in run.optimizer.param_groups:
        group["rho"] = 0.01
        group.pop("rho_is_auto")
    losses = [loss for _, loss in zip(range(3), Eager(run).rest_of_epoch(), strict=False)]
    assert curve.branches[2].train == pytest.approx(losses[-1], rel=1e-6)
    assert len(curve.branches[0].held_out) == 10
    logits = run._outputs(run.holdout)
    whole = torch.nn.functional.cross_entropy(logits, run.holdout.labels).item()
    sizes = torch.tensor([14] * 9 + [9])
    mean = (torch.tensor(curve.branches[2].held_out) * sizes).sum() / sizes.sum()
    assert mean.item() == pytest.approx(whole, rel=1e-5)
    assert curve.chance == pytest.approx(math.log(10), abs=0.01)


def test_it_is_read_again_where_it_is_known(tmp_path, monkeypatch):
    curve = find.find(BASE, tmp_path, steps=2, candidates=[0.001, 1e9])
    assert 1e9 in curve.collapsed
    assert (tmp_path / "rho.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(find, "find_rho", None)
    again = find.find(BASE, tmp_path, steps=2, candidates=[0.001, 1e9])
    assert str(again) == str(curve)
    with pytest.raises(TypeError):  # another run is found anew
        find.find(BASE, tmp_path, steps=3, candidates=[0.001, 1e9])
    (tmp_path / "rho.json").write_text("{}")
    with pytest.raises(LabError, match=r"rho.json is damaged .* remove it"):
        find.find(BASE, tmp_path, steps=2, candidates=[0.001, 1e9])


def test_from_the_command_line(tmp_path, capsys):
    words = ["find-rho", "--label-noise", "0.5", "--epochs", "2", "--width", "8", "--out", str(tmp_path)]
    assert cli.main([*words, "--candidates", "0.001", "0.003"]) == 0
    out = capsys.readouterr().out
    assert "against ρ = 0" in out
    assert str(tmp_path / "rho.png") in out
    told = json.loads((tmp_path / "rho.json").read_text())
    assert told["reason"] in out
    assert "test" not in told["reason"]
    assert told["steps"] == round(0.2 * 2 * 11)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optimizer", "sgd"], "optimizer 'sgd' has no ρ to find: take sgd-tracer or sgd-sam"),
        (["--optimizer", "sgd-trace"], "unknown optimizer 'sgd-trace'"),
        (["--candidates", "0"], "candidates must hold a ρ above 0"),
    ],
)
def test_bad_input(words, message, capsys, tmp_path):
    assert cli.main(["find-rho", "--out", str(tmp_path), *words]) == 1
    assert message in capsys.readouterr().err


def test_sam_s_candidates(tmp_path):
    """Another kind of ρ has other candidates."""
    curve = find.find(Config(optimizer="sam", epochs=1, width=8), tmp_path, steps=1)
    assert curve.rhos[1:] == (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
