"""What every test starts from."""

import multiprocessing
import os
import signal
import sys

import pytest
import torch

# The problems are tiny: a second thread costs more than it brings, and fights over the cores with other processes.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Tests of a GPU share one, and measure its memory: all in this process."""
    marks = config.option.markexpr
    return 0 if "gpu" in marks and "not gpu" not in marks else None


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _ctrl_c():
    """Python's own handler, here and in the processes that a test starts: a job in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _gradients():
    """A test that leaves them off fails by itself, and no other with it."""
    yield
    left = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert left


@pytest.fixture(autouse=True)
def _modules(tmp_path_factory):
    """A module that a test has written and imported is not the next test's of the same name."""
    before, written = set(sys.modules), str(tmp_path_factory.getbasetemp())
    yield
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(written):
            del sys.modules[name]


@pytest.fixture
def children():
    """A function: the processes that the test has started and that are alive. Those of other tests may be too."""
    before = set(multiprocessing.active_children())
    return lambda: [process for process in multiprocessing.active_children() if process not in before]
