"""Convolutions on the 4-D grid: Algorithm 1 of the 4D paper with input and output channels as k and n.

Activations are channels-last, [samples, height, width, channels]. Samples are split over data and z.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gpt4d.parallel.kernels import Tensor, kernel
from gpt4d.parallel.layers import sharding
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layers.product import FEATURES, Input, ProductContext, add_gradient_, multiply
from gpt4d.parallel.layers.sharding import Axes
from gpt4d.parallel.layout import Layout, Matrices, ParameterSpec
from gpt4d.parallel.lazy import F, torch


@dataclass(frozen=True)
class Convolution:
    """A convolution (gpt4d.parallel.layers.product.Operation) with a weight [out, in, kh, kw], or [in, out, kh, kw].

    With ``upsampling``, the pixels of the input are repeated first. The saved input and its gradient have the shape
    before upsampling. ``in_first``: input channels are the first dim of the weight.
    """

    stride: tuple[int, int]
    padding: tuple[int, int]
    upsampling: int
    in_first: bool

    def convolved_size(self, size: Sequence[int], kernel_size: Sequence[int]) -> tuple[int, int]:
        """Return height and width of the output for an upsampled input of ``size``."""
        height, width = (
            (extent + 2 * padding - kernel) // stride + 1
            for extent, padding, kernel, stride in zip(size, self.padding, kernel_size, self.stride, strict=True)
        )
        return height, width

    def forward(self, x, weight, bias):
        return convolution(self._enlarged(x), weight, bias, self)

    def input_gradient(self, d_out, weight, x):
        d_x = convolution_input_gradient(d_out, weight, x, self)
        return d_x if self.upsampling == 1 else sums_of_repeated(d_x, self.upsampling)

    def weight_gradient(self, d_out, x, weight, added_to):
        gradient = convolution_weight_gradient(d_out, self._enlarged(x), weight, self)
        return as_stored(gradient, weight) if added_to is None else add_gradient_(added_to, gradient)

    def _enlarged(self, x):
        return x if self.upsampling == 1 else enlarged(x, self.upsampling)


def _enlarged_shape(x, factor: int) -> tuple[int, ...]:
    return x.shape[0], x.shape[1] * factor, x.shape[2] * factor, x.shape[3]


def _forward_flops(x, weight, bias, settings: Convolution) -> int:
    size = settings.convolved_size(x.shape[1:3], weight.shape[2:])
    return 2 * x.shape[0] * math.prod(size) * math.prod(weight.shape)


def _input_gradient_flops(d_out, weight, *_) -> int:
    return 2 * math.prod(d_out.shape[:-1]) * math.prod(weight.shape)


def _weight_gradient_flops(d_out, x, weight, *_) -> int:
    return 2 * math.prod(d_out.shape) * x.shape[-1] * math.prod(weight.shape[2:])


def choose_algorithms(device: torch.device, replicates: bool) -> None:
    """Determine how cuDNN and MIOpen choose the algorithms of convolutions on a GPU.

    cuDNN measures which algorithm is the fastest, unless results must not depend on it: if ranks compute equal values
    from equal inputs (``replicates``), or torch uses deterministic algorithms. MIOpen takes minutes to measure.

    Convolutions in fp32 do not use TF32, which torch permits by default for convolutions, but not for matrix products.
    """
    if device.type != "cuda":
        return
    torch.backends.cudnn.allow_tf32 = False
    reproducible = replicates or torch.are_deterministic_algorithms_enabled()
    torch.backends.cudnn.deterministic = replicates
    torch.backends.cudnn.benchmark = not reproducible and torch.version.hip is None


@kernel(lambda x, factor: x.like(_enlarged_shape(x, factor)))
def enlarged(x, factor: int):
    """Return [B, height, width, channels] with each pixel repeated ``factor`` times along height and width."""
    b, h, w, c = x.shape
    return x[:, :, None, :, None].expand(b, h, factor, w, factor, c).reshape(b, h * factor, w * factor, c)


def _sums_of_repeated_results(d_large, factor: int):
    batch, height, width, channels = d_large.shape
    return d_large.like((batch, height // factor, width // factor, channels))


@kernel(_sums_of_repeated_results)
def sums_of_repeated(d_large, factor: int):
    """Return the gradient of the input of ``enlarged``, contiguous."""
    b, h, w, c = d_large.shape
    return d_large.reshape(b, h // factor, factor, w // factor, factor, c).sum((2, 4)).contiguous()


def _out_first(weight: torch.Tensor, in_first: bool) -> torch.Tensor:
    return weight.transpose(0, 1) if in_first else weight


def _convolution_results(x, weight, bias, settings: Convolution):
    size = settings.convolved_size(x.shape[1:3], weight.shape[2:])
    return x.like((x.shape[0], *size, weight.shape[1 if settings.in_first else 0]))


@kernel(_convolution_results, flops=_forward_flops)
def convolution(x, weight, bias, settings: Convolution):
    """Return the output for an upsampled input, [B, height, width, out channels], contiguous."""
    weight = _out_first(weight, settings.in_first)
    out = F.conv2d(x.movedim(-1, 1), weight, bias, settings.stride, settings.padding)
    return out.movedim(1, -1).contiguous()


@kernel(
    lambda d_out, weight, x, settings: x.like(_enlarged_shape(x, settings.upsampling)),
    flops=_input_gradient_flops,
    unread=("x",),
)
def convolution_input_gradient(d_out, weight, x, settings: Convolution):
    """Return the gradient of ``x`` after upsampling. It is contiguous if there is no upsampling."""
    b, h, w, c = x.shape
    factor = settings.upsampling
    if factor > 1:
        x = x.new_empty(b, h * factor, w * factor, c)
    d_x = _gradient(d_out, x.movedim(-1, 1), _out_first(weight, settings.in_first), settings, 0).movedim(1, -1)
    return d_x if factor > 1 else d_x.contiguous()


def _convolution_weight_gradient_results(d_out, x, weight, settings: Convolution):
    channels = (x.shape[-1], d_out.shape[-1]) if settings.in_first else (d_out.shape[-1], x.shape[-1])
    return weight.like((*channels, *weight.shape[2:]))


@kernel(_convolution_weight_gradient_results, flops=_weight_gradient_flops, unread=("weight",))
def convolution_weight_gradient(d_out, x, weight, settings: Convolution):
    """Return the gradient of the gathered weight for an upsampled input.

    On a CPU it has the dtype of its shard ``weight``. On a GPU it has the dtype of the activations, so it is rounded to
    bf16 once if these are bf16.
    """
    dtype = weight.dtype if x.is_cpu else x.dtype
    d_out, x = d_out.to(dtype), x.movedim(-1, 1).to(dtype)
    shape = (d_out.shape[-1], x.shape[1], *weight.shape[2:])
    return _out_first(_gradient(d_out, x, x.new_empty(1).expand(shape), settings, 1), settings.in_first)


@kernel(lambda gradient, weight: weight.like(gradient.shape), unread=("weight",))
def as_stored(gradient, weight):
    """Return a weight's gradient in the dtype of its shard, contiguous."""
    return gradient.to(weight.dtype).contiguous()


def _gradient(d_out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, settings, which: int) -> torch.Tensor:
    """Return the gradient of ``x`` (``which=0``) or of ``weight`` (1); only its shape and strides are read."""
    mask, dilation, output_padding = [which == 0, which == 1, False], (1, 1), (0, 0)
    sizes = settings.stride, settings.padding, dilation, False, output_padding
    return torch.ops.aten.convolution_backward(d_out.movedim(-1, 1), x, weight, None, *sizes, 1, mask)[which]


@dataclass(frozen=True)
class Conv2dSpec(LayerSpec):
    """A convolution, ``[B, height, width, in_channels] → [B, height, width, out_channels]``.

    With ``NORMAL`` axes, y splits the input channels and x the output channels. With ``TRANSPOSED`` axes, x and y
    exchange their roles, so that the input is the output of a normal convolution. None instead of an axis: no axis
    splits these channels, such as the channels of images.

    Attributes:
        in_channels: global number of input channels.
        out_channels: global number of output channels.
        kernel: height and width of the kernel, or one number for both; ``stride`` and ``padding`` likewise.
        axes: the axes that split the channels of the input and of the output.
        stride: stride of the convolution, in pixels.
        padding: zero padding on each side, in pixels.
        upsampling: factor by which each pixel of the input is first repeated along height and width.
        bias: add a bias after the all-reduce over the contracted axis.
        std: standard deviation of the initial weight; None for the standard deviation of torch's initial values.
        scatter_output: reduce-scatter the output over its channels, so that input and output have the same layout.
            ``axes`` must be (a, None).
        group: group of the weight: ``matrices``, ``embeddings`` if it reads images, ``head`` if it writes them.
    """

    in_channels: int
    out_channels: int
    kernel: Any
    axes: Axes = sharding.NORMAL
    stride: Any = 1
    padding: Any = 0
    upsampling: int = 1
    bias: bool = True
    std: float | None = None
    scatter_output: bool = False
    group: str = "matrices"
    bias_gradient: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("kernel", "stride", "padding"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value, value) if isinstance(value, int) else value)

    @property
    def split(self) -> Axes:
        """The axes that split the channels of the input and of the output."""
        return self.axes

    @property
    def operation(self) -> Convolution:
        """The computation of the layer on one rank."""
        return Convolution(self.stride, self.padding, self.upsampling, in_first=self.axes.produced is None)

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return weight [out, in, *kernel] and bias [out]; the weight is [in, out, *kernel] if no axis splits out.

        z splits the first dim of the stored weight. If no axis splits the output channels, they can be as few as the
        three of a U-Net's last convolution, so the input channels come first.
        """
        std = (3 * self.in_channels * math.prod(self.kernel)) ** -0.5 if self.std is None else self.std
        channels, split = (self.in_channels, self.out_channels), tuple(self.axes)
        if self.axes.produced is not None:
            channels, split = channels[::-1], split[::-1]
        layout = Layout(sharding.named(split[0], "z"), sharding.named(split[1]), (), ())
        matrices = Matrices(outputs=int(self.axes.produced is None)) if self.group == "matrices" else None
        weight = ParameterSpec(
            (*channels, *self.kernel), layout, std=std, group=self.group, matrices=matrices, streamed=True
        )
        parameters = {"weight": weight}
        if self.bias:
            parameters["bias"] = ParameterSpec((self.out_channels,), Layout(sharding.named(self.axes.produced)))
        return parameters

    def prepare(self, layer: BoundLayer) -> None:
        contracted, produced = map(layer.context.grid.axis, self.axes)
        split = FEATURES if self.scatter_output else None
        layer.product = ProductContext(layer.weights, self.operation, contracted, produced, inner_split=split)

    def forward(self, layer: BoundLayer, x_BHWC: Input) -> Awaitable[Tensor]:
        bias = layer.bias if self.bias else None
        return multiply(x_BHWC, layer.weight, bias, layer.product, layer.current_pass)
