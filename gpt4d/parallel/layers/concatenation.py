"""Concatenation of activations whose channels are split, and its inverse, without communication."""

from collections.abc import Sequence

import torch

from gpt4d.parallel.layers import specs


def concatenate(parts: Sequence[torch.Tensor], channels: Sequence[int], pieces: int | None = None) -> torch.Tensor:
    """Return the concatenation of activations [..., channels] along channels, stored in the order of
    gpt4d.parallel.layers.specs.interleaved_order.

    Args:
        parts: this rank's channels of each activation; one axis splits them all.
        channels: global number of channels of each.
        pieces: that each activation is stored in; None: gpt4d.parallel.layers.specs.interleaved_pieces.
    """
    pieces = pieces or specs.interleaved_pieces(channels)
    sizes = [count // pieces for count in channels]
    return torch.cat([part.unflatten(-1, (-1, size)) for part, size in zip(parts, sizes, strict=True)], -1).flatten(-2)


def separate(whole: torch.Tensor, channels: Sequence[int], pieces: int | None = None) -> list[torch.Tensor]:
    """Return the parts of a concatenation [..., channels]: the inverse of ``concatenate``."""
    pieces = pieces or specs.interleaved_pieces(channels)
    sizes = [count // pieces for count in channels]
    return [part.flatten(-2) for part in whole.unflatten(-1, (-1, sum(sizes))).split(sizes, -1)]
