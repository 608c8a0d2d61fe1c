"""Images as people have them: formats, depths, folders."""

import numpy
import pytest
import torch
from PIL import Image

from gtracer import cli
from gtracer.lab import data
from gtracer.lab.config import Config
from gtracer.lab.data.pictures import Pictures, opened, pictures_in
from gtracer.lab.errors import Interrupted, LabError
from gtracer.lab.training.trainer import train
from support.runs import StopAfter

RAMP = numpy.linspace(0, 1, 256).reshape(16, 16)


def noise(path, count=1, mode="RGB"):
    path.mkdir(parents=True, exist_ok=True)
    draws = numpy.random.default_rng(0)
    for i in range(count):
        image = Image.fromarray(draws.integers(0, 255, (12, 16, 3), dtype=numpy.uint8)).convert(mode)
        image.save(path / f"{i}.{'jpg' if mode == 'CMYK' else 'png'}")


@pytest.mark.parametrize(
    ("name", "pixels"),
    [
        ("a.png", (RAMP * 65535).round().astype(numpy.uint16)),  # I;16
        ("a.tif", (RAMP * 65535).round().astype(numpy.int32)),  # I
        ("b.tif", RAMP.astype(numpy.float32)),  # F
        ("c.tif", (RAMP * 255).astype(numpy.float32)),
        ("d.png", (RAMP * 255).round().astype(numpy.uint8)),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_deep_pixels_are_on_the_scale_of_the_others(tmp_path, name, pixels, channels):
    """Pillow cuts them off at 255: an image of 16 bits would be white."""
    Image.fromarray(pixels).save(tmp_path / name)
    found = opened(tmp_path / name, (16, 16), channels)
    expected = torch.tensor((RAMP * 255).round()).expand(channels, 16, 16)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1.0)


@pytest.mark.parametrize("mode", ["P", "RGBA", "LA", "CMYK", "1", "L"])
def test_every_mode_is_read(tmp_path, mode):
    noise(tmp_path, 1, mode)
    (path,) = tmp_path.iterdir()
    assert opened(path, (5, 7), 3).shape == (3, 5, 7)


def test_imagenet_s_numbers_are_those_of_everybody(tmp_path):
    """Where pixels go from 0 to 1: as torchvision and transformers have them."""
    pixels = numpy.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=numpy.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = ((torch.from_numpy(pixels) / 255 - mean) / deviation).permute(2, 0, 1)
    torch.testing.assert_close(Pictures.of_imagenet()(tmp_path / "a.png"), expected, rtol=1e-5, atol=1e-5)


def test_a_large_jpeg_is_decoded_at_no_more_than_it_takes(tmp_path):
    """And gives what the whole of it does, nearly."""
    smooth = Image.fromarray((RAMP * 255).astype(numpy.uint8)).resize((1600, 1200), Image.Resampling.BICUBIC)
    smooth.save(tmp_path / "a.jpg", quality=95)
    smooth.save(tmp_path / "a.png")
    found, whole = (opened(tmp_path / name, (32, 32), 1).double() for name in ("a.jpg", "a.png"))
    assert (found - whole).abs().max() <= 3


@pytest.mark.parametrize("size", [(1, 1), (1, 900), (900, 2)])
def test_odd_shapes(tmp_path, size):
    Image.new("RGB", size, (9, 9, 9)).save(tmp_path / "a.png")
    assert opened(tmp_path / "a.png", (8, 8), 3).unique().tolist() == [9]


def test_what_is_no_picture_is_left_alone(tmp_path):
    noise(tmp_path / "deep" / "er", 1)
    noise(tmp_path / ".thumbnails", 1)
    (tmp_path / "UP.PNG").write_bytes((tmp_path / "deep" / "er" / "0.png").read_bytes())
    for name in (".hidden.png", "Thumbs.db", "notes.txt", "film.mpg", "paper.pdf", "drawing.svg"):
        (tmp_path / name).write_text("no image")
    (tmp_path / "folder.png").mkdir()
    assert [str(path.relative_to(tmp_path)) for path in pictures_in(tmp_path)] == ["UP.PNG", "deep/er/0.png"]


class TestFolders:
    def test_splits_in_capitals(self, tmp_path):
        for part in ("Train", "Test"):
            for name in ("cat café", "dog"):
                noise(tmp_path / part / name, 4)
        task = data.load(Config(task=str(tmp_path)))
        assert task.names == ("cat café", "dog")
        assert {name.split("/")[0] for name in task.test.ids} == {"Test"}

    def test_a_train_folder_alone_is_split(self, tmp_path):
        for name in ("cat", "dog"):
            noise(tmp_path / "train" / name, 5)
        task = data.load(Config(task=str(tmp_path)))
        assert task.names == ("cat", "dog")
        assert len(task.test.labels) == 2

    def test_what_is_missing_is_said(self, tmp_path):
        for place in ("train/cat", "train/dog", "test/cat"):
            noise(tmp_path / "split" / place, 4)
            noise(tmp_path / "whole" / place.replace("/", "-"), 4)
        (tmp_path / "whole" / "empty").mkdir()
        assert any("there are no test images of class 'dog'" in n for n in data.load(self.of(tmp_path / "split")).notes)
        assert any("no images in it: 'empty'" in n for n in data.load(self.of(tmp_path / "whole")).notes)

    def of(self, path):
        return Config(task=str(path))

    def test_images_without_folders(self, tmp_path):
        noise(tmp_path / "flat", 3)
        with pytest.raises(LabError, match="flat holds images, but in no folders"):
            data.load(self.of(tmp_path / "flat"))

    def test_sixteen_bits_are_grey(self, tmp_path):
        for name in ("cat", "dog"):
            (tmp_path / name).mkdir()
            for i in range(4):
                Image.fromarray((RAMP * 65535 / (i + 1)).astype(numpy.uint16)).save(tmp_path / name / f"{i}.png")
        assert data.load(self.of(tmp_path)).train.inputs.shape[1] == 1


def test_the_size_is_an_option_of_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("cat", "dog"):
        noise(tmp_path / "photos" / name, 6)
    words = ["--task", "photos", "--image-size", "7", "--model", "mlp", "--epochs", "1", "--out", "run"]
    assert cli.main(["train", *words]) == 0
    assert '"size": [' in (tmp_path / "run" / "model.json").read_text()
    assert Config.from_mapping({"image_size": 7}).image_size == 7


def test_predictions_leave_no_image_out(tmp_path):
    """Of a folder that has images beside folders of them."""
    noise(tmp_path / "new", 2)
    noise(tmp_path / "new" / "more", 3)
    found = Pictures((4, 4), (0.0,) * 3, (1.0,) * 3).read(tmp_path / "new")
    assert (len(found.ids), found.labels) == (5, None)


def test_data_that_has_changed_is_not_tested_on(tmp_path, monkeypatch, capsys):
    """Split anew, it would be tested on what was trained on; nor is a run gone on with."""
    monkeypatch.chdir(tmp_path)
    for name in ("cat", "dog"):
        noise(tmp_path / "photos" / name, 10)
    config = Config(task="photos", model="mlp", epochs=3, batch_size=8, holdout=0.2)
    train(config, tmp_path / "run", [], model=True)
    with pytest.raises(Interrupted):
        train(config, tmp_path / "cut", [StopAfter(3)], model=True)
    assert cli.main(["evaluate", "run"]) == 0
    (tmp_path / "photos" / "cat" / "more.png").write_bytes((tmp_path / "photos" / "cat" / "1.png").read_bytes())
    assert cli.main(["evaluate", "run", "photos"]) == 0
    for words in (
        ["evaluate", "run"],
        ["train", "--resume", "cut"],
        ["find-label-errors", "run"],
        ["sharpness", "run"],
        ["sharpness", "run", "--split", "test"],
    ):
        capsys.readouterr()
        assert cli.main(words) == 1
        error = capsys.readouterr().err
        assert "the data has changed since" in error
        assert error.count("\n") == 1


def test_a_folder_of_official_files_is_not_for_data_of_one_s_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("cat", "dog"):
        noise(tmp_path / "photos" / name, 10)
    train(Config(task="photos", model="mlp", epochs=1, batch_size=8), tmp_path / "run", [], model=True)
    for words in (
        ["evaluate", "run"],
        ["evaluate", "run", "photos"],
        ["find-label-errors", "run"],
        ["sharpness", "run"],
        ["train", "--task", "photos", "--model", "mlp"],
        ["train", "--resume", "run"],
    ):
        assert cli.main([*words, "--data", "elsewhere"]) == 1
        error = capsys.readouterr().err
        assert "elsewhere" in error
        assert "has no effect" in error
        assert error.count("\n") == 1
