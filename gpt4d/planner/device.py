"""One device of the grid as it goes through a step: what it sends, how long that takes, what it holds meanwhile.

The device computes one thing after another. Collectives between nodes and those inside a node each have a channel of
their own, in which they pass one after another beside the computation, as far as they can.
"""

from collections import defaultdict
from typing import NamedTuple

from gpt4d.config import ClusterConfig, GridSizes
from gpt4d.planner.topology import Speed, spans, speed

AXES = (*GridSizes._fields, "world")
KINDS = "all_reduce", "all_gather", "reduce_scatter"


def sent_bytes(kind: str, size: int, nbytes: float) -> float:
    """What each of ``size`` ranks sends (4D paper, Eq. 1-3): an all-gather of its own shard of ``nbytes``, a
    reduce-scatter or an all-reduce of the whole."""
    if kind == "all_gather":
        return (size - 1) * nbytes
    return (2 if kind == "all_reduce" else 1) * (size - 1) / size * nbytes


class Links:
    """How fast each kind of collective goes on each axis of a grid, and over how many ranks."""

    def __init__(self, cluster: ClusterConfig, sizes: GridSizes):
        along = spans(sizes)
        self.sizes = {axis: span.size for axis, span in along.items()}
        self.speeds: dict[tuple[str, str], Speed] = {
            (kind, axis): speed(cluster, kind, span) for axis, span in along.items() for kind in KINDS
        }


class UnderWay(NamedTuple):
    """A collective that has started."""

    axis: str
    ends: float


class Device:
    """The clock and the memory of one device. Times in seconds, sizes in bytes."""

    def __init__(self, cluster: ClusterConfig, links: Links):
        self.links = links
        self.s_per_flop = 1e-12 / cluster.matmul_tflops
        self.s_per_byte = 1e-9 / cluster.memory_gb_s
        self.operation_s = cluster.operation_us / 1e6
        self.skew_s = cluster.skew_us / 1e6
        self.now = 0.0
        self.compute_s = 0.0
        self.free = [0.0, 0.0]  # when the channel inside the node, and that between nodes, is
        self.bytes: defaultdict[str, float] = defaultdict(float)
        self.time_s: defaultdict[str, float] = defaultdict(float)  # of collectives, hidden or not
        self.exposed_s: defaultdict[str, float] = defaultdict(float)
        self.held = self.peak = 0

    def numbers(self) -> tuple[float, ...]:
        """Seconds so far, those of computation, then of each axis: bytes, seconds, exposed seconds."""
        found = [self.now, self.compute_s]
        for axis in AXES:
            found += self.bytes[axis], self.time_s[axis], self.exposed_s[axis]
        return tuple(found)

    def compute(self, flops: float = 0.0, moved: float = 0.0, operations: int = 1) -> None:
        """Some operations that take ``flops`` and read and write ``moved`` bytes."""
        seconds = flops * self.s_per_flop + moved * self.s_per_byte + operations * self.operation_s
        self.now += seconds
        self.compute_s += seconds

    def start(self, kind: str, axis: str, nbytes: float) -> UnderWay | None:
        """A collective of ``nbytes`` here: a shard to gather, or a whole to reduce. None on an axis of one device."""
        size = self.links.sizes[axis]
        if size == 1:
            return None
        sent = sent_bytes(kind, size, nbytes)
        speed = self.links.speeds[kind, axis]
        seconds = speed.latency_s + sent * speed.s_per_byte
        self.bytes[axis] += sent
        self.time_s[axis] += seconds
        ends = max(self.now + self.skew_s, self.free[speed.across]) + seconds
        self.free[speed.across] = ends
        # As much as cannot pass beside a computation, the device itself is busy with.
        own = seconds * (1 - speed.hidden)
        self.now += own
        self.exposed_s[axis] += own
        return UnderWay(axis, ends)

    def wait(self, collective: UnderWay | None) -> None:
        if collective is not None and collective.ends > self.now:
            self.exposed_s[collective.axis] += collective.ends - self.now
            self.now = collective.ends

    def do(self, kind: str, axis: str, nbytes: float) -> None:
        self.wait(self.start(kind, axis, nbytes))

    def hold(self, nbytes: int) -> None:
        """Memory that is taken until it is released."""
        self.held += nbytes
        if self.held > self.peak:
            self.peak = self.held

    def release(self, nbytes: int) -> None:
        self.held -= nbytes

    def scratch(self, nbytes: int) -> None:
        """Memory that is taken for a moment."""
        if self.held + nbytes > self.peak:
            self.peak = self.held + nbytes
