"""Linear layers on the 4-D grid (4D paper, Algorithm 1), the output head, and concatenations.

Shapes: B: any number of batch dims. K and N: this rank's input features and output features. A concatenation of
activations whose channels are split needs no communication.

On x86 processors oneDNN computes float32 products, because it uses AVX-512 on every processor that has it. ``torch.mm``
calls MKL, which uses AVX-512 on Intel's processors only; on AMD's, oneDNN is more than twice as fast.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from gpt4d.parallel.kernels import Tensor, TorchFunction, block_rows, elementwise, kernel, planned_kernel
from gpt4d.parallel.layers import sharding
from gpt4d.parallel.layers.float8 import Float8Matmul
from gpt4d.parallel.layers.layer import BoundLayer, LayerSpec
from gpt4d.parallel.layers.lora import Adapter, AdapterSpec
from gpt4d.parallel.layers.product import FEATURES, Input, Operation, ProductContext, multiply
from gpt4d.parallel.layers.sharding import Axes
from gpt4d.parallel.layout import Layout, Matrices, ParameterSpec
from gpt4d.parallel.lazy import torch

_MIN_FLOPS = 1 << 22  # minimum size of a product for oneDNN, which takes 15 us longer to start than MKL
_MIN_COLUMNS = 128  # of a block of columns, because each block reads the complete first factor


@cache
def _one_dnn_linear() -> Callable | None:
    """Return oneDNN's ``x @ weight.T + bias`` on dense tensors; None if torch does not provide it."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return None
    # torch.compile uses this private operation; torch has no public name for it.
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def matmul(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, added_to: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``a @ b + bias`` of matrices, without a gradient. The product is added to ``added_to`` if given."""
    result = None
    if a.dtype == torch.float32 and a.is_cpu and 2 * a.numel() * b.shape[1] >= _MIN_FLOPS:
        one_dnn = _one_dnn_linear()
        if one_dnn is not None:
            # oneDNN copies a first factor that is not contiguous. For the gradient of logits, exchange the factors.
            if bias is None and not a.is_contiguous() and _exchanges(len(a), a.shape[1], b.shape[1]):
                result = a.new_empty(len(a), b.shape[1]) if added_to is None else added_to
                columns = _block_columns(len(a))
                for out, part in zip(result.split(columns, 1), b.split(columns, 1), strict=True):
                    block = one_dnn(part.t(), a, None, "none", [], "").t()
                    out.copy_(block) if added_to is None else out.add_(block)
                return result
            result = one_dnn(a, b.t(), bias, "none", [], "")
    if result is None:
        result = torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
    return result if added_to is None else added_to.add_(result)


def _exchanges(rows: int, inner: int, columns: int) -> bool:
    """Return whether ``a @ b`` of these sizes is computed as ``(b.T @ a.T).T``, so that oneDNN does not copy ``a``."""
    return rows * inner > (rows + inner) * columns


def _block_columns(rows: int) -> int:
    """Return the number of columns of an exchanged product that are in memory twice, the second time transposed."""
    return max(_MIN_COLUMNS, block_rows(rows))


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, added_to: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``a @ b`` accumulated in ``dtype``: the matrices may be bf16 and their product float32.

    If ``added_to``, a matrix of that dtype, is given, the product is added to it in place and the sum is returned. On a
    GPU the kernel of the product adds it. ROCm's libraries support no output of another dtype. There, the product of
    bf16 matrices is rounded to bf16 once.
    """
    if a.is_cpu:
        return _wide_product(a, b, dtype, added_to)
    if a.dtype != dtype and torch.version.hip:
        result = a @ b
    elif added_to is None:
        return a @ b if a.dtype == dtype else torch.mm(a, b, out_dtype=dtype)
    elif a.dtype == dtype:
        return added_to.addmm_(a, b)
    else:
        return torch.addmm(added_to, a, b, out_dtype=dtype, out=added_to)
    return result.to(dtype) if added_to is None else added_to.add_(result)


def _wide_product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, added_to: torch.Tensor | None) -> torch.Tensor:
    """Compute ``product`` on a CPU: convert both matrices to ``dtype``, ``a`` in blocks of rows."""
    if a.dtype == dtype:
        return matmul(a, b, None, added_to)
    wide, rows = b.to(dtype), block_rows(a.shape[1])
    if added_to is None and len(a) <= rows:
        return matmul(a.to(dtype), wide)
    result = a.new_empty(len(a), b.shape[1], dtype=dtype) if added_to is None else added_to
    for out, part in zip(result.split(rows), a.split(rows), strict=True):
        block = matmul(part.to(dtype), wide)
        out.copy_(block) if added_to is None else out.add_(block)
    return result


