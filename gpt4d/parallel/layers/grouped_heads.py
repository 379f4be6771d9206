"""Keys and values of grouped-query attention, which several queries share.

The axes that split the heads of queries split the columns of keys and values equally, even where there are more ranks
than heads of keys and values: then a rank has a part of a head, and gathers the rest. No rank stores or computes a
column that another rank has, and gradients need no further sum.
"""

from collections.abc import Sequence

import torch
from torch import nn

from gpt4d.parallel.collectives import Axis, Pending
from gpt4d.parallel.layers import specs
from gpt4d.parallel.layers.attention import local_heads
from gpt4d.parallel.layers.product import FEATURES, placeholder, start_gather, start_scatter
from gpt4d.parallel.turns import Turn


class _Gathering:
    """The collectives of one gathering of features."""

    def __init__(self, axis: Axis):
        self.axis = axis
        self.gradient: Pending | None = None  # of the part


class PartFunction(torch.autograd.Function):
    """A rank's part of the features. Its backward waits for the gradient that WholeFunction's has started to sum."""

    @staticmethod
    def forward(ctx, part, gathering: _Gathering):
        ctx.gathering = gathering
        return part.view_as(part)

    @staticmethod
    def backward(ctx, d_part):
        gradient, ctx.gathering.gradient = ctx.gathering.gradient, None
        return gradient.wait(), None


class WholeFunction(torch.autograd.Function):
    """The gathered features, each rank's gradient of which is a term of a sum."""

    @staticmethod
    def forward(ctx, part, whole, gathering: _Gathering):
        ctx.shape, ctx.gathering = part.shape, gathering
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx, d_whole):
        ctx.gathering.gradient = start_scatter(d_whole, ctx.gathering.axis, FEATURES)
        return placeholder(d_whole, ctx.shape), None, None


async def gather_features(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the features of all ranks of the axis; gradients are summed over it."""
    gathering = _Gathering(axis)
    part = PartFunction.apply(x, gathering)
    pending = start_gather(part.detach(), axis, FEATURES)
    await Turn()
    return WholeFunction.apply(part, pending.wait(), gathering)


class KeyValueHeads(nn.Module):
    """Columns of keys and of values [..., columns over ``axes``] → the heads [..., heads, size] that this rank needs.

    Args:
        heads: global number of heads of queries, which ``axes`` divide.
        key_value_heads: global number of heads of keys and values, which divides ``heads``. The axes divide their
            columns.
        axes: the axes that split the heads of queries and these columns, outermost first.
    """

    def __init__(self, heads: int, key_value_heads: int, axes: Sequence[Axis]):
        super().__init__()
        gathered = specs.axes_to_gather(key_value_heads, [axis.size for axis in axes])
        splitting = axes[: len(axes) - gathered]
        self.gathered = axes[::-1][:gathered]
        first_here, self.heads = local_heads(key_value_heads, splitting)
        first, count = local_heads(heads, axes)
        # The head of each of this rank's queries, of those here.
        self.head_of_query = [head - first_here for head in specs.head_of_query(heads, key_value_heads, first, count)]

    async def forward(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return as many heads as serve equally many consecutive queries each, or one head for each query."""
        if self.gathered:
            columns = torch.stack((k, v))
            for axis in self.gathered:
                columns = await gather_features(columns, axis)
            k, v = columns.unbind()
        return self._needed(k), self._needed(v)

    def _needed(self, columns: torch.Tensor) -> torch.Tensor:
        heads = columns.unflatten(-1, (self.heads, -1))
        first, stop = self.head_of_query[0], self.head_of_query[-1] + 1
        if specs.serves_equally(self.head_of_query):
            return heads[..., first:stop, :]
        return heads[..., self.head_of_query, :]
