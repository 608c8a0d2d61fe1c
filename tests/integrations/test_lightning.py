"""Lightning's own loops against plain ones: precisions, micro-batches, clipping, counters, two processes."""

import os

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import gtracer
from gtracer import Clip, FiniteDifference, RhoScheduler, SGDTracer, linear_warmup
from support.gloo import together

lightning = pytest.importorskip("lightning")

import torchmetrics  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from gtracer.integrations.lightning import TracerCallback, manual_step  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
BATCH, STEPS = 32, 8
MICRO = 12  # the last is smaller
EVEN = 8  # whose share does not round in half precision


class Automatic(lightning.LightningModule):
    def __init__(self, **own):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 2))
        self.own, self.logged = {"rho": 0.05, "delta": 0.05, "model": self} | own, []

    def loss_of(self, x, y):
        return cross_entropy(self.net(x), y)

    def on_train_batch_start(self, batch, index):
        torch.manual_seed(index)

    def training_step(self, batch, index):
        loss = self.loss_of(*batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return SGDTracer(self.parameters(), lr=0.1, momentum=0.9, **self.own)

    def log_dict(self, values, **words):
        self.logged.append(values)
        super().log_dict(values, **words)


class Manual(Automatic):
    def __init__(self, micro=MICRO, **own):
        super().__init__(**own)
        self.automatic_optimization = False
        self.micro = micro

    def training_step(self, batch, index):
        parts = list(zip(*(t.split(self.micro) for t in batch), strict=True))
        self.log("train_loss", manual_step(self, self.loss_of, parts))


class PastLightning(Manual):
    """Steps the optimiser itself, which Lightning does not count."""

    def training_step(self, batch, index):
        self.optimizers(use_pl_optimizer=False).step(self.loss_of, *batch)


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS * BATCH, 8, generator=generator)
    return x, (x.sum(1) > 0).long()


def weights(module):
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def fit(module, every_n_steps=1, batch_size=BATCH, sampler=None, **options):
    trainer = lightning.Trainer(
        **{"max_epochs": 1, "accelerator": "cpu", "callbacks": [TracerCallback(every_n_steps)]} | options,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(*data()), batch_size, sampler=sampler))
    return trainer


def plain(micro=BATCH, steps=STEPS, dtype=None, scaler=None, **own):
    """Weights, and the losses of all steps."""
    module, losses = Automatic(**own), []
    opt = module.configure_optimizers()

    def closure(x, y):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            return module.loss_of(x, y)

    for i, batch in enumerate(zip(*(t.split(BATCH)[:steps] for t in data()), strict=True)):
        torch.manual_seed(i)
        parts = list(zip(*(t.split(micro) for t in batch), strict=True))
        losses.append(opt.step(closure, batches=parts, scaler=scaler).item())
        if scaler is not None:
            scaler.update()
    return weights(module), losses


def float16(**own):
    scaler = torch.amp.GradScaler("cpu", **{"init_scale": 2.0**10, "growth_interval": 3} | own)
    return scaler, {"plugins": MixedPrecision("16-mixed", "cpu", scaler)}  # Trainer(precision=…) has none on a CPU


def agree(found, expected, tolerance=1e-6):
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", [Automatic, Manual])
@pytest.mark.parametrize(("said", "known"), [({}, STEPS), ({"steps_per_epoch": 99}, 99)])
def test_the_optimiser_is_told_how_long_an_epoch_is(kind, said, known):
    trainer = fit(kind(rho="auto", **said))
    assert trainer.optimizers[0].steps_per_epoch == known


def test_there_is_a_penalty_to_be_found():
    """What follows could not fail else."""
    assert (plain()[0] - plain(rho=0.0)[0]).abs().max() > 0.01
    assert (plain()[0] - plain(clip=Clip(norm=0.1))[0]).abs().max() > 0.01


@pytest.mark.parametrize(("precision", "dtype"), [("32-true", None), ("bf16-mixed", torch.bfloat16)])
@pytest.mark.parametrize("kind", [Automatic, Manual])
def test_the_trajectory_and_the_loss_of_the_plain_loop(kind, precision, dtype):
    micro = EVEN if dtype else MICRO
    trainer = fit(module := Manual(micro) if kind is Manual else Automatic(), precision=precision)
    expected, losses = plain(micro if kind is Manual else BATCH, dtype=dtype)
    agree(weights(module), expected)
    assert [row["tracer/loss"] for row in module.logged] == pytest.approx(losses, abs=1e-6)
    assert all(row["tracer/trace_ratio"] > 0 and row["tracer/penalty_ratio"] > 0 for row in module.logged)
    if kind is Manual:
        assert trainer.callback_metrics["train_loss"].item() == pytest.approx(losses[-1], abs=1e-6)


