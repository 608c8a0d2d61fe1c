"""Hugging Face's Trainer, on a BERT of two layers made on the spot."""

import copy
import os
import runpy
from unittest import mock

import pytest
import torch
from torch import nn

from support.gloo import together
from support.places import ROOT

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from torch.nn.utils import parameters_to_vector  # noqa: E402
from transformers import Adafactor, Trainer  # noqa: E402

from gtracer import SAM, AdamWTracer, Clip, FiniteDifference, SGDTracer, Tracer, TracerPenalty  # noqa: E402
from gtracer.integrations.transformers import PenaltyTrainer, TracerMixin, TracerTrainer  # noqa: E402
from gtracer.optim.masters import REST, joined  # noqa: E402
from support.trainers import EXAMPLES, LENGTH, TRACER, Watched, Watching, arguments, bert, data, logged, trained  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def groups(model):
    no_decay = [p for name, p in model.named_parameters() if "bias" in name or "LayerNorm" in name]
    decay = [p for name, p in model.named_parameters() if not ("bias" in name or "LayerNorm" in name)]
    return [{"params": decay, "weight_decay": 0.01}, {"params": no_decay, "weight_decay": 0.0}]


def by_hand(seen, size, bf16=False, dtype=torch.float32, **own):
    """The same steps with `step(closure)`, `size` of the Trainer's micro-batches at a time."""
    model = bert().to(dtype).train()
    opt, stats = AdamWTracer(groups(model), lr=1e-2, **TRACER, **own), []
    for i in range(0, len(seen), size):
        parts = seen[i : i + size]
        whole = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

        def closure(batch=whole):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                return model(**batch).loss

        loss = opt.step(closure)
        stats.append([loss.item(), opt.stats.trace_ratio, opt.stats.penalty_ratio])
    return parameters_to_vector(model.parameters()).detach(), torch.tensor(stats, dtype=torch.float64)


@pytest.mark.parametrize(("given", "expected"), [(None, 6e-5), ({"delta": 0.1}, 6e-5), ({"rho": 0.2}, 0.2)])
def test_rho_is_one_for_fine_tuning(tmp_path, given, expected):
    _, made = trained(tmp_path, words={"tracer": given}, num_train_epochs=1)
    assert {group["rho"] for group in made.optimizer.optimizer.param_groups} == {expected}
    _, made = trained(tmp_path, PenaltyTrainer, model=eager(), words={"tracer": given}, num_train_epochs=1)
    assert {group["rho"] for group in made.penalty.param_groups} == {expected}


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_optimiser_is_told_how_long_an_epoch_is(tmp_path, accumulation):
    for epochs in (1, 2):
        words = {"num_train_epochs": epochs, "gradient_accumulation_steps": accumulation}
        _, made = trained(tmp_path / str(epochs), words={"tracer": {"rho": "auto"}}, **words)
        assert made.optimizer.optimizer.steps_per_epoch == made.state.global_step / epochs


