"""What every test starts from."""

import os

import pytest
import torch

# The problems are tiny: a second thread costs more than it brings, and fights over the cores with other processes.
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
