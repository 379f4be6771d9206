"""GroupNorm over channels that an axis splits. A group consists of the same channels on every grid.

Weight and bias are master weights. Their gradients are accumulated in the master dtype. The norm, and the scale and
shift and the activation after it, are computed in float32, or float64 for float64 inputs, and rounded once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from gpt4d.parallel.kernels import Function, Tensor, kernel, wide_dtype
from gpt4d.parallel.layers import sharding
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layers.product import Input, Recomputable
from gpt4d.parallel.layout import Layout, ParameterSpec
from gpt4d.parallel.lazy import F, torch


@dataclass(frozen=True)
class Groups:
    """The groups of a rank's channels, in the stored order of an activation or of a concatenation.

    Statistics of groups are [B, local groups], statistics of channels [B, local channels].
    """

    own: tuple[int, ...]  # the group of each local channel
    count: int  # number of local groups


PLANE = (1, 2)  # height and width
_Pair: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"


@kernel(
    lambda x, groups: (x.like((len(groups.own),), "int64"), x.like((groups.count, len(groups.own)), wide_dtype(x))),
    free=True,
)
def group_index(x, groups):
    """Return the group of each channel, [channels], and the matrix [groups, channels] of the members of the groups.

    An element of the matrix is 1 if the group contains the channel, and otherwise 0.
    """
    return _index(groups, x.device, torch.promote_types(x.dtype, torch.float32))


@functools.cache
def _index(groups: Groups, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    of_channel = torch.tensor(groups.own, device=device)
    return of_channel, (torch.arange(groups.count, device=device).unsqueeze(-1) == of_channel).to(dtype)


def _total(of_channels: torch.Tensor, members: torch.Tensor) -> torch.Tensor:
    """Sum [..., channels] over the local channels of each group, to [..., groups]."""
    return (of_channels.unsqueeze(-2) * members).sum(-1)


def _spread(of_groups: torch.Tensor, of_channel: torch.Tensor) -> torch.Tensor:
    """Expand the values of groups, [..., groups], to their channels, [..., channels]."""
    return of_groups.index_select(-1, of_channel)


def _moments(x, members, counts: torch.Tensor | int) -> _Pair:
    """Return mean and sum of squared deviations of each group, [B, groups]. ``counts``: number of local channels."""
    wide, plane = x.to(members.dtype), x.shape[1] * x.shape[2]
    if torch.compiler.is_compiling():
        variance, mean = torch.var_mean(wide, PLANE, correction=0)
        squares = variance * plane
    else:  # torch.var_mean is five times slower on a CPU
        mean = wide.mean(PLANE)
        squares = (wide - mean[:, None, None]).square_().sum(PLANE)
    group_mean = _total(mean, members) / counts
    deviations = (mean.unsqueeze(-2) - group_mean.unsqueeze(-1)).square_().mul_(plane)
    return group_mean, deviations.add_(squares.unsqueeze(-2)).mul_(members).sum(-1)


def _channel_statistics(x):
    return x.like((x.shape[0], x.shape[-1]), wide_dtype(x))


@kernel(lambda x, members: x.like((1, 3, x.shape[0], members.shape[0]), wide_dtype(x)), fused=True)
def group_moments(x, members):
    """Return number, mean and sum of squared deviations of this rank's channels of each group, [1, 3, B, groups].

    The number is the number of channels. The moments of each channel are computed first and then combined (Chan et
    al.), without subtracting large squares.
    """
    counts = members.sum(-1)
    mean, squares = _moments(x, members, counts.clamp(min=1))
    return torch.stack((counts.expand_as(mean), mean, squares)).unsqueeze(0)


@kernel(lambda x, *_: (x.like(), _channel_statistics(x), _channel_statistics(x)), fused=True)
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
    counts, means, squares = moments.unbind(1)
    mean = (counts * means).sum(0) / size
    between = (counts * (means - mean).square()).sum(0)
    variance = (squares.sum(0) / (x.shape[1] * x.shape[2]) + between) / size
    return _normalized(x, mean, variance, of_channel, weight, bias, scale, shift, epsilon, activates)


@kernel(
    lambda x, *_: (x.like(), _channel_statistics(x), _channel_statistics(x)),
    fused=True,
    moved=lambda x, *_: 3 * x.nbytes,
)
def group_norm(x, of_channel, members, weight, bias, scale, shift, size: int, epsilon: float, activates: bool):
    """Return the results of ``normalized`` where no axis splits a group."""
    mean, squares = _moments(x, members, size)
    variance = squares / (size * x.shape[1] * x.shape[2])
    return _normalized(x, mean, variance, of_channel, weight, bias, scale, shift, epsilon, activates)


def _normalized(x, mean, variance, of_channel, weight, bias, scale, shift, epsilon, activates) -> tuple:
    mean, rstd = _spread(mean, of_channel), _spread((variance + epsilon).rsqrt(), of_channel)
    return normalized_again.in_torch(x, mean, rstd, weight, bias, scale, shift, activates), mean, rstd


@kernel(lambda x, *_: x.like(), fused=True)
def normalized_again(x, mean, rstd, weight, bias, scale, shift, activates: bool):
    """Return the output of ``normalized`` from mean and rstd of each channel's group."""
    out = _affine(x - mean[:, None, None], rstd, weight, bias, scale, shift)
    return (F.silu(out, inplace=True) if activates else out).to(x.dtype)


