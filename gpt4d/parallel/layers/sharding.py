"""Axes that split the features and the heads of layers, and the stored order of a concatenation. No torch here."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

T = TypeVar("T")
# Number of pieces of a part of a concatenation: all usual sizes of an axis divide it, and long pieces are copied
# faster.
_MAX_PIECES = 240


class Axes(NamedTuple):
    """The axes that split the features of a layer's input and of its output; None: every rank has all features."""

    contracted: str | None  # the output is summed over it
    produced: str | None  # the input's gradient is summed over it


NORMAL, TRANSPOSED = Axes("y", "x"), Axes("x", "y")


def linear_axes(transposed: bool) -> Axes:
    """Return the axes of a linear layer on a stream that y splits."""
    return TRANSPOSED if transposed else NORMAL


def named(*axes: str | None) -> tuple[str, ...]:
    """Return the axes without None."""
    return tuple(axis for axis in axes if axis is not None)


def sides(stream: T, inner: T, transposed: bool) -> tuple[T, T]:
    """Return the properties of a layer's input and of its output, given those of the stream and of the inner side.

    The input of a normal layer is the residual stream, and so is the output of a transposed one.
    """
    return (inner, stream) if transposed else (stream, inner)


def head_axes(heads: int, x: int, y: int, scatter: bool, stream: str = "y") -> tuple[str, ...]:
    """Return the axes that split the heads of an attention, outermost first, on a grid with these sizes.

    The axis that does not split the stream does. ``scatter`` (``parallel.scatter_heads``): so does that of the stream
    if there are enough heads.
    """
    inner, size = ("x", y) if stream == "y" else ("y", x)
    return (inner, stream) if scatter and size > 1 and heads % (x * y) == 0 else (inner,)


def axes_to_gather(key_value_heads: int, sizes: Sequence[int]) -> int:
    """Return over how many of the axes that split the columns of keys and values, innermost first, to gather them.

    ``sizes``: sizes of the axes, outermost first. The remaining axes then split complete heads.
    """
    return next(n for n in range(len(sizes) + 1) if key_value_heads % math.prod(sizes[: len(sizes) - n]) == 0)


def head_of_query(heads: int, key_value_heads: int, first: int, count: int) -> list[int]:
    """Return the head of keys and values of each of ``count`` heads of queries from ``first`` on."""
    return [query * key_value_heads // heads for query in range(first, first + count)]


def serves_equally(heads: Sequence[int]) -> bool:
    """Return whether consecutive heads serve equally many queries each. ``heads``: the head of each query."""
    first, needed = heads[0], heads[-1] + 1 - heads[0]
    return len(heads) % needed == 0 and all(
        head == first + index * needed // len(heads) for index, head in enumerate(heads)
    )


def interleaved_pieces(channels: Sequence[int]) -> int:
    """Return the number of pieces that each part of a concatenation is stored in: an axis must divide it.

    Queries, keys and values have as many as their heads allow (gpt4d.model.llama.config).
    """
    return math.gcd(*channels, _MAX_PIECES) if len(channels) > 1 else channels[0]


def interleaved_order(channels: Sequence[int]) -> list[int]:
    """Return the index in ``[first | second | …]`` of each channel of a concatenation as it is stored.

    The parts are cut into equally many pieces and stored alternately: the first piece of each part, then the second
    piece of each. An axis that divides the number of pieces splits the stored order in the same way as the parts: the
    first rank has the first channels of each. So a concatenation has a plain layout, the same on all grids, and takes
    no communication.
    """
    pieces, starts = interleaved_pieces(channels), [sum(channels[:place]) for place in range(len(channels))]
    return [
        start + piece * (count // pieces) + offset
        for piece in range(pieces)
        for start, count in zip(starts, channels, strict=True)
        for offset in range(count // pieces)
    ]


def channel_groups(channels: Sequence[int], groups: int) -> list[int]:
    """Return the group of each stored channel of a concatenation; groups are consecutive in its parts."""
    size, uneven = divmod(sum(channels), groups)
    assert not uneven, f"{groups} groups do not divide {sum(channels)} channels"
    return [index // size for index in interleaved_order(channels)]


@lru_cache
def cuts_groups(channels: tuple[int, ...], groups: int, parts: int) -> bool:
    """Return whether an axis of ``parts`` devices puts channels of one group on different devices."""
    group_of = channel_groups(channels, groups)
    local = len(group_of) // parts
    owned = [set(group_of[part * local : (part + 1) * local]) for part in range(parts)]
    return sum(map(len, owned)) > groups
