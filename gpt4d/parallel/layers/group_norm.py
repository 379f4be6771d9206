"""GroupNorm over channels that an axis splits: groups are those of all channels, on every grid.

Weight and bias are masters, and their gradients are summed in the masters' dtype, whatever the dtype of the channels.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from gpt4d.parallel.collectives import Axis
from gpt4d.parallel.layers import specs
from gpt4d.parallel.weights import WeightStream

PLANE = (1, 2)  # height and width


class Groups(nn.Module):
    """The groups that a rank's channels belong to: of one activation, or of a concatenation as it is stored.

    Statistics of groups are [samples, groups here], those of channels [samples, channels here]. If the axis cuts a
    group, its ranks exchange statistics of all groups; otherwise each rank has its own whole groups.
    """

    def __init__(self, channels: tuple[int, ...], groups: int, axis: Axis):
        super().__init__()
        group_of = specs.channel_groups(channels, groups)
        local = len(group_of) // axis.size
        self.size = len(group_of) // groups  # channels of a group
        self.axis = axis if specs.cuts_groups(channels, groups, axis.size) else Axis(axis.name)
        own = group_of[axis.index * local : (axis.index + 1) * local]
        if self.axis.size == 1:  # count the groups that are here only
            place = {group: number for number, group in enumerate(sorted(set(own)))}
            own, groups = [place[group] for group in own], len(place)
        members = [[channel for channel, group in enumerate(own) if group == wanted] for wanted in range(groups)]
        most = max(map(len, members))
        self.of_channel: torch.Tensor  # the group of each channel here
        self.members: torch.Tensor  # the channels here of each group, behind them the number of channels: none
        self.counts: torch.Tensor  # of the channels here of each group
        self._buffer("of_channel", own)
        self._buffer("members", [row + [local] * (most - len(row)) for row in members])
        self._buffer("counts", [len(row) for row in members])

    def _buffer(self, name: str, values: list) -> None:
        self.register_buffer(name, torch.tensor(values), persistent=False)

    def total(self, of_channels: torch.Tensor) -> torch.Tensor:
        """Return the sums [..., groups] of [..., channels] over the channels here, always in the same order."""
        return F.pad(of_channels, (0, 1))[..., self.members].sum(-1)

    def spread(self, of_groups: torch.Tensor) -> torch.Tensor:
        """Return for each channel the value of its group, [..., channels]."""
        return of_groups[..., self.of_channel]

    def moments(self, wide: torch.Tensor, parameter: nn.Parameter) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and variance [B, groups] of all channels of each group.

        Deviations are those from the mean of a channel, and means are combined (Chan et al.), within a rank and over
        the ranks: no difference of large squares.
        """
        plane = wide.shape[1] * wide.shape[2]
        mean = wide.mean(PLANE)
        squares = (wide - mean[:, None, None]).square_().sum(PLANE)
        mean_here = self.total(mean) / self.counts.clamp(min=1)
        squares = self.total(squares + (mean - self.spread(mean_here)).square_().mul_(plane))
        if self.axis.size == 1:
            return mean_here, squares / (self.size * plane)
        counts = self.counts.to(wide.dtype).expand_as(mean_here)
        parts = torch.stack((counts, mean_here, squares)).unsqueeze(0)
        counts, means, squares = self.axis.all_gather(parts, parameter=parameter).unbind(1)
        mean = (counts * means).sum(0) / self.size
        between = (counts * (means - mean).square()).sum(0)
        return mean, (squares.sum(0) / plane + between) / self.size


class GroupNormFunction(torch.autograd.Function):
    """``(x - mean) / sqrt(variance + epsilon) · weight + bias`` over the pixels and channels of each group."""

    @staticmethod
    def forward(ctx, x, weight, bias, groups: Groups, epsilon: float):
        wide = x if x.dtype == torch.float64 else x.float()
        mean, variance = groups.moments(wide, weight)
        mean, rstd = groups.spread(mean), groups.spread((variance + epsilon).rsqrt_())
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.groups, ctx.parameter = groups, weight
        mean, scale = mean[:, None, None], (rstd * weight)[:, None, None]
        return torch.addcmul(bias.to(wide.dtype), wide - mean, scale).to(x.dtype)

    @staticmethod
    def backward(ctx, d_out):
        x, weight, mean, rstd = ctx.saved_tensors
        groups = ctx.groups
        normal = (x - mean[:, None, None]).mul_(rstd[:, None, None])
        d_out = d_out.to(rstd.dtype)
        of_channels = torch.stack((d_out.sum(PLANE), (d_out * normal).sum(PLANE)))  # [2, B, channels]
        sums = groups.total(of_channels * weight)
        sums = groups.axis.all_reduce(sums, parameter=ctx.parameter)
        shift, slope = groups.spread(sums.div_(groups.size * x.shape[1] * x.shape[2]))[:, :, None, None].unbind()
        d_x = (d_out * weight - shift - normal * slope).mul_(rstd[:, None, None])
        d_bias, d_weight = of_channels.sum(1).to(weight.dtype)
        return d_x.to(x.dtype), d_weight, d_bias, None, None


class GroupNorm(nn.Module):
    """``[B, height, width, channels over axis]`` → the same; statistics are float32, or float64 for float64 inputs.

    Args:
        weights: the stage's weight stream.
        groups: number of groups of all channels.
        channels: global number of channels, or those of the parts of a concatenation
            (gpt4d.parallel.layers.concatenation): its groups are consecutive in the order of the parts.
        axis: splits the channels.
        epsilon: added to the variance.
    """

    def __init__(
        self,
        weights: WeightStream,
        groups: int,
        channels: int | Sequence[int],
        axis: str = "y",
        epsilon: float = 1e-5,
    ):
        super().__init__()
        parts = (channels,) if isinstance(channels, int) else tuple(channels)
        self.groups, self.epsilon = Groups(parts, groups, weights.grid.axis(axis)).to(weights.device), epsilon
        layer = specs.group_norm(sum(parts), axis)
        self.weight, self.bias = weights.parameter(layer["weight"]), weights.parameter(layer["bias"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return GroupNormFunction.apply(x, self.weight, self.bias, self.groups, self.epsilon)
