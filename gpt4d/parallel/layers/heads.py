"""Keys and values of grouped-query attention, and rotary position embedding (Su et al., 2021).

The axes that split the query heads split the columns of keys and values equally, even if there are more ranks than
key-value heads. In that case a rank computes a part of a key-value head and all-gathers the rest. No column is
replicated, so gradients need no additional all-reduce.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from gpt4d.parallel.kernels import Function, Tensor, TorchFunction, kernel, planned_kernel
from gpt4d.parallel.layers import sharding
from gpt4d.parallel.layers.exchange import exchanged, gathered_features
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layers.product import cast_to
from gpt4d.parallel.layers.sequence import TokenIndex
from gpt4d.parallel.lazy import torch


@functools.cache
def _constant(values: tuple, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of ``values``. It is copied to the device once, because the host waits for each copy."""
    return torch.tensor(values, dtype=dtype, device=device)


@planned_kernel
def stacked_columns(k, v):
    """Return keys and values as one tensor, [2, ...]."""
    return k.like((2, *k.shape))


@planned_kernel(free=True)
def head_indices(heads, numbers: tuple[int, ...]):
    """Return the indices of heads as a tensor, which is copied to the device once."""
    return heads.like((len(numbers),), "int64")


@planned_kernel
def copied_heads(heads, indices):
    """Return copies of the heads [..., heads, size] with these indices."""
    return heads.like((*heads.shape[:-2], *indices.shape, heads.shape[-1]))


@planned_kernel
def gradient_of_heads(d_heads, count: int):
    """Return the gradient of all ``count`` local heads: ``d_heads`` for the selected heads, and zeros."""
    return d_heads.like((*d_heads.shape[:-2], count, d_heads.shape[-1]))


class StackedFunction(TorchFunction):
    """Columns of keys and of values as one tensor, [2, ...]."""

    @staticmethod
    def in_torch(k, v):
        return torch.stack((k, v))

    @staticmethod
    def forward(ctx, k, v):
        return stacked_columns(k, v)

    @staticmethod
    def backward(ctx, d_columns):
        return d_columns.unbind()


class ConsecutiveHeadsFunction(TorchFunction):
    """A view of heads ``first`` to ``stop`` of [..., heads, size]."""

    @staticmethod
    def in_torch(heads, first: int, stop: int):
        return heads[..., first:stop, :]

    @staticmethod
    def forward(ctx, heads, first: int, stop: int):
        ctx.count = heads.shape[-2]
        return heads.alias(shape=(*heads.shape[:-2], stop - first, heads.shape[-1]))

    @staticmethod
    def backward(ctx, d_heads):
        return gradient_of_heads(d_heads, ctx.count), None, None


class SelectedHeadsFunction(TorchFunction):
    """Copies of the heads of [..., heads, size] with the indices ``numbers``, which may repeat."""

    @staticmethod
    def in_torch(heads, numbers: tuple[int, ...]):
        return heads[..., _constant(numbers, torch.int64, heads.device), :]

    @staticmethod
    def forward(ctx, heads, numbers: tuple[int, ...]):
        ctx.count, indices = heads.shape[-2], head_indices(heads, numbers)
        ctx.save_for_backward(indices)
        return copied_heads(heads, indices)

    @staticmethod
    def backward(ctx, d_heads):
        return gradient_of_heads(d_heads, ctx.count), None