def test_data_without_a_length_tells_nothing_of_an_epoch(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from data()

    words = {"tracer": {"rho": "auto"}, "train_dataset": Stream()}
    _, made = trained(tmp_path, words=words, max_steps=4)
    assert made.optimizer.optimizer.steps_per_epoch is None


def test_a_rho_that_sets_itself_learns_of_every_loss(tmp_path):
    """Also while ρ is 0 and there is no second pass."""
    model, twin = bert().double(), bert().double().train()
    own = {"weight_decay": 0.0, "num_train_epochs": 12, "per_device_train_batch_size": 4}
    _, made = trained(tmp_path, Watched, model=model, words={"tracer": {"rho": "auto"}}, **own)
    opt = AdamWTracer(twin.parameters(), lr=1e-2, weight_decay=0.0, steps_per_epoch=EXAMPLES // 4)
    for batch in made.seen:
        opt.step(lambda batch=batch: twin(**batch).loss)
    states = made.optimizer.optimizer.state, opt.state
    found, expected = ([x["rho_evidence"] for x in state.values() if "rho_evidence" in x] for state in states)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    assert expected[0][11] > 1  # epochs in a row


@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_trainer_makes_the_steps_of_a_closure(tmp_path, accumulation):
    """To rounding, those of one big batch with accumulation; in float64, since Adam blows small gradients' up."""
    model = bert().double()
    found, made = trained(tmp_path, Watched, model=model, gradient_accumulation_steps=accumulation)
    expected, stats = by_hand(made.seen, accumulation, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    assert made.state.global_step == 6 // accumulation
    torch.testing.assert_close(logged(made, "loss", "trace_ratio", "penalty_ratio"), stats, rtol=1e-4, atol=0)
    own = made.optimizer.optimizer.stats.loss  # which a ρ that sets itself learns of
    assert own == pytest.approx(logged(made, "loss")[-1][0].item(), rel=1e-4)


def checkpoint(kind):
    """A model as transformers loads one today."""
    if kind == "bert":
        return bert().bfloat16()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.LlamaConfig(vocab_size=40, max_position_embeddings=LENGTH, pad_token_id=0, **sizes)
    config.num_labels = 2
    return transformers.LlamaForSequenceClassification(config).bfloat16()


@pytest.mark.parametrize("kind", ["bert", "llama"])
@pytest.mark.parametrize("own", [{"max_grad_norm": 0.5}, {"gradient_accumulation_steps": 3}], ids=["clip", "parts"])
def test_a_checkpoint_in_bfloat16(tmp_path, kind, own):
    """As far from the same numbers in float32 as bfloat16 computes; by SGD, since Adam blows small gradients' up."""
    own = own | {"weight_decay": 0.0, "optim": "sgd", "learning_rate": 0.1}
    tracer = TRACER | {"rho": 1e-3}
    _, made = trained(tmp_path, Watched, model=checkpoint(kind), words={"tracer": tracer}, **own)
    opt = made.optimizer.optimizer
    found = torch.cat([joined(p, opt.state[p][REST]).flatten() for p in made.model.parameters() if p in opt.state])
    assert {p.dtype for p in made.model.parameters()} == {torch.bfloat16}
    model, start, size = (
        checkpoint(kind).float().train(),
        checkpoint(kind).float(),
        own.get("gradient_accumulation_steps", 1),
    )
    hand = Tracer(torch.optim.SGD(model.parameters(), lr=0.1), clip=Clip(norm=0.5) if size == 1 else None, **tracer)
    for i in range(0, len(made.seen), size):
        hand.step(lambda part: model(**part).loss, batches=[(part,) for part in made.seen[i : i + size]])
    reached = [(p, q) for p, q in zip(model.parameters(), start.parameters(), strict=True) if p in hand.state]
    expected, before = (torch.cat([pair[i].detach().flatten() for pair in reached]) for i in (0, 1))
    assert (found - expected).norm() < 0.1 * (expected - before).norm()
    assert opt.stats.penalty_ratio == pytest.approx(hand.stats.penalty_ratio, rel=0.3)


def test_a_checkpoint_in_bfloat16_is_resumed_to_the_same_bits(tmp_path):
    own = {"save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.5}
    found, made = trained(tmp_path, model=checkpoint("llama"), **own)
    resumed, again = trained(tmp_path / "2", model=checkpoint("llama"), resume=str(tmp_path / "checkpoint-2"), **own)
    assert torch.equal(resumed, found)
    ours, others = ([own[REST] for own in one.optimizer.state.values()] for one in (made, again))
    assert all(map(torch.equal, ours, others))
    assert made.optimizer.optimizer.stats.penalty_ratio > 0.01


def test_the_numbers_in_the_log_are_those_of_the_definition(tmp_path):
    """T = Σ g²/(f + δ) with f = f₀ at first, and ρ∇T as a difference of gradients."""
    model, radius, scale = bert().double(), 0.05, 0.01 / (0.1 + 0.05)
    opt = SGDTracer(model.parameters(), lr=0.1, rho=0.01, delta=0.05, f0=0.1, engine=FiniteDifference(radius))
    _, made = trained(tmp_path, Watched, model=model, words={"optimizers": (opt, None)}, max_steps=1)
    twin = bert().double().train()
    params = list(twin.parameters())

    def gradient():
        return parameters_to_vector(torch.autograd.grad(twin(**made.seen[0]).loss, params, materialize_grads=True))

    g, start = gradient(), parameters_to_vector(params).detach()
    nn.utils.vector_to_parameters(start + radius * g / g.norm(), params)
    penalty = (gradient() - g) * 2 * scale * g.norm() / radius
    expected = torch.stack([g.square().sum() / (0.1 + 0.05), penalty.norm() / g.norm()])
    torch.testing.assert_close(logged(made, "trace_ratio", "penalty_ratio")[0], expected, rtol=1e-6, atol=0)


class Normed(nn.Module):
    """With batch norm after a layer, so that displaced weights change what it sees."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(LENGTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    def forward(self, input_ids, labels):
        return {"loss": nn.functional.cross_entropy(self.layers(input_ids / 40), labels)}


@pytest.mark.parametrize("accumulation", [1, 3])
def test_batch_norm_sees_one_pass(tmp_path, accumulation):
    """Its statistics are the plain Trainer's; without learning rate, so that the weights are, too."""
    ours, theirs = Normed(), Normed()
    own = {"learning_rate": 0.0, "gradient_accumulation_steps": accumulation}
    _, made = trained(
        tmp_path, model=ours, words={"tracer": TRACER | {"engine": FiniteDifference(1.0), "model": ours}}, **own
    )
    trained(tmp_path, Trainer, model=theirs, words={}, **own)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()), rtol=0, atol=0)
    assert theirs.layers[1].num_batches_tracked == 6
    assert made.optimizer.optimizer.stats.penalty_ratio > 0


def process(rank):
    """What torchrun tells each of two processes."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    return mock.patch.dict(os.environ, {name: str(value) for name, value in told.items()})


def weights_and_log(folder, size, accumulation=1):
    own = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation, "max_grad_norm": 1.0}
    found, made = trained(folder, model=bert().double(), **own)
    return found, logged(made, "loss", "grad_norm", "trace_ratio", "penalty_ratio"), made.args.world_size


def one_of_two(rank, folder, *words):
    with process(rank):
        return weights_and_log(f"{folder}/{rank}", *words)


@pytest.mark.parametrize(("size", "accumulation"), [(4, 1), (2, 2)])
def test_two_processes_are_one(tmp_path, size, accumulation):
    """With the Trainer's defaults: weights, loss, norm, T and the penalty's share."""
    expected = weights_and_log(tmp_path, 8)
    for weights, log, world in together(one_of_two, str(tmp_path), size, accumulation):
        assert world == 2
        torch.testing.assert_close(weights, expected[0], rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(log, expected[1], rtol=1e-4, atol=0)


def texts():
    """Of different lengths."""
    return [row | {"labels": row["input_ids"].masked_fill(torch.arange(LENGTH) > 1 + i % 5, -100)}
            for i, row in enumerate(data())]  # fmt: skip


def llama():
    torch.manual_seed(0)
    size = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, **size)).double()


class ByTokens(Watched):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = True


@pytest.mark.parametrize("kind", [Watched, ByTokens])
def test_micro_batches_count_the_same_or_tokens_do(tmp_path, kind):
    """By default micro-batches; with one line more, and a model that divides by `num_items_in_batch`, tokens."""
    model, twin = llama(), llama().train()
    ours, opt = (SGDTracer(m.parameters(), lr=0.1, **TRACER) for m in (model, twin))
    words = {"optimizers": (ours, None), "train_dataset": texts()}
    found, made = trained(tmp_path, kind, model, words, gradient_accumulation_steps=3, per_device_train_batch_size=2)
    for i in range(0, len(made.seen), 3):
        parts = made.seen[i : i + 3]
        tokens = [(part["labels"][:, 1:] != -100).sum() if kind is ByTokens else 1 for part in parts]
        shares = [n / sum(tokens) for n in tokens]
        opt.step(lambda: sum(n * twin(**part).loss for n, part in zip(shares, parts, strict=True)))  # noqa: B023
    torch.testing.assert_close(found, parameters_to_vector(twin.parameters()).detach(), rtol=1e-4, atol=1e-6)


def test_bf16(tmp_path):
    found, made = trained(tmp_path, Watched, bf16=True)
    start, (exact, _) = parameters_to_vector(bert().parameters()), by_hand(made.seen, 1)
    expected, _ = by_hand(made.seen, 1, bf16=True)
    assert (found - expected).norm() < 1e-3 * (found - start).norm()
    assert not torch.allclose(expected, exact, atol=1e-7)


def test_central_differences_and_intervals(tmp_path):
    for own in ({"engine": FiniteDifference(central=True)}, {"interval": 2}):
        found, made = trained(tmp_path, Watched, words={"tracer": TRACER | own})
        expected, _ = by_hand(made.seen, 1, **own)
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


OPTIMS = {
    "sgd": ("momentum=0.9,nesterov=true", lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True)),
    "rmsprop": ("alpha=0.8", lambda p: torch.optim.RMSprop(p, lr=1e-2, alpha=0.8)),
    "adagrad": (None, lambda p: torch.optim.Adagrad(p, lr=1e-2)),
    "adafactor": (None, lambda p: Adafactor(p, lr=1e-2, scale_parameter=False, relative_step=False)),
}


@pytest.mark.parametrize("name", OPTIMS)
def test_the_optimiser_that_the_arguments_name(tmp_path, name):
    """Wrapped, with its own arguments: the plain loop's steps."""
    given, base = OPTIMS[name]
    own = {"tracer": TRACER | {"beta": 0.2}}
    found, made = trained(tmp_path, Watched, bert().double(), own, optim=name, optim_args=given)
    model = bert().double().train()
    opt = Tracer(base(groups(model)), **own["tracer"])
    for batch in made.seen:
        opt.step(lambda batch=batch: model(**batch).loss)
    torch.testing.assert_close(found, parameters_to_vector(model.parameters()).detach(), rtol=1e-6, atol=1e-8)
    assert made.optimizer.optimizer.stats.penalty_ratio > 0


@pytest.mark.parametrize("name", ["lomo", "schedule_free_adamw", "galore_adamw_layerwise"])
def test_an_optimiser_without_a_second_pass_is_refused_by_name(tmp_path, name):
    with pytest.raises(ValueError, match=f"optim = '{name}'"):
        trained(tmp_path, optim=name)


def test_a_search_trains_every_trial_with_its_own_numbers(tmp_path):
    """Learning rate, number of micro-batches and ρ of each are those of a training of its own."""
    asked = [(1e-2, 1e-2, 1), (2e-2, 0.0, 2), (5e-3, 2e-2, 1)]
    seen = []

    class Noting(TracerTrainer):
        def evaluate(self, *args, **kwargs):
            seen.append(parameters_to_vector(self.model.parameters()).detach().clone())
            return {"eval_loss": float(len(seen))}

    def space(trial):
        rate, rho, parts = asked[trial.number]
        return {"learning_rate": rate, "tracer_rho": rho, "gradient_accumulation_steps": parts}

    words = {"model_init": lambda: bert(), "model": None, "tracer": TRACER, "eval_dataset": data()}
    args = arguments(tmp_path, eval_strategy="epoch", num_train_epochs=1)
    Noting(args=args, train_dataset=data(), **words).hyperparameter_search(
        hp_space=space, n_trials=len(asked), backend="optuna", compute_objective=lambda metrics: metrics["eval_loss"]
    )
    for i, (rate, rho, parts) in enumerate(asked):
        own = {"learning_rate": rate, "gradient_accumulation_steps": parts, "num_train_epochs": 1}
        alone = words | {"tracer": TRACER | {"rho": rho}}
        _, made = trained(tmp_path / str(i), words=alone, **own)
        torch.testing.assert_close(seen[i], parameters_to_vector(made.model.parameters()).detach())
    assert len(seen) == len(asked)


def test_resuming_with_another_rho_says_which_counts(tmp_path):
    own = {"save_strategy": "steps", "save_steps": 3}
    trained(tmp_path, words={"tracer": TRACER}, **own)
    with pytest.warns(UserWarning, match=r"checkpoint's rho = 0\.01.* asked was 0\.02"):
        _, made = trained(
            tmp_path, words={"tracer": TRACER | {"rho": 0.02}}, resume=str(tmp_path / "checkpoint-3"), **own
        )
    assert {group["rho"] for group in made.optimizer.optimizer.param_groups} == {0.01}


def test_other_optimisers_are_refused(tmp_path):
    model = bert()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="got SGD"):
        trained(tmp_path, model=model, words={"optimizers": (opt, None)})
    with pytest.raises(ValueError, match="tracer"):
        trained(tmp_path, model=model, words={"optimizers": (opt, None), "tracer": TRACER})


@pytest.mark.parametrize(("size", "accumulation"), [(8, 1), (4, 2)])
def test_resuming_from_a_checkpoint(tmp_path, size, accumulation):
    """Gives the weights of the run that was never stopped: f and the optimiser's moments are in it."""
    own = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation, "num_train_epochs": 3}
    own |= {"save_strategy": "steps", "save_steps": 4}  # in mid-epoch
    whole, _ = trained(tmp_path, model=bert(0.1), **own)
    found, made = trained(tmp_path, Watched, model=bert(0.1), resume=str(tmp_path / "checkpoint-4"), **own)
    assert len(made.seen) == 5 * accumulation
    torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-8)


