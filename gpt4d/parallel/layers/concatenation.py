"""Concatenation of activations whose channels are split, and its inverse, without communication. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpt4d.parallel.function import TorchFunction, planned_kernel
from gpt4d.parallel.layers import specs


@planned_kernel
def side_by_side(*parts):
    """Return parts [..., channels] as one tensor."""
    return parts[0].like((*parts[0].shape[:-1], sum(part.shape[-1] for part in parts)))


@planned_kernel
def copied(part):
    """Return a copy of a part."""
    return part.like()


def _parts(whole, sizes: tuple[int, ...]):
    """Return the parts of a concatenation: copies, or, where each part has one piece, views on its memory."""
    pieces = whole.shape[-1] // sum(sizes)
    views = tuple(whole.alias(shape=(*whole.shape[:-1], pieces * size)) for size in sizes)
    return views if pieces == 1 else tuple(map(copied, views))


class ConcatenationFunction(TorchFunction):
    """The concatenation of the arguments but the last along channels. The last one: channels of a piece of each."""

    torch_name = "concatenated"

    @staticmethod
    def forward(ctx, *arguments):
        *parts, ctx.sizes = arguments
        return side_by_side(*parts)

    @staticmethod
    def backward(ctx, d_whole):
        return *_parts(d_whole, ctx.sizes), None


class SeparationFunction(TorchFunction):
    """The parts of a concatenation. ``sizes``: channels of a piece of each."""

    torch_name = "separated"

    @staticmethod
    def forward(ctx, whole, sizes: tuple[int, ...]):
        return _parts(whole, sizes)

    @staticmethod
    def backward(ctx, *d_parts):
        return side_by_side(*d_parts), None


def concatenate(parts: Sequence[Any], channels: Sequence[int], pieces: int | None = None) -> Any:
    """Return the concatenation of activations [..., channels] along channels, stored in the order of
    gpt4d.parallel.layers.specs.interleaved_order.

    Args:
        parts: this rank's channels of each activation; one axis splits them all.
        channels: global number of channels of each.
        pieces: that each activation is stored in; None: gpt4d.parallel.layers.specs.interleaved_pieces.
    """
    return ConcatenationFunction.apply(*parts, _sizes(channels, pieces))


def separate(whole: Any, channels: Sequence[int], pieces: int | None = None) -> list[Any]:
    """Return the parts of a concatenation [..., channels]: the inverse of ``concatenate``."""
    return list(SeparationFunction.apply(whole, _sizes(channels, pieces)))


def _sizes(channels: Sequence[int], pieces: int | None) -> tuple[int, ...]:
    pieces = pieces or specs.interleaved_pieces(channels)
    return tuple(count // pieces for count in channels)
