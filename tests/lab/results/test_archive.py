"""Packed records: the folder again to the byte, the same report, one line for what is damaged; without torch."""

import json
import lzma
import os
import random
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from gtracer import cli
from gtracer.lab.config import Config
from gtracer.lab.errors import LabError
from gtracer.lab.results import archive, report, statistics
from gtracer.lab.results.record import NAME, Record
from gtracer.lab.sweeps.study import Study
from gtracer.lab.sweeps.sweep import RunsFolder
from gtracer.lab.training.trainer import train
from support.records import ENVIRONMENT, damage, small, varied

SMALL = Config(task="digits", width=8, rho=0.003, delta=0.01, epochs=2, device="cpu", batch_size=512)
# Contents that are no record as gtracer writes it, each of which must come back as it was.
ODD = {
    "canonical": b'{\n "a": 1\n}\n',
    "indented by two": b'{\n  "a": 1\n}\n',
    "without a last newline": b'{\n "a": 1\n}',
    "two newlines": b'{\n "a": 1\n}\n\n',
    "carriage returns": b'{\r\n "a": 1\r\n}\r\n',
    "letters": '{\n "ρ": "é"\n}\n'.encode(),
    "escaped letters": b'{\n "\\u03c1": 1\n}\n',
    "both": '{\n "\\u03c1": "ρ"\n}\n'.encode(),
    "a byte order mark": b'\xef\xbb\xbf{\n "a": 1\n}\n',
    "utf-16": '{\n "a": 1\n}\n'.encode("utf-16"),
    "half a letter": b'{\n "a": "\\ud800"\n}\n',
    "half a letter, indented": b'{\n  "a": "\\ud800"\n}\n',
    "half a letter as bytes": b'{\n "a": "\xed\xa0\x80"\n}\n',
    "no text": bytes(range(256)),
    "nested": b"[" * 500 + b"]" * 500,
    "a name twice": b'{\n "a": 1,\n "a": 2\n}\n',
    "numbers": b'{\n "a": 1e5,\n "b": 1.0,\n "c": 0.1000,\n "d": -0.0,\n "e": 12345678901234567890123\n}\n',
    "not a number": b'{\n "a": NaN,\n "b": Infinity,\n "c": 1e999\n}\n',
    "cut": b'{"format": 1, "con',
    "empty": b"",
    "deep": b"[" * 100_000,
    "a word": b'"x"\n',
}


