"""Attention by kernels of our own against torch's, run by Triton's interpreter where there is no GPU."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from gtracer.lab.config import Config
from gtracer.lab.errors import LabError
from gtracer.lab.models import encoders
from gtracer.lab.training.run import Run
from support.encoders import SIZES, tiny_bert

pytest.importorskip("triton")
from gtracer.lab.kernels.attention import attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOWEST = torch.finfo(torch.float32).min
DTYPES = [torch.float32] if DEVICE == "cpu" else [torch.float32, torch.bfloat16]  # the interpreter knows no bfloat16


def problem(length, features, *, biased, texts=3, heads=2):
    """Queries, keys and values, biases, and a mask that hides the ends of all texts but the first."""
    torch.manual_seed(length)
    qkv = torch.randn(texts, length, 3, heads, features, device=DEVICE)
    bias = torch.randn(1, heads, length, length, device=DEVICE).requires_grad_() if biased else None
    lengths = torch.tensor([length, length // 2 + 1, 1], device=DEVICE)
    mask = torch.zeros(texts, length, device=DEVICE)
    return qkv, mask.masked_fill_(torch.arange(length, device=DEVICE) >= lengths[:, None], LOWEST), bias


def torchs(qkv, mask, bias):
    """The same by torch, in float64."""
    scores = mask[:, None, None].double() + (0 if bias is None else bias.double())
    q, k, v = (t.double().transpose(1, 2) for t in qkv.unbind(2))
    return scaled_dot_product_attention(q, k, v, scores.expand(*q.shape[:3], -1)).transpose(1, 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("length", "features"), [(1, 8), (33, 32), (70, 24), (96, 64)])
def test_outputs_and_gradients_are_torchs(length, features, biased, dtype):
    """Whether blocks are full or not; what is hidden gets no weight and no gradient."""
    qkv, mask, bias = problem(length, features, biased=biased)
    qkv = qkv.to(dtype).requires_grad_()
    weights = torch.randn(*qkv.shape[:2], *qkv.shape[3:], device=DEVICE)
    inputs = [qkv] if bias is None else [qkv, bias]
    results = []
    for made in (attention(qkv, mask, bias), torchs(qkv, mask, bias)):
        results.append([made, *torch.autograd.grad((made.double() * weights).sum(), inputs)])
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for ours, theirs in zip(*results, strict=True):
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm() + 1e-6
    assert not results[0][1][mask < 0][:, 1:].any()


def test_there_is_no_second_derivative():
    qkv, mask, bias = problem(8, 8, biased=True)
    made = attention(qkv.requires_grad_(), mask, bias).square().sum()
    slopes = torch.autograd.grad(made, [qkv, bias], create_graph=True)
    with pytest.raises(RuntimeError, match="gtracer.attention_backward"):
        sum(slope.square().sum() for slope in slopes).backward()


@pytest.mark.parametrize("biased", [False, True])
def test_dropout(biased):
    """Values that are the identity show the weights that are left; gradients are those of the same weights."""
    length, rate = 64, 0.2
    qkv, mask, bias = problem(length, length, biased=biased)
    qkv[:, :, 2] = torch.eye(length, device=DEVICE)[None, :, None]
    torch.manual_seed(1)
    left = attention(qkv, mask, bias, rate)
    torch.manual_seed(1)
    qkv.requires_grad_()
    made = attention(qkv, mask, bias, rate)
    assert torch.equal(made, left)
    assert not torch.equal(attention(qkv, mask, bias, rate), left)

    weights = torchs(qkv, mask, bias).float()
    seen = weights > 1e-6  # of hidden keys nobody knows
    factor = torch.where(seen, left / weights, 0.0).detach()
    assert set(factor[seen].mul(1 - rate).round(decimals=3).unique().tolist()) == {0.0, 1.0}
    kept = (factor > 0).float()
    assert kept[seen].mean().item() == pytest.approx(1 - rate, abs=0.02)
    first = kept[0]  # the text with no hidden keys: queries, heads, keys
    for axis in range(3):  # neither whole rows nor whole columns, and no head as the other
        means = first.mean([a for a in range(3) if a != axis])
        assert (means - (1 - rate)).abs().max() < 0.15
    assert (first[:, 0] == first[:, 1]).float().mean().item() == pytest.approx(0.68, abs=0.05)

    # Σ over keys of factor · weight · value, for other values than the identity.
    slopes = torch.randn_like(made)
    inputs = [qkv] if bias is None else [qkv, bias]
    ours = torch.autograd.grad(made, inputs, slopes)
    q, k, v = (t.double().transpose(1, 2) for t in qkv.unbind(2))
    scores = q @ k.transpose(2, 3) / length**0.5 + mask[:, None, None] + (0 if bias is None else bias)
    expected = ((scores.softmax(3) * factor.transpose(1, 2)) @ v).transpose(1, 2)
    theirs = torch.autograd.grad(expected, inputs, slopes.double())
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm()


def encoder(kind, seed=0, dropout=0.0):
    """A small one of transformers', and a batch of three texts."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = transformers.AutoConfig.for_model(kind, vocab_size=10, **SIZES, **rates)
    model = transformers.AutoModelForSequenceClassification.from_config(config).to(DEVICE)
    ids, mask = torch.randint(2, 10, (3, 7)), (torch.arange(7) < torch.tensor([[7], [4], [1]])).long()
    batch = {"input_ids": ids.masked_fill(mask == 0, config.pad_token_id), "attention_mask": mask}
    return encoders.Classifier(model), {name: value.to(DEVICE) for name, value in batch.items()}