def test_the_mixin_on_a_trainer_of_ones_own(tmp_path):
    class Doubled(Trainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return (2 * loss[0], *loss[1:]) if isinstance(loss, tuple) else 2 * loss

    class Mine(TracerMixin, Doubled):
        pass

    found, _ = trained(tmp_path, Mine)
    assert not torch.allclose(found, trained(tmp_path)[0])


class Penalised(Watching, PenaltyTrainer):
    pass


SGD = {"tracer": TRACER, "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})}
STRONG = {"tracer": {"rho": 0.5, "delta": 1e-3}}


def eager():
    """Its attention has second derivatives."""
    model = bert()
    model.set_attn_implementation("eager")
    return model


def test_the_penalty_in_the_loss_is_the_exact_engine(tmp_path):
    model = eager()
    twin = copy.deepcopy(model).train()
    found, made = trained(tmp_path, Penalised, model=model, words=SGD, weight_decay=0.0)
    opt, ratios = SGDTracer(twin.parameters(), lr=0.1, engine="exact", **TRACER), []
    for batch in made.seen:
        opt.step(lambda batch=batch: twin(**batch).loss)
        ratios.append([opt.stats.trace_ratio])
    torch.testing.assert_close(found, parameters_to_vector(twin.parameters()), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        logged(made, "trace_ratio"), torch.tensor(ratios, dtype=torch.float64), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("bf16", [False, True])
def test_the_penalty_of_each_micro_batch(tmp_path, bf16):
    """Their mean, with an f that follows each of them."""
    own = {"gradient_accumulation_steps": 3, "bf16": bf16, "weight_decay": 0.0}
    found, made = trained(tmp_path, Penalised, model=eager(), words=SGD, **own)
    start = parameters_to_vector(eager().parameters()).detach()
    expected = {}
    for half in (False, True):
        twin = eager().train()
        opt, penalty = torch.optim.SGD(twin.parameters(), lr=0.1), TracerPenalty(twin.parameters(), **TRACER)
        for i, batch in enumerate(made.seen):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = twin(**batch).loss
            (penalty(loss.float()) / 3).backward()
            if i % 3 == 2:
                opt.step()
                opt.zero_grad()
        expected[half] = parameters_to_vector(twin.parameters()).detach()
        if half == bf16:
            assert logged(made, "trace_ratio")[-1].item() == pytest.approx(penalty.trace_ratio.item(), rel=1e-3)
    moved = (found - start).norm()
    assert (found - expected[bf16]).norm() < 1e-4 * moved
    assert (found - expected[not bf16]).norm() > 1e-3 * moved


def stopped_and_not(folder, **own):
    """Weights and f of a run, and of its second half begun from a checkpoint."""
    own |= {"save_strategy": "steps", "save_steps": 4, "num_train_epochs": 3}
    for resume in (None, f"{folder}/checkpoint-4"):
        found, made = trained(folder, PenaltyTrainer, model=eager(), words=STRONG, resume=resume, **own)
        yield found, made.penalty.state_dict()["f"]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_penaltys_average_is_in_the_checkpoint(tmp_path, accumulation):
    own = {"per_device_train_batch_size": 8 // accumulation, "gradient_accumulation_steps": accumulation}
    whole, resumed = stopped_and_not(tmp_path, **own)
    torch.testing.assert_close(resumed, whole, rtol=1e-6, atol=1e-8)


def stopped_and_not_as_one_of_two(rank, folder):
    with process(rank):
        return list(stopped_and_not(folder, per_device_train_batch_size=4))


def test_the_average_of_each_process_is_in_the_checkpoint(tmp_path):
    """It is their own; the weights are not."""
    first, second = together(stopped_and_not_as_one_of_two, str(tmp_path))
    for whole, resumed in (first, second):
        torch.testing.assert_close(resumed, whole, rtol=1e-6, atol=1e-8)
    (weights, f), (others_weights, others_f) = first[0], second[0]
    assert torch.equal(weights, others_weights)
    assert not torch.allclose(f[0][0], others_f[0][0])


def test_evaluation_is_without_penalty(tmp_path):
    """Before training and after it."""
    made = PenaltyTrainer(model=eager(), args=arguments(tmp_path), eval_dataset=data(), train_dataset=data(), **STRONG)
    plain = Trainer(model=made.model, args=arguments(tmp_path), eval_dataset=data())
    assert made.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]
    made.train()
    assert made.evaluate()["eval_loss"] == plain.evaluate()["eval_loss"]


def test_the_example_with_the_penalty_in_the_loss(tmp_path):
    example = runpy.run_path(str(ROOT / "examples" / "huggingface_trainer.py"))
    assert logged(example["main"](str(tmp_path), epochs=1, kind=PenaltyTrainer), "trace_ratio").min() > 0


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
@pytest.mark.parametrize("kind", [TracerTrainer, PenaltyTrainer])
def test_a_model_card_names_the_optimiser_and_rho(tmp_path, kind, optim):
    _, made = trained(tmp_path, kind, model=eager(), num_train_epochs=1, optim=optim)
    for _ in range(2):
        made.create_model_card(model_name="mine")
    lines = (tmp_path / "README.md").read_text().splitlines()
    (found,) = (i for i, line in enumerate(lines) if line.startswith("- optimizer:"))
    assert "rho=0.01" in lines[found]
    assert {"adamw_torch": "AdamW", "sgd": "SGD"}[optim] in lines[found]
    assert lines[found + 1].startswith("- lr_scheduler_type")
