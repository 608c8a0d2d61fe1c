"""Saved at step 4, loaded into a fresh process, trained on: bit-identical to never having stopped."""

import os
import subprocess
import sys

import pytest
import torch

from support.places import SUPPORT
from support.resume import ALL, PROBLEMS, Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    for name in ALL:
        for problem in PROBLEMS:
            run = Run(name, problem)
            run.go_on(4)
            run.save(folder / f"{name}-{problem}-middle.pt")
            run.go_on(5)
            run.save(folder / f"{name}-{problem}-straight.pt")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, str(SUPPORT / "resume.py"), str(folder)], check=True, env=environment)
    return folder


def flat(value, path=""):
    """Every leaf of a nested state, with its path."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{path}.{key}").items()}
    if isinstance(value, list):
        return {k: v for key, item in enumerate(value) for k, v in flat(item, f"{path}.{key}").items()}
    return {path: value}


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("name", ALL)
def test_bit_identical(folder, name, problem):
    straight, resumed, middle = (
        flat(torch.load(folder / f"{name}-{problem}-{which}.pt", weights_only=True))
        for which in ("straight", "resumed", "middle")
    )
    assert straight.keys() == resumed.keys()
    for key, value in straight.items():
        same = torch.equal(value, resumed[key]) if isinstance(value, torch.Tensor) else value == resumed[key]
        assert same, key
    weights = [k for k in straight if k.startswith(".model") and "weight" in k]
    assert not all(torch.equal(straight[k], middle[k]) for k in weights)  # it did train on
