"""The command line: one sub-command is one call of a function."""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any

from gtracer import __version__

try:
    from gtracer.lab import files
    from gtracer.lab.config import FINE_TUNING, Config, name_of, parsed, place
    from gtracer.lab.config import whole as whole_options
    from gtracer.lab.errors import Interrupted, LabError
    from gtracer.lab.inference import commands as inference
    from gtracer.lab.parser import Parser, at_least_one, at_least_zero, integer, number, shortened, whole
except ModuleNotFoundError as missing:  # torch alone is installed with the library
    sys.exit(f"gtracer: this needs {missing.name}: pip install 'gtracer-optim[lab]'")


SAID = (
    "data",
    "holdout",
    "model",
    "clip",
    "drop",
    "image_size",
    "weights",
    "loss",
    "ema",
    "sharpness",
)  # options that say themselves what happens without


def parser() -> argparse.ArgumentParser:
    """Every sub-command with its defaults and an example."""
    top = Parser(prog="gtracer", description="G-TRACER: train to a flat minimum.")
    top.add_argument("--version", action="version", version=f"gtracer {__version__}")
    commands = top.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_train(commands)
    _add_compare(commands)
    inference.add(commands)
    _add_sweep(commands)
    _add_tune(commands)
    _add_find_rho(commands)
    _add_bench(commands)
    _add_report(commands)
    _add_records(commands)
    return top


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="compare SGD, SAM and SGD-TRACER on digits with 50%% label noise",
        description="Train two nets with SGD, SAM and SGD-TRACER on digits with 50% label noise; print a "
        "table of the test accuracies and draw the curves. Takes about a minute.",
        epilog="example: gtracer demo --seeds 5",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--seeds", type=at_least_one, default=3, metavar="N", help="number of runs for each optimiser")
    demo.add_argument("--epochs", type=at_least_one, default=50, metavar="N", help="passes over the data")
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="folder of records and plot")
    demo.set_defaults(run=_demo)


def _add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train one model and write its record",
        description="Train one model with one optimiser, and write its record. Until it ends it has a checkpoint too.",
        epilog="example: gtracer train --task digits --label-noise 0.5 --optimizer sgd-tracer --rho 0.012 --seed 1",
    )
    train.add_argument(
        "--resume", type=Path, metavar="DIR", help="continue the run in this folder; takes no other option but --data"
    )
    train.add_argument("--tensorboard", action="store_true", help="write scalars for TensorBoard too")
    _add_configuration(train, "folder of the run (default: runs/ and a name made of its options)")
    train.set_defaults(run=_train)


def _add_compare(commands: Any) -> None:
    compare = commands.add_parser(
        "compare",
        help="compare an optimiser, SAM and TRACER on your own data, with a report",
        description="Train with an optimiser alone, with SAM and with TRACER, which adapts ρ by itself. Held-out data "
        "chooses each run's epoch, and then the method. The accuracy that this gives on test data is printed.",
        epilog="example: gtracer compare photos --seeds 5",
    )
    compare.add_argument("examples", metavar="DATA", help="as gtracer train --task takes it")
    compare.add_argument("--seeds", type=at_least_one, default=3, metavar="N", help="runs of each method (default: 3)")
    _add_configuration(compare, "folder of the runs (default: runs/compare- and the data's name)")
    compare.set_defaults(run=_compare)


def _add_sweep(commands: Any) -> None:
    from gtracer.lab.sweeps.study import shipped

    sweep = commands.add_parser(
        "sweep",
        help="run a study: methods × settings × seeds",
        description="Make the missing runs of a study, several in parallel. Finished runs are not repeated, and "
        "interrupted ones continue. gtracer report makes a page of the records.",
        epilog="example: gtracer sweep table1-digits --seeds 3",
    )
    sweep.add_argument("study", metavar="STUDY", help=f"a YAML or JSON file, or one of {', '.join(shipped())}")
    sweep.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the records (default: runs/ and the study's name)"
    )
    sweep.add_argument("--seeds", type=at_least_one, metavar="N", help="runs for each cell (default: the study's)")
    sweep.add_argument("--epochs", type=at_least_one, metavar="N", help="passes over the data (default: the study's)")
    sweep.add_argument(
        "--settings",
        nargs="+",
        default=[],
        metavar="LABEL",
        help="run only these settings of the study (default: all)",
    )
    sweep.add_argument(
        "--models", action="store_true", help="keep each run's model in its folder, as gtracer train does"
    )
    for item in fields(Config):
        if item.name in ("data", "device", "precision", "kernels"):
            text = item.metadata["help"] + ("" if item.name == "data" else " (default: the study's)")
            sweep.add_argument(f"--{item.name}", metavar="X", help=text)
    _add_engine(sweep, "--engine")
    sweep.set_defaults(run=_sweep)


