"""The search: on held-out data, replayed from its records, honest about the edge of its ranges."""

import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from gtracer import cli
from gtracer.finder import Branch, RhoCurve
from gtracer.lab.config import Config
from gtracer.lab.errors import LabError
from gtracer.lab.results.record import Record
from gtracer.lab.sweeps import tune
from gtracer.lab.sweeps.launchers.local import Event
from gtracer.lab.sweeps.sweep import RunsFolder
from gtracer.lab.sweeps.tune import Range
from support.studies import QUIET, stamps

optuna = pytest.importorskip("optuna")

BASE = Config(label_noise=0.5, epochs=2, width=8, batch_size=256, delta=0.01, beta=0.1)


class Landscape:
    """An engine that trains nothing: a run's held-out accuracy is a function of its configuration.

    The test accuracy says the opposite, so that a search that looked at it would end elsewhere.
    """

    def __init__(self, accuracy):
        self.accuracy, self.made = accuracy, []

    def __call__(self, cells):
        for config, folder, *_ in cells:
            self.made.append(config)
            value = self.accuracy(config)
            record = Record(config, {})
            if value is None:
                record.failure = "the loss is not finite"
            else:
                for _ in range(config.epochs):
                    record.add({"test_accuracy": 1 - value, "holdout_accuracy": value}, 1.0)
            record.write(folder)
            yield Event(config, ended=True, failure=record.failure)


def peak(config):
    """Best at ρ = 0.003."""
    return 0.9 - 0.1 * abs(math.log10(config.rho / 0.003))


def searched(config, *texts):
    return tune.ranges(config, [Range.parse(text) for text in texts])


def test_finds_the_best_by_held_out_data_alone(tmp_path):
    engine = Landscape(peak)
    best = tune.tune(BASE, searched(BASE), 24, 2, tmp_path, engine, QUIET)
    assert best.rho == pytest.approx(0.003, rel=0.3)
    assert best.holdout == 0
    assert best == replace(BASE, rho=best.rho)
    assert Config.read(tmp_path / "best.yaml") == best
    assert len(engine.made) == 48
    assert {c.holdout for c in engine.made} == {tune.HOLDOUT}
    assert {c.seed for c in engine.made} == {1000, 1001}
    assert {(c.delta, c.beta) for c in engine.made} == {(0.01, 0.1)}
    tried = {c.rho: peak(c) for c in engine.made}
    assert best.rho == max(tried, key=tried.__getitem__)


def test_goes_on_from_its_records(tmp_path):
    """Cut after five runs: the same trials, none of them made twice, the same end."""
    whole = Landscape(peak)
    best = tune.tune(BASE, searched(BASE), 12, 1, tmp_path / "whole", whole, QUIET)

    class Cut(Landscape):
        def __call__(self, cells):
            for event in super().__call__(cells):
                yield event
                if len(self.made) == 5:
                    raise KeyboardInterrupt

    first, second = Cut(peak), Landscape(peak)
    with pytest.raises(KeyboardInterrupt):
        tune.tune(BASE, searched(BASE), 12, 1, tmp_path / "cut", first, QUIET)
    before = stamps(tmp_path / "cut")
    assert tune.tune(BASE, searched(BASE), 12, 1, tmp_path / "cut", second, QUIET) == best
    assert first.made + second.made == whole.made
    after = stamps(tmp_path / "cut")
    assert all(after[name] == before[name] for name in before)


def test_says_when_the_best_lies_on_the_edge(tmp_path, capsys):
    console = Console(width=200)
    tune.tune(BASE, searched(BASE, "rho=0.00001:0.003"), 12, 1, tmp_path / "edge", Landscape(peak), console)
    out = capsys.readouterr().out
    assert "lies at the upper edge of its range (1e-05 to 0.003): search beyond it, --search rho=LOW:HIGH" in out
    tune.tune(BASE, searched(BASE, "rho=0.0001:0.1"), 12, 1, tmp_path / "inside", Landscape(peak), console)
    out = capsys.readouterr().out
    assert "edge" not in out
    assert f"train with it: gtracer train --config {tmp_path / 'inside' / 'best.yaml'}" in out


def test_a_trial_that_diverges_has_lost(tmp_path):
    engine = Landscape(lambda config: None if config.rho > 0.005 else 0.2)
    assert tune.tune(BASE, searched(BASE), 8, 1, tmp_path / "some", engine, QUIET).rho <= 0.005
    assert 0 < len([c for c in engine.made if c.rho > 0.005]) < len(engine.made) <= 8
    with pytest.raises(LabError, match="every one of 4 trials diverged"):
        tune.tune(BASE, searched(BASE), 4, 1, tmp_path / "all", Landscape(lambda config: None), QUIET)


