"""LayerNorm and RMSNorm: over features that y splits, statistics are those of all features, on every grid.

The input of a norm is the residual stream. The sum of the stream and a branch's output belongs to the norm behind it,
and so does the sum of the stream's gradients: compiled, each is computed where the norm reads or writes the tensor
anyway. Weight and bias are masters, and their gradients are summed in the masters' dtype, whatever the dtype of the
features.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from gpt4d.parallel.collectives import Axis
from gpt4d.parallel.fusion import fused
from gpt4d.parallel.layers import specs
from gpt4d.parallel.recomputation import Recomputable
from gpt4d.parallel.weights import WeightStream


class LayerNormFunction(torch.autograd.Function):
    """``x + branch`` and its ``F.layer_norm``, by torch's kernels, for weights of the same dtype or a wider one.

    Without a ``branch``, None, the first result is ``x``. The second result must have a gradient.
    """

    @staticmethod
    def forward(ctx, x, branch, weight, bias, epsilon: float):
        added, out, mean, rstd = _normalized(x, branch, weight, bias, epsilon)
        stream = x if added is None else added
        ctx.save_for_backward(stream, weight, bias, mean, rstd)
        ctx.adds = added is not None
        ctx.set_materialize_grads(False)
        return stream, out

    @staticmethod
    def backward(ctx, d_stream, d_out):
        d_x, *d_parameters = _gradients(d_out, d_stream, *ctx.saved_tensors)
        return d_x, d_x if ctx.adds else None, *d_parameters, None


@fused
def _normalized(x, branch, weight, bias, epsilon: float):
    """Return ``x + branch``, None without one; its norm, mean and reciprocal of the standard deviation."""
    added, stream = _with_branch(x, branch)
    stream, w, b = _as_kernels_take(stream, weight, bias)
    out, mean, rstd = torch.native_layer_norm(stream, weight.shape, w, b, epsilon)
    return added, out.to(x.dtype), mean, rstd


@fused
def _gradients(d_out, d_stream, x, weight, bias, mean, rstd) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradient of the input, with that of the stream unless it is None, and of weight and bias."""
    given, w, b = _as_kernels_take(x, weight, bias)
    wide = given.dtype == weight.dtype
    backward = torch.ops.aten.native_layer_norm_backward
    d_given = d_out.to(given.dtype)
    d_x, d_weight, d_bias = backward(d_given, given, weight.shape, mean, rstd, w, b, [True, wide, wide])
    if not wide:  # the kernel would round sums over all tokens to the narrow dtype; the statistics have the wide one
        d_weight = ((x - mean) * rstd).mul_(d_out).flatten(0, -2).sum(0)
        d_bias = d_out.flatten(0, -2).sum(0, dtype=d_weight.dtype)
    return _summed(d_x, d_stream, x), d_weight, d_bias


def _with_branch(x, branch) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return ``x + branch``, None without one, and the stream: a compiled function does not return what it is given."""
    added = None if branch is None else x + branch
    return added, x if added is None else added


def _as_kernels_take(x, weight, bias) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the arguments of torch's kernels in dtypes with which they do not round the statistics."""
    if torch.compiler.is_compiling():  # conversions take no pass of their own
        return x.to(_statistics_dtype(x)), weight, bias
    # On a CPU, narrow weights would make the statistics narrow; on a GPU the kernels take one dtype only.
    return (x, weight, bias) if x.is_cpu else (x, weight.to(x.dtype), bias.to(x.dtype))


class SplitLayerNormFunction(torch.autograd.Function):
    """``LayerNormFunction`` over a last dim that ``axis`` splits equally."""

    @staticmethod
    def forward(ctx, x, branch, weight, bias, axis: Axis, epsilon: float):
        # The parts' statistics are combined into those of all features (Chan et al.): this takes one small all-gather
        # and no difference of large squares.
        added, statistics = _mean_and_variance(x, branch)
        stream = x if added is None else added
        parts = axis.all_gather(statistics.unsqueeze(0), parameter=weight)
        mean = parts[:, 0].mean(0)
        variance = parts[:, 1].mean(0) + parts[:, 0].var(0, correction=0)
        mean, rstd = mean.unsqueeze(-1), (variance + epsilon).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(stream, weight, mean, rstd)
        ctx.axis, ctx.parameter, ctx.adds = axis, weight, added is not None
        ctx.set_materialize_grads(False)
        return stream, _scaled(stream, mean, rstd, weight, bias)

    @staticmethod
    def backward(ctx, d_stream, d_out):
        x, weight, mean, rstd = ctx.saved_tensors
        sums = _sums_of_gradient(d_out, x, mean, rstd, weight)
        sums = ctx.axis.all_reduce(sums, parameter=ctx.parameter)
        sums = sums.div_(x.shape[-1] * ctx.axis.size).unsqueeze(-1)
        d_x, *d_parameters = _split_gradients(d_out, d_stream, x, mean, rstd, weight, sums)
        return d_x, d_x if ctx.adds else None, *d_parameters, None, None


