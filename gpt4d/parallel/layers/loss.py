"""Cross-entropy of logits whose vocabulary x splits, so that no rank holds a full row.

Only one copy of the logits exists, in the precision in which they were computed. The backward recomputes the softmax
from two numbers per token and overwrites the logits with their gradient.

``head_loss`` computes head and cross-entropy together in chunks of tokens. The logits of all tokens never exist at the
same time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpt4d.parallel import compile
from gpt4d.parallel.comm.pending import MAX, MeshAxis
from gpt4d.parallel.compile import fused
from gpt4d.parallel.context import Pass
from gpt4d.parallel.engine.interleave import join
from gpt4d.parallel.kernels import (
    Function,
    Tensor,
    TorchFunction,
    elementwise,
    kernel,
    num_blocks,
    planned_kernel,
    wide_dtype,
)
from gpt4d.parallel.layers.product import TOKENS, ProductContext, start_gather, start_scatter
from gpt4d.parallel.lazy import torch


class SavedLoss(NamedTuple):
    """Tensors that the gradient of a loss needs in addition to the logits. Each has one element per token."""

    largest: Tensor  # the largest logit
    normalizer: Tensor  # Σ exp(logit - largest logit)
    local: Tensor  # column of the target on this rank; 0 if another rank has the target
    elsewhere: Tensor  # whether another rank has the target


def _num_blocks(logits, *_) -> int:
    return num_blocks(logits, logits.device.compiled)


@kernel(lambda logits, *_: logits.like(logits.shape[:1], wide_dtype(logits)))
def largest_logits(logits, columns: int):
    """Return the largest of the first ``columns`` logits of each row, in float32 or float64."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if not columns:
        return torch.full(logits.shape[:1], -torch.inf, dtype=wide, device=logits.device)
    return logits[:, :columns].amax(-1).to(wide)


@kernel(lambda targets, *_: (targets.like(), targets.like(dtype="bool")))
def local_targets(targets, first: int, columns: int):
    """Return the targets' local columns and a mask of other ranks' targets. ``first``: this rank's first column."""
    local = targets - first
    elsewhere = (local < 0) | (local >= columns)
    return local.masked_fill_(elsewhere, 0), elsewhere


def _moved_at_targets(logits, *rows) -> int:
    """Return the bytes of one logit per row and of ``rows``, tensors with one element per row."""
    return logits.nbytes // logits.shape[-1] + sum(row.nbytes for row in rows)


@kernel(
    lambda logits, largest, *_: largest.like(),
    moved=lambda logits, largest, *targets: _moved_at_targets(logits, largest, largest, *targets),
)
def target_logits(logits, largest, local, elsewhere):
    """Return the logits of the targets minus the largest logits, or 0 for other ranks' targets."""
    found = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).to(largest.dtype) - largest
    return found.masked_fill_(elsewhere, 0)


@kernel(lambda logits, largest, *_: largest.like(), blocks=_num_blocks)
def sums_of_exponentials(logits, largest, columns: int):
    """Return ``Σ exp(logit - largest)`` over the first ``columns`` logits of each row."""
    sums = torch.empty_like(largest)
    for rows in _blocks(logits):
        sums[rows] = sum_of_exponentials(logits[rows, :columns], largest[rows])
    return sums


@kernel(lambda one, *_: one.like((2, *one.shape)))
def stacked(one, other):
    """Return two tensors stacked to [2, ...]."""
    return torch.stack((one, other))


@kernel(lambda sums: (sums.like(()), sums.like(sums.shape[1:])))
def total_loss(sums):
    """Return the summed loss and the sums of exponentials from these sums and the targets' logits, [2, tokens]."""
    normalizer, target_logits = sums
    return (normalizer.log() - target_logits).sum(), normalizer


