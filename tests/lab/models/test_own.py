"""Models and weights of one's own, and how they are weighed in the loss."""

import sys
import types

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

import gtracer
from gtracer import cli
from gtracer.lab import data
from gtracer.lab.config import Config
from gtracer.lab.data.label_noise import mislabelled
from gtracer.lab.errors import LabError
from gtracer.lab.models import own
from gtracer.lab.models.built import Architecture
from gtracer.lab.results.record import Record
from gtracer.lab.training.run import Run
from gtracer.lab.training.trainer import train
from gtracer.penalty import RHO_FINE_TUNING

MODULE = """
from torch import nn

def net(shape, classes):
    return nn.Sequential(nn.Linear(shape[0], 12), nn.Tanh(), nn.Linear(12, classes))

def narrow(shape, classes):
    return nn.Linear(shape[0], 3)

def other(shape, classes):
    return nn.Linear(7, classes)

def no_model(shape, classes):
    return 5

def plain():
    return None
"""


def timm_of(create_model, **known):
    """What is asked of timm, without torchvision, which it needs."""
    return types.SimpleNamespace(
        create_model=create_model, get_pretrained_cfg=lambda name: types.SimpleNamespace(**known)
    )


SMALL = ["train", "--epochs", "1", "--out", "run"]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    (tmp_path / "mynet.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)


def test_a_function_s_model_is_trained_and_rebuilt():
    assert cli.main([*SMALL, "--model", "mynet:net"]) == 0
    model = gtracer.load("run").model
    assert [type(layer) for layer in model] == [nn.Linear, nn.Tanh, nn.Linear]
    assert model[2].weight.shape == (10, 12)
    assert cli.main(["evaluate", "run"]) == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mynet:narrow", "model 'mynet:narrow' gives outputs of shape (3,), not one for each of 10 classes"),
        ("mynet:other", "model 'mynet:other' does not take examples of shape (64,)"),
        ("mynet:no_model", "mynet:no_model must give a torch.nn.Module, got 5"),
        ("mynet:plain", "mynet:plain is called with shape, classes, which it does not take"),
        ("mynet:none", "mynet:none cannot be imported"),
    ],
)
def test_a_model_that_does_not_fit_is_one_line(name, message, capsys):
    assert cli.main([*SMALL, "--model", name]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


class TestTimm:
    def test_without_it_one_line_says_what_to_install(self, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "timm", None)
        assert cli.main([*SMALL, "--model", "timm/resnet18"]) == 1
        assert "pip install 'gtracer-optim[timm]'" in capsys.readouterr().err

    def test_what_it_is_asked_for(self, monkeypatch):
        asked = []

        def create_model(name, **options):
            asked.append((name, options))
            return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, options["num_classes"]))

        monkeypatch.setitem(sys.modules, "timm", timm_of(create_model, fixed_input_size=False))
        own.made(Architecture("image", "timm/resnet18", 5, (3, 8, 8)), pretrained=True)
        assert asked == [("resnet18", {"pretrained": True, "num_classes": 5, "in_chans": 3})]

    def test_one_of_a_fixed_size_is_made_for_the_images(self, monkeypatch):
        def create_model(name, *, img_size, num_classes, **options):
            return nn.Sequential(nn.Flatten(), nn.Linear(3 * img_size[0] * img_size[1], num_classes))

        monkeypatch.setitem(sys.modules, "timm", timm_of(create_model, fixed_input_size=True))
        own.made(Architecture("image", "timm/vit", 5, (3, 8, 8)))

    def test_images_are_as_it_was_trained(self, monkeypatch, tmp_path):
        """By its own mean, deviation and size, where its weights are taken."""
        timm = timm_of(None, mean=(0.5, 0.4, 0.3), std=(0.25, 0.5, 0.5), input_size=(3, 20, 20))
        monkeypatch.setitem(sys.modules, "timm", timm)
        for name, shade in (("a", 0), ("b", 255)):
            (tmp_path / "photos" / name).mkdir(parents=True)
            for i in range(4):
                Image.new("RGB", (9, 9), (shade,) * 3).save(tmp_path / "photos" / name / f"{i}.png")
        task = data.load(Config(task=str(tmp_path / "photos"), model="timm/vit", pretrained=True))
        assert task.train.inputs.shape[1:] == (3, 20, 20)
        white = task.train.inputs[task.train.labels == 1][0, :, 0, 0]
        torch.testing.assert_close(white, torch.tensor([0.5 / 0.25, 0.6 / 0.5, 0.7 / 0.5]))


