"""A ResNet of CIFAR form on kernels of its own, for a GPU: a pass in a third of the time that torch's take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gtracer.lab.errors import LabError
from gtracer.lab.models.resnet import Block, ResNet

NARROWEST = 16  # channels: what a matrix unit multiplies at once. The three of an image are filled up.
PARTS = 44  # of a sum over pixels, for each of the three rows of the weights: 132 programs, one for each multiprocessor


class Tile(NamedTuple):
    """How a kernel divides its work: pixels and warps of a program, and how many loads are under way."""

    pixels: int
    warps: int
    stages: int = 1

    @property
    def options(self) -> dict[str, int]:
        return {"BLOCK": self.pixels, "num_warps": self.warps, "num_stages": self.stages}

    def wide(self) -> Tile:
        """For numbers of four bytes: with a load less under way they fit into a multiprocessor's memory."""
        return self._replace(stages=self.stages - 1)

    def grid(self, pixels: int) -> tuple[int]:
        return (-(-pixels // self.pixels),)


# By the channels that are multiplied; measured on an H200.
CONVOLVE = {16: Tile(256, 4, 3), 32: Tile(128, 4, 3), 64: Tile(64, 4, 3)}
WEIGHT_GRADIENT = {16: Tile(128, 4, 3), 32: Tile(128, 4, 3), 64: Tile(64, 8, 3)}
POINTWISE = Tile(128, 4)


@dataclass(frozen=True)
class Layer:
    """A 3 × 3 convolution of square images and the batch norm after it, and where they lie among all others."""

    conv: nn.Conv2d
    norm: nn.BatchNorm2d
    channel: int  # its first, of those of all norms
    weight: int  # its first, of all convolutions', each with its inputs filled up

    @property
    def inputs(self) -> int:
        return max(NARROWEST, self.conv.in_channels)

    @property
    def outputs(self) -> int:
        return self.conv.out_channels

    @property
    def stride(self) -> int:
        return int(self.conv.stride[0])

    @property
    def size(self) -> int:
        return 9 * self.inputs * self.outputs

    def of(self, sums: Tensor) -> Tensor:
        """Where its norm's sums begin; the second row follows after as many as there are channels."""
        return sums[0, self.channel :]

    def weights_in(self, flat: Tensor) -> Tensor:
        """Its weights there, as the parameter is indexed."""
        whole = flat[self.weight : self.weight + self.size].view(3, 3, self.inputs, self.outputs)
        return whole[:, :, : self.conv.in_channels].permute(3, 2, 0, 1)


class Fused:
    """Calls a ResNet by fused kernels; weights, statistics and mode remain the model's.

    Args:
        model: A ResNet with batch norm. The weights of its convolutions are laid out anew in memory, in place.
        dtype: What activations are stored and multiplied in; sums are float32.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype
        self.layers: list[Layer] = []
        self.channels = self.size = 0  # of all norms, of all convolutions
        for conv, norm in _pairs(model):
            # As the kernels read them and write their gradients: taps, inputs, outputs.
            conv.weight.data = conv.weight.data.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)
            layer = Layer(conv, norm, self.channels, self.size)
            self.layers.append(layer)
            self.channels, self.size = self.channels + norm.num_features, self.size + layer.size
        self.norms = [layer.norm for layer in self.layers]
        self.eps = self.norms[0].eps

    def __call__(self, x: Tensor) -> Tensor:
        """The model's output."""
        if x.ndim != 4 or x.shape[2] != x.shape[3] or x.shape[2] % 4:
            raise LabError(
                f"fused kernels take square images whose side divides by 4, got inputs of shape {tuple(x.shape)}: use "
                "kernels torch"
            )
        if not (x.is_cuda or os.environ.get("TRITON_INTERPRET")):
            raise LabError(f"fused kernels need an NVIDIA GPU, got inputs on {x.device}: use kernels torch")
        if self.model.training:
            weights = [p for layer in self.layers for p in (layer.conv.weight, layer.norm.weight, layer.norm.bias)]
            features: Tensor = _Pass.apply(self, x, *weights)  # type: ignore[no-untyped-call]
        else:
            features = Forward(self, x, self._known_sums(), by_batch=False).y[-1]
        head: nn.Module = self.model[-1]  # type: ignore[index]
        found: Tensor = head(features[:, 1:-1, 1:-1].mean((1, 2), dtype=torch.float32))
        return found

    def packed(self, device: torch.device) -> Tensor:
        """All convolutions' weights, in the precision that they are multiplied in."""
        flat = torch.zeros(self.size, dtype=self.dtype, device=device)
        torch._foreach_copy_(
            [layer.weights_in(flat) for layer in self.layers], [layer.conv.weight for layer in self.layers]
        )
        return flat

    def _known_sums(self) -> Tensor:
        """What the sums over one pixel would have to be to give the running statistics."""
        means, variances = (torch.cat(self._statistics(name)) for name in ("running_mean", "running_var"))
        return torch.stack([means, variances + means.square()])

    def take_up(self, sums: Tensor, pixels: tuple[int, ...]) -> None:
        """Move the running statistics towards the batch's, as BatchNorm2d does."""
        sizes = [norm.num_features for norm in self.norms]
        counts = _counts(pixels, tuple(sizes), sums.device)
        means = sums[0] / counts
        variances = (sums[1] / counts - means.square()) * (counts / (counts - 1))
        momentum: float = self.norms[0].momentum  # type: ignore[assignment]
        for name, now in (("running_mean", means), ("running_var", variances)):
            torch._foreach_lerp_(self._statistics(name), list(torch.split(now, sizes)), momentum)
        torch._foreach_add_(self._statistics("num_batches_tracked"), 1)

    def _statistics(self, name: str) -> list[Tensor]:
        return [getattr(norm, name) for norm in self.norms]


class Forward:
    """A pass forward, and all that the way back needs: of every layer its input, framed, and its output z.

    Args:
        net: Whose pass.
        x: The images.
        sums: For the norms; filled on the way where `by_batch`, else of the running statistics.
        by_batch: Whether to normalise by the batch, as in training.
    """

    def __init__(self, net: Fused, x: Tensor, sums: Tensor, *, by_batch: bool) -> None:
        self.net, self.sums, self.by_batch = net, sums, by_batch
        self.weights = net.packed(x.device)
        n, given, size, _ = x.shape
        framed = x.new_zeros(n, size + 2, size + 2, NARROWEST, dtype=net.dtype)
        framed[:, 1:-1, 1:-1, :given] = x.permute(0, 2, 3, 1)
        self.y, self.z = [framed], list[Tensor]()
        for i, layer in enumerate(net.layers):
            self.z.append(self._convolved(self.y[-1], layer))
            ends_block = i > 0 and i % 2 == 0
            self.y.append(self._activated(self.z[-1], layer, self.y[-2] if ends_block else None))

    def _convolved(self, y: Tensor, layer: Layer) -> Tensor:
        n, side = y.shape[:2]
        out = -(-(side - 2) // layer.stride)
        z = y.new_empty(n, out, out, layer.outputs)
        pixels, tile = n * out * out, CONVOLVE[layer.inputs]
        _kernels().convolve[tile.grid(pixels)](
            y, self.weights[layer.weight :], z, layer.of(self.sums), pixels, HI=side - 2, HO=out, CI=layer.inputs,
            CO=layer.outputs, STRIDE=layer.stride, STATS=self.by_batch, TOTAL=self.net.channels, **tile.options,
        )  # fmt: skip
        return z

    def _activated(self, z: Tensor, layer: Layer, shortcut: Tensor | None) -> Tensor:
        n, size, _, channels = z.shape
        y = z.new_empty(n, size + 2, size + 2, channels)
        pixels, origin = y.numel() // channels, z if shortcut is None else shortcut
        _kernels().activate[POINTWISE.grid(pixels)](
            z, layer.of(self.sums), layer.norm.weight, layer.norm.bias, origin, y, pixels, self.count(z), self.net.eps,
            H=size, CI=origin.shape[3], C=channels, STRIDE=1 if shortcut is None else (shortcut.shape[1] - 2) // size,
            RESIDUAL=shortcut is not None, TOTAL=self.net.channels, **POINTWISE.options,
        )  # fmt: skip
        return y

    def count(self, z: Tensor) -> float:
        """How many numbers a channel's sums are over."""
        return float(z.numel() // z.shape[3] if self.by_batch else 1)


class Backward:
    """The way back, from the gradient by the last activations to those by the weights."""

    def __init__(self, forward: Forward, d: Tensor) -> None:
        self.forward, self.net = forward, forward.net
        self.slopes = torch.zeros_like(forward.sums)
        self.parts = d.new_empty(PARTS, self.net.size, dtype=torch.float32)
        last = len(self.net.layers) - 1
        d = self._masked(d[:, 1:-1, 1:-1].contiguous(), last)
        for i in range(last, 0, -2):
            inner = self._convolved(self._through_norm(d, i), i, None)
            d = self._convolved(self._through_norm(inner, i - 1), i - 1, d)
        self._through_norm(d, 0)

    def gradients(self) -> Iterator[Tensor]:
        """By the weights, in their order."""
        flat = self.parts.sum(0)
        for layer in self.net.layers:
            own = slice(layer.channel, layer.channel + layer.outputs)
            yield from (layer.weights_in(flat), self.slopes[1, own], self.slopes[0, own])

    def _masked(self, d: Tensor, i: int) -> Tensor:
        """The gradient by what the norm of layer i adds to its activation."""
        y, z, layer = self.forward.y[i + 1], self.forward.z[i], self.net.layers[i]
        out, pixels = torch.empty_like(z), z.numel() // layer.outputs
        _kernels().mask_out[POINTWISE.grid(pixels)](
            d, y, z, layer.of(self.forward.sums), out, layer.of(self.slopes), pixels, float(pixels), self.net.eps,
            H=z.shape[1], C=layer.outputs, TOTAL=self.net.channels, **POINTWISE.options,
        )  # fmt: skip
        return out

    def _through_norm(self, d: Tensor, i: int) -> Tensor:
        """From the gradient by the norm of layer i to that by its convolution, and with it to that by its weights."""
        y, z, layer = self.forward.y[i], self.forward.z[i], self.net.layers[i]
        n, side = y.shape[:2]
        sizes = {"HI": side - 2, "HO": z.shape[1], "STRIDE": layer.stride}
        out = z.new_empty(n, side, side, layer.outputs)
        _kernels().norm_gradient[POINTWISE.grid(n * side * side)](
            d, z, layer.of(self.forward.sums), layer.of(self.slopes), layer.norm.weight, out, n * side * side,
            self.forward.count(z), self.net.eps, **sizes, C=layer.outputs, TOTAL=self.net.channels, **POINTWISE.options,
        )  # fmt: skip
        tile = WEIGHT_GRADIENT[layer.inputs]
        tile = tile.wide() if self.net.dtype == torch.float32 else tile
        _kernels().weight_gradient[(PARTS, 3)](
            y, out, self.parts[0, layer.weight :], z.numel() // layer.outputs, SIZE=self.net.size, **sizes,
            CI=layer.inputs, CO=layer.outputs, **tile.options,
        )  # fmt: skip
        return out

    def _convolved(self, d: Tensor, i: int, shortcut: Tensor | None) -> Tensor:
        """From the gradient by the convolution of layer i to that by the norm before it."""
        y, u, layer, below = self.forward.y[i], self.forward.z[i - 1], self.net.layers[i], self.net.layers[i - 1]
        out, pixels, tile = torch.empty_like(u), u.numel() // layer.inputs, CONVOLVE[layer.outputs]
        came = out if shortcut is None else shortcut
        _kernels().convolve_back[tile.grid(pixels)](
            d, self.forward.weights[layer.weight :], y, u, below.of(self.forward.sums), came, out,
            below.of(self.slopes), pixels, float(pixels), self.net.eps, H=u.shape[1], HS=came.shape[1],
            CI=layer.inputs, CO=layer.outputs, STRIDE=layer.stride, RESIDUAL=shortcut is not None,
            TOTAL=self.net.channels, **tile.options,
        )  # fmt: skip
        return out


class _Pass(torch.autograd.Function):
    """From images to the last block's activations, framed, in training mode."""

    @staticmethod
    def forward(ctx: Any, net: Fused, x: Tensor, *weights: Tensor) -> Tensor:
        forward = Forward(net, x, torch.zeros(2, net.channels, device=x.device), by_batch=True)
        net.take_up(forward.sums, tuple(z.numel() // z.shape[3] for z in forward.z))
        ctx.made = forward
        last = forward.y.pop()
        ctx.save_for_backward(last)
        return last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        ctx.made.y.append(*ctx.saved_tensors)
        return None, None, *Backward(ctx.made, d).gradients()


@cache
def _counts(pixels: tuple[int, ...], sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """For each channel of all norms, how many numbers its sums are over."""
    return torch.tensor([float(n) for n, size in zip(pixels, sizes, strict=True) for _ in range(size)], device=device)


def _pairs(model: nn.Module) -> Iterator[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    """Every convolution with its norm, from the first to the last; refused where the model is of another form."""
    if not isinstance(model, ResNet) or not isinstance(model[1], nn.BatchNorm2d):
        raise LabError("fused kernels are for resnet20, resnet32, … with batch norm: use kernels torch or compiled")
    yield model[0], model[1]  # type: ignore[misc]
    for block in model:
        if isinstance(block, Block):
            yield block.conv1, block.norm1  # type: ignore[misc]
            yield block.conv2, block.norm2  # type: ignore[misc]


@cache
def _kernels() -> Any:
    try:
        from gtracer.lab.kernels import resnet_triton
    except ImportError as error:
        raise LabError("fused kernels need triton, which comes with torch for CUDA: use kernels torch") from error
    return resnet_triton
