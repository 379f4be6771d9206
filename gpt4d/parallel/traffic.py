"""What an axis carried, and how much of it the computation noticed."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist


@dataclass
class Traffic:
    """Counts of one axis since they were last read.

    A collective is *exposed* while the computation waits for it and *hidden* while it runs beside the computation.
    """

    bytes: float = 0.0  # sent by this rank, by the ring algorithms' volumes (4D paper, Eq. 1-3)
    waits: list[tuple] = field(default_factory=list)  # (from, to) of the computation's waits
    runs: list[tuple] = field(default_factory=list)  # (from, to) of the collectives; the last may still be under way
    begun: int = 0  # collectives, ever
    waiting: tuple[str, int, float] | None = None  # for which the computation waits now: name, number, since when
    named_range: Callable[[str], AbstractContextManager] = nullcontext  # a profiler's, while one is at work

    @contextmanager
    def noted(self, name: str, number: int) -> Iterator[None]:
        """While entered, this rank waits for a collective. PeerLost if it cannot be, as when another rank has ended."""
        self.waiting = name, number, time.monotonic()
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise PeerLost(f"{name}: {error}") from error
        finally:
            self.waiting = None

    def read(self) -> dict[str, float]:
        """``{"bytes", "exposed_s", "hidden_s"}`` since the last call, and starts anew. On a GPU it waits for it."""
        result = {"bytes": self.bytes, **self.seconds()}
        self.bytes = 0.0
        self.waits.clear()
        self.runs.clear()
        return result

    def seconds(self) -> dict[str, float]:
        """``{"exposed_s", "hidden_s"}`` of what is noted here."""
        exposed = sum(seconds_between(*wait) for wait in self.waits)
        # A wait can outlast its collective, on a host with more threads than cores: that much is exposed all the same.
        return {"exposed_s": exposed, "hidden_s": max(0.0, _covered(self.runs + self.waits) - exposed)}

    def since(self, origin) -> "Traffic":
        """A copy of the intervals that began after ``origin``, a point in time of ``now``, in seconds since it."""
        waits, runs = _since(origin, self.waits), _since(origin, self.runs)
        return Traffic(waits=[w for w in waits if w[0] >= 0], runs=[r for r in runs if r[0] >= 0])


def now(device: torch.device):
    """A point in time on ``device``: seconds of the host's clock, or an event of the GPU's current stream."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()


class PeerLost(RuntimeError):
    """A collective failed here, most likely because another rank has ended."""


class InFlightCollective:
    """One collective under way: notes on its axis when it ran and how long it was waited for."""

    def __init__(self, traffic: Traffic, work: dist.Work, device: torch.device, sent_bytes: float):
        self.traffic, self.work, self.device = traffic, work, device
        self.name, self.number = "", traffic.begun  # in a profiler's trace, and in what is told of a hang
        self.started = now(device)
        traffic.bytes += sent_bytes
        if device.type == "cuda":
            # The end is seen from a stream of its own: the computation's must not wait for it.
            with torch.cuda.stream(_watching(device)):
                work.wait()
                traffic.runs.append((self.started, now(device)))
        elif isinstance(work, dist.Work):
            work.get_future().add_done_callback(lambda _: traffic.runs.append((self.started, time.perf_counter())))

    def wait(self) -> None:
        before = now(self.device)
        with self.traffic.named_range(f"wait {self.name}"), self.traffic.noted(self.name, self.number):
            self.work.wait()
        after = now(self.device)
        self.traffic.waits.append((before, after))
        if not isinstance(self.work, dist.Work):  # through memory: it runs until someone has waited
            self.traffic.runs.append((self.started, after))


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _watching(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def seconds_between(start, stop) -> float:
    """Between two points in time of ``now``; on a GPU it waits for both."""
    if isinstance(start, float):
        return stop - start
    start.synchronize()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def _since(origin, intervals: list[tuple]) -> list[tuple[float, float]]:
    return [(seconds_between(origin, a), seconds_between(origin, b)) for a, b in intervals]


def _covered(intervals: list[tuple]) -> float:
    """Seconds that at least one of the intervals covers: two collectives at once are not twice the time."""
    if not intervals:
        return 0.0
    covered, reached = 0.0, -float("inf")
    for start, stop in sorted(_since(intervals[0][0], intervals)):
        covered += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return covered
