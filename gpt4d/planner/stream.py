"""The weight stream and the gradient reducer of a step, computed on sizes alone: when they gather, scatter and sum.

They make the decisions of gpt4d.parallel.weights and gpt4d.parallel.gradients with the same functions.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from gpt4d.config import GridSizes, OverlapConfig
from gpt4d.model.costs import MASTER_BYTES
from gpt4d.parallel import limits
from gpt4d.parallel.buckets import Bucket, gradient_buckets
from gpt4d.parallel.layout import ParameterSpec
from gpt4d.parallel.order import WeightUse, kept_after_use, weights_ahead
from gpt4d.planner.device import Device, PendingCollective


class PlannedStream:
    """The gathered weights of a device through a step whose ``order`` of uses is known.

    Args:
        device: whose clock and memory count.
        elements: elements of each streamed weight that a device stores.
        order: every use of a weight in the step.
        cached: weights that stay gathered until the backward.
        cached_for_step: weights that stay gathered until their last use.
        terms: number of terms of a weight's gradient that are added up before their sum over z, where not one.
        whole: weights that z does not split.
        overlap: which communication runs beside computation.
        compute_bytes: bytes of an element of a gathered weight.
        gradients: where scattered gradients go.
        continued: earlier microbatches of the step have gathered the weights in ``cached_for_step``.
    """

    def __init__(
        self,
        device: Device,
        elements: Mapping[str, int],
        order: Sequence[WeightUse],
        cached: Collection[str],
        cached_for_step: Collection[str],
        terms: Mapping[str, int],
        whole: Collection[str],
        overlap: OverlapConfig,
        compute_bytes: int,
        gradients: "PlannedGradients",
        continued: bool = False,
    ):
        self.device, self.elements, self.order = device, elements, order
        self.kept = kept_after_use(order, cached, cached_for_step)
        self.whole = whole
        self.terms = terms
        self.missing: dict[str, int] = {}
        self.accumulated = set(cached_for_step if continued else ())
        self.gz = device.links.sizes["z"]
        self.ahead = weights_ahead(order, overlap.prefetch if overlap.all_gather and self.gz > 1 else 0, whole)
        self.max_inflight = limits.MAX_INFLIGHT_REDUCE_SCATTERS if overlap.reduce_scatter else 0
        self.compute_bytes, self.gradients = compute_bytes, gradients
        self.gathered: dict[str, PendingCollective | None] = dict.fromkeys(self.accumulated)
        self.scattering: deque[tuple[str, PendingCollective | None]] = deque()
        self.position = -1

    def gather(self, name: str) -> None:
        """Wait for the next weight, which is ``name``, and start to gather those that follow."""
        self.position += 1
        use = self.order[self.position]
        assert use.weight == name, f"a layer uses {name} where the order has {use}"
        pending = self.gathered.pop(name) if name in self.gathered else self._start(name)
        self.device.wait(pending)
        if self.kept[self.position]:
            self.gathered[name] = None
        for later in self.ahead[self.position]:
            if later not in self.gathered:
                self.gathered[later] = self._start(later)

    def multiplied(self) -> None:
        """Release the weight that was last gathered, unless it is kept."""
        if not self.kept[self.position]:
            self.device.release(self._memory(self.order[self.position].weight))

    def kept_bytes(self, name: str) -> int:
        """Return the bytes of a gathered weight that its last use has left in memory."""
        return self._memory(name) if name in self.gathered and self.gathered[name] is None else 0

    def _parts(self, name: str) -> int:
        """Return the number of ranks of z that a weight is split over."""
        return 1 if name in self.whole else self.gz

    def _memory(self, name: str) -> int:
        parts = self._parts(name)
        if parts == 1 and self.compute_bytes == MASTER_BYTES:
            return 0  # neither cast nor gathered: it is the parameter itself
        return self.elements[name] * parts * self.compute_bytes

    def _start(self, name: str) -> PendingCollective | None:
        elements = self.elements[name]
        self.gradients.wait_param(name)
        self.device.hold(self._memory(name))
        if self.compute_bytes != MASTER_BYTES:
            self.device.compute(moved=elements * (MASTER_BYTES + self.compute_bytes))
        if self._parts(name) == 1:
            return None
        return self.device.start("all_gather", "z", elements * self.compute_bytes)

    def has_earlier_sum(self, name: str) -> bool:
        """Return whether the gradient of a gathered weight is added to an earlier sum, in place."""
        return name in self.accumulated or (self._parts(name) == 1 and self.gradients.has_earlier_sum(name))

    def scatter(self, name: str, added: bool = False) -> None:
        """Reduce-scatter the gradient of a gathered weight, which is held in float32 or ``added`` to an earlier sum."""
        parts = self._parts(name)
        full = self.elements[name] * parts * MASTER_BYTES
        missing = self.missing.pop(name, self.terms.get(name, 1)) - 1
        if self.has_earlier_sum(name) and not added:
            self.device.compute(moved=3 * full)
            self.device.release(full)
        self.accumulated.discard(name)
        if missing:
            self.missing[name] = missing
            self.accumulated.add(name)
            return
        if parts == 1:
            self.gradients.note_term(name)
            return
        self.device.hold(self.elements[name] * MASTER_BYTES)
        self.scattering.append((name, self.device.start("reduce_scatter", "z", full)))
        while len(self.scattering) > self.max_inflight:
            self._add_gradient()

    def _add_gradient(self) -> None:
        name, pending = self.scattering.popleft()
        self.device.wait(pending)
        self.device.release(self.elements[name] * self.gz * MASTER_BYTES)
        self.gradients.add(name)

    def finish(self) -> None:
        while self.scattering:
            self._add_gradient()


class PlannedGradients:
    """The sums of gradients over the axes that split the batch, and the optimizer's part in them.

    Args:
        device: whose clock and memory count.
        parameters: the parameters of the blocks that are walked.
        sizes: the grid.
        overlap: sums run beside the backward.
        gradient_bytes: of all blocks, of which ``parameters`` may have a few.
        shard_states: each rank of the data axis updates its rows only (ZeRO-1).
        sequence_parallel: x splits the tokens between the layers.
        expected: number of terms that complete the gradient of each parameter.
        continued: parameters whose gradients have terms of earlier microbatches.
    """

    def __init__(
        self,
        device: Device,
        parameters: Mapping[str, ParameterSpec],
        sizes: GridSizes,
        overlap: bool,
        gradient_bytes: int,
        shard_states: bool,
        sequence_parallel: bool,
        expected: Mapping[str, int],
        continued: Collection[str] = (),
    ):
        self.device, self.overlap, self.continued = device, overlap, continued
        bucket_bytes = limits.bucket_bytes(gradient_bytes)
        local = {id(spec): spec.local_elements(sizes) for spec in parameters.values()}
        optimized = {id(spec): spec.optimized_elements(sizes, shard_states) for spec in parameters.values()}
        self.elements = {name: local[id(spec)] for name, spec in parameters.items()}
        self.optimized = sum(optimized[id(spec)] for spec in parameters.values())
        self.added: Counter[str] = Counter()
        buckets = gradient_buckets(parameters, sizes, shard_states, bucket_bytes, sequence_parallel=sequence_parallel)
        self.buckets = list(buckets)
        # The buckets at the end of a step with all blocks, however few of them are walked.
        summed = sum(bucket.elements for bucket in self.buckets) / sum(self.elements.values())
        self.packed_bytes = min(bucket_bytes, summed * gradient_bytes)
        self.missing = {bucket: sum(expected[name] for name in bucket.names) for bucket in self.buckets}
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.names}
        self.sent: dict[Bucket, PendingCollective | None] = {}
        self.axes_left: dict[Bucket, list[str]] = {}
        self.to_gather: list[Bucket] = []
        self.arriving: dict[Bucket, PendingCollective | None] = {}

    def has_earlier_sum(self, name: str) -> bool:
        """Return whether a gradient has earlier terms."""
        return self.added[name] > 0 or name in self.continued

    def add(self, name: str) -> None:
        """Add one term, which is held, to a gradient."""
        if self.has_earlier_sum(name):
            nbytes = self.elements[name] * MASTER_BYTES
            self.device.compute(moved=3 * nbytes)
            self.device.release(nbytes)
        self.note_term(name)

    def note_term(self, name: str) -> None:
        """Note that a gradient has one more term, and start its sum after the last one."""
        self.added[name] += 1
        if self.overlap and (bucket := self.bucket_of.get(name)):
            self.missing[bucket] -= 1
            if not self.missing[bucket]:
                self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        device, nbytes, waiting = self.device, bucket.elements * MASTER_BYTES, list(self.axes_left)
        device.hold(nbytes)
        device.compute(moved=2 * nbytes, operations=len(bucket.names))
        self._start_sum(bucket, bucket.axes)
        device.release(nbytes)  # the separate gradients; the packed ones stay
        self._continue_sums(waiting)

    def _start_sum(self, bucket: Bucket, axes: Sequence[str]) -> None:
        axis, *others = axes
        kind = "reduce_scatter" if bucket.sharded and not others else "all_reduce"
        self.sent[bucket] = self.device.start(kind, axis, bucket.elements * MASTER_BYTES)
        if others:
            self.axes_left[bucket] = others

    def _continue_sums(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            self.device.wait(self.sent[bucket])
            self._start_sum(bucket, self.axes_left.pop(bucket))

    def finish(self) -> None:
        self.device.scratch(self.packed_bytes)
        for bucket in self.buckets:
            if bucket not in self.sent:
                self._send(bucket)
        while self.axes_left:
            self._continue_sums(list(self.axes_left))
        for bucket, pending in self.sent.items():
            self.device.wait(pending)
            self.device.compute(operations=len(bucket.names))

    def update(self) -> None:
        """Compute the norm of the gradients and the optimizer's step."""
        nbytes = self.optimized * MASTER_BYTES
        self.device.compute(moved=nbytes, operations=len(self.elements))
        self.device.do("all_reduce", "world", 3 * 8)
        # AdamW reads weight, gradient and two states and writes all, the gradient scaled.
        self.device.compute(moved=8 * nbytes, operations=len(self.elements))

    def start_param_all_gather(self) -> None:
        """Start to gather the rows that other ranks updated in the step before."""
        self.to_gather = [bucket for bucket in self.buckets if bucket.sharded]
        for _ in range(limits.MAX_INFLIGHT_PARAM_GATHERS):
            self._gather_next()
        while not self.overlap and self.arriving:
            self.wait_param(next(iter(self.arriving)).names[0])

    def _gather_next(self) -> None:
        if self.to_gather:
            bucket = self.to_gather.pop()
            size = self.device.links.sizes[bucket.axes[-1]]
            nbytes = bucket.elements * MASTER_BYTES
            self.device.compute(moved=2 * nbytes / size, operations=len(bucket.names))
            self.arriving[bucket] = self.device.start("all_gather", bucket.axes[-1], nbytes / size)

    def wait_param(self, name: str) -> None:
        bucket = self.bucket_of.get(name)
        while bucket in self.to_gather:
            self._gather_next()
        if bucket in self.arriving:
            self.device.wait(self.arriving.pop(bucket))
            self._gather_next()
            self.device.compute(moved=2 * bucket.elements * MASTER_BYTES, operations=len(bucket.names))
