"""A stage on symbolic tensors: grid, layers, weights, and gradients that are reduced. No torch here.

A device counts time, bytes and memory. gpt4d.parallel.engine decides when to gather, scatter and reduce, as in a run.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gpt4d.config import GridSizes
from gpt4d.parallel.comm.pending import SUM, MeshAxis, Pending
from gpt4d.parallel.context import INFERENCE, Context, Pass
from gpt4d.parallel.engine.reduction import Bucket, GradientSums, default_bucket_bytes, gradient_buckets
from gpt4d.parallel.layers.float8 import SCALE_BYTES
from gpt4d.parallel.layers.layer import LayerSpec
from gpt4d.parallel.layout import ParameterSpec
from gpt4d.parallel.symbolic.costs import Computation
from gpt4d.parallel.symbolic.tensor import Storage, SymbolicDevice, SymbolicTensor, checkpointed, leaf
from gpt4d.parallel.weights import Weights

MASTER_DTYPE, MASTER_BYTES = "float32", 4  # dtype and bytes per element of weight, gradient and both AdamW states


class CommunicatingDevice(SymbolicDevice, Protocol):
    """A device that also accounts for collectives."""

    def start(self, kind: str, axis: str, nbytes: float, received: float = 0.0) -> object:
        """Start a collective on a tensor of ``nbytes``. It overlaps with computation.

        For an all-to-all, ``nbytes`` are the bytes to other ranks, and ``received`` the bytes from them.
        """

    def wait(self, collective: object) -> None:
        """Wait for a started collective."""


class _Run(NamedTuple):
    """A collective in flight (gpt4d.parallel.comm.pending.InFlight)."""

    device: CommunicatingDevice
    collective: object

    def wait(self) -> None:
        self.device.wait(self.collective)


class SymbolicAxis(MeshAxis):
    """An axis of the grid, seen from its first device. It replaces gpt4d.parallel.comm.collectives.Axis."""

    index = 0

    def __init__(self, device: CommunicatingDevice, name: str, size: int):
        self.device, self.name, self.size = device, name, size

    def start_all_reduce(self, tensor: SymbolicTensor, op: str = SUM, parameter: Any = None) -> Pending:
        return self._start("all_reduce", tensor, tensor)

    def start_all_gather(self, shard: SymbolicTensor, parameter: Any = None) -> Pending:
        full = shard if self.size == 1 else shard.like((self.size * shard.shape[0], *shard.shape[1:])).new()
        return self._start("all_gather", full, shard)

    def start_reduce_scatter(self, full: SymbolicTensor, parameter: Any = None) -> Pending:
        part = full if self.size == 1 else full.like((full.shape[0] // self.size, *full.shape[1:])).new()
        return self._start("reduce_scatter", part, full)

    def start_shift(self, tensor: SymbolicTensor, parameter: Any = None) -> Pending:
        return self._start("shift", tensor if self.size == 1 else tensor.like().new(), tensor)

    def start_all_to_all(self, sent: SymbolicTensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> Pending:
        if self.size == 1:
            return Pending(sent)
        received, row = sent.like((sum(received_rows), *sent.shape[1:])).new(), sent.like((1, *sent.shape[1:])).nbytes
        to_others, from_others = (row * (sum(rows) - rows[self.index]) for rows in (sent_rows, received_rows))
        collective = self.device.start("all_to_all", self.name, to_others, from_others)
        return Pending(received, _Run(self.device, collective), source=sent)

    def _start(self, kind: str, result: SymbolicTensor, source: SymbolicTensor) -> Pending:
        if self.size == 1:
            return Pending(result)
        return Pending(result, _Run(self.device, self.device.start(kind, self.name, source.nbytes)), source=source)


class SymbolicGrid:
    """The grid of a stage. It replaces gpt4d.parallel.grid.Grid. ``context``: size of the axis ``context``."""

    def __init__(self, device: CommunicatingDevice, sizes: GridSizes, context: int = 1):
        self.device, self.sizes = device, sizes
        self._axes = {name: SymbolicAxis(device, name, size) for name, size in sizes._asdict().items()}
        self._alone = SymbolicAxis(device, "none", 1)
        self.x, self.y, self.z, self.data = self._axes.values()
        self.context = SymbolicAxis(device, "context", context)
        self.batch = self.data if sizes.z == 1 else self.z
        if sizes.splits_batch_twice:
            self.batch = SymbolicAxis(device, "batch", sizes.batch_shards)

    def __getitem__(self, name: str) -> SymbolicAxis:
        return self._axes[name]

    def axis(self, name: str | None) -> SymbolicAxis:
        return self._alone if name is None else self._axes[name]


class SymbolicLayer:
    """A layer on symbolic tensors, built from its spec. It replaces gpt4d.parallel.layers.module.Layer."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, spec: LayerSpec, weights: SymbolicWeights, prefix: str = ""):
        self.spec, self.weights, self.context = spec, weights, weights.context
        for name in spec.own_parameters:
            setattr(self, name, weights.shard(prefix + name))
        for name, layer in spec.children.items():
            setattr(self, name, type(self)(layer, weights, f"{prefix}{name}."))
        spec.prepare(self)

    @property
    def current_pass(self) -> Pass:
        return self.context.training if self.weights.device.records else INFERENCE

    def checkpointed(self, function: Callable[..., Any], *inputs: Any) -> Any:
        return checkpointed(self.weights.device, function, inputs, self.weights.schedule.recomputation)

    def __call__(self, *inputs: Any) -> Any:
        return self.spec.forward(self, *inputs)