def _affine(centered: torch.Tensor, rstd, weight, bias, scale, shift) -> torch.Tensor:
    """Return ``centered · rstd · weight + bias``, times ``1 + scale`` plus ``shift`` if given."""
    slope, offset = _slope(weight, scale), bias
    if scale is not None:
        offset = torch.addcmul(shift.to(bias.dtype), bias, 1 + scale.to(bias.dtype))[:, None, None]
    return torch.addcmul(offset.to(centered.dtype), centered, (rstd * slope).to(centered.dtype)[:, None, None])


def _slope(weight, scale) -> torch.Tensor:
    """Return the factor of the normalized input in the output, [channels] or [B, channels]."""
    return weight if scale is None else weight * (1 + scale.to(weight.dtype))


@kernel(
    lambda d_out, x, mean, rstd, weight, bias, scale, shift, members, *_: (
        mean.like((2, *mean.shape)),
        mean.like((2, mean.shape[0], members.shape[0])),
    ),
    fused=True,
)
def gradient_sums(d_out, x, mean, rstd, weight, bias, scale, shift, members, activates: bool):
    """Return two sums over the pixels of each channel, [2, B, channels], and over this rank's channels of each group.

    The sums of a channel are ``Σ g`` and ``Σ g · normal``, where ``g`` is the gradient of the input of ``silu`` and
    ``normal`` the normalized input. The sums of a group, [2, B, groups], add the gradients of the normalized input.
    """
    normal, gradient = _normal_and_gradient(d_out, x, mean, rstd, weight, bias, scale, shift, activates)
    of_channels = _channel_sums(normal, gradient)
    of_groups = _group_sums(of_channels, weight, scale, members)
    return torch.stack(of_channels), torch.stack(of_groups)


def _gradients(x, weight, bias, scale, shift):
    return x.like(), weight.like(), bias.like(), scale and scale.like(), shift and shift.like()


@kernel(
    lambda d_out, x, mean, rstd, weight, bias, scale, shift, *_: _gradients(x, weight, bias, scale, shift), fused=True
)
def split_group_norm_gradients(
    d_out, x, mean, rstd, weight, bias, scale, shift, channel_sums, group_sums, of_channel, count: int, activates: bool
):
    """Return the gradients of input, weight and bias, and the gradients of scale and shift, or None without a scale.

    ``channel_sums`` and ``group_sums`` are the results of ``gradient_sums``. ``group_sums`` is all-reduced over the
    axis that splits groups. ``count``: number of values of a group.
    """
    normal, gradient = _normal_and_gradient(d_out, x, mean, rstd, weight, bias, scale, shift, activates)
    d_x = _input_gradient(normal, gradient, rstd, weight, scale, group_sums.unbind(), of_channel, count)
    return d_x.to(x.dtype), *_affine_gradients(channel_sums.unbind(), weight, bias, scale, shift)


