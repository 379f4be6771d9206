"""The kernels of float8 products.

``torch._scaled_mm`` multiplies a row-major by a column-major matrix. Here both factors are contiguous with the
contracted dim last, and the second factor is passed as its transpose.
"""

import torch

from gpt4d.config import ConfigError
from gpt4d.parallel.compile import fused
from gpt4d.parallel.layers.float8 import LARGEST, SCALE_BYTES, VALUES

_LARGEST_EXPONENT, _MANTISSA_BITS = 254, 23  # of float32, the exponent with its bias
_SCALE = slice(-SCALE_BYTES, -SCALE_BYTES + 4)  # the bytes of the scale at the end of a packed weight
_FIRST_CAPABILITY = (8, 9)  # GPUs with float8 products


def supports(device: torch.device) -> bool:
    """Return whether a device has float8 products. A CPU emulates them. AMD's GPUs have other values of float8."""
    if device.type != "cuda":
        return True
    return not torch.version.hip and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY


def check_device(device: torch.device) -> None:
    """Raise ConfigError unless the rank's device has float8 products."""
    if not supports(device):
        raise ConfigError(
            f"train.precision=fp8: {torch.cuda.get_device_name(device)} has no float8 products that gpt4d supports; "
            "use train.precision=bf16, or an NVIDIA GPU of compute capability 8.9 or higher"
        )


def scale(x, dtype: str):
    """Compute the scale from the exponent of the maximum.

    It is NaN, as are then all products with ``x``, if ``x`` contains infinity or NaN.
    """
    maximum = torch.linalg.vector_norm(x, torch.inf).float()
    exponent = (maximum.view(torch.int32) >> _MANTISSA_BITS).clamp(LARGEST[dtype] + 1, _LARGEST_EXPONENT)
    power = ((exponent - LARGEST[dtype]) << _MANTISSA_BITS).view(torch.float32)
    return torch.where(maximum.isfinite(), power, torch.nan)


def quantized(x, scale, dtype: str, transposed: bool):
    """Divide ``x`` by ``scale`` in float32 and round it to the nearest values of ``dtype``."""
    values = (x.t() if transposed else x).float() / scale
    return _contiguous_like(values, getattr(torch, dtype)).copy_(values)


def packed(shard, scale):
    """Write the values and the scale into a vector of bytes."""
    out = shard.new_empty(shard.numel() + SCALE_BYTES, dtype=torch.uint8)
    values, of_values = unpacked(out, len(shard))
    write_values(values, shard.flatten(1), scale)
    of_values.copy_(scale)
    return out


@fused
def write_values(out: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Write the transpose of ``weight``, divided by ``scale``."""
    out.copy_(weight.t().float() / scale)


def joined(shards, parts: int, rows: int):
    """Convert the shards to the largest of their scales. Only values that become subnormal are rounded."""
    by_shard = shards.view(parts, -1)
    scales = by_shard[:, _SCALE].view(torch.float32)
    largest = scales.amax()
    out = shards.new_empty(len(shards) - (parts - 1) * SCALE_BYTES)
    values, scale = unpacked(out, parts * rows)
    shard_values = by_shard[:, :-SCALE_BYTES].view(getattr(torch, VALUES)).unflatten(1, (-1, rows))
    write_joined(values.unflatten(1, (parts, rows)), shard_values, scales / largest)
    scale.copy_(largest)
    return out


@fused
def write_joined(out: torch.Tensor, shards: torch.Tensor, factors: torch.Tensor) -> None:
    """Write ``shards``, multiplied by ``factors``, with their first dim second."""
    out.copy_((shards.float() * factors.unsqueeze(-1)).movedim(0, 1))


def unpacked(weight, rows: int):
    """Return views of the values and the scale."""
    return weight[:-SCALE_BYTES].view(getattr(torch, VALUES)).view(-1, rows), weight[_SCALE].view(torch.float32)


def transposed(values):
    """Copy the transpose of ``values``."""
    return _contiguous_like(values.t(), values.dtype).copy_(values.t())


def _contiguous_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def float8_product(a, b, scale_a, scale_b, bias, dtype, fast: bool):
    """Multiply ``a`` by the transpose of ``b``."""
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, bias=bias, out_dtype=dtype, use_fast_accum=fast)
