"""Attention of encoders in Triton: with padding, dropout and learnt biases by position, and no scores kept.

What torch has is slow here: its fused kernels either take no bias, or write the gradient of one that is repeated for
every text. Texts are short, so that nothing is gained by more than the plain scheme: forward and backward go over
blocks of queries, and backward once more over blocks of keys. Queries, keys and values lie as one linear layer leaves
them.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from gtracer.lab.errors import LabError


@triton.jit
def place(H):
    """Of this program: its head among all, its text, and its head among those of the text."""
    head = tl.program_id(0)  # there may be more of them than there is room for in another dimension
    return head, (head // H).to(tl.int64), head % H


@triton.jit
def tile(tokens, features, L, STEP: tl.constexpr, D: tl.constexpr):
    """Where the features of these tokens of a text lie, tokens being STEP apart, and which of them there are."""
    at = tokens[:, None] * STEP + features[None, :]
    return at, (tokens[:, None] < L) & (features[None, :] < D)


@triton.jit
def dropout(seed, head, m, n, L, rate):
    """What the weights of these queries and keys are multiplied by: a hash says whether it is 0."""
    x = ((head * L + m) * L + n).to(tl.uint32) * 2654435769 + tl.load(seed).to(tl.uint32)
    x = (x ^ (x >> 16)) * 2146121005
    x = (x ^ (x >> 15)) * 2221713035
    x = x ^ (x >> 16)
    return tl.where((x >> 8).to(tl.float32) * (1.0 / 16777216) < rate, 0.0, 1 / (1 - rate))


@triton.jit
def scored(products, scale, mask, bias, b, h, m, n, L, BIASED: tl.constexpr):
    """The logarithms of the weights of these queries and keys, up to a summand of each query."""
    inside = (m < L) & (n < L)
    found = products * scale + tl.load(mask + b * L + n, mask=n < L, other=float("-inf"))
    if BIASED:
        found += tl.load(bias + (h * L + m) * L + n, mask=inside, other=0.0).to(tl.float32)
    return found


@triton.jit
def forward_kernel(
    q, k, v, mask, bias, seed, out, lse, L, H, scale, rate,
    WIDTH: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BIASED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head: what it gets of the values, and the logarithm of the sum of its weights."""
    head, b, h = place(H)
    start = b * L * 3 * WIDTH + h * D
    q, k, v = q + start, k + start, v + start
    m, d = tl.program_id(1) * BM + tl.arange(0, BM), tl.arange(0, BD)
    at, there = tile(m, d, L, 3 * WIDTH, D)
    query = tl.load(q + at, mask=there, other=0.0)
    top, total = tl.full((BM,), float("-inf"), tl.float32), tl.zeros((BM,), tl.float32)
    mixed = tl.zeros((BM, BD), tl.float32)
    for first in range(0, L, BN):
        n = first + tl.arange(0, BN)
        of, real = tile(n, d, L, 3 * WIDTH, D)
        key, value = tl.load(k + of, mask=real, other=0.0), tl.load(v + of, mask=real, other=0.0)
        products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        s = scored(products, scale, mask, bias, b, h, m[:, None], n[None, :], L, BIASED)
        higher = tl.maximum(top, tl.max(s, 1))
        p, less = tl.exp(s - higher[:, None]), tl.exp(top - higher)
        total = total * less + tl.sum(p, 1)
        if DROPS:
            p *= dropout(seed, head, m[:, None], n[None, :], L, rate)
        mixed = mixed * less[:, None] + tl.dot(p.to(value.dtype), value, input_precision=PRECISION)
        top = higher
    at, there = tile(m, d, L, WIDTH, D)
    out += b * L * WIDTH + h * D
    tl.store(out + at, (mixed / total[:, None]).to(query.dtype), mask=there)
    tl.store(lse + head * L + m, top + tl.log(total), mask=m < L)


