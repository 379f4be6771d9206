"""Products with sharded weights (4D paper, Algorithm 1), which linear layers and convolutions share.

Shapes: B: any number of batch dims. K and N: this rank's input features and output features.

A call has one node in the autograd graph for the product, one for the input if its gradient is reduced, and one for the
output if it is scattered. Each collective starts in one node and ends in another, and other chunks compute in between.
The product's node is created when its all-reduce is complete, after the products of the remaining chunks. The backward
runs nodes in the reverse order. The all-reduce of an input's gradient starts in the product's node and ends in the
input's node, so it also overlaps with the computation of other chunks.

With ``train.activation_checkpointing=selective``, a product does not save an input that an elementwise function or a
norm computed. The backward of the product recomputes it (``Recomputable``): the function takes little time, and its own
backward saves the function's input anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gpt4d.parallel.comm.pending import MeshAxis, Pending
from gpt4d.parallel.context import Pass
from gpt4d.parallel.engine.interleave import YieldPoint
from gpt4d.parallel.engine.prefetch import BACKWARD
from gpt4d.parallel.kernels import Function, Tensor, kernel
from gpt4d.parallel.layers import sharding
from gpt4d.parallel.layers.layer import BoundLayer
from gpt4d.parallel.lazy import torch

if TYPE_CHECKING:
    from gpt4d.parallel.layers.lora import Adapter
    from gpt4d.parallel.weights import Weights


class Recomputable(NamedTuple):
    """A tensor, and the function that recomputes it without recording a graph."""

    value: Tensor
    again: Callable[[], Tensor]


Input = Tensor | Recomputable  # the input of a product


def recomputable(layer: BoundLayer, function: Callable[[Tensor], Tensor], x: Tensor) -> Input:
    """Return ``function(x)`` as the input of a product, which does not save the input if it is recomputable.

    Args:
        layer: the layer of the product, whose pass decides whether the input is recomputable.
        function: an elementwise function.
        x: the function's input, which the function saves for its backward.
    """
    out = function(x)
    return Recomputable(out, partial(function, x.detach())) if layer.current_pass.recompute_inputs else out


def mapped(given: Input, function: Callable[[Tensor], Tensor]) -> Input:
    """Return ``function`` of a tensor, or of a recomputable tensor, which stays recomputable."""
    if not isinstance(given, Recomputable):
        return function(given)
    return Recomputable(function(given.value), lambda: function(given.again()))


TOKENS, FEATURES = 0, -1  # the dims of an activation that an axis may split


@kernel(lambda x, like: x if x.dtype == like.dtype else x.like(dtype=like.dtype), converts=True, unread=("like",))
def cast(x, like):
    """Return ``x`` in the dtype of ``like``."""
    return x if x.dtype == like.dtype else x.to(like.dtype)  # torch takes longer to return ``x``


@kernel(lambda x, dtype: x if x.dtype == dtype else x.like(dtype=dtype), converts=True)
def cast_to(x, dtype):
    """Return ``x`` in a dtype."""
    return x if x.dtype == dtype else x.to(dtype)


@kernel(lambda out, *_: out)
def add_bias_(out, bias):
    """Add a bias to an output in place."""
    return out.add_(bias)


@kernel(lambda out, *_: out.like())
def add_bias(out, bias):
    """Return an output with a bias."""
    return out + bias


@kernel(lambda earlier, *_: earlier)
def add_gradient_(earlier, gradient):
    """Add a weight's gradient to the accumulated gradient in place."""
    return earlier.add_(gradient)


@kernel(lambda d_out_BN, bias: bias.like(), unread=("bias",))
def bias_gradient(d_out_BN, bias):
    """Return the sum of an output's gradient over the batch, in the shape and dtype of the bias."""
    return d_out_BN.flatten(0, -1 - bias.dim()).sum(0, dtype=bias.dtype)


@kernel(
    lambda bias, like, parts, *_: bias.like((*bias.shape[:-1], bias.shape[-1] // parts), like.dtype), unread=("like",)
)
def local_bias(bias, like, parts: int, index: int):
    """Return slice ``index`` of ``parts`` equal slices of a bias, in the dtype of ``like``."""
    if parts > 1:
        bias = bias.unflatten(-1, (parts, -1))[..., index, :]
    return bias.to(like.dtype)


@kernel(lambda x, parts: x.like((parts, *x.shape[:-1], x.shape[-1] // parts)))
def parts_first(x, parts: int):
    """Return features [..., parts · n] as [parts, ..., n]."""
    return x.unflatten(-1, (parts, -1)).movedim(-2, 0).contiguous()


@kernel(lambda x: x.like((*x.shape[1:-1], x.shape[0] * x.shape[-1])))
def parts_last(x):
    """Return [parts, ..., n] as features [..., parts · n]."""
    return x.movedim(0, -2).flatten(-2)


@kernel(lambda like, shape: like.like(shape), free=True)
def placeholder(like, shape: tuple[int, ...]):
    """Return a tensor without memory that stands for a tensor that a ``ProductCall`` has in flight."""
    return _zero(like.dtype, like.device).expand(shape)


@cache
def _zero(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=device)


class Operation(Protocol):
    """The computation of a layer on one rank: bilinear in the input and the gathered weight, features last."""

    def forward(self, x_BK: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output [B, N], contiguous. ``bias`` [N] has the dtype of the weight."""

    def input_gradient(self, d_out_BN: Tensor, weight: Tensor, x_BK: Tensor) -> Tensor:
        """Return the gradient of ``x_BK``, contiguous."""

    def weight_gradient(self, d_out_BN: Tensor, x_BK: Tensor, weight: Tensor, added_to: Tensor | None) -> Tensor:
        """Return the gradient of the gathered weight, contiguous, in the dtype and dim order of its shard ``weight``.

        With ``added_to``, an accumulated gradient, the gradient is added to it in place and the sum is returned.
        """


@dataclass(frozen=True)
class ProductContext:
    """The weights of the stage, the axes that split the weight's two dims, and additional splits."""

    weights: Weights
    operation: Operation
    contracted: MeshAxis  # splits the input's features; the output is all-reduced over this axis
    produced: MeshAxis  # splits the output's features; the input's gradient is all-reduced over this axis
    transposed: bool = False  # the output, not the input, belongs to the residual stream
    inner_split: int | None = None  # dim of the inner activation that the residual stream's axis splits too
    # The caller exchanges the input's gradient and computes the weight's gradient during the exchange.
    later: list[Callable[[], None]] | None = None
    # Its product is added to the weight's product (gpt4d.parallel.layers.lora); the input must have a gradient.
    adapter: Adapter | None = None

    @cached_property
    def splits(self) -> tuple[tuple[int | None, int | None], ...]:
        """The dim of the input that ``produced`` splits and the dim of the output that ``contracted`` splits.

        The layer all-gathers such an input and reduce-scatters such an output. None: the axis splits no such dim. The
        first pair is for a pass in which x does not split the tokens, and the second pair for a pass in which it does.
        """
        sides = [sharding.sides(stream, self.inner_split, self.transposed) for stream in (None, TOKENS)]
        reduced, summed = self.produced.size > 1, self.contracted.size > 1
        return tuple((before if reduced else None, after if summed else None) for before, after in sides)


@dataclass(slots=True)
class ProductCall:
    """One call of a layer: the collectives that one node starts and another node waits for."""

    context: ProductContext
    weight: Tensor  # the parameter itself, because gradients accumulate here; autograd passes a view
    bias: Tensor | None
    input_split: int | None
    output_split: int | None
    input_again: Callable[[], Tensor] | None  # recomputes an input that is not saved
    separate_input: bool  # the input has its own node, which saves it and waits for its gradient
    output: Any = None  # all-reduce or reduce-scatter of the product
    shape: tuple[int, ...] = ()  # shape of the product
    d_output: Pending | None = None  # all-gather of the gradient of a scattered output
    d_input: Pending | None = None  # all-reduce or reduce-scatter of the input's gradient

    def take_output(self) -> Tensor:
        """Wait for the output, without the bias, and drop the reference to it."""
        pending, self.output = self.output, None
        return pending.wait()

    def start_product(self, x_BK: Tensor) -> None:
        """Compute the product, and start its all-reduce or reduce-scatter over the contracted axis."""
        context, contracted = self.context, self.context.contracted
        w = context.weights.gather(self.weight)
        bias = None if self.bias is None or contracted.size > 1 else cast(self.bias.detach(), x_BK)
        out = context.operation.forward(x_BK, w, bias)
        if context.adapter is not None:
            out = context.adapter.add_product_(out, x_BK)
        self.shape = out.shape
        if self.output_split is None:
            self.output = contracted.start_all_reduce(out, parameter=self.weight)
        else:
            self.output = start_scatter(out, contracted, self.output_split, self.weight)

    def start_input_gradient(self, d_x: Tensor) -> Tensor:
        """Start the all-reduce or reduce-scatter of the input's gradient; return the gradient or a placeholder."""
        context = self.context
        if self.input_split is None:
            self.d_input = context.produced.start_all_reduce(d_x, parameter=self.weight)
        else:
            self.d_input = start_scatter(d_x, context.produced, self.input_split, self.weight)
            d_x = placeholder(d_x, d_x.shape)
        if not context.weights.context.overlap.all_reduce:
            self.d_input.wait()
        return d_x

    def local_bias(self, out: Tensor) -> Tensor | None:
        """Return the bias to add after the collective, in the dtype of ``out``; None if the product contains it."""
        contracted = self.context.contracted
        if self.bias is None or contracted.size == 1:
            return None
        parts = contracted.size if self.output_split == FEATURES else 1
        return local_bias(self.bias.detach(), out, parts, contracted.index)


def start_gather(x: Tensor, axis: MeshAxis, dim: int, parameter: Tensor | None = None) -> Pending:
    """Start the all-gather of ``x`` along the dim that the axis splits."""
    if dim == TOKENS:
        return axis.start_all_gather(x, parameter=parameter)
    return axis.start_all_gather(x.unsqueeze(0), parameter=parameter).then(parts_last)


def start_scatter(full: Tensor, axis: MeshAxis, dim: int, parameter: Tensor | None = None) -> Pending:
    """Start the reduce-scatter of ``full`` along the dim that the axis splits."""
    if dim == TOKENS:
        return axis.start_reduce_scatter(full, parameter=parameter)
    parts = parts_first(full, axis.size)
    return axis.start_reduce_scatter(parts, parameter=parameter).then(lambda part: part.squeeze(0))


class InputFunction(Function):
    """Saves the input for the product's backward. Its own backward waits for the all-reduced gradient of the input.

    Under activation checkpointing, a recomputation stops at the last saved tensor. The input is saved here, before the
    product, so that the last product and its all-reduce are not recomputed. Without activation checkpointing, an input
    whose gradient is not reduced has no such node, and the product's node saves it.
    """

    @staticmethod
    def forward(ctx, x, call: ProductCall):
        if call.input_split is None and call.input_again is None:
            ctx.save_for_backward(x)
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d_x):
        reduced, ctx.call.d_input = ctx.call.d_input, None
        return d_x if reduced is None else reduced.wait(), None


class GatheredInputFunction(Function):
    """A shard of the input → the gathered input, which it saves for the product's backward."""

    @staticmethod
    def forward(ctx, shard, gathered):
        ctx.save_for_backward(gathered)
        ctx.shape = shard.shape
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx, d_gathered):
        return placeholder(d_gathered, ctx.shape), None  # InputFunction returns the gradient


class ProductFunction(Function):
    """``O = I·W + b`` with I [B, K], W gathered over z, O [B, N]: waits for the product that ``start_product`` started.

    W is not saved: the sharded weights decide whether the backward gathers it again. If I has a separate node and
    requires a gradient, that node has saved it. If the output is scattered, the result is a placeholder, and
    ScatteredOutputFunction waits for the output.
    """

    @staticmethod
    def forward(ctx, x_BK, weight, bias, call: ProductCall):
        ctx.keeper = x_BK.grad_fn if call.separate_input else None
        if ctx.keeper is None and call.input_again is None:
            ctx.save_for_backward(x_BK)
        ctx.call = call
        if call.output_split is not None:
            return placeholder(x_BK, call.shape)
        out = call.take_output()
        if (bias := call.local_bias(out)) is not None:  # after the all-reduce, so that it is added once
            out = add_bias_(out, bias)
        return out

    @staticmethod
    def backward(ctx, d_out_BN):
        call, d_x, of_weight, d_bias = ctx.call, None, None, None
        if call.input_again is None:
            (x_BK,) = (ctx.keeper or ctx).saved_tensors
        else:
            x_BK, call.input_again = call.input_again(), None  # releases the tensors that it was computed from
        context, weights = call.context, call.context.weights
        if call.d_output is not None:
            d_out_BN, call.d_output = call.d_output.wait(), None
        d_out_BN = d_out_BN.detach().contiguous()  # detached, because a delayed weight gradient retains it
        if ctx.needs_input_grad[0]:
            d_x = context.operation.input_gradient(d_out_BN, weights.gather(call.weight, BACKWARD), x_BK)
            if context.adapter is not None:
                d_x = context.adapter.add_gradients(d_x, d_out_BN, x_BK)
            if context.produced.size > 1:
                d_x = call.start_input_gradient(d_x)
        if ctx.needs_input_grad[1] and weights.trains(call.weight):

            def d_weight(earlier: Tensor | None) -> Tensor:
                return context.operation.weight_gradient(d_out_BN, x_BK, call.weight, earlier)

            if context.later is None:
                of_weight = weights.add_gradient(call.weight, d_weight)
            else:
                context.later.append(partial(weights.add_gradient, call.weight, d_weight))
        if call.bias is not None and ctx.needs_input_grad[2]:
            d_bias = bias_gradient(d_out_BN, call.bias)
        return d_x, of_weight, d_bias, None


class ScatteredOutputFunction(Function):
    """Waits for the reduce-scattered output. Its backward starts the all-gather of the output's gradient."""

    @staticmethod
    def forward(ctx, shape_of_product, call: ProductCall):
        ctx.call = call
        out = call.take_output()
        return out if (bias := call.local_bias(out)) is None else add_bias(out, bias)

    @staticmethod
    def backward(ctx, d_out):
        call = ctx.call
        call.d_output = start_gather(d_out, call.context.contracted, call.output_split, call.weight)
        return placeholder(d_out, call.shape), None


async def multiply(given: Input, weight: Tensor, bias: Tensor | None, context: ProductContext, current: Pass) -> Tensor:
    """Return the output [B, N] of a layer for one chunk.

    Args:
        given: the input [B, K], or a Recomputable of it.
        weight: the layer's weight, as its parameter.
        bias: the layer's bias. Its gradient is computed here if it requires one.
        context: the layer's product context.
        current: the pass that computes it.
    """
    x_BK, again = given if isinstance(given, Recomputable) else (given, None)
    input_split, output_split = context.splits[current.splits_tokens]
    if input_split is not None:
        again = None  # a gathered input is saved, because its recomputation needs a second all-gather
    separate_input = context.produced.size > 1 or current.recompute
    call = ProductCall(context, weight, bias, input_split, output_split, again, separate_input)
    if separate_input:
        x_BK = InputFunction.apply(x_BK, call)
    if input_split is not None:
        pending = start_gather(x_BK.detach(), context.produced, input_split, weight)
        await YieldPoint()
        x_BK = GatheredInputFunction.apply(x_BK, pending.wait())
    elif output_split is not None:
        await YieldPoint()  # the product's node follows immediately, so all chunks must create their input nodes first
    if current.num_chunks > 1 and context.weights.schedule.recomputation_ends:
        await YieldPoint()  # the remaining chunks save their inputs, and the last chunk ends the recomputation
    call.start_product(x_BK.detach())
    if output_split is not None:
        shape_of_product = ProductFunction.apply(x_BK, weight, bias, call)
        await YieldPoint()
        return ScatteredOutputFunction.apply(shape_of_product, call)
    if context.contracted.size > 1 or current.num_chunks > 1:
        await YieldPoint()
    return ProductFunction.apply(x_BK, weight, bias, call)
