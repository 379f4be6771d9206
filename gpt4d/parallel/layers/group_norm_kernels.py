"""The kernels of GroupNorm, of the scale and shift and of the activation that follow it.

All are computed in float32, or float64 for float64 inputs, and rounded once.
"""

import functools

import torch
import torch.nn.functional as F

from gpt4d.parallel.layers.group_norm import Groups

PLANE = (1, 2)  # height and width
_Pair = tuple[torch.Tensor, torch.Tensor]


def group_index(x, groups: Groups):
    """Return the group of each channel and the matrix of members on the device of ``x``, from a cache."""
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


def group_moments(x, members):
    """Stack number of local channels, mean and sum of squared deviations to [1, 3, B, groups]."""
    counts = members.sum(-1)
    mean, squares = _moments(x, members, counts.clamp(min=1))
    return torch.stack((counts.expand_as(mean), mean, squares)).unsqueeze(0)


def normalized(x, moments, of_channel, weight, bias, scale, shift, size: int, epsilon: float, activates: bool):
    """Return the output in the dtype of ``x``, and mean and rstd of each channel, [B, channels]."""
    counts, means, squares = moments.unbind(1)
    mean = (counts * means).sum(0) / size
    between = (counts * (means - mean).square()).sum(0)
    variance = (squares.sum(0) / (x.shape[1] * x.shape[2]) + between) / size
    return _normalized(x, mean, variance, of_channel, weight, bias, scale, shift, epsilon, activates)


def group_norm(x, of_channel, members, weight, bias, scale, shift, size: int, epsilon: float, activates: bool):
    """Return the results of ``normalized`` for complete groups."""
    mean, squares = _moments(x, members, size)
    variance = squares / (size * x.shape[1] * x.shape[2])
    return _normalized(x, mean, variance, of_channel, weight, bias, scale, shift, epsilon, activates)


def _normalized(x, mean, variance, of_channel, weight, bias, scale, shift, epsilon, activates) -> tuple:
    mean, rstd = _spread(mean, of_channel), _spread((variance + epsilon).rsqrt(), of_channel)
    return normalized_again(x, mean, rstd, weight, bias, scale, shift, activates), mean, rstd


def normalized_again(x, mean, rstd, weight, bias, scale, shift, activates: bool):
    """Return the output in the dtype of ``x`` from mean and rstd of each channel."""
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


def gradient_sums(d_out, x, mean, rstd, weight, bias, scale, shift, members, activates: bool):
    """Stack the sums of each channel over pixels, and the sums of each group over local channels."""
    normal, gradient = _normal_and_gradient(d_out, x, mean, rstd, weight, bias, scale, shift, activates)
    of_channels = _channel_sums(normal, gradient)
    of_groups = _group_sums(of_channels, weight, scale, members)
    return torch.stack(of_channels), torch.stack(of_groups)


def split_group_norm_gradients(
    d_out, x, mean, rstd, weight, bias, scale, shift, channel_sums, group_sums, of_channel, count: int, activates: bool
):
    """Return the gradients of input, weight, bias, scale and shift from sums over all channels of a group."""
    normal, gradient = _normal_and_gradient(d_out, x, mean, rstd, weight, bias, scale, shift, activates)
    d_x = _input_gradient(normal, gradient, rstd, weight, scale, group_sums.unbind(), of_channel, count)
    return d_x.to(x.dtype), *_affine_gradients(channel_sums.unbind(), weight, bias, scale, shift)


def group_norm_gradients(
    d_out, x, mean, rstd, weight, bias, scale, shift, of_channel, members, count: int, activates: bool
):
    """Return the gradients of ``split_group_norm_gradients`` for complete groups."""
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
