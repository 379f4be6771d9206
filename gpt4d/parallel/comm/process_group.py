"""Collectives of a torch process group, such as NCCL's, on tensors of a GPU."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from gpt4d.parallel.comm.pending import MAX, SUM, Pending
from gpt4d.parallel.comm.transport import Transport

# torch 2.13 renamed the 1-D forms; 2.11 knows only the old names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

REDUCE_OPS = {SUM: dist.ReduceOp.SUM, MAX: dist.ReduceOp.MAX}


class ProcessGroupTransport(Transport):
    """Starts each collective as one operation of the process group."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def start_all_reduce(self, tensor: torch.Tensor, op: str) -> Pending:
        return Pending(tensor, dist.all_reduce(tensor, REDUCE_OPS[op], group=self.group, async_op=True))

    def start_all_gather(self, shard: torch.Tensor) -> Pending:
        full = shard.new_empty((self.group.size() * shard.shape[0], *shard.shape[1:]))
        return Pending(full, all_gather(full, shard, group=self.group, async_op=True), source=shard)

    def start_reduce_scatter(self, full: torch.Tensor) -> Pending:
        shard = full.new_empty((full.shape[0] // self.group.size(), *full.shape[1:]))
        return Pending(shard, reduce_scatter(shard, full, group=self.group, async_op=True), source=full)

    def start_shift(self, tensor: torch.Tensor) -> Pending:
        received = torch.empty_like(tensor)
        return Pending(received, shift(received, tensor, self.group), source=tensor)

    def start_all_to_all(self, sent: torch.Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> Pending:
        received, work = all_to_all(sent, sent_rows, received_rows, self.group)
        return Pending(received, work, source=sent)


def shift(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to send a contiguous tensor to the next rank of a group, and to receive one from the previous rank."""
    rank, size, count = group.rank(), group.size(), sent.numel()
    to, source = (rank + 1) % size, (rank - 1) % size
    received_counts, sent_counts = ([count * (other == peer) for other in range(size)] for peer in (source, to))
    return dist.all_to_all_single(
        received.view(-1), sent.view(-1), received_counts, sent_counts, group=group, async_op=True
    )


def all_to_all(
    sent: torch.Tensor, sent_rows: Sequence[int], received_rows: Sequence[int], group: dist.ProcessGroup
) -> tuple[torch.Tensor, dist.Work]:
    """Start to exchange rows between the ranks of a group. Return the received rows and the handle."""
    received = sent.new_empty((sum(received_rows), *sent.shape[1:]))
    counts = list(received_rows), list(sent_rows)
    return received, dist.all_to_all_single(received, sent, *counts, group=group, async_op=True)