def _add_tune(commands: Any) -> None:
    tune = commands.add_parser(
        "tune",
        help="search ρ, δ, β on held-out training data",
        description="Search an optimiser's hyper-parameters by the accuracy on held-out training data, whose labels "
        "are as noisy as the rest. Test data chooses nothing. The range of ρ comes from short branches of a run, as "
        "gtracer find-rho makes them. Options that you set are not searched.",
        epilog="example: gtracer tune --task digits --label-noise 0.5 --optimizer sgd-tracer --delta 0.01 --trials 20",
    )
    tune.add_argument(
        "--trials", type=at_least_one, default=20, metavar="N", help="configurations to try (default: 20)"
    )
    tune.add_argument("--seeds", type=at_least_one, default=1, metavar="N", help="runs of a trial (default: 1)")
    tune.add_argument(
        "--search",
        action="append",
        default=[],
        metavar="NAME=LOW:HIGH",
        help="an option to search; may be repeated (default: for TRACER rho/delta, delta, beta; for SAM rho)",
    )
    tune.add_argument(
        "--finder",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="find a range for ρ first, with short branches (default: yes, unless a range is given)",
    )
    tune.add_argument("--show-test", action="store_true", help="also show the accuracy on test data")
    _add_configuration(tune, "folder of the trials (default: runs/tune- and a name made of the options)")
    _add_engine(tune, "--sweep-engine")  # --engine is the optimiser's
    tune.set_defaults(run=_tune)


def _add_find_rho(commands: Any) -> None:
    find = commands.add_parser(
        "find-rho",
        help="recommend a ρ, from short branches of a run",
        description="Train a short branch of the run for each of several values of ρ and compare them on held-out "
        "training data. Print which to use and why, and write the curve as JSON and PNG. Test data is not used.",
        epilog="example: gtracer find-rho --task digits --label-noise 0.5 --optimizer sgd-tracer",
    )
    find.add_argument(
        "--steps", type=at_least_one, metavar="N", help="steps of a branch (default: a fifth of the run's)"
    )
    find.add_argument(
        "--candidates",
        nargs="+",
        type=at_least_zero,
        metavar="X",
        help="values of ρ (default: 1e-5 to 0.03 for TRACER, 0.01 to 2 for SAM)",
    )
    _add_configuration(find, "folder of the curve (default: runs/rho- and a name made of the options)")
    find.set_defaults(run=_find_rho)


def _add_configuration(command: argparse.ArgumentParser, out: str) -> None:
    """A run's options, one by one and from a file."""
    command.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML or JSON to start from; other options override it"
    )
    command.add_argument("--out", type=Path, metavar="DIR", help=out)
    options = command.add_argument_group("the run")
    for item in fields(Config):
        _add_option(options, item)


def _add_engine(command: argparse.ArgumentParser, flag: str) -> None:
    from gtracer.lab.sweeps.launchers.local import RETRIES

    group = command.add_argument_group("where the runs are made")
    group.add_argument(
        flag,
        dest="where",
        type=_renamed({"side-by-side": "cuda-graphs"}),
        choices=["local", "cuda-graphs", "ray"],
        default="local",
        help="local: processes; cuda-graphs: one process with its runs as CUDA graphs; ray: a cluster (default: local)",
    )
    group.add_argument(
        "--workers",
        type=at_least_one,
        metavar="N",
        help="parallel runs (default: one for each GPU or core; cuda-graphs: 8)",
    )
    group.add_argument(
        "--processes",
        type=at_least_one,
        default=1,
        metavar="N",
        help="cuda-graphs: processes that share the device and the runs; for many short runs (default: 1)",
    )
    group.add_argument(
        "--address", metavar="HOST:PORT", help="ray: address of the cluster (default: a new one on this machine)"
    )
    group.add_argument(
        "--cpus", type=at_least_zero, default=1, metavar="N", help="ray: cores for each run (default: 1)"
    )
    group.add_argument(
        "--gpus",
        type=at_least_zero,
        default=0,
        metavar="N",
        help="ray: GPUs for each run, fractions allowed (default: 0)",
    )
    group.add_argument(
        "--retries",
        type=whole,
        default=RETRIES,
        metavar="N",
        help=f"number of times to retry a run whose process dies (default: {RETRIES})",
    )


