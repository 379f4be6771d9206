"""The kernels of the loss, and of head and loss in chunks of the tokens."""

import math
from collections.abc import Iterator

import torch

from gpt4d.parallel.compile import fused
from gpt4d.parallel.symbolic import kernels


def largest_logits(logits, columns: int):
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if not columns:
        return torch.full(logits.shape[:1], -torch.inf, dtype=wide, device=logits.device)
    return logits[:, :columns].amax(-1).to(wide)


def local_targets(targets, first: int, columns: int):
    local = targets - first
    elsewhere = (local < 0) | (local >= columns)
    return local.masked_fill_(elsewhere, 0), elsewhere


def target_logits(logits, largest, local, elsewhere):
    found = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).to(largest.dtype) - largest
    return found.masked_fill_(elsewhere, 0)


def sums_of_exponentials(logits, largest, columns: int):
    sums = torch.empty_like(largest)
    for rows in _blocks(logits):
        sums[rows] = _sum_of_exponentials(logits[rows, :columns], largest[rows])
    return sums


def stacked(one, other):
    return torch.stack((one, other))


def total_loss(sums):
    normalizer, target_logits = sums
    return (normalizer.log() - target_logits).sum(), normalizer


def target_gradients(logits, d_loss, largest, normalizer, local, elsewhere):
    scale = d_loss / normalizer
    at_target = (logits[_rows(logits), local] - largest).exp_().mul_(scale)
    return scale, at_target.sub_(d_loss.expand_as(scale).masked_fill(elsewhere, 0))


def softmax_(logits, largest, scale, columns: int):
    for rows in _blocks(logits):
        _write_softmax(logits[rows, :columns], largest[rows], scale[rows])
    return logits


def write_targets_(logits, at_target, local, columns: int):
    logits[:, columns:] = 0
    logits[_rows(logits), local] = at_target.to(logits.dtype)  # scatter_ on a CPU converts all logits to float32
    return logits


def zero_(logits):
    return logits.zero_()


def _rows(logits: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(logits), device=logits.device)


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    """Yield slices of consecutive rows, so that their parts of ``logits`` [rows, columns] are blocks."""
    rows = kernels.block_rows(logits.shape[-1])
    for start in range(0, len(logits), rows):
        yield slice(start, start + rows)


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
    """Replace logits by their exponentials, relative to the largest logits, times ``scale``."""
    if logits.dtype == largest.dtype:
        logits.sub_(largest[:, None]).exp_().mul_(scale[:, None])
    else:
        logits.copy_(_shifted(logits, largest).exp_().mul_(scale[:, None]))


def squared_error(prediction, targets):
    errors = prediction - targets  # float32: the dtype of the targets, or more
    return errors.square().sum() / math.prod(errors.shape[1:])


def one_like(loss):
    return torch.ones_like(loss)


def total(*losses):
    return torch.stack(losses).sum()


def scale_(gradient, d_loss):
    return gradient.mul_(d_loss)


def add_scaled_(earlier, gradient, d_loss):
    return earlier.addcmul_(gradient, d_loss)
