"""The workload of ``benchmarks.overlap``, equal for all workers: transformer blocks, forward and backward."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from gpt4d.config import GridSizes
from gpt4d.model.gpt2.config import GPT2Config

SIZES = GridSizes(2, 2, 2, 1)
BATCH, LENGTH = 8, 128
LAYERS, HIDDEN, HEADS = 4, 512, 8
# The rest of the model is built but never run, so the vocabulary is as small as possible.
MODEL = GPT2Config("blocks", LAYERS, HIDDEN, HEADS, vocab_size=8, vocab_multiple=8, max_positions=LENGTH)


def inputs_and_upstream(z: int, y: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input of the first block and the gradient of the last block's output.

    Both are the shard [BATCH / 2, LENGTH, HIDDEN / 2] of the rank with indices ``z`` and ``y`` along these axes.
    """
    rows, columns = BATCH // SIZES.batch_shards, HIDDEN // SIZES.y
    shard = (slice(z * rows, (z + 1) * rows), slice(None), slice(y * columns, (y + 1) * columns))
    generator = torch.Generator().manual_seed(0)
    inputs, upstream = torch.randn(2, BATCH, LENGTH, HIDDEN, generator=generator)
    return inputs[shard].contiguous().requires_grad_(), upstream[shard].contiguous()


def take_gradient_norms(inputs: torch.Tensor, matrices: Iterable[torch.Tensor]) -> dict[str, float]:
    """Return the norms of the global gradients of the input and of all matrices, and clear ``inputs.grad``.

    The norms show that all workers compute the same. Ranks along x hold the same shard of the input; no two ranks hold
    the same shard of a matrix.
    """
    squares = torch.stack((inputs.grad.square().sum() / SIZES.x, sum(m.grad.square().sum() for m in matrices)))
    dist.all_reduce(squares)
    inputs.grad = None
    input_norm, weight_norm = squares.sqrt().tolist()
    return {"input_gradient": input_norm, "weight_gradient": weight_norm}