def tree(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def lines_of(path):
    return [json.loads(line) for line in lzma.decompress(path.read_bytes()).splitlines()]


def packed(folder, made=small):
    """A folder of made-up records, and an archive of it."""
    made(folder)
    archive.pack(folder, archive.archive_of(folder))
    return archive.archive_of(folder)


class TestRoundTrip:
    def test_the_folder_comes_back_to_the_byte(self, tmp_path):
        path = packed(tmp_path / "runs")
        assert (
            archive.unpack(path, tmp_path / "again") == 16
        )  # two settings, three methods, three seeds, less the three that were not run; the study
        assert tree(tmp_path / "again") == tree(tmp_path / "runs")

    def test_odd_files_come_back_to_the_byte(self, tmp_path):
        for name, content in ODD.items():
            (tmp_path / "runs" / name).mkdir(parents=True)
            (tmp_path / "runs" / name / NAME).write_bytes(content)
        archive.pack(tmp_path / "runs", tmp_path / "runs.jsonl.xz")
        archive.unpack(tmp_path / "runs.jsonl.xz", tmp_path / "again")
        assert tree(tmp_path / "again") == {f"{name}/{NAME}": content for name, content in ODD.items()}

    def test_a_line_is_the_record_as_json(self, tmp_path):
        """For other tools: one line for each file, and its numbers not in a string."""
        lines = lines_of(packed(tmp_path / "runs", varied))
        assert [line["path"] for line in lines] == list(tree(tmp_path / "runs"))
        for line in lines:
            assert line["json"] == json.loads((tmp_path / "runs" / line["path"]).read_bytes())
            assert set(line) == ({"path", "json", "ascii"} if line["path"] == "study.json" else {"path", "json"})

    def test_the_same_folder_gives_the_same_bytes(self, tmp_path):
        first = packed(tmp_path / "runs").read_bytes()
        for path in tree(tmp_path / "runs"):
            os.utime(tmp_path / "runs" / path, (0, 0))
        archive.pack(tmp_path / "runs", tmp_path / "other.jsonl.xz")
        assert (tmp_path / "other.jsonl.xz").read_bytes() == first

    def test_two_archives_one_after_the_other_are_one(self, tmp_path):
        """As `cat` makes it of two parts of a study."""
        (tmp_path / "runs").mkdir()
        one, two = packed(tmp_path / "runs" / "a"), packed(tmp_path / "runs" / "b")
        lines = [
            lzma.compress(lzma.decompress(p.read_bytes()).replace(b'"path":"', b'"path":"' + name))
            for p, name in ((one, b"a/"), (two, b"b/"))
        ]
        (tmp_path / "both.jsonl.xz").write_bytes(b"".join(lines))
        archive.unpack(tmp_path / "both.jsonl.xz", tmp_path / "again")
        one.unlink()
        two.unlink()
        assert tree(tmp_path / "again") == tree(tmp_path / "runs")

    def test_random_records(self, tmp_path):
        """As `Record` writes them, with numbers of all sizes."""
        choice = random.Random(0)
        for run in range(20):
            record = Record(replace(SMALL, seed=run), ENVIRONMENT)
            for _ in range(5):
                number = choice.uniform(-1, 1) * 10.0 ** choice.randint(-300, 300)
                record.add({"test_accuracy": number, "train_loss": choice.choice([float("nan"), 0.1, 1e16])}, number)
            record.write(tmp_path / "runs" / str(run))
        archive.pack(tmp_path / "runs", tmp_path / "runs.jsonl.xz")
        assert all("json" in line for line in lines_of(tmp_path / "runs.jsonl.xz"))
        archive.unpack(tmp_path / "runs.jsonl.xz", tmp_path / "again")
        assert tree(tmp_path / "again") == tree(tmp_path / "runs")


class TestReading:
    @pytest.mark.parametrize("made", [small, varied])
    def test_the_report_is_that_of_the_folder(self, tmp_path, made):
        """Page, figures and tables to the byte, but for the links to runs that lie in no folder."""
        path = packed(tmp_path / "runs", made)
        report.write(tmp_path / "runs", tmp_path / "of folder")
        report.write(path, tmp_path / "of archive")
        page = tmp_path / "of folder" / "index.html"
        text, links = re.subn(rb' <a href="\.\./runs/[^"]*">record</a>', b"", page.read_bytes())
        assert links == len(list((tmp_path / "runs").rglob("record.json")))
        page.write_bytes(text)
        assert tree(tmp_path / "of archive") == tree(tmp_path / "of folder")

    def test_without_a_study_too(self, tmp_path):
        small(tmp_path / "runs")
        (tmp_path / "runs" / "study.json").unlink()
        archive.pack(tmp_path / "runs", tmp_path / "runs.jsonl.xz")
        (ours, _), (theirs, _) = (statistics.read(tmp_path / name) for name in ("runs.jsonl.xz", "runs"))
        assert ours.study == theirs.study
        assert [(r.point, r.last()) for r in ours.all] == [(r.point, r.last()) for r in theirs.all]

    def test_records_that_are_damaged_in_it_are_told_one_by_one(self, tmp_path):
        """As those of a folder: the others are reported."""
        small(tmp_path / "runs")
        damage(tmp_path / "runs")
        archive.pack(tmp_path / "runs", tmp_path / "runs.jsonl.xz")
        found, problems = statistics.read(tmp_path / "runs.jsonl.xz")
        assert len(problems) == 2
        assert f"{tmp_path / 'runs.jsonl.xz' / 'half' / NAME} is damaged" in problems[0]
        assert "has format 99" in problems[1]
        assert found.given == len(list((tmp_path / "runs").rglob(NAME))) - 2

    def test_of_a_folder_with_archives(self, tmp_path):
        """All records below it, packed or not, in the order of their places."""
        packed(tmp_path / "all" / "b")
        small(tmp_path / "all" / "a")
        found = list(Record.read_all(tmp_path / "all"))
        runs = [p.parent.name for p in sorted((tmp_path / "all" / "a").rglob(NAME))]
        folders = [tmp_path / "all" / name / run for name in ("a", "b", "b.jsonl.xz") for run in runs]
        assert [place for place, _ in found] == folders
        assert {type(read) for _, read in found} == {Record}

    def test_a_folder_of_runs(self, tmp_path):
        """What `studies/chosen.py` reads; other sweeps' runs below the folder are not its own."""
        path = packed(tmp_path / "runs")
        of_folder, of_archive = RunsFolder.of(tmp_path / "runs").records, RunsFolder.of(path).records
        assert list(of_archive) == list(of_folder)
        assert [(r.curves, place.name) for r, place in of_archive.values()] == [
            (r.curves, place.name) for r, place in of_folder.values()
        ]
        assert RunsFolder.of(tmp_path).records == {}

    def test_the_study_that_is_not_one(self, tmp_path):
        small(tmp_path / "runs")
        for content, message in ((b'{"methods": 1}', "methods must be a mapping"), (b"{", "Expecting property name")):
            (tmp_path / "runs" / "study.json").write_bytes(content)
            (tmp_path / "runs.jsonl.xz").unlink(missing_ok=True)
            archive.pack(tmp_path / "runs", tmp_path / "runs.jsonl.xz")
            with pytest.raises(LabError, match=rf"runs\.jsonl\.xz/study\.json: {message}"):
                Study.beside(tmp_path / "runs.jsonl.xz")

    def test_torch_is_not_needed(self, tmp_path):
        """Nobody imports it to pack, report or unpack."""
        small(tmp_path / "runs")
        path = str(tmp_path / "runs.jsonl.xz")
        commands = [["records", "pack", str(tmp_path / "runs")], ["report", path, "-o", str(tmp_path / "report")]]
        commands += [["records", "unpack", path, "-o", str(tmp_path / "again")]]
        code = f"import sys; from gtracer import cli; codes = [cli.main(words) for words in {commands}]; "
        code += "sys.exit(any(codes) or 'torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_environment())
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "report" / "index.html").exists()
        assert tree(tmp_path / "again") == tree(tmp_path / "runs")


