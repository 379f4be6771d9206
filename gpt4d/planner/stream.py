"""What the stream of z-sharded weights and the sum of gradients do in a step: when they gather, scatter and sum.

The same decisions as gpt4d.parallel.weights and gpt4d.parallel.gradients take, on sizes alone.
"""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gpt4d.config import GridSizes, OverlapConfig
from gpt4d.parallel import limits
from gpt4d.planner.device import Device, UnderWay
from gpt4d.planner.workload import MASTER_BYTES, Tensor


class Use(NamedTuple):
    """One use of a weight in a microbatch."""

    phase: str  # forward, recomputation or backward
    name: str


class Stream:
    """The gathered weights of a device through a microbatch, whose ``uses`` are known."""

    def __init__(
        self,
        device: Device,
        weights: dict[str, int],
        uses: list[Use],
        cached: set[str],
        overlap: OverlapConfig,
        compute_bytes: int,
        gradients: "Gradients",
    ):
        """``weights``: elements of each streamed weight that a device stores."""
        self.device, self.weights, self.uses, self.cached = device, weights, uses, cached
        self.gz = device.links.sizes["z"]
        self.ahead = overlap.prefetch if overlap.all_gather and self.gz > 1 else 0
        self.under_way = limits.MAX_INFLIGHT_REDUCE_SCATTERS if overlap.reduce_scatter and self.gz > 1 else 0
        self.compute_bytes, self.gradients = compute_bytes, gradients
        # What is neither cast nor gathered is the parameter itself.
        self.copies = 0 if self.gz == 1 and compute_bytes == MASTER_BYTES else self.gz
        self.here: dict[str, UnderWay | None] = {}
        self.scattering: deque[tuple[str, UnderWay | None]] = deque()
        self.at = 0

    def begin(self) -> None:
        """A microbatch."""
        self.at = 0

    def whole(self, name: str) -> int:
        """Elements of a gathered weight."""
        return self.weights[name] * self.gz

    def gather(self, again: bool = True) -> None:
        """The next use of a weight; ``done`` follows. ``again``: the backward will ask for it once more."""
        use = self.uses[self.at]
        following = self.uses[self.at + 1] if self.at + 1 < len(self.uses) else None
        pending = self.here.pop(use.name) if use.name in self.here else self._start(use.name)
        self.device.wait(pending)
        soon = use.phase == "recomputation" or (following is not None and following.name == use.name)
        self.kept = use.phase != "backward" and again and (soon or use.name in self.cached)
        if self.kept:
            self.here[use.name] = None
        for later in self.uses[self.at + 1 : self.at + 1 + self.ahead]:
            if later.name not in self.here:
                self.here[later.name] = self._start(later.name)
        self.at += 1

    def done(self) -> None:
        """The layer has multiplied."""
        if not self.kept:
            self.device.release(self._memory(self.uses[self.at - 1].name))

    def _memory(self, name: str) -> int:
        return self.weights[name] * self.copies * self.compute_bytes

    def _start(self, name: str) -> UnderWay | None:
        elements = self.weights[name]
        self.gradients.arrive(name)
        self.device.hold(self._memory(name))
        if self.compute_bytes != MASTER_BYTES:
            self.device.compute(moved=elements * (MASTER_BYTES + self.compute_bytes))
        return self.device.start("all_gather", "z", elements * self.compute_bytes)

    def scatter(self, name: str) -> None:
        """The gradient of a whole weight, which is held in the compute dtype, goes to those that store it."""
        whole = self.whole(name)
        if self.compute_bytes != MASTER_BYTES:
            self.device.hold(whole * MASTER_BYTES)
            self.device.compute(moved=whole * (MASTER_BYTES + self.compute_bytes))
            self.device.release(whole * self.compute_bytes)
        if self.gz > 1:
            self.device.hold(self.weights[name] * MASTER_BYTES)
        self.scattering.append((name, self.device.start("reduce_scatter", "z", whole * MASTER_BYTES)))
        while len(self.scattering) > self.under_way:
            self._settle()

    def _settle(self) -> None:
        name, pending = self.scattering.popleft()
        self.device.wait(pending)
        if self.gz > 1:
            self.device.release(self.whole(name) * MASTER_BYTES)
        self.gradients.add(name)

    def finish(self) -> None:
        while self.scattering:
            self._settle()


@dataclass(eq=False)
class _Bucket:
    names: tuple[str, ...]
    elements: int
    axes: tuple[str, ...]  # to sum over, inner first
    sharded: bool
    missing: int = 0  # contributions to its gradients


