"""LayerNorm and RMSNorm over features that y splits: statistics are computed over all features.

The input of a norm is the residual stream. The norm's kernels also add a branch's output to the stream, and add the
gradients of the stream. torch.compile fuses both additions with the norm's reads and writes of the same tensors. Weight
and bias are master weights, so their gradients are accumulated in the master dtype. Statistics are float32, or float64
for float64 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gpt4d.parallel.kernels import Function, Tensor, kernel, wide_dtype
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layers.product import Input, Recomputable, cast_to
from gpt4d.parallel.layout import BETWEEN_LAYERS, Layout, ParameterSpec
from gpt4d.parallel.lazy import F, torch


def _added(x, branch):
    return None if branch is None else x.like()


def _row_statistics(x, *dims: int):
    return x.like((*dims, *x.shape[:-1]), wide_dtype(x))


def _column(x):
    return x.like((*x.shape[:-1], 1), wide_dtype(x))


@kernel(lambda x, branch, *_: (_added(x, branch), x.like(), _column(x), _column(x)), fused=True)
def layer_norm(x, branch, weight, bias, epsilon: float):
    """Return ``x + branch``, or None without a branch, its norm, its mean and its rstd (1 / standard deviation)."""
    added, stream = _with_branch(x, branch)
    stream, w, b = _as_kernels_take(stream, weight, bias)
    out, mean, rstd = torch.native_layer_norm(stream, weight.shape, w, b, epsilon)
    return added, cast_to.in_torch(out, x.dtype), mean, rstd


@kernel(lambda d_out, d_stream, x, weight, bias, *_: (x.like(), weight.like(), bias.like()), fused=True)
def layer_norm_gradients(d_out, d_stream, x, weight, bias, mean, rstd):
    """Return the gradients of input, weight and bias. ``d_stream``, if given, is added to the input's gradient."""
    given, w, b = _as_kernels_take(x, weight, bias)
    wide = given.dtype == weight.dtype
    backward = torch.ops.aten.native_layer_norm_backward
    d_x, d_weight, d_bias = backward(
        cast_to.in_torch(d_out, given.dtype), given, weight.shape, mean, rstd, w, b, [True, wide, wide]
    )
    if not wide:  # the kernel rounds sums over all tokens to the narrow dtype
        d_weight = ((x - mean) * rstd).mul_(d_out).flatten(0, -2).sum(0)
        d_bias = d_out.flatten(0, -2).sum(0, dtype=d_weight.dtype)
    return _with_stream(d_x, d_stream, x), d_weight, d_bias


def _with_branch(x, branch) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return ``x + branch``, or None without a branch (a compiled function cannot return ``x``), and the stream."""
    added = None if branch is None else x + branch
    return added, x if added is None else added


def _as_kernels_take(x, weight, bias) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Convert the arguments of torch's kernels to dtypes with which the kernels do not round the statistics."""
    if torch.compiler.is_compiling():  # torch.compile fuses the conversions
        return x.to(_statistics_dtype(x)), weight, bias
    # On a CPU, narrow weights make the statistics narrow; on a GPU, all arguments must have one dtype.
    return (x, weight, bias) if x.is_cpu else (x, cast_to.in_torch(weight, x.dtype), cast_to.in_torch(bias, x.dtype))


@kernel(lambda x, branch: (_added(x, branch), _row_statistics(x, 2)), fused=True)
def mean_and_variance(x, branch):
    """Return ``x + branch``, or None without a branch, and mean and variance of this rank's features, [2, ...]."""
    added, stream = _with_branch(x, branch)
    wide = stream.to(_statistics_dtype(x))
    mean = wide.mean(-1)
    # torch.var_mean is five times slower on a CPU.
    return added, torch.stack((mean, (wide - mean.unsqueeze(-1)).square_().mean(-1)))


@kernel(lambda parts, *_: (parts.like((*parts.shape[2:], 1)), parts.like((*parts.shape[2:], 1))))
def combined_statistics(parts, epsilon: float):
    """Return mean and rstd of all features, [..., 1], from the statistics ``parts`` [ranks, 2, ...] of all ranks.

    All ranks have the same number of features. The variances are combined without subtracting large squares (Chan et
    al.).
    """
    mean = parts[:, 0].mean(0)
    variance = parts[:, 1].mean(0) + parts[:, 0].var(0, correction=0)
    return mean.unsqueeze(-1), (variance + epsilon).rsqrt_().unsqueeze(-1)


@kernel(lambda x, *_: x.like(), fused=True)
def normalized(x, mean, rstd, weight, bias):
    """Return ``(x - mean) · rstd · weight + bias``."""
    return (x - mean).mul_(rstd).mul_(weight).add_(bias).to(x.dtype)