class SymbolicWeights(Weights):
    """Weights of a stage on symbolic tensors, and their gradients.

    Args:
        context: settings of the stage, with a SymbolicGrid.
        parameters: the parameters of the layers that are computed, by name.
        gradient_bytes: bytes of the gradients of all layers; ``parameters`` may contain a few layers.
        shard_states: each rank of the data axis updates only its own rows (ZeRO-1).
    """

    def __init__(
        self,
        context: Context,
        parameters: Mapping[str, ParameterSpec],
        gradient_bytes: int = 0,
        shard_states: bool = False,
    ):
        super().__init__(context)
        self.device: CommunicatingDevice = context.grid.device
        self.specs, sizes = dict(parameters), context.grid.sizes
        self.gradients: dict[str, SymbolicTensor] = {}
        extents, origin = sizes._asdict(), dict.fromkeys(sizes._fields, 0)
        shapes = {
            id(spec): tuple(stop - start for start, stop in spec.layout.tile(spec.shape, extents, origin))
            for spec in parameters.values()
        }
        self._shapes = {name: shapes[id(spec)] for name, spec in parameters.items()}
        self.reduction = SymbolicReduction(weakref.proxy(self), gradient_bytes, shard_states)

    def shard(self, name: str) -> SymbolicTensor:
        """Return this device's shard of a parameter."""
        if name not in self._shards:
            this = weakref.proxy(self)

            def add(gradient: SymbolicTensor) -> None:
                this.accumulate(name, gradient)

            spec = self.specs[name]
            dtype = MASTER_DTYPE if spec.has_master_dtype else self.context.compute_dtype
            shard = leaf(self.device, self._shapes[name], dtype, add)
            if spec.frozen and not spec.streamed:
                shard = shard.detach()
            self._shards[name] = shard
            self._names[shard] = name
        return self._shards[name]

    def gathered(self, name: str) -> SymbolicTensor:
        """Return a weight as ``gather`` does, without memory."""
        weight, context = self.unsharded(name), self.context
        if context.float8 and self.specs[name].float8:
            return weight.like((math.prod(weight.shape) + SCALE_BYTES,), "uint8")
        return weight.like(dtype=context.compute_dtype)

    def unsharded(self, name: str) -> SymbolicTensor:
        """Return a weight at this device's (x, y) coordinates in the dtype of its master, without memory."""
        shard = self.shard(name)
        parts = self.context.grid.z.size if self.specs[name].gathered else 1
        return shard.like((shard.shape[0] * parts, *shard.shape[1:]))

    @property
    def gathered_bytes(self) -> int:
        """The bytes of gathered weights and of all-gathers in flight."""
        gathering = (pending.result for pending in self.schedule.gathering.values())
        return sum(weight.storage.nbytes for weight in (*self.schedule.ready.values(), *gathering) if weight.storage)

    def elements(self, name: str) -> int:
        """Return the number of elements of this device's shard of a parameter."""
        return math.prod(self._shapes[name])

    def accumulate(self, weight: str, part: SymbolicTensor) -> None:
        """Add ``part`` to the gradient of a parameter."""
        if weight in self.gradients:
            self.device.compute(Computation(moved=3 * part.nbytes))
        else:
            self.gradients[weight] = part
        self.reduction.sums.note_contribution(weight)

    def current_shard(self, weight: str) -> SymbolicTensor:
        self.reduction.sums.wait_rows(weight)
        return self.shard(weight)

    def gradient(self, weight: str) -> SymbolicTensor | None:
        return self.gradients.get(weight)

    def set_gradient(self, weight: str, gradient: SymbolicTensor) -> None:
        self.gradients[weight] = gradient
        self.reduction.sums.note_contribution(weight)


