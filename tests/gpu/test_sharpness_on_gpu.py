"""Sharpness on a GPU: the CPU's numbers, within single precision."""

import copy

import pytest
import torch

from gtracer.lab.models.resnet import ResNet
from gtracer.sharpness import classification, measure
from gtracer.sharpness.objective import opened

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def without_tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def test_the_numbers_of_the_cpu(without_tf32):
    torch.manual_seed(0)
    net, x, y = ResNet(8, 3, 10), torch.randn(24, 3, 16, 16), torch.randint(10, (24,))
    net(x)
    there = copy.deepcopy(net).cuda()
    given = list(zip(x.split(16), y.split(16), strict=True))
    options = {"steps": 12, "progress": False, "probes": 4, "samples": 2, "ascent": 3, "top": 1}
    on_cpu, on_gpu = (measure(model, classification(model), given, **options) for model in (net, there))
    for row, other in zip(on_cpu.rows(), on_gpu.rows(), strict=True):
        assert other.value == pytest.approx(row.value, rel=2e-2, abs=1e-5), row.name
    assert on_gpu.top_eigenvalue == pytest.approx(on_cpu.top_eigenvalue, rel=1e-3)
    assert on_gpu.ggn.top == pytest.approx(on_cpu.ggn.top, rel=1e-3)


def test_forward_mode_is_taken_there():
    net, x, y = ResNet(8, 3, 10).cuda(), torch.randn(8, 3, 16, 16), torch.randint(10, (8,))
    with opened(net, classification(net), [(x, y)]) as objective:
        objective.products("ggn", [objective.random(torch.Generator().manual_seed(0))])
        assert objective._products.pushes


def test_where_its_memory_runs_out_fewer_batches_are_merged(without_tf32):
    """The limit is three times what batches as they are need, of what 32 of them would."""
    torch.manual_seed(0)
    net, x, y = ResNet(8, 3, 10).cuda(), torch.randn(1024, 3, 16, 16), torch.randint(10, (1024,))
    given = list(zip(x.split(32), y.split(32), strict=True))
    options = {"steps": 3, "progress": False, "probes": 1, "samples": 1, "ascent": 2, "top": 1, "tolerance": 0.0}
    torch.cuda.reset_peak_memory_stats()
    apart = measure(net, classification(net), given, merge=0, **options)
    torch.cuda.empty_cache()
    room = 3 * torch.cuda.max_memory_reserved() / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(room)
    try:
        merged = measure(net, classification(net), given, **options)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    for row, other in zip(apart.rows(), merged.rows(), strict=True):
        assert other.value == pytest.approx(row.value, rel=2e-2, abs=1e-5), row.name
