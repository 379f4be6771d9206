"""The functions of heads of keys and values in torch."""

from collections.abc import Sequence

import torch


def stacked(k, v):
    return torch.stack((k, v))


def consecutive(heads, first: int, stop: int):
    return heads[..., first:stop, :]


def selected(heads, numbers: Sequence[int]):
    return heads[..., list(numbers), :]
