"""The kernels of grouped heads and of rotary position embedding."""

from collections.abc import Sequence

import torch


def stacked(k, v):
    return torch.stack((k, v))


def consecutive(heads, first: int, stop: int):
    return heads[..., first:stop, :]


def selected(heads, numbers: Sequence[int]):
    return heads[..., list(numbers), :]


def rotated(x, cos, sin, direction: int):
    if torch.compiler.is_compiling():  # torch.compile does not take results that are parts of a tensor
        first, second = x.chunk(2, -1)
        one, other = first * cos - direction * second * sin, second * cos + direction * first * sin
        return torch.cat((one, other), -1).to(x.dtype)
    wide = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    (first, second), (new_first, new_second) = x.chunk(2, -1), wide.chunk(2, -1)
    torch.mul(first, cos, out=new_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=new_second).addcmul_(first, sin, value=direction)
    return wide.to(x.dtype)


def rotations(positions, like, frequencies, scale: float):
    dtype = torch.promote_types(like.dtype, torch.float32)
    angles = positions[..., None, None] * torch.tensor(frequencies, dtype=dtype, device=like.device)
    return angles.cos() * scale, angles.sin() * scale
