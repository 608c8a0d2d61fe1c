"""Whatever is handed in, the answer to a wrong value is one line that starts with "gtracer:", and never a traceback."""

import gzip
import json
import lzma
import os
import pickle
import random
import subprocess
import sys
from dataclasses import fields

import numpy
import pytest
import torch

from gtracer import cli
from gtracer.lab.config import Config
from gtracer.lab.results.record import Record
from gtracer.lab.sweeps.study import KEYS

DEEP = "[" * 5000 + "]" * 5000
HUGE = 10**400
# No option takes any of these.
VALUES = [[1, 2, 3], [], {"a": 1}, [[[[1]]]], float("nan"), float("inf"), -float("inf"), HUGE, -HUGE, "a\0b", "\udcff"]
WORDS = ["a\0b", "x\ny", "\udcff", "9" * 5000, ""]
DRAWS = random.Random()


@pytest.fixture(autouse=True)
def _the_same_draws_in_every_run():
    DRAWS.seed(29)


def drawn(values, count):
    """So many of them, the same in every run."""
    return DRAWS.sample(list(values), count)


def refusal(words, capsys, names=""):
    """What is wrong with the answer to these words, which is to name this; nothing where it is as it should be."""
    try:
        code = cli.main(words)
    except SystemExit as stopped:
        code = stopped.code
    except BaseException as error:  # what would have been a traceback
        return f"{type(error).__name__}: {error}"[:300]
    lines = capsys.readouterr().err.splitlines()
    one = len(lines) == 1 and lines[0].startswith("gtracer: ") and names in lines[0] and len(lines[0]) < 1500
    if code not in (1, 2) or not one:
        return f"exit code {code}: {lines}"[:300]
    return None


def all_refused(cases, capsys, at_least, names=lambda case: ""):
    """Every one of them, by a line with what it is to name; how many there were is part of the claim."""
    cases = list(cases)
    assert len(cases) >= at_least
    answers = {f"{index}: {case}"[:200]: refusal(case, capsys, names(case)) for index, case in enumerate(cases)}
    assert {case: answer for case, answer in answers.items() if answer} == {}


def option(name):
    return f"--{name.replace('_', '-')}"


def test_words_for_options(tmp_path, capsys):
    """Each option of a run with words that it cannot take."""
    out = ["--out", str(tmp_path / "out")]
    named = [item for item in fields(Config) if not isinstance(item.default, bool)]
    single = [["train", option(i.name), w, *out] for i in named if i.name != "betas" for w in drawn(WORDS, 2)]
    flags = [["train", f"{option(i.name)}=1", *out] for i in fields(Config) if isinstance(i.default, bool)]
    pairs = [["train", "--betas", *pair, *out] for pair in (("0.9", "x"), ("0.9", "1"), ("nan", "0.9"), ("0.9",))]
    all_refused([*single, *flags, *pairs], capsys, 90)