def _rows(x_BK) -> int:
    return math.prod(x_BK.shape[:-1])


# These functions avoid views of matrices: at small sizes a view takes as long as a product.


def _matrix(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight without separate dims of its columns."""
    return weight if weight.dim() == 2 else weight.flatten(1)


def _as_rows(x: torch.Tensor, columns: int) -> torch.Tensor:
    """Return an activation as a matrix with ``columns`` columns."""
    return x if x.dim() == 2 and x.shape[1] == columns else x.reshape(-1, columns)


@kernel(
    lambda x_BK, weight, bias, transposed=False: x_BK.like(
        (*x_BK.shape[:-1], *(weight.shape[:1] if transposed else weight.shape[1:]))
    ),
    flops=lambda x_BK, weight, *_: 2 * _rows(x_BK) * math.prod(weight.shape),
)
def linear(x_BK, weight, bias, transposed: bool = False):
    """Return ``x·W + b`` with a weight [K, *N], or [N, K] if ``transposed``, as an embedding is."""
    w = _matrix(weight)
    out = matmul(_as_rows(x_BK, x_BK.shape[-1]), w.t() if transposed else w, None if bias is None else bias.flatten())
    if x_BK.dim() == weight.dim() == 2:
        return out
    return out.view(*x_BK.shape[:-1], *(weight.shape[:1] if transposed else weight.shape[1:]))


@kernel(
    lambda d_out_BN, weight, x_BK, *_: x_BK.like(),
    flops=lambda d_out_BN, weight, x_BK, *_: 2 * _rows(x_BK) * math.prod(weight.shape),
    unread=("x_BK",),
)
def linear_input_gradient(d_out_BN, weight, x_BK, transposed: bool = False):
    """Return the gradient of the input, in the shape of ``x_BK``."""
    w = _matrix(weight) if transposed else _matrix(weight).t()
    d_x = matmul(_as_rows(d_out_BN, w.shape[0]), w)
    return d_x if x_BK.dim() == 2 else d_x.view(x_BK.shape)


def _temporary_bytes(d_out_BN, x_BK, weight, added_to, transposed: bool = False) -> int:
    """Return the bytes of factors that a CPU converts, the first factor in blocks of rows, and of a block's product."""
    if not weight.is_cpu:
        return 0
    count, converts = _rows(x_BK), x_BK.dtype != weight.dtype
    first, second = (math.prod(tensor.shape) // count for tensor in (x_BK, d_out_BN))
    if transposed:
        first, second = second, first
    rows = min(first, block_rows(count)) if converts else first
    converted = count * (second + rows) if converts else 0
    if not converts and _exchanges(first, count, second):
        product = rows * min(second, _block_columns(rows))
    else:
        product = 0 if added_to is None and rows == first else rows * second
    return (converted + product) * weight.itemsize


def _linear_weight_gradient_results(d_out_BN, x_BK, weight, added_to, transposed: bool = False):
    rows = x_BK.shape[-1] * math.prod(d_out_BN.shape) // _rows(x_BK) // math.prod(weight.shape[1:])
    return added_to or weight.like((rows, *weight.shape[1:]))


@kernel(
    _linear_weight_gradient_results,
    flops=lambda d_out_BN, x_BK, *_: 2 * math.prod(d_out_BN.shape) * x_BK.shape[-1],
    unread=("weight",),
    temporary=_temporary_bytes,
)
def linear_weight_gradient(d_out_BN, x_BK, weight, added_to, transposed: bool = False):
    """Return the gradient of the gathered weight in the dtype of its shard ``weight``, added to ``added_to`` if given.

    On a GPU the kernel of the product adds it. On a CPU both factors are first converted to the dtype of the weight.
    """
    rows = _as_rows(x_BK, x_BK.shape[-1])
    d_rows = _as_rows(d_out_BN, math.prod(d_out_BN.shape[x_BK.dim() - 1 :]))
    left, right = (d_rows, rows) if transposed else (rows, d_rows)
    if added_to is None:
        gradient = product(left.t(), right, weight.dtype)
        return gradient if weight.dim() == 2 else gradient.view(-1, *weight.shape[1:])
    product(left.t(), right, weight.dtype, _matrix(added_to))
    return added_to


class Matmul:
    """``x @ weight`` (gpt4d.parallel.layers.product.Operation) with a weight [K, *N]."""

    forward, input_gradient, weight_gradient = linear, linear_input_gradient, linear_weight_gradient


class EmbeddingMatmul:
    """``x @ weight.T`` (gpt4d.parallel.layers.product.Operation) with an embedding [N, K]."""

    def forward(self, x_BK, weight, bias):
        return linear(x_BK, weight, bias, True)

    def input_gradient(self, d_out_BN, weight, x_BK):
        return linear_input_gradient(d_out_BN, weight, x_BK, True)

    def weight_gradient(self, d_out_BN, x_BK, weight, added_to):
        return linear_weight_gradient(d_out_BN, x_BK, weight, added_to, True)


@dataclass(frozen=True)
class LinearSpec(LayerSpec):
    """A linear layer, ``[B, in_features] → [B, out_features]``, or ``[B, num_fused, out_features]``.

    In a normal layer y splits the input features and x the output features. In a transposed layer x and y exchange
    their roles, so that its input is the output of a normal layer. The batch is split over data and z.

    Attributes:
        in_features: global number of input features.
        out_features: global number of output features.
        transposed: exchange the roles of x and y.
        axes: the axes that split the features, if not the default axes: x splits the residual stream, or no axis splits
            the input or the output.
        num_fused: number of matrices in the weight, each with ``out_features`` columns. All are split in the same way,
            so that queries, keys and values of a head are on one rank.
        bias: add a bias after the all-reduce over the contracted axis.
        bias_gradient: compute the bias's gradient here; else a function of the output computes it.
        std: standard deviation of the initial weight.
        used: number of output features without padding; None for all.
        heads: number of parts that the heads of an attention can be split into. A normal layer precedes the attention,
            a transposed layer follows it. If the residual stream's axis splits the heads too, a normal layer
            reduce-scatters its output, and a transposed layer all-gathers its input.
        matrices: output features of each matrix that a model of transformers stores separately, if the layer fuses
            several. They are the fused matrices of the weight, or the interleaved parts of its columns.
        adapter: low-rank adapters of these matrices; None if the layer has none.
        group: group of the weight, ``matrices``, which ``train.precision=fp8`` multiplies in float8, or ``head``.
    """

    in_features: int
    out_features: int
    transposed: bool = False
    axes: Axes | None = None
    num_fused: int | None = None
    bias: bool = True
    bias_gradient: bool = True
    std: float = 0.02
    used: int | None = None
    heads: int | None = None
    matrices: tuple[int, ...] = ()
    adapter: AdapterSpec | None = None
    group: str = "matrices"

    @cached_property
    def columns(self) -> int:
        """Global number of output features of all fused matrices."""
        return self.out_features * (self.num_fused or 1)

    @cached_property
    def stream_axis(self) -> str | None:
        """The axis that splits the features of the residual stream."""
        return self.split.produced if self.transposed else self.split.contracted

    @cached_property
    def split(self) -> Axes:
        """The axes that split the features of the input and of the output."""
        return self.axes or sharding.linear_axes(self.transposed)

    def parameters(self) -> dict[str, ParameterSpec]:
        """Return weight [in, out] and bias [out], or [in, num_fused, out] and [num_fused, out].

        z splits the stored rows further.
        """
        fused, columns = self.num_fused, sharding.named(self.split.produced)
        assert self.used is None or not (fused or self.bias), "only the columns of a plain weight can be padded"
        shape = (self.out_features,) if fused is None else (fused, self.out_features)
        out = (columns,) if fused is None else ((), columns)
        layout = Layout(sharding.named(self.split.contracted, "z"), *out)
        unpadded = None if self.used is None else (self.in_features, self.used)
        matrices = None
        if self.group == "matrices":
            interleaved = fused is None and len(self.matrices) > 1
            matrices = Matrices(len(shape), () if fused is None else (1,), self._pieces if interleaved else ())
        weight = ParameterSpec(
            (self.in_features, *shape),
            layout,
            unpadded,
            std=self.std,
            group=self.group,
            matrices=matrices,
            streamed=True,
            float8=matrices is not None,
        )
        own = {"weight": weight, "bias": ParameterSpec(shape, Layout(*out))} if self.bias else {"weight": weight}
        if self.adapter is not None:
            own |= self.adapter.parameters(self.in_features, shape, max(1, len(self.matrices)), self.split)
        return own

    def prepare(self, layer: BoundLayer) -> None:
        context, (contracted, produced) = layer.context, self.split
        splits_heads = self.heads is not None and self.stream_axis in context.head_axes(self.heads, self.stream_axis)
        produced_axis = context.grid.axis(produced)
        local, adapter = self.out_features // produced_axis.size, None
        operation: Operation = Matmul()
        if context.float8 and self.group == "matrices":
            operation = Float8Matmul((local,) if self.num_fused is None else (self.num_fused, local))
        if self.adapter is not None:
            a, b, scale = layer.lora_a, layer.lora_b, self.adapter.scale
            adapter = Adapter(layer.weights, Matmul(), a, b, scale, self.pattern(local))
        layer.product = ProductContext(
            layer.weights,
            operation,
            context.grid.axis(contracted),
            produced_axis,
            self.transposed,
            FEATURES if splits_heads else None,
            adapter=adapter,
        )

    def pattern(self, columns: int) -> tuple[int, ...]:
        """Return the pattern of the matrices in this rank's ``columns`` of each fused matrix (lora.spread)."""
        if self.num_fused is not None or not self.matrices:
            return (columns,) * max(1, len(self.matrices))
        return self._pieces

    @property
    def _pieces(self) -> tuple[int, ...]:
        """Number of columns of each matrix in a piece of a weight whose columns are interleaved parts of matrices."""
        return _sizes(self.matrices, self.heads)

    def forward(self, layer: BoundLayer, x_BK: Input) -> Awaitable[Tensor]:
        bias = layer.bias if self.bias else None
        if bias is not None and not self.bias_gradient:
            bias = bias.detach()
        return multiply(x_BK, layer.weight, bias, layer.product, layer.current_pass)


@dataclass(frozen=True)
class TiedHeadSpec(LayerSpec):
    """Output head with a tied token embedding [vocabulary, hidden]: [B, hidden over y] → [B, vocabulary over x]."""

    def prepare(self, layer: BoundLayer) -> None:
        grid = layer.context.grid
        layer.product = ProductContext(layer.weights, EmbeddingMatmul(), grid.y, grid.x)

    def forward(self, layer: BoundLayer, x_BK: Input, embedding: Tensor) -> Awaitable[Tensor]:
        return multiply(x_BK, embedding, None, layer.product, layer.current_pass)


@planned_kernel
def side_by_side(*parts):
    """Return the concatenation of ``parts`` [..., channels] along channels."""
    return parts[0].like((*parts[0].shape[:-1], sum(part.shape[-1] for part in parts)))


def _parts(concatenation, sizes: tuple[int, ...]):
    """Return the tensors of a concatenation: views if each tensor has one piece, else copies."""
    pieces = concatenation.shape[-1] // sum(sizes)
    views = tuple(concatenation.alias(shape=(*concatenation.shape[:-1], pieces * size)) for size in sizes)
    return views if pieces == 1 else tuple(map(elementwise, views))


class ConcatenationFunction(TorchFunction):
    """The concatenation of tensors along channels. The last argument is the number of channels per piece of each."""

    @staticmethod
    def in_torch(*arguments):
        *parts, sizes = arguments
        interleaved = [part.unflatten(-1, (-1, size)) for part, size in zip(parts, sizes, strict=True)]
        return torch.cat(interleaved, -1).flatten(-2)

    @staticmethod
    def forward(ctx, *arguments):
        *parts, ctx.sizes = arguments
        return side_by_side(*parts)

    @staticmethod
    def backward(ctx, d_out):
        return *_parts(d_out, ctx.sizes), None


class SeparationFunction(TorchFunction):
    """The tensors of a concatenation. ``sizes``: number of channels per piece of each tensor."""

    @staticmethod
    def in_torch(concatenation, sizes: tuple[int, ...]):
        return tuple(part.flatten(-2) for part in concatenation.unflatten(-1, (-1, sum(sizes))).split(sizes, -1))

    @staticmethod
    def forward(ctx, concatenation, sizes: tuple[int, ...]):
        return _parts(concatenation, sizes)

    @staticmethod
    def backward(ctx, *d_parts):
        return side_by_side(*d_parts), None


def concatenate(parts: Sequence[Tensor], channels: Sequence[int], pieces: int | None = None) -> Any:
    """Concatenate activations [..., channels] in the order of gpt4d.parallel.layers.sharding.interleaved_order.

    Args:
        parts: this rank's channels of each activation; the same axis splits all activations.
        channels: global number of channels of each activation.
        pieces: number of stored pieces per activation; None: gpt4d.parallel.layers.sharding.interleaved_pieces.
    """
    return ConcatenationFunction.apply(*parts, _sizes(channels, pieces))


def separate(concatenation: Tensor, channels: Sequence[int], pieces: int | None = None) -> list[Any]:
    """Return the activations of a concatenation [..., channels]: the inverse of ``concatenate``."""
    return list(SeparationFunction.apply(concatenation, _sizes(channels, pieces)))


def _sizes(channels: Sequence[int], pieces: int | None) -> tuple[int, ...]:
    pieces = pieces or sharding.interleaved_pieces(channels)
    return tuple(count // pieces for count in channels)
