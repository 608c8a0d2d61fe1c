"""Convolutions and batch norm whose second derivatives cost no more than they must.

torch differentiates a convolution's backward through convolutions with kernels as large as the image, and batch norm's
through a hundred small operations; on a GPU that was half of an exact step. Here the first becomes the six
convolutions that it is made of, each torch's own kernel, and the second five means and two sums of products; batch norm
in evaluation, which is linear, one sum and four products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten


class SecondDerivatives(TorchFunctionMode):
    """Inside, convolutions, batch norm and weight norm use the functions below; everything else stays the same.

    Args:
        run: Wraps functions that are called often and not differentiated further, for example to compile them.

    >>> layer = torch.nn.Conv2d(1, 1, 3, bias=False)
    >>> with SecondDerivatives():
    ...     output = layer(torch.zeros(1, 1, 4, 4))
    >>> output.grad_fn.name(), torch.equal(output, layer(torch.zeros(1, 1, 4, 4)))
    ('ConvolutionBackward', True)
    """

    def __init__(self, run: Callable[..., Any] = lambda function: function) -> None:
        super().__init__()
        self._run = run
        convolutions = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
        self._known: dict[Any, Callable[..., Tensor | None]] = {
            name: self._convolution(dimensions) for name, dimensions in convolutions.items()
        } | {functional.batch_norm: self._batch_norm, torch._weight_norm: weight_norm}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make the layers that are known; torch makes what they decline."""
        kwargs = kwargs or {}
        known = self._known.get(func)
        made = None if known is None or _is_transformed() else known(*args, **kwargs)
        return func(*args, **kwargs) if made is None else made

    def _convolution(self, dimensions: int) -> Callable[..., Tensor | None]:
        def convolution(
            input: Tensor,
            weight: Tensor,
            bias: Tensor | None = None,
            stride: Any = 1,
            padding: Any = 0,
            dilation: Any = 1,
            groups: int = 1,
        ) -> Tensor | None:
            if isinstance(padding, str) or input.ndim != dimensions + 2 or input.is_complex():
                return None
            kind = input.device.type
            if torch.is_autocast_enabled(kind) and input.dtype != torch.float64:
                input, weight = (t.to(torch.get_autocast_dtype(kind)) for t in (input, weight))
            steps, frame, gaps = (_each(dimensions, n) for n in (stride, padding, dilation))
            how = Sliding(steps, frame, gaps, [0] * dimensions, groups)
            output: Tensor = Convolution.apply(input, weight, how)  # type: ignore[no-untyped-call]
            return output if bias is None else output + bias.to(output.dtype).view(-1, *[1] * dimensions)

        return convolution

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor | None:
        if weight is None or bias is None or (training and input.numel() == input.shape[1]):
            return None
        kept = (running_mean, running_var, training, momentum, eps)
        output: Tensor = BatchNorm.apply(input, weight, bias, *kept, self._run)  # type: ignore[no-untyped-call]
        return output


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g v/‖v‖, filter by filter. The second derivatives of torch's own take ‖v‖ for a constant."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _is_transformed() -> bool:
    """Whether torch.func's transforms are at work, which want to see torch's own operations."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _each(dimensions: int, number: Any) -> list[int]:
    numbers = [number] if isinstance(number, int) else list(number)
    return numbers * dimensions if len(numbers) == 1 else numbers


class Sliding(NamedTuple):
    """How a kernel goes over its input."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    output_padding: list[int]
    groups: int

    def over(self, x: Tensor, w: Tensor) -> Tensor:
        """The convolution."""
        output: Tensor = aten.convolution(x, w, None, *self[:3], False, *self[3:])
        return output

    def back(self, up: Tensor, x: Tensor, w: Tensor, needed: tuple[bool, bool]) -> tuple[Tensor | None, Tensor | None]:
        """Derivatives by input and by weight, those that are `needed`."""
        by_x, by_w, _ = aten.convolution_backward(up, x, w, None, *self[:3], False, *self[3:], [*needed, False])
        return by_x, by_w


class Convolution(Function):
    """A convolution without bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, how: Sliding) -> Tensor:
        """As torch does it."""
        ctx.how = how
        ctx.save_for_backward(x, w)
        return how.over(x, w)

    @staticmethod
    def backward(ctx: Any, up: Tensor) -> Any:
        """As torch does it, in a function whose derivative is known."""
        needed = ctx.needs_input_grad[:2]
        slopes: Any = ConvolutionSlopes.apply(up, *ctx.saved_tensors, ctx.how, needed)  # type: ignore[no-untyped-call]
        return *slopes, None


class ConvolutionSlopes(Function):
    """A convolution's derivatives, which are linear in each of what they are made of."""

    @staticmethod
    def forward(ctx: Any, up: Tensor, x: Tensor, w: Tensor, how: Sliding, needed: tuple[bool, bool]) -> Any:
        """As torch does it."""
        ctx.how = how
        ctx.save_for_backward(up, x, w)
        ctx.set_materialize_grads(False)
        return how.back(up, x, w, needed)

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None) -> Any:
        """Of ⟨a, derivative by x⟩ + ⟨b, derivative by w⟩ = ⟨up, a ∗ w + x ∗ b⟩."""
        up, x, w = ctx.saved_tensors
        how, (by_up, by_x, by_w) = ctx.how, ctx.needs_input_grad[:3]
        pairs = [(x, w) for x, w in ((a, w), (x, b)) if by_up and x is not None and w is not None]
        dx = how.back(up, x, b, (True, False))[0] if by_x and b is not None else None
        dw = how.back(up, a, w, (False, True))[1] if by_w and a is not None else None
        return sum((how.over(*pair) for pair in pairs[1:]), how.over(*pairs[0])) if pairs else None, dx, dw, None, None


