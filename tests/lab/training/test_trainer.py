"""Runs: the same numbers for the same seed, through interrupts and kills; records; what goes wrong on disks."""

import errno
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_data import cifar_pickle, task_of
from test_models import tiny_bert
from torch import nn
from torch.nn.functional import cross_entropy

from gtracer import SAM, AdamTracer, AdamWTracer, Clip, Exact, FiniteDifference, SGDTracer, Tracer, cli, curvature
from gtracer.experimental import PartialBatch, Precondition, PreviousStep, Ridge
from gtracer.lab import data, files
from gtracer.lab.config import Config
from gtracer.lab.errors import Interrupted, LabError
from gtracer.lab.results import provenance
from gtracer.lab.results.record import Record
from gtracer.lab.training import optimizers
from gtracer.lab.training.callbacks import TensorBoard
from gtracer.lab.training.run import CHECKPOINT, Run, learning_rate_factor
from gtracer.lab.training.trainer import record_in, train
from gtracer.optim import TwoPassOptimizer

SMALL = Config(label_noise=0.5, epochs=3, width=16, rho=0.01, batch_size=256)


class StopAfter:
    """Presses Ctrl-C after so many steps."""

    def __init__(self, steps):
        self.left = steps

    def step(self, run, loss):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)

    def epoch(self, run, row):
        pass


class StoppingBar(StopAfter):
    def __init__(self):
        super().__init__(1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_same_seed_same_record(tmp_path):
    first, second = (train(SMALL, tmp_path / name, []) for name in "ab")
    assert first.curves == second.curves
    assert first.config == second.config
    assert first.environment == second.environment
    other = train(replace(SMALL, seed=1), tmp_path / "c", [])
    assert other.curves != first.curves


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": "sgd-tracer", "rho_warmup": 0.5, "warmup": 0.2},
        {"optimizer": "adam-tracer", "lr": 0.01, "rho": 0.003},
        {"optimizer": "sam", "rho": 0.5},
        {"optimizer": "sgd", "nesterov": True},
        {"optimizer": "rmsprop-tracer", "lr": 1e-3, "engine": "exact", "rho": 0.001},
    ],
    ids=lambda c: c["optimizer"],
)
@pytest.mark.parametrize("steps", [2, 6, 9])
def test_interrupted_and_resumed_is_never_interrupted(tmp_path, change, steps):
    """In mid-epoch (2, 9) and at its end (6 steps an epoch)."""
    config = replace(SMALL, **change)
    straight = train(config, tmp_path / "straight", [])
    with pytest.raises(Interrupted, match="--resume"):
        train(config, tmp_path / "cut", [StopAfter(steps)])
    assert (tmp_path / "cut" / CHECKPOINT).exists()
    assert not Record.read(tmp_path / "cut").finished
    resumed = train(config, tmp_path / "cut", [], resume=True)
    assert resumed.curves == straight.curves
    assert resumed.finished
    assert len(resumed.seconds) == config.epochs
    assert not (tmp_path / "cut" / CHECKPOINT).exists()


def test_random_numbers_go_on_too(tmp_path):
    """Augmentation draws in every step: after a resume it must go on where it was."""
    cifar_pickle(tmp_path / "cifar-100-python/train", 200, "fine_labels", 100)
    cifar_pickle(tmp_path / "cifar-100-python/test", 100, "fine_labels", 100)
    config = Config(
        task="cifar100", data=str(tmp_path), model="mlp", width=16, epochs=2, rho=1e-4, batch_size=50, augment=True
    )
    straight = train(config, tmp_path / "straight", [])
    with pytest.raises(Interrupted):
        train(config, tmp_path / "cut", [StopAfter(3)])
    assert train(config, tmp_path / "cut", [], resume=True).curves == straight.curves


def test_warm_up_of_learning_rate_and_rho(tmp_path):
    """6 steps an epoch, 4 epochs: lr rises over 12 steps and falls over 12, ρ rises over 18."""
    config = replace(SMALL, epochs=4, warmup=0.5, rho_warmup=0.75, schedule="linear")
    record = train(config, tmp_path, [])
    assert record.curves["lr"] == pytest.approx([0.02 * 7 / 12, 0.02, 0.02 * 6 / 12, 0.0])
    assert record.curves["rho"] == pytest.approx([0.01 * 7 / 18, 0.01 * 13 / 18, 0.01, 0.01])