@fused
def _mean_and_variance(x, branch):
    """Return ``x + branch``, None without one, and mean and variance of this rank's features."""
    added, stream = _with_branch(x, branch)
    wide = stream.to(_statistics_dtype(x))
    mean = wide.mean(-1)
    # torch.var_mean is five times slower on a CPU.
    return added, torch.stack((mean, (wide - mean.unsqueeze(-1)).square_().mean(-1)))


@fused
def _scaled(x, mean, rstd, weight, bias) -> torch.Tensor:
    return (x - mean).mul_(rstd).mul_(weight).add_(bias).to(x.dtype)


@fused
def _sums_of_gradient(d_out, x, mean, rstd, weight) -> torch.Tensor:
    """Return the sums over this rank's features that the gradient of the input needs."""
    d_normal = d_out * weight
    return torch.stack((d_normal.sum(-1), (x - mean).mul_(rstd).mul_(d_normal).sum(-1)))


@fused
def _split_gradients(d_out, d_stream, x, mean, rstd, weight, sums) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the same as ``_gradients``, from the means ``sums`` over all features."""
    normal, d_out = (x - mean).mul_(rstd), d_out.to(rstd.dtype)
    d_x = (d_out * weight).sub_(sums[0]).addcmul_(normal, sums[1], value=-1).mul_(rstd)
    d_weight = normal.mul_(d_out).flatten(0, -2).sum(0)
    return _summed(d_x, d_stream, x), d_weight.to(weight.dtype), d_out.flatten(0, -2).sum(0).to(weight.dtype)


def _summed(d_x: torch.Tensor, d_stream: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """Return the whole gradient of ``x``, in its dtype."""
    d_x = d_x.to(x.dtype)
    return d_x if d_stream is None else d_x.add_(d_stream)


def _statistics_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class Norm(nn.Module, ABC):
    """A norm of the residual stream: ``[..., features over y] → [..., features over y]``.

    Statistics are float32, or float64 for float64 inputs.
    """

    def __init__(self, weights: WeightStream, epsilon: float):
        super().__init__()
        self.weights, self.axis, self.epsilon = weights, weights.grid.y, epsilon

    def forward(
        self, x: torch.Tensor, branch: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | Recomputable]:
        """Return the stream and its norm, the input of a product.

        Args:
            x: the stream.
            branch: output of a residual branch, which is added to the stream first.
        """
        stream, out = self._apply_to(x, branch)
        if not self.weights.recomputes_inputs:
            return stream, out
        return stream, Recomputable(out, partial(self._again, stream.detach(), out.grad_fn))

    @abstractmethod
    def _apply_to(self, x: torch.Tensor, branch: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``x + branch``, or ``x``, and its norm."""

    @abstractmethod
    def _again(self, x: torch.Tensor, node: Any) -> torch.Tensor:
        """Return the norm of ``x`` with the statistics that ``node`` of the first one has kept, without autograd."""


class LayerNorm(Norm):
    """``(x - mean) / sqrt(variance + epsilon) · weight + bias``."""

    def __init__(self, weights: WeightStream, features: int, epsilon: float = 1e-5):
        super().__init__(weights, epsilon)
        layer = specs.layer_norm(features)
        self.weight, self.bias = weights.parameter(layer["weight"]), weights.parameter(layer["bias"])

    def _apply_to(self, x, branch):
        if self.axis.size == 1:
            return LayerNormFunction.apply(x, branch, self.weight, self.bias, self.epsilon)
        return SplitLayerNormFunction.apply(x, branch, self.weight, self.bias, self.axis, self.epsilon)

    def _again(self, x, node):
        if self.axis.size == 1:
            return _normalized(x, None, self.weight, self.bias, self.epsilon)[1]
        _, weight, mean, rstd = node.saved_tensors
        return _scaled(x, mean, rstd, weight, self.bias)


