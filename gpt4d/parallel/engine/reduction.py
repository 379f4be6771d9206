"""Gradient buckets, and the times of their reductions and of the all-gathers of updated rows. No torch here.

The gradient reducer (gpt4d.parallel.gradient_reducer) and the planner build the same buckets from the same specs. Both
execute the decisions of ``GradientSums``, each on its own device.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from gpt4d.config import GridSizes
from gpt4d.parallel.layout import ParameterSpec

_MIN_BYTES, _MAX_BYTES = 1 << 20, 32 << 20  # below, latency dominates; above, it is negligible
_MIN_MESSAGE_BYTES = 1 << 20  # in a ring


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters whose gradients one collective per axis reduces."""

    names: tuple[str, ...]
    elements: int  # elements of all gradients on one device
    axes: tuple[str, ...]  # the axes to reduce over, innermost first
    sharded: bool  # the gradients are reduce-scattered over the last axis, not all-reduced


def default_bucket_bytes(gradient_bytes: int, sizes: GridSizes, shard_states: bool) -> int:
    """Return the size in bytes of the gradient buckets for gradients of ``gradient_bytes`` in total.

    A bucket has 1/32 of the gradients, within bounds. So the first reduction starts early in the backward, and little
    is left to reduce when the backward ends.

    The reduce-scatters and all-gathers of sharded states take one message per rank of data, each with a rank's share of
    the bucket. So the upper bound grows with the number of ranks.
    """
    max_bytes = max(_MAX_BYTES, sizes.data * _MIN_MESSAGE_BYTES) if shard_states else _MAX_BYTES
    return min(max(gradient_bytes // 32, _MIN_BYTES), max_bytes)


def gradient_buckets(
    parameters: Mapping[str, ParameterSpec],
    batch_axes: Callable[[ParameterSpec], Sequence[str]],
    sizes: GridSizes,
    shard_states: bool,
    max_bytes: int,
    element_bytes: int = 4,
) -> Iterator[Bucket]:
    """Yield the buckets in the order in which the backward completes them, about the reverse of ``parameters``.

    Gradients of z-sharded weights have already been reduce-scattered over z. ``batch_axes`` returns the axes that split
    the samples, tokens or heads that a parameter acts on. Along any other axis, its replicas have equal gradients and
    need no all-reduce. A bucket is closed when it has ``max_bytes``.
    """

    def kind(spec: ParameterSpec) -> tuple[int, tuple[str, ...], bool]:
        axes = tuple(axis for axis in batch_axes(spec) if axis not in spec.layout.axes and getattr(sizes, axis) > 1)
        elements = spec.local_elements(sizes)
        return elements, axes, spec.optimized_elements(sizes, shard_states) < elements

    distinct = {id(spec): spec for spec in parameters.values()}  # equal blocks share their specs
    kinds = {key: kind(spec) for key, spec in distinct.items()}
    filling: dict[tuple, tuple[list[str], int]] = {}
    for name, spec in reversed(list(parameters.items())):
        elements, axes, sharded = kinds[id(spec)]
        if not axes or spec.frozen:
            continue
        names, filled = filling.get((axes, sharded), ([], 0))
        names.append(name)
        filling[axes, sharded] = names, filled + elements
        if (filled + elements) * element_bytes >= max_bytes:
            del filling[axes, sharded]
            yield Bucket(tuple(names), filled + elements, axes, sharded)
    for (axes, sharded), (names, filled) in filling.items():
        yield Bucket(tuple(names), filled, axes, sharded)


_MAX_INFLIGHT_GATHERS = 2  # collectives share a link: a third gather delays the gather that is needed first

Packed = TypeVar("Packed")  # the gradients or the rows of a bucket's parameters in one buffer
Pending = TypeVar("Pending")  # a collective in flight


class GradientDevice(Protocol[Packed, Pending]):
    """The operations of a device on the gradients of a bucket."""

    def pack(self, bucket: Bucket) -> Packed:
        """Copy the gradients of the parameters into one buffer, and release the separate gradients."""

    def start_sum(self, bucket: Bucket, kind: str, axis: str, packed: Packed) -> Pending:
        """Start the collective ``kind``, ``all_reduce`` or ``reduce_scatter``, over an axis."""

    def wait(self, pending: Pending) -> Packed:
        """Wait for a collective and return its result."""

    def unpack(self, bucket: Bucket, total: Packed) -> None:
        """Set each parameter's gradient from the reduced buffer."""

    def start_row_gather(self, bucket: Bucket) -> Pending:
        """Start the all-gather of the parameters' updated rows over the bucket's last axis."""

    def write_rows(self, bucket: Bucket, rows: Packed) -> None:
        """Copy the gathered rows into the parameters."""


class GradientSums(Generic[Packed, Pending]):
    """Decides when the gradients of a stage are reduced.

    The reduction of a bucket starts when its last gradient is complete, and overlaps with the backward of earlier
    layers. A bucket with several axes is reduced over one axis at a time. The reduction over the next axis starts when
    another bucket starts.

    Args:
        device: executes the reductions.
        buckets: the buckets in the order in which the backward completes them.
        overlap: reductions overlap with the backward.
    """

    def __init__(self, device: GradientDevice[Packed, Pending], buckets: Sequence[Bucket], overlap: bool):
        self.device, self.buckets, self.overlap = device, buckets, overlap
        self.sent: dict[Bucket, Pending] = {}
        self._bucket_of = {name: bucket for bucket in buckets for name in bucket.names}
        self._overlaps_backward = overlap
        self._missing: dict[Bucket, int] = {}  # number of contributions that a bucket's gradients lack in this step
        self._axes_left: dict[Bucket, Sequence[str]] = {}  # axes that a bucket in flight is reduced over next
        self._to_gather: list[Bucket] = []  # buckets whose updated rows other ranks lack, in reverse order of use
        self.arriving: dict[Bucket, Pending] = {}  # all-gathers of updated rows in flight

    def begin(self, contributions: Mapping[str, int], overlaps_backward: bool = True) -> None:
        """Start a step. ``finish`` ends it.

        ``contributions``: number of contributions to each parameter's gradient. If ``overlaps_backward`` is false, all
        reductions start in ``finish``.
        """
        self._overlaps_backward = self.overlap and overlaps_backward
        self._missing = {bucket: sum(contributions.get(name, 0) for name in bucket.names) for bucket in self.buckets}

    def note_contribution(self, name: str) -> None:
        """Count a contribution to a gradient, and start the bucket's reduction after the last contribution."""
        if bucket := self._bucket_of.get(name):
            self._missing[bucket] = self._missing.get(bucket, 0) - 1
            if self._overlaps_backward and self._missing[bucket] == 0:
                self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        assert bucket not in self.sent, f"a gradient of {bucket.names} has more contributions than its description says"
        waiting = list(self._axes_left)
        self._start_sum(bucket, bucket.axes, self.device.pack(bucket))
        self._continue_sums(waiting)

    def _start_sum(self, bucket: Bucket, axes: Sequence[str], packed: Packed) -> None:
        axis, *others = axes
        kind = "reduce_scatter" if bucket.sharded and not others else "all_reduce"
        self.sent[bucket] = self.device.start_sum(bucket, kind, axis, packed)
        if others:
            self._axes_left[bucket] = others

    def _continue_sums(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            self._start_sum(bucket, self._axes_left.pop(bucket), self.device.wait(self.sent[bucket]))

    def wait_for_collectives(self) -> None:
        """Wait for all reductions in flight. Their results are used as if they were still in flight."""
        for pending in self.sent.values():
            self.device.wait(pending)

    def finish(self) -> None:
        """End a step's backward: reduce the remaining gradients, and wait for all reductions."""
        for bucket in self.buckets:
            if bucket not in self.sent:
                self._send(bucket)
        while self._axes_left:
            self._continue_sums(list(self._axes_left))
        for bucket, pending in self.sent.items():
            self.device.unpack(bucket, self.device.wait(pending))
        self.sent.clear()
        self._missing.clear()

    def start_row_gathers(self) -> None:
        """Start the all-gathers of updated rows, a few buckets at a time, in the order of the next forward."""
        self._to_gather = [bucket for bucket in self.buckets if bucket.sharded]
        for _ in range(_MAX_INFLIGHT_GATHERS):
            self._gather_next()
        if not self.overlap:
            self.wait_all_rows()

    def _gather_next(self) -> None:
        if self._to_gather:
            bucket = self._to_gather.pop()
            self.arriving[bucket] = self.device.start_row_gather(bucket)

    def wait_all_rows(self) -> None:
        """Wait until every parameter is up to date."""
        while self.arriving:
            self._wait_rows(next(iter(self.arriving)))

    def wait_rows(self, name: str) -> None:
        """Wait until a parameter is up to date."""
        if bucket := self._bucket_of.get(name):
            self._wait_rows(bucket)

    def _wait_rows(self, bucket: Bucket) -> None:
        while bucket in self._to_gather:
            self._gather_next()
        if bucket in self.arriving:
            rows = self.device.wait(self.arriving.pop(bucket))
            self._gather_next()
            self.device.write_rows(bucket, rows)