@kernel(lambda sums, *_: (sums.like(()), sums.like(sums.shape[1:])))
def total_loss_of_targets(sums, targets):
    """Return the results of ``total_loss`` without the tokens whose target is negative.

    Their sum of exponentials is infinite, so that their gradient is zero.
    """
    normalizer, target_logits = sums
    ignored = targets < 0
    losses = (normalizer.log() - target_logits).masked_fill_(ignored, 0)
    return losses.sum(), normalizer.masked_fill(ignored, torch.inf)


@kernel(lambda sums, *_: sums.like(sums.shape[1:]))
def token_losses(sums, targets):
    """Return the loss of each token from the sums of ``total_loss``, [tokens]; 0 for a negative target."""
    normalizer, target_logits = sums
    return (normalizer.log() - target_logits).masked_fill_(targets < 0, 0)


@kernel(
    lambda logits, d_loss, largest, *_: (largest.like(), largest.like()),
    moved=lambda logits, d_loss, largest, normalizer, local, elsewhere, z_loss: _moved_at_targets(
        logits, largest, normalizer, largest, normalizer, local, elsewhere
    ),
)
def target_gradients(logits, d_loss, largest, normalizer, local, elsewhere, z_loss: float):
    """Return, for each row, the softmax's factor in the gradient, and the gradient of the target's logit."""
    # The gradient of the z-loss is ``2 · z_loss · log(Σ exp(logits))`` times the softmax, so it changes the factor.
    scale = d_loss / normalizer
    if z_loss:
        log_sums = (largest + normalizer.log()).masked_fill_(normalizer.isinf(), 0)
        scale = scale * (1 + 2 * z_loss * log_sums)
    at_target = (logits[_rows(logits), local] - largest).exp_().mul_(scale)
    return scale, at_target.sub_(d_loss.expand_as(scale).masked_fill(elsewhere, 0))


@kernel(lambda logits, *_: logits, blocks=_num_blocks)
def softmax_(logits, largest, scale, columns: int):
    """Replace the first ``columns`` logits by ``exp(logit - largest) · scale``."""
    for rows in _blocks(logits):
        write_softmax(logits[rows, :columns], largest[rows], scale[rows])
    return logits


@kernel(
    lambda logits, *_: logits,
    moved=lambda logits, at_target, local, columns: (
        _moved_at_targets(logits, at_target, local) + logits.nbytes * (logits.shape[-1] - columns) // logits.shape[-1]
    ),
)
def write_targets_(logits, at_target, local, columns: int):
    """Write the gradients of the targets' logits, and zeros from column ``columns`` on."""
    logits[:, columns:] = 0
    logits[_rows(logits), local] = at_target.to(logits.dtype)  # scatter_ on a CPU converts all logits to float32
    return logits


@kernel(lambda logits: logits, unread=("logits",))
def zero_(logits):
    """Set all elements to zero."""
    return logits.zero_()


