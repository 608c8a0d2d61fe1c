"""`gtracer compare`: three methods on one's own data."""

import json
import statistics

import pytest

import gtracer
from gtracer import cli
from gtracer.lab import data
from gtracer.lab.results.record import Record

WORDS = ["digits", "--label-noise", "0.4", "--seeds", "2", "--epochs", "3", "--width", "32", "--out", "out"]


def test_the_choice_is_by_held_out_data_and_its_model_is_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compare", *WORDS]) == 0
    out = capsys.readouterr().out
    found = {}
    for path in sorted(tmp_path.glob("out/*/record.json")):
        record = Record.read(path.parent)
        held_out = record.curves["holdout_accuracy"]
        best = max(range(3), key=held_out.__getitem__)
        runs = found.setdefault(record.resolved["optimizer"], [])
        runs.append((held_out[best], record.curves["test_accuracy"][best], path.parent, record))
    assert {name: len(runs) for name, runs in found.items()} == {"SGD": 2, "SAM": 2, "SGDTracer": 2}
    assert {run[-1].resolved["rho"] for run in found["SGDTracer"]} == {"auto"}
    shared = [
        {k: v for k, v in run[-1].config.to_mapping().items() if k not in ("optimizer", "seed")}
        for runs in found.values()
        for run in runs
    ]
    assert all(config == shared[0] for config in shared)
    names = {"SGD": "SGD", "SAM": "SGD + SAM", "SGDTracer": "SGD + TRACER"}
    chosen = max(names, key=lambda name: statistics.mean(run[0] for run in found[name]))
    test = 100 * statistics.mean(run[1] for run in found[chosen])
    error = 100 * statistics.stdev(run[1] for run in found[chosen]) / 2**0.5
    scores = {name: statistics.mean(run[0] for run in runs) for name, runs in found.items()}
    level = [names[name] for name in names if name != chosen and scores[name] == scores[chosen]]
    first = f"level with {' and '.join(level)}" if level else "best"
    assert f"{names[chosen]} is {first} by held-out data, with {test:.1f} ± {error:.1f}% on test data" in out
    assert "n = 2 is few" in out
    model = max(found[chosen], key=lambda run: run[0])
    assert f"Its model: {model[2].relative_to(tmp_path)}" in out
    task = data.load(model[-1].config)
    right = gtracer.load(model[2]).probabilities(task.holdout).argmax(1) == task.holdout.labels
    assert right.double().mean().item() == pytest.approx(model[0])
    assert "SGD + TRACER" in (tmp_path / "out" / "report" / "index.html").read_text()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/*/record.json")}
    assert cli.main(["compare", *WORDS]) == 0  # finished runs are not run again
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/*/record.json")}
    next(tmp_path.glob("out/*/record.json")).parent.rename(tmp_path / "out" / "by another name")
    assert cli.main(["compare", *WORDS]) == 0
    after = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/*/record.json")}
    assert sorted(before.values()) == sorted(after.values())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digits", "--task", "digits"], "leave --task out"),
        (["digit"], "unknown task 'digit': did you mean digits?"),
        (["digits", "--holdout", "0"], "holdout must be above 0"),
        (["digits", "--seed", "3"], "seed = 3 has no effect"),
        (["digits", "--max-length", "9"], "max_length = 9 has no effect"),
    ],
)
def test_one_clear_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compare", *words]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_optimiser_s_own_scheme_is_left_aside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--optimizer", "adamw-tracer", "--lr", "0.001", "--seeds", "1", "--epochs", "1", "--width", "8"]
    assert cli.main(["compare", "digits", *words]) == 0
    methods = json.loads((tmp_path / "runs" / "compare-digits" / "study.json").read_text())["methods"]
    assert methods == {
        "AdamW": {"optimizer": "adamw"},
        "AdamW + SAM": {"optimizer": "adamw-sam"},
        "AdamW + TRACER": {"optimizer": "adamw-tracer"},
    }
