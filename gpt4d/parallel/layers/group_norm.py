"""GroupNorm over channels that an axis splits. A group consists of the same channels on every grid. No torch here.

Weight and bias are master weights. Their gradients are accumulated in the master dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gpt4d.parallel.layers import sharding
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layers.product import Recomputable
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


@kernel(free=True)
def group_index(x, groups):
    """Return the group of each channel, [channels], and the matrix [groups, channels] of the members of the groups.

    An element of the matrix is 1 if the group contains the channel, and otherwise 0.
    """
    channels = len(groups.own)
    return x.like((channels,), "int64"), x.like((groups.count, channels), wide_dtype(x))


def _channel_statistics(x):
    return x.like((x.shape[0], x.shape[-1]), wide_dtype(x))


@kernel(fused=True)
def group_moments(x, members):
    """Return number, mean and sum of squared deviations of this rank's channels of each group, [1, 3, B, groups].

    The number is the number of channels. The moments of each channel are computed first and then combined (Chan et
    al.), without subtracting large squares.
    """
    return x.like((1, 3, x.shape[0], members.shape[0]), wide_dtype(x))


@kernel(fused=True)
def normalized(x, moments, of_channel, weight, bias, scale, shift, size: int, epsilon: float, activates: bool):
    """Return the output, and mean and rstd (1 / standard deviation) of each channel's group, both [B, channels].

    Args:
        x: the input.
        moments: the results of ``group_moments`` on all ranks, [ranks, 3, B, groups].
        of_channel: the group of each channel.
        weight: the norm's weight.
        bias: the norm's bias.
        scale: the norm's result is multiplied by 1 + ``scale`` [B, channels], if given.
        shift: [B, channels], is added to this product. It is given together with ``scale``.
        size: number of channels of a group on all ranks.
        epsilon: added to the variance.
        activates: apply ``silu``.
    """
    return x.like(), _channel_statistics(x), _channel_statistics(x)


@kernel(fused=True, moved=lambda x, *_: 3 * x.nbytes)
def group_norm(x, of_channel, members, weight, bias, scale, shift, size: int, epsilon: float, activates: bool):
    """Return the results of ``normalized`` where no axis splits a group."""
    return x.like(), _channel_statistics(x), _channel_statistics(x)


@kernel(fused=True)
def normalized_again(x, mean, rstd, weight, bias, scale, shift, activates: bool):
    """Return the output of ``normalized`` from mean and rstd of each channel's group."""
    return x.like()


@kernel(fused=True)
def gradient_sums(d_out, x, mean, rstd, weight, bias, scale, shift, members, activates: bool):
    """Return two sums over the pixels of each channel, [2, B, channels], and over this rank's channels of each group.

    The sums of a channel are ``Σ g`` and ``Σ g · normal``, where ``g`` is the gradient of the input of ``silu`` and
    ``normal`` the normalized input. The sums of a group, [2, B, groups], add the gradients of the normalized input.
    """
    return mean.like((2, *mean.shape)), mean.like((2, mean.shape[0], members.shape[0]))


def _gradients(x, weight, bias, scale, shift):
    return x.like(), weight.like(), bias.like(), scale and scale.like(), shift and shift.like()


@kernel(fused=True)
def split_group_norm_gradients(
    d_out, x, mean, rstd, weight, bias, scale, shift, channel_sums, group_sums, of_channel, count: int, activates: bool
):
    """Return the gradients of input, weight and bias, and the gradients of scale and shift, or None without a scale.

    ``channel_sums`` and ``group_sums`` are the results of ``gradient_sums``. ``group_sums`` is all-reduced over the
    axis that splits groups. ``count``: number of values of a group.
    """
    return _gradients(x, weight, bias, scale, shift)


@kernel(fused=True, moved=lambda d_out, x, *_: 5 * x.nbytes)
def group_norm_gradients(
    d_out, x, mean, rstd, weight, bias, scale, shift, of_channel, members, count: int, activates: bool
):
    """Return the gradients of ``split_group_norm_gradients`` where no axis splits a group."""
    return _gradients(x, weight, bias, scale, shift)


