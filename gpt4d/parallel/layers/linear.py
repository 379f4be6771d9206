"""Linear layers on the 4-D grid (4D paper, Algorithm 1), and the output head, which is one too.

Shapes: B any number of batch dims, K input features, N output features, both this rank's part.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

from gpt4d.parallel.layers import specs
from gpt4d.parallel.layers.matmul import matmul, product
from gpt4d.parallel.layers.product import ProductContext, multiply
from gpt4d.parallel.layers.specs import Axes
from gpt4d.parallel.recomputation import Recomputable
from gpt4d.parallel.weights import WeightStream


@dataclass(frozen=True)
class Matmul:
    """``x @ weight`` (gpt4d.parallel.layers.product.Operation) with a weight [K, *N], or [N, K] as an embedding is."""

    transposed_storage: bool = False

    def _matrix(self, weight: torch.Tensor) -> torch.Tensor:
        matrix = weight.flatten(1)
        return matrix.t() if self.transposed_storage else matrix

    def forward(self, x_BK, weight, bias):
        rows, w = x_BK.reshape(-1, x_BK.shape[-1]), self._matrix(weight)
        out = matmul(rows, w, None if bias is None else bias.flatten())
        return out.view(*x_BK.shape[:-1], *(weight.shape[:1] if self.transposed_storage else weight.shape[1:]))

    def input_gradient(self, d_out_BN, weight, x_BK):
        w = self._matrix(weight)
        return matmul(d_out_BN.view(-1, w.shape[1]), w.t()).view(x_BK.shape)

    def weight_gradient(self, d_out_BN, x_BK, weight, added_to=None):
        rows = x_BK.reshape(-1, x_BK.shape[-1])
        d_rows = d_out_BN.view(len(rows), math.prod(d_out_BN.shape[x_BK.dim() - 1 :]))
        left, right = (d_rows, rows) if self.transposed_storage else (rows, d_rows)
        if added_to is None:
            return product(left.t(), right, weight.dtype).view(-1, *weight.shape[1:])
        product(left.t(), right, weight.dtype, added_to.view(len(added_to), -1))
        return added_to


class Linear(nn.Module):
    """``[B, in_features] → [B, out_features]``, or ``[B, num_fused, out_features]`` where ``num_fused`` is given.

    Normal: y splits the input's features, x the output's. Transposed: x and y, so that its input is the output of a
    normal layer. The batch is split over data and z.

    Args:
        weights: the stage's weight stream.
        in_features: global number of input features.
        out_features: global number of output features.
        transposed: exchange the roles of x and y.
        axes: the axes that split the features, where they are others: on a stream that x splits, or of a layer whose
            input or output every rank has whole.
        num_fused: number of matrices of ``out_features`` each in the weight, all split the same way: queries, keys
            and values of the same heads are on the same rank.
        bias: add a bias after the sum over the contracted axis.
        bias_gradient: compute its gradient here; else a function of the output does.
        std: standard deviation of the initial weight.
        used: number of output features without padding; None for all.
        inner_split: ``FEATURES`` if the axis of the stream's features splits those of the other side too: the output's
            of a normal layer, which are scattered, the input's of a transposed one, which are gathered.
    """

    def __init__(
        self,
        weights: WeightStream,
        in_features: int,
        out_features: int,
        *,
        transposed: bool = False,
        axes: Axes | None = None,
        num_fused: int | None = None,
        bias: bool = True,
        bias_gradient: bool = True,
        std: float = 0.02,
        used: int | None = None,
        inner_split: int | None = None,
    ):
        super().__init__()
        axes = axes or specs.linear_axes(transposed)
        contracted, produced = map(weights.grid.axis, axes)
        self.context = ProductContext(weights, Matmul(), contracted, produced, transposed, inner_split)
        layer = specs.linear(in_features, out_features, axes, num_fused=num_fused, bias=bias, std=std, used=used)
        self.weight = weights.parameter(layer["weight"])
        self.bias = weights.parameter(layer["bias"]) if bias else None
        self.bias_gradient = bias_gradient

    async def forward(self, x_BK: torch.Tensor | Recomputable) -> torch.Tensor:
        bias = self.bias if self.bias is None or self.bias_gradient else self.bias.detach()
        return await multiply(x_BK, self.weight, bias, self.context)


class Head(nn.Module):
    """Logits [B, vocabulary over x] of [B, hidden over y] through a tied token embedding [vocabulary, hidden]."""

    def __init__(self, weights: WeightStream):
        super().__init__()
        self.context = ProductContext(weights, Matmul(transposed_storage=True), weights.grid.y, weights.grid.x)

    async def forward(self, x_BK: torch.Tensor | Recomputable, embedding: nn.Parameter) -> torch.Tensor:
        return await multiply(x_BK, embedding, None, self.context)
