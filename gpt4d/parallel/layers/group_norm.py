"""GroupNorm over channels that an axis splits. A group consists of the same channels on every grid. No torch here.

Weight and bias are master weights. Their gradients are accumulated in the master dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gpt4d.parallel.layers import sharding
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layout import Layout, ParameterSpec
from gpt4d.parallel.symbolic.kernels import Function, kernel
from gpt4d.parallel.symbolic.tensor import wide_dtype


@dataclass(frozen=True)
class Groups:
    """The groups of a rank's channels, in the stored order of an activation or of a concatenation.

    Statistics of groups are [B, local groups], statistics of channels [B, local channels].
    """

    own: tuple[int, ...]  # the group of each local channel
    count: int  # number of local groups


@kernel(converts=True)
def widened(x):
    """Convert ``x`` to the dtype of its statistics."""
    return x if x.dtype == wide_dtype(x) else x.like(dtype=wide_dtype(x))


@kernel
def moments(wide, groups):
    """Return mean and sum of squared deviations of this rank's channels of each group, [B, groups].

    The moments of each channel are computed first and then combined (Chan et al.), without subtracting large squares.
    """
    return wide.like((wide.shape[0], groups.count)), wide.like((wide.shape[0], groups.count))


@kernel
def with_counts(mean, squares, groups):
    """Return the number of this rank's channels in each group, stacked with the moments, [1, 3, B, groups]."""
    return mean.like((1, 3, *mean.shape))


@kernel
def combined_moments(parts, size: int, plane: int):
    """Return mean and variance of groups of ``size`` channels from the moments of all ranks [ranks, 3, B, groups]."""
    return parts.like(parts.shape[2:]), parts.like(parts.shape[2:])


@kernel
def variance_of(squares, count: int):
    """Return sums of squared deviations divided by ``count``, the number of values."""
    return squares.like()


@kernel(unread=("x",))
def normalized_groups(x, wide, mean, variance, weight, bias, groups, epsilon: float):
    """Return the output in the dtype of ``x``, and mean and rstd of each channel's group, both [B, channels].

    ``wide`` is ``x`` in the dtype of its statistics.
    """
    return x.like(), wide.like((x.shape[0], x.shape[-1])), wide.like((x.shape[0], x.shape[-1]))


@kernel
def sums_of_channels(d_out, x, mean, rstd):
    """Return the normalized input, ``d_out`` in the statistics' dtype, and two sums over pixels, [2, B, channels]."""
    wide = d_out if d_out.dtype == rstd.dtype else d_out.like(dtype=rstd.dtype)
    return x.like(dtype=rstd.dtype), wide, rstd.like((2, *rstd.shape))


@kernel
def sums_of_groups(of_channels, weight, groups):
    """Return the two sums over this rank's channels of each group that the input's gradient needs, [2, B, groups]."""
    return of_channels.like((*of_channels.shape[:-1], groups.count))


@kernel(unread=("x",))
def group_norm_gradients(x, d_out, normal, weight, rstd, of_channels, sums, groups, count: int):
    """Return the gradients of input, weight and bias. ``count``: number of pixels times channels per group."""
    return x.like(), weight.like(), weight.like()


class GroupNormFunction(Function):
    """``(x - mean) / sqrt(variance + epsilon) · weight + bias`` over the pixels and channels of each group.

    If ``axis`` splits a group, its ranks exchange the statistics of all groups. Otherwise each rank has complete
    groups, and ``axis`` has size 1. ``size``: number of channels per group.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, groups, size: int, axis, epsilon: float):
        plane = x.shape[1] * x.shape[2]
        wide = widened(x)
        mean, squares = moments(wide, groups)
        if axis.size == 1:
            variance = variance_of(squares, size * plane)
        else:
            parts = axis.all_gather(with_counts(mean, squares, groups), parameter=weight)
            mean, variance = combined_moments(parts, size, plane)
        out, mean, rstd = normalized_groups(x, wide, mean, variance, weight, bias, groups, epsilon)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.groups, ctx.axis, ctx.parameter, ctx.count = groups, axis, weight, size * plane
        return out

    @staticmethod
    def backward(ctx, d_out):
        x, weight, mean, rstd = ctx.saved_tensors
        normal, d_out, of_channels = sums_of_channels(d_out, x, mean, rstd)
        sums = ctx.axis.all_reduce(sums_of_groups(of_channels, weight, ctx.groups), parameter=ctx.parameter)
        gradients = group_norm_gradients(x, d_out, normal, weight, rstd, of_channels, sums, ctx.groups, ctx.count)
        return *gradients, None, None, None, None


@dataclass(frozen=True)
class GroupNormSpec(LayerSpec):
    """``[B, height, width, channels over axis]`` → the same; statistics are float32, or float64 for float64 inputs.

    Attributes:
        groups: global number of groups.
        channels: global number of channels of each concatenated tensor (gpt4d.parallel.layers.linear), or of the
            only tensor. Groups are consecutive in the order of the tensors.
        axis: splits the channels.
        epsilon: added to the variance.
    """

    groups: int
    channels: tuple[int, ...]
    axis: str = "y"
    epsilon: float = 1e-5

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return weight and bias [channels], channels over ``axis``."""
        bias = ParameterSpec((sum(self.channels),), Layout((self.axis,)))
        return {"weight": replace(bias, mean=1.0), "bias": bias}

    def is_cut(self, ranks: int) -> bool:
        """Return whether an axis of size ``ranks`` splits the channels of any group over several ranks."""
        return sharding.cuts_groups(self.channels, self.groups, ranks)

    def prepare(self, layer: BoundLayer) -> None:
        grid = layer.context.grid
        axis, group_of = grid.axis(self.axis), sharding.channel_groups(self.channels, self.groups)
        local = len(group_of) // axis.size
        own, count = group_of[axis.index * local : (axis.index + 1) * local], self.groups
        cut = self.is_cut(axis.size)
        if not cut:  # number the local groups only
            number = {group: number for number, group in enumerate(sorted(set(own)))}
            own, count = [number[group] for group in own], len(number)
        layer.groups = Groups(tuple(own), count)
        layer.axis = axis if cut else grid.axis(None)

    def forward(self, layer: BoundLayer, x: Any) -> Any:
        size = sum(self.channels) // self.groups
        return GroupNormFunction.apply(x, layer.weight, layer.bias, layer.groups, size, layer.axis, self.epsilon)
