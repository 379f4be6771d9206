"""Products with streamed weights on the 4-D grid (4D paper, Algorithm 1): what linear layers and convolutions share.

Shapes: B any number of batch dims, K input features, N output features, both this rank's part.

A call has several autograd nodes: one for the input, one for the product and, where the output is scattered, one for
the output. Each collective starts in one of them and ends in another, and other chunks compute in between. The
product's node is created when its sum is complete, that is after the products of the other chunks. Since the backward
runs nodes in the reverse order, the sum of an input's gradient, which starts in the product's node and ends in the
input's, has the other chunks' computation beside it too.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from gpt4d.parallel.collectives import Axis, Pending
from gpt4d.parallel.layers import specs
from gpt4d.parallel.recomputation import Recomputable
from gpt4d.parallel.turns import Turn
from gpt4d.parallel.weights import WeightStream

TOKENS, FEATURES = 0, -1  # dims of an activation that an axis may split


class Operation(Protocol):
    """The computation of a layer on one rank: bilinear in the input and the gathered weight, features last."""

    def forward(self, x_BK: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the output [B, N], contiguous. ``bias`` [N] has the dtype of the weight."""

    def input_gradient(self, d_out_BN: torch.Tensor, weight: torch.Tensor, x_BK: torch.Tensor) -> torch.Tensor:
        """Return the gradient of ``x_BK``, contiguous."""

    def weight_gradient(
        self, d_out_BN: torch.Tensor, x_BK: torch.Tensor, weight: nn.Parameter, added_to: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the gradient of the gathered weight in the dtype of its shard ``weight``, in the order it has there,
        contiguous. With ``added_to``, an earlier sum of such gradients, it is added to that one, which is returned."""


class ProductContext(NamedTuple):
    """The stream that a layer's weight comes from, the axes that split the weight's two dims, and further splits."""

    weights: WeightStream
    operation: Operation
    contracted: Axis  # splits the input's features; the output is summed over it
    produced: Axis  # splits the output's features; the input's gradient is summed over it
    transposed: bool = False  # the output, not the input, belongs to the residual stream
    inner_split: int | None = None  # dim that the other axis splits of the side that is not the stream's

    def splits(self) -> tuple[int | None, int | None]:
        """Return the dim of the input that ``produced`` splits and the dim of the output that ``contracted`` splits.

        Such an input is gathered first, and the sum of such an output is scattered. None: neither.
        """
        stream = TOKENS if self.weights.splits_tokens else None
        before, after = specs.sides(stream, self.inner_split, self.transposed)
        return before if self.produced.size > 1 else None, after if self.contracted.size > 1 else None


@dataclass
class _Call:
    """One call of a layer: the collectives that its autograd nodes hand to each other."""

    context: ProductContext
    weight: nn.Parameter  # not autograd's view of it: gradients must land here
    bias: torch.Tensor | None
    input_split: int | None
    output_split: int | None
    input_again: Callable[[], torch.Tensor] | None  # computes an input that is not kept
    output: Pending | None = None  # the product, summed
    shape: tuple[int, ...] = ()  # of the product
    d_output: Pending | None = None  # the gathered gradient of a scattered output
    d_input: Pending | None = None  # the input's gradient, summed

    def take(self, name: str) -> torch.Tensor:
        """Wait for a collective and forget it, so that its result lives no longer than it is used."""
        pending = getattr(self, name)
        setattr(self, name, None)
        return pending.wait()

    def start_product(self, x_BK: torch.Tensor) -> None:
        """Compute the product with the gathered input and start to sum it over the contracted axis."""
        context, contracted = self.context, self.context.contracted
        with torch.no_grad():
            w = context.weights.gather(self.weight)
            bias = None if self.bias is None or contracted.size > 1 else self.bias.to(w.dtype)
            out = context.operation.forward(x_BK, w, bias)
            self.shape = out.shape
            if self.output_split is None:
                self.output = contracted.start_all_reduce(out, parameter=self.weight)
            else:
                self.output = start_scatter(out, contracted, self.output_split, self.weight)

    def local_bias(self, out: torch.Tensor) -> torch.Tensor | None:
        """Return the bias of an output that has been summed, in the output's dtype; None if it has been added."""
        contracted = self.context.contracted
        if self.bias is None or contracted.size == 1:
            return None
        bias = self.bias.detach()
        if self.output_split == FEATURES:
            bias = bias.unflatten(-1, (contracted.size, -1))[..., contracted.index, :]
        return bias.to(out.dtype)


def start_gather(x: torch.Tensor, axis: Axis, dim: int, parameter: nn.Parameter | None = None) -> Pending:
    """Start to concatenate the parts of ``x`` along a dim that the axis splits."""
    if dim == TOKENS:
        return axis.start_all_gather(x, parameter=parameter)
    pending = axis.start_all_gather(x.unsqueeze(0), parameter=parameter)
    return pending.then(lambda parts: parts.movedim(0, -2).flatten(-2))


def start_scatter(full: torch.Tensor, axis: Axis, dim: int, parameter: nn.Parameter | None = None) -> Pending:
    """Start to sum ``full`` over the axis; each rank receives its part along a dim."""
    if dim == TOKENS:
        return axis.start_reduce_scatter(full, parameter=parameter)
    parts = full.unflatten(-1, (axis.size, -1)).movedim(-2, 0)
    return axis.start_reduce_scatter(parts, parameter=parameter).then(lambda part: part.squeeze(0))


def placeholder(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of no memory in the place of a gradient that a ``_Call`` has in flight."""
    return _zero(like.dtype, like.device).expand(shape)


@functools.cache
def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device)


class InputFunction(torch.autograd.Function):
    """Keeps the input for the product's backward. Its own backward waits for the sum of the input's gradient.

    Under activation checkpointing a recomputation ends with the last tensor that was kept. Kept here, before the
    product, the last layer's product and its sum over an axis are not computed again only to be discarded.
    """

    @staticmethod
    def forward(ctx, x, call: _Call):
        if call.input_split is None and call.input_again is None:
            ctx.save_for_backward(x)
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_x):
        return ctx.call.take("d_input") if ctx.call.d_input else d_x, None


class GatheredInputFunction(torch.autograd.Function):
    """A part of the input → the whole, which it keeps for the product's backward."""

    @staticmethod
    def forward(ctx, part, whole):
        ctx.save_for_backward(whole)
        ctx.shape = part.shape
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_whole):
        return placeholder(d_whole, ctx.shape), None  # InputFunction has the gradient


class ProductFunction(torch.autograd.Function):
    """``O = I·W + b`` with I [B, K], W gathered over z, O [B, N]: waits for what ``start_product`` began.

    W is not kept here: the weight stream decides whether it is gathered again. The node before keeps I, if I has a
    gradient. Of an output that is to be scattered only the shape is returned: ScatteredOutputFunction waits for it.
    """

    @staticmethod
    def forward(ctx, x_BK, weight, bias, call: _Call):
        ctx.keeper = x_BK.grad_fn
        if ctx.keeper is None and call.input_again is None:
            ctx.save_for_backward(x_BK)
        ctx.call = call
        if call.output_split is not None:
            return placeholder(x_BK, call.shape)
        out = call.take("output")
        if (bias := call.local_bias(out)) is not None:  # after the sum: once, not once for each rank of the axis
            out += bias
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out_BN):
        call, d_x, of_weight, d_bias = ctx.call, None, None, None
        if call.input_again is None:
            (x_BK,) = (ctx.keeper or ctx).saved_tensors
        else:
            x_BK, call.input_again = call.input_again(), None  # what it was computed from is no longer needed
        context, weights = call.context, call.context.weights
        if call.d_output:
            d_out_BN = call.take("d_output")
        d_out_BN = d_out_BN.detach().contiguous()  # without a graph, since a delayed weight gradient keeps it
        if ctx.needs_input_grad[0]:
            d_x = context.operation.input_gradient(d_out_BN, weights.gather_for_backward(call.weight), x_BK)
            if call.input_split is None:
                call.d_input = context.produced.start_all_reduce(d_x, parameter=call.weight)
            else:
                call.d_input = start_scatter(d_x, context.produced, call.input_split, call.weight)
                d_x = placeholder(d_x, d_x.shape)
            if not weights.overlap.all_reduce:
                call.d_input.wait()
        if ctx.needs_input_grad[1]:

            def d_weight(earlier: torch.Tensor | None) -> torch.Tensor:
                return context.operation.weight_gradient(d_out_BN, x_BK, call.weight, earlier)

            of_weight = weights.add_gradient(call.weight, d_weight)
        if call.bias is not None and ctx.needs_input_grad[2]:
            rows = d_out_BN.reshape(-1, math.prod(call.bias.shape))
            d_bias = rows.sum(0, dtype=call.bias.dtype).view(call.bias.shape)
        return d_x, of_weight, d_bias, None


