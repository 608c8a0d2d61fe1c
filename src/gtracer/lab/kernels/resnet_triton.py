"""Triton kernels for narrow residual networks: 3 × 3 convolutions, and what lies between them.

Images lie with their channels last. What a convolution reads has a frame of zeros one pixel wide, so that no tap needs
to ask where it is; what it writes has none. A batch norm's sums are added up by whoever writes what they are over: Σz
and Σz² by the convolution that makes z, Σd and Σd·ẑ by the one that makes the gradient d by the norm's output.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def moments(sums, c, TOTAL: tl.constexpr, count, eps):
    """Mean and 1/deviation of these channels."""
    mean = tl.load(sums + c) / count
    variance = tl.maximum(tl.load(sums + TOTAL + c) / count - mean * mean, 0.0)
    return mean, tl.rsqrt(variance + eps)


@triton.jit
def affine(sums, gamma, beta, c, TOTAL: tl.constexpr, count, eps):
    """The factor and the summand that a batch norm amounts to."""
    mean, inverse = moments(sums, c, TOTAL, count, eps)
    factor = tl.load(gamma + c) * inverse
    return factor, tl.load(beta + c) - mean * factor


@triton.jit
def corner(pixel, H: tl.constexpr, SIDE: tl.constexpr, STRIDE: tl.constexpr):
    """Where the first tap of a pixel lies: images of H × H are made of framed ones of SIDE × SIDE."""
    return (pixel // (H * H) * SIDE + pixel // H % H * STRIDE) * SIDE + pixel % H * STRIDE


@triton.jit
def activate(
    z, sums, gamma, beta, shortcut, y, pixels, count, eps,
    H: tl.constexpr, CI: tl.constexpr, C: tl.constexpr, STRIDE: tl.constexpr,
    RESIDUAL: tl.constexpr, TOTAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = relu(norm(z) + shortcut), framed; the shortcut is subsampled, with zeros for the channels that it lacks."""
    c = tl.arange(0, C)
    factor, summand = affine(sums, gamma, beta, c, TOTAL, count, eps)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    side: tl.constexpr = H + 2
    n, i, j = place // (side * side), place // side % side - 1, place % side - 1
    inner = ((i >= 0) & (i < H) & (j >= 0) & (j < H) & (place < pixels))[:, None]
    at = ((n * H + i) * H + j)[:, None] * C + c[None, :]
    value = tl.load(z + at, mask=inner, other=0.0).to(tl.float32) * factor[None, :] + summand[None, :]
    if RESIDUAL:
        wide: tl.constexpr = H * STRIDE + 2
        origin = ((n * wide + i * STRIDE + 1) * wide + j * STRIDE + 1)[:, None] * CI + c[None, :]
        value += tl.load(shortcut + origin, mask=inner & (c < CI)[None, :], other=0.0).to(tl.float32)
    value = tl.where(inner, tl.maximum(value, 0.0), 0.0).to(y.dtype.element_ty)
    tl.store(y + place[:, None] * C + c[None, :], value, mask=(place < pixels)[:, None])