def _renamed(older: dict[str, str]) -> Callable[[str], str]:
    """Take older names for the present ones."""
    return lambda word: older.get(word, word)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="what a step costs, measured side by side",
        description="estimators: time and memory of a training step with every estimator of the curvature, as ratios "
        "to the gradient magnitude's, measured in turn in one run; on a GPU also with the step as a CUDA graph. "
        "throughput: seconds of an epoch when several runs share the device. steps: a step of SGD, AdamW, SAM, "
        "TRACER and, where they are installed, of pytorch_optimizer's SAM, ivon and schedulefree. scaling: the time of "
        "SGD-TRACER's step over SGD's, for nets wider and deeper, and larger batches. fine-tuning: a step of AdamW, "
        "SAM and TRACER on a language model in bfloat16, of all weights and of LoRA adapters. loading: reading 10,000 "
        "JPEGs of 224 pixels as training does, beside a plain DataLoader.",
        epilog="example: gtracer bench estimators --model transformer --rounds 10",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    choices = ["estimators", "throughput", "steps", "scaling", "fine-tuning", "loading"]
    renamed = _renamed({"side-by-side": "throughput", "sizes": "scaling"})
    bench.add_argument("what", type=renamed, choices=choices, help="what to compare")
    models = "resnet20-gn, resnet20 or transformer; steps: resnet20, cnn, transformer, wrn-28-10 or encoder-110m; "
    models += "fine-tuning: llama-134m, llama-1b or llama-tiny"
    bench.add_argument("--model", metavar="NAME", help=models, default=argparse.SUPPRESS)
    sizes = "examples a step (128; fine-tuning: 32)"
    bench.add_argument("--batch-size", type=at_least_one, metavar="N", help=sizes, default=argparse.SUPPRESS)
    bench.add_argument(
        "--micro-batch", type=at_least_one, default=32, metavar="N", help="estimators: examples of a micro-batch"
    )
    bench.add_argument("--precision", default="fp32", choices=["fp32", "bf16"], help="all but estimators")
    bench.add_argument("--kernels", default="torch", choices=["torch", "compiled", "fused"], help="throughput")
    bench.add_argument("--rounds", type=at_least_one, default=5, metavar="N", help="steps of each, taken in turn")
    only = "steps: these rows and those that they are compared with, by the names in the table"
    bench.add_argument("--rows", nargs="+", default=[], metavar="NAME", help=only)
    bench.add_argument("--device", default="auto", metavar="NAME", help="cpu, cuda or auto")
    bench.add_argument("--out", type=Path, metavar="FILE", help="write all numbers as JSON")
    bench.set_defaults(run=_bench)


def _add_report(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="a page, figures and tables of a folder of runs",
        description="Read the records in a folder, or in an archive of one, and write a page (index.html), figures "
        "(PNG, SVG) and tables (Markdown, LaTeX, CSV). Nothing is trained; torch is not needed.",
        epilog="example: gtracer report runs/table1 -o report",
    )
    report.add_argument(
        "runs", type=Path, metavar="RUNS", help="folder that gtracer sweep or train wrote to, or what it was packed to"
    )
    report.add_argument(
        "-o", "--out", type=Path, metavar="OUT", help="folder to write to (default: report, in the folder of the runs)"
    )
    report.add_argument("--study", metavar="STUDY", help="a name or file (default: the one that made the records)")
    report.set_defaults(run=_report)


