"""The command in a process of its own, and waiting for what it does."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

SECONDS = 300  # for what takes a few, on a machine that does ten other things


@contextmanager
def started(*words: str, module: str = "gtracer", **options) -> Iterator[subprocess.Popen]:
    """`python -m gtracer …` in a session of its own: its group can be sent signals. At the end none of it is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "300"},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        process.stderr.close()


def ended(process: subprocess.Popen) -> tuple[str, str]:
    """Its output and its errors, once it has come to an end."""
    return process.communicate(timeout=SECONDS)


def until(condition: Callable[[], object]) -> None:
    """Wait for it."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def torchrun(*words: str):
    """`torchrun … gtracer`, two gloo processes."""
    return started("--standalone", "--nproc-per-node", "2", "-m", "gtracer", *words, module="torch.distributed.run")


def finished(*words: str) -> tuple[int, str, str]:
    """The return code, output and errors of `torchrun`."""
    with torchrun(*words) as process:
        out, error = ended(process)
    return process.returncode, out, error
