"""The first sentence of a report, and its cautions: what they say of records whose answer is known."""

import json

import pytest

from gtracer.lab.results.record import Record
from gtracer.lab.results.report.configuration import configuration
from gtracer.lab.results.report.verdict import cautions, sentences
from gtracer.lab.results.statistics import Results, read
from gtracer.lab.sweeps.study import Study
from support.records import detailed, small

AT_LAST = "on test data at the last epoch"


def results(accuracies, held_out=None, settings=None):
    """One number for each seed of each method, in its last epoch of two; in the first, the best by held-out data."""
    methods = {name: {"optimizer": "sgd", "lr": 0.1 * (place + 1)} for place, name in enumerate(accuracies)}
    seeds = max(len(values) for values in accuracies.values())
    base = {"epochs": 2, "holdout": 0.1 if held_out else 0.0}
    study = Study.from_mapping({"base": base, "seeds": seeds, "methods": methods, "settings": settings})
    records = []
    for point in study.points():
        for config, value in zip(point.configs(), accuracies[point.method], strict=False):
            curves = {"test_accuracy": [0.5 if held_out is None else value, value if held_out is None else 0.5]}
            if held_out:
                curves["holdout_accuracy"] = [held_out[point.method], 0.1]
            records.append(Record(config, {}, curves, [1.0, 1.0]))
    return Results(study, records)


@pytest.mark.parametrize(
    ("accuracies", "held_out", "sentence"),
    [
        ({"A": [0.9]}, None, f"A reaches 90.0 % {AT_LAST}."),
        (
            {"A": [0.8], "B": [0.9]},
            None,
            f"B is best, with 90.0 % {AT_LAST}, 10.0 points above A, which one seed cannot tell from chance.",
        ),
        (
            {"A": [0.80, 0.82, 0.81], "B": [0.90, 0.91, 0.92]},
            None,
            f"B is best, with 91.0 ± 0.6 % {AT_LAST}, 10.0 points above A (p = 0.003).",
        ),
        (
            {"A": [0.80, 0.92, 0.81], "B": [0.85, 0.83, 0.92]},
            None,
            f"B is best, with 86.7 ± 2.7 % {AT_LAST}, 2.3 points above A, which may be chance (p = 0.732).",
        ),
        ({"A": [0.9, 0.8], "B": [0.8, 0.9]}, None, f"A and B are level, with 85.0 ± 5.0 % {AT_LAST}."),
        (
            {"A": [0.8], "B": [0.9], "C": [0.85]},
            {"A": 0.9, "B": 0.8, "C": 0.7},
            "A is best by held-out data, with 80.0 % on test data at each run's best epoch by it, 10.0 points below B, "
            "which one seed cannot tell from chance.",
        ),
        (
            {"A": [0.8], "B": [0.9], "C": [0.85]},
            {"A": 0.9, "B": 0.9, "C": 0.7},
            "A is level with B by held-out data, with 80.0 % on test data at each run's best epoch by it, 10.0 points "
            "below B, which one seed cannot tell from chance.",
        ),
    ],
)
def test_one_sentence(accuracies, held_out, sentence):
    assert sentences(results(accuracies, held_out)) == [sentence]


def test_nothing_has_finished():
    assert sentences(Results(results({"A": [0.5]}).study, [])) == ["Nothing has finished yet."]


def test_it_is_another_method_that_is_compared_with():
    """Not the best one's own variants, which may be nearer."""
    methods = {
        "SGD": {"optimizer": "sgd"},
        "SAM": {"optimizer": "sam", "vary": {"rho": [0.1, 0.2]}},
    }
    study = Study.from_mapping({"base": {"epochs": 1}, "methods": methods})
    values = [0.7, 0.85, 0.9]
    records = [Record(p.config, {}, {"test_accuracy": [v]}, [1.0]) for p, v in zip(study.points(), values, strict=True)]
    (sentence,) = sentences(Results(study, records))
    assert sentence.startswith("SAM, ρ 0.2 is best, with 90.0 % on test data at the last epoch, 20.0 points above SGD")


def test_several_settings_are_counted(tmp_path):
    small(tmp_path)
    found, _ = read(tmp_path)
    first, clean, noisy = sentences(found)
    assert first == "SGD-TRACER is best in 2 of 2 settings."
    assert clean.startswith("clean: SGD-TRACER is best, with 31.6 ± 0.6 %")
    assert noisy.endswith("8.2 points above SGD (p = 0.006).")


def test_cautions(tmp_path):
    small(tmp_path)
    few, diverged = cautions(read(tmp_path)[0])
    assert few.startswith("2 to 3 runs in some cells")
    assert diverged == "1 run diverged, and is in no mean."
    detailed(tmp_path / "detailed")
    assert "40 test examples: one of them is 2.5 points." in cautions(read(tmp_path / "detailed")[0])
    assert cautions(results({"A": [0.9] * 5, "B": [0.8] * 5})) == []


def test_configuration_is_what_was_asked_and_what_that_came_to(tmp_path):
    detailed(tmp_path)
    found = configuration(read(tmp_path)[0])
    assert found.headings == ["optimizer", "ρ", "δ"]
    assert found.rows == [("SGD", ["sgd", "–", "–"]), ("SGD-TRACER", ["sgd-tracer", "auto", "0.01"])]
    assert {("holdout", "0.1"), ("epochs", "4"), ("task", "digits")} <= set(found.shared)
    assert not {"seed", "data", "device", "text columns", "augment"} & {name for name, _ in found.shared}


def test_configuration_of_a_single_run_differs_in_nothing(tmp_path):
    detailed(tmp_path)
    (tmp_path / "study.json").unlink()
    content = json.loads((tmp_path / "run #1-0" / "record.json").read_text())
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "record.json").write_text(json.dumps(content))
    found = configuration(read(tmp_path / "one")[0])
    assert (found.headings, found.rows) == ([], [])
    assert ("ρ", "auto") in found.shared