def _add_records(commands: Any) -> None:
    records = commands.add_parser(
        "records",
        help="pack a folder's records into one file, and unpack them",
        description="An archive (.jsonl.xz) holds a folder's records, and the study that made them, in one compressed "
        "file, a line for each. gtracer report takes it as it takes the folder. torch is not needed.",
    )
    actions = records.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    pack = actions.add_parser(
        "pack",
        help="write a folder's records into one file",
        description="Write the JSON files of a folder into one file. The folder stays; checkpoints and reports are not "
        "packed.",
        epilog="example: gtracer records pack runs/table1",
    )
    pack.add_argument("folder", type=Path, metavar="FOLDER", help="folder that gtracer sweep or train wrote to")
    pack.add_argument("-o", "--out", type=Path, metavar="FILE", help="archive to write (default: FOLDER.jsonl.xz)")
    pack.set_defaults(run=_pack)
    unpack = actions.add_parser(
        "unpack",
        help="restore the folder, or some of its runs",
        description="Restore the files of an archive, byte for byte. A run that was not finished starts over when it "
        "is resumed: checkpoints are not packed.",
        epilog="example: gtracer records unpack runs/table1.jsonl.xz",
    )
    unpack.add_argument("archive", type=Path, metavar="FILE", help="archive that gtracer records pack wrote")
    unpack.add_argument("runs", nargs="*", metavar="RUN", help="folders of single runs (default: all)")
    unpack.add_argument("-o", "--out", type=Path, metavar="FOLDER", help="where to (default: FILE without .jsonl.xz)")
    unpack.set_defaults(run=_unpack)


def _add_option(options: Any, item: Field[Any]) -> None:
    """A flag for a field of the configuration, which checks the value itself."""
    flag, text = f"--{item.name.replace('_', '-')}", item.metadata["help"]
    if item.name not in SAID:
        text += f" (default: {_shown(item.default)}"
        text += f"; for texts {FINE_TUNING[item.name]})" if item.name in FINE_TUNING else ")"
    if isinstance(item.default, bool):
        options.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
    elif item.name == "sharpness":
        options.add_argument(flag, type=_every, default=None, metavar="every=N", help=text)
    elif item.name == "betas":
        options.add_argument(flag, nargs=2, type=number, default=None, metavar="B", help=text)
    else:
        options.add_argument(
            flag, type=integer if item.name in whole_options() else str, default=None, metavar="X", help=text
        )


def _every(text: str) -> Any:
    return integer(text.removeprefix("every="))


def _shown(value: Any) -> str:
    if value is None:
        return "the optimiser's own"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _demo(chosen: argparse.Namespace) -> None:
    from gtracer.lab import demo

    demo.run(seeds=chosen.seeds, epochs=chosen.epochs, folder=chosen.out)


def _train(chosen: argparse.Namespace) -> None:
    from rich.console import Console

    from gtracer.lab.models import saved
    from gtracer.lab.training.callbacks import Callback, ProgressBar, TensorBoard
    from gtracer.lab.training.trainer import train
    from gtracer.lab.training.weights import best_epoch

    config, folder = _configured(chosen)
    console = Console(quiet=not _is_first())
    with ProgressBar(console, config.epochs) as bar:
        callbacks: list[Callback] = [bar]
        if chosen.tensorboard and _is_first():
            callbacks.append(TensorBoard(folder))
        record = train(config, folder, callbacks, resume=chosen.resume is not None, model=True)
    last, best, seconds = (record.summary()[key] for key in ("last", "best", "wall_time"))
    if record.metric == "accuracy":
        told = (f"test accuracy {last['test_accuracy']:.2%}", f"{best['test_accuracy']:.2%}")
    else:
        told = (f"test R² {last['test_r2']:.3f} (RMSE {last['test_rmse']:.4g})", f"{best['test_r2']:.3f}")
    console.out(
        f"{told[0]} at the last epoch, {told[1]} at the best ({best['epoch']}), {seconds:.0f} s: "
        f"{folder / 'record.json'}",
        highlight=False,
    )
    if (folder / saved.WEIGHTS).exists():
        chosen_by = "the best by held-out data" if record.holds_out else "the last"
        console.out(f"model of epoch {best_epoch(record)}, {chosen_by}: {folder / saved.WEIGHTS}", highlight=False)


