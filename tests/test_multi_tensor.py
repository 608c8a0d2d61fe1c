"""Adam-TRACER's kernels in one launch for all tensors, run by Triton's interpreter where there is no GPU."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore")  # numpy's, in the interpreter

from gtracer.optim.launches import BLOCK, Launched  # noqa: E402
from gtracer.optim.trial import Slice  # noqa: E402
from gtracer.optim.two_kernels import Part  # noqa: E402

SIZES = [(3, 5), (BLOCK,), (2, BLOCK + 7), (1,)]
CASES = {
    "first gradient": {},
    "a number f₀": {"f0": 0.5, "betas": (0.9, 0.99)},
    "no damping": {"delta": 0.0, "eps": 1e-3},
    "no memory": {"delta": 0.1, "betas": (0.0, 0.0)},
    "a rate on the device": {"lr": torch.tensor(0.01, dtype=torch.float64, device=DEVICE)},
}


def part_of(kind, dtype, offset=0, known=True, **own):
    """Weights, a gradient and moments, with counts from before the first step on, and one gradient more."""
    generator = torch.Generator().manual_seed(0)

    def some():
        flat = [torch.randn(torch.Size(size).numel() + offset, generator=generator) for size in SIZES]
        return [t.to(DEVICE, dtype)[offset:].view(size) for t, size in zip(flat, SIZES, strict=True)]

    params, g, ahead, exp_avg, v = some(), some(), some(), some(), [0.1 + t.square() for t in some()]
    g = [t + 0.3 * t.sign() for t in g]  # Adam's first step divides by it
    counts = [torch.tensor(float(n), device=DEVICE, dtype=dtype) for n in (0, 1, 7, 5000)]
    g[1][3], v[1][3] = 0.0, 0.0
    names = ("step", "exp_avg", "exp_avg_sq")
    states = [dict(zip(names, values, strict=True)) for values in zip(counts, exp_avg, v, strict=True)]
    state = dict(zip(params, states, strict=True)) if known else {}
    group = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01} | own
    knobs = {"rho": 0.02, "f0": "first-gradient", "delta": 0.01} | own
    part = Part(Slice(group, knobs, params, g), state, lambda function: function)
    return (Launched(part) if kind is Launched else part), ahead


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=5e-6, equal_nan=True, check_dtype=False)


def stepped(part, ahead):
    """All that a step gives, and what it leaves."""
    scale, factor = (torch.tensor(x, device=DEVICE, dtype=ahead[0].dtype) for x in (2.5, 3.0))
    reached = part.reach()
    part.displace_(scale)
    displaced = [p.clone() for p in part.params]
    sums = part.finish_(ahead, scale, factor)
    return [reached, sums, *displaced, *part.params, *part.exp_avg, *part.v]


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_one_launch_is_what_torch_does(name, offset):
    """Also for tensors that lie at odd addresses."""
    own = CASES[name]
    found, expected = part_of(Launched, torch.float32, offset, **own), part_of(Part, torch.float64, offset, **own)
    same(stepped(*found), stepped(*expected))


def test_the_first_step():
    found, expected = (
        part_of(kind, dtype, known=False) for kind, dtype in ((Launched, torch.float32), (Part, torch.float64))
    )
    same(stepped(*found), stepped(*expected))


def test_what_is_no_number_moves_nothing_and_is_handed_on():
    def found(kind, dtype):
        part, ahead = part_of(kind, dtype)
        part.g[2][0, 0], ahead[2][0, 0] = torch.inf, torch.nan
        return stepped(part, ahead)

    launched = found(Launched, torch.float32)
    same(launched, found(Part, torch.float64))
    assert torch.isfinite(torch.cat([p.flatten() for p in launched[2:6]])).all()


def test_a_gradient_that_lies_otherwise_is_read_as_it_is():
    part, ahead = part_of(Launched, torch.float32)
    ahead[0] = ahead[0].T.contiguous().T
    same(stepped(part, ahead), stepped(*part_of(Launched, torch.float32)))
