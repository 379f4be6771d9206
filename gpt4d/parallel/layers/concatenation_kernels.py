"""Concatenations in torch."""

import torch


def concatenated(*arguments):
    *parts, sizes = arguments
    return torch.cat([part.unflatten(-1, (-1, size)) for part, size in zip(parts, sizes, strict=True)], -1).flatten(-2)


def separated(whole, sizes: tuple[int, ...]):
    return tuple(part.flatten(-2) for part in whole.unflatten(-1, (-1, sum(sizes))).split(sizes, -1))