# float16.


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"clip": Clip(norm=0.1)},
        {"clip": Clip(norm=0.1, of="loss")},
        {"interval": 2},
        {"engine": FiniteDifference(central=True)},
    ],
    ids=str,
)
def test_float16(own):
    (scaler, options), (reference, _) = float16(), float16()
    trainer = fit(module := Manual(EVEN, **own), **options)
    expected, losses = plain(EVEN, dtype=torch.float16, scaler=reference, **own)
    agree(weights(module), expected)
    assert trainer.callback_metrics["train_loss"].item() == pytest.approx(losses[-1], abs=1e-6)
    assert scaler.get_scale() == reference.get_scale() == 2.0**12  # it grew twice
    assert trainer.global_step == STEPS


def test_an_overflow_in_float16_skips_the_step():
    (scaler, options), (reference, _) = float16(init_scale=2.0**20), float16(init_scale=2.0**20)
    fit(module := Manual(BATCH), **options)
    expected, _ = plain(dtype=torch.float16, scaler=reference)
    agree(weights(module), expected)
    made = module.optimizers(use_pl_optimizer=False).param_groups[0]["gtracer_step"]
    assert 0 < made < STEPS
    assert scaler.get_scale() == reference.get_scale()


# Clipping, and what else is refused.


@pytest.mark.parametrize(("kind", "micro"), [(Automatic, BATCH), (Manual, MICRO)])
@pytest.mark.parametrize("clip", [Clip(norm=0.1), Clip(norm=0.1, of="loss"), Clip(value=0.01)], ids=str)
def test_the_optimiser_s_clipping(kind, micro, clip):
    fit(module := kind(clip=clip))
    agree(weights(module), plain(micro, clip=clip)[0])


class ClipsItself(Automatic):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Automatic, {"gradient_clip_val": 0.1}, r"gradient_clip_val .* clip=gtracer.Clip\(norm=0.1\)"),
        (Automatic, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}, r"Clip\(value=0.1\)"),
        (ClipsItself, {}, r"configure_gradient_clipping .* clip=gtracer.Clip\(norm="),
        (Automatic, {"accumulate_grad_batches": 2}, r"manual_step\(self, closure, batches="),
        (Automatic, float16()[1], "bf16-mixed"),
    ],
    ids=["clipping", "clipping by value", "clipping by a hook", "accumulation", "float16"],
)
def test_refused_with_automatic_optimisation(kind, options, message):
    before = weights(module := kind())
    with pytest.raises(RuntimeError, match=message):
        fit(module, **options)
    agree(weights(module), before, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"gradient_clip_val": 0.01}, "gradient_clip_val"), ({"accumulate_grad_batches": 2}, "accumulate_grad_batches")],
)
def test_refused_without_the_callback(options, message):
    """By the optimiser itself, before anything was trained."""
    module = Automatic()
    before = weights(module).clone()
    with pytest.raises(RuntimeError, match=message):
        fit(module, callbacks=[], **options)
    assert torch.equal(weights(module), before)


