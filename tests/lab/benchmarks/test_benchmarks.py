"""`gtracer bench`: every row is a real step of what it says, and the numbers are written as they were measured."""

import json
import statistics
from importlib.util import find_spec

import pytest
import torch
from rich.console import Console

from gtracer import cli
from gtracer.curvature import Evaluation, Recording, per_example
from gtracer.lab.benchmarks import estimators, fine_tuning, loading, measurement, optimizers, scaling, throughput
from gtracer.lab.data.pictures import IMAGENET, Pictures
from gtracer.lab.errors import LabError
from gtracer.lab.models.transformer import Transformer
from support.problems import relative_error

CPU = torch.device("cpu")


@pytest.mark.parametrize("model", estimators.MODELS)
def test_bench_prints_and_writes_what_it_measured(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measurement, "peak", lambda step, device: 3_000_000)
    monkeypatch.setenv("COLUMNS", "120")
    out = tmp_path / "bench.json"
    words = ["bench", "estimators", "--model", model, "--rounds", "1", "--batch-size", "4", "--micro-batch", "2"]
    assert cli.main([*words, "--device", "cpu", "--out", str(out)]) == 0
    printed, result = capsys.readouterr().out, json.loads(out.read_text())
    seconds = {name: statistics.median(times) for name, times in result["seconds"]["eager"].items()}
    assert set(seconds) == set(estimators.choices(model, 2, CPU))
    for name, time in seconds.items():
        row = next(line for line in printed.splitlines() if f" {name} " in line)
        cells = [cell.strip() for cell in row.strip("│ ").split("│")]
        ratios = [f"{time / seconds[base]:.2f}" for base in (estimators.BASE, estimators.EXACT)]
        assert cells == [name, f"{time * 1e3:.1f}", f"{time * 1e3:.1f} – {time * 1e3:.1f}", *ratios, "3"]
    assert result["versions"]["torch"] == torch.__version__


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_steps_are_printed_and_written_as_measured(tmp_path, monkeypatch, capsys):
    """Every row over its own base; memory in copies of the weights."""
    memory = iter(range(1_000_000, 100_000_000, 1_000_000))
    monkeypatch.setattr(measurement, "peak", lambda step, device, first: next(memory))
    monkeypatch.setenv("COLUMNS", "140")
    out = tmp_path / "steps.json"
    words = ["bench", "steps", "--model", "transformer", "--rounds", "1", "--batch-size", "2", "--precision", "bf16"]
    assert cli.main([*words, "--device", "cpu", "--out", str(out)]) == 0
    printed, result = capsys.readouterr().out, json.loads(out.read_text())
    assert set(result["seconds"]) >= {"SGD", "AdamW", "SGD-SAM", "SGD-TRACER", "SGD-TRACER, exact", "AdamW-TRACER"}
    assert set(result["peers"]) == {package for module, package in optimizers.PEERS.items() if find_spec(module)}
    for name, (seconds,) in result["seconds"].items():
        row = next(line for line in printed.splitlines() if f" {name} " in line)
        cells = [cell.strip() for cell in row.strip("│ ").split("│")]
        base = result["over"][name]
        more = (result["peak_memory"][name] - result["peak_memory"][base]) / result["weights"]
        ratio = seconds / result["seconds"][base][0]
        own = [f"{own[0] / result['arithmetic']['AdamW'][0]:.1f}" if (own := result["arithmetic"].get(name)) else "–"]
        numbers = [f"{seconds * 1e3:.1f}", f"{ratio:.2f}", f"{more:+.1f}", *own, "–"]  # no graph on a CPU
        assert [cells[0], cells[1], *cells[3:]] == [name, *numbers]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SGD", 8),
        ("SGD-SAM", 16),
        ("SGD-TRACER", 16),
        ("SGD-TRACER, every 8th, reused", 9),
        ("AdamW-TRACER", 16),
        ("SGD-TRACER, ρ auto", 15),
    ],
)
def test_a_row_makes_the_passes_that_it_should(name, expected):
    """Eight steps of it."""
    row, passes = optimizers.rows(CPU, twice=False)[name], []
    step, net = optimizers.build(row, "resnet20", 2, CPU, "fp32")
    net.register_forward_hook(lambda *_: passes.append(1))
    for _ in range(optimizers.EVERY):
        step()
    assert len(passes) == expected