def _compare(chosen: argparse.Namespace) -> None:
    from rich.console import Console

    from gtracer.lab.sweeps import comparison

    if chosen.task is not None:
        raise LabError(f"gtracer compare takes its data as {chosen.examples!r}: leave --task out")
    if chosen.seed is not None:
        raise LabError(f"seed = {chosen.seed} has no effect: seeds count from 0, --seeds says how many")
    chosen.task = chosen.examples
    asked = _recommended(chosen) | _asked(chosen)
    wanted = comparison.study(Config.from_mapping(asked), chosen.seeds, asked)
    folder = chosen.out or place(Path("runs"), f"compare-{name_of(chosen.task)}", f"compare-{Path(chosen.task).stem}")
    comparison.compare(wanted, folder, Console(), lambda problem: print(f"gtracer: {problem}", file=sys.stderr))


def _sweep(chosen: argparse.Namespace) -> None:
    from rich.console import Console

    from gtracer.lab.results import summary
    from gtracer.lab.results.statistics import Results
    from gtracer.lab.sweeps import study
    from gtracer.lab.sweeps.sweep import RunsFolder, sweep

    options = {name: getattr(chosen, name) for name in ("seeds", "epochs", "data", "device", "precision", "kernels")}
    wanted = study.load(chosen.study).changed(**options)
    folder = chosen.out or Path("runs") / Path(chosen.study).stem
    console = Console()
    try:
        sweep(wanted, folder, _engine(chosen), console, chosen.settings, chosen.models)
    finally:  # what there is of it, also when runs failed or were interrupted
        if files.is_folder(folder):
            console.print(summary.table(Results(wanted, RunsFolder.of(folder).all())))
            line = f"Runs in {folder}; a page of them: gtracer report {shlex.quote(str(folder))}"
            console.out(line, highlight=False)


def _tune(chosen: argparse.Namespace) -> None:
    from rich.console import Console

    from gtracer.lab.sweeps import tune

    config = _checked(chosen)
    given = [tune.Range.parse(text) for text in chosen.search]
    searched = tune.ranges(config, given)
    tune.check_ranges(config, searched)
    first: dict[str, float] = {}
    folder = chosen.out or config.place(Path("runs"), "tune-")
    console = Console()
    if chosen.finder and tune.wants_range(searched, given):
        searched, first = tune.narrowed(searched, config, tune.found(config, folder, console))
    tune.tune(
        config,
        searched,
        chosen.trials,
        chosen.seeds,
        folder,
        _engine(chosen),
        console,
        first=first,
        show_test=chosen.show_test,
    )


def _find_rho(chosen: argparse.Namespace) -> None:
    from gtracer.lab.sweeps import find

    config = _checked(chosen)
    folder = chosen.out or config.place(Path("runs"), "rho-")
    curve = find.find(config, folder, chosen.steps, chosen.candidates)
    print(f"{curve}\ncurve: {folder / find.FIGURE}")
    if curve.rho:
        print(f"train with it: gtracer train --rho {curve.rho:g} and the other options")


def _engine(chosen: argparse.Namespace) -> Any:
    from gtracer.lab.sweeps.launchers import cuda_graphs, local, ray

    if chosen.where == "local":
        return local.Local(chosen.workers, chosen.retries)
    if chosen.where == "cuda-graphs":
        runs = chosen.workers or cuda_graphs.WIDTH
        return cuda_graphs.Processes(chosen.processes, runs) if chosen.processes > 1 else cuda_graphs.CudaGraphs(runs)
    return ray.Ray(chosen.address, chosen.cpus, chosen.gpus, chosen.retries)


def _bench(chosen: argparse.Namespace) -> None:
    from rich.console import Console

    from gtracer.lab.benchmarks import estimators, fine_tuning, loading, optimizers, scaling, throughput

    common = {name: getattr(chosen, name) for name in ("rounds", "device", "out")}
    models = {"estimators": "resnet20-gn", "fine-tuning": "llama-134m"}
    common["model"] = getattr(chosen, "model", models.get(chosen.what, "resnet20"))
    common["batch_size"] = getattr(chosen, "batch_size", 32 if chosen.what == "fine-tuning" else 128)
    if chosen.what == "estimators":
        estimators.estimators(**common, micro_batch=chosen.micro_batch, console=Console())
    elif chosen.what == "loading":
        common.pop("model")
        loading.loading(**common, console=Console())
    elif chosen.what == "scaling":
        common.pop("model")
        scaling.scaling(**common, precision=chosen.precision, console=Console())
    elif chosen.what == "fine-tuning":
        fine_tuning.fine_tuning(**common, console=Console())
    elif chosen.what == "steps":
        optimizers.steps(**common, precision=chosen.precision, names=chosen.rows, console=Console())
    else:
        throughput.throughput(**common, precision=chosen.precision, kernels=chosen.kernels, console=Console())


