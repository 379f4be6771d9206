"""LayerNorm and RMSNorm: over features that y splits, statistics are those of all features, on every grid.

Weight and bias are masters, and their gradients are summed in the masters' dtype, whatever the dtype of the features.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gpt4d.parallel import collectives
from gpt4d.parallel.fusion import fused
from gpt4d.parallel.grid import Axis
from gpt4d.parallel.layers import specs
from gpt4d.parallel.weights import WeightStream


class LayerNormFunction(torch.autograd.Function):
    """``(x - mean) / sqrt(variance + epsilon) · weight + bias`` over the last dim, which ``axis`` splits equally."""

    @staticmethod
    def forward(ctx, x, weight, bias, axis: Axis, epsilon: float):
        # The parts' statistics are combined into those of all features (Chan et al.): this takes one small all-gather
        # and no difference of large squares.
        parts = collectives.all_gather(_mean_and_variance(x).unsqueeze(0), axis, parameter=weight)
        mean = parts[:, 0].mean(0)
        variance = parts[:, 1].mean(0) + parts[:, 0].var(0, correction=0)
        mean, rstd = mean.unsqueeze(-1), (variance + epsilon).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.axis, ctx.parameter = axis, weight
        return _scaled(x, mean, rstd, weight, bias)

    @staticmethod
    def backward(ctx, d_out):
        x, weight, mean, rstd = ctx.saved_tensors
        sums = _sums_of_gradient(d_out, x, mean, rstd, weight)
        sums = collectives.all_reduce(sums, ctx.axis, parameter=ctx.parameter)
        sums = sums.div_(x.shape[-1] * ctx.axis.size).unsqueeze(-1)
        return *_gradients(d_out, x, mean, rstd, weight, sums), None, None


@fused
def _mean_and_variance(x: torch.Tensor) -> torch.Tensor:
    wide = x.to(_statistics_dtype(x))
    mean = wide.mean(-1)
    # torch.var_mean is five times slower on a CPU.
    return torch.stack((mean, (wide - mean.unsqueeze(-1)).square_().mean(-1)))


@fused
def _scaled(x, mean, rstd, weight, bias) -> torch.Tensor:
    return (x - mean).mul_(rstd).mul_(weight).add_(bias).to(x.dtype)


@fused
def _sums_of_gradient(d_out, x, mean, rstd, weight) -> torch.Tensor:
    """Return the sums over this rank's features that the gradient of the input needs."""
    d_normal = d_out * weight
    return torch.stack((d_normal.sum(-1), (x - mean).mul_(rstd).mul_(d_normal).sum(-1)))


@fused
def _gradients(d_out, x, mean, rstd, weight, sums) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of input, weight and bias from the means ``sums`` over all features."""
    normal, d_out = (x - mean).mul_(rstd), d_out.to(rstd.dtype)
    d_x = (d_out * weight).sub_(sums[0]).addcmul_(normal, sums[1], value=-1).mul_(rstd)
    d_weight = normal.mul_(d_out).flatten(0, -2).sum(0)
    return d_x.to(x.dtype), d_weight.to(weight.dtype), d_out.flatten(0, -2).sum(0).to(weight.dtype)


def _statistics_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


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
        return d_x, *_parameter_gradients(d_out, x, mean, rstd), None


@fused
def _parameter_gradients(d_out, x, mean, rstd) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of weight and bias."""
    d_weight = ((x - mean) * rstd).mul_(d_out).flatten(0, -2).sum(0)
    return d_weight, d_out.flatten(0, -2).sum(0, dtype=d_weight.dtype)


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

    def again(self, x: torch.Tensor, node: Any) -> torch.Tensor:
        """Return the output for ``x`` with the statistics that ``node`` of the first one has kept, without autograd."""
        if self.axis.size == 1:
            return self(x)
        _, weight, mean, rstd = node.saved_tensors
        return _scaled(x, mean, rstd, weight, self.bias)


class RMSNormFunction(torch.autograd.Function):
    """``x / sqrt(mean(x²) + epsilon) · weight`` over the last dim, which ``axis`` splits equally.

    ``summed``: axes whose ranks each have other rows of the same samples, over which the weight's gradient is summed.
    """

    @staticmethod
    def forward(ctx, x, weight, axis: Axis, summed: Sequence[Axis], epsilon: float):
        squares = collectives.all_reduce(_sum_of_squares(x), axis, parameter=weight)
        rstd = squares.div_(x.shape[-1] * axis.size).add_(epsilon).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, weight, rstd)
        ctx.axis, ctx.summed, ctx.parameter = axis, summed, weight
        return _rms_scaled(x, rstd, weight)

    @staticmethod
    def backward(ctx, d_out):
        x, weight, rstd = ctx.saved_tensors
        sums = collectives.all_reduce(_rms_sum_of_gradient(d_out, x, rstd, weight), ctx.axis, parameter=ctx.parameter)
        sums = sums.div_(x.shape[-1] * ctx.axis.size).unsqueeze(-1)
        d_x, d_weight = _rms_gradients(d_out, x, rstd, weight, sums)
        for axis in ctx.summed:
            d_weight = collectives.all_reduce(d_weight, axis, parameter=ctx.parameter)
        return d_x, d_weight, None, None, None


@fused
def _sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    return x.to(_statistics_dtype(x)).square().sum(-1)


@fused
def _rms_scaled(x, rstd, weight) -> torch.Tensor:
    return (x * rstd).mul_(weight).to(x.dtype)


@fused
def _rms_sum_of_gradient(d_out, x, rstd, weight) -> torch.Tensor:
    return (d_out * weight).mul_(x * rstd).sum(-1)


@fused
def _rms_gradients(d_out, x, rstd, weight, sums) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of input and weight from the mean ``sums`` over all features."""
    normal = x * rstd
    d_x = (d_out * weight).addcmul_(normal, sums, value=-1).mul_(rstd)
    return d_x.to(x.dtype), normal.mul_(d_out).flatten(0, -2).sum(0).to(weight.dtype)


class RMSNorm(nn.Module):
    """``[..., features over y] → [..., features over y]``; statistics are float32, or float64 for float64 inputs."""

    def __init__(self, weights: WeightStream, features: int, epsilon: float = 1e-5):
        super().__init__()
        self.axis, self.epsilon = weights.grid.y, epsilon
        self.weight = weights.parameter(specs.rms_norm(features)["weight"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return RMSNormFunction.apply(x, self.weight, self.axis, (), self.epsilon)

    def again(self, x: torch.Tensor, node: Any) -> torch.Tensor:
        """Return the output for ``x`` with the statistics that ``node`` of the first one has kept, without autograd."""
        _, weight, rstd = node.saved_tensors
        return _rms_scaled(x, rstd, weight)


class HeadNorm(nn.Module):
    """RMSNorm of each head, ``[..., heads over axes, size]`` → the same. All heads share the weight [size]."""

    def __init__(self, weights: WeightStream, size: int, axes: Sequence[Axis], epsilon: float = 1e-5):
        super().__init__()
        self.axes, self.epsilon = tuple(axes), epsilon
        self.weight = weights.parameter(specs.head_norm(size)["weight"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return RMSNormFunction.apply(x, self.weight, Axis("none"), self.axes, self.epsilon)
