"""LayerNorm and RMSNorm over features that y splits: statistics are computed over all features. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layers.product import Recomputable
from gpt4d.parallel.layout import Layout, ParameterSpec
from gpt4d.parallel.symbolic.kernels import Function, kernel
from gpt4d.parallel.symbolic.tensor import wide_dtype


def _added(x, branch):
    return None if branch is None else x.like()


def _row_statistics(x, *dims: int):
    return x.like((*dims, *x.shape[:-1]), wide_dtype(x))


def _column(x):
    return x.like((*x.shape[:-1], 1), wide_dtype(x))


@kernel(fused=True)
def layer_norm(x, branch, weight, bias, epsilon: float):
    """Return ``x + branch``, or None without a branch, its norm, its mean and its rstd (1 / standard deviation)."""
    return _added(x, branch), x.like(), _column(x), _column(x)


@kernel(fused=True)
def layer_norm_gradients(d_out, d_stream, x, weight, bias, mean, rstd):
    """Return the gradients of input, weight and bias. ``d_stream``, if given, is added to the input's gradient."""
    return x.like(), weight.like(), bias.like()


@kernel(fused=True)
def mean_and_variance(x, branch):
    """Return ``x + branch``, or None without a branch, and mean and variance of this rank's features, [2, ...]."""
    return _added(x, branch), _row_statistics(x, 2)


@kernel
def combined_statistics(parts, epsilon: float):
    """Return mean and rstd of all features, [..., 1], from the statistics ``parts`` [ranks, 2, ...] of all ranks.

    All ranks have the same number of features. The variances are combined without subtracting large squares (Chan et
    al.).
    """
    return parts.like((*parts.shape[2:], 1)), parts.like((*parts.shape[2:], 1))


@kernel(fused=True)
def normalized(x, mean, rstd, weight, bias):
    """Return ``(x - mean) · rstd · weight + bias``."""
    return x.like()


@kernel(fused=True)
def sums_of_gradient(d_out, x, mean, rstd, weight):
    """Return the two sums over this rank's features that the input's gradient needs, [2, ...]."""
    return _row_statistics(x, 2)


@kernel
def mean_of(sums, count: int):
    """Return sums [...] divided by ``count``, [..., 1], in place."""
    return sums.like((*sums.shape, 1))


@kernel(fused=True)
def split_layer_norm_gradients(d_out, d_stream, x, mean, rstd, weight, sums):
    """Return the gradients of ``layer_norm_gradients`` from the means over all features, ``sums`` [2, ..., 1]."""
    return x.like(), weight.like(), weight.like()


@kernel(fused=True)
def sum_of_squares(x, branch):
    """Return ``x + branch``, or None without a branch, and the sums of squares over this rank's features."""
    return _added(x, branch), _row_statistics(x)


@kernel
def reciprocal_root(squares, count: int, epsilon: float):
    """Return ``1 / sqrt(squares / count + epsilon)``, [..., 1], in place."""
    return squares.like((*squares.shape, 1))


@kernel(fused=True)
def scaled(x, rstd, weight, zero_centered: bool = False):
    """Return ``x · rstd · weight``, or, if the weight is ``zero_centered``, ``x · rstd · (1 + weight)``."""
    return x.like()


@kernel(fused=True)
def rms_norm(x, branch, weight, epsilon: float, zero_centered: bool = False):
    """Return ``x + branch``, or None without a branch, the reciprocal of the root mean square, and the norm."""
    return _added(x, branch), _column(x), x.like()


@kernel(fused=True)
def sum_of_rms_gradient(d_out, x, rstd, weight, zero_centered: bool = False):
    """Return the sum over this rank's features that the input's gradient needs, [...]."""
    return _row_statistics(x)


@kernel(fused=True)
def split_rms_norm_gradients(d_out, d_stream, x, rstd, weight, sums, zero_centered: bool = False):
    """Return the gradients of input and weight. ``d_stream``, if given, is added to the input's gradient.

    ``sums``: mean over all features of the normalized input times its gradient.
    """
    return x.like(), weight.like()


@kernel(fused=True)
def rms_norm_gradients(d_out, d_stream, x, rstd, weight, zero_centered: bool = False):
    """Return the gradients of ``split_rms_norm_gradients`` where no axis splits the features."""
    return x.like(), weight.like()


