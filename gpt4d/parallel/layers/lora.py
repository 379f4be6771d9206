"""Low-rank adapters of linear layers (LoRA, Hu et al., 2021): ``Y = X·W + scale·(X·A)·B``.

Shapes: B: any number of batch dims. K and N: this rank's input features and output features. R: the sum of the
ranks of a layer's adapters.

The contracted axis of the layer splits A's rows, as it splits the input's features. The produced axis splits B's
columns, as it splits the output's features. Each rank adds its product with A and B to its product with W before the
layer's all-reduce. The gradient of the input is added before its all-reduce in the same way. So adapters add no
collective to the forward and the backward, except for the sums of the gradients of A and B, which are small: A's
gradient is a sum over the produced axis, and B's gradient over the contracted axis.

A fused layer has an adapter for each matrix that a model of transformers stores separately, such as queries, keys and
values. The adapters' A are concatenated, and each column of B belongs to one adapter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpt4d.parallel.kernels import Tensor, kernel
from gpt4d.parallel.layers.product import Operation, add_gradient_, cast, placeholder
from gpt4d.parallel.layers.sharding import Axes, named
from gpt4d.parallel.layout import ADAPTERS, Layout, ParameterSpec
from gpt4d.parallel.lazy import torch

if TYPE_CHECKING:
    from gpt4d.parallel.weights import Weights

A, B = "lora_a", "lora_b"  # names of an adapter's parameters


@kernel(lambda b, scale, sizes: b.like((len(sizes) * b.shape[0], *b.shape[1:])))
def spread(b, scale: float, sizes: tuple[int, ...]):
    """Return ``scale·b`` [rank, *N] as [R, *N], where the rows of one adapter are zero in columns of other adapters.

    The columns repeat the pattern ``sizes``: columns of the first adapter, then of the second, and so on.
    """
    if len(sizes) == 1:
        return b * scale
    rank, pattern = b.shape[0], sum(sizes)
    columns = (b * scale).reshape(rank, -1, pattern).split(sizes, -1)
    result = b.new_zeros(len(sizes), rank, columns[0].shape[1], pattern)
    for index, (rows, part) in enumerate(zip(result, columns, strict=True)):
        start = sum(sizes[:index])
        rows[..., start : start + sizes[index]] = part
    return result.view(-1, *b.shape[1:])


@kernel(lambda d_spread, b, *_: b.like(), unread=("b",))
def collected(d_spread, b, scale: float, sizes: tuple[int, ...]):
    """Return the gradient of ``b`` from the gradient of ``spread``'s result, in the dtype of ``b``."""
    if len(sizes) == 1:
        return (d_spread * scale).to(b.dtype)
    blocks = d_spread.view(len(sizes), b.shape[0], -1, sum(sizes))
    parts = [block.split(sizes, -1)[index] for index, block in enumerate(blocks)]
    return (torch.cat(parts, -1) * scale).to(b.dtype).view(b.shape)


@kernel(lambda out, *_: out)
def add_(out, part):
    """Add ``part`` to ``out`` in place."""
    return out.add_(part)


@dataclass(frozen=True)
class AdapterSpec:
    """The adapters of a linear layer.

    Attributes:
        rank: rank of each adapter.
        scale: factor of their products.
    """

    rank: int
    scale: float

    def parameters(self, inputs: int, outputs: tuple[int, ...], count: int, split: Axes) -> dict[str, ParameterSpec]:
        """Return the parameters of ``count`` adapters of a layer [inputs, *outputs] whose features ``split`` splits.

        A is normal with the variance of peft's uniform initial values, and B is zero.
        """
        a_rows, b_columns = named(split.contracted), named(split.produced)
        a = ParameterSpec(
            (inputs, count * self.rank),
            Layout(a_rows, ()),
            std=1 / math.sqrt(3 * inputs),
            group=ADAPTERS,
            summed=b_columns,
        )
        layout = Layout((), *[()] * (len(outputs) - 1), b_columns)
        b = ParameterSpec((self.rank, *outputs), layout, group=ADAPTERS, summed=a_rows)
        return {A: a, B: b}


@dataclass(frozen=True)
class Adapter:
    """The adapters of a layer on one rank.

    Attributes:
        weights: the weights of the stage.
        operation: the product of a layer.
        a: the parameter A [K, R].
        b: the parameter B [rank, *N].
        scale: factor of their products.
        sizes: the pattern of B's columns (``spread``).
    """

    weights: Weights
    operation: Operation
    a: Tensor
    b: Tensor
    scale: float
    sizes: tuple[int, ...]

    def add_product_(self, out_BN: Tensor, x_BK: Tensor) -> Tensor:
        """Add the product of the input with A and B to ``out_BN`` in place."""
        a, b = cast(self.a.detach(), x_BK), self._spread(x_BK)
        inner_BR = self.operation.forward(x_BK, a, None)
        return add_(out_BN, self.operation.forward(inner_BR, b, None))

    def add_gradients(self, d_x: Tensor, d_out_BN: Tensor, x_BK: Tensor) -> Tensor:
        """Add the gradient of the input to ``d_x`` in place, and the gradients of A and B to theirs."""
        weights, operation = self.weights, self.operation
        a, b = cast(self.a.detach(), x_BK), self._spread(x_BK)
        inner_like = placeholder(x_BK, (*x_BK.shape[:-1], a.shape[1]))
        d_inner_BR = operation.input_gradient(d_out_BN, b, inner_like)

        def d_a(earlier: Tensor | None) -> Tensor:
            return operation.weight_gradient(d_inner_BR, x_BK, self.a, earlier)

        def d_b(earlier: Tensor | None) -> Tensor:
            inner_BR = operation.forward(x_BK, a, None)
            d_spread = operation.weight_gradient(d_out_BN, inner_BR, self.b, None)
            gradient = collected(d_spread, self.b, self.scale, self.sizes)
            return gradient if earlier is None else add_gradient_(earlier, gradient)

        weights.add_gradient(self.a, d_a)
        weights.add_gradient(self.b, d_b)
        return add_(d_x, operation.input_gradient(d_inner_BR, a, x_BK))

    def _spread(self, like: Tensor) -> Tensor:
        return spread(cast(self.b.detach(), like), self.scale, self.sizes)