@triton.jit
def query_kernel(
    q, k, v, mask, bias, seed, out, lse, grad, delta, dq, slopes, L, H, scale, rate,
    WIDTH: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BIASED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of queries: the gradients by them and by their scores, and Σ grad · out, for the keys' turn."""
    head, b, h = place(H)
    start = b * L * 3 * WIDTH + h * D
    q, k, v = q + start, k + start, v + start
    m, d = tl.program_id(1) * BM + tl.arange(0, BM), tl.arange(0, BD)
    at, there = tile(m, d, L, WIDTH, D)
    out, grad = out + b * L * WIDTH + h * D, grad + b * L * WIDTH + h * D
    slopes += (b * H + h) * L * L
    g = tl.load(grad + at, mask=there, other=0.0)
    mean = tl.sum(g.to(tl.float32) * tl.load(out + at, mask=there, other=0.0).to(tl.float32), 1)
    tl.store(delta + head * L + m, mean, mask=m < L)
    log = tl.load(lse + head * L + m, mask=m < L, other=float("inf"))
    at, there = tile(m, d, L, 3 * WIDTH, D)
    query = tl.load(q + at, mask=there, other=0.0)
    total = tl.zeros((BM, BD), tl.float32)
    for first in range(0, L, BN):
        n = first + tl.arange(0, BN)
        of, real = tile(n, d, L, 3 * WIDTH, D)
        key, value = tl.load(k + of, mask=real, other=0.0), tl.load(v + of, mask=real, other=0.0)
        products = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        s = scored(products, scale, mask, bias, b, h, m[:, None], n[None, :], L, BIASED)
        dp = tl.dot(g, tl.trans(value), input_precision=PRECISION)
        if DROPS:
            dp *= dropout(seed, head, m[:, None], n[None, :], L, rate)
        ds = tl.exp(s - log[:, None]) * (dp - mean[:, None])
        if BIASED:
            inside = (m[:, None] < L) & (n[None, :] < L)
            tl.store(slopes + m[:, None] * L + n[None, :], ds.to(query.dtype), mask=inside)
        total += tl.dot(ds.to(key.dtype), key, input_precision=PRECISION)
    tl.store(dq + start + at, (total * scale).to(query.dtype), mask=there)


@triton.jit
def key_kernel(
    q, k, v, mask, bias, seed, lse, grad, delta, dk, dv, L, H, scale, rate,
    WIDTH: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BIASED: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of keys: the gradients by them and by their values. Scores have keys for rows here."""
    head, b, h = place(H)
    start = b * L * 3 * WIDTH + h * D
    q, k, v = q + start, k + start, v + start
    n, d = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BD)
    at, there = tile(n, d, L, 3 * WIDTH, D)
    key, value = tl.load(k + at, mask=there, other=0.0), tl.load(v + at, mask=there, other=0.0)
    grad += b * L * WIDTH + h * D
    by_key, by_value = tl.zeros((BN, BD), tl.float32), tl.zeros((BN, BD), tl.float32)
    for first in range(0, L, BM):
        m = first + tl.arange(0, BM)
        of, real = tile(m, d, L, 3 * WIDTH, D)
        query = tl.load(q + of, mask=real, other=0.0)
        of, real = tile(m, d, L, WIDTH, D)
        g = tl.load(grad + of, mask=real, other=0.0)
        log = tl.load(lse + head * L + m, mask=m < L, other=float("inf"))  # a query that is not there has no weights
        mean = tl.load(delta + head * L + m, mask=m < L, other=0.0)
        products = tl.dot(key, tl.trans(query), input_precision=PRECISION)
        s = scored(products, scale, mask, bias, b, h, m[None, :], n[:, None], L, BIASED)
        p = tl.exp(s - log[None, :])
        dp = tl.dot(value, tl.trans(g), input_precision=PRECISION)
        kept = p
        if DROPS:
            factor = dropout(seed, head, m[None, :], n[:, None], L, rate)
            kept, dp = p * factor, dp * factor
        by_value += tl.dot(kept.to(g.dtype), g, input_precision=PRECISION)
        ds = p * (dp - mean[None, :])
        by_key += tl.dot(ds.to(query.dtype), query, input_precision=PRECISION)
    tl.store(dk + start + at, (by_key * scale).to(key.dtype), mask=there)
    tl.store(dv + start + at, by_value.to(key.dtype), mask=there)


class Launch:
    """What all kernels are given for this batch: three tensors in one, and the rest of what the scores are made of."""

    def __init__(self, qkv: Tensor, mask: Tensor, bias: Tensor | None, seed: Tensor | None, rate: float) -> None:
        self.texts, self.length, _, self.heads, features = qkv.shape
        self.inputs = (*qkv.unbind(2), mask, bias, seed)
        self.sizes = (self.length, self.heads, features**-0.5, rate)
        self.features = features
        self.known = {
            "WIDTH": self.heads * features,
            "D": features,
            "BD": max(16, triton.next_power_of_2(features)),
            "BIASED": bias is not None,
            "DROPS": seed is not None,
            "PRECISION": "ieee" if qkv.dtype == torch.float32 else "tf32",
        }

    def __call__(self, kernel, over: str, blocks: dict[str, int], *outputs: Tensor) -> None:
        """Launch it over blocks of queries or of keys."""
        grid = (self.texts * self.heads, triton.cdiv(self.length, blocks[over]))
        kernel[grid](*self.inputs, *outputs, *self.sizes, **self.known, **blocks)

    def forward(self, out: Tensor, lse: Tensor) -> None:
        self(forward_kernel, "BM", BY_QUERIES, out, lse)

    def backward(self, out: Tensor, lse: Tensor, grad: Tensor, slopes: Tensor, gradients: Tensor) -> None:
        (dq, dk, dv), delta = gradients.unbind(2), torch.empty_like(lse)
        self(query_kernel, "BM", BY_QUERIES, out, lse, grad, delta, dq, slopes)
        self(key_kernel, "BN", NARROW_BY_KEYS if self.features <= 32 else BY_KEYS, lse, grad, delta, dk, dv)


# The fastest of eleven on an H200 for texts of 160 tokens, 32 of them, with 12 heads of 64 and of 32 features.
BY_QUERIES = {"BM": 64, "BN": 32, "num_warps": 4, "num_stages": 2}
BY_KEYS = {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 1}
NARROW_BY_KEYS = {"BM": 32, "BN": 64, "num_warps": 4, "num_stages": 2}


@torch.library.custom_op("gtracer::attention", mutates_args=())
def _forward(qkv: Tensor, mask: Tensor, bias: Tensor | None, seed: Tensor | None, rate: float) -> tuple[Tensor, Tensor]:
    out, lse = _outputs(qkv)
    Launch(qkv, mask, bias, seed, rate).forward(out, lse)
    return out, lse


@_forward.register_fake
def _(qkv, mask, bias, seed, rate):
    return _outputs(qkv)


def _outputs(qkv: Tensor) -> tuple[Tensor, Tensor]:
    texts, length, _, heads, features = qkv.shape
    return qkv.new_empty(texts, length, heads, features), qkv.new_empty(texts * heads, length, dtype=torch.float32)


@torch.library.custom_op("gtracer::attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    qkv: Tensor,
    mask: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    rate: float,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor]:
    gradients, slopes = _slopes(qkv, bias)
    Launch(qkv, mask, bias, seed, rate).backward(out, lse, grad, slopes, gradients)
    return gradients, slopes


@_backward.register_fake
def _(grad, qkv, mask, bias, seed, rate, out, lse):
    return _slopes(qkv, bias)


def _slopes(qkv: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Places for the gradients, and for those by all scores, where somebody wants to know them."""
    texts, length, _, heads, _ = qkv.shape
    return torch.empty_like(qkv), qkv.new_empty((texts, heads, length, length) if bias is not None else (0,))


def _remember(ctx, inputs, output):
    *tensors, ctx.rate = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx, grad, _):
    qkv, mask, bias, seed, out, lse = ctx.saved_tensors
    gradients, slopes = _backward(grad.contiguous(), qkv, mask, bias, seed, ctx.rate, out, lse)
    by_bias = slopes.sum(0, keepdim=True, dtype=torch.float32) if bias is not None else None
    return gradients, None, by_bias, None, None


_forward.register_autograd(_gradients, setup_context=_remember)


def attention(qkv: Tensor, mask: Tensor, bias: Tensor | None = None, rate: float = 0.0) -> Tensor:
    """Softmax(q kᵀ / √features + bias + mask) v, with dropout of the weights; there is no second derivative.

    Args:
        qkv: Texts, tokens, three (queries, keys and values), heads, features.
        mask: float32, a number for each token of each text, that is added to all scores of its key.
        bias: float32, 1 × heads × tokens × tokens, the same for all texts.
        rate: Of dropout.
    """
    if not (qkv.is_cuda or os.environ.get("TRITON_INTERPRET")):
        raise LabError(f"fused kernels need an NVIDIA GPU, got inputs on {qkv.device}: use kernels torch")
    seed = torch.randint(2**31, (1,), device=qkv.device) if rate else None
    made: Tensor = _forward(qkv.contiguous(), mask.contiguous(), bias, seed, rate)[0]
    return made