def test_words_out_of_range(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wrong = {
        "lr": ("0", "-1", "inf", "1e999"),
        "momentum": ("1", "2", "-0.1", "nan"),
        "weight_decay": ("-1",),
        "eps": ("-1e-9",),
        "rho": ("-1", "much"),
        "beta": ("1.5",),
        "delta": ("-1",),
        "f0": ("-1", "first"),
        "radius": ("0",),
        "clip": ("0",),
        "reuse": ("2", "next"),
        "label_noise": ("1.1",),
        "holdout": ("1",),
        "share": ("0",),
        "train_share": ("0",),
        "epochs": ("0", "1.5", "1e3", "٣", "-1"),
        "batch_size": ("0", str(10**12)),
        "width": ("0", "1000000"),
        "depth": (str(10**9),),
        "seed": ("-1", str(2**64)),
        "task": ("digit", "nowhere/", "nowhere.csv", "~nobody-of-this-name/x.csv", "/etc", "x" * 300),
        "data": ("nowhere",),
        "device": ("tpu", "meta", "cpu:-1", "hpu", "xla"),
        "model": ("resnet", "mlp-gn", "wrn-29-2", "resnet20"),
        "optimizer": ("sgd-trace", "lbfgs", "-sgd-x", "-sam", "sgd-sam-sam", "SGD Tracker"),
        "curvature": ("per-exemple", "micro-batch-0", "micro-batch-٣", f"micro-batch-{10**30}"),
        "schedule": ("step",),
        "precision": ("fp8",),
        "kernels": ("fuse",),
        "engine": ("double",),
    }
    cases = [["train", option(n), w, "--out", str(tmp_path / "out")] for n, words in wrong.items() for w in words]
    for case in cases:
        case += ["--task", "cifar100"] if case[1] == "--data" else []
    all_refused(cases, capsys, 60)


@pytest.mark.parametrize(
    "words",
    [
        ["--optimizer", "sgd", "--rho", "0.1"],
        ["--optimizer", "adam", "--momentum", "0.5"],
        ["--optimizer", "sgd", "--betas", "0.8", "0.9"],
        ["--optimizer", "sgd", "--eps", "1e-4"],
        ["--optimizer", "adam", "--nesterov"],
        ["--optimizer", "sgd", "--momentum", "0", "--nesterov"],
        ["--optimizer", "sgd", "--momentum", "0", "--dampening", "0.5"],
        ["--optimizer", "sgd", "--dampening", "0.5", "--nesterov"],
        ["--optimizer", "rprop", "--weight-decay", "0.1"],
        ["--optimizer", "sam", "--delta", "0.1"],
        ["--optimizer", "sam", "--beta", "0.1"],
        ["--optimizer", "sam", "--engine", "exact"],
        ["--optimizer", "sam", "--eta", "0.1"],
        ["--optimizer", "sam", "--scale-free"],
        ["--optimizer", "adam-tracer", "--beta", "0.1"],
        ["--optimizer", "sgd-tracer", "--second-moment", "loss"],
        ["--engine", "exact", "--radius", "0.1"],
        ["--optimizer", "sgd", "--interval", "2"],
        ["--optimizer", "sgd", "--rho-warmup", "0.1"],
        ["--max-length", "9"],
        ["--text-columns", "body"],
        ["--augment"],
        ["--init", "torch"],
        ["--task", "cifar10", "--width", "9"],
    ],
)
def test_options_without_effect(words, tmp_path, capsys):
    assert refusal(["train", *words, "--out", str(tmp_path / "out")], capsys) is None
    assert not (tmp_path / "out").exists()
    lines = [word.removeprefix("--").replace("-", "_") for word in words if word.startswith("--")]
    (tmp_path / "c.json").write_text(json.dumps(asked(words)))
    assert cli.main(["train", "--config", str(tmp_path / "c.json"), "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert any(f"{name} = " in error for name in lines)
    assert "has no effect: it is for" in error


def asked(words):
    """The words as a configuration file has them."""
    found, name = {}, ""
    for word in words:
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            found[name] = True
        else:
            value = float(word) if word[0].isdigit() else word
            value = int(value) if name in ("interval", "width", "max_length") else value
            found[name] = value if found[name] is True else [found[name], value]
    return found


def test_other_words(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    file, empty, out = str(tmp_path / "file"), str(tmp_path / "empty"), ["--out", str(tmp_path / "out")]
    all_refused(
        [
            ["trian"],
            ["--seed", "1"],
            ["train", "digits"],
            ["train", "--optmizer", "sgd"],
            ["train", "--epochs", "1", "--batch-size", "1", *out],  # the net has batch norm
            ["train", "--resume", "nowhere"],
            ["train", "--resume", "a\0b"],
            ["train", "--resume", empty],
            ["train", "--resume", file, "--lr", "1"],
            ["train", "--config", "nowhere.yaml"],
            ["train", "--config", "nowhere/c.yaml"],
            ["train", "--config", empty],
            ["train", "--config", "a\0b.yaml"],
            ["train", "--epochs", "1", "--width", "8", "--out", f"{file}/run"],
            ["train", "--epochs", "1", "--width", "8", "--out", "a\0b"],
            ["train", "--epochs", "1", "--width", "8", "--out", "x" * 5000],
            ["sweep"],
            ["sweep", "table1-digit"],
            ["sweep", "nowhere.yaml"],
            ["sweep", "nowhere/mine"],
            ["sweep", "a\0b"],
            ["sweep", "a\0b.yaml"],
            ["sweep", empty],
            ["sweep", "demo", "--settings", "nowhere", *out],
            ["sweep", "demo", "--seeds", "0"],
            ["sweep", "demo", "--seeds", "9" * 5000],
            ["sweep", "demo", "--seeds", "²"],
            ["sweep", "demo", "--kernels", "none", *out],
            ["sweep", "demo", "--engine", "lokal", *out],
            ["sweep", "demo", "--gpus", "nan", *out],
            ["sweep", "demo", "--out", f"{file}/x"],
            ["sweep", "demo", "--out", "a\0b"],
            ["tune", "--search=--"],
            ["train", "--task=--"],
            ["tune", "--search", "rho"],
            ["tune", "--search", "roh=1:2"],
            ["tune", "--search", "rho=1:x"],
            ["tune", "--search", "rho=nan:1"],
            ["tune", "--search", "rho=1:1e999"],
            ["tune", "--search", "momentum=0.5:2", *out],
            ["tune", "--search", "betas=0.5:2"],
            ["tune", "--optimizer", "sgd", "--search", "rho=0.1:2", *out],
            ["tune", "--optimizer", "sgd", *out],
            ["tune", "--trials", "1000000000"],
            ["report"],
            ["report", "nowhere"],
            ["report", file],
            ["report", empty],
            ["report", "a\0b"],
            ["report", empty, "--study", "table9"],
            ["bench", "everything"],
            ["bench", "steps", "--model", "resnet21"],
            ["bench", "estimators", "--model", "resnet21"],
            ["bench", "steps", "--device", "tpu"],
            ["bench", "steps", "--precision", "fp8"],
            ["bench", "throughput", "--kernels", "none"],
            ["bench", "steps", "--batch-size", "0"],
        ],
        capsys,
        50,
    )


BROKEN_YAML = [
    "a: [1",
    DEEP,
    "lr: " + DEEP,
    "lr: &a [*a]",
    "? [a]\n: b",
    "!!python/object/apply:os.system [ls]",
    "lr: 2001-99-99",
    "lr: !!binary '*'",
    "lr: !!int x",
    "lr: !!float [1]",
    "lr: !!timestamp x",
    "lr: =",
    f"lr: 0x{'f' * 6000}",
    "lr: " + "9" * 6000,
    "- a\n- b",
    "just words",
    "3",
    "\0",
    "\t- x",
    "{}: {}",
    "3: 4",
    "null: 4",
    "lr: [1, 2",
    "lr: {a: &x [1], b: *y}",
    "a: &a [x, x]\nb: &b [*a, *a, *a]\nlr: [*b, *b, *b]",
    "Lr: 1",
    "learning_rate: 1",
    "lr: !!bool maybe",
    "seed: !!int ''",
    "lr: 1\nlr: 2",
    '{"lr": 1, "lr": 2}',
]


def test_configuration_files(tmp_path, capsys):
    """Each option with values of another shape; files that are none."""

    def cases():
        for index, item in enumerate(fields(Config)):
            for number, value in enumerate(drawn(VALUES, 3)):
                path = tmp_path / f"{index}-{number}.json"
                path.write_text(json.dumps({item.name: value}))
                yield path
        for index, text in enumerate(BROKEN_YAML):
            for suffix in ("yaml", "json"):
                path = tmp_path / f"broken-{index}.{suffix}"
                path.write_text(text)
                yield path
        (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\0\xd8")
        (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\0\xd8")
        yield from (tmp_path / "bytes.yaml", tmp_path / "bytes.json")

    all_refused(
        (["train", "--config", str(p), "--out", str(tmp_path / "o")] for p in cases()),
        capsys,
        150,
        lambda case: case[2],
    )


STUDY = {
    "title": "small",
    "about": "",
    "base": {"task": "digits", "epochs": 1},
    "seeds": 1,
    "settings": {"clean": {}, "noisy": {"label_noise": 0.5}},
    "methods": {"SGD": {"optimizer": "sgd"}, "SAM": {"optimizer": "sam", "vary": {"rho": [0.1, 0.2]}}},
    "paper": {"SGD": {"clean": [1.0, 0.1]}},
}


def changed(whole, path, value):
    """A copy with another value at this place."""
    copy = json.loads(json.dumps(whole))
    at = copy
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return copy


def test_studies(tmp_path, capsys):
    def cases():
        wrong = [[1, 2, 3], "words", 3, True, float("nan"), HUGE, "a\0b", [[[[1]]]]]
        for key in KEYS:
            accepted = {"seeds": ([1, 2, 3], 3), "title": ("words",), "about": ("words",)}.get(key, ())
            yield from (changed(STUDY, [key], value) for value in wrong if value not in accepted and value != "a\0b")
        for path in (["settings", "noisy"], ["methods", "SGD"], ["methods", "SAM", "vary"], ["paper", "SGD"]):
            yield from (changed(STUDY, path, value) for value in wrong)
        for path in (["methods", "SAM", "vary", "rho"], ["paper", "SGD", "clean"], ["settings", "noisy", "seeds"]):
            yield from (
                changed(STUDY, path, value) for value in ("words", {"a": 1}, [], [HUGE], [[1], [2]], float("nan"))
            )
        for path in (["base", "lr"], ["settings", "noisy", "label_noise"], ["methods", "SGD", "lr"]):
            yield from (changed(STUDY, path, value) for value in drawn(VALUES, 4))
        yield changed(STUDY, ["seeds"], 10**9)
        yield changed(
            STUDY, ["methods", "SAM", "vary"], {n: [0.1] * 999 for n in ("rho", "lr", "eps", "clip", "momentum")}
        )
        yield changed(STUDY, ["methods", "SGD", "in"], {"nowhere": {}})
        yield changed(STUDY, ["methods", "SGD", "in"], {"noisy": [1]})
        yield changed(STUDY, ["methods", "SGD", "rho"], 0.1)
        yield changed(STUDY, ["methods", "SGD", "optimizer"], "sgd-trace")
        yield changed(STUDY, ["base", "task"], "digit")
        yield changed(STUDY, ["base", "max_length"], 9)
        yield changed(STUDY, ["method"], {})
        yield changed(STUDY, ["methods"], {})
        yield changed(STUDY, ["methods", "a\0b"], {})
        yield changed(STUDY, ["methods", "x" * 9999], {})
        yield changed(STUDY, ["methods", "\udcff"], {})
        yield changed(STUDY, ["title"], "\udcff")

    def files():
        for index, content in enumerate(cases()):
            (tmp_path / f"{index}.json").write_text(json.dumps(content))
            yield tmp_path / f"{index}.json"
        for index, text in enumerate(BROKEN_YAML):
            (tmp_path / f"broken-{index}.yaml").write_text(text)
            yield tmp_path / f"broken-{index}.yaml"

    all_refused(
        (["sweep", str(path), "--out", str(tmp_path / "out")] for path in files()),
        capsys,
        100,
        lambda case: case[1].split("/")[-1] if "broken" in case[1] else "",
    )


def test_rows_of_tables(tmp_path, capsys):
    """What a table cannot hold: more than 1e100, other rows inside, halves of a character."""
    pairs = ('{"a": 1, "label": "p"}\n{"a": 2, "label": "q"}\n', "1,p\n2,q\n")
    contents = {
        **{
            f"{n}.csv": "a,label\n" + pairs[1] * 3 + f"{cell},p\n"
            for n, cell in enumerate(("inf", "-Infinity", "1e140", "1e400"))
        },
        **{
            f"{n}.jsonl": pairs[0] * 3 + f'{{"a": {cell}, "label": "p"}}\n'
            for n, cell in enumerate(('{"b": 1}', "[1]", "[[]]", "1e999", '"\\ud800"'))
        },
        "label.jsonl": pairs[0] * 3 + '{"a": 1, "label": [1]}\n',
        "name.jsonl": '{"\\ud800": 1, "label": "p"}\n' * 4,
        "utf16.jsonl": (pairs[0] * 3).encode("utf-16"),
        "utf16.csv": ("a,label\n" + pairs[1] * 3).encode("utf-16"),
        "junk.parquet": b"PAR1junkPAR1",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    cases = [["train", "--task", str(tmp_path / name), "--out", str(tmp_path / "o")] for name in contents]
    all_refused(cases, capsys, 14, lambda case: case[2])


@pytest.mark.skipif(sys.platform != "linux", reason="where names are UTF-8 there are no others")
def test_images_whose_names_are_no_text(tmp_path, capsys):
    pixel = b"P6 1 1 255 abc"
    for where, name in (("file", b"a/\xff.ppm"), ("class", b"\xff/a.ppm")):
        path = os.fsencode(tmp_path / where) + b"/" + name
        os.makedirs(os.path.dirname(path))
        with open(path, "wb") as file:
            file.write(pixel)
    cases = [["train", "--task", str(tmp_path / where), "--out", str(tmp_path / "o")] for where in ("file", "class")]
    all_refused(cases, capsys, 2, lambda case: "is not UTF-8: rename it")


FAILING = {
    "raises": "def f(): raise ValueError('x\\ny')",
    "imports": "import nothing_of_this_name",
    "fails": "raise KeyError('at import')",
    "recurses": "def f(): return f()",
    "item": "class f:\n    __len__ = lambda self: 9\n    def __getitem__(self, i): raise KeyError(i)",
    "length": "class f:\n    __len__ = lambda self: -1\n    __getitem__ = lambda self, i: i",
    "shapes": "import torch\ndef f(): return [(torch.zeros(i % 3 + 1), i % 2) for i in range(9)],",
    "scalars": "import torch\ndef f(): return [(torch.zeros(()), i % 2) for i in range(9)],",
    "nothing": "import torch\ndef f(): return [(torch.zeros(0), i % 2) for i in range(9)],",
}


def test_data_sets_from_python(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, code in FAILING.items():
        (tmp_path / f"hostile_{name}.py").write_text(code)
    all_refused((["train", "--task", f"hostile_{name}:f", "--out", "o"] for name in FAILING), capsys, 9)
    answers = [refusal(["train", "--task", "hostile_raises:f"], capsys, "ValueError: x y (")]  # and where that was
    assert answers == [None]


LINEAR = """import torch

class f(torch.nn.Linear):
    def __init__(self, shape, classes):
        super().__init__(64, classes)

    def forward(self, x):
        """
MODELS = {
    "raises": "def f(shape, classes): raise ValueError('x\\ny')",
    "pair": f"{LINEAR}return (super().forward(x),)",
    "forward": f"{LINEAR}raise KeyError(1)",
}


def test_models_from_python(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, code in MODELS.items():
        (tmp_path / f"net_{name}.py").write_text(code)
    all_refused((["train", "--model", f"net_{name}:f", "--out", "o"] for name in MODELS), capsys, 3)


def test_weights_to_begin_with(tmp_path, capsys):
    """Not a pickle that torch can read, or no tensors by their names."""
    contents = [b"", b"text,label\na,x\n", pickle.dumps({"a": 1}), b"PK\3\4", b"\x80\x04.", b"(" * 1000]
    for index, content in enumerate(contents):
        (tmp_path / f"{index}.pt").write_bytes(content)
    paths = [*(tmp_path / f"{index}.pt" for index in range(len(contents))), tmp_path, tmp_path / "none.safetensors"]
    all_refused((["train", "--weights", str(p), "--out", str(tmp_path / "o")] for p in paths), capsys, 8)


def test_numbers_whose_product_is_too_large(tmp_path, capsys):
    """Each is a number, and what torch makes of them is none of 32 bits: the run diverges."""
    common = ["train", "--width", "4", "--epochs", "1", "--batch-size", "512", "--device", "cpu", "--optimizer"]
    cases = [[*common, "sgd", "--lr", "1e300"], [*common, "adamw", "--lr", "1e25", "--weight-decay", "1e25"]]
    answers = [refusal([*words, "--out", str(tmp_path / str(i))], capsys, "lower lr") for i, words in enumerate(cases)]
    assert answers == [None] * 2


def test_descriptions_of_models(tmp_path, capsys):
    """`model.json`, which `predict` and the others read."""
    words = ["train", "--width", "4", "--epochs", "1", "--batch-size", "512", "--device", "cpu", "--out"]
    assert cli.main([*words, str(tmp_path)]) == 0
    capsys.readouterr()
    path = tmp_path / "model.json"
    whole = json.loads(path.read_text())
    wrong = [[1], "x", 3.5, None, HUGE, -1, {"a": 1}]
    places = [*(["model", name] for name in whole["model"]), *([name] for name in whole if name != "preprocessing")]

    def cases():
        for place in places:
            for value in drawn(wrong, 3) if place != ["model", "name"] else [[1], 3.5, None, "nothing"]:
                yield json.dumps(changed(whole, place, value))
        for value in ([1], "x", 3, {}, {"kind": "x"}, {"kind": "pictures", "size": [1, 2]}):
            yield json.dumps(changed(whole, ["preprocessing"], value))
        for size, mean in (([8], [1]), ([8, -8], [1]), (["x", 8], [1]), ([8, 8], "x"), ([8, 8], [[1]]), (10**9, [1])):
            described = {"kind": "pictures", "size": size, "mean": mean, "deviation": [1], "flat": True}
            yield json.dumps(changed(whole, ["preprocessing"], described))
        yield json.dumps(changed(whole, ["classes"], ["a", "b"]))
        yield from ("", "[]", "null", "\0", DEEP, "{}")

    answers = []
    for content in cases():  # one at a time: they share a folder
        path.write_text(content)
        answers.append(refusal(["predict", str(tmp_path), str(tmp_path / "none.png")], capsys))
    assert len(answers) >= 45
    assert [answer for answer in answers if answer] == []


def test_a_terminal_that_lacks_letters_and_a_reader_that_has_gone(tmp_path):
    """ρ on a terminal of ASCII alone; `gtracer … | head`; a disk that is full."""
    (tmp_path / "run").mkdir()
    Record(Config(), {"commit": None, "versions": {}, "hardware": {}}).write(tmp_path / "run")
    words = [sys.executable, "-m", "gtracer", "records", "pack", str(tmp_path / "run"), "-o"]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    told = subprocess.run([*words, str(tmp_path / "ρ.jsonl.xz")], capture_output=True, text=True, env=ascii_only)
    assert (told.returncode, told.stderr) == (0, "")
    assert "\\u03c1.jsonl.xz" in told.stdout
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing) as gone:
        told = subprocess.run([*words, str(tmp_path / "b.jsonl.xz")], stdout=gone, stderr=subprocess.PIPE, text=True)
    assert (told.returncode, told.stderr) == (1, "")
    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full:
            told = subprocess.run(
                [*words, str(tmp_path / "c.jsonl.xz")], stdout=full, stderr=subprocess.PIPE, text=True
            )
        assert told.returncode == 1
        assert told.stderr.startswith("gtracer: ")
        assert len(told.stderr.splitlines()) == 1


GOOD = '{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n'


def test_rows_of_texts(tmp_path, capsys):
    lines = [
        '{"text": "a", "label": [1]}',
        '{"text": "a", "label": {"a": 1}}',
        '{"text": "a", "label": null}',
        '{"text": "a"}',
        '{"text": ["a"], "label": "x"}',
        '{"text": {"a": "b"}, "label": "x"}',
        '{"text": null, "label": "x"}',
        '{"text": "a", "label": ' + "9" * 6000 + "}",
        '{"text": "a", "label": ' + DEEP + "}",
        '{"text": "a", "label": NaN}',
        '{"text": "\\udcff", "label": "x"}',
        "[1, 2]",
        "3",
        "null",
        DEEP,
        "{",
        "\0",
    ]
    tables = [
        "",
        "text,label\n",
        "text,class\na,x\nb,y\n",
        "body,label\na,x\nb,y\n",
        "text,label\na,x\nb,x\n",
        "text,label\na,x\nb\n",
        "text,label\na,x,c\nb,y\n",
        'text,label\n"a,x\nb,y\n' + "x" * 200_000,
        "\n\n\n",
    ]

    def cases():
        for index, line in enumerate(lines):
            path = tmp_path / f"{index}.jsonl"
            path.write_text(GOOD * 3 + line + "\n")
            yield path
        for index, table in enumerate(tables):
            path = tmp_path / f"{index}.csv"
            path.write_text(table)
            yield path
        (tmp_path / "bytes.csv").write_bytes(b"text,label\n\xff,\xfe\n")
        yield tmp_path / "bytes.csv"
        (tmp_path / "folder.csv").mkdir()
        yield tmp_path / "folder.csv"
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "train.csv").write_text("text,label\na,x\nb,y\n")
        yield tmp_path / "other"

    all_refused(
        (["train", "--task", str(path), "--out", str(tmp_path / "o")] for path in cases()),
        capsys,
        28,
        lambda case: case[2],
    )


SUPERGLUE = {
    "boolq": ("BoolQ", {"question": "a", "passage": "b", "label": True}),
    "rte": ("RTE", {"premise": "a", "hypothesis": "b", "label": "entailment"}),
    "wic": (
        "WiC",
        {"sentence1": "a", "sentence2": "b", "start1": 0, "end1": 1, "start2": 0, "end2": 1, "label": False},
    ),
}


@pytest.mark.parametrize("name", SUPERGLUE)
def test_rows_of_superglue(name, tmp_path, capsys):
    folder, row = SUPERGLUE[name]

    def cases():
        for key in row:
            for value in drawn([[1], {"a": 1}, None, "maybe" if key == "label" else 3.5, float("nan"), [[]]], 4):
                yield row | {key: value}
        yield {}

    def folders():
        for index, wrong in enumerate(cases()):
            place = tmp_path / str(index)
            (place / folder).mkdir(parents=True)
            for split in ("train", "val"):
                (place / folder / f"{split}.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(wrong) + "\n")
            yield place

    words = ["train", "--task", name, "--out", str(tmp_path / "o"), "--data"]
    all_refused(([*words, str(place)] for place in folders()), capsys, 13, lambda case: case[-1])


class Evil:
    def __reduce__(self):
        return (print, ("this code must not run",))


def nested(depth):
    whole = []
    for _ in range(depth):
        whole = [whole]
    return whole


def test_cifar(tmp_path, capsys):
    pixels, labels = numpy.zeros((2, 3072), numpy.uint8), [0, 1]
    contents = [
        *(pickle.dumps({"data": data, "fine_labels": labels}) for data in (None, 3, "x", [1], [[0] * 3072] * 2)),
        *(
            pickle.dumps({"data": pixels.astype(kind), "fine_labels": labels})
            for kind in (float, "int64", object, "U1")
        ),
        *(
            pickle.dumps({"data": pixels.reshape(shape), "fine_labels": labels})
            for shape in ((4, 1536), (2, 3, 1024), -1)
        ),
        *(pickle.dumps({"data": pixels[:n], "fine_labels": labels}) for n in (0, 1)),
        *(
            pickle.dumps({"data": pixels, "fine_labels": wrong})
            for wrong in (
                None,
                3,
                "ab",
                ["a", "b"],
                [0.5, 1.0],
                [[0], [1]],
                [0, -1],
                [0, 100],
                [0, 10**30],
                [True, False],
            )
        ),
        *(pickle.dumps({"data": pixels, "fine_labels": wrong}) for wrong in ([], {}, {"a": 1}, numpy.zeros(2))),
        *(pickle.dumps(wrong) for wrong in (None, 3, [1, 2], "words", {}, {"data": pixels}, Evil())),
        *(pickle.dumps({"data": pixels, "fine_labels": labels})[:length] for length in (0, 10, 500, 6000)),
        b"(" * 100_000,
        b"]" + b"]a" * 100_000 + b".",
        b"not a pickle",
        bytes(range(256)) * 20,
    ]

    def folders():
        for index, content in enumerate(contents):
            place = tmp_path / str(index) / "cifar-100-python"
            place.mkdir(parents=True)
            (place / "train").write_bytes(content)
            (place / "test").write_bytes(pickle.dumps({"data": pixels, "fine_labels": labels}))
            yield place.parent

    words = ["train", "--task", "cifar100", "--out", str(tmp_path / "o"), "--data"]
    all_refused(([*words, str(place)] for place in folders()), capsys, 38, lambda case: case[-1])
    assert not capsys.readouterr().out


def idx(values, kind=8, sizes=None):
    sizes = values.shape if sizes is None else sizes
    head = bytes([0, 0, kind, len(sizes)]) + b"".join(n.to_bytes(4, "big") for n in sizes)
    return gzip.compress(head + values.astype(numpy.uint8).tobytes(), mtime=0)


def test_fashion_mnist(tmp_path, capsys):
    images, labels = numpy.zeros((4, 28, 28)), numpy.arange(4)
    whole = idx(images)
    damaged = [bytes([*whole[:i], whole[i] ^ 255, *whole[i + 1 :]]) for i in (0, 2, 3, 12, 20, len(whole) - 6)]
    wrong_images = [
        *damaged,
        *(whole[:length] for length in (0, 5, 15, len(whole) - 1)),
        *(
            idx(images, sizes=sizes)
            for sizes in ((4, 28, 29), (2**32 - 1,) * 3, (0, 28, 28), (4, 784), (), (4, 28, 28, 1))
        ),
        idx(images, kind=13),
        idx(images.reshape(4, 14, 56)),
        b"not gzip",
        gzip.compress(b""),
        gzip.compress(b"\0\0"),
    ]
    wrong_labels = [idx(labels + 8), idx(labels[:3]), idx(images), idx(labels.reshape(4, 1)), idx(labels, sizes=())]

    def folders():
        pairs = [*((one, idx(labels)) for one in wrong_images), *((idx(images), one) for one in wrong_labels)]
        for index, (first, second) in enumerate(pairs):
            place = tmp_path / str(index) / "fashion-mnist"
            place.mkdir(parents=True)
            (place / "train-images-idx3-ubyte.gz").write_bytes(first)
            (place / "train-labels-idx1-ubyte.gz").write_bytes(second)
            (place / "t10k-images-idx3-ubyte.gz").write_bytes(idx(images))
            (place / "t10k-labels-idx1-ubyte.gz").write_bytes(idx(labels))
            yield place.parent

    words = ["train", "--task", "fashion-mnist", "--out", str(tmp_path / "o"), "--data"]
    all_refused(([*words, str(place)] for place in folders()), capsys, 25, lambda case: case[-1])


def test_records(tmp_path, capsys):
    """Read by `gtracer report`, and by `gtracer train --resume`."""
    record = Record(Config(epochs=2), {"commit": None, "versions": {}, "hardware": {}})
    for value in (0.1, 0.2):
        record.add({"test_accuracy": value}, 1.0)
    record.write(tmp_path)
    whole = json.loads((tmp_path / "record.json").read_text())

    def contents():
        wrong = [[1, 2, 3], [[1]], "words", {"a": [1, "b"]}, float("nan"), HUGE, -1]
        for key in (
            "format",
            "config",
            "environment",
            "curves",
            "seconds",
            "peak_memory",
            "notes",
            "failure",
            "resolved",
        ):
            for value in wrong:
                fine = {
                    "failure": value == "words",
                    "environment": isinstance(value, dict),
                    "resolved": isinstance(value, dict),
                }.get(key, False)
                if not fine:
                    yield json.dumps(changed(whole, [key], value))
        for path in (["environment", "hardware"], ["environment", "versions"], ["environment", "commit"]):
            yield from (json.dumps(changed(whole, path, value)) for value in ([1], 3, True))
        for value in ([1], [1, 2, 3], [], ["a", "b"], [[1], [2]], [float("inf"), 1], None, {"a": 1}, [HUGE, 1]):
            yield json.dumps(changed(whole, ["curves", "test_accuracy"], value))
        for item in drawn(fields(Config), 12):
            yield json.dumps(changed(whole, ["config", item.name], drawn(VALUES, 1)[0]))
        yield json.dumps(changed(whole, ["config", "epochs"], 1))
        yield json.dumps(changed(whole, ["curves"], {}))
        yield from (json.dumps({k: v for k, v in whole.items() if k != key}) for key in ("config", "curves", "seconds"))
        yield from ("", "{", "[]", "3", "null", "\0", DEEP, '{"format": 1, "config": ' + DEEP + "}", '{"format": 1')

    def cases():
        for index, content in enumerate(contents()):
            place = tmp_path / "all" / str(index)
            place.mkdir(parents=True)
            (place / "record.json").write_text(content)
            yield ["report", str(place)]
            yield ["train", "--resume", str(place)]

    all_refused(cases(), capsys, 150)


def test_checkpoints(tmp_path, capsys):
    record = Record(Config(epochs=2, width=8), {"commit": None, "versions": {}, "hardware": {}})
    record.add({"test_accuracy": 0.1}, 1.0)
    record.write(tmp_path)

    def cases():
        for content in (1, [], {}, {"model": 1}, torch.zeros(3), {"model": {}, "optimizer": [], "schedule": None}):
            torch.save(content, tmp_path / "checkpoint.pt")
            yield ["train", "--resume", str(tmp_path)]
        for raw in (b"", b"junk", pickle.dumps(Evil())):
            (tmp_path / "checkpoint.pt").write_bytes(raw)
            yield ["train", "--resume", str(tmp_path)]

    answers = [refusal(words, capsys, "checkpoint.pt") for words in cases()]  # one at a time: they share a folder
    assert answers == [None] * 9
    assert "must not run" not in capsys.readouterr().out


def test_names_that_no_file_can_have(tmp_path, capsys):
    """In an archive, and for one."""
    line = json.dumps({"path": "x" * 5000 + "/record.json", "json": {}}) + "\n"
    (tmp_path / "long.jsonl.xz").write_bytes(lzma.compress(line.encode()))
    (tmp_path / "study.json").write_text("{}")
    cases = [
        ["records", "unpack", str(tmp_path / "long.jsonl.xz"), "-o", str(tmp_path / "out")],
        *(["records", "pack", str(tmp_path), "-o", f"{name}.jsonl.xz"] for name in ("x" * 5000, "a\0b")),
        *([*words, "x" * 5000] for words in (["report"], ["records", "pack"], ["sweep"], ["train", "--resume"])),
    ]
    all_refused(cases, capsys, 7)


def test_a_study_beside_records(tmp_path, capsys):
    (tmp_path / "study.json").write_text(DEEP)
    assert refusal(["report", str(tmp_path)], capsys) is None