@kernel(lambda d_out, x, *_: _row_statistics(x, 2), fused=True)
def sums_of_gradient(d_out, x, mean, rstd, weight):
    """Return the two sums over this rank's features that the input's gradient needs, [2, ...]."""
    d_normal = d_out * weight
    return torch.stack((d_normal.sum(-1), (x - mean).mul_(rstd).mul_(d_normal).sum(-1)))


@kernel(lambda sums, *_: sums.like((*sums.shape, 1)))
def mean_of(sums, count: int):
    """Return sums [...] divided by ``count``, [..., 1], in place."""
    return sums.div_(count).unsqueeze(-1)


@kernel(lambda d_out, d_stream, x, mean, rstd, weight, *_: (x.like(), weight.like(), weight.like()), fused=True)
def split_layer_norm_gradients(d_out, d_stream, x, mean, rstd, weight, sums):
    """Return the gradients of ``layer_norm_gradients`` from the means over all features, ``sums`` [2, ..., 1]."""
    normal, d_out = (x - mean).mul_(rstd), d_out.to(rstd.dtype)
    d_x = (d_out * weight).sub_(sums[0]).addcmul_(normal, sums[1], value=-1).mul_(rstd)
    d_weight = normal.mul_(d_out).flatten(0, -2).sum(0)
    return _with_stream(d_x, d_stream, x), d_weight.to(weight.dtype), d_out.flatten(0, -2).sum(0).to(weight.dtype)


