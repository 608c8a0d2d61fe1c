"""Texts as numbers, and a tiny BERT that is trained on them."""

import copy
import json
from dataclasses import replace

import pytest
import torch

from gtracer import cli
from gtracer.lab.config import Config
from gtracer.lab.data import tokens
from gtracer.lab.data.task import Split
from gtracer.lab.errors import LabError
from gtracer.lab.models import encoders
from gtracer.lab.results.record import Record
from gtracer.lab.sweeps.launchers.cuda_graphs import CudaGraphs
from gtracer.lab.training.run import Run
from gtracer.lab.training.steps import Eager
from gtracer.lab.training.trainer import train
from support.encoders import tiny_bert, tiny_mpnet
from support.films import config, films

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _home(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.setattr(tokens, "_memory", {})


def made(lengths, limit=512):
    tokenizer = transformers.AutoTokenizer.from_pretrained(made.folder)
    return tokens.tokens(tokenizer, [("good " * n,) for n in lengths], limit)


@pytest.fixture
def _bert(tmp_path):
    made.folder = str(tiny_bert(tmp_path / "bert"))


@pytest.mark.usefixtures("_bert")
class TestTokens:
    def test_width_is_the_longest_up_to_a_step(self):
        some = made([3, 30, 31, 60])
        assert some.lengths.tolist() == [5, 32, 33, 62]
        assert [some.width(torch.tensor(rows)) for rows in ([0], [0, 1], [2, 0], [3])] == [16, 32, 48, 62]
        batch = some(torch.tensor([1, 0]))
        assert batch["input_ids"].shape == (2, 32)
        assert batch["attention_mask"].sum(1).tolist() == [32, 5]

    def test_groups_have_all_texts_once_and_little_padding(self):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(1, 400, (1003,), generator=generator).tolist()
        some, rows = made(lengths), torch.randperm(1003, generator=generator)
        grouped = some.grouped(rows, 16, torch.Generator().manual_seed(1))
        assert sorted(grouped.tolist()) == list(range(1003))
        assert torch.equal(grouped, some.grouped(rows, 16, torch.Generator().manual_seed(1)))
        assert not torch.equal(grouped, some.grouped(rows, 16, torch.Generator().manual_seed(2)))

        def padded(order):
            return sum(some.width(part) * len(part) for part in torch.split(order, 16))

        real = int(some.lengths.sum())
        assert padded(rows) > 1.7 * real
        assert padded(grouped) < 1.15 * real

    def test_made_once_and_kept(self, monkeypatch):
        first = made([3, 30])
        calls = []
        monkeypatch.setattr(tokens, "_made", lambda *args: calls.append(args))
        assert made([3, 30]) is first
        tokens._memory.clear()
        again = made([3, 30])
        assert not calls
        assert torch.equal(again.columns["input_ids"], first.columns["input_ids"])
        assert (again.lengths.tolist(), again.cut) == (first.lengths.tolist(), first.cut)

    def test_made_once_whatever_the_tokenizer_did_before(self):
        """A tokenizer that has cut and padded texts tells so of itself."""
        used = transformers.AutoTokenizer.from_pretrained(made.folder)
        used(["good good good"], truncation=True, max_length=3, padding=True)
        first = tokens.tokens(used, [("good " * 30,)], 16)
        assert made([30], 16) is first

    def test_another_limit_text_or_tokenizer_is_made_anew(self, tmp_path):
        assert made([3, 30], 16).columns["input_ids"].shape == (2, 16)
        assert made([3, 30], 20).columns["input_ids"].shape == (2, 20)
        assert made([3, 31], 16).lengths.tolist() == [5, 16]
        vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "bad", "good"]
        (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
        other = transformers.BertTokenizerFast(vocab=str(tmp_path / "vocab.txt"))
        assert 6 in tokens.tokens(other, [("good " * 3,), ("good " * 30,)], 16).columns["input_ids"]

    def test_a_damaged_cache_is_made_again(self):
        made([3])
        (kept,) = (tokens.Path.home() / ".cache" / "gtracer" / "tokens").iterdir()
        kept.write_bytes(kept.read_bytes()[:100])
        tokens._memory.clear()
        assert made([3]).lengths.tolist() == [5]

    def test_cut_texts_are_counted(self):
        assert made([3, 14, 15, 60], 16).cut == 2


def test_padding_does_not_change_the_loss(tmp_path):
    """The wider batch's further tokens are masked."""
    built = encoders.build(str(tiny_bert(tmp_path)), 2, 512)
    batch = built.batches(Split.clean([("good film",), ("bad " * 70,)], torch.tensor([0, 1])), CPU)
    rows, model = torch.tensor([0]), built.model.eval()
    torch.testing.assert_close(model(batch(rows, 32)), model(batch(rows, 72)), rtol=1e-5, atol=1e-6)


def test_what_was_cut_is_said(tmp_path, capsys):
    words = ["train", "--task", films(tmp_path), "--model", str(tiny_bert(tmp_path / "bert")), "--optimizer"]
    assert cli.main([*words, "adamw", "--epochs", "1", "--max-length", "20", "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert " of 44 texts are longer than 20 tokens and were cut" in said
    notes = json.loads((tmp_path / "run" / "record.json").read_text())["notes"]
    assert [note for note in notes if "44 texts" in note and note in said.replace("\n", " ")]
    assert Record.read(tmp_path / "run").notes == notes


def test_the_models_own_limit_counts(tmp_path):
    folder = tiny_bert(tmp_path / "bert")
    settings = json.loads((folder / "config.json").read_text())
    small = transformers.BertConfig(**settings | {"max_position_embeddings": 24})
    transformers.BertForSequenceClassification(small).save_pretrained(folder)
    run = Run(Config(task=films(tmp_path), model=str(folder), optimizer="adamw", batch_size=8))
    assert run.train_batch.columns["input_ids"].shape[1] == 24
    list(Eager(run).rest_of_epoch())


class TestModelFolders:
    def test_beside_the_data(self, tmp_path):
        """By the name it has on the hub, which is the same on every machine."""
        tiny_bert(tmp_path / "data" / "me" / "bert")
        task = films(tmp_path / "data")
        run = Run(Config(task=task, data=str(tmp_path / "data"), model="me/bert", optimizer="adamw"))
        assert run.model.model.config.hidden_size == 16

    def test_without_a_tokenizer(self, tmp_path):
        """transformers makes one that knows no word."""
        folder = tiny_bert(tmp_path)
        for path in folder.iterdir():
            if path.name not in ("config.json", "model.safetensors"):
                path.unlink()
        with pytest.raises(LabError, match="comes without a tokenizer"):
            encoders.build(str(folder), 2, 64)

    def test_a_tokenizer_of_another_model(self, tmp_path):
        folder = tiny_bert(tmp_path)
        (folder / "vocab.txt").write_text("\n".join([*(folder / "vocab.txt").read_text().split(), "awful", "fine"]))
        transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
        with pytest.raises(LabError, match="a tokenizer of 12 words for a model that knows 10"):
            encoders.build(str(folder), 2, 64)

    def test_a_head_of_another_size(self, tmp_path, capfd):
        built = encoders.build(str(tiny_bert(tmp_path)), 5, 64)
        (note,) = built.notes
        assert "another task's head (classifier.weight of 2 × 16): that for 5 classes starts anew" in note
        assert built.model.model.classifier.out_features == 5
        assert "LOAD REPORT" not in "".join(capfd.readouterr())

    def test_a_head_of_another_task(self, tmp_path):
        folder = tiny_bert(tmp_path)
        settings = transformers.AutoConfig.from_pretrained(folder)
        transformers.BertForQuestionAnswering(settings).save_pretrained(folder)
        (note,) = encoders.build(str(folder), 2, 64).notes
        assert "another task's head (qa_outputs.weight)" in note

    def test_an_encoder_without_weights(self, tmp_path):
        folder = tiny_bert(tmp_path)
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / "model.safetensors")
        kept = {key: value for key, value in weights.items() if "layer.1" not in key}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(LabError, match=r"lacks 16 weights of its encoder, such as bert\.encoder\.layer\.1\."):
            encoders.build(str(folder), 2, 64)

    def test_its_own_head_is_kept(self, tmp_path):
        built = encoders.build(str(tiny_bert(tmp_path)), 2, 64)
        assert not built.notes


def test_what_is_not_set_is_berts_recipe(tmp_path):
    """On texts alone; a file's values count as set, null among them."""

    def configured(*words):
        return cli._configuration(cli.parser().parse_args(["train", *words]))

    recipe = Config(lr=2e-5, schedule="linear", warmup=0.1, batch_size=32, epochs=5, clip=1.0, optimizer="adam-tracer")
    for task, held in (("rte", 0.0), ("films.csv", 0.1)):
        fine_tuned = replace(recipe, task=task, holdout=held)
        assert configured("--task", task, "--model", "x") == replace(fine_tuned, model="x")
        assert configured("--task", task, "--epochs", "2") == replace(fine_tuned, epochs=2)
    assert configured() == Config()
    (tmp_path / "own.yaml").write_text("task: wic\nclip: null\nlr: 1e-4\n")
    found = configured("--config", str(tmp_path / "own.yaml"), "--lr", "3e-4")
    assert found == replace(recipe, task="wic", clip=None, lr=3e-4)
    (tmp_path / "own.yaml").write_text("")
    assert configured("--config", str(tmp_path / "own.yaml")) == Config()


@pytest.mark.parametrize("content", ["text,label\n", "", "text,label\ngood,1\n"])
def test_an_empty_split(tmp_path, content, capsys):
    (tmp_path / "films.csv").write_text(content)
    words = ["train", "--task", str(tmp_path / "films.csv"), "--model", "x", "--out", str(tmp_path / "run")]
    assert cli.main(words) != 0
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize("empty", ["train", "test"])
def test_an_empty_file_of_a_pair(tmp_path, empty):
    for name in ("train", "test"):
        (tmp_path / f"{name}.csv").write_text("text,label\n" + ("" if name == empty else "good,1\nbad,0\n"))
    with pytest.raises(LabError, match=rf"{empty}\.csv is empty"):
        Run(Config(task=str(tmp_path), model="x"))


def test_side_by_side_with_dropout(tmp_path):
    """Each as alone and as a plain run: dropout's random numbers are its own."""
    configs = [config(tmp_path, seed=seed) for seed in range(2)]
    configs.append(replace(configs[0], optimizer="adamw-sam", rho=0.05))
    cells = [(c, tmp_path / "together" / str(i)) for i, c in enumerate(configs)]
    assert [event.failure for event in CudaGraphs(3)(cells) if event.ended] == [None] * 3
    for (c, folder), index in zip(cells, range(3), strict=True):
        plain = train(c, tmp_path / "plain" / str(index), [])
        found = Record.read(folder).curves
        assert found["train_loss"] == pytest.approx(plain.curves["train_loss"], rel=1e-5)
        assert found["test_accuracy"] == pytest.approx(plain.curves["test_accuracy"], abs=0.1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize("tiny", [tiny_bert, tiny_mpnet])
def test_compiled_layers_are_the_same_run(tmp_path, tiny):
    """To rounding; once for all layers and seeds, whatever a batch's shape, for training and for evaluation."""
    words = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # compiled, it draws other numbers
    folder = tiny(tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text()) | words
    (folder / "config.json").write_text(json.dumps(settings))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for seed in range(2):
        plain = replace(config(tmp_path, seed=seed), model=str(folder))
        expected = train(plain, tmp_path / f"plain-{seed}", []).curves
        found = train(replace(plain, kernels="compiled"), tmp_path / f"compiled-{seed}", []).curves
        for name in ("train_loss", "trace_ratio", "test_loss"):
            assert found[name] == pytest.approx(expected[name], rel=1e-3), name
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_cut_and_resumed_with_dropout(tmp_path):
    c = config(tmp_path)
    straight = train(c, tmp_path / "straight", [])
    events = CudaGraphs(1)([(c, tmp_path / "cut")])
    next(events)
    events.close()
    assert [e.failure for e in CudaGraphs(1)([(c, tmp_path / "cut")]) if e.ended] == [None]
    assert Record.read(tmp_path / "cut").curves["train_loss"] == pytest.approx(straight.curves["train_loss"], rel=1e-3)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_hugging_faces_trainer_makes_the_same_steps(tmp_path, clip):
    """The lab's loop and `TracerTrainer`, on the same batches: the same losses and weights, step for step."""
    pytest.importorskip("accelerate")
    from gtracer.integrations.transformers import TracerTrainer

    run = Run(replace(config(tmp_path), epochs=2, clip=clip))
    start, losses, batches = copy.deepcopy(run.model.model), [], []
    for layer in [*run.model.modules(), *start.modules()]:
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.0
    while run.epoch < 2:
        batches += [run.batch(rows) for rows in torch.split(run.order(), 8)]
        losses += list(Eager(run).rest_of_epoch())
        list(Eager(run).finish_epoch())

    class Trainer(TracerTrainer):
        def get_train_dataloader(self):
            return [inputs | {"labels": labels} for inputs, labels in batches]

    words = {"lr_scheduler_type": "linear", "learning_rate": 1e-3, "weight_decay": 0.0, "max_grad_norm": clip or 0.0}
    words |= {"num_train_epochs": 1, "logging_steps": 1, "report_to": [], "save_strategy": "no", "use_cpu": True}
    arguments = transformers.TrainingArguments(str(tmp_path / "trainer"), disable_tqdm=True, **words)
    trainer = Trainer(model=start, args=arguments, tracer={"rho": 0.003, "delta": 0.01})
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == len(losses) == 12
    assert logged == pytest.approx(losses, abs=1e-4)
    for ours, theirs in zip(run.model.model.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
