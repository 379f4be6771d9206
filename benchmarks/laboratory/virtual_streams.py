"""Streams of a virtual device, and the links inside its host."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_RING_PASSES = {"allreduce": 2, "allgather": 1, "reducescatter": 1}


class Stream:
    """Operations that a device executes sequentially.

    Attributes:
        source: the functions of ``time``: perf_counter and sleep.
        clock: time at which all operations launched so far are complete.
        busy_s: seconds in which operations were executed.
        late_s: seconds without an operation because the host had not launched one; waits are excluded.
    """

    def __init__(self, source: Any, clock: float):
        self.source, self.clock, self.busy_s, self.late_s = source, clock, 0.0, 0.0
        self._waits = False

    def launch(self, seconds: float) -> None:
        """Execute an operation after all earlier operations."""
        self._count_lateness()
        self.clock += seconds
        self.busy_s += seconds

    def _count_lateness(self) -> None:
        now = self.source.perf_counter()
        if not self._waits:  # a wait may launch operations: gloo's copies the result of a reduce-scatter
            self.late_s += max(0.0, now - self.clock)
        self.advance_to(now)

    def advance_to(self, moment: float) -> None:
        """Execute operations launched from now on at ``moment`` or later."""
        self.clock = max(self.clock, moment)

    def sleep_until(self, moment: float) -> None:
        while (left := moment - self.source.perf_counter()) > 0:
            self.source.sleep(left)

    def synchronize(self) -> None:
        """Return when all operations are complete."""
        self.sleep_until(self.clock)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Delay the stream until the host has finished waiting for other ranks."""
        self._count_lateness()
        outer, self._waits = self._waits, True
        yield
        self._waits = outer
        self.advance_to(self.source.perf_counter())


@dataclass(eq=False)
class InFlight:
    """A collective in flight, whose result is available at ``ready`` or later to the stream that started it."""

    stream: Stream
    ready: float
    work: dist.Work | None
    results: list[int]  # addresses


class HostLinks:
    """Links between this rank and its peers on the same host, and its collectives in flight. Threads may share them.

    Args:
        mb_s: MB/s in each direction; None: transfers take no more than their real time.
        ranks_per_host: ranks of a host; hosts have consecutive ranks.
    """

    def __init__(self, mb_s: float | None, ranks_per_host: int):
        self.s_per_byte = 0.0 if mb_s is None else 1e-6 / mb_s
        self.ranks_per_host = ranks_per_host
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        self._free = 0.0  # when the last transfer ends
        self._works: dict[dist.Work, InFlight] = {}
        self._results: dict[int, InFlight] = {}

    @property
    def has_results(self) -> bool:
        return bool(self._results)

    def reserve(self, started: float, nbytes: float) -> float:
        """Return when ``nbytes``, which may be sent from ``started`` on after all earlier ones, are sent."""
        if nbytes * self.s_per_byte == 0:
            return started
        with self._lock:
            self._free = max(self._free, started) + nbytes * self.s_per_byte
            return self._free

    def track(
        self,
        stream: Stream,
        started: float,
        name: str,
        arguments: dict[str, Any],
        result: Any,
        tensors: list[torch.Tensor],
    ) -> None:
        """Remember a collective that ``stream`` started, until it is waited for or one of ``tensors`` is used.

        ``name``, ``arguments`` and ``result`` describe an operation of torch.ops.c10d or _c10d_functional.
        """
        rank, ranks = dist.get_rank(), dist.get_process_group_ranks(_group(arguments))
        if name == "send":
            ranks = [rank, ranks[arguments["dst"]]]
        counts = arguments.get("input_split_sizes")
        nbytes = arguments["input"].nbytes if counts else max(map(_nbytes, (*arguments.values(), result)))
        sent = intra_host_bytes(name, nbytes, ranks, rank, self.ranks_per_host, counts)
        last = result[-1] if isinstance(result, tuple) else result
        work = dist.Work.unbox(last) if isinstance(last, torch.ScriptObject) else None
        addresses = [tensor.data_ptr() for tensor in tensors]
        in_flight = InFlight(stream, self.reserve(started, sent), work, addresses)
        with self._lock:
            self._results |= dict.fromkeys(addresses, in_flight)
            if work is not None:
                self._works[work] = in_flight

    def pop_work(self, work: dist.Work) -> InFlight | None:
        """Forget the collective of a handle and return it."""
        return self._forget(self._works.get(work))

    def pop_result(self, tensor: torch.Tensor) -> InFlight | None:
        """Forget the collective that computes ``tensor`` and return it."""
        return self._forget(self._results.get(tensor.data_ptr()))

    def _forget(self, in_flight: InFlight | None) -> InFlight | None:
        if in_flight is not None:
            with self._lock:
                if in_flight.work is not None:
                    self._works.pop(in_flight.work, None)
                for address in in_flight.results:
                    self._results.pop(address, None)
        return in_flight


def intra_host_bytes(
    operation: str,
    nbytes: float,
    ranks: Sequence[int],
    rank: int,
    ranks_per_host: int,
    counts: Sequence[int] | None = None,
) -> float:
    """Return the bytes that ``rank`` sends to ranks of its own host.

    In a ring of G ranks the ranks of a host are adjacent, and each rank sends the same volume to the next rank. An
    all-reduce sends 2·(G-1)/G of the tensor, an all-gather or a reduce-scatter (G-1)/G of the full tensor. A broadcast,
    a scatter or a reduction to one rank sends the full tensor. A group that spans hosts also sends this volume
    inside each host; a group with a single rank per host sends nothing there. In an all-to-all each rank sends 1/G of
    its tensor to each peer on its host, or the share in ``counts``. A message counts at its sender.

    Args:
        operation: the operation's name in torch.ops.c10d or torch.ops._c10d_functional.
        nbytes: size of the full tensor.
        ranks: ranks of the group, or sender and receiver of a message.
        rank: this rank.
        ranks_per_host: ranks of a host; hosts have consecutive ranks.
        counts: rows of the tensor that an all-to-all sends to each rank of the group; None or empty: equally many.
    """
    near = [other // ranks_per_host == rank // ranks_per_host for other in ranks]
    on_host = sum(near)
    kind = operation.replace("_", "")
    if on_host == 1 or kind.startswith("recv"):
        return 0.0
    if "alltoall" in kind:
        rows = counts or [1] * len(ranks)
        sent = sum(count for count, other, here in zip(rows, ranks, near, strict=True) if here and other != rank)
        return sent / max(1, sum(rows)) * nbytes
    passes = next((passes for name, passes in _RING_PASSES.items() if name in kind), None)
    return nbytes if passes is None else passes * (len(ranks) - 1) / len(ranks) * nbytes


def _group(arguments: dict[str, Any]) -> dist.ProcessGroup:
    if "process_group" in arguments:
        return dist.ProcessGroup.unbox(arguments["process_group"])
    return dist.distributed_c10d._resolve_process_group(arguments["group_name"])


def _nbytes(value: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_nbytes, value)) if isinstance(value, (list, tuple)) else 0
