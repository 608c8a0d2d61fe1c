"""Sweeps on a Ray cluster of two workers, which may die or go away."""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from gtracer import cli
from gtracer.lab.results.record import NAME, Record
from gtracer.lab.sweeps.launchers.ray import Ray
from gtracer.lab.sweeps.study import Study
from gtracer.lab.sweeps.sweep import RunsFolder, sweep
from support.commands import until
from support.places import SUPPORT
from support.studies import QUIET, TWO, stamps, straight, study

pytest.importorskip("ray")


def descendants(ancestor: int) -> dict[int, str]:
    """The processes below one, and their names."""
    parents, names = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int(path.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            names[int(path.name)] = path.joinpath("cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
        except OSError:  # ended meanwhile
            continue
    found = {ancestor}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: names[pid] for pid in found if pid in names}


def kill(processes) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """Its process. The token keeps others out, and nothing is written to the home folder."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "3")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("RAY_TMPDIR", tempfile.gettempdir())  # the names of sockets must be short
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    script = SUPPORT / "ray_cluster.py"
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    watchdog = threading.Timer(300, os.killpg, (process.pid, signal.SIGKILL))
    watchdog.start()
    try:
        process.address = next(line.strip() for line in process.stdout if ":" in line)
        yield process
    finally:
        below = descendants(process.pid)
        process.stdin.close()
        process.stdout.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        watchdog.cancel()
        kill(below)  # none may stay behind
        process.wait()


def test_the_same_records_through_the_death_of_a_worker(cluster, tmp_path):
    def kill_the_first(cells):
        below = descendants(cluster.pid)
        assert len([name for name in below.values() if name.endswith("raylet")]) == 2
        threading.Thread(target=kill_a_task, daemon=True).start()
        yield from Ray(cluster.address)(cells)

    def kill_a_task():
        until(lambda: any("_train" in name for name in descendants(cluster.pid).values()))
        killed.append(next(pid for pid, name in descendants(cluster.pid).items() if "_train" in name))
        os.kill(killed[0], signal.SIGKILL)

    killed: list[int] = []
    mine = study(epochs=40)
    sweep(mine, tmp_path / "out", kill_the_first, QUIET)
    assert killed
    for config in mine.configs():
        assert Record.read(tmp_path / "out" / config.identity.folder).curves == straight(config, tmp_path)
    before = stamps(tmp_path / "out")
    sweep(mine, tmp_path / "out", Ray(cluster.address), QUIET)
    assert stamps(tmp_path / "out") == before


def test_the_cluster_goes_away(cluster, tmp_path, capsys):
    """One line; what came back is kept, and the rest is made elsewhere."""
    mine = study(epochs=2)
    long = mine.to_mapping()
    long["methods"]["long"] = {"optimizer": "sgd", "epochs": 100_000}
    Study.from_mapping(long).changed(seeds=1).write(tmp_path)

    def go_away():
        until(lambda: len(list((tmp_path / "out").glob(f"*/{NAME}"))) == 2)
        kill(descendants(cluster.pid))

    leaving = threading.Thread(target=go_away)
    leaving.start()
    words = ["sweep", str(tmp_path / "study.json"), "--out", str(tmp_path / "out")]
    assert cli.main([*words, "--engine", "ray", "--address", cluster.address]) == 1
    leaving.join()
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"the Ray cluster at {cluster.address} went away" in error
    assert "2 of 3 runs came back and are kept" in error
    before = stamps(tmp_path / "out")
    sweep(mine.changed(seeds=1), tmp_path / "out", TWO, QUIET)
    assert stamps(tmp_path / "out") == before
    assert all(record.finished for record in RunsFolder.of(tmp_path / "out").all())


def test_no_cluster(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "1")
    monkeypatch.setenv("RAY_gcs_server_request_timeout_seconds", "1")
    study().write(tmp_path)
    words = ["sweep", str(tmp_path / "study.json"), "--out", str(tmp_path / "out")]
    assert cli.main([*words, "--engine", "ray", "--address", "127.0.0.1:9"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("gtracer: no Ray cluster at '127.0.0.1:9'")
    assert error.count("\n") == 1
