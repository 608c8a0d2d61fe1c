"""Tables as people have them: separators, dates, words among numbers, columns to leave out."""

import datetime
import decimal

import numpy
import pandas
import pytest
import torch

import gtracer
from gtracer import cli
from gtracer.lab import data, models
from gtracer.lab.config import Config
from gtracer.lab.data import rows
from gtracer.lab.errors import LabError

COUNT = 60
DRAWS = numpy.random.default_rng(0)
FRAME = pandas.DataFrame(
    {
        "size": DRAWS.normal(size=COUNT).round(3),
        "town": DRAWS.choice(["Ulm", "Bonn"], COUNT),
        "label": ["yes", "no"] * (COUNT // 2),
    }
)


def loaded(path, frame, **options):
    kinds = {".csv": frame.to_csv, ".parquet": frame.to_parquet}
    kinds[path.suffix.lower()](path, index=False, **options)
    return data.load(Config(task=str(path)))


@pytest.mark.parametrize(
    "written", [{"sep": ";"}, {"sep": ";", "decimal": ","}, {"sep": "\t", "decimal": ","}, {"sep": "|"}]
)
def test_what_separates_is_found_out(tmp_path, written):
    plain = loaded(tmp_path / "a.csv", FRAME)
    other = loaded(tmp_path / "b.CSV", FRAME, **written)
    torch.testing.assert_close(other.train.inputs, plain.train.inputs)
    assert other.names == plain.names


def test_numbers_to_predict_with_a_decimal_comma(tmp_path):
    frame = FRAME.assign(label=FRAME["size"])
    task = loaded(tmp_path / "a.csv", frame, sep=";", decimal=",")
    found = task.target.restored(torch.cat([task.train.labels, task.test.labels])).sort().values
    torch.testing.assert_close(found, torch.tensor(sorted(frame["label"]), dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_dates_are_days(tmp_path, suffix):
    days = [datetime.datetime(2024, 1, 1) + datetime.timedelta(days=int(i)) for i in DRAWS.integers(0, 900, COUNT)]
    task = loaded(tmp_path / f"a.{suffix}", FRAME[["label"]].assign(day=days))
    assert "1 columns of numbers" in task.notes[0]
    order = [int(name.split()[-1]) - 1 for name in task.train.ids]
    wanted = torch.tensor([days[i].timestamp() for i in order])
    assert torch.corrcoef(torch.stack([task.train.inputs[:, 0], wanted]))[0, 1] > 0.9999


def test_what_a_parquet_file_may_hold(tmp_path):
    times = pandas.date_range("2020", periods=COUNT, freq="36h", tz="UTC")
    frame = FRAME.assign(
        label=pandas.Categorical(FRAME["label"]),
        town=pandas.Categorical(FRAME["town"]).set_categories(["Ulm"]),  # others are missing
        price=[decimal.Decimal("1.5") * (i % 7) for i in range(COUNT)],
        time=times,
        lasting=times - times[0],
        pairs=[[i, i] for i in range(COUNT)],
        nothing=None,
    )
    task = loaded(tmp_path / "a.parquet", frame)
    assert task.names == ("no", "yes")
    assert "4 columns of numbers and 1 of categories" in task.notes[0]
    assert any("column 'pairs' has lists or mappings and is left out" in note for note in task.notes)
    assert any("column 'nothing' has one value alone and is left out" in note for note in task.notes)


def test_what_only_counts_the_rows_is_left_out(tmp_path):
    order = DRAWS.permutation(COUNT)
    task = loaded(tmp_path / "a.csv", FRAME.assign(id=order + 1000, year=2000 + order % 20))
    assert any("column 'id' has the numbers of the rows and is left out" in note for note in task.notes)
    assert "2 columns of numbers" in task.notes[0]


def test_a_few_words_among_numbers_are_missing_ones(tmp_path, monkeypatch):
    """In training and in predictions; a column of words alone is refused there."""
    monkeypatch.chdir(tmp_path)
    some = FRAME["size"].astype(str).where(FRAME.index != 3, "?")
    task = loaded(tmp_path / "a.csv", FRAME.assign(size=some))
    assert any("column 'size' has numbers; 1 of its values count as missing: no numbers, such as '?'" in n
               for n in task.notes)  # fmt: skip
    assert cli.main(["train", "--task", "a.csv", "--epochs", "1", "--out", "run"]) == 0
    found = gtracer.load("run").read(tmp_path / "a.csv")
    empty = FRAME.assign(size=FRAME["size"].where(FRAME.index != 3))
    empty.to_csv("b.csv", index=False)
    assert torch.equal(found.inputs, gtracer.load("run").read(tmp_path / "b.csv").inputs)
    FRAME[:0].to_csv("none.csv", index=False)
    assert cli.main(["predict", "run", "none.csv"]) == 0


def test_labels_stand_as_they_are_written(tmp_path):
    assert loaded(tmp_path / "a.csv", FRAME.assign(label=["01", "1"] * 30)).names == ("01", "1")
    assert loaded(tmp_path / "b.csv", FRAME.assign(label=["1.0", "2.0"] * 30)).names == ("1", "2")
    assert loaded(tmp_path / "c.csv", FRAME.assign(label=[True, False] * 30)).names == ("False", "True")


def test_many_columns_are_one_note(tmp_path):
    wide = pandas.DataFrame(numpy.zeros((COUNT, 300)), columns=[f"w{i}" for i in range(300)])
    task = loaded(tmp_path / "a.csv", pandas.concat([FRAME, wide], axis=1))
    assert any("columns 'w0', 'w1', 'w2' and 297 others have one value alone and are" in note for note in task.notes)


def test_a_column_without_a_value_for_training(tmp_path):
    for name, part in {"train": FRAME.assign(more=numpy.nan), "test": FRAME.assign(more=1.5)}.items():
        part.to_csv(tmp_path / f"{name}.csv", index=False)
    assert data.load(Config(task=str(tmp_path))).train.inputs.isfinite().all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b,a,label\n1,2,3,x\n", "a.csv has 2 columns of the name 'a': rename them"),
        ("a,label\n1,x,5\n2,y,6\n", "its rows have more values than the 2 columns"),
        ("a,label\n1,x\n2,y,6\n", "a.csv is damaged: Error tokenizing data"),
        ("a,label\n1,x\n2,None\n", "1 rows have no label (nothing, NA, None and the like), such as row 2"),
        ("a,label\n1,x\n", "a.csv has one row: two at least are needed"),
        ("a,label\n1e300,x\n2,y\n1,x\n3,y\n", "column 'a' holds 1e+300, too large to compute with"),
    ],
)
def test_one_clear_line(tmp_path, text, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(LabError) as told:
        data.load(Config(task=str(tmp_path / "a.csv")))
    assert message in str(told.value)
    assert "\n" not in str(told.value)


def test_another_encoding_is_named(tmp_path):
    (tmp_path / "a.csv").write_bytes("a,label\nä,x\n".encode("latin-1"))
    with pytest.raises(LabError, match=r"a.csv is damaged or not UTF-8: .*: save it as UTF-8"):
        rows.read(tmp_path / "a.csv")


def test_a_text_of_any_length(tmp_path):
    (tmp_path / "a.csv").write_text(f'text;label\n"{"word " * 50_000}";x\n')
    (row,) = rows.read(tmp_path / "a.csv")
    assert len(row["text"]) == 250_000


def test_what_is_not_used_may_hold_anything(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    FRAME.assign(odd=numpy.inf).assign(odd=lambda f: f["odd"].where(f.index != 2, 1.0)).to_csv("a.csv", index=False)
    assert cli.main(["train", "--task", "a.csv", "--drop", "odd", "--epochs", "1", "--out", "run"]) == 0
    assert cli.main(["predict", "run", "a.csv"]) == 0
    with pytest.raises(LabError, match="a.csv: column 'odd' holds infinity"):
        data.load(Config(task="a.csv"))


def test_columns_that_are_like_texts_are_said(tmp_path):
    """Where a few of them come twice, they would be taken for categories without a word."""
    lines = [f"a title of number {n % 45},{('red', 'light blue')[n % 2]},{n % 2}" for n in range(50)]
    (tmp_path / "t.csv").write_text("\n".join(["title,colour,label", *lines]))
    task = data.load(Config(task=str(tmp_path / "t.csv")))
    (said,) = [note for note in task.notes if "--text-columns" in note]
    assert said.endswith("column 'title' has other words in most rows; texts are named with --text-columns")


def test_an_encoder_of_texts_is_not_for_a_table(tmp_path):
    (tmp_path / "t.csv").write_text("a,label\n" + "".join(f"{n / 3},{n % 2}\n" for n in range(40)))
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text("{}")
    config = Config(task=str(tmp_path / "t.csv"), model=str(tmp_path / "bert"))
    with pytest.raises(LabError, match="bert' is an encoder of texts.*named with --text-columns"):
        models.build(config, data.load(config))