class Gradients:
    """The sums of gradients over the axes that split the batch, and the optimizer's part in them."""

    def __init__(
        self,
        device: Device,
        found: dict[str, Tensor],
        sizes: GridSizes,
        overlap: bool,
        gradient_bytes: int,
        shard_states: bool,
        expected: dict[str, int],
        accumulated: bool = False,
    ):
        """``gradient_bytes``: of all blocks, where ``found`` has those of a few. ``expected``: how many contributions
        complete the gradient of each parameter; ``accumulated``: one more, that was there before."""
        self.device, self.overlap, self.accumulated = device, overlap, accumulated
        bucket_bytes = limits.bucket_bytes(gradient_bytes)
        kinds = set(found.values())
        elements = {tensor: tensor.elements(sizes) for tensor in kinds}
        owned = {tensor: tensor.owned(sizes, shard_states) for tensor in kinds}
        self.elements = {name: elements[tensor] for name, tensor in found.items()}
        self.owned = sum(owned[tensor] for tensor in found.values())
        self.added: Counter[str] = Counter()
        cut = {tensor for tensor in kinds if owned[tensor] < elements[tensor]}
        self.buckets = list(_buckets(found, cut, self.elements, sizes, bucket_bytes))
        # A bucket at the end of a step with all its blocks, however few of them are here.
        travelling = sum(bucket.elements for bucket in self.buckets) / sum(self.elements.values())
        self.packed_bytes = min(bucket_bytes, travelling * gradient_bytes)
        for bucket in self.buckets:
            bucket.missing = sum(expected[name] for name in bucket.names)
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.names}
        self.sent: dict[_Bucket, UnderWay | None] = {}
        self.arriving: dict[_Bucket, UnderWay | None] = {}

    def add(self, name: str) -> None:
        """One contribution, which is held."""
        nbytes = self.elements[name] * MASTER_BYTES
        self.added[name] += 1
        if self.added[name] > 1 or self.accumulated:
            self.device.compute(moved=3 * nbytes)
            self.device.release(nbytes)
        if self.overlap and (bucket := self.bucket_of.get(name)):
            bucket.missing -= 1
            if not bucket.missing:
                self._send(bucket)

    def _send(self, bucket: _Bucket) -> None:
        device, nbytes = self.device, bucket.elements * MASTER_BYTES
        device.hold(nbytes)
        device.compute(moved=2 * nbytes, operations=len(bucket.names))
        *inner, last = bucket.axes
        for axis in inner:
            device.do("all_reduce", axis, nbytes)
        self.sent[bucket] = device.start("reduce_scatter" if bucket.sharded else "all_reduce", last, nbytes)
        device.release(nbytes)  # the gradients apart; packed, they are held on

    def finish(self) -> None:
        self.device.scratch(self.packed_bytes)
        for bucket in self.buckets:
            if bucket not in self.sent:
                self._send(bucket)
        for bucket, pending in self.sent.items():
            self.device.wait(pending)
            self.device.compute(operations=len(bucket.names))

    def update(self) -> None:
        """The norm of the gradients, the optimizer's step, and the end of the gradients."""
        owned = self.owned * MASTER_BYTES
        self.device.compute(moved=owned, operations=len(self.elements))
        self.device.do("all_reduce", "world", 3 * 8)
        # Clipped: read and written; AdamW: weight, gradient and two states read, all but the gradient written.
        self.device.compute(moved=(2 + 7) * owned, operations=2 * len(self.elements))

    def spread(self) -> None:
        """What the others have updated begins to come."""
        for bucket in reversed(self.buckets):
            if bucket.sharded:
                size = self.device.links.sizes[bucket.axes[-1]]
                nbytes = bucket.elements * MASTER_BYTES
                self.device.compute(moved=2 * nbytes / size, operations=len(bucket.names))
                self.arriving[bucket] = self.device.start("all_gather", bucket.axes[-1], nbytes / size)
        if not self.overlap:
            for bucket in list(self.arriving):
                self.arrive(bucket.names[0])

    def arrive(self, name: str) -> None:
        bucket = self.bucket_of.get(name)
        if bucket in self.arriving:
            self.device.wait(self.arriving.pop(bucket))
            self.device.compute(moved=2 * bucket.elements * MASTER_BYTES, operations=len(bucket.names))


def _buckets(
    found: dict[str, Tensor], cut: set[Tensor], elements: dict[str, int], sizes: GridSizes, bucket_bytes: int
) -> Iterator[_Bucket]:
    filling: dict[tuple, list[str]] = {}
    filled: Counter[tuple] = Counter()
    kinds = {}
    for tensor in set(found.values()):
        axes = tuple(a for a in ("z", "data") if a not in tensor.layout.axes and getattr(sizes, a) > 1)
        kinds[tensor] = (axes, tensor in cut) if axes else None
    for name, tensor in reversed(found.items()):
        kind = kinds[tensor]
        if kind is None:
            continue
        filling.setdefault(kind, []).append(name)
        filled[kind] += elements[name]
        if filled[kind] * MASTER_BYTES >= bucket_bytes:
            yield _Bucket(tuple(filling.pop(kind)), filled.pop(kind), *kind)
    for kind, names in filling.items():
        yield _Bucket(tuple(names), filled[kind], *kind)
