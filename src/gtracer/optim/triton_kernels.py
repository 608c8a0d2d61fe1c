"""SGD-TRACER's and Adam-TRACER's arithmetic in Triton, each kernel one launch for all tensors, however many there are.

A kernel is given where the tensors lie as a table of addresses, and works on them in blocks; another table says to
which tensor a block belongs, and which of its blocks it is.
"""

from __future__ import annotations

import inspect
import math
from array import array
from functools import cache, lru_cache, reduce
from itertools import chain
from operator import or_
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from gtracer.scopes import is_capturing
from gtracer.tensors import Tensors

BLOCK = 2048
COMPILED: dict[tuple[Any, ...], Any] = {}  # kernels, by what they were compiled for
FEW = 2**22  # weights in bfloat16, up to which a copy is kept while they are displaced


def launched(function: Any) -> Any:
    """A kernel that is compiled for the types of its arguments, and not once more for some of their values."""
    names = [name for name, kind in function.__annotations__.items() if "constexpr" in str(kind)]
    numbers = [name for name in inspect.signature(function).parameters if name not in names]
    return triton.jit(function, do_not_specialize=numbers)


def launch(kernel: Any, programs: int, given: tuple[Any, ...], kind: dict[str, Any]) -> None:
    """So many programs of it.

    For Triton to look at some forty arguments takes longer than a small net's kernels. But of one kind they are all of
    one type, sums being of the default one, so that what was compiled for it can be launched as it is.
    """
    fixed = [kind[name] for name in kernel.arg_names[len(given) :]]
    key = (kernel.__name__, given[0].device, torch.get_default_dtype(), *fixed)
    if (compiled := COMPILED.get(key)) is not None:
        compiled[programs, 1, 1](*given, *fixed)
    else:
        COMPILED[key] = kernel[programs, 1, 1](*given, *fixed)  # the interpreter compiles nothing


@triton.jit
def pointers_to(addresses, tensor, inside, ALIGNED: tl.constexpr, BITS: tl.constexpr = False):
    """Pointers to this block of the tensor, of float32 or of sixteen BITS."""
    start = tl.load(addresses + tensor)
    start = start.to(tl.pointer_type(tl.int16)) if BITS else start.to(tl.pointer_type(tl.float32))
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    return start + inside


@triton.jit
def place(blocks, sizes, BLOCK: tl.constexpr):
    """The tensor of this program, where in it the program works, its size, and 1 if all of the block is in it."""
    tensor = tl.load(blocks + 2 * tl.program_id(0))
    start = tl.load(blocks + 2 * tl.program_id(0) + 1).to(tl.int64) * BLOCK
    size = tl.load(sizes + tensor)
    return tensor, start + tl.arange(0, BLOCK), size, (start + BLOCK <= size).to(tl.int32)


@triton.jit
def read(addresses, tensor, inside, size, other, ALIGNED: tl.constexpr, FULL: tl.constexpr):
    """This block of the tensor."""
    at = pointers_to(addresses, tensor, inside, ALIGNED)
    if FULL:
        return tl.load(at)
    return tl.load(at, mask=inside < size, other=other)


@triton.jit
def write(addresses, tensor, inside, size, value, ALIGNED: tl.constexpr, FULL: tl.constexpr):
    """Likewise."""
    at = pointers_to(addresses, tensor, inside, ALIGNED)
    if FULL:
        tl.store(at, value)
    else:
        tl.store(at, value, mask=inside < size)


