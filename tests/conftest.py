"""What every test starts from."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)
