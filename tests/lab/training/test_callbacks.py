"""What follows a run."""

import pytest

from gtracer.lab.training.callbacks import TensorBoard
from gtracer.lab.training.trainer import train
from support.runs import SMALL


def test_tensorboard(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    record = train(SMALL, tmp_path, [TensorBoard(tmp_path)])
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [event.value for event in events.Scalars("test_accuracy")]
    assert found == pytest.approx(record.curves["test_accuracy"])
