"""Causal language models made from a config: TracerTrainer in the manner of `run_clm.py`, against a closure's steps."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import (  # noqa: E402
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    default_data_collator,
)

from gtracer import AdamWTracer, Tracer, TracerPenalty  # noqa: E402
from gtracer.integrations.transformers import PenaltyTrainer, TracerTrainer  # noqa: E402
from support.trainers import TRACER, Watched, arguments  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
WORDS, BLOCK = 40, 12
SIZES = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": BLOCK, "use_cache": False,
}  # fmt: skip


def llama(dtype=torch.float64):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).to(dtype)


def qwen(dtype=torch.float64):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)).to(dtype)


def prompted():
    peft = pytest.importorskip("peft")
    made = llama()
    torch.manual_seed(1)
    return peft.get_peft_model(made, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).double()


def blocks(count=24, shortest=BLOCK):
    """Grouped texts: all of one length, labels as the words; or of different lengths."""
    draw = torch.Generator().manual_seed(1)
    sizes = torch.randint(shortest, BLOCK + 1, (count,), generator=draw).tolist()
    texts = [torch.randint(WORDS, (size,), generator=draw).tolist() for size in sizes]
    return [{"input_ids": text, "labels": text} for text in texts]


def packed():
    """Several texts in one row, told apart by their positions."""
    return {"data_collator": DataCollatorWithFlattening(), "train_dataset": blocks(shortest=4)}


PLAIN = {"data_collator": default_data_collator, "train_dataset": blocks()}
CASES = {
    "llama": (llama, PLAIN, {}),
    "qwen": (qwen, PLAIN, {}),
    "a prompt": (prompted, PLAIN, {"label_names": ["labels"]}),
    "packed": (llama, packed(), {}),
    "accumulated": (llama, PLAIN, {"gradient_accumulation_steps": 3}),
    "checkpointing": (llama, PLAIN, {"gradient_checkpointing": True}),
    "reentrant checkpointing": (
        llama, PLAIN, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ),
    "compiled": (llama, PLAIN, {"torch_compile": True, "torch_compile_backend": "aot_eager"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_trainer_makes_the_steps_of_a_closure(tmp_path, name):
    make, words, own = CASES[name]
    torch._dynamo.reset()
    model, size = make(), own.get("gradient_accumulation_steps", 1)
    made = Watched(model=model, args=arguments(tmp_path, weight_decay=0.0, **own), tracer=TRACER, **words)
    made.train()
    twin = make().train()
    opt = AdamWTracer(twin.parameters(), lr=1e-2, weight_decay=0.0, **TRACER)
    for i in range(0, len(made.seen), size):
        parts = made.seen[i : i + size]
        opt.step(lambda parts=parts: sum(twin(**part).loss for part in parts) / len(parts))
    found, expected = (parameters_to_vector(m.parameters()).detach() for m in (model, twin))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    assert made.optimizer.optimizer.stats.penalty_ratio > 1e-4


def test_packed_texts_do_not_see_each_other():
    """What the test above packs is a loss of each text by itself."""
    collate, data = packed()["data_collator"], packed()["train_dataset"][:3]
    model = llama()
    losses = [model(**default_data_collator([text])).loss for text in data]
    weights = [len(text["labels"]) - 1 for text in data]
    expected = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    torch.testing.assert_close(model(**collate(data)).loss, expected)


@pytest.mark.parametrize("trains", ["trainer", "loop"])
def test_a_penalty_names_the_attention_that_can_be_differentiated_twice(tmp_path, trains):
    model = llama()
    batch = default_data_collator(blocks(4))
    trainer = PenaltyTrainer(model=model, args=arguments(tmp_path), train_dataset=blocks())
    penalty = TracerPenalty(model.parameters(), rho=0.01)
    with pytest.raises(RuntimeError, match=r"ScaledDotProduct.*set_attn_implementation\('eager'\).*SDPBackend.MATH"):
        trainer.train() if trains == "trainer" else penalty(model(**batch).loss)
    TracerPenalty(model.parameters(), rho=0.0)(model(**batch).loss).backward()  # which differentiates once
    gradients = []
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        model.zero_grad()
        with sdpa_kernel(SDPBackend.MATH):
            TracerPenalty(model.parameters(), rho=0.01)(model(**batch).loss).backward()
        gradients.append(parameters_to_vector([p.grad for p in model.parameters()]))
    torch.testing.assert_close(*gradients)


# Optimisers whose states have eight bits.


def eight_bits(name):
    if name == "bitsandbytes":
        made = pytest.importorskip("bitsandbytes").optim.AdamW8bit
        return lambda params: made(params, lr=1e-3, weight_decay=0.0)
    made = pytest.importorskip("torchao.optim").AdamW8bit
    return lambda params: made(params, lr=1e-3, weight_decay=0.0)


def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))


def batch(i):
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(i))


def loss_of(model, i):
    return (model(batch(i)) - batch(i)).square().mean()


@pytest.mark.parametrize("name", ["bitsandbytes", "torchao"])
def test_states_of_eight_bits(name):
    """Against the same optimiser, handed ∇L + ρ∇T by hand."""
    make, model, twin = eight_bits(name), wide(), wide()
    opt = Tracer(make(model.parameters()), rho=0.01, delta=0.05)
    base, f = make(twin.parameters()), None
    params = list(twin.parameters())
    for i in range(4):
        opt.step(lambda i=i: loss_of(model, i))
        g = torch.autograd.grad(loss_of(twin, i), params)
        f = [x * x for x in g] if f is None else f
        u = [0.01 * x / (y + 0.05) for x, y in zip(g, f, strict=True)]
        length, start = parameters_to_vector(u).norm(), [p.detach().clone() for p in params]
        with torch.no_grad():
            for p, x in zip(params, u, strict=True):
                p.add_(x * (0.05 / length))
        ahead = torch.autograd.grad(loss_of(twin, i), params)
        with torch.no_grad():
            for p, w, x, y in zip(params, start, g, ahead, strict=True):
                p.copy_(w)
                p.grad = x + 2 * length / 0.05 * (y - x)
        base.step()
        f = [0.9 * y + 0.1 * x * x for x, y in zip(g, f, strict=True)]
    way = parameters_to_vector(twin.parameters()) - parameters_to_vector(wide().parameters())
    apart = parameters_to_vector(model.parameters()) - parameters_to_vector(twin.parameters())
    assert apart.norm() < 0.01 * way.norm()  # where a rounding tips a number into the next of 256


@pytest.mark.parametrize("name", ["bitsandbytes", "torchao"])
def test_states_of_eight_bits_are_saved_as_they_are(name):
    make, found = eight_bits(name), []
    for saved in (False, True):
        model = wide()
        opt = Tracer(make(model.parameters()), rho=0.01, delta=0.05)
        for i in range(3):
            opt.step(lambda i=i, model=model: loss_of(model, i))
        if saved:
            other = Tracer(make(model.parameters()), rho=0.01, delta=0.05)
            other.load_state_dict(opt.state_dict())
            for p in model.parameters():
                kinds = [
                    {k: (type(x), x.dtype) for k, x in o.state[p].items() if torch.is_tensor(x)} for o in (opt, other)
                ]
                assert kinds[0] == kinds[1]
            opt = other
        for i in range(3, 6):
            opt.step(lambda i=i, model=model: loss_of(model, i))
        found.append(parameters_to_vector(model.parameters()).detach())
    assert torch.equal(*found)


def test_eight_bits_by_the_trainer(tmp_path):
    """`optim` names it, and it is wrapped."""
    pytest.importorskip("bitsandbytes")
    made = TracerTrainer(
        model=llama(torch.float32), args=arguments(tmp_path, optim="adamw_bnb_8bit"), tracer=TRACER, **PLAIN
    )
    made.train()
    opt = made.optimizer.optimizer
    assert (type(opt), type(opt.base).__name__) == (Tracer, "AdamW")
    assert opt.base.args.optim_bits == 8
    assert opt.stats.penalty_ratio > 0