def _report(chosen: argparse.Namespace) -> None:
    from gtracer.lab.results import archive, report
    from gtracer.lab.sweeps import study

    out = chosen.out or archive.folder_of(chosen.runs) / "report"
    wanted = study.load(chosen.study) if chosen.study else None
    page = report.write(chosen.runs, out, lambda problem: print(f"gtracer: {problem}", file=sys.stderr), wanted)
    print(f"Report: {page}")


def _pack(chosen: argparse.Namespace) -> None:
    from gtracer.lab.results import archive

    out = chosen.out or archive.archive_of(chosen.folder)
    others = archive.pack(chosen.folder, out)
    print(f"{len(archive.unpacked(out))} files in {out}, {out.stat().st_size:,} bytes")
    if others:
        print(f"not packed: {len(others)} other files, such as {others[0]}")


def _unpack(chosen: argparse.Namespace) -> None:
    from gtracer.lab.results import archive

    out = chosen.out or archive.folder_of(chosen.archive)
    print(f"{archive.unpack(chosen.archive, out, chosen.runs)} files in {out}")


def _configured(chosen: argparse.Namespace) -> tuple[Config, Path]:
    """The run's configuration and folder, from the options, a file, or the run to resume."""
    from gtracer.lab.results.record import Record
    from gtracer.lab.training import effects

    if chosen.resume is not None:
        given = _given(chosen)
        if given.keys() - {"data"} or chosen.config or chosen.out:
            raise LabError("--resume takes the run's own options from its record: leave the others out, but for --data")
        config = replace(Record.read(chosen.resume).config, **given)
        effects.check(config, given)
        return config, chosen.resume
    config = _checked(chosen)
    return config, chosen.out or config.place(Path("runs"))


def _checked(chosen: argparse.Namespace) -> Config:
    """The configuration, whose names are known and whose options all have an effect."""
    from gtracer.lab.sweeps import sweep
    from gtracer.lab.training import effects

    config = _configuration(chosen)
    sweep.check(config)
    effects.check(config, {name: getattr(config, name) for name in _asked(chosen)})
    return config


def _configuration(chosen: argparse.Namespace) -> Config:
    """What is asked for, on top of what suits data and model."""
    return Config.from_mapping(_recommended(chosen) | _asked(chosen))


def _recommended(chosen: argparse.Namespace) -> dict[str, Any]:
    from gtracer.lab.recipes import recipe

    return recipe(_asked(chosen))


def _asked(chosen: argparse.Namespace) -> dict[str, Any]:
    """The options, and the file that they override."""
    given = _given(chosen)
    if not chosen.config:
        return given
    Config.read(chosen.config)  # says what is wrong with it
    return (parsed(chosen.config) or {}) | given


def _given(chosen: argparse.Namespace) -> dict[str, Any]:
    return {f.name: getattr(chosen, f.name) for f in fields(Config) if getattr(chosen, f.name) is not None}


def _is_first() -> bool:
    """Whether this is the first, or only one, of the processes that torchrun has started."""
    return os.environ.get("RANK", "0") == "0"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; without one, say what there is. Returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        parser().print_help()
        return 0
    chosen = parser().parse_args(words)
    if isinstance(sys.stdout, io.TextIOWrapper):  # it may not have ρ, or all letters of a folder's name
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        chosen.run(chosen)
        sys.stdout.flush()
    except BrokenPipeError:  # who read the output, such as head, has gone; Python would say so at exit, too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (LabError, OSError) as error:
        print(f"gtracer: {shortened(str(error))}", file=sys.stderr)
        return 1
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not re.search("allocate|Storage size", str(error)):
            raise  # torch's own has no class on a CPU
        print("gtracer: there is not enough memory: a smaller model, or fewer examples at a time", file=sys.stderr)
        return 1
    except ModuleNotFoundError as missing:
        print(f"gtracer: this needs {missing.name}: pip install 'gtracer-optim[lab]'", file=sys.stderr)
        return 1
    except Interrupted as stopped:
        if _is_first():
            print(f"gtracer: interrupted; {stopped}", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print("gtracer: interrupted", file=sys.stderr)
        return 130
    return 0
