"""Simulated clock, traffic and memory of one device during a step.

The device computes sequentially. Channels between nodes and inside a node each run their parts of collectives
sequentially, overlapped with the computation as far as ``hidden`` allows. A short collective, such as the statistics of
a norm, shares the channel with a long collective of another axis and does not queue behind it.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from gpt4d.config import ClusterConfig, GridSizes
from gpt4d.config.trainer_profiles import PROFILES
from gpt4d.parallel.comm.pending import num_pieces
from gpt4d.parallel.symbolic.costs import Computation
from gpt4d.planner.topology import ALL_TO_ALL, SHIFT, RankSpan, spans, speed

AXES = (*GridSizes._fields, "context", "batch", "world", "stage")
KINDS = "all_reduce", "all_gather", "reduce_scatter"  # in rings
_SCORE_BYTES = 2
_WITHOUT_RECOMPUTED_SCORES = 6 / 7  # FLOPs of attention that does not recompute its scores in the backward
_SHORT = 0.1  # share of a channel's busy time: a shorter collective of another axis shares the channel


def sent_bytes(kind: str, size: int, nbytes: float) -> float:
    """Return the bytes that each of ``size`` ranks sends (4D paper, Eq. 1-3).

    ``nbytes``: size of the rank's own shard for an all-gather, of the full tensor for all-reduce and reduce-scatter.
    For a shift it is the size of the message, and for an all-to-all the size of the rows for other ranks.
    """
    if kind in (SHIFT, ALL_TO_ALL):
        return nbytes
    if kind == "all_gather":
        return (size - 1) * nbytes
    return (2 if kind == "all_reduce" else 1) * (size - 1) / size * nbytes


class CollectiveCost(NamedTuple):
    """The cost of a collective on one device."""

    sent: float  # bytes
    parts: tuple[float, ...]  # seconds on each channel
    pieces: int
    seconds: float
    exposed_s: float  # seconds that cannot overlap with computation


class Links:
    """Speed of each kind of collective on each axis of a grid, and the size of each axis (``topology.spans``).

    The axis ``stage`` consists of all devices of the grid.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        sizes: GridSizes,
        rank_order: str | None = None,
        world: int | None = None,
        context: int = 1,
    ):
        by_axis = spans(sizes, rank_order, world, context) | {"stage": RankSpan(1, sizes.devices)}
        self.sizes = {axis: span.size for axis, span in by_axis.items()}
        kinds, exposed = (*KINDS, SHIFT, ALL_TO_ALL), 1 - PROFILES[cluster.trainer].overlapped_tensor
        self.speeds = {(kind, axis): speed(cluster, kind, span) for axis, span in by_axis.items() for kind in kinds}
        for key in [(kind, "x") for kind in KINDS]:
            self.speeds[key] = self.speeds[key]._replace(s_per_byte=exposed * self.speeds[key].s_per_byte)
        self.costs: dict[tuple[str, str, float, float], CollectiveCost] = {}  # cache

    def cost(self, kind: str, axis: str, nbytes: float, received: float = 0.0) -> CollectiveCost:
        """Return the cost of a collective; ``nbytes`` as for ``sent_bytes``.

        ``received``: bytes that an all-to-all receives, which take longer than the sent bytes if they are more.
        """
        size, speed = self.sizes[axis], self.speeds[kind, axis]
        sent = sent_bytes(kind, size, nbytes)
        parts, rows = speed.parts(max(sent, received)), {"reduce_scatter": size, "all_reduce": speed.local}.get(kind, 1)
        cost = CollectiveCost(sent, parts, num_pieces(nbytes / rows), sum(parts), sum(parts) * (1 - speed.hidden))
        self.costs[kind, axis, nbytes, received] = cost
        return cost


def _newest_kernel(cluster: ClusterConfig) -> int:
    """Return the version of FlashAttention with which a GPU reaches ``attention_tflops``: 3 from Hopper on."""
    return 3 if cluster.fp8_tflops else 2


class Rates(NamedTuple):
    """The speed of a device, and the memory traffic of its trainer's kernels (gpt4d.config.trainer_profiles)."""

    s_per_flop: float
    s_per_byte: float
    operation_s: float
    s_per_attention_flop: float | None = None  # None: attention takes the time of its products with all keys
    s_per_float8_flop: float | None = None  # None: float8 products take as long as others
    product_hidden: float = 1.0  # fraction of a product's reads and writes, or of its arithmetic, that overlaps
    score_passes: float = 0.0  # over the scores of attention in a forward; 0: one kernel keeps them on the chip
    float8_copies: float = 1.0  # bytes of float8 conversions relative to gpt4d's

    @classmethod
    def of(cls, cluster: ClusterConfig) -> "Rates":
        trainer = PROFILES[cluster.trainer]
        attention = cluster.attention_tflops and 1e-12 / (
            trainer.attention_share(_newest_kernel(cluster)) * cluster.attention_tflops
        )
        float8 = cluster.fp8_tflops and 1e-12 / cluster.fp8_tflops
        products, s_per_byte = 1e-12 / cluster.matmul_tflops, 1e-9 / cluster.memory_gb_s
        passes, copies = trainer.score_passes, trainer.float8_copies
        operation_s = cluster.operation_us / 1e6
        return cls(products, s_per_byte, operation_s, attention, float8, cluster.product_hidden, passes, copies)

    def seconds(self, computation: Computation) -> float:
        """Return the seconds of a product or of elementwise operations.

        A product multiplies while it reads and writes. It takes the longer of both times, and the part of the shorter
        time that does not overlap. Its copies take more time. Attention without a fused kernel multiplies with all
        keys, keeps the scores for the backward, and reads and writes them in bf16.
        """
        flops, moved, operations, attention, float8, copied, head_size = computation
        if attention is not None and self.score_passes:
            product_s = flops * _WITHOUT_RECOMPUTED_SCORES * self.s_per_flop
            moved += self.score_passes * _SCORE_BYTES * flops / (4 * head_size)
            return product_s + moved * self.s_per_byte + operations * self.operation_s
        if attention is not None and self.s_per_attention_flop is not None:
            product_s = attention * self.s_per_attention_flop
        elif float8 and self.s_per_float8_flop is not None:
            product_s = flops * self.s_per_float8_flop
        else:
            product_s = flops * self.s_per_flop
        moved_s, copied_s = moved * self.s_per_byte, copied * self.s_per_byte
        if float8:
            copied_s *= self.float8_copies
        exposed_s = (1 - self.product_hidden) * min(product_s, moved_s)
        return max(product_s, moved_s) + exposed_s + copied_s + operations * self.operation_s


