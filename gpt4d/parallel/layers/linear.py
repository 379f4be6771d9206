"""Linear layers on the 4-D grid (4D paper, Algorithm 1), and the output head, which is one too.

Shapes: B any number of batch dims, K input features, N output features, both this rank's part.
"""

from typing import NamedTuple

import torch
from torch import nn

from gpt4d.parallel import collectives
from gpt4d.parallel.grid import Axis
from gpt4d.parallel.layers import specs
from gpt4d.parallel.weights import WeightStream


class LinearContext(NamedTuple):
    """The stream that a layer's weight comes from, and the axes that split the weight's two dims."""

    weights: WeightStream
    contracted: Axis  # splits the input's features; the output is summed over it
    produced: Axis  # splits the output's features; the input's gradient is summed over it
    transposed_storage: bool  # the weight is stored [out, in], as an embedding is


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``a @ b``, added up and returned in ``dtype``: the matrices may be bf16 and their product float32.

    On ROCm, whose libraries lack such a product, the result of bf16 matrices is rounded to bf16 once.
    """
    if a.dtype == dtype:
        return a @ b
    if a.is_cpu:
        return a.to(dtype) @ b.to(dtype)
    return (a @ b).to(dtype) if torch.version.hip else torch.mm(a, b, out_dtype=dtype)


class SaveInput(torch.autograd.Function):
    """Keeps a multiplication's input for its backward, as a node of its own before it.

    Under activation checkpointing a recomputation ends with the last tensor that was kept. Kept here, the last layer's
    product and its sum over an axis are not computed again only to be discarded.
    """

    @staticmethod
    def forward(ctx, x_BK):
        ctx.save_for_backward(x_BK)
        return x_BK.view_as(x_BK)

    @staticmethod
    def backward(ctx, d_x_BK):
        return d_x_BK


class LinearFunction(torch.autograd.Function):
    """``O = I·W + b`` with I [B, K], W [K, N] gathered over z, O [B, N].

    The parameter itself is kept for the backward, not autograd's view of it: gradients must land there. W is not kept
    here: the weight stream decides whether it is gathered again. ``SaveInput`` keeps I, if it has a gradient.
    """

    @staticmethod
    def forward(ctx, x_BK, weight, bias, context: LinearContext):
        ctx.keeper = x_BK.grad_fn
        if ctx.keeper is None:
            ctx.save_for_backward(x_BK)
        ctx.weight, ctx.context, ctx.bias = weight, context, bias
        rows = x_BK.flatten(0, -2)
        w = context.weights.gather(weight).flatten(1)
        w = w.t() if context.transposed_storage else w
        bias = None if bias is None else bias.flatten().to(w.dtype)
        if bias is not None and context.contracted.size == 1:
            out = torch.addmm(bias, rows, w)
        else:
            out = collectives.all_reduce(rows @ w, context.contracted, parameter=weight)
            if bias is not None:  # after the sum: once, not once for each rank of the axis
                out += bias
        return out.view(*x_BK.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx, d_out_BN):
        (x_BK,) = (ctx.keeper or ctx).saved_tensors
        weights, _, produced, transposed_storage = ctx.context
        rows, d_rows = x_BK.flatten(0, -2), d_out_BN.flatten(0, -2)
        d_x = d_bias = pending = None
        if ctx.needs_input_grad[0]:
            w = weights.gather_for_backward(ctx.weight).flatten(1)
            d_x_rows = d_rows @ (w if transposed_storage else w.t())
            pending = collectives.start_all_reduce(d_x_rows, produced, parameter=ctx.weight)
            if not weights.overlap.all_reduce:
                pending.wait()
        left, right = (d_rows, rows) if transposed_storage else (rows, d_rows)
        d_weight = product(left.t(), right, weights.dtype)
        weights.scatter(ctx.weight, d_weight.view(-1, *ctx.weight.shape[1:]))
        if ctx.bias is not None:
            d_bias = d_rows.sum(0, dtype=ctx.bias.dtype).view(ctx.bias.shape)
        if pending is not None:
            d_x = pending.wait().view_as(x_BK)
        return d_x, None, d_bias, None


class Linear(nn.Module):
    """``[B, in_features] → [B, out_features]``, or ``[B, num_fused, out_features]`` where ``num_fused`` is given.

    Normal: y splits the input's features, x the output's. Transposed: x and y, so that its input is the output of a
    normal layer. The batch is split over data and z.

    Args:
        weights: the stage's weight stream.
        in_features: global number of input features.
        out_features: global number of output features.
        transposed: exchange the roles of x and y.
        num_fused: number of matrices of ``out_features`` each in the weight, all split the same way: queries, keys
            and values of the same heads are on the same rank.
        bias: add a bias after the sum over the contracted axis.
        std: standard deviation of the initial weight.
    """

    def __init__(
        self,
        weights: WeightStream,
        in_features: int,
        out_features: int,
        *,
        transposed: bool = False,
        num_fused: int | None = None,
        bias: bool = True,
        std: float = 0.02,
    ):
        super().__init__()
        contracted, produced = (weights.grid[axis] for axis in specs.linear_axes(transposed))
        self.context = LinearContext(weights, contracted, produced, transposed_storage=False)
        layer = specs.linear(in_features, out_features, transposed=transposed, num_fused=num_fused, bias=bias, std=std)
        self.weight = weights.parameter(layer["weight"])
        self.bias = weights.parameter(layer["bias"]) if bias else None

    def forward(self, x_BK: torch.Tensor) -> torch.Tensor:
        out = LinearFunction.apply(SaveInput.apply(x_BK), self.weight, self.bias, self.context)
        return out.view(*x_BK.shape[:-1], *self.weight.shape[1:])


class Head(nn.Module):
    """Logits [B, vocabulary over x] of [B, hidden over y] through a tied token embedding [vocabulary, hidden]."""

    def __init__(self, weights: WeightStream):
        super().__init__()
        self.context = LinearContext(weights, weights.grid.y, weights.grid.x, transposed_storage=True)

    def forward(self, x_BK: torch.Tensor, embedding: nn.Parameter) -> torch.Tensor:
        return LinearFunction.apply(SaveInput.apply(x_BK), embedding, None, self.context)
