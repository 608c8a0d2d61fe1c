"""The functions of `two_kernels` in Triton: each is one launch for all tensors, however many there are.

A kernel is given where the tensors lie as a table of addresses, and works on them in blocks; another table says to
which tensor a block belongs, and which of its blocks it is.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gtracer.optim.two_kernels import Part
from gtracer.tensors import Tensors

BLOCK = 2048


@triton.jit
def lane(addresses, tensor, inside, ALIGNED: tl.constexpr):
    """Pointers to this block of the tensor."""
    start = tl.load(addresses + tensor)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return start.to(tl.pointer_type(tl.float32)) + inside


@triton.jit
def place(blocks, sizes, BLOCK: tl.constexpr):
    """The tensor of this program, where in it the program works, and what of that is there."""
    tensor = tl.load(blocks + 2 * tl.program_id(0))
    inside = tl.load(blocks + 2 * tl.program_id(0) + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return tensor, inside, inside < tl.load(sizes + tensor)


@triton.jit
def remaining(log_beta, count):
    """β to the power of the count: in float64, of which 1 − β² leaves enough."""
    return tl.exp(log_beta * count)


@triton.jit
def towards(g, v, count, f0, delta, log_beta2, FIRST: tl.constexpr, DAMPED: tl.constexpr):
    """∇L / (f + δ)."""
    start = remaining(log_beta2, count)
    f = v + f0 * start.to(tl.float32)
    if FIRST:
        f = tl.where(count > 0, v * (1 / (1 - start)).to(tl.float32), g * g)
    if DAMPED:
        return g / (f + delta)
    return tl.where(f == 0, 0.0, g / f)


@triton.jit
def finite(x):
    """Zero for what is no number, and for infinity."""
    return tl.where(tl.abs(x) <= 3.4028234e38, x, 0.0)


@triton.jit
def reach_kernel(
    blocks, sizes, n, rows, f0, delta, log_beta2, sums,
    FIRST: tl.constexpr, DAMPED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums over a block."""
    tensor, inside, there = place(blocks, sizes, BLOCK)
    g = tl.load(lane(rows + n, tensor, inside, ALIGNED), mask=there, other=0.0)
    v = tl.load(lane(rows + 3 * n, tensor, inside, ALIGNED), mask=there, other=1.0)
    count = tl.load(lane(rows + 4 * n, tensor, 0, ALIGNED)).to(tl.float64)
    x = towards(g, v, count, f0, delta, log_beta2, FIRST, DAMPED)
    at = sums + 3 * tl.program_id(0)
    tl.store(at, tl.sum(x * x))
    tl.store(at + 1, tl.sum(g * x))
    tl.store(at + 2, tl.sum(g * g))