class TestWeights:
    def test_begin_with_those_of_another_run(self, tmp_path, capsys):
        """And fine-tune: by fine-tuning's recipe, with its ρ."""
        train(Config(epochs=2, width=16), tmp_path / "first", [], model=True)
        words = ["--width", "16", "--weights", "first/model.safetensors", "--epochs", "1", "--out", "run"]
        assert cli.main(["train", *words]) == 0
        resolved = Record.read(tmp_path / "run").resolved
        assert (resolved["optimizer"], resolved["rho"], resolved["lr"]) == ("AdamTracer", RHO_FINE_TUNING, 2e-5)
        first = load_file(tmp_path / "first" / "model.safetensors")
        begun = Run(Config(width=16, weights="first/model.safetensors")).model.state_dict()
        assert all(torch.equal(begun[name], value) for name, value in first.items())

    def test_another_head_starts_anew(self, tmp_path):
        model, other = (nn.Sequential(nn.Linear(4, 3), nn.Linear(3, classes)) for classes in (2, 5))
        save_file(other.state_dict(), tmp_path / "other.safetensors")
        fresh = model[1].weight.clone()
        (note,) = own.take_weights(model, tmp_path / "other.safetensors")
        assert note.endswith("1.weight is of shape (5, 3), another task's head: that for this one starts anew")
        assert torch.equal(model[0].weight, other[0].weight)
        assert torch.equal(model[1].weight, fresh)
        torch.save({"state_dict": other.state_dict()}, tmp_path / "other.pt")
        assert own.take_weights(model, tmp_path / "other.pt")

    def test_those_of_a_deeper_model_are_refused(self, tmp_path):
        """Whose first layers have the names and shapes of this one's, as resnet34's have resnet18's."""
        small, large = (
            nn.ModuleDict({"body": nn.Sequential(*(nn.Linear(3, 3) for _ in range(depth))), "head": nn.Linear(3, 2)})
            for depth in (2, 3)
        )
        save_file(large.state_dict(), tmp_path / "large.safetensors")
        with pytest.raises(LabError, match=r"of another model: it has body\.2\.\w+, for which this one has no place"):
            own.take_weights(small, tmp_path / "large.safetensors")
        with pytest.raises(LabError, match=r"of another model: it has 2\.\w+, for"):
            own.take_weights(small["body"], self.saved(large["body"], tmp_path))

    def test_what_is_beside_the_model_is_left(self, tmp_path):
        """A second head, and buffers that an older version kept."""
        model, other = (nn.ModuleDict({"body": nn.Linear(3, 3), "head": nn.Linear(3, 2)}) for _ in range(2))
        more = {"second.weight": torch.ones(2, 3), "body.mask": torch.ones(3), "head.norm.weight": torch.ones(3)}
        save_file(other.state_dict() | more, tmp_path / "other.safetensors")
        assert own.take_weights(model, tmp_path / "other.safetensors") == []
        assert torch.equal(model["body"].weight, other["body"].weight)

    @pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."])
    def test_a_wrapper_s_name_is_taken_off(self, prefix, tmp_path):
        model, other = (nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)) for _ in range(2))
        torch.save({prefix + name: value for name, value in other.state_dict().items()}, tmp_path / "w.pt")
        assert own.take_weights(model, tmp_path / "w.pt") == []
        assert torch.equal(model[1].weight, other[1].weight)

    def saved(self, model, folder):
        save_file(model.state_dict(), folder / "model.safetensors")
        return folder / "model.safetensors"

    @pytest.mark.parametrize(
        ("made", "message"),
        [
            (lambda p: save_file({"0.weight": torch.ones(2)}, p), "is of another model: 1.weight of shape (16, 64)"),
            (lambda p: p.write_bytes(b"no"), "cannot read the weights"),
            (lambda p: None, "cannot read the weights"),
        ],
    )
    def test_one_clear_line(self, made, message, tmp_path, capsys):
        made(tmp_path / "w.safetensors")
        assert cli.main([*SMALL, "--width", "16", "--weights", "w.safetensors"]) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_class_weights_and_label_smoothing_are_torch_s():
    """The weighted mean over a batch, by hand: as many times as the class is rarer than the mean."""
    run = Run(Config(class_weights=True, label_smoothing=0.2, width=8, device="cpu"))
    counts = torch.bincount(run.labels, minlength=10)
    torch.testing.assert_close(run.class_weights, len(run.labels) / (10 * counts.float()))
    outputs, labels = torch.randn(50, 10), mislabelled(run.labels[:50], 0.5, 10, 0)
    log_p = outputs.log_softmax(1)
    weights = run.class_weights
    plain = -(log_p[torch.arange(50), labels] * weights[labels]).sum() / weights[labels].sum()
    spread = -(log_p * weights).sum() / 10 / weights[labels].sum()
    torch.testing.assert_close(run.loss(outputs, labels), 0.8 * plain + 0.2 * spread)
    assert run.class_weights[run.labels].mean().item() == pytest.approx(1.0)
