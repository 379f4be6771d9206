"""Bytes sent along an axis, and the time its collectives ran and were waited for."""

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class StartedCollective(NamedTuple):
    """A collective that this rank has started."""

    name: str  # kind and axis, such as all_gather z; shown in profiler traces and hang reports
    number: int  # number of this axis's collectives since the process started
    time: float  # time.monotonic
    parameter: object = None  # whose layer communicates; None if it is not one layer's


@dataclass
class CommStats:
    """Counters of one axis since they were last read.

    A collective is *exposed* while the computation waits for it and *hidden* while it overlaps with the computation.
    On a GPU both are measured with events, which the host does not wait for until they are read.
    """

    bytes: float = 0.0  # sent by this rank, by the ring algorithms' volumes (4D paper, Eq. 1-3)
    wait_intervals: list[tuple] = field(default_factory=list)  # (start, stop) of the computation's waits
    run_intervals: list[tuple] = field(default_factory=list)  # (start, stop) of collectives; the last may be in flight
    timed: bool = True  # record intervals, which on a GPU takes four events for each collective
    capturing: bool = False  # collectives become a part of a CUDA graph, whose events nobody may query
    num_started: int = 0  # collectives since the process started; never reset
    current_wait: StartedCollective | None = None  # collective that the host starts or waits for now
    unfinished: deque[tuple[StartedCollective, torch.cuda.Event]] = field(default_factory=deque)  # on a GPU, with ends
    named_range: Callable[[str], AbstractContextManager] = nullcontext  # record_function while a profiler records
    _watching: torch.cuda.Stream | None = None

    def start(self, name: str, parameter: object = None) -> StartedCollective:
        """Count a collective."""
        self.num_started += 1
        return StartedCollective(name, self.num_started, time.monotonic(), parameter)

    def track_wait(self, collective: StartedCollective) -> AbstractContextManager[None]:
        """Set ``current_wait`` while this rank waits for a collective. Raises PeerLost if the collective fails."""
        return _TrackedWait(self, collective)

    def time_wait(self, device: torch.device) -> AbstractContextManager[None]:
        """Record a wait of the computation on ``device``."""
        return _TimedWait(self, device)

    def record_run(self, started: Any, ended: Any) -> None:
        """Record when a collective ran, in results of ``now``."""
        if self.timed:
            self.run_intervals.append((started, ended))

    def oldest_unfinished(self) -> StartedCollective | None:
        """Return the oldest collective that has not ended on the GPU, or else the one that the host waits for.

        Any thread may call it. Raises torch.AcceleratorError if the GPU has failed.
        """
        on_gpu = (collective for collective, end in self.unfinished.copy() if not end.query())
        return next(on_gpu, self.current_wait)

    def record_end(self, work: dist.Work, device: torch.device) -> torch.cuda.Event:
        """Return an event that is recorded when ``work`` ends on the GPU.

        Each axis has a stream of its own that waits for it. The computation's stream must not wait yet, and on a shared
        stream a short collective seems to last as long as the long collective of another axis before it.
        """
        self._watching = self._watching or torch.cuda.Stream(device)
        end = torch.cuda.Event(enable_timing=self.timed)
        with torch.cuda.stream(self._watching):
            work.wait()
            end.record()
        return end

    def watch(self, collective: StartedCollective, end: torch.cuda.Event) -> None:
        """Keep ``collective`` for ``oldest_unfinished`` until the event ``end`` is complete."""
        while self.unfinished and self.unfinished[0][1].query():
            self.unfinished.popleft()
        self.unfinished.append((collective, end))

    def count_graph(self, name: str, collectives: int, sent_bytes: float, end: torch.cuda.Event) -> None:
        """Count the collectives of a launched CUDA graph, and watch it as one collective that ends at ``end``."""
        self.num_started += collectives
        self.bytes += sent_bytes
        self.watch(StartedCollective(name, self.num_started, time.monotonic()), end)

    def read(self) -> dict[str, float]:
        """Return ``{"bytes", "exposed_s", "hidden_s"}`` and reset them. On a GPU, wait for the recorded events."""
        result = {"bytes": self.bytes, **self.seconds()}
        self.bytes = 0.0
        self.wait_intervals.clear()
        self.run_intervals.clear()
        return result

    def seconds(self) -> dict[str, float]:
        """Return ``{"exposed_s", "hidden_s"}`` of the recorded intervals."""
        exposed = sum(seconds_between(*wait) for wait in self.wait_intervals)
        # With more threads than cores, a wait can outlast its collective, and the additional time counts as exposed.
        hidden = max(0.0, _covered_s(self.run_intervals + self.wait_intervals) - exposed)
        return {"exposed_s": exposed, "hidden_s": hidden}

    def since(self, origin) -> "CommStats":
        """Return a copy of the intervals that began after ``origin`` (from ``now``), in seconds relative to it."""
        waits, runs = _relative_to(origin, self.wait_intervals), _relative_to(origin, self.run_intervals)
        return CommStats(wait_intervals=[w for w in waits if w[0] >= 0], run_intervals=[r for r in runs if r[0] >= 0])