def test_a_killed_run_goes_on_to_the_same_numbers(tmp_path):
    """SIGKILL as soon as there is a checkpoint, wherever that is; then resumed here."""
    config = replace(SMALL, epochs=40)
    config.write(tmp_path / "c.yaml")
    words = ["train", "--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "run")]
    one_thread = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-m", "gtracer", *words], env=os.environ | one_thread)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (tmp_path / "run" / CHECKPOINT).exists():
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    assert Record.read(tmp_path / "run").epochs < 40
    resumed = train(config, tmp_path / "run", [], resume=True)
    assert resumed.curves == train(config, tmp_path / "straight", []).curves


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
def test_compiled_is_the_same_run(tmp_path):
    """To rounding; and its record counts for the plain run, which it is."""
    cifar_pickle(tmp_path / "cifar-100-python/train", 150, "fine_labels", 100)
    cifar_pickle(tmp_path / "cifar-100-python/test", 100, "fine_labels", 100)
    config = Config(task="cifar100", data=str(tmp_path), model="resnet20", epochs=2, rho=1e-4, delta=0.01, lr=0.01)
    plain = train(config, tmp_path / "plain", [])
    compiled = train(replace(config, kernels="compiled"), tmp_path / "compiled", [])
    for name in ("train_loss", "trace_ratio", "test_loss"):
        assert compiled.curves[name] == pytest.approx(plain.curves[name], rel=1e-3), name
    assert compiled.config.cell == plain.config.cell


def test_a_stray_checkpoint_is_not_taken_up(tmp_path):
    """Its record is gone, so nobody knows whose it is: a new run starts from the beginning."""
    straight = train(SMALL, tmp_path / "straight", [])
    with pytest.raises(Interrupted):
        train(replace(SMALL, lr=0.5), tmp_path / "cut", [StopAfter(2)])
    (tmp_path / "cut" / "record.json").unlink()
    assert train(SMALL, tmp_path / "cut", []).curves == straight.curves


def test_commit_is_ours_or_none(monkeypatch, tmp_path):
    """A copy that lies, untracked, in another project's checkout does not take that project's commit."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    copy = tmp_path / "gtracer" / "lab" / "environment.py"
    copy.parent.mkdir(parents=True)
    copy.write_text("")
    monkeypatch.setattr(provenance, "__file__", str(copy))
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", *identity, "commit", "-q", "--allow-empty", "-m", "theirs"], cwd=tmp_path, check=True)
    assert provenance.commit() is None
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    assert provenance.commit() is not None


def test_power_failure_between_checkpoint_and_record(tmp_path):
    """The checkpoint is an epoch ahead of the record: its results count."""
    straight = train(SMALL, tmp_path / "straight", [])
    with pytest.raises(Interrupted):
        train(SMALL, tmp_path / "cut", [StopAfter(7)])
    record = Record.read(tmp_path / "cut")
    record.curves, record.seconds = {}, []
    record.write(tmp_path / "cut")
    assert train(SMALL, tmp_path / "cut", [], resume=True).curves == straight.curves


def test_against_a_loop_by_hand(tmp_path, monkeypatch):
    """One epoch of the lab is one epoch of torch's SGD, written out."""
    monkeypatch.setattr("gtracer.lab.training.run.WRONG_SHOWN", 100)
    config = replace(SMALL, optimizer="sgd", epochs=1, lr=0.1, weight_decay=0.01)
    record = train(config, tmp_path, [])
    task = data.load(config)
    torch.manual_seed(config.seed)
    run = Run(config)
    model = run.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    order = torch.randperm(len(task.train.labels), generator=torch.Generator().manual_seed(0))
    steps = math.ceil(len(order) / 256)
    losses = []
    model.train()
    for i in range(steps):
        rows = order[256 * i : 256 * (i + 1)]
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + math.cos(math.pi * i / steps)) / 2
        loss = cross_entropy(model(task.train.inputs[rows]), task.train.labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        right = model(task.test.inputs).argmax(1) == task.test.labels
        wrong = (task.train.labels != task.train.truth).nonzero().flatten()[:100]
        given = model(task.train.inputs[wrong]).argmax(1)
    assert record.curves["train_loss"] == pytest.approx([sum(losses) / steps], rel=1e-5)
    assert record.curves["test_accuracy"] == pytest.approx([right.float().mean().item()])
    assert record.curves["memorised"] == pytest.approx([(given == task.train.labels[wrong]).float().mean().item()])
    assert record.curves["recovered"] == pytest.approx([(given == task.train.truth[wrong]).float().mean().item()])


class TestHoldout:
    def test_training_sees_the_rest_alone(self, tmp_path, monkeypatch):
        """All but one curve are those of a run that never had the held-out examples, whatever they are."""
        config = replace(SMALL, holdout=0.3)
        ours = train(config, tmp_path / "ours", []).curves
        rest = replace(data.load(config), holdout=None)
        monkeypatch.setattr(data, "load", lambda config: rest)
        theirs = train(config, tmp_path / "theirs", []).curves
        assert len(ours.pop("holdout_accuracy")) == 3
        assert ours == theirs
        assert Run(config).steps_an_epoch == math.ceil(len(rest.train.labels) / 256) == 4

    def test_accuracy_is_against_the_labels_it_has(self):
        """They are all that somebody with wrong labels has."""
        config = replace(SMALL, holdout=0.3, model="mlp-bn", optimizer="sgd", lr=0.1)
        run, held = Run(config), data.load(config).holdout
        for _ in range(5):
            list(run.rest_of_epoch())
            row = run.finish_epoch()
        with torch.no_grad():
            guess = run.model.eval()(held.inputs).argmax(1)
        assert row["holdout_accuracy"] == pytest.approx((guess == held.labels).double().mean().item())
        assert (guess == held.truth).double().mean().item() > row["holdout_accuracy"] + 0.1

    @pytest.mark.parametrize("kind", ["vector", "image", "text"])
    def test_every_kind(self, kind, tmp_path):
        config = task_of(
            kind, tmp_path, holdout=0.25, epochs=2, width=16, optimizer="sgd", batch_size=64, label_noise=0.2
        )
        config = replace(config, model=str(tiny_bert(tmp_path / "bert")) if kind == "text" else "mlp")
        first, second = (train(config, tmp_path / name, []) for name in "ab")
        assert len(first.curves["holdout_accuracy"]) == 2
        assert first.curves == second.curves

    def test_interrupted_and_resumed(self, tmp_path):
        config = replace(SMALL, holdout=0.3)
        straight = train(config, tmp_path / "straight", [])
        with pytest.raises(Interrupted):
            train(config, tmp_path / "cut", [StopAfter(6)])
        assert train(config, tmp_path / "cut", [], resume=True).curves == straight.curves

    def test_a_record_from_before(self, tmp_path):
        """Its configuration knows no holdout: it had none, and is this run."""
        before = train(SMALL, tmp_path, [])
        path = tmp_path / "record.json"
        content = json.loads(path.read_text())
        assert content["config"].pop("holdout") == 0.0
        path.write_text(json.dumps(content))
        assert Record.read(tmp_path).config == SMALL
        assert train(SMALL, tmp_path, []).curves == before.curves
        with pytest.raises(LabError, match=r"another run \(holdout 0\.0, not 0\.1\)"):
            train(replace(SMALL, holdout=0.1), tmp_path, [])


@pytest.mark.parametrize(("optimizer", "fed"), [("adam-tracer", "loss"), ("adamw-tracer", "loss"), ("adamw", None)])
def test_a_record_from_before_the_second_moment_was_a_choice(tmp_path, optimizer, fed):
    """It says what was done then, not what the same words mean now."""
    Record(replace(SMALL, optimizer=optimizer, rho=None), {}).write(tmp_path)
    assert Record.read(tmp_path).config.second_moment is None
    content = json.loads((tmp_path / "record.json").read_text())
    del content["config"]["second_moment"]
    (tmp_path / "record.json").write_text(json.dumps(content))
    assert Record.read(tmp_path).config.second_moment == fed


def test_record_has_what_a_reader_needs(tmp_path):
    train(SMALL, tmp_path, [])
    content = json.loads((tmp_path / "record.json").read_text())
    assert content["format"] == 1
    assert content["finished"] is True
    assert Config.from_mapping(content["config"]) == SMALL
    assert set(content["environment"]) == {"commit", "versions", "hardware"}
    assert {"torch", "python", "gtracer"} <= set(content["environment"]["versions"])
    names = "train_loss lr penalty_ratio rho trace_ratio test_accuracy test_loss memorised recovered"
    assert set(content["curves"]) == set(names.split())
    assert all(len(curve) == 3 for curve in content["curves"].values())
    accuracy = content["curves"]["test_accuracy"]
    assert content["summary"]["last"]["test_accuracy"] == accuracy[-1]
    assert content["summary"]["best"] == {"epoch": accuracy.index(max(accuracy)) + 1, "test_accuracy": max(accuracy)}
    assert content["summary"]["wall_time"] == sum(content["seconds"])
    assert content["peak_memory"] > 2**20
    assert Record.read(tmp_path).curves == content["curves"]


def test_a_record_does_not_tell_where_the_data_lay(tmp_path):
    """It is for other machines too; a run is resumed with the data wherever it lies then."""
    for name in ("one", "two"):
        cifar_pickle(tmp_path / name / "cifar-100-python/train", 200, "fine_labels", 100)
        cifar_pickle(tmp_path / name / "cifar-100-python/test", 100, "fine_labels", 100)
    config = Config(task="cifar100", data=str(tmp_path / "one"), model="mlp", width=16, epochs=2, rho=1e-4)
    straight = train(config, tmp_path / "straight", [])
    with pytest.raises(Interrupted):
        train(config, tmp_path / "cut", [StopAfter(1)])
    assert str(tmp_path) not in (tmp_path / "cut" / "record.json").read_text()
    assert cli.main(["train", "--resume", str(tmp_path / "cut"), "--data", str(tmp_path / "two")]) == 0
    assert Record.read(tmp_path / "cut").curves == straight.curves


def test_nan_is_null_in_the_file_and_nan_again(tmp_path):
    record = Record(replace(SMALL, epochs=1), {})
    record.add({"test_accuracy": 0.5, "trace_ratio": math.nan}, 1.0)
    record.write(tmp_path)
    assert "NaN" not in (tmp_path / "record.json").read_text()
    assert math.isnan(Record.read(tmp_path).curves["trace_ratio"][0])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sgd", torch.optim.SGD),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
        ("sam", SAM),
        ("asam", SAM),
        ("adamw-sam", SAM),
        ("sgd-tracer", SGDTracer),
        ("adam-tracer", AdamTracer),
        ("adamw-tracer", AdamWTracer),
        ("rmsprop-tracer", Tracer),
        ("adadelta-tracer", Tracer),
        ("adafactor-tracer", Tracer),
    ],
)
def test_optimisers_by_name(name, kind, tmp_path):
    config = replace(SMALL, optimizer=name, epochs=1, lr=1e-3, weight_decay=0.1, rho=0.001)
    model = nn.Linear(2, 2)
    built = optimizers.build(config, model)
    assert type(built) is kind
    assert built.param_groups[0]["lr"] == 1e-3
    assert built.param_groups[0]["weight_decay"] == 0.1
    if isinstance(built, TwoPassOptimizer):
        assert getattr(built.method, "adaptive", False) == name.endswith("asam")
        assert built.hyperparameters(built.param_groups[0])["rho"] == 0.001
        assert built.model is model
    train(config, tmp_path, [])