def _rows(logits: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(logits), device=logits.device)


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    """Yield slices of consecutive rows of ``logits``, as many as ``num_blocks`` returns."""
    rows = -(-len(logits) // num_blocks(logits, compile.enabled))
    for start in range(0, len(logits), rows):
        yield slice(start, start + rows)


def _shifted(logits: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Return ``logits - largest`` in the dtype of ``largest``."""
    if logits.dtype == largest.dtype:
        return logits - largest[:, None]
    return logits.to(largest.dtype).sub_(largest[:, None])  # a CPU subtracts mixed dtypes at half the speed


@fused
def sum_of_exponentials(logits: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Return the sum over the last dim, relative to the largest logit."""
    return _shifted(logits, largest).exp_().sum(-1)


@fused
def write_softmax(logits: torch.Tensor, largest: torch.Tensor, scale: torch.Tensor) -> None:
    """Replace ``logits`` by ``exp(logits - largest) · scale``."""
    if logits.dtype == largest.dtype:
        logits.sub_(largest[:, None]).exp_().mul_(scale[:, None])
    else:
        logits.copy_(_shifted(logits, largest).exp_().mul_(scale[:, None]))


def forward_loss(
    logits: Tensor, targets: Tensor, vocabulary: int, axis: MeshAxis, masked: bool, losses: list[Tensor] | None = None
) -> tuple[Tensor, SavedLoss]:
    """Return the summed loss of logits [tokens, vocabulary over ``axis``], and the tensors to save for its gradient.

    Columns from ``vocabulary`` on are padding. ``masked``: targets may be negative, and are ignored there. ``losses``:
    the losses of the tokens are appended to this list.
    """
    sums, largest, *column = _sums(logits, targets, vocabulary, axis)
    if losses is not None:
        losses.append(token_losses(sums, targets))
    loss, normalizer = total_loss_of_targets(sums, targets) if masked else total_loss(sums)
    return loss, SavedLoss(largest, normalizer, *column)


def log_likelihoods(logits: Tensor, targets: Tensor, vocabulary: int, axis: MeshAxis) -> tuple[Any, Any]:
    """Return the log-likelihood of each target, and whether the target has the largest logit of its row: [tokens].

    Arguments as for ``forward_loss``. Every rank of ``axis`` gets the same values.
    """
    (normalizer, below_largest), *_ = _sums(logits, targets, vocabulary, axis)
    return below_largest - normalizer.log(), below_largest == 0


def _sums(logits: Tensor, targets: Tensor, vocabulary: int, axis: MeshAxis) -> tuple[Any, Tensor, Tensor, Tensor]:
    """Return, for each row, the sum of exponentials and the target's logit, both relative to the largest logit.

    They are stacked to [2, tokens]. Return also the largest logits and the results of ``local_targets``.
    """
    columns = _columns(logits, vocabulary, axis)
    largest = axis.all_reduce(largest_logits(logits, columns), MAX)
    local, elsewhere = local_targets(targets, axis.index * logits.shape[-1], logits.shape[-1])
    at_target = target_logits(logits, largest, local, elsewhere)
    sums = axis.all_reduce(stacked(sums_of_exponentials(logits, largest, columns), at_target))
    return sums, largest, local, elsewhere


def write_gradient(
    logits: Tensor, saved: SavedLoss, vocabulary: int, axis: MeshAxis, d_loss: Tensor, z_loss: float
) -> Tensor:
    """Replace ``logits`` by their gradient in place and return it.

    ``d_loss``: the gradient of the loss, a scalar. ``z_loss``: as for ``cross_entropy_sum``.
    """
    columns = _columns(logits, vocabulary, axis)
    if not columns:
        return zero_(logits)
    scale, at_target = target_gradients(logits, d_loss, *saved, z_loss)
    return write_targets_(softmax_(logits, saved.largest, scale, columns), at_target, saved.local, columns)


def _columns(logits: Tensor, vocabulary: int, axis: MeshAxis) -> int:
    """Return the number of this rank's columns of the vocabulary without padding."""
    return max(0, min(logits.shape[-1], vocabulary - axis.index * logits.shape[-1]))


class CrossEntropyFunction(Function):
    """Sum of ``log Σ exp(logits) - target's logit`` over tokens, in float32, or float64 for float64 logits."""

    @staticmethod
    def forward(ctx, logits, targets, vocabulary: int, axis, z_loss: float, masked: bool, losses):
        loss, saved = forward_loss(logits, targets, vocabulary, axis, masked, losses)
        ctx.save_for_backward(logits, *saved)
        ctx.vocabulary, ctx.axis, ctx.z_loss = vocabulary, axis, z_loss
        return loss

    @staticmethod
    def backward(ctx, d_loss):
        # In place, because the logits are the largest tensor of a step. Autograd detects a second backward.
        logits, *saved = ctx.saved_tensors
        return write_gradient(logits, SavedLoss(*saved), ctx.vocabulary, ctx.axis, d_loss, ctx.z_loss), *[None] * 6


def cross_entropy_sum(
    logits: Tensor,
    targets: Tensor,
    vocabulary: int,
    axis: MeshAxis,
    z_loss: float = 0.0,
    masked: bool = False,
    losses: list[Tensor] | None = None,
) -> Tensor:
    """Return the loss summed over this rank's tokens: a scalar, the same on every rank of ``axis``.

    ``logits`` [..., padded vocabulary over ``axis``], ``targets`` [...] global ids. Columns from ``vocabulary`` on are
    padding and are ignored. If ``masked``, tokens with a negative target are ignored too: their loss and their gradient
    are zero. The losses of the tokens, [tokens], are appended to ``losses``. The backward overwrites ``logits`` with
    their gradient.

    ``z_loss`` adds the gradient of ``z_loss · log²(Σ exp(logits))`` of each token (Chowdhery et al., 2022), which keeps
    the logits from growing. The returned loss is the cross-entropy alone.
    """
    flat = logits.flatten(0, -2), targets.flatten()
    return CrossEntropyFunction.apply(*flat, vocabulary, axis, z_loss, masked, losses)


# ---------------------------------------------------------------------------------------------- squared error


@planned_kernel
def sum_of(squares):
    """Return the sum of all elements, a scalar."""
    return squares.like(())


@planned_kernel(converts=True)
def as_dtype(x, dtype):
    """Return ``x`` in a dtype."""
    return x if x.dtype == dtype else x.like(dtype=dtype)


class SquaredErrorFunction(TorchFunction):
    """Sum over samples of the mean squared error of their elements, [B, ...] → a scalar in the dtype of the targets."""

    @staticmethod
    def in_torch(prediction, targets):
        errors = prediction - targets  # promoted to the dtype of the targets, float32 or wider
        return errors.square().sum() / math.prod(errors.shape[1:])

    @staticmethod
    def forward(ctx, prediction, targets):
        errors = elementwise(targets, prediction)
        ctx.save_for_backward(errors)
        ctx.dtype = prediction.dtype
        return sum_of(elementwise(errors))

    @staticmethod
    def backward(ctx, d_loss):
        (errors,) = ctx.saved_tensors
        return as_dtype(elementwise(elementwise(errors)), ctx.dtype), None


def squared_error(prediction: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error of each sample's elements, summed over this rank's samples."""
    return SquaredErrorFunction.apply(prediction, targets)


@kernel(lambda loss: loss.like(), unread=("loss",))
def one_like(loss):
    """Return 1, the derivative of the loss with respect to itself."""
    return torch.ones_like(loss)


@kernel(lambda *losses: losses[0].like())
def total(*losses):
    """Return the sum of scalar losses."""
    return torch.stack(losses).sum()


@kernel(lambda gradient, *_: gradient)
def scale_(gradient, d_loss):
    """Multiply a gradient in place by the gradient of the loss, a scalar."""
    return gradient.mul_(d_loss)


@kernel(lambda earlier, *_: earlier)
def add_scaled_(earlier, gradient, d_loss):
    """Add ``gradient · d_loss`` to an accumulated gradient in place. ``d_loss``: the gradient of the loss, a scalar."""
    return earlier.addcmul_(gradient, d_loss)


@dataclass
class _HeadLossCall:
    """One call of ``head_loss``: its arguments, and the gradients if the gradient of the loss is 1."""

    weight: Tensor  # the parameter itself, because gradients accumulate here; autograd passes a view
    targets_T: Tensor
    vocabulary: int
    context: ProductContext
    num_chunks: int
    masked: bool  # tokens with a negative target are ignored
    split: bool  # x splits the tokens of the input
    with_gradients: bool
    losses: list[Tensor] | None  # the losses of the tokens of each chunk are appended
    gradients: tuple[Tensor, Tensor | None] | None = None  # the input's and, unless it is frozen, the weight's

    def run(self, x_TH: Tensor) -> Tensor:
        """Return the loss and compute its gradients chunk by chunk."""
        operation, weights, x_axis = self.context.operation, self.context.weights, self.context.produced
        # If x splits the tokens, one reduce-scatter at the end replaces the all-reduces of the chunks.
        summed = weights.context.grid.axis(None) if self.split else x_axis
        if self.split:
            x_TH = start_gather(x_TH, x_axis, TOKENS, self.weight).wait()
        gathered, trains = weights.gather(self.weight), weights.trains(self.weight)
        losses, d_parts, d_weight = list[Tensor](), list[Tensor](), None
        parts = zip(x_TH.chunk(self.num_chunks), self.targets_T.chunk(self.num_chunks), strict=True)
        for part_TH, targets in parts:
            logits = operation.forward(part_TH, gathered, None)
            logits = self.context.contracted.all_reduce(logits, parameter=self.weight)
            loss, saved = forward_loss(logits, targets, self.vocabulary, x_axis, self.masked, self.losses)
            losses.append(loss)
            if self.with_gradients:
                logits = write_gradient(logits, saved, self.vocabulary, x_axis, one_like(loss), weights.context.z_loss)
                d_part = operation.input_gradient(logits, gathered, part_TH)
                pending = summed.start_all_reduce(d_part, parameter=self.weight)
                if not weights.context.overlap.all_reduce:
                    pending.wait()
                if trains:
                    d_weight = operation.weight_gradient(logits, part_TH, self.weight, d_weight)
                d_parts.append(pending.wait())
            del logits, saved  # before the logits of the next chunk exist
        if self.with_gradients:
            d_x = join(*d_parts)
            if self.split:
                d_x = start_scatter(d_x, x_axis, TOKENS, self.weight).wait()
            self.gradients = d_x, d_weight
        return total(*losses)


class HeadLossFunction(Function):
    """The loss of ``x @ weight``. The forward computes the gradients too, while the logits exist.

    The gradients are proportional to the gradient of the loss. The backward only multiplies by it and recomputes no
    product.
    """

    @staticmethod
    def forward(ctx, x_TH, weight, call: _HeadLossCall):
        ctx.call = call
        return call.run(x_TH)

    @staticmethod
    def backward(ctx, d_loss):
        call, of_weight = ctx.call, None
        assert call.gradients is not None
        (d_x, d_weight), call.gradients = call.gradients, None

        def scaled(earlier: Tensor | None) -> Tensor:
            return scale_(d_weight, d_loss) if earlier is None else add_scaled_(earlier, d_weight, d_loss)

        if d_weight is not None:
            of_weight = call.context.weights.add_gradient(call.weight, scaled)
        return scale_(d_x, d_loss), of_weight, None


def head_loss(
    x_TH: Tensor,
    weight: Tensor,
    targets_T: Tensor,
    vocabulary: int,
    context: ProductContext,
    current: Pass,
    num_chunks: int,
    masked: bool = False,
    losses: list[Tensor] | None = None,
) -> Tensor:
    """Return the cross-entropy of logits, summed over this rank's tokens, as ``cross_entropy_sum`` does.

    Args:
        x_TH: input of the head [tokens, hidden]; x may split its tokens.
        weight: the head's weight.
        targets_T: ids of the tokens to predict, in the order of ``TokenIndex.gathered``.
        vocabulary: size of the vocabulary; the remaining columns of the logits are padding.
        context: the head's product context.
        current: the pass that computes it.
        num_chunks: number of chunks of the tokens, computed sequentially.
        masked: tokens with a negative target are ignored.
        losses: the losses of the tokens of each chunk are appended to this list.
    """
    split = context.splits[current.splits_tokens][0] is not None
    call = _HeadLossCall(weight, targets_T, vocabulary, context, num_chunks, masked, split, current.records, losses)
    return HeadLossFunction.apply(x_TH, weight, call)
