"""Adam-TRACER's kernels in one launch for all tensors, run by Triton's interpreter where there is no GPU."""

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported
pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore")  # numpy's, in the interpreter

from gtracer.optim import launches, two_kernels  # noqa: E402
from gtracer.optim.two_kernels import Numbers  # noqa: E402

SIZES = [(3, 5), (launches.BLOCK,), (2, launches.BLOCK + 7), (1,)]
CASES = {
    "first gradient": Numbers("first-gradient", 0.01, 0.9, 0.999, 1e-8, 0.01),
    "a number f₀": Numbers(0.5, 0.01, 0.9, 0.99, 1e-8, 0.0),
    "no damping": Numbers("first-gradient", 0.0, 0.9, 0.99, 1e-3, 0.0),
    "no memory": Numbers("first-gradient", 0.1, 0.0, 0.0, 1e-8, 0.1),
}


def made(offset=0):
    """Weights, two gradients, moments; counts from before the first step on; what is no number here and there."""
    generator = torch.Generator().manual_seed(0)

    def some():
        flat = [torch.randn(torch.Size(size).numel() + offset, generator=generator).to(DEVICE) for size in SIZES]
        return [t[offset:].view(size) for t, size in zip(flat, SIZES, strict=True)]

    params, g, ahead, exp_avg, v = some(), some(), some(), some(), [0.1 + t.square() for t in some()]
    counts = [torch.tensor(float(n), device=DEVICE) for n in (0, 1, 7, 5000)]
    g[1][3], v[1][3] = 0.0, 0.0
    g[2][0, 0], ahead[2][0, 0] = torch.inf, torch.nan
    return params, g, ahead, exp_avg, v, counts


def clones(lists):
    return [[t.clone() for t in part] for part in lists]


def exact(lists):
    return [[t.double() for t in part] for part in lists]


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-6, equal_nan=True, check_dtype=False)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_one_launch_is_what_torch_does(name, offset):
    by, lists = CASES[name], made(offset)
    g, ahead = lists[1], lists[2]
    rho, step = torch.tensor(0.02), torch.tensor(0.05, device=DEVICE)
    g[2][0, 0] = 1.0  # sums that are numbers
    _, slopes, _, _, moments, counts = exact(lists)
    expected = two_kernels.reach(slopes, moments, counts, rho.to(DEVICE), by)
    same(launches.reach(g, lists[4], lists[5], rho, by), expected)
    g[2][0, 0] = torch.inf
    here, there = clones(lists), exact(lists)
    launches.displace_(here[0], here[1], here[4], here[5], step, by)
    two_kernels.displace_(there[0], there[1], there[4], there[5], step, by)
    same(here[0], there[0])
    factor, rate = torch.tensor(3.0, device=DEVICE), torch.tensor(0.01, device=DEVICE)
    launches.finish_(*here, step, factor, 0.01, by)
    two_kernels.finish_(*there, step, factor, rate, by)
    same(here, there)
    ahead[2][0, 0], g[2][0, 0] = 1.0, 1.0
    same(
        launches.finish_(*clones(lists), step, factor, rate.double(), by),
        two_kernels.finish_(*exact(lists), step, factor, rate, by),
    )


def test_a_gradient_that_lies_otherwise_is_read_as_it_is():
    by, lists = CASES["first gradient"], made()
    lists[1][2][0, 0] = lists[2][2][0, 0] = 1.0
    numbers = (torch.tensor(0.05, device=DEVICE), torch.tensor(3.0, device=DEVICE), torch.tensor(0.01, device=DEVICE))
    expected = clones(lists)
    launches.finish_(*expected, *numbers, by)
    lists[2][0] = lists[2][0].T.contiguous().T
    launches.finish_(*lists, *numbers, by)
    same(lists[0], expected[0])