def _environment():
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


class TestDamage:
    def test_half_an_archive(self, tmp_path):
        """Wherever it is cut: one line, no records that look like all there were."""
        path = packed(tmp_path / "runs")
        whole = path.read_bytes()
        for size in (0, 1, 20, len(whole) // 2, len(whole) - 30, len(whole) - 1):
            path.write_bytes(whole[:size])
            for read in (Study.beside, statistics.read, RunsFolder.of, lambda p: archive.unpack(p, tmp_path / "again")):
                with pytest.raises(LabError, match=r"runs\.jsonl\.xz is damaged in line \d+ \(") as caught:
                    read(path)
                assert "\n" not in str(caught.value)
        assert not (tmp_path / "again").exists()

    def test_every_byte_matters(self, tmp_path):
        """A changed byte is an error, not another number."""
        small(tmp_path / "runs")
        archive.pack(tmp_path / "runs", tmp_path / "runs.jsonl.xz")
        path, choice = tmp_path / "runs.jsonl.xz", random.Random(0)
        whole = path.read_bytes()
        for place in choice.sample(range(len(whole)), 100):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << choice.randrange(8))]) + whole[place + 1 :])
            with pytest.raises(LabError, match=r"is damaged in line \d+"):
                archive.unpacked(path)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b"{", "Expecting property name"),
            (b"[]", "it is not a path with json or text"),
            (b"", "Expecting value"),
            (b'{"path": "a"}', "it is not a path with json or text"),
            (b'{"path": "a", "json": 1, "text": ""}', "it is not a path with json or text"),
            (b'{"path": "a", "json": 1, "mode": 7}', "it is not a path with json or text"),
            (b'{"path": 7, "json": 1}', "its path or text is no string"),
            (b'{"path": "../a", "json": 1}', "'../a' is no path below a folder"),
            (b'{"path": "b/../../a", "json": 1}', "'b/../../a' is no path below a folder"),
            (b'{"path": "/a", "json": 1}', "'/a' is no path below a folder"),
            (b'{"path": "", "json": 1}', "'' is no path below a folder"),
            (b'{"path": "a//b", "json": 1}', "'a//b' is no path below a folder"),
            (b'{"path": "a", "text": 5}', "its path or text is no string"),
            (b'{"path": "x/record.json", "json": 1}', "x/record.json stands in it twice"),
            (b"\xff", "utf-8"),
        ],
    )
    def test_a_line(self, tmp_path, line, message):
        path = tmp_path / "runs.jsonl.xz"
        good = b'{"path": "x/record.json", "json": 1}\n'
        path.write_bytes(lzma.compress(good + line + b"\n" + good.replace(b"x/", b"y/")))
        with pytest.raises(LabError, match=rf"runs\.jsonl\.xz is damaged in line 2 \(.*{message}"):
            archive.unpack(path, tmp_path / "again")
        assert not (tmp_path / "again").exists()

    def test_what_is_no_archive(self, tmp_path):
        (tmp_path / "a.jsonl.xz").write_text('{"path": "a", "json": 1}\n')
        (tmp_path / "b.jsonl.xz").write_bytes(lzma.compress(b""))
        for name, message in (
            ("a.jsonl.xz", r"damaged in line 1 \(Input format not supported"),
            ("b.jsonl.xz", r"damaged in line 1 \(it is empty"),
            ("none.jsonl.xz", "cannot read .*none.jsonl.xz: No such file"),
            ("c.txt", "c.txt is no archive: it is a file whose name ends in .jsonl.xz"),
            ("", "is no archive"),
        ):
            with pytest.raises(LabError, match=message):
                archive.unpacked(tmp_path / name)


