"""Convolutions on the 4-D grid: Algorithm 1 of the 4D paper with input and output channels as k and n.

Activations are [samples, height, width, channels], channels last as features are. Samples are split over data and z.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from gpt4d.parallel.layers import specs
from gpt4d.parallel.layers.product import FEATURES, ProductContext, multiply
from gpt4d.parallel.layers.specs import Axes
from gpt4d.parallel.recomputation import Recomputable
from gpt4d.parallel.weights import WeightStream


def pair(value: int | tuple[int, int]) -> tuple[int, int]:
    """Return a setting for height and width, of which one number stands for both."""
    return (value, value) if isinstance(value, int) else value


def enlarge(x: torch.Tensor, factor: int) -> torch.Tensor:
    """Return [B, H, W, C] with each pixel repeated: [B, H·factor, W·factor, C]."""
    b, h, w, c = x.shape
    return x[:, :, None, :, None].expand(b, h, factor, w, factor, c).reshape(b, h * factor, w * factor, c)


@dataclass(frozen=True)
class Convolution:
    """A convolution with a weight [out, in, kh, kw], or [in, out, kh, kw] (gpt4d.parallel.layers.product.Operation).

    With ``upsampling`` the pixels of the input are repeated first. The input is kept, and its gradient is summed over
    an axis, as it was before.
    """

    stride: tuple[int, int]
    padding: tuple[int, int]
    upsampling: int
    in_first: bool  # the first dim of the weight is that of input channels

    def _channels_first(self, x: torch.Tensor) -> torch.Tensor:
        return (x if self.upsampling == 1 else enlarge(x, self.upsampling)).movedim(-1, 1)

    def _weight(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.transpose(0, 1) if self.in_first else weight

    def forward(self, x, weight, bias):
        out = F.conv2d(self._channels_first(x), self._weight(weight), bias, self.stride, self.padding)
        return out.movedim(1, -1).contiguous()

    def input_gradient(self, d_out, weight, x):
        b, h, w, c = x.shape
        if self.upsampling > 1:
            x = x.new_empty(b, h * self.upsampling, w * self.upsampling, c)
        d_x = self._gradient(d_out, x.movedim(-1, 1), self._weight(weight), 0).movedim(1, -1)
        if self.upsampling > 1:
            d_x = d_x.reshape(b, h, self.upsampling, w, self.upsampling, c).sum((2, 4))
        return d_x.contiguous()

    def weight_gradient(self, d_out, x, weight, added_to=None):
        """On a GPU, the result of bf16 activations is rounded to bf16 once."""
        dtype = weight.dtype if x.is_cpu else x.dtype
        d_out, x = d_out.to(dtype), self._channels_first(x).to(dtype)
        shape = (d_out.shape[-1], x.shape[1], *weight.shape[2:])
        gradient = self._gradient(d_out, x, x.new_empty(1).expand(shape), 1)
        if added_to is not None:
            return added_to.add_(self._weight(gradient))
        return self._weight(gradient).to(weight.dtype).contiguous()

    def _gradient(self, d_out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, which: int) -> torch.Tensor:
        """Return the gradient of the input (0), of which only shape and strides count, or of the weight (1)."""
        mask = [which == 0, which == 1, False]
        no_dilation, no_output_padding = (1, 1), (0, 0)
        return torch.ops.aten.convolution_backward(
            d_out.movedim(-1, 1),
            x,
            weight,
            None,
            self.stride,
            self.padding,
            no_dilation,
            False,
            no_output_padding,
            1,
            mask,
        )[which]


class Conv2d(nn.Module):
    """``[B, height, width, in_channels] → [B, height, width, out_channels]``.

    ``axes`` are those that split the channels: ``NORMAL``, y those of the input and x those of the output, or
    ``TRANSPOSED``, so that its input is the output of a normal convolution, or the two in a U-Net's order. None stands
    for channels that every rank has whole: those of pictures.

    Args:
        weights: the stage's weight stream.
        in_channels: global number of input channels.
        out_channels: global number of output channels.
        kernel: height and width of the kernel.
        axes: axes that split the input's and the output's channels.
        stride: distance between the places of the kernel.
        padding: zeros around the picture.
        upsampling: repeat each pixel of the input so many times along height and width first.
        bias: add a bias after the sum over the contracted axis.
        std: standard deviation of the initial weight; None for that of torch's initial values.
        scatter_output: the contracted axis splits the output's channels too: a sum that is scattered, of a layer whose
            input and output have the same layout (``axes`` (a, None)).
    """

    def __init__(
        self,
        weights: WeightStream,
        in_channels: int,
        out_channels: int,
        kernel: int | tuple[int, int],
        axes: Axes = specs.NORMAL,
        *,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        upsampling: int = 1,
        bias: bool = True,
        std: float | None = None,
        scatter_output: bool = False,
    ):
        super().__init__()
        operation = Convolution(pair(stride), pair(padding), upsampling, in_first=axes.produced is None)
        contracted, produced = map(weights.grid.axis, axes)
        split = FEATURES if scatter_output else None
        self.context = ProductContext(weights, operation, contracted, produced, inner_split=split)
        layer = specs.conv2d(in_channels, out_channels, pair(kernel), axes, bias=bias, std=std)
        self.weight = weights.parameter(layer["weight"])
        self.bias = weights.parameter(layer["bias"]) if bias else None

    async def forward(self, x_BHWC: torch.Tensor | Recomputable) -> torch.Tensor:
        return await multiply(x_BHWC, self.weight, self.bias, self.context)
