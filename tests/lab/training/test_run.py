"""A run: its steps against a loop by hand, its schedules, and what its curves say."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from gtracer.lab import data
from gtracer.lab.config import Config
from gtracer.lab.errors import Interrupted, LabError
from gtracer.lab.results.record import Record
from gtracer.lab.sweeps.launchers.cuda_graphs import CudaGraphs
from gtracer.lab.training.run import Run
from gtracer.lab.training.schedule import learning_rate_factor
from gtracer.lab.training.steps import Eager
from gtracer.lab.training.trainer import train
from support.datasets import cifar_pickle, task_of
from support.encoders import tiny_bert
from support.runs import SMALL, StopAfter


def test_warm_up_of_learning_rate_and_rho(tmp_path):
    """6 steps an epoch, 4 epochs: lr rises over 12 steps and falls over 12, ρ rises over 18."""
    config = replace(SMALL, epochs=4, warmup=0.5, rho_warmup=0.75, schedule="linear")
    record = train(config, tmp_path, [])
    assert record.curves["lr"] == pytest.approx([0.02 * 7 / 12, 0.02, 0.02 * 6 / 12, 0.0])
    assert record.curves["rho"] == pytest.approx([0.01 * 7 / 18, 0.01 * 13 / 18, 0.01, 0.01])


def test_a_warm_up_of_less_than_a_step_is_none():
    for rho_warmup, factor in ((1e-6, 1.0), (0.5, 1 / 9)):
        run = Run(replace(SMALL, rho_warmup=rho_warmup))
        assert run.optimizer.param_groups[0]["rho"] == pytest.approx(factor * SMALL.rho)


class Notes:
    """What the steps say."""

    def __init__(self):
        self.steps = []

    def step(self, run, loss):
        stats = run.optimizer.stats
        self.steps.append((loss, float(stats.trace_ratio), float(stats.penalty_ratio)))

    def epoch(self, run, row):
        pass


def test_a_curve_is_the_mean_over_an_epoch_s_steps(tmp_path):
    notes = Notes()
    record = train(replace(SMALL, epochs=2), tmp_path, [notes])
    epochs = torch.tensor(notes.steps, dtype=torch.float64).reshape(2, -1, 3).mean(1)
    for name, means in zip(("train_loss", "trace_ratio", "penalty_ratio"), epochs.T, strict=True):
        assert means.min() > 0
        assert record.curves[name] == pytest.approx(means.tolist(), rel=1e-5), name


def test_a_last_batch_of_one_goes_with_the_one_before_where_there_is_batch_norm(tmp_path):
    """1347 examples: two batches of 673 and one of one. Alone, and as it is captured, in each epoch."""
    config = replace(SMALL, batch_size=673, epochs=2)
    found = Run(config)
    assert (found.sizes, found.steps_an_epoch) == ([673, 674], 2)
    assert Run(replace(config, model="mlp-ln")).sizes == [673, 673, 1]
    assert Run(replace(config, batch_size=449)).sizes == [449, 449, 449]
    assert Run(replace(config, batch_size=2000)).sizes == [1347]
    plain = train(config, tmp_path / "plain", [])
    (*_, event) = CudaGraphs(1)([(config, tmp_path / "captured")])
    assert event.failure is None
    captured = Record.read(tmp_path / "captured")
    assert captured.curves["train_loss"] == pytest.approx(plain.curves["train_loss"], rel=1e-3)


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
    assert compiled.config.identity == plain.config.identity


def test_the_optimiser_is_told_how_long_an_epoch_is():
    run = Run(replace(SMALL, optimizer="sgd-tracer", rho=None))
    assert run.optimizer.steps_per_epoch == run.steps_an_epoch > 1
    assert run.optimizer.sets_rho


def test_against_a_loop_by_hand(tmp_path, monkeypatch):
    """One epoch of the lab is one epoch of torch's SGD, written out."""
    monkeypatch.setattr("gtracer.lab.training.run.MISLABELLED_SHOWN", 100)
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
        """They are all that somebody with noisy labels has."""
        config = replace(SMALL, holdout=0.3, model="mlp-bn", optimizer="sgd", lr=0.1)
        run, held = Run(config), data.load(config).holdout
        for _ in range(5):
            list(Eager(run).rest_of_epoch())
            row = run.row({name: value.item() for name, value in run.measured().items()})
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


@pytest.mark.parametrize("name", ["sgd", "sgd-sam", "sgd-tracer"])
def test_a_gradient_that_is_too_long_is_clipped(name):
    """What moves the weights is as long as it may be, and as it would have been where that is less."""

    def moved(clip):
        run = Run(replace(SMALL, optimizer=name, momentum=0.0, lr=0.5, schedule="constant", clip=clip))
        before = [p.detach().clone() for p in run.model.parameters()]
        next(iter(Eager(run).rest_of_epoch()))
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


def test_an_estimator_that_the_model_cannot_have_is_one_clear_line(tmp_path):
    with pytest.raises(LabError, match=r"'sgd-tracer': layer '2' \(BatchNorm1d\)"):
        train(replace(SMALL, model="mlp-bn", curvature="per-example"), tmp_path / "run", [])


def test_a_rho_that_sets_itself_has_no_warm_up(tmp_path):
    with pytest.raises(LabError, match=r"rho_warmup = 0\.5 needs a number for rho"):
        train(replace(SMALL, optimizer="sgd-tracer", rho=None, rho_warmup=0.5), tmp_path, [])
