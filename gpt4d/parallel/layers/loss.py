"""Cross-entropy of logits whose vocabulary x splits: no rank ever holds a full row.

Only one copy of the logits exists, in the precision in which they were computed. Forward and backward work on blocks of
rows in float32, or float64 for float64 logits; the backward computes the softmax again from two numbers per token and
writes the gradient in the place of the logits.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from gpt4d.parallel import limits
from gpt4d.parallel.collectives import MAX, Axis
from gpt4d.parallel.fusion import fused


class SavedLoss(NamedTuple):
    """Tensors that the gradient of a loss needs besides the logits, with one element per token each."""

    largest: torch.Tensor  # logit
    normalizer: torch.Tensor  # sum of exponentials relative to that of the largest logit
    local: torch.Tensor  # column of the target on this rank; 0 where another rank has it
    elsewhere: torch.Tensor


def forward_loss(
    logits: torch.Tensor, targets: torch.Tensor, vocabulary: int, axis: Axis
) -> tuple[torch.Tensor, SavedLoss]:
    """Return the sum of the losses of logits [tokens, vocabulary over ``axis``], and what its gradient needs.

    Columns from ``vocabulary`` on are padding.
    """
    first, columns = axis.index * logits.shape[-1], _columns(logits, vocabulary, axis)
    wide = torch.promote_types(logits.dtype, torch.float32)
    largest = logits.new_full(targets.shape, -torch.inf, dtype=wide)
    if columns:
        largest.copy_(logits[:, :columns].amax(-1))
    largest = axis.all_reduce(largest, MAX)
    local = targets - first
    elsewhere = (local < 0) | (local >= logits.shape[-1])
    local = local.masked_fill_(elsewhere, 0)
    sums = torch.stack((largest, logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).to(wide) - largest))
    sums[1].masked_fill_(elsewhere, 0)
    for rows in _blocks(logits):
        sums[0, rows] = _sum_of_exponentials(logits[rows, :columns], largest[rows])
    normalizer, target_logits = axis.all_reduce(sums)
    return (normalizer.log() - target_logits).sum(), SavedLoss(largest, normalizer, local, elsewhere)


def write_gradient(
    logits: torch.Tensor, saved: SavedLoss, vocabulary: int, axis: Axis, d_loss: torch.Tensor
) -> torch.Tensor:
    """Replace ``logits`` by their gradient and return them. ``d_loss``: the gradient of the loss, a scalar."""
    columns = _columns(logits, vocabulary, axis)
    if not columns:
        return logits.zero_()
    scale, target = d_loss / saved.normalizer, (torch.arange(len(logits), device=logits.device), saved.local)
    at_target = (logits[target] - saved.largest).exp_().mul_(scale)
    at_target.sub_(d_loss.expand_as(scale).masked_fill(saved.elsewhere, 0))
    for rows in _blocks(logits):
        _write_softmax(logits[rows, :columns], saved.largest[rows], scale[rows])
    logits[:, columns:] = 0
    logits[target] = at_target.to(logits.dtype)  # on a CPU, scatter_ would convert all logits to float32 and back
    return logits


def _columns(logits: torch.Tensor, vocabulary: int, axis: Axis) -> int:
    """Return the number of columns that this rank has of the vocabulary, without padding."""
    return max(0, min(logits.shape[-1], vocabulary - axis.index * logits.shape[-1]))


class CrossEntropyFunction(torch.autograd.Function):
    """Sum over the tokens of ``log Σ exp(logits) - logit of the target``, in float32, or float64 for float64 logits."""

    @staticmethod
    def forward(ctx, logits, targets, vocabulary: int, axis: Axis):
        loss, saved = forward_loss(logits, targets, vocabulary, axis)
        ctx.save_for_backward(logits, *saved)
        ctx.vocabulary, ctx.axis = vocabulary, axis
        return loss

    @staticmethod
    def backward(ctx, d_loss):
        # In place, because this is the largest tensor of a step; autograd detects a second use.
        logits, *saved = ctx.saved_tensors
        return write_gradient(logits, SavedLoss(*saved), ctx.vocabulary, ctx.axis, d_loss), None, None, None


def _shifted(logits: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Return logits, in the dtype of ``largest``, relative to those."""
    if logits.dtype == largest.dtype:
        return logits - largest[:, None]
    return logits.to(largest.dtype).sub_(largest[:, None])  # a CPU subtracts two dtypes in twice the time


@fused
def _sum_of_exponentials(logits: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    return _shifted(logits, largest).exp_().sum(-1)


@fused
def _write_softmax(logits: torch.Tensor, largest: torch.Tensor, scale: torch.Tensor) -> None:
    """Replace logits by their exponentials, relative to those of the largest ones, times ``scale``."""
    if logits.dtype == largest.dtype:
        logits.sub_(largest[:, None]).exp_().mul_(scale[:, None])
    else:
        logits.copy_(_shifted(logits, largest).exp_().mul_(scale[:, None]))


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    """Yield slices of consecutive rows, so that their parts of ``logits`` [rows, columns] are blocks."""
    rows = limits.block_rows(logits.shape[-1])
    for start in range(0, len(logits), rows):
        yield slice(start, start + rows)


def cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor, vocabulary: int, axis: Axis) -> torch.Tensor:
    """Return the loss summed over this rank's tokens: a scalar, the same on every rank of ``axis``.

    ``logits`` [..., padded vocabulary over ``axis``], ``targets`` [...] global ids. Columns from ``vocabulary`` on are
    padding and are ignored. The backward overwrites ``logits`` with their gradient.
    """
    return CrossEntropyFunction.apply(logits.flatten(0, -2), targets.flatten(), vocabulary, axis)
