"""Hugging Face's Trainer with the penalty: `TracerTrainer` by a second pass, `PenaltyTrainer` as a term of the loss.

For your own Trainer use `TracerMixin` and `PenaltyMixin`.
"""

from __future__ import annotations

import copy
import re
import warnings
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from gtracer.integrations.records import held
from gtracer.optim import AdamWTracer, Tracer, TwoPassOptimizer
from gtracer.optim.loops import tell_loss
from gtracer.penalty import RHO_ADAPTERS, RHO_FINE_TUNING, TracerPenalty
from gtracer.scopes import second_pass

ADAMW = ("adamw_torch", "adamw_torch_fused")
SEARCHED = {f"tracer_{name}": name for name in ("rho", "delta", "beta")}  # in the TrainingArguments
GENERATES = ("_generate", "generate_on_policy_outputs")  # methods of TRL's trainers that sample in their training step
# Optimisers that move the weights inside backward(), or keep two sets of them.
REFUSED = ("lomo", "adalomo", "layerwise", "schedule_free")


class _MeanLoss:
    """A Trainer whose loss is the mean over micro-batches and processes, and whose log tells of the penalty."""

    # What a Trainer has.
    args: Any
    state: Any
    accelerator: Any
    model: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Else the Trainer adds micro-batches up and multiplies by the number of processes, for the model to divide by
        # `num_items_in_batch`. Many take that number and do not divide; and T grows with the square of the loss.
        self.model_accepts_loss_kwargs = False

    def _measures(self) -> dict[str, float]:
        raise NotImplementedError

    def _described(self) -> str:
        """The optimiser, in a model card's words."""
        raise NotImplementedError

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """As the Trainer does, with TRACER and its ρ, of which the TrainingArguments know nothing."""
        super().create_model_card(*args, **kwargs)  # type: ignore[misc]
        card = Path(self.args.output_dir) / "README.md"
        if self.args.process_index == 0 and card.exists() and self.optimizer is not None:
            card.write_text(_with_optimizer(card.read_text(encoding="utf-8"), self._described()), encoding="utf-8")

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the Trainer does, with what there is to tell of the penalty beside the loss."""
        if "loss" in logs:
            logs |= self._measures()
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class TracerMixin(_MeanLoss):
    """Makes a Trainer run its micro-batches a second time, at displaced weights, before each update.

    Put it before the Trainer: `class Mine(TracerMixin, Seq2SeqTrainer): …`. Accumulation, mixed precision, clipping
    (`max_grad_norm`, of the total gradient), checkpoints and several processes work as in the Trainer. The penalty is
    that of the whole batch, of all micro-batches and processes, which all count the same. Each logged loss comes with T
    and ‖ρ∇T‖/‖∇L‖ of the last step, as `trace_ratio` and `penalty_ratio`. Batch norm sees the first pass alone, without
    `model=`.

    The Trainer counts and logs the first pass only. In the second pass its numbers, lists, dictionaries and metrics
    stay as they are, and nothing is logged. The second pass uses the inputs that the first one prepared.

    Args:
        *args: The Trainer's.
        tracer: Options of `AdamWTracer`, such as `{"rho": 1e-4}`. The default ρ is 6e-5, for fine-tuning, and 2e-4 for
            PEFT's adapters; a model trained from scratch needs about 0.003. Learning rate, betas, eps and weight decay
            are those of the TrainingArguments. What else their `optim` names (`sgd`, `rmsprop`, `adagrad`,
            `adafactor`) is wrapped by `Tracer`, of which these are then options; `hyperparameter_search` searches
            `tracer_rho`, `tracer_delta` and `tracer_beta` beside the Trainer's own. For another optimiser of gtracer
            pass `optimizers` or `optimizer_cls_and_kwargs`.
        **kwargs: The Trainer's.
    """

    def __init__(self, *args: Any, tracer: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if any(hasattr(self, name) for name in GENERATES):
            raise TypeError(
                f"{type(self).__name__} generates what it trains on, which the second pass would do anew at displaced "
                "weights: TracerMixin is for trainers whose batch is given (SFTTrainer, DPOTrainer)"
            )
        super().__init__(*args, **kwargs)
        if self._has_its_own() and tracer is not None:
            raise ValueError(f"tracer = {tracer!r} beside an optimizer of your own, which has its options already")
        self._tracer = {"rho": _rho_for(self.model)} | (tracer or {})
        self._tracer.pop("model", None)  # it comes with the first step
        for name in SEARCHED.keys() - {field.name for field in fields(self.args)}:
            setattr(self.args, name, None)  # a search sets nothing that is not there
        if not self._has_its_own():
            self._check_optim()
        self._window: list[tuple[dict[str, Any], Any]] = []  # micro-batches of the step under way
        self._losses: list[Tensor] = []  # of them
        self._prepared: list[Any] = []  # as the model is given them
        self._again: Any = None  # what the second pass is to be given next

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """AdamW-TRACER, or by TRACER what else the TrainingArguments name; of a search's trial, as they are now."""
        if self._has_its_own():
            return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        self._check_optim()
        asked, options = self.args, dict(self._tracer)
        options |= {name: value for key, name in SEARCHED.items() if (value := getattr(asked, key)) is not None}
        if asked.optim in ADAMW:
            own = {"lr": asked.learning_rate, "betas": (asked.adam_beta1, asked.adam_beta2), "eps": asked.adam_epsilon}
            self.optimizer_cls_and_kwargs = AdamWTracer, own | options
        try:
            made = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.optimizer_cls_and_kwargs = None
        if not isinstance(made, TwoPassOptimizer):
            made = self.optimizer = Tracer(made, **options)
        return made

    def _has_its_own(self) -> bool:
        return self.optimizer is not None or self.optimizer_cls_and_kwargs is not None

    def _check_optim(self) -> None:
        name = str(getattr(self.args.optim, "value", self.args.optim))
        if any(part in name for part in REFUSED):
            raise ValueError(
                f"optim = {name!r} moves the weights inside backward() or keeps two sets of them, and has no "
                "second pass: use adamw_torch, sgd, rmsprop, adagrad or adafactor"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As the Trainer does: what the checkpoint says of ρ counts, which is said where it was asked otherwise."""
        asked = self._rhos()
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if (found := self._rhos()) != asked:
            warnings.warn(
                f"training goes on with the checkpoint's rho = {_listed(found)}, as with its learning rate; asked was "
                f"{_listed(asked)}. To change it, set it in the groups of trainer.optimizer when training has begun, "
                "or start anew",
                stacklevel=2,
            )

    def _rhos(self) -> list[Any]:
        opt = getattr(self.optimizer, "optimizer", self.optimizer)
        if not isinstance(opt, TwoPassOptimizer):
            return []
        return [
            "auto" if group.get("rho_is_auto") else group.get("initial_rho", group[opt.rho_key])
            for group in opt.param_groups
        ]

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """One micro-batch; after the last of a step, all of them again at displaced weights."""
        opt = self._two_pass_optimizer()
        if opt.model is None:
            opt.model = model  # whose buffers the second pass leaves alone; wrapped, as several processes want it
            epochs = self.state.num_train_epochs  # a huge number, where the data has no length
            if opt.steps_per_epoch is None and epochs <= self.state.max_steps:
                opt.steps_per_epoch = round(self.state.max_steps / epochs)
        if not self._window:
            opt.zero_grad()  # also where random numbers begin
        self._window.append((inputs, num_items_in_batch))
        loss = self._plain_step(model, inputs, num_items_in_batch)
        self._losses.append(loss.detach())
        if self.accelerator.sync_gradients:
            mean = torch.stack(self._losses).sum()
            tell_loss(opt, mean)
            try:
                if opt.second_pass_due:
                    self._second_pass(model, opt, mean)
            finally:
                self._losses.clear()
                self._window.clear()
                self._prepared.clear()
        return loss

    def _prepare_inputs(self, inputs: Any) -> Any:
        """What the first pass was given, in a second; a loss may take out of it what it likes."""
        if second_pass() and self._again is not None:
            return copy.copy(self._again)
        prepared = super()._prepare_inputs(inputs)  # type: ignore[misc]
        if len(self._prepared) < len(self._window):  # not in an evaluation
            self._prepared.append(copy.copy(prepared))
        return prepared

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as the Trainer does, once per step."""
        if not second_pass():
            super().log(logs, *args, **kwargs)

    def _second_pass(self, model: nn.Module, opt: TwoPassOptimizer, loss: Tensor) -> None:
        for _ in range(1 + opt.is_central):
            with held(self), opt.perturbed(scaler=self.accelerator.scaler, loss=loss):
                for i, (inputs, count) in enumerate(self._window):
                    last = i == len(self._window) - 1
                    self._again = self._prepared[i] if i < len(self._prepared) else None
                    with nullcontext() if last else self.accelerator.no_sync(model):
                        self._plain_step(model, inputs, count)

    def _plain_step(self, model: nn.Module, inputs: dict[str, Any], count: Any) -> Tensor:
        found: Tensor = super().training_step(model, inputs, count)  # type: ignore[misc]
        return found

    def _two_pass_optimizer(self) -> TwoPassOptimizer:
        opt = getattr(self.optimizer, "optimizer", self.optimizer)
        if not isinstance(opt, TwoPassOptimizer):
            raise TypeError(
                f"TracerTrainer needs an optimizer of gtracer, got {type(opt).__name__}: leave it out, or pass "
                "optimizers=(AdamWTracer(model.parameters()), None)"
            )
        return opt

    def _measures(self) -> dict[str, float]:
        stats = getattr(getattr(self.optimizer, "optimizer", self.optimizer), "stats", None)
        return {} if stats is None else {"trace_ratio": stats.trace_ratio, "penalty_ratio": stats.penalty_ratio}

    def _described(self) -> str:
        return f"`{getattr(self.optimizer, 'optimizer', self.optimizer)!r}`"


def _rho_for(model: Any) -> float:
    """Where nothing is said of it: to fine-tune all of a model, or adapters."""
    return RHO_ADAPTERS if getattr(model, "peft_config", None) else RHO_FINE_TUNING


def _with_optimizer(card: str, described: str) -> str:
    """A model card that names it; where it has no line for an optimiser, as TRL's, at its end."""
    found, count = re.subn(r"^- optimizer: .*(\n(?!- ).+)*", lambda _: f"- optimizer: {described}", card, flags=re.M)
    return found if count else f"{card.rstrip()}\n\n### Optimizer\n\n{described}\n"


def _listed(rhos: list[Any]) -> str:
    return ", ".join(str(rho) for rho in dict.fromkeys(rhos))


class TracerTrainer(TracerMixin, Trainer):
    """`transformers.Trainer` with AdamW-TRACER.

    trainer = TracerTrainer(model, args, train_dataset=data, tracer={"rho": 6e-5})
    """


class PenaltyMixin(_MeanLoss):
    """Adds ρT to a Trainer's loss, exactly, whatever its optimiser.

    Put it before the Trainer: `class Mine(PenaltyMixin, Seq2SeqTrainer): …`. Every micro-batch on every process has its
    own penalty, and f follows each of them. f is in the checkpoints; T of the last micro-batch comes with every loss
    that is logged, as `trace_ratio`. The model is differentiated twice, which fused attention cannot be: call
    `model.set_attn_implementation("eager")`.

    Args:
        *args: The Trainer's.
        tracer: Options of `TracerPenalty`, such as `{"rho": 2e-4}`; The default ρ is that of `TracerMixin`.
        **kwargs: The Trainer's.

    Attributes:
        penalty: The `TracerPenalty`, once training has begun.
    """

    penalty: TracerPenalty | None = None

    def __init__(self, *args: Any, tracer: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._penalty_options = tracer or {}
        super().__init__(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the Trainer's optimiser, and the penalty."""
        if self.penalty is None or self.optimizer is None:  # a new model comes without optimiser
            trained = [p for p in self.model.parameters() if p.requires_grad]
            self.penalty = TracerPenalty(trained, **{"rho": _rho_for(self.model)} | self._penalty_options)
        return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """L + ρT in training, L in evaluation."""
        found = super().compute_loss(*args, **kwargs)  # type: ignore[misc]
        if self.penalty is None:
            return found
        if isinstance(found, tuple):
            return (self.penalty(found[0]), *found[1:])
        return self.penalty(found)

    def _measures(self) -> dict[str, float]:
        ratio = None if self.penalty is None else self.penalty.trace_ratio
        return {} if ratio is None else {"trace_ratio": ratio.item()}

    def _described(self) -> str:
        opt = getattr(self.optimizer, "optimizer", self.optimizer)
        groups = [] if self.penalty is None else self.penalty.param_groups
        return f"`{type(opt).__name__}`, with a TracerPenalty in the loss, rho={_listed([g['rho'] for g in groups])}"

    # Not a callback, which is not told the checkpoint that training resumes from.

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        if self.penalty is not None:
            Path(output_dir).mkdir(parents=True, exist_ok=True)  # another process may not have made it yet
            torch.save(self.penalty.state_dict(), self._penalty_file(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if self.penalty is not None and checkpoint is not None and self._penalty_file(checkpoint).exists():
            state = torch.load(self._penalty_file(checkpoint), map_location="cpu", weights_only=True)
            self.penalty.load_state_dict(state)

    def _penalty_file(self, folder: str) -> Path:
        return Path(folder) / f"penalty_{self.args.process_index}.pt"  # each process has an f of its own


class PenaltyTrainer(PenaltyMixin, Trainer):
    """`transformers.Trainer` with ρT in its loss.

    trainer = PenaltyTrainer(model, args, train_dataset=data, tracer={"rho": 6e-5})
    """


__all__ = ["PenaltyMixin", "PenaltyTrainer", "TracerMixin", "TracerTrainer"]
