"""LayerNorm and RMSNorm: over features that y splits, statistics are those of all features, on every grid.

Weight and bias are masters, and their gradients are summed in the masters' dtype, whatever the dtype of the features.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from gpt4d.parallel import collectives
from gpt4d.parallel.grid import Axis
from gpt4d.parallel.layers import specs
from gpt4d.parallel.weights import WeightStream


class LayerNormFunction(torch.autograd.Function):
    """``(x - mean) / sqrt(variance + epsilon) · weight + bias`` over the last dim, which ``axis`` splits equally."""

    @staticmethod
    def forward(ctx, x, weight, bias, axis: Axis, epsilon: float):
        wide = x if x.dtype == torch.float64 else x.float()
        # The parts' statistics are combined into those of all features (Chan et al.): this takes one small all-gather
        # and no difference of large squares.
        mean = wide.mean(-1)
        variance = (wide - mean.unsqueeze(-1)).square_().mean(-1)  # torch.var_mean is five times slower on a CPU
        parts = collectives.all_gather(torch.stack((mean, variance)).unsqueeze(0), axis, parameter=weight)
        mean = parts[:, 0].mean(0)
        variance = parts[:, 1].mean(0) + parts[:, 0].var(0, correction=0)
        mean, rstd = mean.unsqueeze(-1), (variance + epsilon).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.axis, ctx.parameter = axis, weight
        return ((wide - mean) * rstd * weight + bias).to(x.dtype)

    @staticmethod
    def backward(ctx, d_out):
        x, weight, mean, rstd = ctx.saved_tensors
        normal, d_out = (x - mean) * rstd, d_out.to(rstd.dtype)
        d_normal = d_out * weight
        sums = torch.stack((d_normal.sum(-1), (d_normal * normal).sum(-1)))
        sums = collectives.all_reduce(sums, ctx.axis, parameter=ctx.parameter)
        sums = sums.div_(x.shape[-1] * ctx.axis.size).unsqueeze(-1)
        d_x = (d_normal - sums[0] - normal * sums[1]) * rstd
        d_weight = (d_out * normal).flatten(0, -2).sum(0)
        d_bias = d_out.flatten(0, -2).sum(0)
        return d_x.to(x.dtype), d_weight.to(weight.dtype), d_bias.to(weight.dtype), None, None


class MixedLayerNormFunction(torch.autograd.Function):
    """``F.layer_norm`` for features of a narrower dtype than the weight's, by torch's fused kernels."""

    @staticmethod
    def forward(ctx, x, weight, bias, epsilon: float):
        # On a GPU the kernels take one dtype only. On a CPU they would round the statistics to the weight's.
        dtype = weight.dtype if x.is_cpu else x.dtype
        weight, bias = weight.to(dtype), bias.to(dtype)
        out, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, epsilon)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return out

    @staticmethod
    def backward(ctx, d_out):
        x, weight, bias, mean, rstd = ctx.saved_tensors
        d_x, _, _ = torch.ops.aten.native_layer_norm_backward(
            d_out, x, weight.shape, mean, rstd, weight, bias, [True, False, False]
        )
        # The kernel would round sums over all tokens to the narrow dtype. The statistics have the wide one.
        d_weight = ((x - mean) * rstd).mul_(d_out).flatten(0, -2).sum(0)
        return d_x, d_weight, d_out.flatten(0, -2).sum(0, dtype=d_weight.dtype), None


class LayerNorm(nn.Module):
    """``[..., features over y] → [..., features over y]``; statistics are float32, or float64 for float64 inputs."""

    def __init__(self, weights: WeightStream, features: int, epsilon: float = 1e-5):
        super().__init__()
        self.axis, self.epsilon = weights.grid.y, epsilon
        layer = specs.layer_norm(features)
        self.weight, self.bias = weights.parameter(layer["weight"]), weights.parameter(layer["bias"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.axis.size > 1:
            return LayerNormFunction.apply(x, self.weight, self.bias, self.axis, self.epsilon)
        if x.dtype == self.weight.dtype:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)
        return MixedLayerNormFunction.apply(x, self.weight, self.bias, self.epsilon)


class RMSNormFunction(torch.autograd.Function):
    """``x / sqrt(mean(x²) + epsilon) · weight`` over the last dim, which ``axis`` splits equally.

    ``summed``: axes whose ranks each have other rows of the same samples, over which the weight's gradient is summed.
    """

    @staticmethod
    def forward(ctx, x, weight, axis: Axis, summed: Sequence[Axis], epsilon: float):
        wide = x if x.dtype == torch.float64 else x.float()
        squares = wide.square().sum(-1)
        squares = collectives.all_reduce(squares, axis, parameter=weight)
        rstd = squares.div_(x.shape[-1] * axis.size).add_(epsilon).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, rstd)
        ctx.axis, ctx.summed, ctx.parameter = axis, summed, weight
        return (wide * rstd).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, d_out):
        x, weight, rstd = ctx.saved_tensors
        normal, d_out = x * rstd, d_out.to(rstd.dtype)
        d_normal = d_out * weight
        sums = collectives.all_reduce((d_normal * normal).sum(-1), ctx.axis, parameter=ctx.parameter)
        sums = sums.div_(x.shape[-1] * ctx.axis.size).unsqueeze(-1)
        d_weight = (d_out * normal).flatten(0, -2).sum(0).to(weight.dtype)
        for axis in ctx.summed:
            d_weight = collectives.all_reduce(d_weight, axis, parameter=ctx.parameter)
        d_x = d_normal.addcmul_(normal, sums, value=-1).mul_(rstd)
        return d_x.to(x.dtype), d_weight, None, None, None


class RMSNorm(nn.Module):
    """``[..., features over y] → [..., features over y]``; statistics are float32, or float64 for float64 inputs."""

    def __init__(self, weights: WeightStream, features: int, epsilon: float = 1e-5):
        super().__init__()
        self.axis, self.epsilon = weights.grid.y, epsilon
        self.weight = weights.parameter(specs.rms_norm(features)["weight"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return RMSNormFunction.apply(x, self.weight, self.axis, (), self.epsilon)


class HeadNorm(nn.Module):
    """RMSNorm of each head, ``[..., heads over axes, size]`` → the same. All heads share the weight [size]."""

    def __init__(self, weights: WeightStream, size: int, axes: Sequence[Axis], epsilon: float = 1e-5):
        super().__init__()
        self.axes, self.epsilon = tuple(axes), epsilon
        self.weight = weights.parameter(specs.head_norm(size)["weight"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return RMSNormFunction.apply(x, self.weight, Axis("none"), self.axes, self.epsilon)
