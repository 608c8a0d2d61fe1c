"""The demo and the command line."""

import statistics
import subprocess
import sys

import pytest
from rich.console import Console

from gtracer import __version__, cli
from gtracer.lab import demo
from gtracer.lab.results.statistics import Estimate


def test_every_optimiser_is_run_shown_and_recorded(tmp_path, capsys):
    results = demo.run(seeds=2, epochs=1, folder=tmp_path, console=Console(width=120))
    out = capsys.readouterr().out
    assert [(r.point.method, r.point.config.depth) for r in results.all] == [
        (name, depth) for depth in (2, 5) for name in ("SGD", "SAM, usual ρ", "SAM, tuned ρ", "SGD-TRACER")
    ]
    for result in results.all:
        assert result.point.method in out
        assert [(r.config.seed, r.config.depth) for r in result.finished] == [
            (seed, result.point.config.depth) for seed in (0, 1)
        ]
        assert str(Estimate.of(result.last())) in out
        assert str(Estimate.of(result.best())) in out
    for method in results.study.methods:
        assert f"{method}: {Estimate.of(demo.over_both(results, method))}" in out
    page = (tmp_path / "report" / "index.html").read_text()
    assert all(str(result.accuracy) in page for result in results.all)
    assert len(list(tmp_path.glob("*/record.json"))) == 16


def test_what_is_finished_is_not_run_again(tmp_path):
    first = demo.run(seeds=1, epochs=1, folder=tmp_path, console=Console(quiet=True))
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.glob("*/record.json")}
    second = demo.run(seeds=1, epochs=1, folder=tmp_path, console=Console(quiet=True))
    assert {p: p.stat().st_mtime_ns for p in tmp_path.glob("*/record.json")} == stamps
    assert [r.last() for r in first.all] == [r.last() for r in second.all]


def test_command_line(tmp_path, capsys, monkeypatch):
    assert cli.main(["demo", "--seeds", "1", "--epochs", "1", "--out", str(tmp_path)]) == 0
    assert "SGD-TRACER" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["gtracer", "--version"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 0
    assert capsys.readouterr().out.strip() == f"gtracer {__version__}"


def test_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "gtracer", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"gtracer {__version__}"


@pytest.mark.parametrize(
    "words",
    [
        ["demo", "--seeds", "0"],
        ["demo", "--epochs", "x"],
        ["trian"],
        ["sweep", "demo", "--retries", "-1"],
        ["sweep", "demo", "--workers", "0"],
        ["sweep", "demo", "--gpus", "-0.5"],
        ["sweep", "demo", "--cpus", "some"],
        ["tune", "--trials", "0"],
    ],
)
def test_bad_words(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 2
    assert repr(words[-1]) in capsys.readouterr().err


def test_help_shows_defaults_and_an_example(capsys):
    with pytest.raises(SystemExit):
        cli.main(["demo", "--help"])
    out = capsys.readouterr().out
    assert "default: 50" in out
    assert "example:" in out


@pytest.mark.slow
def test_its_claim(tmp_path):
    """As docs/results/demo.md has it: above SGD on both nets; above SAM on the deeper one, and in the mean of both."""
    results = demo.run(seeds=3, epochs=50, folder=tmp_path, console=Console(quiet=True))

    def is_above(ours, theirs):
        gap = statistics.mean(ours) - statistics.mean(theirs)
        return gap > 2 * ((statistics.variance(ours) + statistics.variance(theirs)) / len(ours)) ** 0.5

    last = {(r.point.method, r.point.config.depth): r.last() for r in results.all}
    for name, depth in [("SGD", 2), ("SGD", 5), ("SAM, usual ρ", 2), ("SAM, usual ρ", 5), ("SAM, tuned ρ", 5)]:
        assert is_above(last["SGD-TRACER", depth], last[name, depth])
    for name in ("SGD", "SAM, usual ρ", "SAM, tuned ρ"):
        assert is_above(demo.over_both(results, "SGD-TRACER"), demo.over_both(results, name))


def test_interrupt(monkeypatch, capsys):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert cli.main(["demo"]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["rich", "yaml", "sklearn"])
def test_missing_extra(missing, tmp_path):
    """One line that says what to install; in a fresh process, where the package is made to be absent."""
    code = f"import sys; sys.modules[{missing!r}] = None; from gtracer.cli import main; sys.exit(main(sys.argv[1:]))"
    words = ["train", "--epochs", "1", "--config", str(tmp_path / "c.yaml")]
    (tmp_path / "c.yaml").write_text("width: 8\n")
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("gtracer: ")
    assert "pip install 'gtracer-optim[lab]'" in done.stderr
    assert done.stderr.count("\n") == 1
