"""The kernels of GroupNorm, and the indices of a rank's channels by group."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

PLANE = (1, 2)  # height and width


class Groups(nn.Module):
    """The groups that a rank's channels belong to: of one activation, or of a concatenation as it is stored.

    Statistics of groups are [samples, groups here], statistics of channels [samples, channels here].

    Args:
        own: the group of each channel of this rank.
        count: number of groups.
    """

    def __init__(self, own: Sequence[int], count: int):
        super().__init__()
        self.count = count
        members = [[channel for channel, group in enumerate(own) if group == wanted] for wanted in range(count)]
        most = max(map(len, members))
        self.of_channel: torch.Tensor  # the group of each channel here
        self.members: torch.Tensor  # the channels here of each group, behind them the number of channels: none
        self.counts: torch.Tensor  # number of channels here in each group
        self._buffer("of_channel", list(own))
        self._buffer("members", [row + [len(own)] * (most - len(row)) for row in members])
        self._buffer("counts", [len(row) for row in members])

    def _buffer(self, name: str, values: list) -> None:
        self.register_buffer(name, torch.tensor(values), persistent=False)

    def total(self, of_channels: torch.Tensor) -> torch.Tensor:
        """Return the sums [..., groups] of [..., channels] over the channels here, always in the same order."""
        return F.pad(of_channels, (0, 1))[..., self.members].sum(-1)

    def spread(self, of_groups: torch.Tensor) -> torch.Tensor:
        """Return for each channel the value of its group, [..., channels]."""
        return of_groups[..., self.of_channel]


def widened(x):
    return x if x.dtype == torch.float64 else x.float()


def moments(wide, groups: Groups):
    plane = wide.shape[1] * wide.shape[2]
    mean = wide.mean(PLANE)
    squares = (wide - mean[:, None, None]).square_().sum(PLANE)
    mean_here = groups.total(mean) / groups.counts.clamp(min=1)
    return mean_here, groups.total(squares + (mean - groups.spread(mean_here)).square_().mul_(plane))


def with_counts(mean, squares, groups: Groups):
    return torch.stack((groups.counts.to(mean.dtype).expand_as(mean), mean, squares)).unsqueeze(0)


def combined_moments(parts, size: int, plane: int):
    counts, means, squares = parts.unbind(1)
    mean = (counts * means).sum(0) / size
    between = (counts * (means - mean).square()).sum(0)
    return mean, (squares.sum(0) / plane + between) / size


def variance_of(squares, count: int):
    return squares / count


def normalized_groups(wide, x, mean, variance, weight, bias, groups: Groups, epsilon: float):
    mean, rstd = groups.spread(mean), groups.spread((variance + epsilon).rsqrt_())
    scale = (rstd * weight)[:, None, None]
    return torch.addcmul(bias.to(wide.dtype), wide - mean[:, None, None], scale).to(x.dtype), mean, rstd


def sums_of_channels(d_out, x, mean, rstd):
    normal = (x - mean[:, None, None]).mul_(rstd[:, None, None])
    d_out = d_out.to(rstd.dtype)
    return normal, d_out, torch.stack((d_out.sum(PLANE), (d_out * normal).sum(PLANE)))


def sums_of_groups(of_channels, weight, groups: Groups):
    return groups.total(of_channels * weight)


def group_norm_gradients(d_out, normal, x, weight, rstd, of_channels, sums, groups: Groups, count: int):
    shift, slope = groups.spread(sums.div_(count))[:, :, None, None].unbind()
    d_x = (d_out * weight - shift - normal * slope).mul_(rstd[:, None, None])
    d_bias, d_weight = of_channels.sum(1).to(weight.dtype)
    return d_x.to(x.dtype), d_weight, d_bias
