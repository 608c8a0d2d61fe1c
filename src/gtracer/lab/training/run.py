"""One run: a model, its data and its optimiser, and how far training has come."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, huber_loss, mse_loss
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad_norm_

from gtracer.lab import data, models
from gtracer.lab.config import Config
from gtracer.lab.data import batches
from gtracer.lab.data.batches import Batch, cropped_and_flipped
from gtracer.lab.data.task import Split, Task
from gtracer.lab.errors import DivergedError, LabError, one_line
from gtracer.lab.kernels.resnet import Fused
from gtracer.lab.models.encoders import Classifier
from gtracer.lab.training import optimizers
from gtracer.lab.training.average import Average
from gtracer.lab.training.device import device_of
from gtracer.lab.training.distributed import ProcessGroup
from gtracer.lab.training.schedule import learning_rate_factor
from gtracer.optim import RhoScheduler, TwoPassOptimizer, linear_warmup

MISLABELLED_SHOWN = 5000  # mislabelled examples that are looked at each epoch: an error of 0.7 points at most
MOST_OUTPUTS = 8 << 30  # bytes
IGNORED = -100  # torch's label of an example that does not count
# Without gradients so many times the examples fit; more keep a GPU busy.
EVALUATION_BATCHES = {"torch": 4, "compiled": 4, "fused": 16}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class EvaluationData:
    """Examples to evaluate on, in the order in which that is done: those of this process, part by part, and labels."""

    batch: Batch
    parts: list[tuple[Tensor, int | None]]
    labels: Tensor
    truth: Tensor


class Run:
    """Everything that changes while training. The same configuration makes the same run, step for step."""

    def __init__(
        self,
        config: Config,
        processes: ProcessGroup | None = None,
        task: Task | None = None,
        **own: Any,
    ) -> None:
        """Make it.

        Args:
            config: Decides everything.
            processes: The processes that share it, if there are others.
            task: Its data, where that is not just what the configuration says.
            **own: Arguments of torch's optimiser beside those of the configuration.
        """
        self.config = config
        self.processes = processes or ProcessGroup(device_of(config.device))
        self.device = self.processes.device
        if self.processes.world > 1:
            _refuse_what_is_not_shared(config)
        task = data.load(config) if task is None else task
        _refuse_outputs_beyond_memory(task)
        if config.augment and task.kind != "image":
            raise LabError(f"augment = True is for images, the examples of task {config.task!r} are {task.kind}s")
        torch.manual_seed(config.seed)
        built = models.build(config, task)
        self.model = built.model.to(self.device)
        self.optimizer = optimizers.build(config, self.model, **own)
        self.trained: Callable[[Any], Tensor] = self.processes.wrapped(self.model)
        self.evaluated: Callable[[Any], Tensor] = self.model
        if isinstance(self.model, Classifier):
            if config.sharpness is not None and config.kernels != "torch":
                raise LabError(
                    f"sharpness = {config.sharpness} differentiates the encoder twice, for which kernels = "
                    f"{config.kernels!r} are not made: use torch's"
                )
            if config.kernels == "fused":
                self.model.fuse_attention()
            if config.kernels != "torch":
                self.model.compile_layers()
        elif config.kernels == "compiled":
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.trained = torch.compile(self.trained, dynamic=False)
        elif config.kernels == "fused":
            self.trained = self.evaluated = Fused(self.model, DTYPES[config.precision])
        if self.processes.world > 1:  # the same weights everywhere, but not the same dropout and augmentation
            torch.manual_seed(config.seed * 1_000_003 + self.processes.rank)
        self.average = Average(self.model, config.ema) if config.ema else None
        self.train_batch = built.batches(task.train, self.device)
        self.labels = task.train.labels.to(self.device)
        self.class_weights = _weights(self.labels, task.classes) if config.class_weights else None
        self.target = task.target
        self.test = self._evaluation_data(built.batches(task.test, self.device), task.test)
        self.holdout = None
        if task.holdout is not None:
            self.holdout = self._evaluation_data(built.batches(task.holdout, self.device), task.holdout)
        rows = (task.train.labels != task.train.truth).nonzero().flatten()[:MISLABELLED_SHOWN]
        self.mislabelled = self._evaluation_data(self.train_batch, task.train, rows) if len(rows) else None
        self.built, self.notes, self.model_name = built, [*task.notes, *built.notes], built.name
        self.task = task.without_examples()
        parts = {"train": task.train, "holdout": task.holdout, "test": task.test}
        self.splits = {name: list(part.ids) for name, part in parts.items() if part is not None}

        self.sizes = _sizes(len(self.labels), config.batch_size, self.model)
        self.steps_an_epoch = len(self.sizes)
        if isinstance(self.optimizer, TwoPassOptimizer):
            self.optimizer.steps_per_epoch = self.steps_an_epoch
        total = self.steps_an_epoch * config.epochs
        factor = learning_rate_factor(config.schedule, round(config.warmup * total), total)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        self.rho_schedule = None
        if config.rho_warmup and isinstance(self.optimizer, TwoPassOptimizer):
            if self.optimizer.sets_rho:
                raise LabError(f"rho_warmup = {config.rho_warmup} needs a number for rho: without one ρ sets itself")
            self.rho_schedule = RhoScheduler(self.optimizer, linear_warmup(max(1, round(config.rho_warmup * total))))
        self.generator: torch.Generator | None = None  # of the augmentation, where it is not everybody's
        self.epoch, self.step = 0, 0  # of the step to come
        self.seconds = 0.0  # spent on this epoch before an interrupt
        self.sums = {"train_loss": 0.0, "trace_ratio": 0.0, "penalty_ratio": 0.0}  # over this epoch's steps

    def _evaluation_data(self, batch: Batch, split: Split, rows: Tensor | None = None) -> EvaluationData:
        rows = batch.sorted(torch.arange(len(split.labels)) if rows is None else rows)
        mine, _ = self.processes.share(rows)
        size = EVALUATION_BATCHES[self.config.kernels] * self.config.batch_size
        parts = [(part.to(self.device), batch.width(part)) for part in torch.split(mine, size)]
        return EvaluationData(batch, parts, split.labels[rows].to(self.device), split.truth[rows].to(self.device))

    def part(self) -> None:
        """Let go of the other processes before they part: torch may wait for ever where a model holds them longest."""
        self.trained = self.model

    @property
    def steps(self) -> int:
        """Made so far."""
        return self.epoch * self.steps_an_epoch + self.step

    def order(self) -> Tensor:
        """Of the training examples in this epoch, which has a generator of its own: there is no state to save."""
        own = torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.epoch)
        rows = torch.randperm(len(self.labels), generator=own)
        return self.train_batch.grouped(rows, self.config.batch_size, own)

    def batch(self, rows: Tensor, width: int | None = None) -> tuple[Any, Tensor]:
        """These training examples, and their labels."""
        return self.augmented(self.train_batch(rows, width)), self.labels[rows.to(self.device)]

    def batches(self, parts: Sequence[Tensor]) -> Iterator[tuple[Any, Tensor]]:
        """The same of several batches, in turn."""
        inputs = batches.each(self.train_batch, [(rows, self.train_batch.width(rows)) for rows in parts])
        for rows, read in zip(parts, inputs, strict=True):
            yield self.augmented(read), self.labels[rows.to(self.device)]

    def augmented(self, inputs: Any) -> Any:
        """Images, each shifted and mirrored by chance, where that was asked for."""
        return cropped_and_flipped(inputs, self.generator) if self.config.augment else inputs

    def require_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise DivergedError(f"the loss or its gradient is not finite in epoch {self.epoch + 1}: lower lr or rho")

    def loss(self, outputs: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        """What is trained by. Padding rows do not count."""
        if self.target is not None:
            return self._distance(outputs, labels, reduction)
        smoothing = self.config.label_smoothing
        return cross_entropy(outputs, labels, self.class_weights, label_smoothing=smoothing, reduction=reduction)

    def plain_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """What is evaluated by: without smoothing and weights."""
        return cross_entropy(outputs, labels) if self.target is None else self._distance(outputs, labels)

    def _distance(self, outputs: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        """Of real numbers, in deviations of the training data."""
        distance = huber_loss if self.config.loss == "huber" else mse_loss
        found = outputs.squeeze(1)
        if reduction != "mean":  # a batch that processes share: NaN is the label of its padding rows
            kept = ~labels.isnan()
            found, labels = found[kept], labels[kept]
        return distance(found, labels, reduction=reduction)

    def update(self, inputs: Any, labels: Tensor, of: int) -> Tensor:
        """One step of the optimiser; the loss before it, such that the mean over the processes is the batch's."""

        def loss_of(inputs: Any, labels: Tensor) -> Tensor:
            try:
                with self.precision():
                    outputs = self.trained(inputs).float()
            except ValueError as error:  # torch's batch norm of one example, above all
                what = f"{self.model_name} refuses a batch of {len(labels)}: {one_line(error)}"
                raise LabError(f"{what}; choose another batch_size or model") from error
            if self.processes.world == 1:
                return self.loss(outputs, labels)
            return self.loss(outputs, labels, reduction="sum") * (self.processes.world / of)

        if isinstance(self.optimizer, TwoPassOptimizer):
            found: Tensor = self.optimizer.step(loss_of, inputs, labels)
            return found
        self.optimizer.zero_grad()
        loss = loss_of(inputs, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.config.clip is not None:
            clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        return loss.detach()

    def precision(self) -> torch.autocast:
        """Where the model is called, in the precision that was asked for."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16")

    def row(self, measured: dict[str, float]) -> dict[str, float]:
        """The epoch's row of the record, with what was `measured` at its end; the next epoch begins."""
        means = {name: total / self.steps_an_epoch for name, total in self.sums.items()}
        group = self.optimizer.param_groups[0]
        row = {"train_loss": means["train_loss"], "lr": float(group["lr"])}
        if isinstance(self.optimizer, TwoPassOptimizer):
            row |= {"penalty_ratio": means["penalty_ratio"], "rho": self.optimizer.rho_of(group)}
            if self.optimizer.rule.keeps_average:
                row["trace_ratio"] = means["trace_ratio"]
        self.epoch, self.step = self.epoch + 1, 0
        self.sums = dict.fromkeys(self.sums, 0.0)
        return row | measured

    @torch.no_grad()
    def measured(self) -> dict[str, Tensor]:
        """How good the model is: on the test data, on held-out data, and on mislabelled examples."""
        self.processes.as_first(self.model.buffers())
        with self.kept():
            self.processes.as_first(self.model.buffers())
            return self._measured()

    def kept(self) -> AbstractContextManager[None]:
        """The model has the weights that are evaluated and kept, inside this block."""
        return nullcontext() if self.average is None else self.average.inside()

    def _measured(self) -> dict[str, Tensor]:
        outputs = self._outputs(self.test)
        found = self._scores("test", outputs, self.test.labels)
        found["test_loss"] = self.plain_loss(outputs, self.test.labels)
        if self.holdout is not None:  # against the labels it has: nobody tunes on the truth
            found |= self._scores("holdout", self._outputs(self.holdout), self.holdout.labels)
        if self.mislabelled is not None:
            outputs = self._outputs(self.mislabelled)
            found["memorised"] = accuracy(outputs, self.mislabelled.labels)
            found["recovered"] = accuracy(outputs, self.mislabelled.truth)
        return found

    def _scores(self, part: str, outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """How good outputs are, by the names of the record's curves."""
        if self.target is None:
            return {f"{part}_accuracy": accuracy(outputs, labels)}
        given, wanted = outputs.squeeze(1).double(), labels.double()
        rmse = (given - wanted).square().mean().sqrt()
        return {f"{part}_r2": r2(given, wanted), f"{part}_rmse": rmse * self.target.deviation}

    @torch.no_grad()
    def tested(self) -> tuple[Tensor, Tensor, Tensor]:
        """How sure the model is of each test example's class, that class, and the label; on the CPU."""
        with self.kept():
            self.processes.as_first(self.model.buffers())
            sure, predicted = self._outputs(self.test).softmax(1).max(1)
        return sure.cpu(), predicted.cpu(), self.test.labels.cpu()

    @torch.no_grad()
    def _outputs(self, data: EvaluationData) -> Tensor:
        """The model's outputs for these examples."""
        self.model.eval()
        with self.precision():
            outputs = torch.cat([self.evaluated(inputs).float() for inputs in batches.each(data.batch, data.parts)])
        return self.processes.joined(outputs)[: len(data.labels)]


def _refuse_outputs_beyond_memory(task: Task) -> None:
    """Before anything is trained: all outputs for the test data are held at once."""
    largest = max(len(split.labels) for split in (task.test, task.holdout) if split is not None)
    size = 4 * largest * task.outputs
    if size > MOST_OUTPUTS:
        raise LabError(
            f"there are {task.classes:,} classes: outputs for {largest:,} examples would take {size >> 30} GiB; "
            "is the label what it should be? Else test, and hold out, fewer examples"
        )


def _refuse_what_is_not_shared(config: Config) -> None:
    """Only gradients are averaged over the processes: what is made of a process's own examples would differ."""
    for name in ("curvature", "average"):
        if getattr(config, name) not in (None, "gradient-magnitude"):
            raise LabError(f"{name} = {getattr(config, name)!r} cannot be shared by several processes: run it in one")
    if config.sharpness is not None:
        raise LabError(f"sharpness = {config.sharpness} cannot be shared by several processes: run it in one")
    if config.class_weights:
        raise LabError("class_weights = True cannot be shared by several processes: run it in one")
    if config.kernels == "fused":
        raise LabError("kernels = 'fused' cannot be shared by several processes: use torch's or compiled ones")
    if config.engine == "exact":
        raise LabError("engine = 'exact' cannot be shared by several processes: use finite-difference, or one process")


def _weights(labels: Tensor, classes: int) -> Tensor:
    """Of each class in the loss, such that the mean over the examples is 1; a class without examples counts nothing."""
    counts = torch.bincount(labels, minlength=classes).float()
    return torch.where(counts > 0, len(labels) / ((counts > 0).sum() * counts.clamp(min=1)), 0.0)


def _sizes(examples: int, size: int, model: nn.Module) -> list[int]:
    """Of the batches of an epoch. Batch norm takes no batch of one: that one goes into the batch before it."""
    sizes = [size] * (examples // size) + [examples % size] * (examples % size > 0)
    if sizes[1:] and sizes[-1] == 1 and any(isinstance(module, _BatchNorm) for module in model.modules()):
        sizes[-2:] = [sizes[-2] + 1]
    return sizes


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(1) == labels).double().mean()


def r2(given: Tensor, wanted: Tensor) -> Tensor:
    """R², the share of variance that is explained; NaN where there is none, as of a single example."""
    return 1 - (given - wanted).square().sum() / (wanted - wanted.mean()).square().sum()
