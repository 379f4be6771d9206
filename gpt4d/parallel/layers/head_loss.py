"""Head and cross-entropy together, one part of the tokens after another: the logits of all tokens never exist.

Shapes: T tokens, H hidden features over y. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpt4d.parallel.chunks import join
from gpt4d.parallel.function import Function, kernel
from gpt4d.parallel.layers.loss import forward_loss, write_gradient
from gpt4d.parallel.layers.product import TOKENS, ProductContext, start_gather, start_scatter


@kernel(unread=("loss",))
def one_like(loss):
    """Return 1, the gradient of a loss by itself."""
    return loss.like()


@kernel
def total(*losses):
    """Return the sum of losses."""
    return losses[0].like()


@kernel
def scale_(gradient, d_loss):
    """Multiply a gradient by that of the loss, a scalar, in place."""
    return gradient


@kernel
def add_scaled_(earlier, gradient, d_loss):
    """Add ``gradient``, times that of the loss, to an earlier sum of gradients in place."""
    return earlier


@dataclass
class _Call:
    """One call: its arguments as for ``head_loss``, and the gradients for a loss whose own gradient is 1."""

    weight: Any  # the parameter, not autograd's view of it: gradients must land here
    targets_T: Any
    vocabulary: int
    context: ProductContext
    num_chunks: int
    split: bool  # x splits the tokens of the input
    with_gradients: bool
    gradients: tuple[Any, Any] | None = None

    def run(self, x_TH: Any) -> Any:
        """Return the loss and compute its gradients, part by part."""
        operation, weights, x_axis = self.context.operation, self.context.weights, self.context.produced
        # If the tokens are split, all parts of the sum are scattered at once.
        summed = weights.grid.axis(None) if self.split else x_axis
        if self.split:
            x_TH = start_gather(x_TH, x_axis, TOKENS, self.weight).wait()
        gathered = weights.gather(self.weight)
        losses, d_parts, d_weight = list[Any](), list[Any](), None
        parts = zip(x_TH.chunk(self.num_chunks), self.targets_T.chunk(self.num_chunks), strict=True)
        for part_TH, targets in parts:
            logits = operation.forward(part_TH, gathered, None)
            logits = self.context.contracted.all_reduce(logits, parameter=self.weight)
            loss, saved = forward_loss(logits, targets, self.vocabulary, x_axis)
            losses.append(loss)
            if self.with_gradients:
                logits = write_gradient(logits, saved, self.vocabulary, x_axis, one_like(loss))
                d_part = operation.input_gradient(logits, gathered, part_TH)
                pending = summed.start_all_reduce(d_part, parameter=self.weight)
                if not weights.overlap.all_reduce:
                    pending.wait()
                d_weight = operation.weight_gradient(logits, part_TH, self.weight, d_weight)
                d_parts.append(pending.wait())
            del logits, saved  # before those of the next part exist
        if d_weight is not None:
            d_x = join(*d_parts)
            if self.split:
                d_x = start_scatter(d_x, x_axis, TOKENS, self.weight).wait()
            self.gradients = d_x, d_weight
        return total(*losses)


class HeadLossFunction(Function):
    """The loss of ``x @ weight``. The forward computes the gradients too, while the logits exist.

    They are linear in the gradient of the loss, by which the backward multiplies them: no product is computed twice.
    """

    @staticmethod
    def forward(ctx, x_TH, weight, call: _Call):
        ctx.call = call
        return call.run(x_TH)

    @staticmethod
    def backward(ctx, d_loss):
        call = ctx.call
        assert call.gradients is not None
        (d_x, d_weight), call.gradients = call.gradients, None

        def scaled(earlier: Any | None) -> Any:
            return scale_(d_weight, d_loss) if earlier is None else add_scaled_(earlier, d_weight, d_loss)

        of_weight = call.context.weights.add_gradient(call.weight, scaled)
        return scale_(d_x, d_loss), of_weight, None


def head_loss(x_TH: Any, weight: Any, targets_T: Any, vocabulary: int, context: ProductContext, num_chunks: int) -> Any:
    """Return the cross-entropy of logits, summed over this rank's tokens, as ``cross_entropy_sum`` does.

    Args:
        x_TH: input of the head; x may split its tokens.
        weight: of the head.
        targets_T: ids of the tokens to predict, in the order of ``Tokens.gathered``.
        vocabulary: number of tokens; further columns of the logits are padding.
        context: of the head.
        num_chunks: parts of the tokens, one after another.
    """
    split = context.splits()[0] is not None
    call = _Call(weight, targets_T, vocabulary, context, num_chunks, split, context.weights.records_gradients)
    return HeadLossFunction.apply(x_TH, weight, call)
