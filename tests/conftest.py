"""What every test starts from."""

import pytest
import torch

# The problems are tiny: a second thread costs more than it brings, and fights over the cores with other processes.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
