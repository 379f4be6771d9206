"""The kernels of LayerNorm and RMSNorm.

The input of a norm is the residual stream. The norm's kernels also add a branch's output to the stream, and add the
gradients of the stream. torch.compile fuses both additions with the norm's reads and writes of the same tensors. Weight
and bias are master weights, so their gradients are accumulated in the master dtype. Statistics are float32, or float64
for float64 inputs.
"""

import torch
import torch.nn.functional as F

from gpt4d.parallel.layers.product_kernels import cast_to


def layer_norm(x, branch, weight, bias, epsilon: float):
    """Return the summed input, the normalized output, the mean and the rstd."""
    added, stream = _with_branch(x, branch)
    stream, w, b = _as_kernels_take(stream, weight, bias)
    out, mean, rstd = torch.native_layer_norm(stream, weight.shape, w, b, epsilon)
    return added, cast_to(out, x.dtype), mean, rstd


def layer_norm_gradients(d_out, d_stream, x, weight, bias, mean, rstd):
    """Return the gradients of input, weight and bias; ``d_stream`` is added to the input's."""
    given, w, b = _as_kernels_take(x, weight, bias)
    wide = given.dtype == weight.dtype
    backward = torch.ops.aten.native_layer_norm_backward
    d_x, d_weight, d_bias = backward(
        cast_to(d_out, given.dtype), given, weight.shape, mean, rstd, w, b, [True, wide, wide]
    )
    if not wide:  # the kernel rounds sums over all tokens to the narrow dtype
        d_weight = ((x - mean) * rstd).mul_(d_out).flatten(0, -2).sum(0)
        d_bias = d_out.flatten(0, -2).sum(0, dtype=d_weight.dtype)
    return _summed(d_x, d_stream, x), d_weight, d_bias


def _with_branch(x, branch) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return ``x + branch``, or None without a branch (a compiled function cannot return ``x``), and the stream."""
    added = None if branch is None else x + branch
    return added, x if added is None else added


def _as_kernels_take(x, weight, bias) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convert the arguments of torch's kernels to dtypes with which the kernels do not round the statistics."""
    if torch.compiler.is_compiling():  # torch.compile fuses the conversions
        return x.to(_statistics_dtype(x)), weight, bias
    # On a CPU, narrow weights make the statistics narrow; on a GPU, all arguments must have one dtype.
    return (x, weight, bias) if x.is_cpu else (x, cast_to(weight, x.dtype), cast_to(bias, x.dtype))


def mean_and_variance(x, branch):
    """Return the summed input, and mean and variance of the local features, [2, ...]."""
    added, stream = _with_branch(x, branch)
    wide = stream.to(_statistics_dtype(x))
    mean = wide.mean(-1)
    # torch.var_mean is five times slower on a CPU.
    return added, torch.stack((mean, (wide - mean.unsqueeze(-1)).square_().mean(-1)))


def combined_statistics(parts, epsilon: float):
    """Combine [ranks, 2, ...] to mean and rstd of all features, [..., 1]."""
    mean = parts[:, 0].mean(0)
    variance = parts[:, 1].mean(0) + parts[:, 0].var(0, correction=0)
    return mean.unsqueeze(-1), (variance + epsilon).rsqrt_().unsqueeze(-1)


def normalized(x, mean, rstd, weight, bias):
    """Return ``(x - mean) · rstd · weight + bias`` in the dtype of ``x``."""
    return (x - mean).mul_(rstd).mul_(weight).add_(bias).to(x.dtype)


def sums_of_gradient(d_out, x, mean, rstd, weight):
    """Return ``Σ g`` and ``Σ g · normalized`` over local features, [2, ...], with ``g = d_out · weight``."""
    d_normal = d_out * weight
    return torch.stack((d_normal.sum(-1), (x - mean).mul_(rstd).mul_(d_normal).sum(-1)))


def mean_of(sums, count: int):
    """Return ``sums / count`` with a trailing dim of one element."""
    return sums.div_(count).unsqueeze(-1)