@dataclass(frozen=True)
class KeyValueHeadsSpec(LayerSpec):
    """Columns of keys and values [..., columns over axes] → the heads [..., heads, size] that this rank needs.

    The axes that split the query heads split these columns.

    Attributes:
        heads: global number of query heads. The product of the axes' sizes divides it.
        key_value_heads: global number of key-value heads, which divides ``heads``. The axes split their columns.
        parts: the sizes of the axes must divide this number.
    """

    heads: int
    key_value_heads: int
    parts: int

    def prepare(self, layer: BoundLayer) -> None:
        context = layer.context
        axes = [context.grid.axis(name) for name in context.head_axes(self.parts)]  # outermost first
        gathered = sharding.axes_to_gather(self.key_value_heads, [axis.size for axis in axes])
        layer.gathered = axes[::-1][:gathered]
        first_here, layer.heads = sharding.local_heads(self.key_value_heads, axes[: len(axes) - gathered])
        served = sharding.head_of_query(self.heads, self.key_value_heads, *sharding.local_heads(self.heads, axes))
        # The local key-value head of each of this rank's query heads.
        layer.head_of_query = tuple(head - first_here for head in served)

    async def forward(self, layer: BoundLayer, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return key-value heads that serve equally many consecutive query heads, or one head per query head."""
        if layer.gathered:
            columns = StackedFunction.apply(k, v)
            for axis in layer.gathered:
                (columns,) = await exchanged((columns, gathered_features(axis)))
            k, v = columns.unbind()
        return _needed(k, layer), _needed(v, layer)


def _needed(columns: Tensor, layer: BoundLayer) -> Tensor:
    """Return the key-value heads that this rank's query heads need, from [..., columns]."""
    heads, numbers = columns.unflatten(-1, (layer.heads, -1)), layer.head_of_query
    first, stop = numbers[0], numbers[-1] + 1
    if not sharding.serves_equally(numbers):
        return SelectedHeadsFunction.apply(heads, numbers)
    if stop - first == layer.heads:
        return heads
    return ConsecutiveHeadsFunction.apply(heads, first, stop)


def _rotated_bytes(x, cos, sin, direction: int) -> int:
    """Return the bytes of ``rotated``. Its operations read the heads several times, but cosines and sines once."""
    return 2 * x.nbytes + (cos.nbytes + sin.nbytes) // 4


@kernel(lambda x, *_: x.like(), fused=True, moved=_rotated_bytes)
def rotated(x, cos, sin, direction: int):
    """Rotate pairs of features [..., heads, size] by the angles, or back if ``direction`` is -1."""
    exchanged = x.roll(x.shape[-1] // 2, -1)
    return cast_to.in_torch((x * cos).addcmul_(exchanged, sin, value=direction), x.dtype)


def _rotations_results(positions, like, frequencies: tuple[float, ...], scale: float):
    shape = (*positions.shape, 1, 2 * len(frequencies))
    return tuple(positions.like(shape, "float64" if like.dtype == "float64" else "float32") for _ in range(2))


@kernel(_rotations_results, unread=("like",))
def rotations(positions, like, frequencies: tuple[float, ...], scale: float):
    """Return the scaled cosines and sines of the angles, [batch, sequence, 1, size], in float32 or float64.

    Both are repeated for the second feature of each pair. The sines of the first features are negative.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    angles = positions[..., None, None] * _constant(frequencies, dtype, like.device)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


class RotationFunction(Function):
    """Pairs of features, rotated by angles with cosines ``cos`` and sines ``sin``."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return rotated(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, d_out):
        cos, sin = ctx.saved_tensors
        return rotated(d_out, cos, sin, -1), None, None


class Rotary:
    """Rotates pairs of a head's features, ``size/2`` apart, by angles proportional to the token's position.

    Layers that share an instance compute the angles once per microbatch.

    Args:
        frequencies: angle of each pair per position, in radians.
        scale: factor of the rotated features.
    """

    def __init__(self, frequencies: Sequence[float], scale: float = 1.0):
        self.frequencies, self.scale = tuple(frequencies), scale
        self._rotations: WeakKeyDictionary[TokenIndex, tuple[Tensor, Tensor]] = WeakKeyDictionary()

    def __call__(self, x: Tensor, tokens: TokenIndex) -> Tensor:
        """Return ``x`` [batch, sequence, heads, size] rotated, computed in float32, or float64 for float64."""
        if tokens not in self._rotations:
            self._rotations[tokens] = rotations(tokens.positions, x, self.frequencies, self.scale)
        return RotationFunction.apply(x, *self._rotations[tokens])
