"""Tiny transformers, saved as Hugging Face saves them."""

import pytest
import torch

WORDS = ("good", "bad", "very", "film", "the")


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def tiny_bert(folder, dropout=0.1):
    """A BERT of two small layers and a tokenizer of a few words, saved as Hugging Face saves them."""
    return _tiny(folder, "Bert", ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS], dropout)


def tiny_mpnet(folder, dropout=0.1):
    """Likewise an MPNet, whose attention is transformers' own and has biases by position."""
    return _tiny(folder, "MPNet", ["<s>", "<pad>", "</s>", "[UNK]", "<mask>", *WORDS], dropout)


def _tiny(folder, kind, words, dropout):
    transformers = pytest.importorskip("transformers")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(words))
    getattr(transformers, f"{kind}TokenizerFast")(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = getattr(transformers, f"{kind}Config")(vocab_size=len(words), **SIZES, **rates)
    getattr(transformers, f"{kind}ForSequenceClassification")(config).save_pretrained(folder)
    return folder
