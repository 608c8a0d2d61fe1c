"""Texts from parquet files and from data sets that Hugging Face's `datasets` has saved."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from gtracer import cli
from gtracer.lab import data
from gtracer.lab.config import Config
from gtracer.lab.data import rows
from gtracer.lab.errors import LabError

ROWS = [{"text": f"film {i}", "label": i % 2, "stars": None if i == 3 else float(i)} for i in range(10)]


def saved(folder, found=ROWS, names=("bad", "good")):
    """In the layout of `Dataset.save_to_disk`, in two files."""
    folder.mkdir(parents=True)
    halves = {
        "data-00000-of-00002.arrow": found[: len(found) // 2],
        "data-00001-of-00002.arrow": found[len(found) // 2 :],
    }
    for name, part in halves.items():
        table = pyarrow.Table.from_pylist(part)
        with pyarrow.OSFile(str(folder / name), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in halves]}))
    value = {"dtype": "string", "_type": "Value"}
    features = {"text": value, "label": {"names": list(names), "_type": "ClassLabel"}, "stars": value}
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return folder


def test_a_saved_data_set_has_its_classes_names(tmp_path):
    assert rows.read(saved(tmp_path / "films")) == [row | {"label": ("bad", "good")[row["label"]]} for row in ROWS]
    task = data.load(Config(task=str(tmp_path / "films")))
    assert (task.kind, task.names) == ("text", ("bad", "good"))
    texts = {*task.train.inputs, *task.test.inputs}
    assert texts == {(f"film {i}",) for i in range(10)}


def test_several_splits_of_one(tmp_path):
    for name, part in {"train": ROWS[:6], "validation": ROWS[6:8], "test": ROWS[8:]}.items():
        saved(tmp_path / "films" / name, part)
    (tmp_path / "films" / "dataset_dict.json").write_text('{"splits": ["train", "validation", "test"]}')
    task = data.load(Config(task=str(tmp_path / "films")))
    assert [len(split.labels) for split in (task.train, task.holdout, task.test)] == [6, 2, 2]
    assert task.test.inputs == [("film 8",), ("film 9",)]


def test_parquet(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "films.parquet")
    assert rows.read(tmp_path / "films.parquet") == ROWS
    assert rows.columns(tmp_path / "films.parquet") == ["text", "label", "stars"]
    assert data.load(Config(task=str(tmp_path / "films.parquet"))).names == ("0", "1")


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize("name", ["films.parquet", "films"])
def test_a_damaged_file_is_one_line(tmp_path, name):
    if name == "films":
        cut(saved(tmp_path / "films") / "state.json")
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / name)
        cut(tmp_path / name)
    with pytest.raises(LabError, match=f"{name} is damaged") as told:
        rows.read(tmp_path / name)
    assert "\n" not in str(told.value)


def test_without_pyarrow_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "films.parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    assert cli.main(["train", "--task", str(tmp_path / "films.parquet")]) == 1
    assert "needs pyarrow: pip install 'gtracer-optim[tables]'" in capsys.readouterr().err