class Counting(Automatic):
    """Counts and logs in its training step, as people do."""

    def __init__(self, maker=None, **own):
        super().__init__(**own)
        self.maker = maker
        self.accuracy, self.mean = torchmetrics.classification.MulticlassAccuracy(2), torchmetrics.MeanMetric()
        self.calls, self.told, self.sums = 0, [], {"examples": 0}
        self.own["model"] = self.net

    def training_step(self, batch, index):
        logits = self.net(batch[0])
        loss = cross_entropy(logits, batch[1])
        self.calls += 1
        self.told.append(float(loss))
        self.sums["examples"] += len(batch[1])
        self.mean.update(loss.detach())
        self.accuracy(logits, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return super().configure_optimizers() if self.maker is None else self.maker(self.net.parameters())


class CountingByHand(Counting):
    def __init__(self, *args, **own):
        super().__init__(*args, **own)
        self.automatic_optimization = False

    def training_step(self, batch, index):
        manual_step(self, lambda *batch: Counting.training_step(self, batch, index), [batch])


@pytest.mark.parametrize("kind", [Counting, CountingByHand])
def test_what_a_training_step_counts_is_that_of_the_first_pass(kind):
    """Without a learning rate all is as with torch's SGD."""
    ours = kind(lambda p: SGDTracer(p, lr=0.0, rho=0.05))
    theirs = Counting(lambda p: torch.optim.SGD(p, lr=0.0))
    trainers = [fit(module) for module in (ours, theirs)]
    assert ours.calls == theirs.calls == STEPS
    assert ours.told == theirs.told
    assert ours.sums == theirs.sums == {"examples": STEPS * BATCH}
    assert torch.equal(ours.mean.compute(), theirs.mean.compute())
    found, expected = (
        {name: x for name, x in trainer.callback_metrics.items() if "tracer" not in name} for trainer in trainers
    )
    assert {"loss_epoch", "accuracy"} <= found.keys()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not {"log", "training_step"} & vars(ours).keys()


class Skipping(Automatic):
    """Wants no step on every third batch; in the second pass of the fifth it finds out late."""

    def training_step(self, batch, index):
        if index % 3 == 2 or (index == 4 and gtracer.second_pass()):
            return None
        return self.loss_of(*batch)


def test_a_training_step_that_returns_none_skips_the_step():
    fit(module := Skipping())
    expected = Automatic()
    opt = expected.configure_optimizers()
    for i, batch in enumerate(zip(*(t.split(BATCH) for t in data()), strict=True)):
        torch.manual_seed(i)
        if i not in (2, 4, 5):
            opt.step(lambda batch=batch: expected.loss_of(*batch))
    agree(weights(module), weights(expected))
    assert module.trainer.optimizers[0].steps == opt.steps == STEPS - 3


class WithoutIndex(Automatic):
    def training_step(self, batch):
        return self.loss_of(*batch)


def test_a_training_step_that_is_not_told_the_index():
    """Lightning looks at its arguments, which the callback must not hide."""
    module = WithoutIndex()
    fit(module)
    agree(weights(module), plain()[0])


class Scheduled(Automatic):
    def configure_optimizers(self):
        opt = super().configure_optimizers()
        schedules = [RhoScheduler(opt, linear_warmup(4)), torch.optim.lr_scheduler.StepLR(opt, 3)]
        return [opt], [{"scheduler": schedule, "interval": "step"} for schedule in schedules]

    def on_train_batch_start(self, batch, index):
        super().on_train_batch_start(batch, index)
        group = self.trainer.optimizers[0].param_groups[0]
        self.seen = [*getattr(self, "seen", []), (group["rho"], group["lr"])]


def test_a_schedule_of_rho_beside_that_of_the_learning_rate():
    fit(module := Scheduled())
    assert [rho for rho, _ in module.seen] == pytest.approx([0.05 * min(1, (i + 1) / 4) for i in range(STEPS)])
    assert [lr for _, lr in module.seen] == pytest.approx([0.1 * 0.1 ** (i // 3) for i in range(STEPS)])


def test_other_optimisers_may_do_all_of_it():
    module = Automatic()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)
    trainer = fit(module, gradient_clip_val=0.1, accumulate_grad_batches=2)
    assert trainer.global_step == STEPS // 2
    assert not module.logged


def test_no_clipping_is_not_refused():
    fit(module := Automatic(), gradient_clip_val=0.0)
    agree(weights(module), plain()[0])


# Counters.


@pytest.mark.parametrize("options", [{}, float16()[1]], ids=["float32", "float16"])
def test_manual_steps_are_counted(options):
    trainer = fit(module := Manual(), max_epochs=2, max_steps=3, **options)
    assert trainer.global_step == 3
    if not options:
        agree(weights(module), plain(MICRO, steps=3)[0])


@pytest.mark.parametrize("kind", [Automatic, Manual, PastLightning])
def test_every_so_many_steps(kind):
    """Those of the optimiser: the last is Lightning's to miscount."""
    fit(module := kind(), every_n_steps=3)
    losses = plain(MICRO if kind is Manual else BATCH)[1]
    assert [row["tracer/loss"] for row in module.logged] == pytest.approx([losses[2], losses[5]], abs=1e-6)


# Several optimisers, several processes.


class ByScope(Automatic):
    """Lightning hands a closure that does nothing to a step without one."""

    def __init__(self, **own):
        super().__init__(**own)
        self.automatic_optimization = False
        self.hooks = 0

    def on_before_optimizer_step(self, optimizer):
        self.hooks += 1

    def training_step(self, batch, index):
        opt = self.optimizers()
        opt.zero_grad()
        self.manual_backward(self.loss_of(*batch))
        if self.own["rho"]:
            with opt.perturbed():
                self.manual_backward(self.loss_of(*batch))
        opt.step()


@pytest.mark.parametrize("rho", [0.05, 0.0])
def test_a_scope_in_manual_optimisation(rho):
    module = ByScope(rho=rho)
    trainer = fit(module)
    agree(weights(module), plain(rho=rho)[0])
    assert trainer.global_step == module.hooks == STEPS


def test_a_step_without_its_scope_is_refused():
    class Without(ByScope):
        def training_step(self, batch, index):
            self.manual_backward(self.loss_of(*batch))
            self.optimizers().step()

    with pytest.raises(RuntimeError, match="without the second pass"):
        fit(Without())


class Averaged(Automatic):
    def configure_optimizers(self):
        opt = super().configure_optimizers()
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.StepLR(opt, 1)}


def test_stochastic_weight_averaging():
    """Its last epoch is for batch norm: Lightning makes no backward pass, and no step is made."""
    module = Averaged()
    swa = lightning.pytorch.callbacks.StochasticWeightAveraging(0.1, 1)
    trainer = fit(module, callbacks=[TracerCallback(), swa], max_epochs=2)
    assert trainer.optimizers[0].steps == 2 * STEPS


def test_the_module_is_left_as_it_came():
    module = Automatic()
    trainer = fit(module)
    assert not {"log", "training_step"} & vars(module).keys()
    made = module.training_step
    module.training_step = lambda batch, batch_idx: made(batch, batch_idx)  # as torch.compile(module) puts one there
    own = module.training_step
    fit(module)
    assert module.training_step is own
    assert trainer.optimizers[0].steps == STEPS


class Pair(Manual):
    """Two nets, each with an optimiser."""

    def __init__(self):
        super().__init__()
        self.other = Automatic(rho=0.02)

    def training_step(self, batch, index):
        for opt, module in zip(self.optimizers(), (self, self.other), strict=True):
            torch.manual_seed(index)
            manual_step(self, lambda x, y, module=module: module.loss_of(x, y), [batch], optimizer=opt)

    def configure_optimizers(self):
        own = self.own | {"model": self.net}
        return SGDTracer(self.net.parameters(), lr=0.1, momentum=0.9, **own), self.other.configure_optimizers()


def test_one_of_several_optimisers():
    fit(module := Pair(), every_n_steps=2)
    agree(weights(module.net), plain()[0])
    agree(weights(module.other), plain(rho=0.02)[0])
    assert sum("tracer1/loss" in row for row in module.logged) == STEPS // 2


class Interleaved(torch.utils.data.Sampler):
    """So that the processes' batches together are the batch."""

    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        return iter(range(self.rank, STEPS * BATCH, 2))

    def __len__(self):
        return STEPS * BATCH // 2


def two_processes(rank, kind, half):
    os.environ["LOCAL_RANK"] = str(rank)  # what Lightning takes for having been launched
    try:
        module = kind()
        module.net[2].p = 0.0
        options = float16()[1] if half else {}
        words = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
        fit(module, batch_size=BATCH // 2, sampler=Interleaved(rank), **words, **options)
        return weights(module)
    finally:
        del os.environ["LOCAL_RANK"]


@pytest.mark.parametrize(("kind", "half"), [(Automatic, False), (Manual, False), (Manual, True)])
def test_two_processes(kind, half, monkeypatch):
    """Are one with the whole batch."""
    one, other = together(two_processes, kind, half)
    assert torch.equal(one, other)
    monkeypatch.setattr(nn.Dropout, "forward", lambda self, x: x)
    scaler = float16()[0] if half else None
    agree(one, plain(dtype=torch.float16 if half else None, scaler=scaler)[0], 1e-2 if half else 1e-5)
