"""Every collective the project issues on tensors. Each is counted on its axis: bytes, and seconds waited.

On an axis of one device all of them return their input at no cost.
"""

import time
from contextlib import contextmanager

import torch
import torch.distributed as dist

from gpt4d.parallel.grid import Axis

# torch 2.13 renamed the 1-D forms; 2.11 knows only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@contextmanager
def _counted(axis: Axis, tensor: torch.Tensor, sent_bytes: float):
    axis.traffic.bytes += sent_bytes
    if tensor.is_cuda:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        stop.record()
        axis.traffic.events.append((start, stop))
    else:
        start = time.perf_counter()
        yield
        axis.traffic.host_s += time.perf_counter() - start


def all_reduce(tensor: torch.Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """Reduces ``tensor`` over the axis **in place** and returns it. Sends 2·(G-1)/G of its bytes (Eq. 3)."""
    if axis.size > 1:
        assert tensor.is_contiguous()
        with _counted(axis, tensor, 2 * (axis.size - 1) / axis.size * tensor.nbytes):
            dist.all_reduce(tensor, op, group=axis.group)
    return tensor


def all_gather(shard: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The shards of all ranks of the axis, one after another along dim 0. Sends (G-1) shards (Eq. 1)."""
    if axis.size == 1:
        return shard
    shard = shard.contiguous()
    full = shard.new_empty((axis.size * shard.shape[0], *shard.shape[1:]))
    with _counted(axis, shard, (axis.size - 1) * shard.nbytes):
        _all_gather(full, shard, group=axis.group)
    return full


def reduce_scatter(full: torch.Tensor, axis: Axis) -> torch.Tensor:
    """This rank's part, along dim 0, of the sum over the axis. Sends (G-1)/G of the bytes (Eq. 2)."""
    if axis.size == 1:
        return full
    full = full.contiguous()
    shard = full.new_empty((full.shape[0] // axis.size, *full.shape[1:]))
    with _counted(axis, full, (axis.size - 1) / axis.size * full.nbytes):
        _reduce_scatter(shard, full, group=axis.group)
    return shard