class BatchNorm(Function):
    """Batch norm, by the batch's own mean and deviation in training, by the running ones in evaluation."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        training: bool,
        momentum: float,
        eps: float,
        run: Any,
    ) -> Tensor:
        """As torch does it."""
        y, mean, scale = torch.native_batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)
        running = (None, None) if training else (running_mean, running_var)
        ctx.eps, ctx.run, ctx._saved_training = eps, run, training  # as torch's own node calls it
        ctx.save_for_backward(x, weight, mean, scale, *running)
        return y

    @staticmethod
    def backward(ctx: Any, up: Tensor) -> Any:
        """As torch does it, in a function whose derivative is known."""
        slopes: Any = BatchNormSlopes.apply(up, *ctx.saved_tensors, ctx.eps, ctx.run)  # type: ignore[no-untyped-call]
        return *slopes, *[None] * 6


class BatchNormSlopes(Function):
    """Batch norm's derivatives by input, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        up: Tensor,
        x: Tensor,
        weight: Tensor,
        mean: Tensor,
        scale: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        eps: float,
        run: Any,
    ) -> Any:
        """As torch does it."""
        ctx.run, ctx.is_fixed = run, running_mean is not None
        if running_mean is not None and running_var is not None:
            ctx.save_for_backward(up, x, weight, running_mean, (running_var + eps).rsqrt())
        else:
            ctx.save_for_backward(up, x, weight, mean, scale)
        by = (running_mean, running_var, mean, scale, not ctx.is_fixed, eps, [True] * 3)
        return aten.native_batch_norm_backward(up, x, weight, *by)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        """Compiled, perhaps, unless it is to be differentiated."""
        curvature = fixed_norm_curvature if ctx.is_fixed else batch_norm_curvature
        own = curvature if torch.is_grad_enabled() else ctx.run(curvature)
        return *own(*cotangents, *ctx.saved_tensors), *[None] * 6


def fixed_norm_curvature(
    a: Tensor, b: Tensor, c: Tensor, g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives of S = ⟨a, dx⟩ + ⟨b, dγ⟩ + ⟨c, dβ⟩ by g, x and γ, where mean and scale are not the batch's.

    Then x̂ = (x − μ) r is linear in x, dx = γr g, dγ = Σ g x̂ and dβ = Σ g.
    """
    channel = [1, -1, *[1] * (x.ndim - 2)]
    slope = b * scale
    by_g = torch.addcmul((c - mean * slope).view(channel), x, slope.view(channel))
    by_g = by_g.addcmul(a, (weight * scale).view(channel))
    by_x = g * slope.view(channel)
    by_gamma = scale * (a * g).sum([0, *range(2, x.ndim)], dtype=scale.dtype)
    return by_g.to(g.dtype), by_x.to(x.dtype), by_gamma.to(weight.dtype)


def batch_norm_curvature(
    a: Tensor, b: Tensor, c: Tensor, g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives of S = ⟨a, dx⟩ + ⟨b, dγ⟩ + ⟨c, dβ⟩ by g, x and γ.

    With x̂ = (x − μ) r and means over a channel's n numbers, batch norm's own derivatives are dx = γr (g − ḡ − x̂ m(gx̂)),
    dγ = Σ g x̂ and dβ = Σ g. So S is linear in g; it depends on x through x̂, by which its derivative is
    h = −γr m(gx̂) a + (b − γr m(ax̂)) g, and through the factor r, whose derivative by x is −r² x̂/n.
    """
    channel = [1, -1, *[1] * (x.ndim - 2)]
    gamma, mu, r, b, c = (t.view(channel) for t in (weight, mean, scale, b, c))
    normal = (x - mu) * r
    m_a, m_g, m_ax, m_gx, m_ag = (_mean(t) for t in (a, g, a * normal, g * normal, a * g))
    left = m_ag - m_a * m_g - m_ax * m_gx  # what of ⟨a, g⟩/n batch norm lets through
    by_g = gamma * r * (a - m_a - normal * m_ax) + b * normal + c
    on_a, on_g = -gamma * r * m_gx, b - gamma * r * m_ax
    along = on_a * m_ax + on_g * m_gx + gamma * r * left
    by_x = r * (on_a * (a - m_a) + on_g * (g - m_g) - normal * along)
    by_gamma = (r * left).flatten() * (x.numel() // x.shape[1])
    return by_g.to(g.dtype), by_x.to(x.dtype), by_gamma.to(weight.dtype)


def _mean(t: Tensor) -> Tensor:
    """Over all but the channel, in float32 at least."""
    dtype = torch.promote_types(t.dtype, torch.float32)
    return t.mean([0, *range(2, t.ndim)], keepdim=True, dtype=dtype)
