"""Interface between the collectives of an axis and the ways in which its ranks exchange data."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from gpt4d.parallel.comm.pending import Pending


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
