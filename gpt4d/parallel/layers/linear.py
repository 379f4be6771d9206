"""Fully connected layers on the 4-D grid (4D paper, Algorithm 1) and the output head, which is one too."""

from typing import NamedTuple

import torch
from torch import nn

from gpt4d.parallel import collectives, layout
from gpt4d.parallel.grid import Axis
from gpt4d.parallel.weights import WeightStream


class LinearContext(NamedTuple):
    """How a layer multiplies: where its weight streams from, and the axes its two dims are split over."""

    weights: WeightStream
    again: bool  # the backward will run
    contracted: Axis  # splits the input's features; the output is summed over it
    produced: Axis  # splits the output's features; the input's gradient is summed over it
    transposed_storage: bool  # the weight is stored [out, in], as an embedding is


class SaveInput(torch.autograd.Function):
    """Keeps a multiplication's input for its backward, as a node of its own ahead of it.

    Under activation checkpointing a recomputation ends with the last tensor that was kept. Kept here, the last layer's
    product and its sum over an axis are not made again only to be thrown away.
    """

    @staticmethod
    def forward(ctx, inputs):
        ctx.save_for_backward(inputs)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, d_inputs):
        return d_inputs


class LinearFunction(torch.autograd.Function):
    """``O = I·W + b`` with I [..., k], W [k, n] gathered over z, O [..., n]; k and n this rank's parts.

    The parameter itself is kept for the backward, not what autograd makes of it: gradients must land there. W is not
    kept here: the stream of weights decides whether it is gathered again. ``SaveInput`` keeps I, if it has a gradient.
    """

    @staticmethod
    def forward(ctx, inputs, weight, bias, sides: LinearContext):
        ctx.keeper = inputs.grad_fn
        if ctx.keeper is None:
            ctx.save_for_backward(inputs)
        ctx.weight, ctx.sides, ctx.bias_dtype = weight, sides, None if bias is None else bias.dtype
        rows = inputs.flatten(0, -2)
        w = sides.weights.gather(weight, sides.again).flatten(1)
        w = w.t() if sides.transposed_storage else w
        bias = None if bias is None else bias.flatten().to(w.dtype)
        if bias is not None and sides.contracted.size == 1:
            outputs = torch.addmm(bias, rows, w)
        else:
            outputs = collectives.all_reduce(rows @ w, sides.contracted)
            if bias is not None:  # after the sum: once, not once for each rank of the axis
                outputs += bias
        return outputs.view(*inputs.shape[:-1], outputs.shape[-1])

    @staticmethod
    def backward(ctx, d_outputs):
        (inputs,) = (ctx.keeper or ctx).saved_tensors
        weights, _, _, produced, transposed_storage = ctx.sides
        rows, d_rows = inputs.flatten(0, -2), d_outputs.flatten(0, -2)
        d_inputs = d_bias = None
        if ctx.needs_input_grad[0]:
            w = weights.gather_for_backward(ctx.weight).flatten(1)
            summing = collectives.start_all_reduce(d_rows @ (w if transposed_storage else w.t()), produced)
            if not weights.overlap.all_reduce:
                summing.wait()
        d_weight = d_rows.t() @ rows if transposed_storage else rows.t() @ d_rows
        weights.scatter(ctx.weight, d_weight.view(-1, *ctx.weight.shape[1:]))
        if ctx.bias_dtype is not None:
            d_bias = d_rows.sum(0, dtype=ctx.bias_dtype).view(ctx.weight.shape[1:])
        if ctx.needs_input_grad[0]:
            d_inputs = summing.wait().view_as(inputs)
        return d_inputs, None, d_bias, None


class Linear(nn.Module):
    """``[..., in_features] → [..., out_features]``, or ``[..., parts, out_features]`` where ``parts`` is given.

    Normal: the input's features are split over y, the output's over x. Transposed: over x and over y, so that its
    input is the output of a normal layer. The batch is split over data and z.

    ``parts`` makes the weight that many matrices of out_features each, every one of them split alike: queries, keys
    and values of the same heads on the same rank.
    """

    def __init__(
        self,
        weights: WeightStream,
        in_features: int,
        out_features: int,
        *,
        transposed: bool = False,
        parts: int | None = None,
        std: float = 0.02,
    ):
        super().__init__()
        grid = weights.grid
        self.weights = weights
        self.contracted, self.produced = (grid.x, grid.y) if transposed else (grid.y, grid.x)
        out_shape = (out_features,) if parts is None else (parts, out_features)
        of_weight, of_bias = layout.linear(transposed, parts)
        self.weight = weights.parameter((in_features, *out_shape), of_weight, std=std, decay=True)
        self.bias = weights.parameter(out_shape, of_bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        sides = LinearContext(
            self.weights, torch.is_grad_enabled(), self.contracted, self.produced, transposed_storage=False
        )
        outputs = LinearFunction.apply(SaveInput.apply(inputs), self.weight, self.bias, sides)
        return outputs.view(*inputs.shape[:-1], *self.bias.shape)


class Head(nn.Module):
    """Logits [..., vocabulary over x] of [..., hidden over y] through a tied token embedding [vocabulary, hidden]."""

    def __init__(self, weights: WeightStream):
        super().__init__()
        self.weights = weights

    def forward(self, hidden: torch.Tensor, embedding: nn.Parameter) -> torch.Tensor:
        grid = self.weights.grid
        sides = LinearContext(self.weights, torch.is_grad_enabled(), grid.y, grid.x, transposed_storage=True)
        return LinearFunction.apply(SaveInput.apply(hidden), embedding, None, sides)