def test_what_is_searched():
    assert [r.name for r in searched(Config())] == ["rho/delta", "delta", "beta"]
    assert [r.name for r in searched(Config(optimizer="adam-tracer"))] == ["rho/delta", "delta"]
    assert [r.name for r in searched(Config(optimizer="sam"))] == ["rho"]
    assert [r.name for r in searched(Config(optimizer="adamw-asam"))] == ["rho"]
    assert [r.name for r in searched(Config(delta=0.1, beta=0.1))] == ["rho/delta"]
    assert [r.name for r in searched(Config(rho=0.1))] == ["delta", "beta"]
    assert [r.name for r in searched(Config(delta=0.1, beta=0.1), "rho=1e-3:1", "lr=0.01:1")] == ["rho", "lr"]
    assert searched(Config(optimizer="sgd"), "lr=0.01:1") == [Range("lr", 0.01, 1.0)]


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (Config(), ["lr=0.1:1", "lr=0.2:1"], "lr is searched twice"),
        (Config(), ["rho/delta=0.1:1", "rho=0.1:1"], "rho/delta is searched, and ρ comes from it: leave rho out"),
        (Config(rho=0.1), ["rho/delta=0.1:1"], "rho/delta is searched, and ρ comes from it: leave rho out"),
        (Config(rho="auto"), ["rho/delta=0.1:1"], "rho/delta is searched, and ρ comes from it: leave rho out"),
    ],
)
def test_what_a_search_would_pass_over_is_refused(config, given, message):
    with pytest.raises(LabError, match=f"^{message}"):
        tune.ranges(config, [Range.parse(text) for text in given])


@pytest.mark.parametrize("task", ["rte", "films.csv"])
def test_texts_are_for_fine_tuning_which_wants_less(task):
    """Table 3's values lie inside of what is searched; those that did harm mostly do not."""
    (ratio,) = tune.ranges(Config(task=task, optimizer="adam-tracer", delta=0.01), [])
    assert (ratio.name, ratio.low, ratio.high) == ("rho/delta", 5e-4, 0.05)
    assert tune.ranges(Config(task=task, optimizer="adam-sam"), []) == [Range("rho", 1e-3, 0.1)]


