"""TRL's trainers with TracerMixin, on a Llama of two layers made on the spot: their numbers, and a closure's steps."""

import random
from functools import partial

import pytest
import torch
from torch.nn.utils import parameters_to_vector

trl = pytest.importorskip("trl")
tokenizers = pytest.importorskip("tokenizers")

from datasets import Dataset  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

from gtracer import AdamWTracer  # noqa: E402
from gtracer.integrations.transformers import TracerMixin  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
WORDS = [f"w{i}" for i in range(30)]
TRACER = {"rho": 0.01, "delta": 0.05}
# What the optimiser decides; what is not the same twice; a mean over tokens, which the mixin takes over micro-batches.
OWN = {"loss", "train_loss", "grad_norm", "trace_ratio", "penalty_ratio", "train_runtime", "train_samples_per_second"}
OWN |= {"train_steps_per_second", "total_flos"}


class Sft(TracerMixin, trl.SFTTrainer):
    pass


class Dpo(TracerMixin, trl.DPOTrainer):
    pass


def tokenizer():
    names = {word: i for i, word in enumerate(["[PAD]", "[EOS]", "[UNK]", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]")


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS) + 3,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def texts():
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(5, 9))) for _ in range(16)]


def pairs():
    cut = [text.split(" ", 3) for text in texts()]
    return {"prompt": [c[0] for c in cut], "chosen": [c[1] for c in cut], "rejected": [c[3] for c in cut]}


def lora():
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian"
    )


KINDS = {
    "sft": (Sft, trl.SFTTrainer, trl.SFTConfig, lambda: Dataset.from_dict({"text": texts()}), {}),
    "sft, packed": (
        Sft, trl.SFTTrainer, partial(trl.SFTConfig, packing=True, packing_strategy="wrapped", max_length=16),
        lambda: Dataset.from_dict({"text": texts()}), {},
    ),
    "sft, LoRA": (
        Sft, trl.SFTTrainer, trl.SFTConfig, lambda: Dataset.from_dict({"text": texts()}), {"peft_config": lora},
    ),
    "dpo, LoRA": (Dpo, trl.DPOTrainer, trl.DPOConfig, lambda: Dataset.from_dict(pairs()), {"peft_config": lora}),
    "dpo": (Dpo, trl.DPOTrainer, trl.DPOConfig, lambda: Dataset.from_dict(pairs()), {"ref_model": llama}),
}  # fmt: skip


def trained(cls, config, data, words, folder, model=None, **own):
    words = {name: value() if callable(value) else value for name, value in words.items()}
    args = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "max_steps": 4, "learning_rate": 1e-2,
        "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": [], "use_cpu": True, "bf16": False,
        "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False, "max_grad_norm": 0.0,
    }  # fmt: skip
    model = llama() if model is None else model
    made = cls(model, args=config(**args | own), train_dataset=data(), processing_class=tokenizer(), **words)
    made.train()
    return made


def numbers(made):
    return [{k: v for k, v in row.items() if k not in OWN} for row in made.state.log_history]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_it_counts_every_batch_once(tmp_path, kind, accumulation):
    """Tokens, entropies, accuracies, rewards and margins are those of TRL's own trainer, without a learning rate."""
    ours, theirs, config, data, words = KINDS[kind]
    own = {"learning_rate": 0.0, "gradient_accumulation_steps": accumulation, "max_steps": 2}
    found = trained(ours, config, data, words | {"tracer": TRACER}, tmp_path, **own)
    expected = trained(theirs, config, data, words, tmp_path, **own)
    assert found._total_train_tokens == expected._total_train_tokens > 0
    for one, other in zip(numbers(found), numbers(expected), strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
    assert found.optimizer.optimizer.stats.penalty_ratio > 0


@pytest.mark.parametrize("kind", KINDS)
def test_it_makes_the_steps_of_a_closure(tmp_path, kind):
    ours, _, config, data, words = KINDS[kind]

    class Watched(ours):
        def training_step(self, model, inputs, *rest):
            self.seen = [*getattr(self, "seen", []), {key: value.clone() for key, value in inputs.items()}]
            return super().training_step(model, inputs, *rest)

    made = trained(Watched, config, data, words | {"tracer": TRACER}, tmp_path, llama().double(), weight_decay=0.0)
    twin = trained(ours, config, data, words | {"tracer": TRACER}, tmp_path, llama().double(), learning_rate=0.0)
    model = twin.model
    opt = AdamWTracer(model.parameters(), lr=1e-2, weight_decay=0.0, **TRACER)
    for batch in made.seen:
        opt.step(lambda batch=batch: twin.compute_loss(model, dict(batch)))
    found, expected = (parameters_to_vector(m.parameters()).detach() for m in (made.model, model))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["GRPOTrainer", "RLOOTrainer"])
def test_trainers_that_generate_their_batch_are_refused(name):
    class Generating(TracerMixin, getattr(trl, name)):
        pass

    with pytest.raises(TypeError, match="generates what it trains on"):
        Generating(model=llama(), reward_funcs=lambda completions, **rest: [0.0] * len(completions))


def test_a_model_card_names_the_optimiser_and_rho(tmp_path):
    made = trained(Sft, trl.SFTConfig, lambda: Dataset.from_dict({"text": texts()}), {"tracer": TRACER}, tmp_path)
    for _ in range(2):
        made.create_model_card(model_name="mine")
    assert (tmp_path / "README.md").read_text().count("AdamWTracer(AdamW, rho=0.01") == 1
