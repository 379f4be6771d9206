"""LayerNorm and RMSNorm over features that y splits: statistics are computed over all features. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gpt4d.parallel.function import Function, kernel
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layout import Layout, ParameterSpec
from gpt4d.parallel.recomputation import Recomputable
from gpt4d.parallel.symbolic import wide_dtype


def _added(x, branch):
    return None if branch is None else x.like()


def _row_statistics(x, *dims: int):
    return x.like((*dims, *x.shape[:-1]), wide_dtype(x))


def _column(x):
    return x.like((*x.shape[:-1], 1), wide_dtype(x))


@kernel(fused=True)
def layer_norm(x, branch, weight, bias, epsilon: float):
    """Return ``x + branch``, None without one; its norm, mean and reciprocal of the standard deviation."""
    return _added(x, branch), x.like(), _column(x), _column(x)


@kernel(fused=True)
def layer_norm_gradients(d_out, d_stream, x, weight, bias, mean, rstd):
    """Return the gradients of input, weight and bias. The stream's gradient, if given, is added to the input's."""
    return x.like(), weight.like(), bias.like()


@kernel(fused=True)
def mean_and_variance(x, branch):
    """Return ``x + branch``, None without one, and mean and variance of this rank's features, [2, ...]."""
    return _added(x, branch), _row_statistics(x, 2)


@kernel
def combined_statistics(parts, epsilon: float):
    """Return mean and reciprocal of the standard deviation of all features, [..., 1].

    The statistics of equally many features each, ``parts`` [ranks, 2, ...], are combined without a difference of large
    squares (Chan et al.).
    """
    return parts.like((*parts.shape[2:], 1)), parts.like((*parts.shape[2:], 1))


@kernel(fused=True)
def normalized(x, mean, rstd, weight, bias):
    """Return ``(x - mean) · rstd · weight + bias``."""
    return x.like()


@kernel(fused=True)
def sums_of_gradient(d_out, x, mean, rstd, weight):
    """Return the sums over this rank's features that the gradient of the input needs, [2, ...]."""
    return _row_statistics(x, 2)


@kernel
def mean_of(sums, count: int):
    """Return sums [...] divided by ``count``, [..., 1], in place."""
    return sums.like((*sums.shape, 1))


@kernel(fused=True)
def split_layer_norm_gradients(d_out, d_stream, x, mean, rstd, weight, sums):
    """Return the same as ``layer_norm_gradients``, from the means ``sums`` over all features."""
    return x.like(), weight.like(), weight.like()


@kernel(fused=True)
def sum_of_squares(x, branch):
    """Return ``x + branch``, None without one, and the sums of its squares over this rank's features."""
    return _added(x, branch), _row_statistics(x)


@kernel
def reciprocal_root(squares, count: int, epsilon: float):
    """Return ``1 / sqrt(squares / count + epsilon)``, [..., 1], in place."""
    return squares.like((*squares.shape, 1))


@kernel(fused=True)
def scaled(x, rstd, weight):
    """Return ``x · rstd · weight``."""
    return x.like()


@kernel(fused=True)
def rms_norm(x, branch, weight, epsilon: float):
    """Return ``x + branch``, None without one; the reciprocal of the root mean square, and the norm."""
    return _added(x, branch), _column(x), x.like()


@kernel(fused=True)
def sum_of_rms_gradient(d_out, x, rstd, weight):
    """Return the sum over this rank's features that the gradient of the input needs."""
    return _row_statistics(x)


@kernel(fused=True)
def split_rms_norm_gradients(d_out, d_stream, x, rstd, weight, sums):
    """Return the gradients of input and weight. The stream's gradient, if given, is added to the input's.

    ``sums``: mean over all features of the products of the normalized input and its gradient.
    """
    return x.like(), weight.like()


@kernel(fused=True)
def rms_norm_gradients(d_out, d_stream, x, rstd, weight):
    """Return the same as ``split_rms_norm_gradients``, with the means of all features in one function."""
    return x.like(), weight.like()


