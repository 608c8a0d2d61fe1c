"""Studies: what a file says is what is run; what it must not say."""

import json
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from gtracer.lab import data
from gtracer.lab.config import Config
from gtracer.lab.errors import LabError
from gtracer.lab.results import statistics as results
from gtracer.lab.results.record import Record
from gtracer.lab.results.report.page import _facts
from gtracer.lab.results.statistics import Estimate, Results
from gtracer.lab.sweeps import study
from gtracer.lab.sweeps.study import Study
from gtracer.lab.training import optimizers

SMALL = {
    "title": "small",
    "base": {"task": "digits", "width": 8, "epochs": 2, "delta": 0.01},
    "seeds": 2,
    "settings": {"clean": {}, "noisy": {"label_noise": 0.5}},
    "methods": {
        "SGD": {"optimizer": "sgd"},
        "SAM": {"optimizer": "sam", "vary": {"rho": [0.1, 0.2]}, "in": {"noisy": {"lr": 0.5}}},
        "TRACER": {"optimizer": "sgd-tracer", "rho": 0.003},
    },
    "paper": {"SGD": {"noisy": [17.5, 2.41]}},
}


def made(config: Config, accuracies: list[float], seconds: float = 1.0, **others) -> Record:
    """A record with these test accuracies, one an epoch."""
    config = replace(config, epochs=others.pop("epochs", len(accuracies)))
    curves = {"test_accuracy": accuracies, **others}
    return Record(config, {"hardware": {"cores": 2}}, curves, [seconds] * len(accuracies))


def test_points_and_cells():
    small = Study.from_mapping(SMALL)
    assert [(p.label, p.setting) for p in small.points()] == [
        (label, setting) for setting in ("clean", "noisy") for label in ("SGD", "SAM, ρ 0.1", "SAM, ρ 0.2", "TRACER")
    ]
    noisy = small.points()[5].config
    assert (noisy.optimizer, noisy.rho, noisy.lr, noisy.label_noise, noisy.delta) == ("sam", 0.1, 0.5, 0.5, 0.01)
    assert small.points()[1].config.lr == Config().lr
    cells = small.configs()
    assert len(cells) == 2 * 4 * 2
    assert [c.seed for c in cells] == [0] * 8 + [1] * 8  # every cell of the table has something early
    assert small.of_paper(small.points()[4]) == [17.5, 2.41]
    assert small.of_paper(small.points()[0]) is None


def test_a_setting_with_seeds_of_its_own():
    settings = SMALL["settings"] | {"noisy": SMALL["settings"]["noisy"] | {"seeds": [7, 8, 9]}}
    mine = Study.from_mapping(SMALL | {"settings": settings})
    assert [p.seeds for p in mine.points()] == [(0, 1)] * 4 + [(7, 8, 9)] * 4
    assert [c.seed for c in mine.configs()] == [0] * 4 + [7] * 4 + [1] * 4 + [8] * 4 + [9] * 4
    assert {c.label_noise for c in mine.configs() if c.seed > 1} == {0.5}
    assert [c.seed for c in mine.changed(seeds=1).configs()] == [0] * 8
    assert mine.changed(epochs=7).points()[4].seeds == (7, 8, 9)
    assert Study.from_mapping(mine.to_mapping()) == mine
    assert _facts(Results(mine, []))[2:] == ["up to 3 seeds", "0 of 20 runs finished"]
    assert _facts(Results(Study.from_mapping(SMALL), []))[2:] == ["2 seeds", "0 of 16 runs finished"]


def test_a_run_that_two_methods_share_is_made_once():
    methods = {"a": {"optimizer": "sgd"}, "b": {"optimizer": "sgd", "lr": Config().lr}}
    twice = SMALL | {"methods": methods, "paper": {}}
    assert len(Study.from_mapping(twice).configs()) == 2 * 2


def test_round_trip(tmp_path):
    small = Study.from_mapping(SMALL)
    small.write(tmp_path)
    assert Study.read(tmp_path / study.NAME) == small
    assert Study.from_mapping(json.loads(json.dumps(small.to_mapping()))).points() == small.points()


def test_what_is_written_does_not_say_where_the_data_lies(tmp_path):
    mine = SMALL | {"base": SMALL["base"] | {"data": "/some/where"}}
    Study.from_mapping(mine).changed(data="/else/where").write(tmp_path)
    assert "where" not in (tmp_path / study.NAME).read_text()
    cells = [config.identity for config in Study.read(tmp_path / study.NAME).configs()]
    assert cells == [config.identity for config in Study.from_mapping(mine).configs()]