@kernel(
    lambda d_out, x, mean, rstd, weight, bias, scale, shift, *_: _gradients(x, weight, bias, scale, shift),
    fused=True,
    moved=lambda d_out, x, *_: 5 * x.nbytes,
)
def group_norm_gradients(
    d_out, x, mean, rstd, weight, bias, scale, shift, of_channel, members, count: int, activates: bool
):
    """Return the gradients of ``split_group_norm_gradients`` where no axis splits a group."""
    normal, gradient = _normal_and_gradient(d_out, x, mean, rstd, weight, bias, scale, shift, activates)
    of_channels = _channel_sums(normal, gradient)
    of_groups = _group_sums(of_channels, weight, scale, members)
    d_x = _input_gradient(normal, gradient, rstd, weight, scale, of_groups, of_channel, count)
    return d_x.to(x.dtype), *_affine_gradients(of_channels, weight, bias, scale, shift)


def _normal_and_gradient(d_out, x, mean, rstd, weight, bias, scale, shift, activates) -> _Pair:
    """Return the normalized input, and the gradient of the input of ``silu``."""
    centered, d_out = x - mean[:, None, None], d_out.to(rstd.dtype)
    if activates:
        d_out = torch.ops.aten.silu_backward(d_out, _affine(centered, rstd, weight, bias, scale, shift))
    return centered.mul_(rstd[:, None, None]), d_out


def _channel_sums(normal: torch.Tensor, gradient: torch.Tensor) -> _Pair:
    return gradient.sum(PLANE), (gradient * normal).sum(PLANE)


def _group_sums(of_channels: _Pair, weight, scale, members) -> _Pair:
    slope = _slope(weight, scale)
    total, total_normal = of_channels
    return _total(total * slope, members), _total(total_normal * slope, members)


def _input_gradient(normal, gradient, rstd, weight, scale, of_groups: _Pair, of_channel, count: int) -> torch.Tensor:
    mean, mean_normal = (_spread(total / count, of_channel)[:, None, None] for total in of_groups)
    d_normal = gradient * _slope(weight, scale).expand_as(rstd)[:, None, None]
    return d_normal.sub_(mean).addcmul_(normal, mean_normal, value=-1).mul_(rstd[:, None, None])


def _affine_gradients(of_channels: _Pair, weight, bias, scale, shift) -> tuple:
    """Return the gradients of weight, bias, scale and shift."""
    total, total_normal = of_channels
    if scale is None:
        return total_normal.sum(0).to(weight.dtype), total.sum(0).to(bias.dtype), None, None
    factor, d_scale = 1 + scale.to(total.dtype), torch.addcmul(total * bias, total_normal, weight)
    d_weight, d_bias = (total_normal * factor).sum(0), (total * factor).sum(0)
    return d_weight.to(weight.dtype), d_bias.to(bias.dtype), d_scale.to(scale.dtype), total.to(shift.dtype)


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


def complete(saved) -> tuple[Tensor | None, ...]:
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

    def forward(self, layer: BoundLayer, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Input:
        """Return the norm of ``x``, with ``scale`` and ``shift`` as in ``GroupNormFunction``."""
        size = sum(self.channels) // self.groups
        settings = layer.groups, size, layer.axis, self.epsilon, self.activates
        out = GroupNormFunction.apply(x, layer.weight, layer.bias, scale, shift, *settings)
        if not layer.current_pass.recompute_inputs:
            return out
        return Recomputable(out, partial(self._recompute, x.detach(), out.grad_fn))

    def _recompute(self, x: Tensor, node: Any) -> Tensor:
        """Return the norm of ``x`` without a graph. ``node``: the autograd node that has saved the statistics."""
        _, *saved = complete(node.saved_tensors)
        return normalized_again(x, *saved, self.activates)