@triton.jit
def mixed(x):
    """A hash of whole numbers."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def chance(seed, tensor, inside):
    """Sixteen random bits for each number, the same whenever they are asked for."""
    return (mixed(inside.to(tl.uint32) + mixed(seed.to(tl.uint32) * 4096 + tensor.to(tl.uint32))) >> 16).to(tl.int32)


@triton.jit
def upper_half(x, low):
    """Of float32 the bits of a bfloat16, after the addition of `low` to the others: half of them, or random ones."""
    return (x.to(tl.int32, bitcast=True) + low) >> 16


@triton.jit
def widened(upper, rest):
    """The float32 whose bits these are."""
    return ((upper.to(tl.int32) << 16) + rest).to(tl.float32, bitcast=True)


@triton.jit
def read_bits(addresses, tensor, inside, size, ALIGNED: tl.constexpr, FULL: tl.constexpr):
    """This block of a tensor of sixteen bits, as whole numbers."""
    at = pointers_to(addresses, tensor, inside, ALIGNED, True)
    if FULL:
        return tl.load(at).to(tl.int32)
    return tl.load(at, mask=inside < size, other=0).to(tl.int32)


@triton.jit
def write_bits(addresses, tensor, inside, size, value, ALIGNED: tl.constexpr, FULL: tl.constexpr):
    """Likewise."""
    at = pointers_to(addresses, tensor, inside, ALIGNED, True)
    if FULL:
        tl.store(at, value.to(tl.int16))
    else:
        tl.store(at, value.to(tl.int16), mask=inside < size)


@triton.jit
def read_any(addresses, tensor, inside, size, other, ALIGNED: tl.constexpr, FULL: tl.constexpr, NARROW: tl.constexpr):
    """This block of the tensor, of float32 or, NARROW, of bfloat16."""
    if NARROW:
        return widened(read_bits(addresses, tensor, inside, size, ALIGNED, FULL), 0)
    return read(addresses, tensor, inside, size, other, ALIGNED, FULL)


@triton.jit
def write_any(
    addresses, tensor, inside, size, value, low, ALIGNED: tl.constexpr, FULL: tl.constexpr, NARROW: tl.constexpr
):
    """Likewise; `low` is what decides whether a bfloat16 is rounded up."""
    if NARROW:
        write_bits(addresses, tensor, inside, size, upper_half(value, low), ALIGNED, FULL)
    else:
        write(addresses, tensor, inside, size, value, ALIGNED, FULL)


@triton.jit
def moved_back(w, e, low):
    """What was moved by e, and then rounded with the same random bits, is in the middle of what they leave possible."""
    bits = w.to(tl.int32, bitcast=True)
    between = tl.maximum((bits & 0x7FFFFFFF) - low + (2**15 - 1), 0) | (bits & -(2**31))
    return widened(upper_half(between.to(tl.float32, bitcast=True) - e, 2**15), 0)


@triton.jit
def remaining(log_beta, count):
    """β to the power of the count, which is float64: of that, 1 − β leaves enough."""
    return tl.exp(log_beta * count)


@triton.jit
def counted(rows, n, tensor):
    """Adam's count of steps."""
    return tl.load(pointers_to(rows + 5 * n, tensor, 0, False)).to(tl.float64)


@triton.jit
def towards(g, v, rows, n, tensor, f0, delta, log_beta2, ADAM: tl.constexpr, FIRST: tl.constexpr, DAMPED: tl.constexpr):
    """∇L / (f + δ), with f as in `AdamRule.average_of`; before Adam's first step it is f₀."""
    f = v
    if ADAM:
        count = counted(rows, n, tensor)
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
def scale(reached, radius):
    """What gives the direction the length `radius`; 0/0 would turn a vanished gradient into NaN."""
    length = tl.sqrt(tl.load(reached))
    return tl.where(length > 0, radius / length, 0.0)