@pytest.mark.parametrize("kind", encoders.MASKED)
def test_encoders_are_those_of_transformers(kind):
    """With the projections made by one product; weights keep their names."""
    classifier, batch = encoder(kind)
    model = classifier.model

    def results():
        model.zero_grad()
        logits = classifier(batch)
        logits.square().sum().backward()
        return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    expected, names = results(), list(model.state_dict())
    classifier.fuse_attention()
    torch.testing.assert_close(results(), expected, rtol=1e-3, atol=1e-6)
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("kind", encoders.MASKED)
def test_encoders_drop_weights_in_training_alone(kind):
    classifier, batch = encoder(kind)
    for module in classifier.modules():
        if type(module).__name__ in encoders.PROJECTIONS:
            module.dropout.p = 0.5
    classifier.fuse_attention()
    assert torch.equal(classifier.eval()(batch), classifier(batch))
    assert not torch.equal(classifier.train()(batch), classifier(batch))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize("kind", encoders.MASKED)
def test_compiled_once_for_all_layers_and_models(kind):
    """And for all shapes, be there as many texts as tokens or not; one graph for training, one for evaluation."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for seed in range(2):
        classifier, batch = encoder(kind, seed, dropout=0.1)
        classifier.fuse_attention()
        parts = [{name: value[:, :width] for name, value in batch.items()} for width in (3, 5)]
        with torch.no_grad():
            expected = [classifier.eval()(part) for part in parts]
        classifier.compile_layers()
        for part, logits in zip(parts, expected, strict=True):
            with torch.no_grad():
                torch.testing.assert_close(classifier.eval()(part), logits, rtol=1e-3, atol=1e-5)
            classifier.train()(part).square().sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize(("kernels", "ours", "compiled"), [("torch", 0, 0), ("compiled", 0, 2), ("fused", 2, 2)])
def test_runs_have_the_kernels_that_were_asked_for(tmp_path, monkeypatch, kernels, ours, compiled):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "films.csv").write_text("text,label\n" + "good film,1\nbad film,0\n" * 5)
    run = Run(Config(task=str(tmp_path / "films.csv"), model=str(tiny_bert(tmp_path / "bert")), kernels=kernels))
    modules = list(run.model.modules())
    assert sum(type(m).__name__ == "BertSelfAttention" and "forward" in vars(m) for m in modules) == ours
    assert sum(type(m).__name__ == "BertLayer" and m._compiled_call_impl is not None for m in modules) == compiled


def test_other_encoders_are_refused():
    transformers = pytest.importorskip("transformers")
    config = transformers.DistilBertConfig(vocab_size=10, dim=16, n_layers=1, n_heads=2, hidden_dim=16)
    classifier = encoders.Classifier(transformers.DistilBertForSequenceClassification(config))
    with pytest.raises(LabError, match="bert, mpnet, roberta, not distilbert: use compiled"):
        classifier.fuse_attention()


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(LabError, match="NVIDIA GPU, got inputs on cpu"):
        attention(torch.zeros(1, 4, 3, 2, 8), torch.zeros(1, 4))
