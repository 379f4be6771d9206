"""Kernels for dtypes, biases and layouts around the products of linear layers and convolutions."""

import functools

import torch


def cast(x, like):
    """Convert ``x`` to the dtype of ``like``."""
    return x if x.dtype == like.dtype else x.to(like.dtype)  # torch takes longer to return ``x``


def cast_to(x, dtype):
    """Convert ``x`` to ``dtype``."""
    return x if x.dtype == dtype else x.to(dtype)


def add_bias_(out, bias):
    """Add ``bias`` to ``out`` in place."""
    return out.add_(bias)


def add_bias(out, bias):
    """Return ``out + bias``."""
    return out + bias


def add_gradient_(earlier, gradient):
    """Add ``gradient`` to ``earlier`` in place."""
    return earlier.add_(gradient)


def bias_gradient(d_out_BN, bias):
    """Sum ``d_out_BN`` over the batch dims in the dtype of ``bias``."""
    return d_out_BN.flatten(0, -1 - bias.dim()).sum(0, dtype=bias.dtype)


def local_bias(bias, like, parts: int, index: int):
    """Return slice ``index`` of ``parts`` equal slices of ``bias``, in the dtype of ``like``."""
    if parts > 1:
        bias = bias.unflatten(-1, (parts, -1))[..., index, :]
    return bias.to(like.dtype)


def parts_first(x, parts: int):
    """Reshape [..., parts · n] to a contiguous [parts, ..., n]."""
    return x.unflatten(-1, (parts, -1)).movedim(-2, 0).contiguous()


def parts_last(x):
    """Reshape [parts, ..., n] to [..., parts · n]."""
    return x.movedim(0, -2).flatten(-2)


def placeholder(like, shape: tuple[int, ...]):
    """Return an expanded zero of ``shape``, which takes no memory."""
    return _zero(like.dtype, like.device).expand(shape)


@functools.cache
def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device)