class TestPacking:
    def test_the_command(self, tmp_path, capsys):
        small(tmp_path / "runs")
        (tmp_path / "runs" / "0-0" / "checkpoint.pt").write_bytes(b"large")
        (tmp_path / "runs" / "0-0" / ".lock").touch()
        (tmp_path / "runs" / "report").mkdir()
        (tmp_path / "runs" / "report" / "index.html").touch()
        before = tree(tmp_path / "runs")
        assert cli.main(["records", "pack", str(tmp_path / "runs")]) == 0
        path = tmp_path / "runs.jsonl.xz"
        first, second = capsys.readouterr().out.splitlines()
        assert first == f"16 files in {path}, {path.stat().st_size:,} bytes"
        assert second == "not packed: 2 other files, such as 0-0/checkpoint.pt"
        assert tree(tmp_path / "runs") == before
        assert cli.main(["records", "unpack", str(path), "-o", str(tmp_path / "again")]) == 0
        assert capsys.readouterr().out == f"16 files in {tmp_path / 'again'}\n"
        assert tree(tmp_path / "again") == {name: text for name, text in before.items() if name.endswith(".json")}

    def test_what_an_archive_has_is_not_lost(self, tmp_path):
        """Packed again, with more runs or others' numbers; not with fewer."""
        path = packed(tmp_path / "runs")
        Record(SMALL, ENVIRONMENT).write(tmp_path / "runs" / "more")
        archive.pack(tmp_path / "runs", path)
        assert f"more/{NAME}" in archive.unpacked(path)
        content = path.read_bytes()
        (tmp_path / "runs" / "more" / NAME).unlink()
        with pytest.raises(LabError, match=rf"holds 1 files that are not in .*, such as more/{NAME}: unpack it there"):
            archive.pack(tmp_path / "runs", path)
        assert path.read_bytes() == content

    def test_refusals(self, tmp_path):
        (tmp_path / "empty").mkdir()
        small(tmp_path / "runs")
        for folder, name, message in (
            ("none", "a.jsonl.xz", "none is no folder"),
            ("empty", "a.jsonl.xz", r"empty holds no \*\.json: there is nothing to pack"),
            ("runs", "a.gz", "a.gz is no archive: it is a file whose name ends in .jsonl.xz"),
        ):
            with pytest.raises(LabError, match=message):
                archive.pack(tmp_path / folder, tmp_path / name)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "runs"]

    def test_nothing_is_overwritten_by_unpacking(self, tmp_path):
        """What is there and the same may stay; where one file differs none is written."""
        path = packed(tmp_path / "runs")
        assert archive.unpack(path, tmp_path / "runs") == 16
        (tmp_path / "again" / "1-1").mkdir(parents=True)
        (tmp_path / "again" / "1-1" / NAME).write_text("mine")
        with pytest.raises(LabError, match=rf"1-1/{NAME} is there with other content: nothing was unpacked"):
            archive.unpack(path, tmp_path / "again")
        assert tree(tmp_path / "again") == {f"1-1/{NAME}": b"mine"}

    def test_single_runs(self, tmp_path):
        path = packed(tmp_path / "runs")
        assert cli.main(["records", "unpack", str(path), "0-1", "2-0", "-o", str(tmp_path / "some")]) == 0
        wanted = {name: text for name, text in tree(tmp_path / "runs").items() if name[:3] in ("0-1", "2-0")}
        assert len(wanted) == 2
        assert tree(tmp_path / "some") == wanted
        with pytest.raises(LabError, match=r"unknown run in .*runs\.jsonl\.xz '0-9': did you mean"):
            archive.unpack(path, tmp_path / "none", ["0-9"])


