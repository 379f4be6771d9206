"""The interface between the collectives of an axis and the exchange of their data, and NCCL's exchange."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist

from gpt4d.parallel.comm.pending import MAX, SUM, Pending

# torch 2.13 renamed the 1-D forms; 2.11 knows only the old names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

REDUCE_OPS = {SUM: dist.ReduceOp.SUM, MAX: dist.ReduceOp.MAX}


class Transport(ABC):
    """Exchanges the data of collectives between the ranks of one axis.

    Each method starts a collective of a contiguous tensor and returns a ``Pending`` whose ``run`` is its handle. On
    CPUs, the handle's ``on_end(record)`` arranges for ``record`` to be called with the time (time.perf_counter) at
    which the exchange ends.

    Attributes:
        copies_at_start: the calling thread copies the tensor when a collective starts, so the computation waits.
    """

    copies_at_start = False

    @abstractmethod
    def start_all_reduce(self, tensor: torch.Tensor, op: str) -> Pending:
        """Start to reduce ``tensor`` in place, by SUM or MAX (gpt4d.parallel.comm.pending)."""

    @abstractmethod
    def start_all_gather(self, shard: torch.Tensor) -> Pending:
        """Start to concatenate the shards of all ranks along dim 0."""

    @abstractmethod
    def start_reduce_scatter(self, full: torch.Tensor) -> Pending:
        """Start to sum ``full`` over the ranks; the result is this rank's part along dim 0."""

    @abstractmethod
    def start_shift(self, tensor: torch.Tensor) -> Pending:
        """Start to send ``tensor`` to the next rank; the result is the tensor of the previous rank."""

    @abstractmethod
    def start_all_to_all(self, sent: torch.Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> Pending:
        """Start to send numbers of rows of ``sent`` to the ranks; the result is the rows of all ranks for this rank."""


class ProcessGroupTransport(Transport):
    """Starts each collective as one operation of a torch process group, such as NCCL's, on tensors of a GPU."""

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