def test_options_that_override_all_others():
    changed = Study.from_mapping(SMALL).changed(seeds=1, epochs=7, lr=0.3, rho=0.4, data=None)
    assert changed.seeds == (0,)
    assert {(p.config.epochs, p.config.lr, p.config.rho, p.config.data) for p in changed.points()} == {
        (7, 0.3, 0.4, None)
    }
    assert [p.label for p in changed.points()[:3]] == ["SGD", "SAM", "TRACER"]  # ρ is not varied any more


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ([], "a study is a mapping"),
        ({"method": {}}, "unknown key of a study 'method': did you mean methods?"),
        ({"methods": {}}, "needs methods"),
        ({"settings": {"clean": {}, "noisy": {"seeds": 0}}}, "'seeds' must be"),
        ({"methods": ["sgd"]}, "methods must be a mapping, got"),
        ({"methods": {"SGD": "sgd"}}, "methods: 'SGD' must be a mapping, got 'sgd'"),
        ({"methods": {"SGD": {"optimiser": "sgd"}}}, "unknown configuration key 'optimiser': did you mean optimizer?"),
        ({"methods": {"SGD": {"lr": -1}}}, "lr must be"),
        (
            {"methods": {"SAM": {"vary": {"rho": 0.1}}}},
            "methods: 'SAM': 'vary': 'rho' must be a list of values, got 0.1",
        ),
        ({"methods": {"SAM": {"vary": [0.1]}}}, "methods: 'SAM': 'vary' must be a mapping"),
        ({"methods": {"SAM": {"vary": {"rho": [0.1, 0.1]}}}, "paper": {}}, "'SAM, ρ 0.1' stands 2 times"),
        ({"methods": {"SAM": {"in": {"noise": {}}}}}, "unknown setting of method 'SAM' 'noise'"),
        ({"settings": {"noisy": 1}}, "settings: 'noisy' must be a mapping, got 1"),
        ({"seeds": 0}, "seeds must be a whole number of at least 1, or .*, got 0"),
        ({"seeds": [-1]}, r"seeds must be .* or a list of whole numbers of at least 0, got \[-1\]"),
        ({"paper": {"Adam": {}}}, "unknown method in the paper's numbers 'Adam'"),
        ({"paper": {"SGD": {"none": [1, 2]}}}, "unknown setting in the paper's numbers 'none'"),
        ({"paper": {"SGD": {"noisy": 17.5}}}, r"paper: 'SGD': 'noisy' must be \[accuracy, standard error\].* got 17.5"),
        ({"title": 3}, "title must be text, got 3"),
    ],
)
def test_bad_studies(change, message, tmp_path):
    (tmp_path / "mine.json").write_text(json.dumps(SMALL | change if isinstance(change, dict) else change))
    with pytest.raises(LabError, match=message) as refused:
        study.load(str(tmp_path / "mine.json"))
    assert "mine.json" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_unknown_study():
    with pytest.raises(LabError, match="unknown study 'table1-digit': did you mean table1-digits"):
        study.load("table1-digit")
    with pytest.raises(LabError, match="cannot read nowhere.yaml"):
        study.load("nowhere.yaml")


@pytest.mark.parametrize("name", study.shipped())
def test_shipped_studies(name):
    """Every run of theirs could be started, and their tables carry the paper's own numbers."""
    loaded = study.load(name)
    for point in loaded.points():
        data.check(point.config.task)
        optimizers.check(point.config)
    assert loaded.title
    assert loaded.about
    if name.startswith("table") and name.count("-") == 0:
        assert set(loaded.paper) == set(loaded.methods)
        assert all(set(row) == set(loaded.settings) for row in loaded.paper.values())


def test_the_paper_s_numbers():
    """As printed in its three tables."""
    one, two, three = (study.load(f"table{n}") for n in (1, 2, 3))
    assert [one.paper[m]["no augmentation"] for m in one.methods] == [[17.5, 2.41], [34.63, 1.85], [47.55, 1.51]]
    assert [[v[0] for v in two.paper[m].values()] for m in two.methods] == [
        [51.43, 70.02, 21.96],
        [58.98, 70.33, 49.89],
        [63.47, 70.71, 51.62],
    ]
    assert [[v[0] for v in three.paper[m].values()] for m in three.methods] == [
        [73.84, 69.36, 69.18],
        [73.95, 69.06, 69.54],
        [75.09, 70.01, 70.13],
    ]
    assert {p.config.model for p in one.points() + two.points()} == {"resnet20"}
    assert {(p.config.epochs, p.config.lr, p.config.schedule) for p in one.points()} == {(200, 0.1, "cosine")}
    assert len(three.seeds) == 20
    assert study.load("figure2").configs() == one.configs()


