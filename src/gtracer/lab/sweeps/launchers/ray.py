"""Runs on a Ray cluster. Records come back by the network: the machines need gtracer and the data, no common disk."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gtracer.lab import files
from gtracer.lab.config import Config
from gtracer.lab.errors import LabError
from gtracer.lab.results.record import NAME
from gtracer.lab.sweeps.launchers.local import RETRIES, Event, Job, Process, failure_of

LOG = "ray.log"
GONE_AFTER = "20"  # seconds without an answer; Ray's own 60 keep one waiting
GRACE = 10.0  # seconds for the farewell to a cluster, which may not be there any more


@dataclass(frozen=True)
class Ray:
    """Trains runs as tasks of a Ray cluster.

    Attributes:
        address: Of the cluster; without one, a cluster of this machine alone is started for the sweep.
        cpus: Cores of a run; Ray makes as many at a time as fit.
        gpus: GPUs of a run, or a part of one.
        retries: How often a run is tried again when its process or machine dies. On the same machine it goes on, on
            another it starts again.
    """

    address: str | None = None
    cpus: float = 1
    gpus: float = 0
    retries: int = RETRIES

    def __call__(self, jobs: list[Job]) -> Iterator[Event]:
        """Train all of them. Whoever closes the generator takes the tasks off the cluster."""
        if any(job.model for job in map(Job._make, jobs)):
            raise LabError("--models: Ray brings records back, no models; use --engine local or cuda-graphs")
        # A process of its own talks to Ray: when the cluster goes away, Ray ends that process without a word.
        log = jobs[0][1].parent / LOG
        driver = Process(_drive, self, [config for config, *_ in jobs], _mark(jobs), log)
        try:
            _wait_for(driver, self.address, log)
            for done in range(len(jobs)):
                index, failure, content = _receive(driver, f"{done} of {len(jobs)}", self.address, log)
                config, folder, *_ = jobs[index]
                if content is not None:
                    files.write(folder / NAME, content)
                yield Event(config, ended=True, failure=failure)
        finally:
            driver.interrupt()
            driver.end(GRACE)


def _wait_for(driver: Process, address: str | None, log: Path) -> None:
    """Until Ray is there."""
    try:
        trouble: str | None = driver.receive()
    except EOFError:
        trouble = f"no Ray cluster at {address!r}: is it running, and if it wants a token, is RAY_AUTH_MODE=token set?"
        trouble += f" ({log} has more)"
    if trouble is not None:
        raise LabError(trouble)


def _receive(driver: Process, done: str, address: str | None, log: Path) -> Any:
    try:
        return driver.receive()
    except EOFError as error:
        where = f"at {address} " if address else ""
        raise LabError(
            f"the Ray cluster {where}went away (see {log}); {done} runs came back and are kept: give the same command "
            "again to go on"
        ) from error


def _mark(jobs: list[Job]) -> str:
    """A name for this sweep on the cluster's machines, the same when it is started again."""
    where = f"{platform.node()}:{jobs[0][1].parent.resolve()}"
    return hashlib.sha256(where.encode()).hexdigest()[:12]


def _drive(pipe: Connection, wanted: Ray, configs: list[Config], mark: str, log: Path) -> None:
    """Hand the runs to Ray and send back what they bring."""
    with log.open("ab") as file:  # Ray's own words, from C++ too
        for output in (1, 2):
            os.dup2(file.fileno(), output)
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", GONE_AFTER)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ModuleNotFoundError:
        pipe.send("--engine ray needs ray: pip install 'gtracer-optim[ray]'")
        return
    # Where there is no cluster, Ray raises one of a dozen errors, or ends the process: one end for all of them.
    ray.init(address=wanted.address, log_to_driver=False, logging_level=logging.CRITICAL, include_dashboard=False)
    pipe.send(None)
    task = ray.remote(_train).options(num_cpus=wanted.cpus, num_gpus=wanted.gpus, max_retries=wanted.retries)
    waiting = {task.remote(config, mark): index for index, config in enumerate(configs)}
    while waiting:
        (done,), _ = ray.wait(list(waiting), num_returns=1)
        index = waiting.pop(done)
        try:
            pipe.send((index, *ray.get(done)))
        except ray.exceptions.LocalRayletDiedError:  # the cluster's end at this machine
            return
        except ray.exceptions.RayError as error:
            pipe.send((index, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}", None))
    ray.shutdown()


def _train(config: Config, mark: str) -> tuple[str | None, bytes | None]:
    """On one of the cluster's machines: why it failed, if it did, and the record."""
    folder = Path(tempfile.gettempdir()) / f"gtracer-{mark}" / config.identity.folder
    failure = failure_of(Job(config, folder), [])
    content = files.read(folder / NAME) if (folder / NAME).exists() else None
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # not the last
        folder.parent.rmdir()
    return failure, content
