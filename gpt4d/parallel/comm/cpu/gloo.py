"""Collectives between CPU ranks through gloo's sockets, in pieces that overlap each other on the link."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from gpt4d.parallel.comm.pending import Pending, num_pieces
from gpt4d.parallel.comm.transport import REDUCE_OPS, Transport, all_gather, all_to_all, shift


class Works:
    """Messages that are one collective together. ``sent`` must stay in memory until they are complete."""

    def __init__(self, works: Sequence[dist.Work], sent: Sequence[torch.Tensor] = ()):
        self.works, self.sent = works, sent

    def wait(self) -> None:
        for work in self.works:
            work.wait()

    def on_end(self, record: Callable[[float], None]) -> None:
        futures = torch.futures.collect_all([work.get_future() for work in self.works])
        futures.add_done_callback(lambda _: record(time.perf_counter()))


class GlooTransport(Transport):
    """Sends tensors through a process group of gloo.

    Args:
        group: the ranks of the axis.
        yielding: the computation does not wait for the axis's collectives, so they yield to other messages.
    """

    def __init__(self, group: dist.ProcessGroup, yielding: bool = False):
        self.group, self.yielding, self.size = group, yielding, group.size()

    def start_all_reduce(self, tensor: torch.Tensor, op: str) -> Pending:
        parts = tensor.view(-1).chunk(num_pieces(tensor.nbytes / self.size, self.yielding))
        return Pending(
            tensor, Works([dist.all_reduce(part, REDUCE_OPS[op], group=self.group, async_op=True) for part in parts])
        )

    def start_all_gather(self, shard: torch.Tensor) -> Pending:
        sent = pieces(shard.view(1, -1), self.yielding)
        received = [piece.new_empty((self.size, piece.shape[1])) for piece in sent]
        gather = partial(all_gather, group=self.group, async_op=True)
        shape = self.size * shard.shape[0], *shard.shape[1:]
        return Pending(shard, Works(list(map(gather, received, sent)), sent), lambda _: _joined(received).view(shape))

    def start_reduce_scatter(self, full: torch.Tensor) -> Pending:
        """Start to exchange the parts, to be added at the end: gloo's own form sends twice the bytes."""
        sent = [columns.contiguous() for columns in pieces(full.view(self.size, -1), self.yielding)]
        received = [torch.empty_like(columns) for columns in sent]
        exchange = partial(dist.all_to_all_single, group=self.group, async_op=True)

        def add(_: torch.Tensor) -> torch.Tensor:
            return torch.cat([columns.sum(0) for columns in received]).view(-1, *full.shape[1:])

        return Pending(full, Works(list(map(exchange, received, sent)), sent), add, source=full)

    def start_shift(self, tensor: torch.Tensor) -> Pending:
        received = torch.empty_like(tensor)
        parts, sent = (pieces(each.view(1, -1), self.yielding) for each in (received, tensor))
        works = [shift(into, piece, self.group) for into, piece in zip(parts, sent, strict=True)]
        return Pending(received, Works(works), source=tensor)

    def start_all_to_all(self, sent: torch.Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> Pending:
        received, work = all_to_all(sent, sent_rows, received_rows, self.group)
        return Pending(received, Works([work]), source=sent)


def pieces(rows: torch.Tensor, yielding: bool = False) -> tuple[torch.Tensor, ...]:
    """Split ``rows`` along dim 1 into the pieces in which each row is sent."""
    return rows.chunk(num_pieces(rows[0].nbytes, yielding), 1)


def _joined(received: list[torch.Tensor]) -> torch.Tensor:
    """Return the gathered shards, a row of each rank."""
    return received[0] if len(received) == 1 else torch.cat(received, 1)
