"""Hugging Face: TracerTrainer in the place of Trainer, or PenaltyTrainer, which keeps the Trainer's optimiser.

The model is made on the spot; load your own instead.
"""

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from gtracer.integrations.transformers import PenaltyTrainer, TracerTrainer


def main(folder: str, epochs: int = 2, kind: type = TracerTrainer) -> TracerTrainer | PenaltyTrainer:
    """Train on made-up data."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=2
    )
    model = BertForSequenceClassification(config)
    if kind is PenaltyTrainer:
        model.set_attn_implementation("eager")  # fused attention cannot be differentiated twice
    words = torch.randint(100, (64, 12))
    data = [{"input_ids": row, "labels": int(row[0] % 2)} for row in words]
    trainer = kind(
        model=model,
        args=TrainingArguments(folder, num_train_epochs=epochs, learning_rate=1e-3, logging_steps=4, report_to=[]),
        train_dataset=data,
        tracer={"rho": 1e-3},  # for a model that starts anew; leave it out to fine-tune one
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
        main(folder, kind=PenaltyTrainer)
