"""The kernels of the cross-entropy, of its computation in chunks of tokens, and of the squared error."""

import math
from collections.abc import Iterator

import torch

from gpt4d.parallel import compile
from gpt4d.parallel.compile import fused
from gpt4d.parallel.symbolic.kernels import num_blocks


def largest_logits(logits, columns: int):
    """Return the maximum of the first ``columns`` logits of each row; -inf without columns."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if not columns:
        return torch.full(logits.shape[:1], -torch.inf, dtype=wide, device=logits.device)
    return logits[:, :columns].amax(-1).to(wide)


def local_targets(targets, first: int, columns: int):
    """Return the targets' local columns, 0 for other ranks' targets, and a mask of other ranks' targets."""
    local = targets - first
    elsewhere = (local < 0) | (local >= columns)
    return local.masked_fill_(elsewhere, 0), elsewhere


def target_logits(logits, largest, local, elsewhere):
    """Return ``logits[target] - largest`` of each row; 0 if another rank has the target."""
    found = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).to(largest.dtype) - largest
    return found.masked_fill_(elsewhere, 0)


def sums_of_exponentials(logits, largest, columns: int):
    """Return ``Σ exp(logits - largest)`` of each row, computed in blocks of rows."""
    sums = torch.empty_like(largest)
    for rows in _blocks(logits):
        sums[rows] = sum_of_exponentials(logits[rows, :columns], largest[rows])
    return sums


def stacked(one, other):
    """Stack two tensors to [2, ...]."""
    return torch.stack((one, other))


def total_loss(sums):
    """Return the summed loss and the normalizer of each row from [2, tokens]."""
    normalizer, target_logits = sums
    return (normalizer.log() - target_logits).sum(), normalizer


def total_loss_of_targets(sums, targets):
    """Return the results of ``total_loss`` without negative targets, whose normalizer is infinite."""
    normalizer, target_logits = sums
    ignored = targets < 0
    losses = (normalizer.log() - target_logits).masked_fill_(ignored, 0)
    return losses.sum(), normalizer.masked_fill(ignored, torch.inf)


def token_losses(sums, targets):
    """Return the loss of each token from [2, tokens]; 0 for a negative target."""
    normalizer, target_logits = sums
    return (normalizer.log() - target_logits).masked_fill_(targets < 0, 0)


def target_gradients(logits, d_loss, largest, normalizer, local, elsewhere, z_loss: float):
    """Return the softmax's factor ``d_loss / normalizer`` and the gradient of the target's logit, both [tokens].

    The gradient of the z-loss is ``2 · z_loss · log(Σ exp(logits))`` times the softmax, so it changes the factor.
    """
    scale = d_loss / normalizer
    if z_loss:
        log_sums = (largest + normalizer.log()).masked_fill_(normalizer.isinf(), 0)
        scale = scale * (1 + 2 * z_loss * log_sums)
    at_target = (logits[_rows(logits), local] - largest).exp_().mul_(scale)
    return scale, at_target.sub_(d_loss.expand_as(scale).masked_fill(elsewhere, 0))


def softmax_(logits, largest, scale, columns: int):
    """Replace the first ``columns`` logits by ``exp(logits - largest) · scale``, in blocks of rows."""
    for rows in _blocks(logits):
        write_softmax(logits[rows, :columns], largest[rows], scale[rows])
    return logits


def write_targets_(logits, at_target, local, columns: int):
    """Write the gradients of the targets' logits, and zeros into the padding columns."""
    logits[:, columns:] = 0
    logits[_rows(logits), local] = at_target.to(logits.dtype)  # scatter_ on a CPU converts all logits to float32
    return logits


def zero_(logits):
    """Set all elements to zero."""
    return logits.zero_()


def _rows(logits: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(logits), device=logits.device)


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    """Yield slices of consecutive rows of ``logits``, as many as ``num_blocks`` returns."""
    rows = -(-len(logits) // num_blocks(logits, compile.is_enabled()))
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


def squared_error(prediction, targets):
    """Return the mean squared error of each sample, summed over samples."""
    errors = prediction - targets  # promoted to the dtype of the targets, float32 or wider
    return errors.square().sum() / math.prod(errors.shape[1:])


def one_like(loss):
    """Return a one with the shape, dtype and device of ``loss``."""
    return torch.ones_like(loss)


def total(*losses):
    """Sum scalar losses."""
    return torch.stack(losses).sum()


def scale_(gradient, d_loss):
    """Multiply ``gradient`` by ``d_loss`` in place."""
    return gradient.mul_(d_loss)


def add_scaled_(earlier, gradient, d_loss):
    """Add ``gradient · d_loss`` to ``earlier`` in place."""
    return earlier.addcmul_(gradient, d_loss)
