"""Axes that split the features and the heads of layers, and the stored order of a concatenation. No torch here."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

from gpt4d.parallel.comm.pending import MeshAxis

T = TypeVar("T")
_MAX_PIECES = 240  # pieces per tensor of a concatenation: all usual axis sizes divide it; longer pieces copy faster


class Axes(NamedTuple):
    """The axes that split the features of a layer's input and of its output; None: every rank has all features."""

    contracted: str | None  # splits the input; the output is all-reduced over this axis
    produced: str | None  # splits the output; the input's gradient is all-reduced over this axis


NORMAL, TRANSPOSED = Axes("y", "x"), Axes("x", "y")


def linear_axes(transposed: bool) -> Axes:
    """Return the axes of a linear layer if y splits the residual stream."""
    return TRANSPOSED if transposed else NORMAL


def named(*axes: str | None) -> tuple[str, ...]:
    """Return the axes without None."""
    return tuple(axis for axis in axes if axis is not None)


def sides(stream: T, inner: T, transposed: bool) -> tuple[T, T]:
    """Return (input, output) of a layer: ``stream`` for the residual stream, ``inner`` for the inner activation.

    The residual stream is the input of a normal layer and the output of a transposed layer.
    """
    return (inner, stream) if transposed else (stream, inner)


def head_axes(heads: int, x: int, y: int, scatter: bool, stream: str = "y") -> tuple[str, ...]:
    """Return the axes that split the heads of an attention, outermost first, on a grid with sizes ``x`` and ``y``.

    ``stream`` is the axis that splits the residual stream; the heads are split over the other axis. With ``scatter``
    (``parallel.scatter_heads``), ``stream`` splits them too if x·y divides their number.
    """
    inner, size = ("x", y) if stream == "y" else ("y", x)
    return (inner, stream) if scatter and size > 1 and heads % (x * y) == 0 else (inner,)


def local_heads(heads: int, axes: Sequence[MeshAxis]) -> tuple[int, int]:
    """Return this rank's first head and its number of heads. ``axes`` split all ``heads``, outermost first."""
    first = 0
    for axis in axes:
        heads //= axis.size
        first += axis.index * heads
    return first, heads


def axes_to_gather(key_value_heads: int, sizes: Sequence[int]) -> int:
    """Return the number of axes, innermost first, over which a rank all-gathers columns of keys and values.

    ``sizes`` are the sizes of the axes that split these columns, outermost first. The remaining axes split complete
    heads.
    """
    return next(n for n in range(len(sizes) + 1) if key_value_heads % math.prod(sizes[: len(sizes) - n]) == 0)


def head_of_query(heads: int, key_value_heads: int, first: int, count: int) -> list[int]:
    """Return the key-value head of each of ``count`` query heads, starting with query head ``first``."""
    return [query * key_value_heads // heads for query in range(first, first + count)]


def serves_equally(heads: Sequence[int]) -> bool:
    """Return whether each key-value head serves equally many queries. ``heads``: the key-value head of each query."""
    first, needed = heads[0], heads[-1] + 1 - heads[0]
    return len(heads) % needed == 0 and all(
        head == first + index * needed // len(heads) for index, head in enumerate(heads)
    )


def interleaved_pieces(channels: Sequence[int]) -> int:
    """Return the number of pieces of each tensor of a stored concatenation. The size of an axis must divide it.

    The number of heads determines it for queries, keys and values (gpt4d.model.llama).
    """
    return math.gcd(*channels, _MAX_PIECES) if len(channels) > 1 else channels[0]


def interleaved_order(channels: Sequence[int]) -> list[int]:
    """Return, for each stored channel of a concatenation, its index in ``[first | second | …]``.

    All tensors are cut into the same number of pieces, which are interleaved: the first piece of each tensor, then the
    second piece of each. An axis whose size divides the number of pieces then gives each rank the same channels of
    every tensor as it has of the separate tensors. So a concatenation has one layout on all grids and needs no
    communication.
    """
    pieces, starts = interleaved_pieces(channels), [sum(channels[:place]) for place in range(len(channels))]
    return [
        start + piece * (count // pieces) + offset
        for piece in range(pieces)
        for start, count in zip(starts, channels, strict=True)
        for offset in range(count // pieces)
    ]


def channel_groups(channels: Sequence[int], groups: int) -> list[int]:
    """Return each stored channel's group. Groups are consecutive in the order ``[first | second | …]``."""
    size, uneven = divmod(sum(channels), groups)
    assert not uneven, f"{groups} groups do not divide {sum(channels)} channels"
    return [index // size for index in interleaved_order(channels)]


@lru_cache
def cuts_groups(channels: tuple[int, ...], groups: int, parts: int) -> bool:
    """Return whether an axis of size ``parts`` splits the channels of any group over several devices."""
    group_of = channel_groups(channels, groups)
    local = len(group_of) // parts
    owned = [set(group_of[part * local : (part + 1) * local]) for part in range(parts)]
    return sum(map(len, owned)) > groups