class PendingCollective(NamedTuple):
    """Collective that has started, with the time at which it ends."""

    axis: str
    ends: float


class ComputingDevice:
    """Memory and rates of a device that computes layers (gpt4d.parallel.symbolic.stage.CommunicatingDevice)."""

    def __init__(self, rates: Rates, compiled: bool, is_cpu: bool, imbalance: float = 1.0):
        self.rates, self.compiled, self.is_cpu, self.imbalance = rates, compiled, is_cpu, imbalance
        self.plans: dict[tuple, Any] = {}
        self.numbers: Iterator[int] = itertools.count()
        self.records, self.recomputation = True, None
        self.held, self.peak = 0, 0.0

    def hold(self, nbytes: int) -> None:
        """Allocate memory until ``release``."""
        self.held += nbytes
        if self.held > self.peak:
            self.peak = self.held

    def release(self, nbytes: int) -> None:
        self.held -= nbytes

    def scratch(self, nbytes: float) -> None:
        """Allocate memory and release it immediately, so that only the peak changes."""
        if self.held + nbytes > self.peak:
            self.peak = self.held + nbytes


class Device(ComputingDevice):
    """Clock, traffic and memory of one device. Times in seconds, sizes in bytes."""

    def __init__(self, cluster: ClusterConfig, links: Links, compiled: bool = False):
        super().__init__(Rates.of(cluster), compiled, cluster.device == "cpu")
        self.links = links
        self.skew_s = cluster.skew_us / 1e6
        # The slowest of n devices, whose speeds have a normal distribution, determines a step.
        self.slowest = 1 + cluster.spread * math.sqrt(2 * math.log(links.sizes["world"]))
        self.now = 0.0
        self.compute_s = 0.0
        # Times at which the channels become free: before the part between nodes, between nodes, and after it.
        self.channel_free = [0.0, 0.0, 0.0]
        self.axis_free: defaultdict[str, float] = defaultdict(float)  # ends of the last collectives of each axis
        self.bytes: defaultdict[str, float] = defaultdict(float)
        self.time_s: defaultdict[str, float] = defaultdict(float)  # collectives, hidden or exposed
        self.exposed_s: defaultdict[str, float] = defaultdict(float)

    def totals(self) -> tuple[float, ...]:
        """Return seconds so far, seconds of computation, then per axis: bytes, seconds, exposed seconds."""
        totals = [self.now, self.compute_s]
        for axis in AXES:
            totals += self.bytes[axis], self.time_s[axis], self.exposed_s[axis]
        return tuple(totals)

    def compute(self, computation: Computation) -> None:
        """Run a product or elementwise operations."""
        self.work(self.rates.seconds(computation))

    def work(self, seconds: float, held: int = 0, peak: float = 0) -> None:
        """Compute for some time, with a peak of ``peak`` bytes, and change the memory in use by ``held`` bytes."""
        seconds *= self.slowest
        self.now += seconds
        self.compute_s += seconds
        if self.held + peak > self.peak:
            self.peak = self.held + peak
        self.held += held

    def start(self, kind: str, axis: str, nbytes: float, received: float = 0.0) -> PendingCollective | None:
        """Start a collective; arguments as for ``Links.cost``. Return None on an axis of one device."""
        if self.links.sizes[axis] == 1:
            return None
        key = kind, axis, nbytes, received
        cost = self.links.costs.get(key) or self.links.cost(*key)
        sent, parts, pieces, seconds, exposed_s = cost
        ready = ends = self.now + self.skew_s  # times at which the first and the last piece of a part are ready
        if self.axis_free[axis] <= self.now and seconds < _SHORT * (max(self.channel_free) - self.now):
            ends += 2 * seconds
            self.channel_free = [free + part_s for free, part_s in zip(self.channel_free, parts, strict=True)]
        else:
            for channel, part_s in enumerate(parts):
                if part_s:
                    begins = max(ready, self.channel_free[channel])
                    ends = self.channel_free[channel] = max(begins + part_s, ends + part_s / pieces)
                    ready = begins + part_s / pieces
        self.axis_free[axis] = ends
        self.bytes[axis] += sent
        self.time_s[axis] += seconds
        self._occupy(axis, exposed_s)
        return PendingCollective(axis, ends)

    def _occupy(self, axis: str, seconds: float) -> None:
        self.now += seconds
        self.exposed_s[axis] += seconds

    def wait(self, collective: object) -> None:
        if isinstance(collective, PendingCollective):
            self._occupy(collective.axis, max(0.0, collective.ends - self.now))

    def do(self, kind: str, axis: str, nbytes: float) -> None:
        self.wait(self.start(kind, axis, nbytes))