@kernel
def among_zeros(d_weight, index: int, count: int):
    """Return the gradient of ``count`` equal shards of a weight: ``d_weight`` for shard ``index``, and zeros."""
    return d_weight.like((count * d_weight.shape[0],))


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
        stream = x if added is None else added
        if axis.size > 1:
            out = normalized(stream, mean, rstd, weight, bias)
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
            sums = sums_of_gradient(d_out, x, mean, rstd, weight)
            sums = ctx.axis.all_reduce(sums, parameter=ctx.parameter)
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
        stream = x if added is None else added
        if ctx.axes:
            out = scaled(stream, rstd, weight, zero_centered)
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


def _summed(sums, x, ctx) -> tuple[Any, int]:
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

    def forward(self, layer: BoundLayer, x: Any, branch: Any = None) -> tuple[Any, Any]:
        stream, out = self.apply(layer, x, branch)
        if not layer.weights.recomputes_inputs:
            return stream, out
        return stream, Recomputable(out, partial(self.recompute, layer, stream.detach(), out.grad_fn))

    def apply(self, layer: BoundLayer, x: Any, branch: Any) -> tuple[Any, Any]:
        """Return ``x + branch``, or ``x`` without a branch, and its norm."""
        raise NotImplementedError

    def recompute(self, layer: BoundLayer, x: Any, node: Any) -> Any:
        """Return the norm of ``x`` without a graph. ``node``: the autograd node that has saved the statistics."""
        raise NotImplementedError


@dataclass(frozen=True)
class LayerNormSpec(NormSpec):
    """``(x - mean) / sqrt(variance + epsilon) · weight + bias``."""

    features: int
    epsilon: float = 1e-5

    def parameters(self) -> dict[str, ParameterSpec]:
        bias = ParameterSpec((self.features,), Layout(("y",)), between_layers=True)
        return {"weight": replace(bias, mean=1.0), "bias": bias}

    def apply(self, layer, x, branch):
        return LayerNormFunction.apply(x, branch, layer.weight, layer.bias, layer.context.grid.y, self.epsilon)

    def recompute(self, layer, x, node):
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
        return {"weight": ParameterSpec((self.features,), Layout(("y",)), mean=mean, between_layers=True)}

    def apply(self, layer, x, branch):
        axes = (layer.context.grid.y,)
        return RMSNormFunction.apply(x, branch, layer.weight, axes, self.epsilon, self.zero_centered)

    def recompute(self, layer, x, node):
        _, weight, rstd = node.saved_tensors
        return scaled(x, rstd, weight, self.zero_centered)


@dataclass(frozen=True)
class BranchNormSpec(RMSNormSpec):
    """The norm of a residual branch: (stream, output of the branch) → stream + norm of the output."""

    def forward(self, layer: BoundLayer, x: Any, branch: Any) -> Any:  # type: ignore[override]
        return x + self.apply(layer, branch, None)[1]


@dataclass(frozen=True)
class HeadNormSpec(LayerSpec):
    """RMSNorm of each head, ``[..., heads of this rank, size]`` → the same. All heads share the weight [size].

    Attributes:
        size: features of a head.
        heads: number of parts that the heads can be split into.
        epsilon: added to the mean square.
        zero_centered: as for ``RMSNormSpec``.
    """

    size: int
    heads: int
    epsilon: float = 1e-5
    zero_centered: bool = False

    def parameters(self) -> dict[str, ParameterSpec]:
        mean = 0.0 if self.zero_centered else 1.0
        return {"weight": ParameterSpec((self.size,), Layout(()), mean=mean, head_parts=self.heads)}

    def forward(self, layer: BoundLayer, x: Any) -> Any:
        return RMSNormFunction.apply(x, None, layer.weight, (), self.epsilon, self.zero_centered)[1]


@dataclass(frozen=True)
class AllHeadsNormSpec(HeadNormSpec):
    """RMSNorm over the features of all heads, ``[..., features of this rank]`` → the same, with a weight [size].

    ``size``: number of features of all heads, which the axes that split the heads split equally.
    """

    def forward(self, layer: BoundLayer, x: Any) -> Any:
        axes = tuple(layer.context.grid[axis] for axis in layer.context.head_axes(self.heads))
        return RMSNormFunction.apply(x, None, layer.weight, axes, self.epsilon, self.zero_centered)[1]