@pytest.mark.parametrize("name", ["SGD", "SGD-TRACER", "AdamW-TRACER", "SGD-SAM"])
def test_arithmetic_is_a_step_without_passes(name):
    step, net = optimizers.build(optimizers.rows(CPU, twice=False)[name], "resnet20", 2, CPU, "fp32", passes=False)
    net.register_forward_hook(lambda *_: pytest.fail("a pass"))
    before = net[-1].weight.detach().clone()
    step()
    step()
    assert torch.isfinite(net[-1].weight).all()
    assert not torch.equal(net[-1].weight, before)


def test_rows_are_chosen_with_what_they_are_compared_with():
    compared = optimizers.rows(CPU, twice=False)
    assert list(optimizers.chosen(compared, ["AdamW-TRACER", "SGD-SAM"])) == ["SGD", "SGD-SAM", "AdamW", "AdamW-TRACER"]
    assert optimizers.chosen(compared, []) == compared
    with pytest.raises(LabError, match="row 'SGD-TRACE'.*SGD-TRACER"):
        optimizers.chosen(compared, ["SGD-TRACE"])


def test_a_bench_that_is_interrupted_leaves_what_it_has_measured(tmp_path, monkeypatch, capsys):
    """Two rounds of times, printed and written, and no memory."""
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(measurement, "peak", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    out = tmp_path / "steps.json"
    with pytest.raises(KeyboardInterrupt):
        optimizers.steps(
            model="cnn", batch_size=2, rounds=2, device="cpu", precision="fp32", out=out, console=Console(),
            names=["SGD-TRACER"],
        )  # fmt: skip
    result, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert {name: len(times) for name, times in result["seconds"].items()} == {"SGD": 2, "SGD-TRACER": 2}
    for name, times in result["seconds"].items():
        row = next(line for line in printed.splitlines() if f" {name} " in line)
        ratio = statistics.median(times) / statistics.median(result["seconds"]["SGD"])
        cells = [cell.strip() for cell in row.strip("│ ").split("│")]
        assert [cells[1], *cells[3:]] == [f"{statistics.median(times) * 1e3:.1f}", f"{ratio:.2f}", "–", "–", "–"]


def test_what_is_a_graph_has_a_base_that_is_one():
    """Or there would be nothing to compare it with; Adam's steps are counted on the device then."""
    compared = optimizers.rows(torch.device("cuda"), twice=True)
    captured = {name for name, row in compared.items() if row.graph}
    assert {compared[name].base for name in captured} == {"SGD", "AdamW"} <= captured
    assert {"SGD-TRACER", "AdamW-TRACER"} <= captured


def test_a_gpu_is_spared_what_takes_minutes_to_compile():
    """Two kernels are there already, and faster."""
    here, there = (set(optimizers.rows(device, twice=True)) for device in (CPU, torch.device("cuda")))
    assert here - there == {"SGD-TRACER, compiled", "AdamW-TRACER, compiled"}
    assert there - here == {"SGD-TRACER, foreach", "AdamW-TRACER, foreach"}


def test_the_encoders_size():
    with torch.device("meta"):
        net = Transformer(30_522, 256, 768, 12, heads=12, twice=False)
    assert sum(p.numel() for p in net.parameters()) == pytest.approx(109e6, rel=0.01)


@pytest.mark.parametrize("name", ["SAM of pytorch_optimizer", "IVON", "AdamW, schedule-free"])
def test_peers_train(name):
    """Where they are installed, their step moves the weights, and not far."""
    compared = optimizers.rows(CPU, twice=False)
    if name not in compared:
        pytest.skip("not installed")
    step, net = optimizers.build(compared[name], "transformer", 4, CPU, "fp32")
    before = torch.nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    step()
    moved = torch.nn.utils.parameters_to_vector(net.parameters()).detach() - before
    assert 0 < moved.abs().max() < 1


def test_runs_side_by_side(tmp_path, capsys, monkeypatch):
    """What is printed is what was measured: seconds of 50,000 examples, for each run."""
    monkeypatch.setenv("COLUMNS", "120")
    made = throughput.throughput(
        model="mlp", batch_size=8, rounds=3, device="cpu", precision="bf16", kernels="torch", out=tmp_path / "b.json",
        console=Console(), steps=3, widths=(1, 2),
    )  # fmt: skip
    assert json.loads((tmp_path / "b.json").read_text()) == made
    printed = capsys.readouterr().out
    for method, times in made["seconds_per_epoch_and_run"].items():
        assert [len(times[width]) for width in ("1", "2")] == [3, 3]
        alone, two = (statistics.median(times[width]) for width in ("1", "2"))
        assert f"│ {method} " in printed
        assert f"{alone:.3f} (1.00×)" in printed
        assert f"{two:.3f} ({alone / two:.2f}×)" in printed


def test_an_unknown_model_is_refused(capsys):
    assert cli.main(["bench", "estimators", "--model", "resnet21"]) == 1
    assert "resnet20" in capsys.readouterr().err
    with pytest.raises(LabError, match="resnet20"):
        estimators.estimators(
            model="resnet21", batch_size=1, micro_batch=1, rounds=1, device="cpu", out=None, console=None
        )


def test_the_naive_estimator_is_the_same_estimator():
    """Else the comparison with it would say nothing."""
    torch.manual_seed(0)
    model = Transformer(words=20, length=4, width=8, layers=1).double()
    x, y = torch.randint(20, (5, 4)), torch.randint(estimators.CLASSES, (5,))
    with Recording(model) as recording:
        loss = torch.nn.functional.cross_entropy(model(x), y)
    at = Evaluation(loss, list(model.parameters()), recording)
    assert relative_error(estimators.naive_per_example(model, x, y)(at), per_example(at)) < 1e-10


def test_rows_are_measured_in_turn():
    order = []
    steps = {name: (lambda name=name: order.append(name)) for name in "ab"}
    seconds = measurement.seconds_of(steps, 3, CPU)
    assert order == ["a", "b"] * 5
    assert [len(times) for times in seconds.values()] == [3, 3]


def test_rows_take_turns_step_by_step_on_a_cpu(monkeypatch):
    """A measurement is the mean of its steps: 1 and 3 s here, by a clock that the steps set forward."""
    now, order = [0.0], []

    def taking(name, seconds):
        order.append(name)
        now[0] += seconds

    monkeypatch.setattr(measurement.time, "perf_counter", lambda: now[0])
    steps = {"a": lambda: taking("a", 1.0), "b": lambda: taking("b", 3.0)}
    assert measurement.seconds_of(steps, 2, CPU, times=4) == {"a": [1.0, 1.0], "b": [3.0, 3.0]}
    assert order == ["a", "b"] * 16


def test_peak_memory_is_what_torch_allocates():
    """4 MB live on while 8 more come and go; what was there before is not counted."""
    before = torch.zeros(1_000_000)

    def step():
        small = before + 1
        torch.zeros(2_000_000)
        torch.zeros(1_000_000)
        return small

    assert measurement.peak(step, CPU) == pytest.approx(12e6, rel=0.01)


def test_sizes_are_printed_and_written_as_measured(tmp_path, monkeypatch, capsys):
    """Small nets in the place of the large ones: every case has its ratio, in its row."""
    monkeypatch.setattr(scaling, "WIDTHS", ("wrn-10-1", "wrn-10-2"))
    monkeypatch.setattr(scaling, "DEPTHS", ("resnet8", "resnet14"))
    monkeypatch.setenv("COLUMNS", "140")
    out = tmp_path / "sizes.json"
    words = ["bench", "sizes", "--rounds", "1", "--batch-size", "4", "--device", "cpu", "--out", str(out)]
    assert cli.main(words) == 0
    printed, cases = capsys.readouterr().out, json.loads(out.read_text())["cases"]
    expected = [("width", "wrn-10-1", 4), ("width", "wrn-10-2", 4), ("depth", "resnet8", 4), ("depth", "resnet14", 4)]
    expected += [("batch", "resnet8", size) for size in (1, 4, 16, 32)]
    assert [(case["family"], case["model"], case["batch_size"]) for case in cases] == expected
    rows = [line.strip("│ ").split("│") for line in printed.splitlines() if line.startswith("│")]
    for row, case in zip(rows, cases, strict=True):
        (plain,), (ours,) = (case["seconds"][name] for name in scaling.COMPARED)
        assert [cell.strip() for cell in row[3:]] == [f"{plain * 1e3:.1f}", f"{ours * 1e3:.1f}", f"{ours / plain:.2f}"]


def test_sizes_as_cuda_graphs_stand_in_a_column_of_their_own():
    case = {"family": "width", "model": "wrn-16-1", "batch_size": 32}
    case |= {"seconds": {"SGD": [1.0], "SGD-TRACER": [3.0]}, "graphs": {"SGD": [0.5, 0.4, 9.0], "SGD-TRACER": [1.0]}}
    hardware = {"gpu": "a GPU", "threads": 1}
    table = scaling._table({"precision": "fp32", "rounds": 1, "hardware": hardware, "cases": [case]})
    shown = {str(column.header): list(column.cells) for column in table.columns}
    assert shown["ratio"] == ["3.00"]
    assert shown["as CUDA graphs"] == ["2.00"]


def test_loading_reads_every_image_once_in_both_ways(tmp_path, capsys, monkeypatch):
    """And the two give the same batches."""
    monkeypatch.setattr(loading, "SIDE", 16)
    given = loading.loading(batch_size=8, rounds=2, device="cpu", out=tmp_path / "l.json", console=Console(), images=20)
    assert {name: len(times["of_cores"]) for name, times in given["ways"].items()} == {
        "a plain DataLoader": 2,
        "gtracer train": 2,
    }
    assert json.loads((tmp_path / "l.json").read_text())["images"] == 20
    assert "20 JPEGs of 16 × 16" in capsys.readouterr().out
    paths = loading._make_up(tmp_path, 3)
    ours = Pictures((16, 16), *IMAGENET)
    for place, plain in enumerate(loading.Plain(paths)[i] for i in range(3)):
        torch.testing.assert_close(ours(paths[place]), plain)


def test_fine_tuning_is_printed_and_written_as_measured(tmp_path, monkeypatch, capsys):
    """Every row over its own base; memory in copies of what that base trains."""
    memory = iter(range(1_000_000, 100_000_000, 1_000_000))
    monkeypatch.setattr(measurement, "peak", lambda step, device, first: next(memory))
    monkeypatch.setenv("COLUMNS", "140")
    out = tmp_path / "bench.json"
    words = ["bench", "fine-tuning", "--model", "llama-tiny", "--rounds", "1", "--batch-size", "2", "--device", "cpu"]
    assert cli.main([*words, "--out", str(out)]) == 0
    printed, result = capsys.readouterr().out, json.loads(out.read_text())
    assert set(result["seconds"]) == set(fine_tuning.rows(CPU))
    for name, (seconds,) in result["seconds"].items():
        row = next(line for line in printed.splitlines() if f"│ {name} " in line)
        cells = [cell.strip() for cell in row.strip("│ ").split("│")]
        base = result["over"][name]
        more = (result["peak_memory"][name] - result["peak_memory"][base]) / result["trained"][base]
        ratio = seconds / result["seconds"][base][0]
        memory_here = f"{result['peak_memory'][name] / 1e6:.0f}"
        assert [cells[0], cells[1], *cells[3:]] == [
            name,
            f"{seconds * 1e3:.1f}",
            f"{ratio:.3f}",
            memory_here,
            f"{more:+.2f}",
        ]
    assert result["trained"]["LoRA, AdamW"] == 2 * result["trained"]["LoRA in bfloat16, AdamW"]


@pytest.mark.parametrize("name", fine_tuning.rows(CPU))
def test_fine_tuning_makes_real_steps(name):
    """Of the weights that the row names, in its types; only they move."""
    row = fine_tuning.rows(CPU)[name]
    made = []
    found = fine_tuning.network
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fine_tuning, "network", lambda *args: made.append(found(*args)) or made[-1])
        step, trained = fine_tuning.build(row, "llama-tiny", 2, CPU)
    before = [p.detach().clone() for p in made[0].parameters()]
    step()
    assert {p.dtype for p in trained} == {row.weights if row.adapters is None else row.adapters}
    ours = set(map(id, trained))
    for p, then in zip(made[0].parameters(), before, strict=True):
        assert torch.equal(p, then) == (id(p) not in ours) or p.dtype == torch.bfloat16  # some round to what they were
    assert any(not torch.equal(p, then) for p, then in zip(made[0].parameters(), before, strict=True))
    assert (row.adapters is None) == (len(ours) == len(before))


def test_adapters_are_lora():
    """W + 2BA, which is what α = 2r gives."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(5, 7)
    adapted = fine_tuning.Adapted(layer, 3, torch.float32)
    torch.nn.init.normal_(adapted.up)
    x = torch.randn(4, 5)
    expected = torch.nn.functional.linear(x, layer.weight + 2 * adapted.up @ adapted.down, layer.bias)
    torch.testing.assert_close(adapted(x), expected)
