"""Collectives of an axis and in flight, operations of an all-reduce, and pieces of long messages. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

SUM, MAX = "sum", "max"  # operations of an all-reduce
# Pieces of long tensors between hosts of CPUs. Their parts inside the hosts overlap, and gloo transfers long messages
# at little more than half the rate of a link.
PIECE_BYTES, _MAX_PIECES = 1 << 18, 32
# The computation does not wait for the weights and gradients of z and data. They travel in smaller pieces: with little
# in flight, they yield to other messages on the link.
YIELDING_PIECE_BYTES, _MAX_YIELDING_PIECES = 1 << 16, 128


class InFlight(Protocol):
    """A communication in flight."""

    def wait(self) -> object: ...


class Pending:
    """A collective in flight. ``wait`` returns its result, the same at each call."""

    __slots__ = ("finish", "result", "run", "source")

    def __init__(
        self,
        result: Any,
        run: InFlight | None = None,
        finish: Callable[[Any], Any] | None = None,
        source: Any | None = None,
    ):
        self.result, self.run, self.finish = result, run, finish
        self.source = source  # sent data must stay in memory until then

    def wait(self) -> Any:
        if self.run is not None:
            self.run.wait()
            if self.finish is not None:
                self.result = self.finish(self.result)
            self.run = self.finish = self.source = None
        return self.result

    def then(self, change: Callable[[Any], Any]) -> Pending:
        """Return the same collective with ``change`` applied to its result."""
        if self.run is None:
            return Pending(change(self.result))
        finish = self.finish or (lambda result: result)
        return Pending(self.result, self.run, lambda result: change(finish(result)), self.source)


def num_pieces(nbytes: float, yielding: bool = False) -> int:
    """Return the number of pieces in which a rank of a CPU sends ``nbytes`` to a rank of another host.

    ``yielding``: the computation does not wait for them.
    """
    piece, maximum = (YIELDING_PIECE_BYTES, _MAX_YIELDING_PIECES) if yielding else (PIECE_BYTES, _MAX_PIECES)
    return int(min(max(1, nbytes // piece), maximum))


class MeshAxis(Protocol):
    """An axis of torch or a symbolic axis. Tensors are ``Any``, because an axis takes tensors of its own kind only."""

    size: int
    index: int

    def start_all_reduce(self, tensor: Any, op: str = SUM, parameter: Any = None) -> Pending: ...
    def start_all_gather(self, shard: Any, parameter: Any = None) -> Pending: ...
    def start_reduce_scatter(self, full: Any, parameter: Any = None) -> Pending: ...
    def start_shift(self, tensor: Any, parameter: Any = None) -> Pending: ...
    def start_all_to_all(self, sent: Any, sent_rows: Sequence[int], received_rows: Sequence[int]) -> Pending: ...

    def all_reduce(self, tensor: Any, op: str = SUM, parameter: Any = None) -> Any:
        return self.start_all_reduce(tensor, op, parameter).wait()

    def all_gather(self, shard: Any, parameter: Any = None) -> Any:
        return self.start_all_gather(shard, parameter).wait()

    def reduce_scatter(self, full: Any, parameter: Any = None) -> Any:
        return self.start_reduce_scatter(full, parameter).wait()
