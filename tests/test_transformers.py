"""Hugging Face's Trainer, on a BERT of two layers made on the spot."""

import copy
import json
import math

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from torch.nn.utils import parameters_to_vector  # noqa: E402
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments  # noqa: E402

from gtracer import SAM, AdamWTracer, SGDTracer, TracerPenalty  # noqa: E402
from gtracer.integrations.transformers import TracerMixin, TracerTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
LENGTH, EXAMPLES = 6, 24


def bert(dropout=0.0):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def data():
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(40, (EXAMPLES, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": int(row.sum() % 2)} for row in words]


def arguments(folder, **own):
    words = {
        "per_device_train_batch_size": 8, "num_train_epochs": 2, "learning_rate": 1e-2, "weight_decay": 0.01,
        "lr_scheduler_type": "constant", "report_to": [], "save_strategy": "no", "logging_steps": 1, "use_cpu": True,
        "disable_tqdm": True, "max_grad_norm": 0.0, "seed": 3,
    }  # fmt: skip
    return TrainingArguments(str(folder), **words | own)


TRACER = {"rho": 0.01, "delta": 0.05}


def trained(folder, trainer=TracerTrainer, model=None, words=None, **own):
    model = model or bert()
    made = trainer(model=model, args=arguments(folder, **own), train_dataset=data(), **(words or {"tracer": TRACER}))
    made.train()
    return parameters_to_vector(model.parameters()).detach(), made


class Watched(TracerTrainer):
    """Notes the batches in the order that they come."""

    def __init__(self, *args, **kwargs):
        self.seen = []
        super().__init__(*args, **kwargs)
        # BERT's classifier takes `num_items_in_batch` and does not divide by it; the Trainer believes that it does.
        self.loss_is_scaled_for_ga = False

    def training_step(self, model, inputs, *rest):
        self.seen.append({key: value.clone() for key, value in inputs.items()})
        return super().training_step(model, inputs, *rest)


def groups(model):
    no_decay = [p for name, p in model.named_parameters() if "bias" in name or "LayerNorm" in name]
    decay = [p for name, p in model.named_parameters() if not ("bias" in name or "LayerNorm" in name)]
    return [{"params": decay, "weight_decay": 0.01}, {"params": no_decay, "weight_decay": 0.0}]


def by_hand(seen, size, bf16=False, dtype=torch.float32, **own):
    """The same steps with `step(closure)`, `size` of the Trainer's micro-batches at a time."""
    model = bert().to(dtype).train()
    opt = AdamWTracer(groups(model), lr=1e-2, **TRACER, **own)
    for i in range(0, len(seen), size):
        parts = seen[i : i + size]
        whole = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

        def closure(batch=whole):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                return model(**batch).loss

        opt.step(closure)
    return parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_trainer_makes_the_steps_of_a_closure(tmp_path, accumulation):
    """To rounding, with accumulation too; in float64, since Adam blows the rounding of small gradients up."""
    model = bert().double()
    found, made = trained(tmp_path, Watched, model=model, gradient_accumulation_steps=accumulation)
    expected = by_hand(made.seen, accumulation, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    assert made.state.global_step == 6 // accumulation


def test_bf16(tmp_path):
    found, made = trained(tmp_path, Watched, bf16=True)
    start, exact = parameters_to_vector(bert().parameters()), by_hand(made.seen, 1)
    expected = by_hand(made.seen, 1, bf16=True)
    assert (found - expected).norm() < 1e-3 * (found - start).norm()
    assert not torch.allclose(expected, exact, atol=1e-7)


def test_central_differences_and_intervals(tmp_path):
    for own in ({"difference": "central"}, {"interval": 2}):
        found, made = trained(tmp_path, Watched, words={"tracer": TRACER | own})
        expected = by_hand(made.seen, 1, **own)
        start = parameters_to_vector(bert().parameters())
        assert (found - expected).norm() < 1e-3 * (found - start).norm(), own


def test_a_loss_that_takes_the_labels_out_of_the_batch(tmp_path):
    """As label smoothing does: the second pass finds them again."""
    found, made = trained(tmp_path, label_smoothing_factor=0.1)
    assert made.optimizer.optimizer.stats.penalty_ratio > 0
    assert not torch.equal(found, trained(tmp_path)[0])


def test_dropout_masks_are_the_same_in_both_passes(tmp_path):
    """Else the difference of the two gradients is mostly theirs."""
    _, made = trained(tmp_path, model=bert(dropout=0.5), words={"tracer": {"rho": 1e-6, "delta": 0.05}})
    assert made.optimizer.optimizer.stats.penalty_ratio < 1e-2


def test_clipping_is_of_the_total(tmp_path):
    """`max_grad_norm` bounds what the optimiser sees."""
    model = bert()
    opt = SGDTracer(model.parameters(), lr=1.0, rho=0.05, delta=0.05)
    start = parameters_to_vector(model.parameters()).detach().clone()
    own = {"max_grad_norm": 1e-3, "max_steps": 1, "num_train_epochs": 1}
    found, _ = trained(tmp_path, model=model, words={"optimizers": (opt, None)}, **own)
    assert (found - start).norm().item() == pytest.approx(1e-3, rel=1e-2)


def test_any_two_pass_optimiser_will_do(tmp_path):
    model = bert()
    opt = SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05)
    found, _ = trained(tmp_path, model=model, words={"optimizers": (opt, None)}, learning_rate=0.1)
    assert not torch.equal(found, parameters_to_vector(bert().parameters()))


def test_other_optimisers_are_refused(tmp_path):
    model = bert()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="got SGD"):
        trained(tmp_path, model=model, words={"optimizers": (opt, None)})
    with pytest.raises(ValueError, match="tracer"):
        trained(tmp_path, model=model, words={"optimizers": (opt, None), "tracer": TRACER})


def test_the_ratio_and_the_penalty_are_logged(tmp_path):
    _, made = trained(tmp_path)
    rows = [row for row in made.state.log_history if "loss" in row]
    assert len(rows) == 6
    assert all(row["trace_ratio"] > 0 and row["penalty_ratio"] > 0 for row in rows)


def test_resuming_from_a_checkpoint(tmp_path):
    """Gives the weights of the run that was never stopped: f and the optimiser's moments are in it."""
    whole, _ = trained(tmp_path / "whole", model=bert(0.1), num_train_epochs=3)
    own = {"save_strategy": "epoch", "num_train_epochs": 3}
    trained(tmp_path / "half", model=bert(0.1), **own)
    first = tmp_path / "half" / "checkpoint-3"
    assert json.loads((first / "trainer_state.json").read_text())["global_step"] == 3
    model = bert(0.1)
    made = TracerTrainer(model=model, args=arguments(tmp_path / "half", **own), train_dataset=data(), tracer=TRACER)
    made.train(resume_from_checkpoint=str(first))
    torch.testing.assert_close(parameters_to_vector(model.parameters()), whole, rtol=1e-6, atol=1e-8)


def test_the_mixin_on_a_trainer_of_ones_own(tmp_path):
    class Doubled(Trainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return (2 * loss[0], *loss[1:]) if isinstance(loss, tuple) else 2 * loss

    class Mine(TracerMixin, Doubled):
        pass

    found, _ = trained(tmp_path, Mine)
    assert not torch.allclose(found, trained(tmp_path)[0])


def test_the_penalty_in_a_plain_trainers_loss(tmp_path):
    """TracerPenalty in `compute_loss`: any Trainer, any optimiser; attention that has second derivatives."""

    class Penalised(Trainer):
        penalty = None

        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            if self.penalty is None:
                self.penalty = TracerPenalty([p for p in model.parameters() if p.requires_grad], **TRACER)
            loss = self.penalty(loss)
            return (loss, outputs) if return_outputs else loss

    model = bert()
    model.set_attn_implementation("eager")
    twin = copy.deepcopy(model).train()
    words = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 1e-2})}
    seen = []

    class Watching(Penalised):
        def training_step(self, model, inputs, *rest):
            seen.append({key: value.clone() for key, value in inputs.items()})
            return super().training_step(model, inputs, *rest)

    found, made = trained(tmp_path, Watching, model=model, words=words, weight_decay=0.0)
    assert math.isfinite(made.penalty.trace_ratio.item())
    opt = SGDTracer(twin.parameters(), lr=1e-2, engine="exact", **TRACER)
    for batch in seen:
        opt.step(lambda batch=batch: twin(**batch).loss)
    torch.testing.assert_close(found, parameters_to_vector(twin.parameters()), rtol=1e-4, atol=1e-6)