@triton.jit
def norm_gradient(
    d, z, sums, slopes, gamma, out, pixels, count, eps,
    HI: tl.constexpr, HO: tl.constexpr, C: tl.constexpr, STRIDE: tl.constexpr, TOTAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From d, by the norm's output, to the gradient by z; framed, and zero where STRIDE left pixels out."""
    c = tl.arange(0, C)
    mean, inverse = moments(sums, c, TOTAL, count, eps)
    a = tl.load(gamma + c) * inverse
    b = -a * inverse * tl.load(slopes + TOTAL + c) / count
    e = -a * tl.load(slopes + c) / count - mean * b
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    side: tl.constexpr = HI + 2
    n, i, j = place // (side * side), place // side % side - 1, place % side - 1
    inner = (i >= 0) & (i < HI) & (j >= 0) & (j < HI) & (place < pixels)
    inner = (inner & (i % STRIDE == 0) & (j % STRIDE == 0))[:, None]
    at = ((n * HO + i // STRIDE) * HO + j // STRIDE)[:, None] * C + c[None, :]
    slope = tl.load(d + at, mask=inner, other=0.0).to(tl.float32) * a[None, :] + e[None, :]
    slope += tl.load(z + at, mask=inner, other=0.0).to(tl.float32) * b[None, :]
    slope = tl.where(inner, slope, 0.0).to(out.dtype.element_ty)
    tl.store(out + place[:, None] * C + c[None, :], slope, mask=(place < pixels)[:, None])


@triton.jit
def mask_out(
    d, y, z, sums, out, slopes, pixels, count, eps, H: tl.constexpr, C: tl.constexpr, TOTAL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out = d where y > 0, and the sums of it for the norm of z."""
    c = tl.arange(0, C)
    mean, inverse = moments(sums, c, TOTAL, count, eps)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = (pixel < pixels)[:, None]
    at = pixel[:, None] * C + c[None, :]
    middle = corner(pixel, H, H + 2, 1) + H + 3
    passed = tl.load(y + middle[:, None] * C + c[None, :], mask=here, other=0.0) > 0
    slope = tl.where(passed, tl.load(d + at, mask=here, other=0.0), 0.0)
    tl.store(out + at, slope, mask=here)
    normed = (tl.load(z + at, mask=here, other=0.0).to(tl.float32) - mean[None, :]) * inverse[None, :]
    add_up(slopes, c, slope.to(tl.float32), normed, TOTAL)


@triton.jit
def add_up(sums, c, values, factors, TOTAL: tl.constexpr):
    """Σ values and Σ values · factors, channel by channel."""
    tl.atomic_add(sums + c, tl.sum(values, 0), sem="relaxed")
    tl.atomic_add(sums + TOTAL + c, tl.sum(values * factors, 0), sem="relaxed")


@triton.jit
def taps(
    x, w, origin, here, CK: tl.constexpr, CN: tl.constexpr, SIDE: tl.constexpr, BACK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Σ over nine taps of x, framed and with CK channels, from these origins on, times the weights: CN channels.

    BACK: the weights turned round, from outputs to inputs.
    """
    k, n = tl.arange(0, CK), tl.arange(0, CN)
    total = tl.zeros([BLOCK, CN], tl.float32)
    for tap in range(9):
        place = origin + tap // 3 * SIDE + tap % 3
        value = tl.load(x + place[:, None] * CK + k[None, :], mask=here[:, None], other=0.0)
        if BACK:
            at = (8 - tap) * CK * CN + n[None, :] * CK + k[:, None]
        else:
            at = tap * CK * CN + k[:, None] * CN + n[None, :]
        total = tl.dot(value, tl.load(w + at), total)
    return total


@triton.jit
def convolve(
    x, w, z, sums, pixels, HI: tl.constexpr, HO: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
    STRIDE: tl.constexpr, STATS: tl.constexpr, TOTAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """z = conv(x), and the sums over z for its norm."""
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = pixel < pixels
    side: tl.constexpr = HI + 2
    total = taps(x, w, corner(pixel, HO, side, STRIDE), here, CI, CO, side, False, BLOCK)
    c = tl.arange(0, CO)
    result = total.to(z.dtype.element_ty)
    tl.store(z + pixel[:, None] * CO + c[None, :], result, mask=here[:, None])
    if STATS:
        rounded = result.to(tl.float32)  # zero beyond the last pixel
        add_up(sums, c, rounded, rounded, TOTAL)


@triton.jit
def convolve_back(
    d, w, y, u, sums, shortcut, out, slopes, pixels, count, eps,
    H: tl.constexpr, HS: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, STRIDE: tl.constexpr,
    RESIDUAL: tl.constexpr, TOTAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From d, by conv(y), to the gradient by norm(u), where y = relu(norm(u) …); and its sums for that norm.

    With RESIDUAL, the gradient that came by the shortcut, of HS × HS pixels, is added.
    """
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = pixel < pixels
    side: tl.constexpr = H + 2
    origin = corner(pixel, H, side, 1)
    total = taps(d, w, origin, here, CO, CI, side, True, BLOCK)
    c = tl.arange(0, CI)
    if RESIDUAL:
        n, i, j = pixel // (H * H), pixel // H % H, pixel % H
        joined = (here & (i % STRIDE == 0) & (j % STRIDE == 0))[:, None]
        at = ((n * HS + i // STRIDE) * HS + j // STRIDE)[:, None] * CO + c[None, :]
        total += tl.load(shortcut + at, mask=joined, other=0.0).to(tl.float32)
    passed = tl.load(y + (origin + side + 1)[:, None] * CI + c[None, :], mask=here[:, None], other=0.0) > 0
    result = tl.where(passed, total, 0.0).to(out.dtype.element_ty)
    at = pixel[:, None] * CI + c[None, :]
    tl.store(out + at, result, mask=here[:, None])
    mean, inverse = moments(sums, c, TOTAL, count, eps)
    normed = (tl.load(u + at, mask=here[:, None], other=0.0).to(tl.float32) - mean[None, :]) * inverse[None, :]
    add_up(slopes, c, result.to(tl.float32), normed, TOTAL)


@triton.jit
def weight_gradient(
    x, d, parts, pixels, SIZE: tl.constexpr, HI: tl.constexpr, HO: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
    STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A part, of SIZE numbers, of the sum over pixels that is the gradient by one row of the weights."""
    part, row = tl.program_id(0), tl.program_id(1)
    k, co = tl.arange(0, 4 * CI), tl.arange(0, CO)  # three taps, side by side in memory, in a tile for four
    known = k < 3 * CI
    side: tl.constexpr = HI + 2
    total = tl.zeros([4 * CI, CO], tl.float32)
    for block in range(part, tl.cdiv(pixels, BLOCK), tl.num_programs(0)):
        pixel = block * BLOCK + tl.arange(0, BLOCK)
        here = pixel < pixels
        origin = corner(pixel, HO, side, STRIDE)
        at = (origin + row * side)[:, None] * CI + k[None, :]
        value = tl.load(x + at, mask=here[:, None] & known[None, :], other=0.0)
        slope = tl.load(d + (origin + side + 1)[:, None] * CO + co[None, :], mask=here[:, None], other=0.0)
        total = tl.dot(tl.trans(value), slope, total)
    at = part * SIZE + (row * 3 * CI + k)[:, None] * CO + co[None, :]
    tl.store(parts + at, total, mask=known[:, None])
