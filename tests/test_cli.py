"""What the command line says: without a command, at a slip of the pen, at the end of a sweep."""

import contextlib
import json
import subprocess
import sys

import pytest

from gtracer import cli
from gtracer.lab import demo
from gtracer.lab.config import PLAIN, Config, canonical
from gtracer.lab.training import optimizers

STUDY = {
    "base": {"task": "digits", "epochs": 1, "width": 8, "batch_size": 512},
    "methods": {"SGD": {"optimizer": "SGD"}, "TRACER": {"optimizer": "SGDTracer", "rho": 0.01}},
}


def test_alone_it_says_what_there_is(capsys):
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    for command in ("demo", "train", "sweep", "tune", "bench", "report"):
        assert f"\n    {command} " in out
    assert "on digits with 50% label noise" in " ".join(out.split())


def test_no_percent_sign_of_a_help_text_is_taken_for_a_format(capsys):
    """argparse formats them with its own variables: "50% l…" printed the whole of these."""
    for words in ([], *([command, "--help"] for command in ("demo", "train", "compare", "sweep", "tune", "bench"))):
        with contextlib.suppress(SystemExit):
            cli.main(words)
        assert "option_strings" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["trian"], "did you mean train?"),
        (["train", "--optmizer", "sgd"], "did you mean --optimizer?"),
        (["train", "--label_noise", "0.5"], "did you mean --label-noise"),
        (["sweep", "demo", "--engine", "rey"], "did you mean ray?"),
        (["bench", "estimator"], "did you mean estimators?"),
        (["demo", "--seed", "x"], "--seeds: must be a whole number of at least 1 (and at most 1000000), got 'x'"),
        (["demo", "--epoch=" + "9" * 5000], "got '999999"),
    ],
)
def test_a_slip_of_the_pen(words, hint, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("gtracer: ")
    assert hint in error
    assert error.count("\n") == 1
    assert len(error) < 500


@pytest.mark.parametrize("name", ["SGDTracer", "sgd_tracer", "SGD-TRACER", "Sgd Tracer"])
def test_optimisers_however_they_are_written(name):
    assert Config(optimizer=name) == Config(optimizer="sgd-tracer")
    assert Config.from_mapping({"optimizer": name}).folder == Config(optimizer="sgd-tracer").folder


def test_every_optimiser_of_torch_is_known_by_its_class():
    assert set(optimizers.BASES) >= PLAIN - {"muon", "adafactor"}  # of later versions of torch
    for base in optimizers.BASES:
        if base in PLAIN:
            assert canonical(base.upper()) == base
            for scheme in ("tracer", "sam", "asam"):
                assert canonical(f"{base.capitalize()}{scheme.upper()}") == f"{base}-{scheme}"
    assert [canonical(name) for name in ("SAM", "A-SAM", "AdamWTracer", "sgd-trace")] == [
        "sam",
        "asam",
        "adamw-tracer",
        "sgd-trace",
    ]


def test_a_sweep_ends_with_its_folder_and_what_makes_a_page_of_it(tmp_path, capsys):
    (tmp_path / "mine.json").write_text(json.dumps(STUDY))
    out = tmp_path / "my runs"
    assert cli.main(["sweep", str(tmp_path / "mine.json"), "--out", str(out)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"Runs in {out}; a page of them: gtracer report '{out}'"
    assert cli.main(["report", str(out)]) == 0


def test_what_no_run_of_a_study_has_a_use_for(tmp_path, capsys):
    """Options that methods share are for those that have a use for them."""
    cases = {
        "base: max_length = 99 has no effect: it is for texts, not task digits": {"base": {"max_length": 99}},
        "methods: 'SGD': rho = 0.1 has no effect": {"methods": {"SGD": {"optimizer": "sgd", "rho": 0.1}}},
        "methods: 'SGD': vary: rho = 0.1 has no effect": {
            "methods": {"SGD": {"optimizer": "sgd", "vary": {"rho": [0.1]}}}
        },
        "settings: 'a': delta = 0.1 has no effect": {
            "settings": {"a": {"delta": 0.1}},
            "methods": {"SAM": {"optimizer": "sam"}},
        },
    }
    for message, change in cases.items():
        (tmp_path / "mine.json").write_text(json.dumps(STUDY | change))
        assert cli.main(["sweep", str(tmp_path / "mine.json"), "--out", str(tmp_path / "out")]) == 1
        assert message in capsys.readouterr().err
    shared = STUDY | {"base": STUDY["base"] | {"delta": 0.1}}
    (tmp_path / "mine.json").write_text(json.dumps(shared))
    assert cli.main(["sweep", str(tmp_path / "mine.json"), "--out", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--task", "films.csv"], "cannot read films.csv: there is no such file or folder of texts"),
        (["train", "--task", "films/"], "cannot read films/: there is no such file or folder of texts"),
        (["train", "--resume", "runs/none"], "cannot read runs/none/record.json: there is no folder runs/none"),
        (["sweep", "mine.yaml"], "cannot read mine.yaml: there is no such study"),
        (["sweep", "studies/mine"], "there is no study studies/mine"),
        (["report", "runs/none"], "runs/none is no folder"),
        (["train", "--task", "two.csv"], "two.csv has no column 'text': name one of 'body, label' with --text-columns"),
        (
            ["train", "--task", "two.csv", "--text-columns", "body", "--label-column", "class"],
            "two.csv has no column 'class': name one of 'body, label' with --label-column",
        ),
    ],
)
def test_what_is_missing_is_named(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.csv").write_text("body,label\na,x\nb,y\nc,x\nd,y\n")
    assert cli.main(words) == 1
    assert message in capsys.readouterr().err


def test_several_errors_are_told_at_once(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("lr: -1\nmomentum: 2\nepochs: many\noptmizer: sgd\n")
    assert cli.main(["train", "--config", str(tmp_path / "c.yaml")]) == 1
    error = capsys.readouterr().err
    for part in ("lr must be", "got -1", "momentum must be", "epochs must be", "got 'many'", "did you mean optimizer?"):
        assert part in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("missing", ["pydantic", "filelock"])
def test_without_the_lab_it_says_what_to_install(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; from gtracer.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, "demo"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"gtracer: this needs {missing}: pip install 'gtracer-optim[lab]'\n"


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to")]
)
def test_not_enough_memory(error, monkeypatch, capsys):
    def run(**_):
        raise error

    monkeypatch.setattr(demo, "run", run)
    assert cli.main(["demo"]) == 1
    assert capsys.readouterr().err.startswith("gtracer: there is not enough memory")


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch):
    def run(**_):
        raise RuntimeError("this should not be")

    monkeypatch.setattr(demo, "run", run)
    with pytest.raises(RuntimeError, match="should not be"):
        cli.main(["demo"])