def test_every_hyperparameter_reaches_the_optimiser():
    groups = {"rho": 0.1, "beta": 0.2, "delta": 0.3, "f0": 0.4}
    asked = groups | {"preconditioned": True, "eta": 9.0, "radius": 0.5, "difference": "central"}
    built = optimizers.build(replace(SMALL, **asked, interval=3, momentum=0.7, nesterov=True), nn.Linear(2, 2))
    assert groups.items() <= built.param_groups[0].items()
    assert built.transforms == (Ridge(9.0), Precondition())
    assert built.method.engine == FiniteDifference(0.5, central=True)
    assert built.interval == 3
    for own, engine in (
        ({"engine": "exact"}, Exact()),
        ({"share": 0.5, "radius": 0.2}, PartialBatch(0.5, 0.2)),
        ({}, FiniteDifference()),
    ):
        assert optimizers.build(replace(SMALL, **own), nn.Linear(2, 2)).method.engine == engine
    assert optimizers.build(replace(SMALL, reuse="previous"), nn.Linear(2, 2)).reuse == PreviousStep()
    for own in ({"engine": "double"}, {"difference": "backward"}, {"reuse": "next"}):
        with pytest.raises(LabError, match=f"{next(iter(own))} must be"):
            optimizers.build(replace(SMALL, **own), nn.Linear(2, 2))
    assert built.param_groups[0]["momentum"] == 0.7
    assert built.param_groups[0]["nesterov"] is True
    adam = optimizers.build(
        replace(SMALL, optimizer="adam-tracer", betas=(0.8, 0.9), eps=1e-4, rho=0.1), nn.Linear(2, 2)
    )
    assert (adam.param_groups[0]["betas"], adam.param_groups[0]["eps"]) == ((0.8, 0.9), 1e-4)
    fed = replace(SMALL, optimizer="adamw-tracer", second_moment="loss")
    assert not optimizers.build(fed, nn.Linear(2, 2)).rule.of_total
    assert optimizers.build(replace(fed, second_moment="total"), nn.Linear(2, 2)).rule.of_total
    with pytest.raises(LabError, match="second_moment = 'total' is for squared gradients"):
        optimizers.build(replace(fed, second_moment="total", curvature="hutchinson"), nn.Linear(2, 2))
    for other in ("adamw", "adam-sam", "sgd-tracer", "rmsprop-tracer"):
        with pytest.raises(LabError, match=f"second_moment = 'loss' is for adam-tracer .*, not {other}"):
            optimizers.build(replace(fed, optimizer=other), nn.Linear(2, 2))
    for name in ("sgd-tracer", "adamw-tracer", "rmsprop-tracer"):  # texts are for encoders that were trained before
        for task, rho in (("digits", "auto"), ("rte", 6e-5), ("films.csv", 6e-5)):
            for given, expected in ((None, rho), (0.1, 0.1)):
                built = optimizers.build(Config(task=task, optimizer=name, rho=given), nn.Linear(2, 2))
                assert ("auto" if built.sets_rho else built.param_groups[0]["rho"]) == expected
    asam = optimizers.build(replace(SMALL, optimizer="asam", eta=0.7), nn.Linear(2, 2))
    assert asam.method.eta == 0.7
    for name in ("adam-tracer", "rmsprop-tracer", "asam"):
        assert optimizers.build(replace(SMALL, optimizer=name, clip=0.5), nn.Linear(2, 2)).clip == Clip(norm=0.5)


