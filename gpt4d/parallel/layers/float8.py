"""Float8 products of linear layers and the float8 all-gather of their weights (``train.precision=fp8``).

A tensor is converted with one scale, dynamically: activations and weights to e4m3, gradients to e5m2. The products
accumulate in float32. Outputs and the gradients of inputs have the compute dtype, gradients of weights float32. Master
weights, norms, attention, embeddings and the output layer are not converted.

Each scale is a power of two. Then the rounding of a value does not depend on the scale, unless the value is smaller
than 2**-13 times the largest value of its tensor (2**-28 in e5m2). So shards, chunks and microbatches are converted
with their own scales, without communication, and a plan still does not change the result.

Shapes: T tokens, K and N: this rank's input features and output features. A converted weight [N, K] is packed into a
vector of bytes together with its scale, because one all-gather sends both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpt4d.config import ConfigError
from gpt4d.parallel.comm.pending import MeshAxis, Pending
from gpt4d.parallel.compile import fused
from gpt4d.parallel.kernels import Tensor, kernel
from gpt4d.parallel.layers.product import add_gradient_
from gpt4d.parallel.lazy import torch

VALUES, GRADIENTS = "float8_e4m3fn", "float8_e5m2"
LARGEST = {VALUES: 7, GRADIENTS: 14}  # a converted tensor's largest absolute value is between 2**n and 2**(n + 1)
SCALE_BYTES = 16  # a float32, padded so that all shards of a gathered weight are aligned

_LARGEST_EXPONENT, _MANTISSA_BITS = 254, 23  # of float32, the exponent with its bias
_SCALE = slice(-SCALE_BYTES, -SCALE_BYTES + 4)  # the bytes of the scale at the end of a packed weight
_FIRST_CAPABILITY = (8, 9)  # GPUs with float8 products


def supports(device: torch.device) -> bool:
    """Return whether a device has float8 products. A CPU emulates them, and AMD's GPUs have other values."""
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


@kernel(lambda x, *_: x.like((), "float32"), fused=True)
def scale(x, dtype: str):
    """Return the power of two by which ``x`` is divided before its conversion to a float8 dtype."""
    # The scale is NaN, as are all products with ``x``, if ``x`` contains infinity or NaN.
    maximum = torch.linalg.vector_norm(x, torch.inf).float()
    exponent = (maximum.view(torch.int32) >> _MANTISSA_BITS).clamp(LARGEST[dtype] + 1, _LARGEST_EXPONENT)
    power = ((exponent - LARGEST[dtype]) << _MANTISSA_BITS).view(torch.float32)
    return torch.where(maximum.isfinite(), power, torch.nan)


@kernel(
    lambda x, scale, dtype, transposed: x.like(x.shape[::-1] if transposed else x.shape, dtype),
    fused=True,
    unread=("scale",),
)
def quantized(x, scale, dtype: str, transposed: bool):
    """Return a matrix [T, K] divided by ``scale`` in a float8 dtype, or its transpose [K, T]."""
    values = (x.t() if transposed else x).float() / scale
    return _contiguous_like(values, getattr(torch, dtype)).copy_(values)


@kernel(
    lambda shard, *_: shard.like((math.prod(shard.shape) + SCALE_BYTES,), "uint8"),
    blocks=lambda *_: 1,
    unread=("scale",),
)
def packed(shard, scale):
    """Return a weight [K, *N] as float8 values [N, K] and their scale in one vector of bytes."""
    out = shard.new_empty(shard.numel() + SCALE_BYTES, dtype=torch.uint8)
    values, of_values = unpacked.in_torch(out, len(shard))
    write_values(values, shard.flatten(1), scale)
    of_values.copy_(scale)
    return out