@launched
def reach_kernel(
    blocks, sizes, n, rows, f0, delta, log_beta2, rho, sums,
    ADAM: tl.constexpr, FIRST: tl.constexpr, DAMPED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    NARROW: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Σu², Σgx and Σg² over a block, with x = ∇L / (f + δ) and u = ρx."""
    tensor, inside, size, full = place(blocks, sizes, BLOCK)
    for FULL in tl.static_range(2):  # made twice: what is not masked is read four at a time
        if full == FULL:
            g = read_any(rows + n, tensor, inside, size, 0.0, ALIGNED, FULL, NARROW)
            v = read_any(rows + 3 * n, tensor, inside, size, 1.0, ALIGNED, FULL, LOW)
            x = towards(g, v, rows, n, tensor, f0, delta, log_beta2, ADAM, FIRST, DAMPED)
            at = sums + 3 * tl.program_id(0)
            tl.store(at, rho * rho * tl.sum(x * x))
            tl.store(at + 1, tl.sum(g * x))
            tl.store(at + 2, tl.sum(g * g))


@launched
def displace_kernel(
    blocks, sizes, n, rows, f0, delta, log_beta2, reached, radius, rho, seed, BACK: tl.constexpr,
    ADAM: tl.constexpr, FIRST: tl.constexpr, DAMPED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    NARROW: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """A block of weights, moved along ρx, all of which is to have the length `radius`; or BACK."""
    tensor, inside, size, full = place(blocks, sizes, BLOCK)
    for FULL in tl.static_range(2):  # made twice: what is not masked is read four at a time
        if full == FULL:
            p = read_any(rows, tensor, inside, size, 0.0, ALIGNED, FULL, NARROW)
            g = read_any(rows + n, tensor, inside, size, 0.0, ALIGNED, FULL, NARROW)
            v = read_any(rows + 3 * n, tensor, inside, size, 1.0, ALIGNED, FULL, LOW)
            x = towards(g, v, rows, n, tensor, f0, delta, log_beta2, ADAM, FIRST, DAMPED)
            e = finite(scale(reached, radius) * rho * x)
            low = chance(seed, tensor, inside)
            there = p + e
            if BACK:
                there = moved_back(p, e, low) if NARROW else p - e
            write_any(rows, tensor, inside, size, there, 0 if BACK else low, ALIGNED, FULL, NARROW)


@triton.jit
def pushed(ahead, g, reached, radius, factor, AGAIN: tl.constexpr):
    """ρ∇T, from the gradient of the displaced pass; or, AGAIN, an old one times the factor."""
    if AGAIN:
        return ahead * factor
    return 2 * tl.sqrt(tl.load(reached)) / radius * (ahead - g)


@launched
def total_kernel(
    blocks, sizes, n, rows, f0, delta, log_beta2, reached, radius, ahead, factor, sums,
    ADAM: tl.constexpr, FIRST: tl.constexpr, DAMPED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    NARROW: tl.constexpr, LOW: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Σ(ρ∇T)² and Σ(∇L + ρ∇T)² over a block, for what has to be known of all before any is updated."""
    tensor, inside, size, full = place(blocks, sizes, BLOCK)
    for FULL in tl.static_range(2):  # made twice: what is not masked is read four at a time
        if full == FULL:
            g = read_any(rows + n, tensor, inside, size, 0.0, ALIGNED, FULL, NARROW)
            found = read_any(ahead, tensor, inside, size, 0.0, ALIGNED, FULL, NARROW)
            penalty = pushed(found, g, reached, radius, factor, AGAIN)
            total = g + penalty
            tl.store(sums + 2 * tl.program_id(0), tl.sum(penalty * penalty))
            tl.store(sums + 2 * tl.program_id(0) + 1, tl.sum(total * total))


@launched
def finish_kernel(
    blocks, sizes, n, rows, f0, delta, log_beta2, reached, radius, rho, ahead, factor, limit, shrink, healthy, lr, sums,
    seed, log_beta1, beta1, less1, beta2, less2, eps, decay,
    ADAM: tl.constexpr, FIRST: tl.constexpr, DAMPED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    NARROW: tl.constexpr, LOW: tl.constexpr, AGAIN: tl.constexpr, AWAY: tl.constexpr, KEPT: tl.constexpr,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, WHOLE: tl.constexpr, CLIPPED: tl.constexpr,
    GUARDED: tl.constexpr, LIMITED: tl.constexpr, RATE: tl.constexpr,
):  # fmt: skip
    """A block, moved back if it is AWAY, and updated; Σ(ρ∇T)² and Σ(∇L + ρ∇T)² over it.

    `ahead` are the gradients of the displaced pass, or, with AGAIN, an old ρ∇T, to be multiplied by `factor`; where it
    is to be KEPT, the new one is put in the row after them. LIMITED, it is shrunk first. Where it is
    CLIPPED, the total is shrunk. GUARDED, it is only moved back where a number is not `healthy`. The average learns of
    ∇L, or of the WHOLE total. The learning RATE is a number, or where one is to be read. SGD's momentum is `beta1`, its
    β is `less2`, and `less` is 1 − β.
    """
    tensor, inside, size, full = place(blocks, sizes, BLOCK)
    for FULL in tl.static_range(2):  # made twice: what is not masked is read four at a time
        if full == FULL:
            w = read_any(rows, tensor, inside, size, 0.0, ALIGNED, FULL, NARROW)
            g = read_any(rows + n, tensor, inside, size, 0.0, ALIGNED, FULL, NARROW)
            v = read_any(rows + 3 * n, tensor, inside, size, 1.0, ALIGNED, FULL, LOW)
            found = read_any(ahead, tensor, inside, size, 0.0, ALIGNED, FULL, NARROW)
            penalty = pushed(found, g, reached, radius, factor, AGAIN)
            if LIMITED:
                penalty *= tl.load(limit)
            if AWAY:
                x = towards(g, v, rows, n, tensor, f0, delta, log_beta2, ADAM, FIRST, DAMPED)
                e = finite(scale(reached, radius) * rho * x)
                w = moved_back(w, e, chance(seed, tensor, inside)) if NARROW else w - e
            if NARROW and not LOW:
                rest = read_bits(rows + 4 * n, tensor, inside, size, ALIGNED, FULL)
                w = widened(w.to(tl.int32, bitcast=True) >> 16, rest)
            go = True
            if GUARDED:
                go = tl.load(healthy) != 0
            before = w
            if KEPT:
                last = penalty
                if GUARDED:
                    last = tl.where(go, penalty, read(ahead + n, tensor, inside, size, 0.0, ALIGNED, FULL))
                write(ahead + n, tensor, inside, size, last, ALIGNED, FULL)
            total = g + penalty
            at = sums + 2 * tl.program_id(0)
            tl.store(at, tl.sum(penalty * penalty))
            tl.store(at + 1, tl.sum(total * total))
            if CLIPPED:
                total *= tl.load(shrink)
            rate = lr
            if not RATE:
                rate = tl.load(lr)
            seen = total if WHOLE else g
            second = beta2 * v + less2 * seen * seen
            if ADAM:
                count = counted(rows, n, tensor)
                m = read_any(rows + 2 * n, tensor, inside, size, 0.0, ALIGNED, FULL, LOW)
                first = m + less1 * (total - m)
                upper = (1 / (1 - remaining(log_beta1, count + 1))).to(tl.float32)
                lower = tl.sqrt((1 / (1 - remaining(log_beta2, count + 1))).to(tl.float32))
                w = w * (1 - rate * decay) - rate * upper * first / (tl.sqrt(second) * lower + eps)
                if GUARDED:
                    first = tl.where(go, first, m)
                low = chance(seed + 2, tensor, inside)
                write_any(rows + 2 * n, tensor, inside, size, first, low, ALIGNED, FULL, LOW)
            else:
                total += decay * w
                if MOMENTUM:
                    m = read_any(rows + 2 * n, tensor, inside, size, 0.0, ALIGNED, FULL, LOW)
                    first = beta1 * m + total
                    total = total + beta1 * first if NESTEROV else first
                    if GUARDED:
                        first = tl.where(go, first, m)
                    low = chance(seed + 2, tensor, inside)
                    write_any(rows + 2 * n, tensor, inside, size, first, low, ALIGNED, FULL, LOW)
                w -= rate * total
            if GUARDED:
                w = tl.where(go, w, before)
                second = tl.where(go, second, v)
            if NARROW and not LOW:
                upper = upper_half(w, 2**15)
                rest = w.to(tl.int32, bitcast=True) - (upper << 16)
                write_bits(rows, tensor, inside, size, upper, ALIGNED, FULL)
                write_bits(rows + 4 * n, tensor, inside, size, rest, ALIGNED, FULL)
            else:
                low = chance(seed + 1, tensor, inside)
                write_any(rows, tensor, inside, size, w, low, ALIGNED, FULL, LOW)
            low = chance(seed + 3, tensor, inside)
            write_any(rows + 3 * n, tensor, inside, size, second, low, ALIGNED, FULL, LOW)


class Launched:
    """Tensors that lie in a row each, of one type, on one device, and the kernels on them.

    Weights in bfloat16 are displaced by stochastic rounding. Where they are few they come back from a copy, otherwise
    by the same random bits, all but those that the displacement takes past a power of two, or swallows. Their update is
    that of float32 masters, or where the averages are in bfloat16 too, it is rounded by chance, and so are these.

    Args:
        params: The weights.
        g: Their gradients.
        momenta: Adam's or SGD's; None without momentum.
        averages: f, or Adam's second moments.
        counts: Adam's steps so far, where it is Adam.
        rest: What masters have beyond weights in bfloat16, if there are masters.
        seed: By which is rounded: another one in every step.
        state: What of all that is new in the optimiser's state, to be kept after the step.
        rho, delta: ρ and δ.
        f0: Of Adam alone: a number, or None for the first gradient. An f that is given holds it already.
        betas: Of the momenta and the averages: what is left of them.
        options: Of the update: lr, decay, eps, nesterov, whole.
    """

    def __init__(
        self,
        params: Tensors,
        g: Tensors,
        momenta: Tensors | None,
        averages: Tensors,
        counts: Tensors = (),
        *,
        rest: Tensors | None = None,
        seed: int = 0,
        state: dict[Tensor, dict[str, Tensor]],
        rho: float,
        delta: float,
        f0: float | None = None,
        betas: tuple[float, float],
        **options: Any,
    ) -> None:
        self.params, self.state, self._counts = params, state, counts
        self._device = params[0].device
        self._rows = Rows(params, g, momenta or params, averages, rest or params, *([counts] if counts else []))
        self._blocks = blocks_of(tuple(map(Tensor.numel, params)), BLOCK, self._device)
        self._programs = len(self._blocks[0])
        # Of the seed these bits alone are looked at. A whole number would be another type.
        self._rho, self._betas, self._options, self._seed = float(rho), betas, options, 4 * seed % 2**20
        self._has_momentum = momenta is not None
        self._numbers = (float(f0 or 0), float(delta), _log(betas[1]))
        self._kind = {"ADAM": bool(counts), "FIRST": f0 is None, "DAMPED": delta > 0, "BLOCK": BLOCK}
        self._copy: list[Tensor] | None = None
        self._away = False
        narrow = {"NARROW": params[0].dtype, "LOW": averages[0].dtype}
        self._kind |= {name: dtype == torch.bfloat16 for name, dtype in narrow.items()}

    @property
    def places(self) -> tuple[int, ...]:
        """Where all but the gradients lie."""
        return self._rows.listed[: len(self.params)] + self._rows.listed[2 * len(self.params) :]

    def _launch(self, kernel: Any, *arguments: Any, aligned: bool = True, **kind: bool) -> None:
        """One program for each block."""
        given = (*self._blocks, self._rows.addresses, *self._numbers, *arguments)
        launch(kernel, self._programs, given, {**self._kind, **kind, "ALIGNED": aligned and self._rows.aligned})

    def _sums(self, count: int) -> Tensor:
        """Room for so many of every block."""
        return torch.empty(self._programs, count, device=self._device)

    def reach(self) -> Tensor:
        """Sums of u², of (∇L)²/(f + δ) and of (∇L)²."""
        sums = self._sums(3)
        self._launch(reach_kernel, self._rho, sums)
        return sums.sum(0)

    def displace_(self, reached: Tensor, radius: float, *, back: bool = False) -> None:
        """Move the weights along u, which, all `reached`, gets this length; where that is no number, not at all.

        Or move them back from there.
        """
        if back and self._copy is not None:
            self.come_back_()
            return
        if self._kind["NARROW"] and sum(map(Tensor.numel, self.params)) <= FEW:
            self._copy = [p.clone() for p in self.params]
        self._launch(displace_kernel, reached, radius, self._rho, self._seed, BACK=back)
        self._away = not back

    def come_back_(self) -> None:
        """Put the weights back that a copy was kept of; the others come back with their update."""
        if self._copy is not None:
            torch._foreach_copy_(self.params, self._copy)
            self._copy, self._away = None, False

    def take(self, ahead: Tensors, again: float | None, kept: Tensors | None) -> None:
        """Be told what makes ρ∇T, before `total` and `finish_`.

        Args:
            ahead: Gradients at the displaced weights; or ρ∇T, with no displacement to undo.
            again: In that case the factor to multiply it by.
            kept: Where to put ρ∇T, if anywhere.
        """
        dtype = self.params[0].dtype
        # There until the kernels are on their way. Almost always nothing is to be done, and to ask takes long.
        self._ahead = [t if t.dtype is dtype and t.is_contiguous() else t.to(dtype).contiguous() for t in ahead]
        self._second = Rows(self._ahead, *([kept] if kept is not None else []))
        self._factor = float(again or 0)
        self._source = {"AGAIN": again is not None, "aligned": self._second.aligned}
        self._keeps = kept is not None

    def total(self, reached: Tensor, radius: float) -> Tensor:
        """The sums of (ρ∇T)² and of (∇L + ρ∇T)². Args: as for the displacement."""
        sums = self._sums(2)
        self._launch(total_kernel, reached, radius, self._second.addresses, self._factor, sums, **self._source)
        return sums.sum(0)

    def finish_(
        self,
        reached: Tensor,
        radius: float,
        limit: Tensor | None = None,
        shrink: Tensor | None = None,
        healthy: Tensor | None = None,
    ) -> Tensor:
        """Undo the displacement and make the update with ∇L + ρ∇T.

        Args:
            reached: As for the displacement.
            radius: Likewise.
            limit: What ρ∇T is multiplied by, if by anything.
            shrink: What ∇L + ρ∇T is, then.
            healthy: Whether the update is to be made; None where nobody has looked.

        Returns:
            Sums of (ρ∇T)² and of (∇L + ρ∇T)² over each block.
        """
        own, sums = self._options, self._sums(2)
        lr = own["lr"].to(sums) if isinstance(own["lr"], Tensor) else float(own["lr"])
        first, second = self._betas
        rates = (_log(first), first, 1 - first, second, 1 - second, own.get("eps", 0.0), own["decay"])
        flag = None if healthy is None else healthy.view(torch.int8)
        pointers = [sums if number is None else number for number in (limit, shrink, flag)]  # else not read
        given = (reached, radius, self._rho, self._second.addresses, self._factor, *pointers, lr, sums, self._seed)
        kind = {"MOMENTUM": self._has_momentum, "NESTEROV": own.get("nesterov", False)}
        kind |= {
            "AWAY": self._away,
            "KEPT": self._keeps,
            "WHOLE": own.get("whole", False),
            "CLIPPED": shrink is not None,
        }
        kind |= {"GUARDED": healthy is not None, "LIMITED": limit is not None, "RATE": isinstance(lr, float)}
        self._launch(finish_kernel, *given, *map(float, rates), **kind, **self._source)
        return sums

    def count_(self, healthy: Tensor | None) -> None:
        """One step more, if it was made."""
        if self._counts:
            one = 1 if healthy is None else [healthy.to(self._counts[0].dtype)] * len(self._counts)  # one is read back
            torch._foreach_add_(self._counts, one)


class Rows:
    """Where tensors lie, as a table on their device: a row for each list."""

    def __init__(self, *lists: Tensors) -> None:
        device = lists[0][0].device
        self.listed = tuple(map(Tensor.data_ptr, chain.from_iterable(lists)))
        if is_capturing():
            self.addresses, self.aligned = as_arguments(list(self.listed), device), are_aligned(self.listed)
        else:
            stream = driver.active.get_current_stream(device.index) if device.type == "cuda" else 0
            self.addresses, self.aligned = table_of(self.listed, device, stream)


@lru_cache(maxsize=64)
def table_of(addresses: tuple[int, ...], device: torch.device, stream: int) -> tuple[Tensor, bool]:
    """A tensor of them, on its way to the device; and whether they are aligned.

    In most steps everything lies where it lay in one before.
    """
    table = torch.frombuffer(array("q", addresses), dtype=torch.int64)  # torch.tensor takes ten times as long
    table = table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
    return table, are_aligned(addresses)


def are_aligned(addresses: tuple[int, ...]) -> bool:
    """Whether four numbers can be read at a time."""
    return reduce(or_, addresses) % 16 == 0


def as_arguments(numbers: list[int], device: torch.device) -> Tensor:
    """A tensor of them, brought there as kernels' arguments: those a graph keeps, but nothing in the CPU's memory."""
    table = torch.zeros(len(numbers), dtype=torch.int64, device=device)
    torch._foreach_add_(table.unbind(), numbers)
    return table


@cache
def blocks_of(sizes: tuple[int, ...], block: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Which tensor each block belongs to and which of its blocks it is; the sizes; how many there are."""
    found = [(tensor, i) for tensor, size in enumerate(sizes) for i in range(triton.cdiv(size, block))]
    return torch.tensor(found, dtype=torch.int32, device=device), torch.tensor(sizes, device=device), len(sizes)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf
