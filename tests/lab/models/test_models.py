"""Networks: sizes known from their papers, shapes, augmentation, and a transformer made on the spot."""

import pytest
import torch
from torch import nn

from gtracer.lab import data, models
from gtracer.lab.config import Config
from gtracer.lab.data.batches import cropped_and_flipped
from gtracer.lab.data.task import Split, Task
from gtracer.lab.errors import LabError
from gtracer.lab.models import encoders, hub
from gtracer.lab.models.resnet import Block
from support.encoders import SIZES, tiny_bert


@pytest.mark.parametrize(
    ("name", "classes", "millions"),
    # He et al. 2016, Table 6 (10 classes); Zagoruyko and Komodakis 2016, Table 4.
    [
        ("resnet20", 10, 0.27),
        ("resnet32", 10, 0.46),
        ("resnet56", 10, 0.85),
        ("wrn-28-10", 10, 36.5),
        ("wrn-40-4", 10, 8.9),
    ],
)
def test_sizes_of_the_papers(name, classes, millions):
    with torch.device("meta"):
        model = models.network(name, (3, 32, 32), classes)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.02)


@pytest.mark.parametrize("name", ["mlp", "mlp-bn", "mlp-ln", "resnet20", "resnet20-gn", "wrn-10-1"])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28)])
def test_shapes(name, shape):
    model = models.network(name, shape, 7)
    out = model(torch.randn(4, *shape))
    assert out.shape == (4, 7)
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_shortcut_is_subsampled_and_padded():
    """With the branch switched off, a block that changes size is the subsampled input and zero channels."""
    block = Block(2, 4, stride=2).eval()
    nn.init.zeros_(block.norm2.weight)
    x = torch.rand(1, 2, 4, 4)
    expected = torch.cat([x[:, :, ::2, ::2], torch.zeros(1, 2, 2, 2)], 1)
    torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize(
    "name", ["resnet21", "resnet2", "resnet21-gn", "resnet20-bn", "wrn-28-0", "wrn-27-2", "wrn-28-2-gn", "mpl", ""]
)
def test_unknown_names(name):
    with pytest.raises(LabError, match="unknown model"):
        models.network(name, (3, 32, 32), 10)


@pytest.mark.parametrize(("name", "meant"), [("mlp-nl", "mlp-ln"), ("resnet-gn", "resnet20-gn")])
def test_near_names(name, meant):
    with pytest.raises(LabError, match=f"did you mean .*{meant}"):
        models.network(name, (3, 32, 32), 10)


def kinds(model):
    return [type(layer) for layer in model.modules()]


@pytest.mark.parametrize(
    ("name", "twin", "norm", "count"),
    [
        ("mlp-ln", "mlp-bn", nn.LayerNorm, 2),
        ("resnet20-gn", "resnet20", nn.GroupNorm, 19),
        ("resnet32-gn", "resnet32", nn.GroupNorm, 31),
    ],
)
def test_another_norm_in_place_of_batch_norm(name, twin, norm, count):
    """As many parameters and layers as the twin, with this norm where it has batch norm."""
    made, known = (models.network(n, (3, 32, 32), 10) for n in (name, twin))
    assert [p.shape for p in made.parameters()] == [p.shape for p in known.parameters()]
    replaced = {nn.BatchNorm1d: norm, nn.BatchNorm2d: norm}
    assert kinds(made) == [replaced.get(kind, kind) for kind in kinds(known)]
    assert kinds(made).count(norm) == count
    assert not list(made.buffers())


def test_groups():
    norms = [layer for layer in models.network("resnet20-gn", (3, 32, 32), 10).modules() if type(layer) is nn.GroupNorm]
    assert {(norm.num_groups, norm.num_channels) for norm in norms} == {(8, 16), (8, 32), (8, 64)}


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("mlp", True),
        ("mlp-ln", True),
        ("resnet20-gn", True),
        ("mlp-bn", False),
        ("resnet20", False),
        ("wrn-10-1", False),
    ],
)
def test_does_an_example_depend_on_its_batch(name, alone):
    """In training: the first example's outputs beside two different sets of others."""
    model = models.network(name, (3, 32, 32), 10).train()
    x = torch.randn(8, 3, 32, 32)
    other = torch.cat([x[:1], 3 * torch.randn(7, 3, 32, 32)])
    assert torch.allclose(model(x)[0], model(other)[0], rtol=1e-4, atol=1e-5) == alone


def test_depth_and_width():
    model = models.network("mlp", (8, 8), 10, width=32, depth=3)
    assert [tuple(p.shape) for p in model.parameters() if p.ndim == 2] == [(32, 64), (32, 32), (32, 32), (10, 32)]


@pytest.mark.parametrize(
    ("init", "variance"), [("own", lambda i, o: 2 / (9 * o)), ("torch", lambda i, o: 1 / (27 * i))]
)
def test_first_weights(init, variance):
    """He et al. scale by the outputs, torch's default by the inputs; the last layer is torch's in both."""
    images = Split(torch.zeros(2, 3, 32, 32), *[torch.zeros(2, dtype=torch.long)] * 2)
    torch.manual_seed(0)
    model = models.build(Config(model="resnet20", init=init), Task("image", 100, images, images)).model
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            expected = variance(layer.in_channels, layer.out_channels)
            assert layer.weight.var().item() == pytest.approx(expected, rel=0.25)
    assert model[-1].weight.abs().max() <= 1 / 8
    assert model[-1].weight.var().item() == pytest.approx(1 / (3 * 64), rel=0.1)


def test_a_text_model_brings_its_own_weights():
    texts = Split([("a",)], *[torch.zeros(1, dtype=torch.long)] * 2)
    with pytest.raises(LabError, match="init = 'torch'"):
        models.build(Config(init="torch"), Task("text", 2, texts, texts))


def test_images_only():
    with pytest.raises(LabError, match=r"wants images, .*\(64,\)"):
        models.network("resnet20", (64,), 10)


class TestAugmentation:
    def test_every_image_is_a_shifted_or_mirrored_copy(self):
        """Each result is found among the 9 × 9 × 2 that can be made by hand."""
        x = torch.rand(20, 2, 8, 8)
        padded = nn.functional.pad(x, (4,) * 4)
        seen = set()
        for i, made in enumerate(cropped_and_flipped(x)):
            crops = {(d, r): padded[i, :, d : d + 8, r : r + 8] for d in range(9) for r in range(9)}
            found = [(*at, False) for at, crop in crops.items() if torch.equal(made, crop)]
            found += [(*at, True) for at, crop in crops.items() if torch.equal(made, crop.flip(2))]
            assert found
            seen.add(found[0])
        assert len(seen) > 10
        assert {mirrored for *_, mirrored in seen} == {False, True}

    def test_seeded(self):
        x = torch.rand(4, 1, 8, 8)
        torch.manual_seed(1)
        first = cropped_and_flipped(x)
        torch.manual_seed(1)
        assert torch.equal(cropped_and_flipped(x), first)


class TestLanguage:
    def test_batches_are_padded_to_their_longest(self, tmp_path):
        built = encoders.build(str(tiny_bert(tmp_path)), 3, max_length=64)
        batch = built.batches(
            Split.clean([("good film",), ("very " * 40,), ("bad",)], torch.tensor([0, 1, 2])),
            torch.device("cpu"),
        )
        short, long = batch(torch.tensor([0, 2])), batch(torch.tensor([2, 1]))
        assert short["input_ids"].shape == (2, 16)
        assert long["input_ids"].shape == (2, 42)
        assert short["attention_mask"].sum(1).tolist() == [4, 3]
        assert long["attention_mask"].sum(1).tolist() == [3, 42]
        assert built.model(long).shape == (2, 3)

    def test_pairs_and_truncation(self, tmp_path):
        built = encoders.build(str(tiny_bert(tmp_path)), 2, max_length=6)
        batch = built.batches(
            Split.clean([("good good good good", "bad bad bad bad")], torch.tensor([0])), torch.device("cpu")
        )
        made = batch(torch.tensor([0]))
        assert made["input_ids"].shape == (1, 6)
        assert set(made["token_type_ids"].flatten().tolist()) == {0, 1}

    @pytest.mark.parametrize("kind", encoders.MASKED)
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    def test_masks_and_positions_are_those_of_transformers(self, kind, attention):
        """Handed over in the form that attention wants, they hide what transformers' own hide; gradients agree too."""
        transformers = pytest.importorskip("transformers")
        if attention == "sdpa" and kind == "mpnet":
            pytest.skip("MPNet has none")
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, vocab_size=10, **SIZES)
        make = transformers.AutoModelForSequenceClassification
        model = make.from_config(config, attn_implementation=attention).double().eval()
        ids = torch.randint(2, 10, (3, 7))
        mask = (torch.arange(7) < torch.tensor([[7], [4], [1]])).long()
        batch = {"input_ids": ids.masked_fill(mask == 0, config.pad_token_id), "attention_mask": mask}

        def results(called):
            model.zero_grad()
            logits = called()
            logits.square().sum().backward()
            return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

        expected = results(lambda: model(**batch).logits)
        unmasked = model(input_ids=batch["input_ids"], attention_mask=mask**0).logits
        torch.testing.assert_close(results(lambda: encoders.Classifier(model)(batch)), expected)
        assert not torch.allclose(unmasked, expected[0], rtol=1e-3)

    def test_without_a_name_and_a_network_one_line_says_what_to_give(self, tmp_path, monkeypatch):
        """Nobody asks the hub again and again."""
        monkeypatch.setattr(hub, "is_offline", lambda: True)
        (tmp_path / "films.csv").write_text("text,label\n" + "good film,1\nbad film,0\n" * 5)
        config = Config(task=str(tmp_path / "films.csv"), data=str(tmp_path))
        assert models.DEFAULTS["text"] == "bert-base-uncased"
        monkeypatch.setitem(models.DEFAULTS, "text", "nobody/has-this")
        with pytest.raises(LabError, match="'nobody/has-this' could not be loaded.*; offline, --model takes a folder"):
            models.build(config, data.load(config))

    def test_a_folder_without_a_model(self, tmp_path):
        pytest.importorskip("transformers")
        with pytest.raises(LabError, match="could not be loaded") as caught:
            encoders.build(str(tmp_path), 2, 64)
        assert "\n" not in str(caught.value)


def test_a_text_task_builds_its_model(tmp_path):
    (tmp_path / "films.csv").write_text("text,label\n" + "good film,1\nbad film,0\n" * 5)
    config = Config(task=str(tmp_path / "films.csv"), model=str(tiny_bert(tmp_path / "bert")))
    built = models.build(config, data.load(config))
    assert built.model.model.config.num_labels == 2
