"""The weights and the gradients of a device in the planner: sizes, a clock and memory instead of tensors.

gpt4d.parallel.engine decides when to gather, scatter and sum, as in a run.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from gpt4d.config import GridSizes, OverlapConfig
from gpt4d.model.costs import MASTER_BYTES
from gpt4d.parallel import limits
from gpt4d.parallel.buckets import Bucket, gradient_buckets
from gpt4d.parallel.engine.gradients import GradientSums
from gpt4d.parallel.engine.weights import WeightSchedule
from gpt4d.parallel.layout import ParameterSpec
from gpt4d.parallel.order import WeightUse
from gpt4d.planner.device import Device, PendingCollective


class PlannedWeights:
    """The weights of a device, as ``gpt4d.parallel.engine.weights.WeightDevice``. A tensor is True.

    Args:
        device: whose clock and memory count.
        elements: elements of each streamed weight that a device stores.
        whole: weights that z does not split.
        overlap: which communication overlaps with computation.
        compute_bytes: bytes of an element of a gathered weight.
        gradients: where scattered gradients go.
    """

    def __init__(
        self,
        device: Device,
        elements: Mapping[str, int],
        whole: Collection[str],
        overlap: OverlapConfig,
        compute_bytes: int,
        gradients: "PlannedGradients",
    ):
        self.device, self.elements = device, elements
        self.gz = device.links.sizes["z"]
        self._split = elements.keys() - whole if self.gz > 1 else frozenset()
        self.compute_bytes, self.gradients = compute_bytes, gradients
        self.schedule: WeightSchedule[bool, PendingCollective | None] = WeightSchedule(self, overlap)

    def begin(
        self,
        order: Sequence[WeightUse],
        cached: Collection[str],
        cached_for_step: Collection[str],
        terms: Mapping[str, int],
        continued: bool = False,
    ) -> None:
        """Start a step. Arguments as for ``WeightSchedule.begin``; ``continued``: it has had earlier microbatches."""
        earlier = dict.fromkeys(cached_for_step if continued else (), True)
        self.schedule.begin(order, cached, cached_for_step, terms, earlier)

    def multiplied(self) -> None:
        """Release the weight that was last gathered, unless it is kept."""
        if not self.schedule.kept[self.schedule.position]:
            self.device.release(self._memory(self.schedule.order[self.schedule.position].weight))

    def kept_bytes(self, name: str) -> int:
        """Return the bytes of a gathered weight that its last use has left in memory."""
        return self._memory(name) if name in self.schedule.ready else 0

    def has_earlier_sum(self, name: str) -> bool:
        """Return whether the gradient of a gathered weight is added to an earlier sum, in place."""
        return self.schedule.earlier_gradient(name) is not None

    def scatter(self, name: str, added: bool = False) -> None:
        """Reduce-scatter the gradient of a gathered weight, which is held in float32 or ``added`` to an earlier sum."""

        def gradient(earlier: bool | None) -> bool:
            if earlier and not added:
                self.device.compute(moved=3 * self._gradient_bytes(name))
                self.device.release(self._gradient_bytes(name))
            return True

        self.schedule.scatter(name, gradient)

    def _memory(self, name: str) -> int:
        if not self.is_split(name) and self.compute_bytes == MASTER_BYTES:
            return 0  # neither cast nor gathered: it is the parameter itself
        return self.elements[name] * (self.gz if self.is_split(name) else 1) * self.compute_bytes

    def _gradient_bytes(self, name: str) -> int:
        return self.elements[name] * (self.gz if self.is_split(name) else 1) * MASTER_BYTES

    def is_split(self, weight: str) -> bool:
        return weight in self._split

    def start_gather(self, weight: str) -> PendingCollective | None:
        elements = self.elements[weight]
        self.gradients.sums.wait_rows(weight)
        self.device.hold(self._memory(weight))
        if self.compute_bytes != MASTER_BYTES:
            self.device.compute(moved=elements * (MASTER_BYTES + self.compute_bytes))
        return self.device.start("all_gather", "z", elements * self.compute_bytes) if self.is_split(weight) else None

    def start_scatter(self, weight: str, gradient: bool) -> PendingCollective | None:
        self.device.hold(self.elements[weight] * MASTER_BYTES)
        return self.device.start("reduce_scatter", "z", self._gradient_bytes(weight))

    def wait(self, pending: PendingCollective | None) -> bool:
        self.device.wait(pending)
        return True

    def gradient(self, weight: str) -> bool | None:
        return self.gradients.has_earlier_sum(weight) or None

    def set_gradient(self, weight: str, gradient: bool) -> None:
        self.gradients.note_term(weight)

    def add_gradient(self, weight: str, part: bool) -> None:
        self.device.release(self._gradient_bytes(weight))
        self.gradients.add(weight)


class PlannedGradients:
    """The gradients of a device, as ``gpt4d.parallel.engine.gradients.GradientDevice``, and the optimizer's work.

    Args:
        device: whose clock and memory count.
        parameters: the parameters of the blocks that are walked.
        sizes: the grid.
        overlap: sums overlap with the backward.
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
        self.device, self.continued = device, continued
        bucket_bytes = limits.bucket_bytes(gradient_bytes)
        local = {id(spec): spec.local_elements(sizes) for spec in parameters.values()}
        optimized = {id(spec): spec.optimized_elements(sizes, shard_states) for spec in parameters.values()}
        self.elements = {name: local[id(spec)] for name, spec in parameters.items()}
        self.optimized = sum(optimized[id(spec)] for spec in parameters.values())
        self.added: Counter[str] = Counter()
        buckets = list(
            gradient_buckets(parameters, sizes, shard_states, bucket_bytes, sequence_parallel=sequence_parallel)
        )
        # The buckets at the end of a step with all blocks, however few of them are walked.
        summed = sum(bucket.elements for bucket in buckets) / sum(self.elements.values())
        self.packed_bytes = min(bucket_bytes, summed * gradient_bytes)
        self.sums: GradientSums[bool, PendingCollective | None] = GradientSums(self, buckets, overlap)
        self.sums.begin(expected)

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
        """Note that a gradient has one more term."""
        self.added[name] += 1
        self.sums.note_term(name)

    def finish(self) -> None:
        self.device.scratch(self.packed_bytes)
        self.sums.finish()

    def update(self) -> None:
        """Compute the norm of the gradients and the optimizer's step."""
        nbytes = self.optimized * MASTER_BYTES
        self.device.compute(moved=nbytes, operations=len(self.elements))
        self.device.do("all_reduce", "world", 3 * 8)
        # AdamW reads weight, gradient and two states and writes all, the gradient scaled.
        self.device.compute(moved=8 * nbytes, operations=len(self.elements))

    def pack(self, bucket: Bucket) -> bool:
        nbytes = bucket.elements * MASTER_BYTES
        self.device.hold(nbytes)
        self.device.compute(moved=2 * nbytes, operations=len(bucket.names))
        self.device.release(nbytes)  # the separate gradients
        return True

    def start_sum(self, bucket: Bucket, kind: str, axis: str, packed: bool) -> PendingCollective | None:
        return self.device.start(kind, axis, bucket.elements * MASTER_BYTES)

    def wait(self, pending: PendingCollective | None) -> bool:
        self.device.wait(pending)
        return True

    def unpack(self, bucket: Bucket, total: bool) -> None:
        self.device.compute(operations=len(bucket.names))

    def start_row_gather(self, bucket: Bucket) -> PendingCollective | None:
        axis, nbytes = bucket.axes[-1], bucket.elements * MASTER_BYTES
        size = self.device.links.sizes[axis]
        self.device.compute(moved=2 * nbytes / size, operations=len(bucket.names))
        return self.device.start("all_gather", axis, nbytes / size)

    def write_rows(self, bucket: Bucket, rows: bool) -> None:
        self.device.compute(moved=2 * bucket.elements * MASTER_BYTES, operations=len(bucket.names))