@pytest.mark.parametrize("name", ["sgd", "sgd-sam", "sgd-tracer"])
def test_a_gradient_that_is_too_long_is_clipped(name):
    """What moves the weights is as long as it may be, and as it would have been where that is less."""

    def moved(clip):
        run = Run(replace(SMALL, optimizer=name, momentum=0.0, lr=0.5, schedule="constant", clip=clip))
        before = [p.detach().clone() for p in run.model.parameters()]
        next(iter(run.rest_of_epoch()))
        return torch.cat([(b - p).flatten() for b, p in zip(before, run.model.parameters(), strict=True)]).detach()

    free = moved(None)
    assert free.norm() > 0.05
    torch.testing.assert_close(moved(0.1), free * 0.05 / free.norm())
    assert torch.equal(moved(1e3), free)


def test_exact_engine_trains_alike(tmp_path):
    """Central difference of small radius against double backward: the same curves within float32."""
    exact = train(replace(SMALL, engine="exact", model="mlp"), tmp_path / "a", [])
    close = train(replace(SMALL, difference="central", radius=0.01, model="mlp"), tmp_path / "b", [])
    assert close.curves["train_loss"] == pytest.approx(exact.curves["train_loss"], rel=1e-2)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_learning_rate(schedule):
    factor = learning_rate_factor(schedule, 4, 20)
    values = [factor(i) for i in range(20)]
    assert values[:4] == [0.25, 0.5, 0.75, 1.0]
    assert values[4] == 1.0
    assert values[12] == pytest.approx({"cosine": 0.5, "linear": 0.5, "constant": 1.0}[schedule])