@fused
def write_values(out: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> None:
    """Write the transpose of ``weight``, divided by ``scale``."""
    out.copy_(weight.t().float() / scale)


@kernel(lambda shards, parts, *_: shards.like((shards.shape[0] - (parts - 1) * SCALE_BYTES,)), blocks=lambda *_: 1)
def joined(shards, parts: int, rows: int):
    """Return a packed weight of one scale from the consecutive packed shards of its rows, ``rows`` each."""
    by_shard = shards.view(parts, -1)
    scales = by_shard[:, _SCALE].view(torch.float32)
    largest = scales.amax()
    out = shards.new_empty(len(shards) - (parts - 1) * SCALE_BYTES)
    values, scale = unpacked.in_torch(out, parts * rows)
    shard_values = by_shard[:, :-SCALE_BYTES].view(getattr(torch, VALUES)).unflatten(1, (-1, rows))
    write_joined(values.unflatten(1, (parts, rows)), shard_values, scales / largest)
    scale.copy_(largest)
    return out


@fused
def write_joined(out: torch.Tensor, shards: torch.Tensor, factors: torch.Tensor) -> None:
    """Write ``shards``, multiplied by ``factors``, with their first dim second."""
    out.copy_((shards.float() * factors.unsqueeze(-1)).movedim(0, 1))


def _unpacked_results(weight, rows: int):
    values = (weight.shape[0] - SCALE_BYTES) // rows, rows
    return weight.like(values, VALUES), weight.like((1,), "float32")


@kernel(_unpacked_results, free=True)
def unpacked(weight, rows: int):
    """Return views of a packed weight: its values [N, K] with K = ``rows``, and its scale."""
    return weight[:-SCALE_BYTES].view(getattr(torch, VALUES)).view(-1, rows), weight[_SCALE].view(torch.float32)


@kernel(lambda values: values.like(values.shape[::-1]), fused=True)
def transposed(values):
    """Return the contiguous transpose of a matrix of float8 values."""
    return _contiguous_like(values.t(), values.dtype).copy_(values.t())


def _contiguous_like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


@kernel(
    lambda a, b, scale_a, scale_b, bias, dtype, *_: a.like((a.shape[0], b.shape[0]), dtype),
    flops=lambda a, b, *_: 2 * math.prod(a.shape) * b.shape[0],
    float8=True,
    unread=("scale_a", "scale_b"),
)
def float8_product(a, b, scale_a, scale_b, bias, dtype, fast: bool):
    """Return ``scale_a·scale_b·(a @ b.T) + bias`` of float8 matrices [M, K] and [N, K] in ``dtype``.

    ``fast``: on Hopper, sums are accumulated with fewer bits than float32.
    """
    # torch multiplies a row-major by a column-major matrix.
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, bias=bias, out_dtype=dtype, use_fast_accum=fast)


@dataclass(frozen=True)
class Float8Matmul:
    """``x @ weight`` in float8 (gpt4d.parallel.layers.product.Operation) with a packed weight.

    ``features``: this rank's output features, as the last dims of the output.
    """

    features: tuple[int, ...]

    def forward(self, x_BK, weight, bias):
        batch, features = x_BK.shape[:-1], x_BK.shape[-1]
        x, of_x = _converted(x_BK.flatten(0, -2), VALUES)
        values, of_weight = unpacked(weight, features)
        bias = None if bias is None else bias.flatten()
        out = float8_product(x, values, of_x, of_weight, bias, x_BK.dtype, True)
        return out.unflatten(0, batch).unflatten(-1, self.features)

    def input_gradient(self, d_out_BN, weight, x_BK):
        d_out, of_d_out = _converted(_matrix(d_out_BN, x_BK), GRADIENTS)
        values, of_weight = unpacked(weight, x_BK.shape[-1])
        d_x = float8_product(d_out, transposed(values), of_d_out, of_weight, None, x_BK.dtype, False)
        return d_x.unflatten(0, x_BK.shape[:-1])

    def weight_gradient(self, d_out_BN, x_BK, weight, added_to):
        x, of_x = _converted(x_BK.flatten(0, -2), VALUES, transpose=True)
        d_out, of_d_out = _converted(_matrix(d_out_BN, x_BK), GRADIENTS, transpose=True)
        gradient = float8_product(x, d_out, of_x, of_d_out, None, weight.dtype, False).unflatten(-1, self.features)
        return gradient if added_to is None else add_gradient_(added_to, gradient)


def _converted(matrix: Tensor, dtype: str, transpose: bool = False) -> tuple[Tensor, Tensor]:
    """Return a matrix, or its transpose, in a float8 dtype, and the scale to multiply it by."""
    by = scale(matrix, dtype)
    return quantized(matrix, by, dtype, transpose), by


def _matrix(d_out_BN: Tensor, x_BK: Tensor) -> Tensor:
    """Return an output's gradient as [T, N]."""
    return d_out_BN.flatten(len(x_BK.shape) - 1).flatten(0, -2)


def start_packed_gather(shard: Tensor, axis: MeshAxis, parameter: Tensor | None) -> Pending:
    """Start the all-gather of a weight, packed in float8, over the axis that splits its rows, innermost.

    Args:
        shard: this rank's shard of the weight, in the compute dtype.
        axis: the axis.
        parameter: the weight as it is reported.
    """
    pending, rows = axis.start_all_gather(packed(shard, scale(shard, VALUES)), parameter=parameter), shard.shape[0]
    return pending if axis.size == 1 else pending.then(lambda shards: joined(shards, axis.size, rows))