def now(device: torch.device):
    """Return a point in time on ``device``: seconds of the host's clock, or an event of the GPU's current stream."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class PeerLost(RuntimeError):
    """A collective failed here, most likely because another rank has ended."""


# Classes, because each collective enters these contexts, and a generator takes twice the time.


class _TrackedWait:
    """The context of ``CommStats.track_wait``."""

    __slots__ = ("collective", "traffic")

    def __init__(self, traffic: CommStats, collective: StartedCollective):
        self.traffic, self.collective = traffic, collective

    def __enter__(self) -> None:
        self.traffic.current_wait = self.collective

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.traffic.current_wait = None
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            raise PeerLost(f"{self.collective.name}: {error}") from error


class _TimedWait:
    """The context of ``CommStats.time_wait``."""

    __slots__ = ("before", "device", "traffic")

    def __init__(self, traffic: CommStats, device: torch.device):
        self.traffic, self.device = traffic, device

    def __enter__(self) -> None:
        self.before = now(self.device) if self.traffic.timed else None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.before is not None and error is None:
            self.traffic.wait_intervals.append((self.before, now(self.device)))


class InFlightCollective:
    """One collective in flight: records on its axis when it ran and how long the computation waited for it.

    It is created while ``traffic`` tracks its start. Its bytes always count; its times count if the axis is ``timed``.

    Args:
        traffic: the counters of the axis.
        work: the handle of the collective, a dist.Work on a GPU; as described for Transport on a CPU.
        device: where the computation runs.
        sent_bytes: bytes that this rank sends.
        overlaps: the computation may continue before it waits; if false, ``wait`` follows immediately, and the
            collective ends where the wait ends.
    """

    def __init__(self, traffic: CommStats, work: Any, device: torch.device, sent_bytes: float, overlaps: bool = True):
        assert traffic.current_wait
        self.traffic, self.work, self.device, self.collective = traffic, work, device, traffic.current_wait
        self.started = now(device) if traffic.timed else None
        self.overlaps = overlaps
        self.end: torch.cuda.Event | None = None  # on a GPU
        traffic.bytes += sent_bytes
        if not overlaps:
            return
        if device.type != "cpu":
            self.end = traffic.record_end(work, device)
            traffic.watch(self.collective, self.end)
        elif self.started is not None:
            # Without self: a cycle keeps the tensors of ``work``.
            work.on_end(partial(traffic.record_run, self.started))

    def wait(self) -> None:
        traffic = self.traffic
        with traffic.named_range(f"wait {self.collective.name}"), traffic.track_wait(self.collective):
            if self.overlaps:
                with traffic.time_wait(self.device):
                    self.work.wait()
            else:
                self.work.wait()
                self._record_wait()
        if self.started is not None and self.end is not None:
            traffic.record_run(self.started, self.end)

    def _record_wait(self) -> None:
        """Record the end of a collective that does not overlap with the computation."""
        traffic, on_gpu = self.traffic, self.device.type != "cpu"
        if self.started is not None:
            self.end = now(self.device)
            traffic.wait_intervals.append((self.started, self.end))
        elif on_gpu:
            self.end = torch.cuda.Event()
            self.end.record()
        if on_gpu:
            assert self.end is not None
            traffic.watch(self.collective, self.end)


def seconds_between(start, stop) -> float:
    """Return the seconds between two results of ``now``. On a GPU, wait for both."""
    if isinstance(start, float):
        return stop - start
    start.synchronize()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def _relative_to(origin, intervals: list[tuple]) -> list[tuple[float, float]]:
    return [(seconds_between(origin, start), seconds_between(origin, stop)) for start, stop in intervals]


def _covered_s(intervals: list[tuple]) -> float:
    """Return the seconds that at least one interval covers, so that concurrent collectives do not count twice."""
    if not intervals:
        return 0.0
    covered, reached = 0.0, -float("inf")
    for start, stop in sorted(_relative_to(intervals[0][0], intervals)):
        covered += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return covered
