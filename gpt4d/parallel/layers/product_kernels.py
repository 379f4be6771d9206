"""The kernels that products need besides their own."""

import functools
import math

import torch


def cast(x, like):
    return x.to(like.dtype)


def cast_to(x, dtype):
    return x.to(dtype)


def add_bias_(out, bias):
    return out.add_(bias)


def add_bias(out, bias):
    return out + bias


def bias_gradient(d_out_BN, bias):
    rows = d_out_BN.reshape(-1, math.prod(bias.shape))
    return rows.sum(0, dtype=bias.dtype).view(bias.shape)


def local_bias(bias, like, parts: int, index: int):
    if parts > 1:
        bias = bias.unflatten(-1, (parts, -1))[..., index, :]
    return bias.to(like.dtype)


def parts_first(x, parts: int):
    return x.unflatten(-1, (parts, -1)).movedim(-2, 0).contiguous()


def parts_last(x):
    return x.movedim(0, -2).flatten(-2)


def placeholder(like, shape: tuple[int, ...]):
    return _zero(like.dtype, like.device).expand(shape)


@functools.cache
def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device)
