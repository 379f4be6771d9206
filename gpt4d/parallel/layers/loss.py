"""Cross-entropy of logits whose vocabulary x splits: no rank ever holds a full row."""

import torch
import torch.distributed as dist

from gpt4d.parallel import collectives
from gpt4d.parallel.grid import Axis


class CrossEntropyFunction(torch.autograd.Function):
    """Sum over the tokens of ``log Σ exp(logits) - logit of the target``, in float32, or float64 for float64 logits."""

    @staticmethod
    def forward(ctx, logits, targets, vocabulary: int, axis: Axis):
        first = axis.index * logits.shape[-1]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        padding = max(0, min(logits.shape[-1], vocabulary - first))  # first column of padding on this rank
        largest = wide.new_full(targets.shape, -torch.inf)
        if padding:
            largest = wide[:, :padding].amax(-1)
        largest = collectives.all_reduce(largest, axis, dist.ReduceOp.MAX)
        shifted = wide - largest.unsqueeze(-1)
        shifted[:, padding:].fill_(-torch.inf)
        local = targets - first
        elsewhere = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill_(elsewhere, 0).unsqueeze(-1)
        target_logits = shifted.gather(-1, local).squeeze(-1).masked_fill_(elsewhere, 0)
        exponentials = shifted.exp_()
        sums = torch.stack((exponentials.sum(-1), target_logits))
        normalizer, target_logits = collectives.all_reduce(sums, axis)
        ctx.save_for_backward(exponentials.div_(normalizer.unsqueeze(-1)), local, elsewhere)
        ctx.dtype = logits.dtype
        return (normalizer.log() - target_logits).sum()

    @staticmethod
    def backward(ctx, d_loss):
        probabilities, local, elsewhere = ctx.saved_tensors
        # In place, because this is the largest tensor of a step; autograd detects a second use.
        d_logits = probabilities.mul_(d_loss)
        d_target = d_loss.expand(local.shape).masked_fill(elsewhere.unsqueeze(-1), 0)
        return d_logits.scatter_add_(-1, local, -d_target).to(ctx.dtype), None, None, None


def cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor, vocabulary: int, axis: Axis) -> torch.Tensor:
    """Return the loss summed over this rank's tokens: a scalar, the same on every rank of ``axis``.

    ``logits`` [..., padded vocabulary over ``axis``], ``targets`` [...] global ids. Columns from ``vocabulary`` on are
    padding and are ignored.
    """
    return CrossEntropyFunction.apply(logits.flatten(0, -2), targets.flatten(), vocabulary, axis)
