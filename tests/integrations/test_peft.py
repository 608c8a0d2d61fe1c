"""Adapters of PEFT's: only they are displaced, and the frozen weights, of whatever kind, stay as they are."""

import pytest
import torch
from torch.nn.utils import parameters_to_vector

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

from gtracer import AdamWTracer, SGDTracer  # noqa: E402
from gtracer.integrations.transformers import PenaltyTrainer  # noqa: E402
from gtracer.optim.masters import REST, joined  # noqa: E402
from gtracer.penalty import RHO_ADAPTERS  # noqa: E402
from support.trainers import TRACER, Watched, bert, trained  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
ADAPTERS = {
    "modules to save": lambda: peft.LoraConfig(
        task_type="SEQ_CLS", r=2, lora_alpha=8, use_rslora=True, target_modules="all-linear", modules_to_save=["pooler"]
    ),
    "lora": lambda: peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]),
    "dora": lambda: peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], use_dora=True),
    "ia3": lambda: peft.IA3Config(task_type="SEQ_CLS", target_modules=["key", "value"], feedforward_modules=[]),
}


def adapted(name):
    base = bert().double()
    torch.manual_seed(5)
    return peft.get_peft_model(base, ADAPTERS[name]()).double()


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_trainer_makes_the_steps_of_a_closure(tmp_path, name):
    model, twin = adapted(name), adapted(name).train()
    frozen = [p.clone() for p in model.parameters() if not p.requires_grad]
    own = {"label_names": ["labels"], "weight_decay": 0.0}
    _, made = trained(tmp_path, Watched, model=model, words={"tracer": TRACER}, **own)
    params = [p for p in twin.parameters() if p.requires_grad]
    opt = AdamWTracer(params, lr=1e-2, weight_decay=0.0, **TRACER)
    for batch in made.seen:
        opt.step(lambda batch=batch: twin(**batch).loss)
    found = parameters_to_vector([p for p in model.parameters() if p.requires_grad]).detach()
    torch.testing.assert_close(found, parameters_to_vector(params).detach(), rtol=1e-6, atol=1e-8)
    assert all(map(torch.equal, frozen, [p for p in model.parameters() if not p.requires_grad]))
    assert made.optimizer.optimizer.stats.penalty_ratio > 0


@pytest.mark.parametrize("given", [None, {"rho": 1e-3}])
def test_rho_is_that_of_adapters(tmp_path, given):
    expected = {(given or {}).get("rho", RHO_ADAPTERS)}
    own = {"words": {"tracer": given}, "label_names": ["labels"], "num_train_epochs": 1}
    _, made = trained(tmp_path, model=adapted("lora"), **own)
    assert {group["rho"] for group in made.optimizer.optimizer.param_groups} == expected
    model = adapted("lora")
    model.base_model.model.set_attn_implementation("eager")
    _, made = trained(tmp_path, PenaltyTrainer, model=model, **own)
    assert {group["rho"] for group in made.penalty.param_groups} == expected


def test_adapters_in_bfloat16():
    """All of it in bfloat16, against the same numbers in float32; by SGD, since Adam blows small gradients' up."""
    found = []
    words, labels = torch.randint(40, (8, 6)), torch.arange(8) % 2
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        model = peft.get_peft_model(bert().bfloat16(), ADAPTERS["lora"](), autocast_adapter_dtype=False).to(dtype)
        trained = [p for p in model.parameters() if p.requires_grad]
        assert {p.dtype for p in trained} == {dtype}
        start = [p.detach().float().clone() for p in trained]
        opt = SGDTracer(model.parameters(), lr=0.1, **TRACER)
        for _ in range(5):
            opt.step(lambda model=model: model(input_ids=words, labels=labels).loss)
        assert opt.stats.penalty_ratio > 0
        now = [joined(p, opt.state[p][REST]) if dtype == torch.bfloat16 else p.detach() for p in trained]
        found.append(parameters_to_vector(now) - parameters_to_vector(start))
    assert (found[0] - found[1]).norm() < 0.1 * found[1].norm()


def test_a_frozen_base_in_bfloat16():
    """Handed over whole, the model trains as its adapters do alone, to the bit."""

    def weights(alone):
        torch.manual_seed(0)
        model = peft.get_peft_model(bert().bfloat16(), ADAPTERS["lora"]())
        for p in model.parameters():
            p.data = p.data.float() if p.requires_grad else p.data
        trained = [p for p in model.parameters() if p.requires_grad]
        opt = AdamWTracer(trained if alone else model.parameters(), lr=1e-2, **TRACER)
        words, labels = torch.randint(40, (8, 6)), torch.arange(8) % 2

        def closure():
            with torch.autocast("cpu", torch.bfloat16):
                return model(input_ids=words, labels=labels).loss

        for _ in range(3):
            opt.step(closure)
        assert opt.stats.penalty_ratio > 0
        return parameters_to_vector(trained).detach()

    assert torch.equal(weights(True), weights(False))


def in_four_bits(model, quantised):
    """The attention's linear layers, in nf4; or in float32 with the same numbers."""
    bnb = pytest.importorskip("bitsandbytes")
    for layer in model.bert.encoder.layer:
        attention = layer.attention.self
        for name in ("query", "value"):
            plain = getattr(attention, name)
            made = bnb.nn.Linear4bit(16, 16, compute_dtype=torch.float32, quant_type="nf4")
            made.weight = bnb.nn.Params4bit(plain.weight.data.clone(), requires_grad=False, quant_type="nf4")
            made.bias = plain.bias
            made.to("cpu")
            if quantised:
                setattr(attention, name, made)
            else:
                plain.weight.data = bnb.functional.dequantize_4bit(made.weight.data, made.weight.quant_state)
    return model


def test_a_base_in_four_bits():
    """The steps of adapters over the same numbers in float32."""

    def weights(quantised):
        torch.manual_seed(0)
        model = peft.get_peft_model(in_four_bits(bert(), quantised), ADAPTERS["lora"]())
        trained = [p for p in model.parameters() if p.requires_grad]
        opt = SGDTracer(model.parameters(), lr=0.1, **TRACER)
        words, labels = torch.randint(40, (8, 6)), torch.arange(8) % 2
        for _ in range(4):
            opt.step(lambda: model(input_ids=words, labels=labels).loss)
        assert opt.stats.penalty_ratio > 0
        return parameters_to_vector(trained).detach()

    torch.testing.assert_close(weights(True), weights(False), rtol=1e-3, atol=1e-5)