@triton.jit
def displace_kernel(
    blocks, sizes, n, rows, f0, delta, log_beta2, step,
    FIRST: tl.constexpr, DAMPED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of weights, moved."""
    tensor, inside, there = place(blocks, sizes, BLOCK)
    at = lane(rows, tensor, inside, ALIGNED)
    p = tl.load(at, mask=there, other=0.0)
    g = tl.load(lane(rows + n, tensor, inside, ALIGNED), mask=there, other=0.0)
    v = tl.load(lane(rows + 3 * n, tensor, inside, ALIGNED), mask=there, other=1.0)
    count = tl.load(lane(rows + 4 * n, tensor, 0, ALIGNED)).to(tl.float64)
    tl.store(at, p + finite(tl.load(step) * towards(g, v, count, f0, delta, log_beta2, FIRST, DAMPED)), mask=there)


@triton.jit
def finish_kernel(
    blocks, sizes, n, rows, f0, delta, log_beta2, ahead, step, factor, lr, sums,
    log_beta1, less1, less2, beta2, eps, decay,
    FIRST: tl.constexpr, DAMPED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block, moved back and updated; `less1` and `less2` are 1 − β."""
    tensor, inside, there = place(blocks, sizes, BLOCK)
    at_p = lane(rows, tensor, inside, ALIGNED)
    at_m = lane(rows + 2 * n, tensor, inside, ALIGNED)
    at_v = lane(rows + 3 * n, tensor, inside, ALIGNED)
    p = tl.load(at_p, mask=there, other=0.0)
    g = tl.load(lane(rows + n, tensor, inside, ALIGNED), mask=there, other=0.0)
    g_there = tl.load(lane(ahead, tensor, inside, ALIGNED), mask=there, other=0.0)
    m = tl.load(at_m, mask=there, other=0.0)
    v = tl.load(at_v, mask=there, other=1.0)
    count = tl.load(lane(rows + 4 * n, tensor, 0, ALIGNED)).to(tl.float64)
    rate = tl.load(lr)
    w = p - finite(tl.load(step) * towards(g, v, count, f0, delta, log_beta2, FIRST, DAMPED))
    penalty = tl.load(factor) * (g_there - g)
    total = g + penalty
    at = sums + 2 * tl.program_id(0)
    tl.store(at, tl.sum(penalty * penalty))
    tl.store(at + 1, tl.sum(total * total))
    first = m + less1 * (total - m)
    second = beta2 * v + less2 * g * g
    upper = (1 / (1 - remaining(log_beta1, count + 1))).to(tl.float32)
    lower = tl.sqrt((1 / (1 - remaining(log_beta2, count + 1))).to(tl.float32))
    moved = w * (1 - rate * decay) - rate * upper * first / (tl.sqrt(second) * lower + eps)
    tl.store(at_p, moved, mask=there)
    tl.store(at_m, first, mask=there)
    tl.store(at_v, second, mask=there)


class Launched(Part):
    """A slice whose tensors lie in a row each, of floats, on one device."""

    def __init__(self, part: Part) -> None:
        vars(self).update(vars(part))
        self.device = self.params[0].device
        self._rows = Rows(self.params, self.g, self.exp_avg, self.v, self.counts)
        self._blocks = blocks_of(tuple(p.numel() for p in self.params), self.device)

    def _launch(self, kernel: Any, *arguments: Any, aligned: bool = True) -> None:
        """One program for each block."""
        f0, delta, *_ = self.by
        first = isinstance(f0, str)
        options = {"FIRST": first, "DAMPED": delta > 0, "ALIGNED": aligned and self._rows.aligned, "BLOCK": BLOCK}
        start = (*self._blocks, self._rows.addresses, 0.0 if first else f0, delta, _log(self.by.beta2))
        kernel[(len(self._blocks[0]),)](*start, *arguments, **options)

    def _sums(self, count: int) -> Tensor:
        """Room for so many of every block."""
        return torch.empty(len(self._blocks[0]), count, device=self.device)

    def reach(self) -> Tensor:
        sums = self._sums(3)
        self._launch(reach_kernel, sums)
        x, ratio, size = sums.sum(0)
        return torch.stack([x * self.rho * self.rho, ratio, size])

    def displace_(self, scale: Tensor) -> None:
        self._launch(displace_kernel, scale * self.rho)

    def finish_(self, ahead: Tensors, scale: Tensor, factor: Tensor) -> Tensor:
        by, sums = self.by, self._sums(2)
        there = [t.contiguous() for t in ahead]  # kept until the kernel is on its way
        rows = Rows(there)
        rate = self.lr.to(sums) if isinstance(self.lr, Tensor) else torch.full((), self.lr, device=self.device)
        numbers = (_log(by.beta1), 1 - by.beta1, 1 - by.beta2, by.beta2, by.eps, by.decay)
        tensors = (rows.addresses, scale * self.rho, factor, rate, sums)
        self._launch(finish_kernel, *tensors, *numbers, aligned=rows.aligned)
        return sums.sum(0)


class Rows:
    """Where tensors lie, as a table on their device: a row for each list."""

    def __init__(self, *lists: Tensors) -> None:
        device = lists[0][0].device
        listed = [[t.data_ptr() for t in tensors] for tensors in lists]
        table = torch.tensor(listed, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.aligned = not bool((table % 16).any())
        self.addresses = table.to(device, non_blocking=True)


@cache
def blocks_of(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Which tensor each block belongs to and which of its blocks it is; the sizes; how many there are."""
    found = [(tensor, i) for tensor, size in enumerate(sizes) for i in range(triton.cdiv(size, BLOCK))]
    return torch.tensor(found, dtype=torch.int32, device=device), torch.tensor(sizes, device=device), len(sizes)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf
