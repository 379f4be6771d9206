"""Convolutions on the 4-D grid: Algorithm 1 of the 4D paper with input and output channels as k and n. No torch here.

Activations are [samples, height, width, channels], channels last as features are. Samples are split over data and z.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from gpt4d.parallel.function import kernel
from gpt4d.parallel.layers import specs
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layers.product import FEATURES, ProductContext, multiply
from gpt4d.parallel.layers.specs import Axes
from gpt4d.parallel.layout import Layout, ParameterSpec


@dataclass(frozen=True)
class Convolution:
    """A convolution (gpt4d.parallel.layers.product.Operation) with a weight [out, in, kh, kw], or [in, out, kh, kw].

    With ``upsampling`` the pixels of the input are repeated first. The saved input and its gradient have the shape
    before the repetition. ``in_first``: input channels are the first dim of the weight.
    """

    stride: tuple[int, int]
    padding: tuple[int, int]
    upsampling: int
    in_first: bool

    def out_size(self, size: tuple[int, int], kernel_size: tuple[int, int]) -> tuple[int, int]:
        """Return height and width of the output for an input of ``size``."""
        height, width = (
            (extent * self.upsampling + 2 * padding - kernel) // stride + 1
            for extent, padding, kernel, stride in zip(size, self.padding, kernel_size, self.stride, strict=True)
        )
        return height, width

    def forward(self, x, weight, bias):
        return convolution(x, weight, bias, self)

    def input_gradient(self, d_out, weight, x):
        return convolution_input_gradient(d_out, weight, x, self)

    def weight_gradient(self, d_out, x, weight, added_to=None):
        return convolution_weight_gradient(d_out, x, weight, added_to, self)


@kernel
def convolution(x, weight, bias, settings: Convolution):
    """Return the output, [B, height, width, out channels], contiguous."""
    size = settings.out_size(x.shape[1:3], weight.shape[2:])
    return x.like((x.shape[0], *size, weight.shape[1 if settings.in_first else 0]))


@kernel
def convolution_input_gradient(d_out, weight, x, settings: Convolution):
    """Return the gradient of the input, in the shape of ``x``, which is not read."""
    return x.like()


@kernel
def convolution_weight_gradient(d_out, x, weight, added_to, settings: Convolution):
    """Return the gradient of the gathered weight in the dtype of its shard ``weight``, added to ``added_to`` if given.

    On a GPU, the result of bf16 activations is rounded to bf16 once.
    """
    channels = (x.shape[-1], d_out.shape[-1]) if settings.in_first else (d_out.shape[-1], x.shape[-1])
    return added_to or weight.like((*channels, *weight.shape[2:]))


@dataclass(frozen=True)
class Conv2dSpec(LayerSpec):
    """``[B, height, width, in_channels] → [B, height, width, out_channels]``.

    With ``NORMAL`` axes y splits the input channels and x the output channels. With ``TRANSPOSED`` axes x and y
    exchange their roles, so that the input is the output of a normal convolution. No axis (None) splits the channels
    of images.

    Attributes:
        in_channels: global number of input channels.
        out_channels: global number of output channels.
        kernel: height and width of the kernel; one number stands for both, also in ``stride`` and ``padding``.
        axes: axes that split the input's and the output's channels.
        stride: distance between the places of the kernel.
        padding: zeros around the image.
        upsampling: repeat each pixel of the input so many times along height and width first.
        bias: add a bias after the sum over the contracted axis.
        std: standard deviation of the initial weight; None for the standard deviation of torch's initial values.
        scatter_output: the contracted axis splits the output's channels too: a sum that is scattered, of a layer whose
            input and output have the same layout (``axes`` (a, None)).
    """

    in_channels: int
    out_channels: int
    kernel: Any
    axes: Axes = specs.NORMAL
    stride: Any = 1
    padding: Any = 0
    upsampling: int = 1
    bias: bool = True
    std: float | None = None
    scatter_output: bool = False
    bias_gradient: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("kernel", "stride", "padding"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value, value) if isinstance(value, int) else value)

    @property
    def operation(self) -> Convolution:
        """The computation of the layer on one rank."""
        return Convolution(self.stride, self.padding, self.upsampling, in_first=self.axes.produced is None)

    @property
    def weight_elements(self) -> int:
        """Number of elements of the global weight."""
        return self.in_channels * self.out_channels * math.prod(self.kernel)

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return weight [out, in, *kernel] and bias [out]; the weight is [in, out, *kernel] if no axis splits out.

        So z, which splits the stored rows, splits the channels that there are many of: the last convolution of a U-Net
        has three output channels.
        """
        std = (3 * self.in_channels * math.prod(self.kernel)) ** -0.5 if self.std is None else self.std
        channels, split = (self.in_channels, self.out_channels), tuple(self.axes)
        if self.axes.produced is not None:
            channels, split = channels[::-1], split[::-1]
        layout = Layout(specs.named(split[0], "z"), specs.named(split[1]), (), ())
        parameters = {"weight": ParameterSpec((*channels, *self.kernel), layout, std=std, decay=True, streamed=True)}
        if self.bias:
            parameters["bias"] = ParameterSpec((self.out_channels,), Layout(specs.named(self.axes.produced)))
        return parameters

    def prepare(self, layer: BoundLayer) -> None:
        contracted, produced = map(layer.context.grid.axis, self.axes)
        split = FEATURES if self.scatter_output else None
        layer.product = ProductContext(layer.context, self.operation, contracted, produced, inner_split=split)

    async def forward(self, layer: BoundLayer, x_BHWC: Any) -> Any:
        return await multiply(x_BHWC, layer.weight, layer.bias if self.bias else None, layer.product)
