"""Collectives between CPU ranks of several hosts, which send each element over a host's link once.

A collective has up to three parts: a sum inside each host, communication between the hosts, and an exchange of the
received data inside each host. Its kind decides which parts it needs.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from gpt4d.parallel.comm.cpu.comm_thread import CommFuture, CommThread
from gpt4d.parallel.comm.cpu.gloo import GlooTransport, pieces
from gpt4d.parallel.comm.cpu.shared_memory import SharedMemory, fits
from gpt4d.parallel.comm.pending import SUM, Pending
from gpt4d.parallel.comm.transport import Transport, all_gather

# The parts of a piece of a collective: one starts the exchange between hosts and returns the handle, one finishes.
Piece = tuple[Callable[[], dist.Work], Callable[[], object]]


class TwoLevelTransport(Transport):
    """Exchanges tensors first inside each host and then between the hosts, or the reverse.

    Two threads run the parts of collectives, each in the order in which these were started. So the parts of several
    collectives overlap each other and the computation.

    Args:
        before: memory of this host, for the part before the exchange between the hosts.
        after: memory of this host, for the part after it.
        group: the ranks with this rank's index on each host. Only the threads use it.
        columns: for each index on a host, the ranks that have it, one on each host, in ascending order.
        gloo: sends the tensors that do not fit the memory or cannot be split over the ranks of a host.
    """

    def __init__(
        self,
        before: SharedMemory,
        after: SharedMemory,
        group: dist.ProcessGroup,
        columns: Sequence[tuple[int, ...]],
        gloo: GlooTransport,
    ):
        self.before, self.after, self.group, self.columns, self.gloo = before, after, group, columns, gloo
        self.index, self.local_size, self.size = before.index, before.size, len(columns[0])
        self._first, self._second = CommThread("before exchange"), CommThread("after exchange")

    def start_all_reduce(self, tensor: torch.Tensor, op: str) -> Pending:
        """Sum this rank's part over the ranks of its host, then over the hosts; then exchange the parts in the host.

        Each element enters and leaves a host once; a ring sends it nearly twice.
        """
        if op != SUM or tensor.numel() % self.local_size or not _fits(tensor.view(self.local_size, -1)):
            return self.gloo.start_all_reduce(tensor, op)

        def piece(of_all: torch.Tensor) -> Piece:
            part = of_all.new_empty(of_all.shape[1])

            def exchange() -> dist.Work:
                self.before.post(of_all, lambda slots: torch.sum(slots[:, self.index], 0, out=part)).wait()
                return dist.all_reduce(part, group=self.group, async_op=True)

            return exchange, lambda: self.after.post(part, of_all.copy_).wait()

        return Pending(tensor, self._start(map(piece, pieces(tensor.view(self.local_size, -1)))))

    def start_all_gather(self, shard: torch.Tensor) -> Pending:
        """Gather between the hosts, so that each shard enters a host once; its ranks then share the received shards."""
        num_ranks = self.local_size * self.size
        if not _fits(shard.view(1, -1).expand(self.size, -1)):
            return self.gloo.start_all_gather(shard)
        full = shard.new_empty((num_ranks * shard.shape[0], *shard.shape[1:]))

        def piece(of_shard: torch.Tensor, of_full: torch.Tensor) -> Piece:
            received = of_shard.new_empty((self.size, of_shard.shape[1]))

            def exchange() -> dist.Work:
                return all_gather(received, of_shard, group=self.group, async_op=True)

            def share(slots: torch.Tensor) -> torch.Tensor:
                for column, parts in zip(self.columns, slots, strict=True):
                    for index, part in zip(column, parts, strict=True):
                        of_full[index].copy_(part)
                return of_full

            return exchange, lambda: self.after.post(received, share).wait()

        parts = map(piece, pieces(shard.view(1, -1)), pieces(full.view(num_ranks, -1)))
        return Pending(full, self._start(parts))

    def start_reduce_scatter(self, full: torch.Tensor) -> Pending:
        """Sum the parts inside each host first, so that each leaves a host once."""
        num_ranks = self.local_size * self.size
        if not _fits(full.view(num_ranks, -1)):
            return self.gloo.start_reduce_scatter(full)
        column = self.columns[self.index]
        result = full.new_empty((full.shape[0] // num_ranks, *full.shape[1:]))

        def piece(of_all: torch.Tensor, of_result: torch.Tensor) -> Piece:
            sums, received = of_all.new_empty((2, self.size, of_all.shape[1]))

            def sum_in_host(slots: torch.Tensor) -> torch.Tensor:
                for index, total in zip(column, sums, strict=True):
                    torch.sum(slots[:, index], 0, out=total)
                return sums

            def exchange() -> dist.Work:
                self.before.post(of_all, sum_in_host).wait()
                return dist.all_to_all_single(received, sums, group=self.group, async_op=True)

            return exchange, lambda: torch.sum(received, 0, out=of_result)

        parts = map(piece, pieces(full.view(num_ranks, -1)), (row[0] for row in pieces(result.view(1, -1))))
        return Pending(result, self._start(parts))

    def start_shift(self, tensor: torch.Tensor) -> Pending:
        """Send through gloo: each element leaves a host at most once."""
        return self.gloo.start_shift(tensor)

    def start_all_to_all(self, sent: torch.Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> Pending:
        """Exchange through gloo: each element leaves a host at most once."""
        return self.gloo.start_all_to_all(sent, sent_rows, received_rows)

    def _start(self, parts: Iterable[Piece]) -> CommFuture:
        """Start a collective whose pieces follow each other through the parts. The task returns None.

        Args:
            parts: the first function of each piece uses ``before`` and ``group``. The second function uses ``after``,
                when the exchange that the first function has started is complete.
        """
        tasks = [self._start_piece(*piece) for piece in parts]

        def check() -> None:
            for task in tasks:
                task.wait()  # it is complete: this raises its error

        return self._second.submit(check)

    def _start_piece(self, start: Callable[[], dist.Work], finish: Callable[[], object]) -> CommFuture:
        exchange = self._first.submit(start)

        def wait_and_finish() -> None:
            exchange.wait().wait()
            finish()

        return self._second.submit(wait_and_finish)


def _fits(rows: torch.Tensor) -> bool:
    """Return whether the memory of a host has room for a piece of ``rows``."""
    return fits(pieces(rows)[0])