class GroupNormFunction(Function):
    """``(x - mean) / sqrt(variance + epsilon) · weight + bias`` over the pixels and channels of each group.

    With ``scale`` and ``shift`` [B, channels] it returns that times ``1 + scale``, plus ``shift``. If ``activates``, it
    applies ``silu`` last. Only the input is saved, not the intermediate results.

    If ``axis`` splits a group, its ranks exchange the statistics of all groups. Otherwise each rank has complete
    groups, and ``axis`` has size 1. ``size``: number of channels per group.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, scale, shift, groups, size: int, axis, epsilon: float, activates: bool = False):
        of_channel, members = group_index(x, groups)
        affine, settings = (weight, bias, scale, shift), (size, epsilon, activates)
        if axis.size == 1:
            out, mean, rstd = group_norm(x, of_channel, members, *affine, *settings)
        else:
            moments = axis.all_gather(group_moments(x, members), parameter=weight)
            out, mean, rstd = normalized(x, moments, of_channel, *affine, *settings)
        ctx.save_for_backward(x, mean, rstd, weight, bias, *(() if scale is None else (scale, shift)))
        ctx.groups, ctx.axis, ctx.parameter, ctx.activates = groups, axis, weight, activates
        ctx.count = size * x.shape[1] * x.shape[2]
        return out

    @staticmethod
    def backward(ctx, d_out):
        saved, activates = complete(ctx.saved_tensors), ctx.activates
        of_channel, members = group_index(d_out, ctx.groups)
        if ctx.axis.size == 1:
            gradients = group_norm_gradients(d_out, *saved, of_channel, members, ctx.count, activates)
        else:
            channel_sums, group_sums = gradient_sums(d_out, *saved, members, activates)
            group_sums = ctx.axis.all_reduce(group_sums, parameter=ctx.parameter)
            sums = channel_sums, group_sums, of_channel
            gradients = split_group_norm_gradients(d_out, *saved, *sums, ctx.count, activates)
        return *gradients, None, None, None, None, None


def complete(saved: Any) -> tuple[Any, ...]:
    """Return the saved tensors of ``GroupNormFunction``, with None for scale and shift if there are none."""
    return (*saved, None, None)[:7]


@dataclass(frozen=True)
class GroupNormSpec(LayerSpec):
    """``[B, height, width, channels over axis]`` → the same; statistics are float32, or float64 for float64 inputs.

    With ``train.activation_checkpointing=selective`` the output is recomputable.

    Attributes:
        groups: global number of groups.
        channels: global number of channels of each concatenated tensor (gpt4d.parallel.layers.linear), or of the
            only tensor. Groups are consecutive in the order of the tensors.
        axis: splits the channels.
        epsilon: added to the variance.
        activates: the layer applies ``silu`` to its result.
    """

    groups: int
    channels: tuple[int, ...]
    axis: str = "y"
    epsilon: float = 1e-5
    activates: bool = False

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

    def forward(self, layer: BoundLayer, x: Any, scale: Any = None, shift: Any = None) -> Any:
        """Return the norm of ``x``, with ``scale`` and ``shift`` as in ``GroupNormFunction``."""
        size = sum(self.channels) // self.groups
        settings = layer.groups, size, layer.axis, self.epsilon, self.activates
        out = GroupNormFunction.apply(x, layer.weight, layer.bias, scale, shift, *settings)
        if not layer.weights.recomputes_inputs:
            return out
        return Recomputable(out, partial(self._recompute, x.detach(), out.grad_fn))

    def _recompute(self, x: Any, node: Any) -> Any:
        """Return the norm of ``x`` without a graph. ``node``: the autograd node that has saved the statistics."""
        _, *saved = complete(node.saved_tensors)
        return normalized_again(x, *saved, self.activates)
