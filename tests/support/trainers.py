"""Hugging Face's Trainer on a BERT of two layers made on the spot."""

import torch
from torch.nn.utils import parameters_to_vector
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from gtracer.integrations.transformers import TracerTrainer

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


def trained(folder, trainer=TracerTrainer, model=None, words=None, resume=None, **own):
    model = bert() if model is None else model
    words = {"tracer": TRACER} if words is None else words
    made = trainer(**{"model": model, "args": arguments(folder, **own), "train_dataset": data()} | words)
    made.train(resume_from_checkpoint=resume)
    return parameters_to_vector(model.parameters()).detach(), made


def logged(made, *names):
    rows = [row for row in made.state.log_history if "loss" in row]
    return torch.tensor([[row[name] for name in names] for row in rows], dtype=torch.float64)


class Watching:
    """Notes the batches in the order that they come."""

    def training_step(self, model, inputs, *rest):
        self.seen = [*getattr(self, "seen", []), {key: value.clone() for key, value in inputs.items()}]
        return super().training_step(model, inputs, *rest)


class Watched(Watching, TracerTrainer):
    pass