def test_bf16_stays_close(tmp_path):
    full = train(replace(SMALL, epochs=1), tmp_path / "a", [])
    half = train(replace(SMALL, epochs=1, precision="bf16", radius=0.5), tmp_path / "b", [])
    assert half.curves["train_loss"] == pytest.approx(full.curves["train_loss"], rel=0.05)
    assert half.curves["train_loss"] != full.curves["train_loss"]


def test_a_text_run(tmp_path):
    """From a csv and a tiny BERT to a record; two words decide the class, so it is learnt."""
    (tmp_path / "films.csv").write_text("text,label\n" + "the good film,1\nthe bad film,0\n" * 20)
    config = Config(
        task=str(tmp_path / "films.csv"), model=str(tiny_bert(tmp_path / "bert")), optimizer="adamw-tracer",
        lr=1e-2, epochs=12, batch_size=8, rho=1e-4,
    )  # fmt: skip
    first, second = (train(config, tmp_path / name, []) for name in "ab")
    assert first.curves == second.curves
    assert first.curves["test_accuracy"][-1] == 1.0


def test_an_image_run_with_augmentation(tmp_path):
    """CIFAR's layout, made small: augmentation changes what is seen, and nothing else about the run."""
    cifar_pickle(tmp_path / "cifar-100-python/train", 200, "fine_labels", 100)
    cifar_pickle(tmp_path / "cifar-100-python/test", 100, "fine_labels", 100)
    config = Config(task="cifar100", data=str(tmp_path), model="mlp", width=16, epochs=1, rho=1e-4)
    plain = train(config, tmp_path / "plain", [])
    first, second = (train(replace(config, augment=True), tmp_path / name, []) for name in "ab")
    assert first.curves == second.curves
    assert first.curves["train_loss"] != plain.curves["train_loss"]
    assert first.curves["lr"] == plain.curves["lr"]


