"""The kernels of GroupNorm, and the indices of a rank's channels by group."""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F

from gpt4d.parallel.layers.group_norm import Groups

PLANE = (1, 2)  # height and width


class _Indices(NamedTuple):
    """The local channels and groups (``gpt4d.parallel.layers.group_norm.Groups``) as tensors on a device."""

    of_channel: torch.Tensor  # [channels]: group of each local channel
    members: torch.Tensor  # [groups, maximum]: local channels of each group, padded with the number of channels
    counts: torch.Tensor  # [groups]: number of local channels in each group

    def total(self, of_channels: torch.Tensor) -> torch.Tensor:
        """Sum [..., channels] over the local channels of each group, in a fixed order, to [..., groups]."""
        return F.pad(of_channels, (0, 1))[..., self.members].sum(-1)

    def spread(self, of_groups: torch.Tensor) -> torch.Tensor:
        """Expand the values of groups, [..., groups], to their channels, [..., channels]."""
        return of_groups[..., self.of_channel]


@functools.cache
def _indices(groups: Groups, device: torch.device) -> _Indices:
    own = groups.own
    members = [[channel for channel, group in enumerate(own) if group == wanted] for wanted in range(groups.count)]
    width = max(map(len, members))
    padded = [row + [len(own)] * (width - len(row)) for row in members]
    return _Indices(*(torch.tensor(v, device=device) for v in (list(own), padded, [len(row) for row in members])))


def widened(x):
    """Convert ``x`` to float32, or leave it in float64."""
    return x if x.dtype == torch.float64 else x.float()


def moments(wide, groups: Groups):
    """Return mean and sum of squared deviations over pixels and local channels, each [B, groups]."""
    indices = _indices(groups, wide.device)
    plane = wide.shape[1] * wide.shape[2]
    mean = wide.mean(PLANE)
    squares = (wide - mean[:, None, None]).square_().sum(PLANE)
    mean_here = indices.total(mean) / indices.counts.clamp(min=1)
    return mean_here, indices.total(squares + (mean - indices.spread(mean_here)).square_().mul_(plane))


def with_counts(mean, squares, groups: Groups):
    """Stack the channel counts, means and sums of squares to [1, 3, B, groups]."""
    indices = _indices(groups, mean.device)
    return torch.stack((indices.counts.to(mean.dtype).expand_as(mean), mean, squares)).unsqueeze(0)


def combined_moments(parts, size: int, plane: int):
    """Combine the moments of all ranks, [ranks, 3, B, groups], to mean and variance [B, groups]."""
    counts, means, squares = parts.unbind(1)
    mean = (counts * means).sum(0) / size
    between = (counts * (means - mean).square()).sum(0)
    return mean, (squares.sum(0) / plane + between) / size


def variance_of(squares, count: int):
    """Return ``squares / count``."""
    return squares / count


def normalized_groups(x, wide, mean, variance, weight, bias, groups: Groups, epsilon: float):
    """Return the output in the dtype of ``x``, and mean and rstd of each channel, [B, channels]."""
    indices = _indices(groups, wide.device)
    mean, rstd = indices.spread(mean), indices.spread((variance + epsilon).rsqrt_())
    scale = (rstd * weight)[:, None, None]
    return torch.addcmul(bias.to(wide.dtype), wide - mean[:, None, None], scale).to(x.dtype), mean, rstd


def sums_of_channels(d_out, x, mean, rstd):
    """Return the normalized input, ``d_out``, and ``Σ d_out`` and ``Σ d_out · normalized`` over pixels."""
    normal = (x - mean[:, None, None]).mul_(rstd[:, None, None])
    d_out = d_out.to(rstd.dtype)
    return normal, d_out, torch.stack((d_out.sum(PLANE), (d_out * normal).sum(PLANE)))


def sums_of_groups(of_channels, weight, groups: Groups):
    """Sum ``of_channels · weight`` over the local channels of each group, [2, B, groups]."""
    indices = _indices(groups, of_channels.device)
    return indices.total(of_channels * weight)


def group_norm_gradients(x, d_out, normal, weight, rstd, of_channels, sums, groups: Groups, count: int):
    """Return the gradients of input, weight and bias."""
    indices = _indices(groups, d_out.device)
    shift, slope = indices.spread(sums.div_(count))[:, :, None, None].unbind()
    d_x = (d_out * weight - shift - normal * slope).mul_(rstd[:, None, None])
    d_bias, d_weight = of_channels.sum(1).to(weight.dtype)
    return d_x.to(x.dtype), d_weight, d_bias