class TestTraining:
    """An archive is not trained into; a run of it can be unpacked, and resumed."""

    @pytest.mark.parametrize(
        "words",
        [
            ["train", "--task", "digits", "--out", "{}"],
            ["train", "--task", "digits", "--out", "{}/run"],
            ["train", "--resume", "{}"],
            ["train", "--resume", "{}/run"],
            ["sweep", "demo", "--out", "{}"],
            ["sweep", "demo", "--out", "{}/demo"],
            ["tune", "--task", "digits", "--optimizer", "sam", "--out", "{}"],
            ["demo", "--out", "{}"],
        ],
        ids=" ".join,
    )
    def test_refused_in_one_line(self, words, tmp_path, capsys):
        path = packed(tmp_path / "runs")
        content = path.read_bytes()
        assert cli.main([word.format(path) for word in words]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        told = f"{path} is a file: choose a folder, or unpack the records that it holds: gtracer records unpack {path}"
        assert told in error
        assert path.read_bytes() == content

    def test_an_unfinished_run_is_unpacked_and_resumed(self, tmp_path):
        """Its checkpoint was not packed: it starts over, and ends as one that was never cut."""

        class Stop:
            def step(self, run, loss):
                pass

            def epoch(self, run, row):
                raise RuntimeError("power cut")

        straight = train(SMALL, tmp_path / "straight", [])
        with pytest.raises(RuntimeError, match="power cut"):
            train(SMALL, tmp_path / "runs" / "cut", [Stop()])
        assert archive.pack(tmp_path / "runs", tmp_path / "runs.jsonl.xz") == ["cut/checkpoint.pt"]
        archive.unpack(tmp_path / "runs.jsonl.xz", tmp_path / "again", ["cut"])
        assert cli.main(["train", "--resume", str(tmp_path / "again" / "cut")]) == 0
        record = Record.read(tmp_path / "again" / "cut")
        assert record.curves == straight.curves
        assert record.notes == ["started over: there was no checkpoint of the 1 epochs made before"]