class TestResults:
    def points(self):
        small = Study.from_mapping(SMALL | {"seeds": 3})
        return small, {(p.label, p.setting): p for p in small.points()}

    def test_means_and_test_against_scipy(self):
        small, points = self.points()
        values = {"SGD": [0.5, 0.6, 0.55], "SAM, ρ 0.1": [0.7, 0.71, 0.75], "TRACER": [0.8, 0.79, 0.84]}
        records = [
            made(replace(points[label, "noisy"].config, seed=seed), [0.9, value], memorised=[0.0, 0.1])
            for label, row in values.items()
            for seed, value in enumerate(row)
        ]
        made_results = Results(small, records)
        found = {r.point.label: r for r in made_results.within("noisy")}
        for label, row in values.items():
            accuracy = found[label].accuracy
            assert accuracy.mean == pytest.approx(100 * np.mean(row))
            assert accuracy.error == pytest.approx(100 * scipy.stats.sem(row))
            assert accuracy.n == 3
            assert found[label].best() == pytest.approx([90.0] * 3)
            assert found[label].last("memorised") == pytest.approx([10.0] * 3)
        assert made_results.baseline("noisy").point.label == "SAM, ρ 0.1"
        comparison = made_results.comparison(found["TRACER"])
        assert comparison.against == "SAM, ρ 0.1"
        assert comparison.difference == pytest.approx(9.0)
        expected = scipy.stats.ttest_rel(values["TRACER"], values["SAM, ρ 0.1"]).pvalue
        assert comparison.p == pytest.approx(expected)
        shared = Results(small, records[:-4] + records[-3:])  # SAM's third run is missing
        assert shared.comparison(shared.within("noisy")[-1]).difference == pytest.approx(9.0)
        assert made_results.comparison(found["SGD"]) is None
        assert found["SGD"].paper == (17.5, 2.41)

    def test_what_was_not_run(self):
        small, points = self.points()
        config = points["SGD", "clean"].config
        diverged = made(replace(config, seed=1), [], epochs=2)
        diverged.failure = "not finite"
        unfinished = made(replace(config, seed=2), [0.1], epochs=2)
        for records, state in [
            ([], "not run"),
            ([made(replace(config, seed=s), [0.1, 0.2]) for s in range(3)], ""),
            ([made(replace(config, seed=0), [0.1, 0.2])], "2 of 3 not run"),
            ([made(replace(config, seed=0), [0.1, 0.2]), diverged], "1 of 3 diverged, 1 of 3 not run"),
            ([diverged, unfinished], "1 of 3 diverged, 1 of 3 unfinished, 1 of 3 not run"),
        ]:
            (result, *_) = Results(small, records).all
            assert result.state == state
        assert result.accuracy is None
        assert Results(small, []).comparison(result) is None

    def test_one_run_has_no_error_and_no_test(self):
        assert Estimate.of([1.0]).error is None
        assert results.chance([1.0]) is None
        assert results.chance([1.0, 1.0]) is None
        assert results.chance([1.0, 1.0 + 1e-14]) is None
        assert results.chance([1.0, 1.5]) is not None

    def test_cost_is_relative_to_the_first_method_on_the_same_machine(self):
        small, points = self.points()
        records = [
            made(points["SGD", "clean"].config, [0.1, 0.2], seconds=2.0),
            made(points["TRACER", "clean"].config, [0.1, 0.2], seconds=5.0),
        ]
        found = Results(small, records)
        assert found.relative_cost(found.all[3]) == 2.5
        records[1].environment = {"hardware": {"cores": 64}}
        found = Results(small, records)
        assert found.relative_cost(found.all[3]) is None
        # Runs of one process: each one's clock shows all of them.
        for record in records:
            record.environment["hardware"] = {"cores": 2, "runs_side_by_side": 2}
        found = Results(small, records)
        assert (found.all[0].seconds, found.relative_cost(found.all[3])) == (None, None)

    def test_where_a_run_was_made_does_not_matter(self):
        small, points = self.points()
        record = made(replace(points["SGD", "clean"].config, device="cuda", data="/else/where"), [0.1, 0.2])
        assert len(Results(small, [record]).all[0].finished) == 1

    def test_records_without_a_study(self, tmp_path):
        for seed in (3, 4):
            for optimizer, rho in (("sgd", None), ("sam", 0.1), ("sam", 0.5)):
                config = Config(optimizer=optimizer, rho=rho, seed=seed, epochs=1)
                made(config, [statistics.mean([seed / 10, rho or 0])]).write(tmp_path / config.folder)
        found, problems = results.read(tmp_path)
        assert problems == []
        assert {r.point.label: len(r.finished) for r in found.all} == {"sgd": 2, "sam, ρ 0.1": 2, "sam, ρ 0.5": 2}
        assert found.study.seeds == (3, 4)

    def test_unreadable_records_are_named_and_left_out(self, tmp_path):
        for name in "abc":
            made(Config(epochs=1, seed=ord(name)), [0.5]).write(tmp_path / name)
        path = tmp_path / "b" / "record.json"
        path.write_text(path.read_text()[:100])
        other = json.loads((tmp_path / "c" / "record.json").read_text()) | {"format": 99}
        (tmp_path / "c" / "record.json").write_text(json.dumps(other))
        found, problems = results.read(tmp_path)
        assert len(found.all[0].finished) == 1
        assert [("is damaged" in p, "has format 99" in p) for p in problems] == [(True, False), (False, True)]

    def test_nothing_to_read(self, tmp_path):
        with pytest.raises(LabError, match="holds no readable record"):
            results.read(tmp_path)
        with pytest.raises(LabError, match="is no folder"):
            results.read(tmp_path / "nowhere")


def test_records_are_read_without_torch():
    code = "import sys, gtracer.lab.results.statistics; from gtracer.lab.sweeps import study; study.load('table1')"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_studies_are_shipped():
    assert {"table1", "table2", "table3", "figure1", "figure2"} <= set(study.shipped())
    assert all(path.parent == Path(study.__file__).parent / "studies" for path in study.shipped().values())
