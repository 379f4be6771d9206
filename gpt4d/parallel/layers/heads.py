"""Keys and values of grouped-query attention, and rotary position embedding (Su et al., 2021). No torch here.

The axes that split the heads of queries split the columns of keys and values equally, even where there are more ranks
than heads of keys and values. A rank then has a part of a head and gathers the rest. No rank stores or computes a
column that another rank has, and gradients need no further all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from gpt4d.parallel.engine.interleave import Turn
from gpt4d.parallel.layers import sharding
from gpt4d.parallel.layers.attention import local_heads
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layers.product import FEATURES, placeholder, start_gather, start_scatter
from gpt4d.parallel.symbolic.kernels import Function, TorchFunction, kernel, planned_kernel


@planned_kernel
def stacked_columns(k, v):
    """Return keys and values as one tensor, [2, ...]."""
    return k.like((2, *k.shape))


@planned_kernel(unread=("heads",))
def head_indices(heads, numbers: tuple[int, ...]):
    """Return the numbers of heads as a tensor."""
    return heads.like((len(numbers),), "int64")


@planned_kernel
def copied_heads(heads, indices):
    """Return copies of the heads [..., heads, size] with these indices."""
    return heads.like((*heads.shape[:-2], *indices.shape, heads.shape[-1]))


@planned_kernel
def gradient_of_heads(d_heads, count: int):
    """Return the gradient of all ``count`` heads here: the gradient of some of them, and zeros."""
    return d_heads.like((*d_heads.shape[:-2], count, d_heads.shape[-1]))


class StackedFunction(TorchFunction):
    """Columns of keys and of values as one tensor, [2, ...]."""

    torch_name = "stacked"

    @staticmethod
    def forward(ctx, k, v):
        return stacked_columns(k, v)

    @staticmethod
    def backward(ctx, d_columns):
        return d_columns.unbind()


class ConsecutiveHeadsFunction(TorchFunction):
    """Heads ``first`` to ``stop`` of [..., heads, size], on the same memory."""

    torch_name = "consecutive"

    @staticmethod
    def forward(ctx, heads, first: int, stop: int):
        ctx.count = heads.shape[-2]
        return heads.alias(shape=(*heads.shape[:-2], stop - first, heads.shape[-1]))

    @staticmethod
    def backward(ctx, d_heads):
        return gradient_of_heads(d_heads, ctx.count), None, None


class SelectedHeadsFunction(TorchFunction):
    """Copies of the heads of [..., heads, size] with these ``numbers``, of which some are equal."""

    torch_name = "selected"

    @staticmethod
    def forward(ctx, heads, numbers: tuple[int, ...]):
        ctx.count, indices = heads.shape[-2], head_indices(heads, numbers)
        ctx.save_for_backward(indices)
        return copied_heads(heads, indices)

    @staticmethod
    def backward(ctx, d_heads):
        return gradient_of_heads(d_heads, ctx.count), None


class _Gathering:
    """The collectives of one gathering of features."""

    def __init__(self, axis: Any):
        self.axis = axis
        self.gradient: Any = None  # the gradient of the part, in flight


class PartFunction(Function):
    """A rank's part of the features. Its backward waits for the gradient that WholeFunction's has started to sum."""

    @staticmethod
    def forward(ctx, part, gathering: _Gathering):
        ctx.gathering = gathering
        return part.view_as(part)

    @staticmethod
    def backward(ctx, d_part):
        gradient, ctx.gathering.gradient = ctx.gathering.gradient, None
        return gradient.wait(), None


class WholeFunction(Function):
    """The gathered features, each rank's gradient of which is a term of a sum."""

    @staticmethod
    def forward(ctx, part, whole, gathering: _Gathering):
        ctx.shape, ctx.gathering = part.shape, gathering
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx, d_whole):
        ctx.gathering.gradient = start_scatter(d_whole, ctx.gathering.axis, FEATURES)
        return placeholder(d_whole, ctx.shape), None, None


