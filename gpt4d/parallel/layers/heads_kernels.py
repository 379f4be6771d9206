"""The kernels of grouped heads and of rotary position embedding."""

import functools

import torch

from gpt4d.parallel.layers.product_kernels import cast_to


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
    exchanged = x.roll(x.shape[-1] // 2, -1)
    return cast_to((x * cos).addcmul_(exchanged, sin, value=direction), x.dtype)


def rotations(positions, like, frequencies, scale: float):
    """Return ``scale`` times cosine and signed sine of ``positions · frequencies``, [..., 1, size]."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    angles = positions[..., None, None] * _constant(frequencies, dtype, like.device)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
