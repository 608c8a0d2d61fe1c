"""The demo and the command line."""

import subprocess
import sys

import pytest
import torch
from rich.console import Console

from gtracer import __version__, cli
from gtracer.lab import demo, digits


def test_wrong_labels_are_wrong_and_as_many_as_asked_for():
    y = torch.randint(10, (1000,))
    noisy = digits.mislabelled(y, 0.5, torch.Generator().manual_seed(0))
    wrong = noisy != y
    assert wrong.sum() == 500
    assert noisy.min() >= 0
    assert noisy.max() <= 9
    # Evenly over the nine other classes: each shift about 500/9 ≈ 56 times.
    shifts = torch.bincount((noisy - y)[wrong] % 10, minlength=10)
    assert shifts[0] == 0
    assert shifts[1:].min() > 30


def test_splits_are_seeded_and_apart():
    a, b, c = digits.load(0.5, 0), digits.load(0.5, 0), digits.load(0.5, 1)
    assert torch.equal(a.x, b.x)
    assert torch.equal(a.y, b.y)
    assert not torch.equal(a.x, c.x)
    assert len(a.x) + len(a.x_test) == 1797
    assert (a.y != a.y_clean).sum() == round(len(a.y) / 2)


def test_same_seed_same_result():
    for make in demo.OPTIMIZERS.values():
        first, second = demo.train(make, seed=3, epochs=2), demo.train(make, seed=3, epochs=2)
        assert (first.last, first.best, first.memorised) == (second.last, second.best, second.memorised)


def test_table_shows_every_optimiser(capsys):
    results = demo.run(seeds=2, epochs=1, console=Console(width=120))
    out = capsys.readouterr().out
    assert list(results) == list(demo.OPTIMIZERS)
    for name, runs in results.items():
        assert name in out
        assert demo.mean_and_error([r.last for r in runs]) in out


def test_mean_and_error():
    assert demo.mean_and_error([1.0, 2.0, 3.0]) == "2.0 ± 0.6"  # s = 1, n = 3
    assert demo.mean_and_error([4.25]) == "4.2"


def test_command_line(capsys, monkeypatch):
    assert cli.main(["demo", "--seeds", "1", "--epochs", "1"]) == 0
    assert "SGD-TRACER" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["gtracer", "--version"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    assert capsys.readouterr().out.strip() == f"gtracer {__version__}"


def test_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "gtracer", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"gtracer {__version__}"


@pytest.mark.parametrize("words", [["demo", "--seeds", "0"], ["demo", "--epochs", "x"], ["train"]])
def test_bad_words(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 2
    assert repr(words[-1]) in capsys.readouterr().err


def test_help_shows_defaults_and_an_example(capsys):
    with pytest.raises(SystemExit):
        cli.main(["demo", "--help"])
    out = capsys.readouterr().out
    assert "default: 100" in out
    assert "example:" in out


def test_interrupt(monkeypatch, capsys):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert cli.main(["demo"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_missing_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.delitem(sys.modules, "gtracer.lab.demo")
    monkeypatch.delattr("gtracer.lab.demo")
    assert cli.main(["demo"]) == 1
    assert "pip install 'gtracer-optim[demo]'" in capsys.readouterr().err
