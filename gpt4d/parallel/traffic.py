"""Bytes sent along an axis, and the time its collectives ran and were waited for."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from gpt4d.parallel.shared_memory import SharedMemoryCollective


@dataclass
class Traffic:
    """Counters of one axis since they were last read.

    A collective is *exposed* while the computation waits for it and *hidden* while it runs beside the computation.
    """

    bytes: float = 0.0  # sent by this rank, by the ring algorithms' volumes (4D paper, Eq. 1-3)
    wait_intervals: list[tuple] = field(default_factory=list)  # (start, stop) of the computation's waits
    run_intervals: list[tuple] = field(default_factory=list)  # (start, stop) of collectives; the last may be in flight
    num_started: int = 0  # collectives since the process started; never reset
    current_wait: tuple[str, int, float] | None = None  # collective the computation waits for: name, number, start
    named_range: Callable[[str], AbstractContextManager] = nullcontext  # record_function while a profiler records

    @contextmanager
    def track_wait(self, name: str, number: int) -> Iterator[None]:
        """Set ``current_wait`` while this rank waits for a collective. Raises PeerLost if the collective fails."""
        self.current_wait = name, number, time.monotonic()
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise PeerLost(f"{name}: {error}") from error
        finally:
            self.current_wait = None

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
        # With more threads than cores, a wait can outlast its collective; that time is exposed as well.
        hidden = max(0.0, _covered_s(self.run_intervals + self.wait_intervals) - exposed)
        return {"exposed_s": exposed, "hidden_s": hidden}

    def since(self, origin) -> "Traffic":
        """Return a copy of the intervals that began after ``origin`` (from ``now``), in seconds relative to it."""
        waits, runs = _relative_to(origin, self.wait_intervals), _relative_to(origin, self.run_intervals)
        return Traffic(wait_intervals=[w for w in waits if w[0] >= 0], run_intervals=[r for r in runs if r[0] >= 0])


def now(device: torch.device):
    """Return a point in time on ``device``: seconds of the host's clock, or an event of the GPU's current stream."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()


class PeerLost(RuntimeError):
    """A collective failed here, most likely because another rank has ended."""


class InFlightCollective:
    """One collective in flight: records on its axis when it ran and how long the computation waited for it."""

    def __init__(
        self, traffic: Traffic, work: dist.Work | SharedMemoryCollective, device: torch.device, sent_bytes: float
    ):
        self.traffic, self.work, self.device = traffic, work, device
        self.name, self.number = "", traffic.num_started  # shown in profiler traces and hang reports
        self.started = now(device)
        runs = traffic.run_intervals
        traffic.bytes += sent_bytes
        if device.type == "cuda":
            # A separate stream waits for the end, so that the computation's stream does not.
            with torch.cuda.stream(_end_stream(device)):
                work.wait()
                runs.append((self.started, now(device)))
        elif isinstance(work, dist.Work):
            work.get_future().add_done_callback(lambda _: runs.append((self.started, time.perf_counter())))

    def wait(self) -> None:
        before = now(self.device)
        with self.traffic.named_range(f"wait {self.name}"), self.traffic.track_wait(self.name, self.number):
            self.work.wait()
        after = now(self.device)
        self.traffic.wait_intervals.append((before, after))
        if not isinstance(self.work, dist.Work):  # Through shared memory, a collective runs until it is waited for.
            self.traffic.run_intervals.append((self.started, after))


_end_streams: dict[torch.device, torch.cuda.Stream] = {}


def _end_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _end_streams:
        _end_streams[device] = torch.cuda.Stream(device)
    return _end_streams[device]


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
    """Return the seconds that at least one interval covers, so that two collectives at once do not count twice."""
    if not intervals:
        return 0.0
    covered, reached = 0.0, -float("inf")
    for start, stop in sorted(_relative_to(intervals[0][0], intervals)):
        covered += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return covered
