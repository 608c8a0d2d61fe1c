"""The functions of `two_kernels` in Triton: each is one launch for all tensors, however many there are.

A kernel is given where the tensors lie as a table of addresses, and works on them in blocks; another table says to
which tensor a block belongs, and which of its blocks it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gtracer.optim import two_kernels
from gtracer.optim.two_kernels import Numbers
from gtracer.tensors import Tensors

BLOCK = 2048


@triton.jit
def lane(addresses, tensor, inside, row: tl.constexpr, rows: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers to this block of the row's tensor."""
    start = tl.load(addresses + tensor * rows + row)
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
def towards(g, v, count, log_beta2, f0, delta, FIRST: tl.constexpr, DAMPED: tl.constexpr):
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
    blocks, sizes, addresses, sums, log_beta2, f0, delta,
    FIRST: tl.constexpr, DAMPED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums over a block; of rows g, v, count."""
    tensor, inside, there = place(blocks, sizes, BLOCK)
    g = tl.load(lane(addresses, tensor, inside, 0, 3, ALIGNED), mask=there, other=0.0)
    v = tl.load(lane(addresses, tensor, inside, 1, 3, ALIGNED), mask=there, other=1.0)
    count = tl.load(lane(addresses, tensor, 0, 2, 3, ALIGNED)).to(tl.float64)
    x = towards(g, v, count, log_beta2, f0, delta, FIRST, DAMPED)
    at = sums + 3 * tl.program_id(0)
    tl.store(at, tl.sum(x * x))
    tl.store(at + 1, tl.sum(g * x))
    tl.store(at + 2, tl.sum(g * g))


@triton.jit
def displace_kernel(
    blocks, sizes, addresses, step, log_beta2, f0, delta,
    FIRST: tl.constexpr, DAMPED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of rows p, g, v, count."""
    tensor, inside, there = place(blocks, sizes, BLOCK)
    at = lane(addresses, tensor, inside, 0, 4, ALIGNED)
    p = tl.load(at, mask=there, other=0.0)
    g = tl.load(lane(addresses, tensor, inside, 1, 4, ALIGNED), mask=there, other=0.0)
    v = tl.load(lane(addresses, tensor, inside, 2, 4, ALIGNED), mask=there, other=1.0)
    count = tl.load(lane(addresses, tensor, 0, 3, 4, ALIGNED)).to(tl.float64)
    move = tl.load(step) * towards(g, v, count, log_beta2, f0, delta, FIRST, DAMPED)
    tl.store(at, p + finite(move), mask=there)


@triton.jit
def finish_kernel(
    blocks, sizes, addresses, step, factor, lr, sums, log_beta1, log_beta2, less1, less2, beta2, eps, decay, f0, delta,
    FIRST: tl.constexpr, DAMPED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of rows p, g, ahead, exp_avg, v, count; `less1` and `less2` are 1 − β."""
    tensor, inside, there = place(blocks, sizes, BLOCK)
    at_p = lane(addresses, tensor, inside, 0, 6, ALIGNED)
    at_m = lane(addresses, tensor, inside, 3, 6, ALIGNED)
    at_v = lane(addresses, tensor, inside, 4, 6, ALIGNED)
    p = tl.load(at_p, mask=there, other=0.0)
    g = tl.load(lane(addresses, tensor, inside, 1, 6, ALIGNED), mask=there, other=0.0)
    ahead = tl.load(lane(addresses, tensor, inside, 2, 6, ALIGNED), mask=there, other=0.0)
    m = tl.load(at_m, mask=there, other=0.0)
    v = tl.load(at_v, mask=there, other=1.0)
    count = tl.load(lane(addresses, tensor, 0, 5, 6, ALIGNED)).to(tl.float64)
    rate = tl.load(lr)
    w = p - finite(tl.load(step) * towards(g, v, count, log_beta2, f0, delta, FIRST, DAMPED))
    penalty = tl.load(factor) * (ahead - g)
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


@cache
def _blocks(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Which tensor each block belongs to and which of its blocks it is; and the sizes."""
    found = [(tensor, i) for tensor, size in enumerate(sizes) for i in range(triton.cdiv(size, BLOCK))]
    return torch.tensor(found, dtype=torch.int32, device=device), torch.tensor(sizes, device=device)


class Table:
    """Where the tensors lie, on their device."""

    def __init__(self, *rows: Tensors) -> None:
        of = rows[0]
        self.device = of[0].device
        self.blocks, self.sizes = _blocks(tuple(p.numel() for p in of), self.device)
        addresses = [[t.data_ptr() for t in column] for column in zip(*rows, strict=True)]
        listed = torch.tensor(addresses, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self.aligned = not bool((listed % 16).any())
        self.addresses = listed.to(self.device, non_blocking=True)

    def launch(self, kernel: Any, by: Numbers, *arguments: Any) -> None:
        """One program for each block."""
        first = isinstance(by.f0, str)
        options = {"FIRST": first, "DAMPED": by.delta > 0, "ALIGNED": self.aligned, "BLOCK": BLOCK}
        f0 = 0.0 if first else by.f0
        kernel[(len(self.blocks),)](self.blocks, self.sizes, self.addresses, *arguments, f0, by.delta, **options)

    def sums(self, count: int) -> Tensor:
        """Room for so many of every block."""
        return torch.empty(len(self.blocks), count, device=self.device)


def reach(g: Tensors, v: Tensors, counts: Tensors, rho: Tensor, by: Numbers) -> Tensor:
    table = Table(g, v, counts)
    sums = table.sums(3)
    table.launch(reach_kernel, by, sums, _log(by.beta2))
    x, ratio, size = sums.sum(0)
    return torch.stack([x * rho * rho, ratio, size])


def displace_(params: Tensors, g: Tensors, v: Tensors, counts: Tensors, step: Tensor, by: Numbers) -> None:
    Table(params, g, v, counts).launch(displace_kernel, by, step, _log(by.beta2))


def finish_(
    params: Tensors,
    g: Tensors,
    ahead: Tensors,
    exp_avg: Tensors,
    v: Tensors,
    counts: Tensors,
    step: Tensor,
    factor: Tensor,
    lr: float | Tensor,
    by: Numbers,
) -> Tensor:
    ahead = [t.contiguous() for t in ahead]  # kept until the kernel is on its way
    table = Table(params, g, ahead, exp_avg, v, counts)
    sums = table.sums(2)
    rate = lr.to(sums) if isinstance(lr, Tensor) else torch.full((), lr, device=table.device)
    betas = (_log(by.beta1), _log(by.beta2), 1 - by.beta1, 1 - by.beta2, by.beta2)
    table.launch(finish_kernel, by, step, factor, rate, sums, *betas, by.eps, by.decay)
    return sums.sum(0)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


LAUNCHED = {two_kernels.reach: reach, two_kernels.displace_: displace_, two_kernels.finish_: finish_}


def launched(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same in one launch."""
    return LAUNCHED[function]
