"""Head and cross-entropy together, one part of the tokens after another: the logits of all tokens never exist.

Shapes: T tokens, H hidden features over y.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from gpt4d.parallel.collectives import Pending
from gpt4d.parallel.layers.loss import forward_loss, write_gradient
from gpt4d.parallel.layers.product import TOKENS, ProductContext, start_gather, start_scatter


@dataclass
class _Call:
    """One call: its arguments as for ``head_loss``, and the gradients for a loss whose own gradient is 1."""

    weight: nn.Parameter  # not autograd's view of it: gradients must land here
    targets_T: torch.Tensor
    vocabulary: int
    context: ProductContext
    num_chunks: int
    split: bool  # x splits the tokens of the input
    with_gradients: bool
    gradients: tuple[torch.Tensor, torch.Tensor] | None = None

    def run(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Return the loss and compute its gradients, part by part."""
        operation, weights, x_axis = self.context.operation, self.context.weights, self.context.produced
        if self.split:
            x_TH = start_gather(x_TH, x_axis, TOKENS, self.weight).wait()
        gathered = weights.gather(self.weight)
        losses, d_parts, d_weight = list[torch.Tensor](), list[torch.Tensor](), None
        parts = zip(x_TH.chunk(self.num_chunks), self.targets_T.chunk(self.num_chunks), strict=True)
        for part_TH, targets in parts:
            logits = operation.forward(part_TH, gathered, None)
            logits = self.context.contracted.all_reduce(logits, parameter=self.weight)
            loss, saved = forward_loss(logits, targets, self.vocabulary, x_axis)
            losses.append(loss)
            if not self.with_gradients:
                continue
            d_logits = write_gradient(logits, saved, self.vocabulary, x_axis, torch.ones_like(loss))
            d_part = operation.input_gradient(d_logits, gathered, part_TH)
            pending = Pending(d_part)  # if the tokens are split, all parts of the sum are scattered at once
            if not self.split:
                pending = x_axis.start_all_reduce(d_part, parameter=self.weight)
            if not weights.overlap.all_reduce:
                pending.wait()
            d_weight = operation.weight_gradient(d_logits, part_TH, self.weight, d_weight)
            d_parts.append(pending.wait())
        if d_weight is not None:
            d_x = torch.cat(d_parts)
            if self.split:
                d_x = start_scatter(d_x, x_axis, TOKENS, self.weight).wait()
            self.gradients = d_x, d_weight
        return torch.stack(losses).sum()


class HeadLossFunction(torch.autograd.Function):
    """The loss of ``x @ weight``. The forward computes the gradients too, while the logits exist.

    They are linear in the gradient of the loss, by which the backward multiplies them: no product is computed twice.
    """

    @staticmethod
    def forward(ctx, x_TH, weight, call: _Call):
        ctx.call = call
        return call.run(x_TH)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss):
        call = ctx.call
        (d_x, d_weight), call.gradients = call.gradients, None

        def scaled(earlier: torch.Tensor | None) -> torch.Tensor:
            return d_weight.mul_(d_loss) if earlier is None else earlier.addcmul_(d_weight, d_loss)

        of_weight = call.context.weights.add_gradient(call.weight, scaled)
        return d_x.mul_(d_loss), of_weight, None


def head_loss(
    x_TH: torch.Tensor,
    weight: nn.Parameter,
    targets_T: torch.Tensor,
    vocabulary: int,
    context: ProductContext,
    num_chunks: int,
) -> torch.Tensor:
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
    call = _Call(weight, targets_T, vocabulary, context, num_chunks, split, torch.is_grad_enabled())
    return HeadLossFunction.apply(x_TH, weight, call)