class LayerNormFunction(Function):
    """``x + branch`` and its LayerNorm over the last dim, which ``axis`` splits equally.

    Without a ``branch``, None, the first result is ``x``. The second result must have a gradient.
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
    """``x + branch`` and its norm ``x / sqrt(mean(x²) + epsilon) · weight`` over the last dim, which ``axis`` splits.

    ``summed``: axes whose ranks each have other rows of the same samples, over which the weight's gradient is summed.
    Without a ``branch``, None, the first result is ``x``. The second result must have a gradient.
    """

    @staticmethod
    def forward(ctx, x, branch, weight, axis, summed, epsilon: float):
        if axis.size == 1:
            added, rstd, out = rms_norm(x, branch, weight, epsilon)
        else:
            added, squares = sum_of_squares(x, branch)
            squares = axis.all_reduce(squares, parameter=weight)
            rstd = reciprocal_root(squares, x.shape[-1] * axis.size, epsilon)
        stream = x if added is None else added
        if axis.size > 1:
            out = scaled(stream, rstd, weight)
        ctx.save_for_backward(stream, weight, rstd)
        ctx.axis, ctx.summed, ctx.parameter, ctx.adds = axis, summed, weight, branch is not None
        ctx.set_materialize_grads(False)
        return stream, out

    @staticmethod
    def backward(ctx, d_stream, d_out):
        x, weight, rstd = ctx.saved_tensors
        if ctx.axis.size == 1:
            d_x, d_weight = rms_norm_gradients(d_out, d_stream, x, rstd, weight)
        else:
            sums = sum_of_rms_gradient(d_out, x, rstd, weight)
            sums = ctx.axis.all_reduce(sums, parameter=ctx.parameter)
            sums = mean_of(sums, x.shape[-1] * ctx.axis.size)
            d_x, d_weight = split_rms_norm_gradients(d_out, d_stream, x, rstd, weight, sums)
        for axis in ctx.summed:
            d_weight = axis.all_reduce(d_weight, parameter=ctx.parameter)
        return d_x, d_x if ctx.adds else None, d_weight, None, None, None


class NormSpec(LayerSpec):
    """A norm of the residual stream: ``[..., features over y] → [..., features over y]``.

    Its ``forward`` takes the stream, and the output of a residual branch that is added to the stream first, if there is
    one. It returns the stream and its norm, the input of a product. Statistics are float32, or float64 for float64
    inputs.
    """

    features: int
    epsilon: float

    def forward(self, layer: BoundLayer, x: Any, branch: Any = None) -> tuple[Any, Any]:
        stream, out = self.apply(layer, x, branch)
        if not layer.context.recomputes_inputs:
            return stream, out
        return stream, Recomputable(out, partial(self.recompute, layer, stream.detach(), out.grad_fn))

    def apply(self, layer: BoundLayer, x: Any, branch: Any) -> tuple[Any, Any]:
        """Return ``x + branch``, or ``x``, and its norm."""
        raise NotImplementedError

    def recompute(self, layer: BoundLayer, x: Any, node: Any) -> Any:
        """Return the norm of ``x`` with the statistics that ``node`` of the first one has saved, without autograd."""
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
    """``x / sqrt(mean(x²) + epsilon) · weight``."""

    features: int
    epsilon: float = 1e-5

    def parameters(self) -> dict[str, ParameterSpec]:
        return {"weight": ParameterSpec((self.features,), Layout(("y",)), mean=1.0, between_layers=True)}

    def apply(self, layer, x, branch):
        return RMSNormFunction.apply(x, branch, layer.weight, layer.context.grid.y, (), self.epsilon)

    def recompute(self, layer, x, node):
        _, weight, rstd = node.saved_tensors
        return scaled(x, rstd, weight)


@dataclass(frozen=True)
class HeadNormSpec(LayerSpec):
    """RMSNorm of each head, ``[..., heads of this rank, size]`` → the same. All heads share the weight [size].

    ``heads``: number of parts that the heads can be split into.
    """

    size: int
    heads: int
    epsilon: float = 1e-5

    def parameters(self) -> dict[str, ParameterSpec]:
        return {"weight": ParameterSpec((self.size,), Layout(()), mean=1.0)}

    def forward(self, layer: BoundLayer, x: Any) -> Any:
        grid = layer.context.grid
        summed = tuple(grid[axis] for axis in layer.context.head_axes(self.heads))
        return RMSNormFunction.apply(x, None, layer.weight, grid.axis(None), summed, self.epsilon)[1]