async def gather_features(x: Any, axis: Any) -> Any:
    """Return the features of all ranks of the axis; gradients are summed over it."""
    gathering = _Gathering(axis)
    part = PartFunction.apply(x, gathering)
    pending = start_gather(part.detach(), axis, FEATURES)
    await Turn()
    return WholeFunction.apply(part, pending.wait(), gathering)


@dataclass(frozen=True)
class KeyValueHeadsSpec(LayerSpec):
    """Columns of keys and of values [..., columns over axes] → the heads [..., heads, size] that this rank needs.

    The axes that split the heads of queries split these columns.

    Attributes:
        heads: global number of heads of queries, which the axes divide.
        key_value_heads: global number of heads of keys and values, which divides ``heads``. The axes divide their
            columns.
        parts: the number that the axes must divide.
    """

    heads: int
    key_value_heads: int
    parts: int

    def prepare(self, layer: BoundLayer) -> None:
        context = layer.context
        axes = [context.grid.axis(name) for name in context.head_axes(self.parts)]  # outermost first
        gathered = sharding.axes_to_gather(self.key_value_heads, [axis.size for axis in axes])
        layer.gathered = axes[::-1][:gathered]
        first_here, layer.heads = local_heads(self.key_value_heads, axes[: len(axes) - gathered])
        served = sharding.head_of_query(self.heads, self.key_value_heads, *local_heads(self.heads, axes))
        # The head of each of this rank's queries, among the heads here.
        layer.head_of_query = tuple(head - first_here for head in served)

    async def forward(self, layer: BoundLayer, k: Any, v: Any) -> tuple[Any, Any]:
        """Return as many heads as serve equally many consecutive queries each, or one head for each query."""
        if layer.gathered:
            columns = StackedFunction.apply(k, v)
            for axis in layer.gathered:
                columns = await gather_features(columns, axis)
            k, v = columns.unbind()
        return _needed(k, layer), _needed(v, layer)


def _needed(columns: Any, layer: BoundLayer) -> Any:
    """Return the heads that this rank's queries need, of [..., columns]."""
    heads, numbers = columns.unflatten(-1, (layer.heads, -1)), layer.head_of_query
    first, stop = numbers[0], numbers[-1] + 1
    if not sharding.serves_equally(numbers):
        return SelectedHeadsFunction.apply(heads, numbers)
    if stop - first == layer.heads:
        return heads
    return ConsecutiveHeadsFunction.apply(heads, first, stop)


@kernel(fused=True)
def rotated(x, cos, sin, direction: int):
    """Return pairs of features [..., heads, 2·pairs] rotated by angles, or, for ``direction`` -1, rotated back."""
    return x.like()


@kernel(unread=("like",))
def rotations(positions, like, frequencies: Sequence[float], scale: float):
    """Return the scaled cosines and sines of the angles, [batch, sequence, 1, pairs], at least float32."""
    shape = (*positions.shape, 1, len(frequencies))
    return tuple(positions.like(shape, "float64" if like.dtype == "float64" else "float32") for _ in range(2))


class RotationFunction(Function):
    """Pairs of features rotated by angles of which ``cos`` and ``sin`` are given."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return rotated(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, d_out):
        cos, sin = ctx.saved_tensors
        return rotated(d_out, cos, sin, -1), None, None


class Rotary:
    """Rotates the features of a head in pairs, ``size/2`` apart, by angles proportional to the token's position.

    Layers that share it compute the angles once for the tokens of each microbatch.

    Args:
        frequencies: angle of each pair per position, in radians.
        scale: factor of the rotated features.
    """

    def __init__(self, frequencies: Sequence[float], scale: float = 1.0):
        self.frequencies, self.scale = tuple(frequencies), scale
        self._rotations: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()

    def __call__(self, x: Any, tokens: Any) -> Any:
        """Return ``x`` [batch, sequence, heads, size] rotated, computed in float32, or float64 for float64."""
        if tokens not in self._rotations:
            self._rotations[tokens] = rotations(tokens.positions, x, self.frequencies, self.scale)
        return RotationFunction.apply(x, *self._rotations[tokens])