class ScatteredOutputFunction(torch.autograd.Function):
    """Waits for this rank's part of the sum of the products. Its backward starts to gather the gradient's parts."""

    @staticmethod
    def forward(ctx, shape_of_product, call: _Call):
        ctx.call = call
        out = call.take("output")
        return out if (bias := call.local_bias(out)) is None else out + bias

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        call = ctx.call
        call.d_output = start_gather(d_out, call.context.contracted, call.output_split, call.weight)
        return placeholder(d_out, call.shape), None


async def multiply(
    given: torch.Tensor | Recomputable, weight: nn.Parameter, bias: torch.Tensor | None, context: ProductContext
) -> torch.Tensor:
    """Return the output of a layer for one chunk, of which the input [B, K] is given.

    ``bias`` gets its gradient here if it requires one.
    """
    x_BK, again = given if isinstance(given, Recomputable) else (given, None)
    splits = context.splits()
    # An input that is gathered is kept: it would have to be gathered again.
    call = _Call(context, weight, bias, *splits, again if splits[0] is None else None)
    x_BK = InputFunction.apply(x_BK, call)
    if call.input_split is not None:
        pending = start_gather(x_BK.detach(), context.produced, call.input_split, weight)
        await Turn()
        x_BK = GatheredInputFunction.apply(x_BK, pending.wait())
    elif call.output_split is not None:
        await Turn()  # the product's node follows at once: after the inputs' nodes of all chunks
    if context.weights.recomputation_ends:
        await Turn()  # the other chunks keep their inputs, and the last one ends the recomputation
    call.start_product(x_BK.detach())
    if call.output_split is None:
        await Turn()
        return ProductFunction.apply(x_BK, weight, bias, call)
    shape_of_product = ProductFunction.apply(x_BK, weight, bias, call)
    await Turn()
    return ScatteredOutputFunction.apply(shape_of_product, call)
