"""Processes of this machine: what keeps them from being started ends the wait for them."""

import pytest

from gtracer.lab.errors import LabError
from gtracer.lab.sweeps.launchers import local
from support.parallel_runs import RUNS


def test_processes_that_cannot_be_started(tmp_path, monkeypatch):
    """As without memory, beyond a limit of processes, or from a script that starts runs while it is imported."""

    def no_more(*arguments):
        raise OSError("no more\nprocesses")

    monkeypatch.setattr(local, "Process", no_more)
    cells = [local.Job(config, tmp_path / str(index)) for index, config in enumerate(RUNS[:3])]
    with pytest.raises(LabError, match=r"^cannot train in other processes: no more processes$"):
        list(local.Local(2)(cells))