class RMSNormFunction(torch.autograd.Function):
    """``x + branch`` and its norm ``x / sqrt(mean(x²) + epsilon) · weight`` over the last dim, which ``axis`` splits.

    ``summed``: axes whose ranks each have other rows of the same samples, over which the weight's gradient is summed.
    Without a ``branch``, None, the first result is ``x``. The second result must have a gradient.
    """

    @staticmethod
    def forward(ctx, x, branch, weight, axis: Axis, summed: Sequence[Axis], epsilon: float):
        if axis.size == 1:
            added, rstd, out = _rms_normalized(x, branch, weight, epsilon)
        else:
            added, squares = _sum_of_squares(x, branch)
            squares = axis.all_reduce(squares, parameter=weight)
            rstd = squares.div_(x.shape[-1] * axis.size).add_(epsilon).rsqrt_().unsqueeze(-1)
            out = _rms_scaled(x if added is None else added, rstd, weight)
        stream = x if added is None else added
        ctx.save_for_backward(stream, weight, rstd)
        ctx.axis, ctx.summed, ctx.parameter, ctx.adds = axis, summed, weight, added is not None
        ctx.set_materialize_grads(False)
        return stream, out

    @staticmethod
    def backward(ctx, d_stream, d_out):
        x, weight, rstd = ctx.saved_tensors
        if ctx.axis.size == 1:
            d_x, d_weight = _rms_gradients(d_out, d_stream, x, rstd, weight)
        else:
            sums = _rms_sum_of_gradient(d_out, x, rstd, weight)
            sums = ctx.axis.all_reduce(sums, parameter=ctx.parameter)
            sums = sums.div_(x.shape[-1] * ctx.axis.size).unsqueeze(-1)
            d_x, d_weight = _split_rms_gradients(d_out, d_stream, x, rstd, weight, sums)
        for axis in ctx.summed:
            d_weight = axis.all_reduce(d_weight, parameter=ctx.parameter)
        return d_x, d_x if ctx.adds else None, d_weight, None, None, None


@fused
def _sum_of_squares(x, branch):
    """Return ``x + branch``, None without one, and the sums of its squares over this rank's features."""
    added, stream = _with_branch(x, branch)
    return added, stream.to(_statistics_dtype(x)).square().sum(-1)


@fused
def _rms_scaled(x, rstd, weight) -> torch.Tensor:
    return (x * rstd).mul_(weight).to(x.dtype)


@fused
def _rms_normalized(x, branch, weight, epsilon: float):
    """Return ``x + branch``, None without one; the reciprocal of the root mean square, and the norm."""
    added, squares = _sum_of_squares(x, branch)
    rstd = squares.div_(x.shape[-1]).add_(epsilon).rsqrt_().unsqueeze(-1)
    return added, rstd, _rms_scaled(x if added is None else added, rstd, weight)


@fused
def _rms_sum_of_gradient(d_out, x, rstd, weight) -> torch.Tensor:
    return (d_out * weight).mul_(x * rstd).sum(-1)


@fused
def _split_rms_gradients(d_out, d_stream, x, rstd, weight, sums) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of the input, with that of the stream unless it is None, and of the weight.

    ``sums``: mean over all features of the products of the normalized input and its gradient.
    """
    normal = x * rstd
    d_x = (d_out * weight).addcmul_(normal, sums, value=-1).mul_(rstd)
    return _summed(d_x, d_stream, x), normal.mul_(d_out).flatten(0, -2).sum(0).to(weight.dtype)


@fused
def _rms_gradients(d_out, d_stream, x, rstd, weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same as ``_split_rms_gradients``, with the means of all features in one function."""
    sums = _rms_sum_of_gradient(d_out, x, rstd, weight).div_(x.shape[-1]).unsqueeze(-1)
    return _split_rms_gradients(d_out, d_stream, x, rstd, weight, sums)


class RMSNorm(Norm):
    """``x / sqrt(mean(x²) + epsilon) · weight``."""

    def __init__(self, weights: WeightStream, features: int, epsilon: float = 1e-5):
        super().__init__(weights, epsilon)
        self.weight = weights.parameter(specs.rms_norm(features)["weight"])

    def _apply_to(self, x, branch):
        return RMSNormFunction.apply(x, branch, self.weight, self.axis, (), self.epsilon)

    def _again(self, x, node):
        _, weight, rstd = node.saved_tensors
        return _rms_scaled(x, rstd, weight)


class HeadNorm(nn.Module):
    """RMSNorm of each head, ``[..., heads over axes, size]`` → the same. All heads share the weight [size]."""

    def __init__(self, weights: WeightStream, size: int, axes: Sequence[Axis], epsilon: float = 1e-5):
        super().__init__()
        self.axes, self.epsilon = tuple(axes), epsilon
        self.weight = weights.parameter(specs.head_norm(size)["weight"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return RMSNormFunction.apply(x, None, self.weight, Axis("none"), self.axes, self.epsilon)[1]
