"""The command in a process of its own, and waiting for what it does."""

import os
import subprocess
import sys
import time


def started(*words, **options) -> subprocess.Popen:
    """The command in a process of its own, in a session of its own: its group can be sent signals."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "300"}
    return subprocess.Popen(
        [sys.executable, "-m", "gtracer", *words],
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


def until(condition, seconds=60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
