"""The workload of ``benchmarks.overlap``, equal for all workers: transformer blocks, forward and backward."""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from benchmarks.workers.training import Workload
from gpt4d.config import GridSizes
from gpt4d.model.gpt2.config import GPT2Config


def workload(virtual: bool) -> Workload:
    """Return the work of ranks that share this machine's cores, or that have virtual devices."""
    # The rest of the model is built but never run, so the vocabulary is as small as possible.
    vocabulary = {"vocab_size": 8, "vocab_multiple": 8}
    if virtual:
        return Workload(GPT2Config("blocks", 4, 1024, heads=16, max_positions=256, **vocabulary), batch=16, steps=1)
    return Workload(GPT2Config("blocks", 4, 512, heads=8, max_positions=128, **vocabulary), batch=8, steps=1)


def inputs_and_upstream(work: Workload, sizes: GridSizes, z: int, y: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input of the first block and the gradient of the last block's output.

    Both are the shard [batch / z, positions, hidden / y] of the rank with indices ``z`` and ``y`` along these axes.
    """
    rows, columns = work.batch // sizes.z, work.model.hidden // sizes.y
    shard = (slice(z * rows, (z + 1) * rows), slice(None), slice(y * columns, (y + 1) * columns))
    generator = torch.Generator().manual_seed(0)
    shape = work.batch, work.model.max_positions, work.model.hidden
    inputs, upstream = torch.randn(2, *shape, generator=generator)
    return inputs[shard].contiguous().requires_grad_(), upstream[shard].contiguous()


def take_gradient_norms(inputs: torch.Tensor, matrices: Iterable[torch.Tensor], sizes: GridSizes) -> dict[str, float]:
    """Return the norms of the global gradients of the input and of all matrices, and clear ``inputs.grad``.

    The norms show that all workers compute the same. Ranks along x hold the same shard of the input; no two ranks hold
    the same shard of a matrix.
    """
    squares = torch.stack((inputs.grad.square().sum() / sizes.x, sum(m.grad.square().sum() for m in matrices)))
    dist.all_reduce(squares)
    inputs.grad = None
    input_norm, weight_norm = squares.sqrt().tolist()
    return {"input_gradient": input_norm, "weight_gradient": weight_norm}
