"""A small study, its runs, and what they leave in a folder."""

import os

import torch
from rich.console import Console

from gtracer.lab.config import Config
from gtracer.lab.results.record import NAME
from gtracer.lab.sweeps.launchers.local import Local
from gtracer.lab.sweeps.study import Study
from gtracer.lab.training.trainer import train

QUIET = Console(quiet=True)


STUDY = {
    "title": "small",
    "base": {"task": "digits", "width": 16, "epochs": 3, "label_noise": 0.5, "batch_size": 256, "delta": 0.01},
    "seeds": 2,
    "methods": {"SGD": {"optimizer": "sgd"}, "TRACER": {"optimizer": "sgd-tracer", "rho": 0.003}},
}


TWO = Local(processes=2)


def study(**changes) -> Study:
    return Study.from_mapping(STUDY).changed(**changes)


def straight(config: Config, folder) -> dict:
    """The curves of the run alone, in this process, with a worker's number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    try:
        return train(config, folder / f"straight-{config.folder}", []).curves
    finally:
        torch.set_num_threads(threads)


def stamps(folder) -> dict:
    return {path.parent.name: path.stat().st_mtime_ns for path in folder.glob(f"*/{NAME}")}