def split_layer_norm_gradients(d_out, d_stream, x, mean, rstd, weight, sums):
    """Return the gradients of input, weight and bias from means over all features."""
    normal, d_out = (x - mean).mul_(rstd), d_out.to(rstd.dtype)
    d_x = (d_out * weight).sub_(sums[0]).addcmul_(normal, sums[1], value=-1).mul_(rstd)
    d_weight = normal.mul_(d_out).flatten(0, -2).sum(0)
    return _summed(d_x, d_stream, x), d_weight.to(weight.dtype), d_out.flatten(0, -2).sum(0).to(weight.dtype)


def _summed(d_x: torch.Tensor, d_stream: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``x``, in its dtype, with the stream's gradient added."""
    d_x = cast_to(d_x, x.dtype)
    return d_x if d_stream is None else d_x.add_(d_stream)


def _statistics_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def sum_of_squares(x, branch):
    """Return the summed input and ``Σ x²`` over the local features."""
    added, stream = _with_branch(x, branch)
    return added, cast_to(stream, _statistics_dtype(x)).square().sum(-1)


def reciprocal_root(squares, count: int, epsilon: float):
    """Return ``1 / sqrt(squares / count + epsilon)`` with a trailing dim of one element."""
    return squares.div_(count).add_(epsilon).rsqrt_().unsqueeze(-1)


def scaled(x, rstd, weight, zero_centered: bool = False):
    """Return ``x · rstd · weight``, or with ``1 + weight`` if ``zero_centered``, in the dtype of ``x``."""
    return cast_to((x * rstd).mul_(_factor(weight, zero_centered)), x.dtype)


def _factor(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight + 1 if zero_centered else weight


def rms_norm(x, branch, weight, epsilon: float, zero_centered: bool = False):
    """Return the summed input, the reciprocal root mean square, and the normalized output."""
    added, stream = _with_branch(x, branch)
    squares = cast_to(stream, _statistics_dtype(x)).square().sum(-1, keepdim=True)
    rstd = squares.div_(x.shape[-1]).add_(epsilon).rsqrt_()
    return added, rstd, scaled(stream, rstd, weight, zero_centered)


def sum_of_rms_gradient(d_out, x, rstd, weight, zero_centered: bool = False):
    """Return ``Σ d_out · weight · normalized`` over the local features."""
    return (d_out * _factor(weight, zero_centered)).mul_(x * rstd).sum(-1)


def split_rms_norm_gradients(d_out, d_stream, x, rstd, weight, sums, zero_centered: bool = False):
    """Return the gradients of input and weight from means over all features."""
    return _rms_norm_gradients(d_out, d_stream, x, x * rstd, rstd, weight, sums, zero_centered)


def rms_norm_gradients(d_out, d_stream, x, rstd, weight, zero_centered: bool = False):
    """Return the gradients of input and weight where no axis splits the features."""
    normal = x * rstd
    sums = (d_out * _factor(weight, zero_centered)).mul_(normal).sum(-1, keepdim=True).div_(x.shape[-1])
    return _rms_norm_gradients(d_out, d_stream, x, normal, rstd, weight, sums, zero_centered)


def _rms_norm_gradients(d_out, d_stream, x, normal, rstd, weight, sums, zero_centered: bool):
    """Return the gradients of input and weight, and overwrite ``normal``, which is ``x · rstd``."""
    d_x = (d_out * _factor(weight, zero_centered)).addcmul_(normal, sums, value=-1).mul_(rstd)
    return _summed(d_x, d_stream, x), cast_to(normal.mul_(d_out).flatten(0, -2).sum(0), weight.dtype)


def among_zeros(d_weight, index: int, count: int):
    """Return ``d_weight`` as shard ``index`` of ``count`` equal shards, between zeros."""
    return F.pad(d_weight, (index * len(d_weight), (count - 1 - index) * len(d_weight)))
