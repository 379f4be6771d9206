"""The kernels of grouped heads and of rotary position embedding."""

import functools

import torch


@functools.cache
def _constant(values: tuple, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of ``values``. It is copied to the device once, because the host waits for each copy."""
    return torch.tensor(values, dtype=dtype, device=device)


def stacked(k, v):
    """Stack keys and values to [2, ...]."""
    return torch.stack((k, v))


def consecutive(heads, first: int, stop: int):
    """Return a view of heads ``first`` to ``stop`` of [..., heads, size]."""
    return heads[..., first:stop, :]


def selected(heads, numbers: tuple[int, ...]):
    """Return copies of the heads with these ``numbers``, [..., numbers, size]."""
    return heads[..., _constant(numbers, torch.int64, heads.device), :]


def rotated(x, cos, sin, direction: int):
    """Rotate pairs of features, ``size/2`` apart, by ``direction`` times the angles."""
    if torch.compiler.is_compiling():  # torch.compile does not support an out= argument that is a view
        first, second = x.chunk(2, -1)
        one, other = first * cos - direction * second * sin, second * cos + direction * first * sin
        return torch.cat((one, other), -1).to(x.dtype)
    wide = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    (first, second), (new_first, new_second) = x.chunk(2, -1), wide.chunk(2, -1)
    torch.mul(first, cos, out=new_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=new_second).addcmul_(first, sin, value=direction)
    return wide.to(x.dtype)


def rotations(positions, like, frequencies, scale: float):
    """Return ``scale`` times cosine and sine of ``positions · frequencies``, [..., 1, pairs]."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    angles = positions[..., None, None] * _constant(frequencies, dtype, like.device)
    return angles.cos() * scale, angles.sin() * scale