def test_rho_from_its_ratio():
    assert tune.configured(Config(), {"rho/delta": 0.3, "delta": 0.01}).rho == 0.003
    assert tune.configured(Config(delta=0.1), {"rho/delta": 0.3}).rho == 0.03
    with pytest.raises(LabError, match="δ must be searched or set"):
        tune.configured(Config(), {"rho/delta": 0.3})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optimizer", "sgd"], "nothing to search for 'sgd': give a range"),
        (["--search", "roh=1:2"], "unknown option to search 'roh': did you mean rho"),
        (["--search", "rho=1"], "a range is NAME=LOW:HIGH, got 'rho=1'"),
        (["--search", "rho=2:1"], "0 < LOW < HIGH, got 'rho=2:1'"),
        (["--search", "rho=0:1"], "0 < LOW < HIGH, got 'rho=0:1'"),
        (["--optimizer", "sgd-trace", "--search", "rho=0.1:1"], "unknown optimizer 'sgd-trace'"),
        (["--holdout", "2"], "holdout must be"),
    ],
)
def test_bad_input(words, message, capsys, tmp_path):
    assert cli.main(["tune", "--out", str(tmp_path / "out"), *words]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_from_the_command_line(tmp_path, capsys):
    """Real runs, real held-out data."""
    words = ["--task", "digits", "--label-noise", "0.5", "--epochs", "1", "--width", "8", "--delta", "0.01"]
    assert cli.main(["tune", *words, "--trials", "2", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    records = RunsFolder.of(tmp_path).all()
    assert len(records) == 2
    best = max(records, key=lambda r: r.curves["holdout_accuracy"][-1])
    assert f"best of 2: {best.curves['holdout_accuracy'][-1]:.2%}" in out
    assert Config.read(tmp_path / "best.yaml").rho == best.config.rho
    assert (tmp_path / "rho.json").exists()
    assert "finding where to look for ρ" in out
    assert "test accuracy" not in out
    stamp = (tmp_path / "rho.json").stat().st_mtime_ns
    assert cli.main(["tune", *words, "--trials", "2", "--out", str(tmp_path), "--show-test"]) == 0
    assert "test accuracy" in capsys.readouterr().out
    assert (tmp_path / "rho.json").stat().st_mtime_ns == stamp  # read, not made again
    assert len(RunsFolder.of(tmp_path).all()) == 2


def a_curve(rho, collapsed=()):
    return RhoCurve(rho, "because", (Branch(0.0, (1.0,), 1.0),), tuple(collapsed), 2.0, 10)


def test_the_range_comes_from_the_curve():
    """Around what branches recommend, mostly above; not into what collapsed; of ρ/δ as of ρ."""
    config = Config(label_noise=0.5)
    ranges, first = tune.narrowed(searched(config), config, a_curve(0.001))
    assert ranges[0] == Range("rho/delta", 0.0333, 1.0)
    assert ranges[1:] == searched(config)[1:]
    assert first == {"rho/delta": 0.1, "delta": 0.01, "beta": 0.1}
    ranges, _ = tune.narrowed(searched(config), config, a_curve(0.001, [0.003, 0.01]))
    assert ranges[0] == Range("rho/delta", 0.0333, 0.3)
    sam = Config(optimizer="sam")
    assert tune.narrowed(searched(sam), sam, a_curve(0.5, [2.0])) == ([Range("rho", 0.167, 2.0)], {"rho": 0.5})
    damped = Config(delta=0.1, beta=0.1)
    assert tune.narrowed(searched(damped), damped, a_curve(0.01))[1] == {"rho/delta": 0.1}
    assert tune.narrowed(searched(config), config, a_curve(0.0)) == (searched(config), {})
    plain = [Range("lr", 0.01, 1.0)]
    assert tune.narrowed(plain, Config(optimizer="sgd"), a_curve(0.1)) == (plain, {})


def test_a_range_that_is_given_stays():
    given = [Range.parse("rho=0.01:1")]
    assert not tune.wants_range(tune.ranges(BASE, given), given)
    assert tune.wants_range(tune.ranges(BASE, []), [])
    assert not tune.wants_range(tune.ranges(replace(BASE, optimizer="sgd"), [Range("lr", 0.1, 1.0)]), [])


def test_the_first_trial_is_what_was_found(tmp_path):
    ranges, first = tune.narrowed(searched(BASE), BASE, a_curve(0.002))
    engine = Landscape(peak)
    tune.tune(BASE, ranges, 8, 1, tmp_path, engine, QUIET, first=first)
    assert engine.made[0].rho == 0.002
    evenly = [ranges[0].low * (ranges[0].high / ranges[0].low) ** place for place in (1 / 6, 3 / 6, 5 / 6)]
    ratios = [config.rho / config.delta for config in engine.made]
    assert sorted(ratios[1:4]) == pytest.approx(evenly, rel=0.01)  # with the first they are half of the trials
    assert all(0.002 / 3.01 <= c.rho <= 0.0201 for c in engine.made)
    again = Landscape(peak)
    tune.tune(BASE, ranges, 8, 1, tmp_path, again, QUIET, first=first)
    assert not again.made


def test_the_table_is_sorted_and_says_how_sure_it_is(tmp_path, capsys):
    console = Console(width=200)
    tune.tune(BASE, searched(BASE), 6, 1, tmp_path, Landscape(peak), console)
    out = capsys.readouterr().out
    held = [float(x) for x in re.findall(r"(\d+\.\d) ± \d+\.\d +│", out)]
    assert len(held) == 6
    assert held == sorted(held, reverse=True)
    error = 100 * (held[0] / 100 * (1 - held[0] / 100) / 135) ** 0.5  # a tenth of digits' training data
    assert f"{held[0]:.1f} ± {error:.1f}" in out
    assert "on 135 held-out examples" in out
    assert "test accuracy" not in out
    tune.tune(BASE, searched(BASE), 6, 1, tmp_path, Landscape(peak), console, show_test=True)
    assert "test accuracy" in capsys.readouterr().out


def test_without_optuna(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(LabError, match=r"pip install 'gtracer-optim\[tune\]'"):
        tune.tune(BASE, searched(BASE), 1, 1, tmp_path, Landscape(peak), QUIET)


def test_the_first_half_is_spread_evenly_and_the_rest_is_optuna_s(tmp_path):
    engine = Landscape(peak)
    tune.tune(replace(BASE, seed=5), searched(BASE), 8, 1, tmp_path, engine, QUIET)
    made = [c.rho / 0.01 for c in engine.made]
    evenly = [0.03 * 100**place for place in (0.125, 0.375, 0.625, 0.875)]
    assert sorted(made[:4]) == pytest.approx(evenly, rel=0.01)
    sampler = optuna.samplers.TPESampler(seed=5, n_startup_trials=4)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    ranges = {"rho/delta": optuna.distributions.FloatDistribution(0.03, 3.0, log=True)}
    for ratio in made[:4]:
        value = peak(Config(rho=ratio * 0.01))
        study.add_trial(optuna.create_trial(params={"rho/delta": ratio}, distributions=ranges, value=value))
    asked = study.ask().suggest_float("rho/delta", 0.03, 3.0, log=True)
    assert made[4] == pytest.approx(asked, rel=0.05)


def test_says_when_the_best_is_the_last_tried_on_one_side(tmp_path, capsys):
    tune.tune(BASE, searched(BASE, "rho=0.0001:1"), 4, 1, tmp_path, Landscape(lambda c: c.rho), Console(width=200))
    assert "is the highest of those tried: more trials may find a better one" in capsys.readouterr().out