def test_tensorboard(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    record = train(SMALL, tmp_path, [TensorBoard(tmp_path)])
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [event.value for event in events.Scalars("test_accuracy")]
    assert found == pytest.approx(record.curves["test_accuracy"])


class TestBadInput:
    def test_another_run_in_the_folder(self, tmp_path):
        train(SMALL, tmp_path, [])
        with pytest.raises(LabError, match=r"another run \(lr 0\.02, not 0\.5\)"):
            train(replace(SMALL, lr=0.5), tmp_path, [])

    def test_a_run_may_go_on_with_other_kernels(self, tmp_path):
        """They are the machine's business, and the record tells of it."""
        with pytest.raises(Interrupted):
            train(SMALL, tmp_path, [StopAfter(6)])
        other = replace(SMALL, kernels="compiled")
        with pytest.raises(LabError, match="go on with gtracer train --resume"):
            train(other, tmp_path, [])
        assert record_in(tmp_path, SMALL, resume=True).notes == []
        record = record_in(tmp_path, other, resume=True)
        assert record.notes == ["kernels torch at first, compiled later"]
        assert record.config == SMALL

    def test_finished_is_not_run_again(self, tmp_path):
        before = train(SMALL, tmp_path, [])
        stamp = (tmp_path / "record.json").stat().st_mtime_ns
        assert train(SMALL, tmp_path, []).curves == before.curves
        assert (tmp_path / "record.json").stat().st_mtime_ns == stamp

    def test_unfinished_without_resume(self, tmp_path):
        with pytest.raises(Interrupted):
            train(SMALL, tmp_path, [StopAfter(1)])
        with pytest.raises(LabError, match="unfinished: go on with gtracer train --resume"):
            train(SMALL, tmp_path, [])

    def test_nothing_to_resume(self, tmp_path):
        with pytest.raises(LabError, match="nothing to resume"):
            train(SMALL, tmp_path, [], resume=True)

    @pytest.mark.parametrize("keep", [0, 100, 0.5, 0.99])
    def test_truncated_checkpoint(self, tmp_path, keep):
        with pytest.raises(Interrupted):
            train(SMALL, tmp_path, [StopAfter(1)])
        path = tmp_path / CHECKPOINT
        content = path.read_bytes()
        path.write_bytes(content[: int(keep if keep > 1 else keep * len(content))])
        with pytest.raises(LabError, match=r"checkpoint\.pt is damaged") as caught:
            train(SMALL, tmp_path, [], resume=True)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ('{"format": 99}', "has format 99, this gtracer reads 1"),
            ('{"format": 1}', "is damaged .a configuration is a mapping of names to values, got NoneType"),
            ('{"format": 1, "config": {"speed": 1}}', "is damaged .unknown configuration key 'speed'"),
            ("[]", "has format 'list'"),
            ("", "is damaged"),
            (
                json.dumps({"format": 1, "config": {}, "environment": None}),
                "is damaged .environment must be a mapping, got None",
            ),
            ('{"format": 1, "con', "is damaged"),
        ],
    )
    def test_damaged_record(self, tmp_path, content, message):
        (tmp_path / "record.json").write_text(content)
        with pytest.raises(LabError, match=message):
            train(SMALL, tmp_path, [])

    def test_a_file_in_place_of_the_folder(self, tmp_path):
        (tmp_path / "out").write_text("")
        with pytest.raises(LabError, match="cannot write .*Not a directory"):
            train(SMALL, tmp_path / "out" / "run", [])

    def test_read_only_folder(self, tmp_path, monkeypatch):
        def refused(*_, **__):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(files.Path, "mkdir", refused)
        with pytest.raises(LabError, match="cannot write .*Read-only file system"):
            train(SMALL, tmp_path, [])

    def test_full_disk_leaves_the_old_file(self, tmp_path):
        """A limit on the size of files is the disk that fills up in the middle of a write."""
        files.write(tmp_path / "a", b"old")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            with pytest.raises(LabError, match="cannot write .*untouched"):
                files.write(tmp_path / "a", b"new" * 1000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        assert (tmp_path / "a").read_bytes() == b"old"
        assert [p.name for p in tmp_path.iterdir()] == ["a"]

    def test_what_a_killed_writer_left_is_tidied_up(self, tmp_path):
        left = [tmp_path / ".record.json.4711", tmp_path / ".checkpoint.pt.12"]
        kept = [tmp_path / "record.json", tmp_path / ".hidden.json", tmp_path / "notes.1"]
        for path in (*left, *kept):
            path.touch()
        with files.locked(tmp_path, "run"):
            assert not any(path.exists() for path in left)
        assert all(path.exists() for path in kept)

    def test_nothing_is_half_written(self, tmp_path, monkeypatch):
        """The new content takes the old one's place in one move, or not at all."""

        def refused(*_):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        files.write(tmp_path / "a", b"old")
        monkeypatch.setattr(files.Path, "replace", refused)
        with pytest.raises(LabError, match="untouched"):
            files.write(tmp_path / "a", b"new")
        assert (tmp_path / "a").read_bytes() == b"old"
        assert [p.name for p in tmp_path.iterdir()] == ["a"]

    def test_device(self, tmp_path):
        with pytest.raises(LabError, match="device 'tpu' cannot be used here"):
            train(replace(SMALL, device="tpu"), tmp_path, [])

    def test_augmentation_of_vectors(self, tmp_path):
        with pytest.raises(LabError, match="augment = True is for images"):
            train(replace(SMALL, augment=True), tmp_path, [])

    def test_unknown_optimiser(self, tmp_path):
        with pytest.raises(LabError, match="unknown optimizer 'sgd-trace': did you mean sgd-tracer"):
            train(replace(SMALL, optimizer="sgd-trace"), tmp_path, [])

    def test_divergence(self, tmp_path):
        for optimizer in ("sgd", "sgd-tracer"):
            with pytest.raises(LabError, match="not finite in epoch 1: lower lr or rho"):
                train(replace(SMALL, lr=1e30, optimizer=optimizer, model="mlp"), tmp_path / optimizer, [])


class TestCommandLine:
    def run(self, *words):
        return cli.main(["train", *words])

    def test_options_reach_the_record(self, tmp_path, capsys):
        words = [
            "--label-noise",
            "0.5",
            "--optimizer",
            "adam-tracer",
            "--betas",
            "0.8",
            "0.9",
            "--f0",
            "0.5",
            "--epochs",
            "1",
            "--width",
            "16",
            "--holdout",
            "0.1",
        ]
        assert self.run(*words, "--out", str(tmp_path)) == 0
        config = Record.read(tmp_path).config
        assert (config.betas, config.f0, config.optimizer) == ((0.8, 0.9), 0.5, "adam-tracer")
        assert config.holdout == 0.1
        out = capsys.readouterr().out
        assert "test accuracy" in out
        assert str(tmp_path / "record.json") in out

    def test_a_file_and_options_over_it(self, tmp_path):
        replace(SMALL, seed=5).write(tmp_path / "c.yaml")
        assert self.run("--config", str(tmp_path / "c.yaml"), "--epochs", "1", "--out", str(tmp_path / "run")) == 0
        assert Record.read(tmp_path / "run").config == replace(SMALL, seed=5, epochs=1)

    def test_default_folder_tells_the_run(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert self.run("--epochs", "1", "--width", "8") == 0
        assert self.run("--epochs", "1", "--width", "9") == 0
        names = sorted(p.name for p in Path("runs").iterdir())
        assert len(names) == 2
        assert all(name.startswith("digits-sgd-tracer-seed0-") for name in names)

    def test_resume(self, tmp_path, capsys):
        with pytest.raises(Interrupted):
            train(SMALL, tmp_path, [StopAfter(2)])
        assert self.run("--resume", str(tmp_path)) == 0
        assert Record.read(tmp_path).finished
        assert self.run("--resume", str(tmp_path), "--lr", "1") == 1
        assert "leave the others out" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--task", "digit"], "unknown task 'digit': did you mean digits?"),
            (["--rho", "-1"], "rho must be"),
            (["--rho", "much"], "rho must be"),
            (["--holdout", "1"], "holdout must be"),
            (["--holdout", "0.0001"], "holdout = 0.0001 keeps 0 of 1347 training examples"),
            (["--config", "nowhere.yaml"], "cannot read nowhere.yaml"),
            (["--resume", "nowhere"], "cannot read nowhere/record.json"),
            (["--schedule", "step"], "schedule must be one of"),
        ],
    )
    def test_one_clear_line(self, words, message, capsys):
        assert self.run(*words) == 1
        error = capsys.readouterr().err
        assert error.startswith("gtracer: ")
        assert message in error
        assert error.count("\n") == 1

    def test_progress_on_a_terminal(self, tmp_path, monkeypatch, capsys):
        """What is drawn: accuracy, loss, T, epochs done and the time left."""
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "140")
        assert self.run("--epochs", "3", "--label-noise", "0.5", "--out", str(tmp_path), "--tensorboard") == 0
        drawn = capsys.readouterr().out
        for part in ("accuracy", "loss", " T ", "/3", "epochs", "00:0"):
            assert part in drawn
        assert (tmp_path / "tensorboard").is_dir()

    def test_interrupt(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr("gtracer.lab.training.callbacks.Bar", lambda *_: StoppingBar())
        assert self.run("--epochs", "3", "--out", str(tmp_path)) == 130
        assert f"go on with gtracer train --resume {tmp_path}" in capsys.readouterr().err

    def test_help_shows_defaults_and_an_example(self, capsys):
        with pytest.raises(SystemExit):
            self.run("--help")
        out = capsys.readouterr().out
        assert "default: 0.02" in out
        assert "example: gtracer train" in out
        assert "--label-noise" in out


@pytest.mark.parametrize(
    ("name", "estimator"),
    [
        ("gradient-magnitude", curvature.gradient_magnitude),
        ("micro-batch-7", curvature.micro_batch(7)),
        ("per-example", curvature.per_example),
        ("monte-carlo-fisher", curvature.monte_carlo_fisher()),
        ("gauss-newton", curvature.gauss_newton()),
        ("hutchinson", curvature.hutchinson()),
    ],
)
def test_estimators_by_name(name, estimator, tmp_path):
    """For the numerator and for the average, and each of them trains."""
    config = replace(SMALL, model="mlp", curvature=name, epochs=1, rho=1e-5)
    built = optimizers.build(config, nn.Linear(2, 2))
    assert built.method.curvature.numerator == built.method.curvature.average == estimator
    record = train(config, tmp_path / name, [])
    assert math.isfinite(record.curves["train_loss"][-1])
    apart = optimizers.build(replace(config, optimizer="rmsprop-tracer", curvature=None, average=name), nn.Linear(2, 2))
    assert apart.method.curvature.numerator is curvature.gradient_magnitude
    assert apart.method.curvature.average == estimator


@pytest.mark.parametrize("name", ["per-exemple", "micro-batch-0", "micro-batch-", "micro-batch-x"])
def test_an_unknown_estimator_lists_the_near_ones(name):
    with pytest.raises(LabError, match="per-example|micro-batch-32"):
        optimizers.build(replace(SMALL, curvature=name), nn.Linear(2, 2))


def test_an_estimator_that_the_model_cannot_have_is_one_clear_line(tmp_path):
    with pytest.raises(LabError, match=r"'sgd-tracer': layer '2' \(BatchNorm1d\)"):
        train(replace(SMALL, model="mlp-bn", curvature="per-example"), tmp_path / "run", [])


def test_a_rho_that_sets_itself_has_no_warm_up(tmp_path):
    with pytest.raises(LabError, match=r"rho_warmup = 0\.5 needs a number for rho"):
        train(replace(SMALL, optimizer="sgd-tracer", rho=None, rho_warmup=0.5), tmp_path, [])
