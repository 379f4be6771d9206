"""What an axis carried, and how much of it the computation noticed."""

import time
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

    def read(self) -> dict[str, float]:
        """``{"bytes", "exposed_s", "hidden_s"}`` since the last call, and starts anew. On a GPU it waits for it."""
        exposed = sum(_seconds(*wait) for wait in self.waits)
        running = _covered(self.runs)
        result = {"bytes": self.bytes, "exposed_s": exposed, "hidden_s": max(0.0, running - exposed)}
        self.bytes = 0.0
        self.waits.clear()
        self.runs.clear()
        return result


def now(device: torch.device):
    """A point in time on ``device``: seconds of the host's clock, or an event of the GPU's current stream."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()


class Run:
    """One collective under way: notes on its axis when it ran and how long it was waited for."""

    def __init__(self, traffic: Traffic, work: dist.Work, device: torch.device, sent_bytes: float):
        self.traffic, self.work, self.device = traffic, work, device
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


def _seconds(start, stop) -> float:
    if isinstance(start, float):
        return stop - start
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def _covered(intervals: list[tuple]) -> float:
    """Seconds that at least one of the intervals covers: two collectives at once are not twice the time."""
    if not intervals:
        return 0.0
    origin = intervals[0][0]
    spans = sorted((_seconds(origin, a), _seconds(origin, b)) for a, b in intervals)
    covered, reached = 0.0, -float("inf")
    for start, stop in spans:
        covered += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return covered