class SymbolicReduction:
    """The reduction of gradients. Implements gpt4d.parallel.engine.reduction.GradientDevice.

    Args:
        weights: the parameters and their gradients.
        gradient_bytes: bytes of the gradients of all layers; ``weights`` may contain a few layers.
        shard_states: each rank of the data axis updates only its own rows (ZeRO-1).
    """

    def __init__(self, weights: SymbolicWeights, gradient_bytes: int, shard_states: bool):
        self.weights, self.device, context = weights, weights.device, weights.context
        sizes = context.grid.sizes
        max_bytes = default_bucket_bytes(gradient_bytes, sizes, shard_states)
        specs = weights.specs
        buckets = list(gradient_buckets(specs, context.batch_axes, sizes, shard_states, max_bytes))
        local = {id(spec): spec.local_elements(sizes) * (not spec.frozen) for spec in specs.values()}
        # The buckets in flight at the end of a step with all blocks, even if the context has fewer blocks.
        trained = sum(local[id(spec)] for spec in specs.values())
        summed = sum(bucket.elements for bucket in buckets) / max(1, trained)
        self.packed_bytes = min(max_bytes, summed * gradient_bytes)
        self.sums: GradientSums[SymbolicTensor, Pending] = GradientSums(
            weakref.proxy(self), buckets, context.overlap.data
        )

    def finish(self) -> None:
        self.device.scratch(self.packed_bytes)
        self.sums.finish()

    def pack(self, bucket: Bucket) -> SymbolicTensor:
        storage = Storage(self.device, bucket.elements * MASTER_BYTES)
        packed = SymbolicTensor(self.device, (bucket.elements,), MASTER_DTYPE, storage)
        self.device.compute(Computation(moved=2 * packed.nbytes, operations=len(bucket.names)))
        for name in bucket.names:
            del self.weights.gradients[name]
        return packed

    def start_sum(self, bucket: Bucket, kind: str, axis: str, packed: SymbolicTensor) -> Pending:
        return Pending(packed, _Run(self.device, self.device.start(kind, axis, packed.nbytes)))

    def wait(self, pending: Pending) -> SymbolicTensor:
        return pending.wait()

    def unpack(self, bucket: Bucket, total: SymbolicTensor) -> None:
        self.device.compute(Computation(operations=len(bucket.names)))
        for name in bucket.names:
            self.weights.gradients[name] = total  # the gradient is a view of the bucket

    def start_row_gather(self, bucket: Bucket) -> Pending:
        context, axis = self.weights.context, bucket.axes[-1]
        rows = SymbolicTensor(self.device, (bucket.elements,), context.compute_dtype)
        size = context.grid[axis].size
        self.device.compute(
            Computation(moved=(bucket.elements * MASTER_BYTES + rows.nbytes) / size, operations=len(bucket.names))
        )
        return Pending(rows, _Run(self.device, self.device.start("all_gather", axis, rows.nbytes / size)))

    def write_rows(self, bucket: Bucket, rows: SymbolicTensor) -> None:
        self.device.compute(
            Computation(moved=bucket.elements * MASTER_BYTES + rows.nbytes, operations=len(bucket.names))
        )