def _with_stream(d_x: torch.Tensor, d_stream: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``x``, in its dtype, with the stream's gradient added."""
    d_x = cast_to.in_torch(d_x, x.dtype)
    return d_x if d_stream is None else d_x.add_(d_stream)


def _statistics_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@kernel(lambda x, branch: (_added(x, branch), _row_statistics(x)), fused=True)
def sum_of_squares(x, branch):
    """Return ``x + branch``, or None without a branch, and the sums of squares over this rank's features."""
    added, stream = _with_branch(x, branch)
    return added, cast_to.in_torch(stream, _statistics_dtype(x)).square().sum(-1)


@kernel(lambda squares, *_: squares.like((*squares.shape, 1)))
def reciprocal_root(squares, count: int, epsilon: float):
    """Return ``1 / sqrt(squares / count + epsilon)``, [..., 1], in place."""
    return squares.div_(count).add_(epsilon).rsqrt_().unsqueeze(-1)


@kernel(lambda x, *_: x.like(), fused=True)
def scaled(x, rstd, weight, zero_centered: bool = False):
    """Return ``x · rstd · weight``, or, if the weight is ``zero_centered``, ``x · rstd · (1 + weight)``."""
    return cast_to.in_torch((x * rstd).mul_(_factor(weight, zero_centered)), x.dtype)


def _factor(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return weight + 1 if zero_centered else weight


@kernel(lambda x, branch, *_: (_added(x, branch), _column(x), x.like()), fused=True)
def rms_norm(x, branch, weight, epsilon: float, zero_centered: bool = False):
    """Return ``x + branch``, or None without a branch, the reciprocal of the root mean square, and the norm."""
    added, stream = _with_branch(x, branch)
    squares = cast_to.in_torch(stream, _statistics_dtype(x)).square().sum(-1, keepdim=True)
    rstd = squares.div_(x.shape[-1]).add_(epsilon).rsqrt_()
    return added, rstd, scaled.in_torch(stream, rstd, weight, zero_centered)


@kernel(lambda d_out, x, *_: _row_statistics(x), fused=True)
def sum_of_rms_gradient(d_out, x, rstd, weight, zero_centered: bool = False):
    """Return the sum over this rank's features that the input's gradient needs, [...]."""
    return (d_out * _factor(weight, zero_centered)).mul_(x * rstd).sum(-1)


@kernel(lambda d_out, d_stream, x, rstd, weight, *_: (x.like(), weight.like()), fused=True)
def split_rms_norm_gradients(d_out, d_stream, x, rstd, weight, sums, zero_centered: bool = False):
    """Return the gradients of input and weight. ``d_stream``, if given, is added to the input's gradient.

    ``sums``: mean over all features of the normalized input times its gradient.
    """
    return _rms_norm_gradients(d_out, d_stream, x, x * rstd, rstd, weight, sums, zero_centered)


@kernel(lambda d_out, d_stream, x, rstd, weight, *_: (x.like(), weight.like()), fused=True)
def rms_norm_gradients(d_out, d_stream, x, rstd, weight, zero_centered: bool = False):
    """Return the gradients of ``split_rms_norm_gradients`` where no axis splits the features."""
    normal = x * rstd
    sums = (d_out * _factor(weight, zero_centered)).mul_(normal).sum(-1, keepdim=True).div_(x.shape[-1])
    return _rms_norm_gradients(d_out, d_stream, x, normal, rstd, weight, sums, zero_centered)


def _rms_norm_gradients(d_out, d_stream, x, normal, rstd, weight, sums, zero_centered: bool):
    """Return the gradients of input and weight, and overwrite ``normal``, which is ``x · rstd``."""
    d_x = (d_out * _factor(weight, zero_centered)).addcmul_(normal, sums, value=-1).mul_(rstd)
    return _with_stream(d_x, d_stream, x), cast_to.in_torch(normal.mul_(d_out).flatten(0, -2).sum(0), weight.dtype)


@kernel(lambda d_weight, index, count: d_weight.like((count * d_weight.shape[0],)))
def among_zeros(d_weight, index: int, count: int):
    """Return the gradient of ``count`` equal shards of a weight: ``d_weight`` for shard ``index``, and zeros."""
    return F.pad(d_weight, (index * len(d_weight), (count - 1 - index) * len(d_weight)))


class LayerNormFunction(Function):
    """``x + branch`` and its LayerNorm over the last dim, which ``axis`` splits equally.

    If ``branch`` is None, the first result is ``x``. The second result must have a gradient.
    """

    @staticmethod
    def forward(ctx, x, branch, weight, bias, axis, epsilon: float):
        if axis.size == 1:
            added, out, mean, rstd = layer_norm(x, branch, weight, bias, epsilon)
        else:
            added, statistics = mean_and_variance(x, branch)
            parts = axis.all_gather(statistics.unsqueeze(0), parameter=weight)
            mean, rstd = combined_statistics(parts, epsilon)
            out = normalized(x if added is None else added, mean, rstd, weight, bias)
        stream = x if added is None else added
        ctx.save_for_backward(stream, weight, bias, mean, rstd)
        ctx.axis, ctx.parameter, ctx.adds = axis, weight, branch is not None
        ctx.set_materialize_grads(False)
        return stream, out

    @staticmethod
    def backward(ctx, d_stream, d_out):
        x, weight, bias, mean, rstd = ctx.saved_tensors
        if ctx.axis.size == 1:
            d_x, *d_parameters = layer_norm_gradients(d_out, d_stream, x, weight, bias, mean, rstd)
        else:
            sums = ctx.axis.all_reduce(sums_of_gradient(d_out, x, mean, rstd, weight), parameter=ctx.parameter)
            sums = mean_of(sums, x.shape[-1] * ctx.axis.size)
            d_x, *d_parameters = split_layer_norm_gradients(d_out, d_stream, x, mean, rstd, weight, sums)
        return d_x, d_x if ctx.adds else None, *d_parameters, None, None


class RMSNormFunction(Function):
    """``x + branch`` and its norm ``x / sqrt(mean(x²) + epsilon) · weight`` over the last dim, which ``axes`` split.

    If ``branch`` is None, the first result is ``x``. The second result must have a gradient. If the weight is
    ``zero_centered``, the factor is ``1 + weight``.

    ``weight`` belongs to this rank's features, or to all features and is replicated. ``axes`` are outermost first. The
    gradient of a replicated weight is zero outside of this rank's features.
    """

    @staticmethod
    def forward(ctx, x, branch, weight, axes, epsilon: float, zero_centered: bool = False):
        ctx.zero_centered = zero_centered
        ctx.axes, ctx.adds = [axis for axis in axes if axis.size > 1], branch is not None
        ctx.parameter, ctx.cuts = weight, weight.shape[0] != x.shape[-1]
        if ctx.cuts:
            for axis in ctx.axes:
                weight = weight.chunk(axis.size)[axis.index]
        if not ctx.axes:
            added, rstd, out = rms_norm(x, branch, weight, epsilon, zero_centered)
        else:
            added, squares = sum_of_squares(x, branch)
            rstd = reciprocal_root(*_summed(squares, x, ctx), epsilon)
            out = scaled(x if added is None else added, rstd, weight, zero_centered)
        stream = x if added is None else added
        ctx.save_for_backward(stream, weight, rstd)
        ctx.set_materialize_grads(False)
        return stream, out

    @staticmethod
    def backward(ctx, d_stream, d_out):
        x, weight, rstd = ctx.saved_tensors
        if not ctx.axes:
            d_x, d_weight = rms_norm_gradients(d_out, d_stream, x, rstd, weight, ctx.zero_centered)
        else:
            sums = sum_of_rms_gradient(d_out, x, rstd, weight, ctx.zero_centered)
            sums = mean_of(*_summed(sums, x, ctx))
            d_x, d_weight = split_rms_norm_gradients(d_out, d_stream, x, rstd, weight, sums, ctx.zero_centered)
        if ctx.cuts:
            for axis in reversed(ctx.axes):
                d_weight = among_zeros(d_weight, axis.index, axis.size)
        return d_x, d_x if ctx.adds else None, d_weight, None, None, None


def _summed(sums, x, ctx) -> tuple[Tensor, int]:
    """All-reduce sums over this rank's features of ``x``; return the result and the number of all features."""
    count = x.shape[-1]
    for axis in ctx.axes:
        sums, count = axis.all_reduce(sums, parameter=ctx.parameter), count * axis.size
    return sums, count


class NormSpec(LayerSpec):
    """A norm of the residual stream: ``[..., features over y] → [..., features over y]``.

    ``forward`` takes the stream and, optionally, the output of a residual branch, which it adds to the stream first. It
    returns the stream and its norm, the input of a product. Statistics are float32, or float64 for float64 inputs.
    """

    features: int
    epsilon: float

    def forward(self, layer: BoundLayer, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Input]:
        stream, out = self.apply(layer, x, branch)
        if not layer.current_pass.recompute_inputs:
            return stream, out
        return stream, Recomputable(out, partial(self.recompute, layer, stream.detach(), out.grad_fn))

    def apply(self, layer: BoundLayer, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return ``x + branch``, or ``x`` without a branch, and its norm."""
        raise NotImplementedError

    def recompute(self, layer: BoundLayer, x: Tensor, node: Any) -> Tensor:
        """Return the norm of ``x`` without a graph. ``node``: the autograd node that has saved the statistics."""
        raise NotImplementedError


@dataclass(frozen=True)
class LayerNormSpec(NormSpec):
    """``(x - mean) / sqrt(variance + epsilon) · weight + bias``."""

    features: int
    epsilon: float = 1e-5

    def parameters(self) -> dict[str, ParameterSpec]:
        bias = ParameterSpec((self.features,), Layout(("y",)), summed=BETWEEN_LAYERS)
        return {"weight": replace(bias, mean=1.0), "bias": bias}

    def apply(self, layer: BoundLayer, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        return LayerNormFunction.apply(x, branch, layer.weight, layer.bias, layer.context.grid.y, self.epsilon)

    def recompute(self, layer: BoundLayer, x: Tensor, node: Any) -> Tensor:
        if layer.context.grid.y.size == 1:
            return layer_norm(x, None, layer.weight, layer.bias, self.epsilon)[1]
        _, weight, _, mean, rstd = node.saved_tensors
        return normalized(x, mean, rstd, weight, layer.bias)


@dataclass(frozen=True)
class RMSNormSpec(NormSpec):
    """``x / sqrt(mean(x²) + epsilon) · weight``.

    Attributes:
        features: as for ``NormSpec``.
        epsilon: as for ``NormSpec``.
        zero_centered: the factor is ``1 + weight``, and the initial weight is 0.
    """

    features: int
    epsilon: float = 1e-5
    zero_centered: bool = False

    def parameters(self) -> dict[str, ParameterSpec]:
        mean = 0.0 if self.zero_centered else 1.0
        return {"weight": ParameterSpec((self.features,), Layout(("y",)), mean=mean, summed=BETWEEN_LAYERS)}

    def apply(self, layer: BoundLayer, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        axes = (layer.context.grid.y,)
        return RMSNormFunction.apply(x, branch, layer.weight, axes, self.epsilon, self.zero_centered)

    def recompute(self, layer: BoundLayer, x: Tensor, node: Any) -> Tensor:
        _, weight, rstd = node.saved_tensors
        return scaled(x, rstd, weight, self.zero_centered)


@dataclass(frozen=True)
class BranchNormSpec(RMSNormSpec):
    """The norm of a residual branch: (stream, output of the branch) → stream + norm of the output."""

    def forward(self, layer: BoundLayer, x: Tensor, branch: Tensor) -> Tensor:  # type: ignore[override]
        return x + self.apply(layer, branch, None)[1]


@dataclass(frozen=True)
class HeadNormSpec(LayerSpec):
    """RMSNorm of each head, ``[..., heads of this rank, size]`` → the same. All heads share the weight [size].

    Attributes:
        size: features of a head; if ``across_heads``, of all heads.
        heads: number of parts that the heads can be split into.
        epsilon: added to the mean square.
        zero_centered: as for ``RMSNormSpec``.
        across_heads: the norm is over the features of all heads, ``[..., features of this rank]`` → the same. The axes
            that split the heads split the features.
    """

    size: int
    heads: int
    epsilon: float = 1e-5
    zero_centered: bool = False
    across_heads: bool = False

    def parameters(self) -> dict[str, ParameterSpec]:
        mean = 0.0 if self.zero_centered else 1.0
        return {"weight": ParameterSpec((self.size,), Layout(()), mean=mean, summed=self.heads)}

    def forward(self, layer: BoundLayer, x: Tensor) -> Tensor:
        names = layer.context.head_axes(self.heads) if self.across_heads else ()
        axes = tuple(layer.context.grid[name] for name in names)
        return RMSNormFunction.apply(x, None, layer.weight, axes, self.epsilon, self.zero_centered)[1]
