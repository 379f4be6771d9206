"""A walk through a training step on one device: products, collectives and kept activations, layer by layer.

The layers come from a description (gpt4d.model.description); tests compare the walk with what a run counts.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple, cast

from gpt4d.config import Config, GridSizes
from gpt4d.model.costs import MASTER_BYTES
from gpt4d.model.description import BlockCost, Description, Unit
from gpt4d.parallel.layers.specs import head_axes
from gpt4d.parallel.order import weight_order
from gpt4d.parallel.pipeline.schedule import single_stage
from gpt4d.parallel.turns import Turn, run
from gpt4d.planner.device import Device, Links
from gpt4d.planner.parameters import PlannedGradients, PlannedWeights
from gpt4d.planner.workload import compiles, compute_bytes, splits_backwards, training_state


class ChunkWalk:
    """A chunk of a microbatch, as gpt4d.model.description.Walk, the protocol that layers use.

    Args:
        step: the walk through the step, whose device computes the chunk.
        samples: of the chunk.
        first: whether it is the first chunk: the last in the backward, where gradients of vectors are complete.
    """

    def __init__(self, step: "StepWalk", samples: int, first: bool = True):
        self.step, self.samples, self.first = step, samples, first
        self.sizes, self.overlap, self.element_bytes = step.sizes, step.overlap, step.element_bytes
        self.dtype = "float32" if self.element_bytes == MASTER_BYTES else "bfloat16"
        self.length, self.tokens = step.length, samples * step.length
        self.sequence_parallel = step.sequence_parallel
        self.compiled = compiles(step.config)
        self.adds_products = step.config.cluster.device == "cuda"
        self.recomputes_inputs = step.config.train.activation_checkpointing == "selective"
        self.stream_tokens = self.tokens // (self.sizes.x if self.sequence_parallel else 1)
        self.device = device = step.device
        self.compute, self.scratch = device.compute, device.scratch
        self.wait, self.do = device.wait, device.do
        self.memo: dict[tuple, Any] = {}
        self.plans: dict[tuple, Any] = {}
        self.held = 0  # by layers: not gathered weights, not gradients
        self.unit: Unit = step.description.units[0]  # where the walk is
        self.held_by_omitted: dict[str, int] = {}

    @property
    def recomputed(self) -> bool:
        return self.step.recompute and self.unit.block

    def size(self, axis: str | None) -> int:
        return 1 if axis is None else getattr(self.sizes, axis)

    def head_axes(self, heads: int, stream: str = "y") -> tuple[str, ...]:
        return head_axes(heads, self.sizes.x, self.sizes.y, self.step.config.parallel.scatter_heads, stream)

    def start(self, kind: str, axis: str | None, nbytes: float) -> object:
        return None if axis is None else self.device.start(kind, axis, nbytes)

    async def turn(self, collective: object = None) -> None:
        if self.step.num_chunks > 1:
            await Turn()
        self.wait(collective)

    def hold(self, nbytes: int) -> None:
        self.held += nbytes
        self.device.hold(nbytes)

    def release(self, nbytes: int) -> None:
        self.held -= nbytes
        self.device.release(nbytes)

    def gather(self, weight: str) -> None:
        self.step.weights.schedule.gather(self.unit.qualified(weight))

    def multiplied(self) -> None:
        self.step.weights.multiplied()

    def compute_weight_gradient(self, compute: Callable[[], None], kept: int) -> None:
        if self.step.splits_backwards:
            self.device.hold(kept)
            self.step.delayed.append(_Delayed(self, self.unit, compute, kept))
        else:
            compute()

    def has_earlier_sum(self, weight: str) -> bool:
        return self.step.weights.has_earlier_sum(self.unit.qualified(weight))

    def scatter(self, weight: str, added: bool = False) -> None:
        self.step.weights.scatter(self.unit.qualified(weight), added)

    def add_gradient(self, parameter: str) -> None:
        if self.first:
            name, gradients = self.unit.qualified(parameter), self.step.gradients
            self.device.hold(gradients.elements[name] * MASTER_BYTES)
            gradients.add(name)


class _Delayed(NamedTuple):
    """The gradient of a weight, which is computed after the backward."""

    walk: ChunkWalk
    unit: Unit
    compute: Callable[[], None]
    kept: int  # bytes, for it


class StepWalk:
    """A step of ``config`` on a grid.

    Args:
        config: the settings.
        description: the model, perhaps with a few of its blocks only.
        sizes: the grid.
        links: how fast its collectives are.
        micro_batch: samples of a microbatch on one device.
        cached: names of the units whose gathered weights are kept.
        omitted: how many equal blocks to count, in memory alone, after each of some blocks.
        gradient_bytes: of the whole model on one device; None: of ``description``.
        continued_bytes: that the whole model holds from one microbatch to the next.
    """

    def __init__(
        self,
        config: Config,
        description: Description,
        sizes: GridSizes,
        links: Links,
        micro_batch: int,
        cached: Collection[str] = (),
        omitted: Mapping[str, int] | None = None,
        gradient_bytes: int | None = None,
        continued_bytes: int = 0,
    ):
        self.config, self.description, self.sizes, self.omitted = config, description, sizes, omitted or {}
        self.recompute = config.train.activation_checkpointing == "full"
        self.overlap, self.num_chunks = config.parallel.overlap, config.parallel.chunks
        self.sequence_parallel = config.parallel.sequence_parallel and sizes.x > 1
        self.device = Device(config.cluster, links)
        self.element_bytes = compute_bytes(config)
        self.length, self.micro_batch = config.train.seq_len, micro_batch
        weights = description.weights_of(cached)
        for_step = config.parallel.cache_scope == "step"
        self.cached = frozenset() if for_step else weights
        self.cached_for_step = weights if for_step else frozenset()
        if gradient_bytes is None:
            gradient_bytes = training_state(description, sizes, shard_states=False)["gradients"]
        self.gradient_bytes, self.continued_bytes = gradient_bytes, continued_bytes
        self.splits_backwards = splits_backwards(config)
        self.delayed: list[_Delayed] = []

    def run(self, microbatches: int, continued: bool = False) -> Device:
        """Walk through microbatches and the update that follows them; ``continued``: the step has had earlier ones."""
        self.continued = continued
        self.after_forward: list[tuple[float, int]] = []  # seconds, and bytes that layers have kept for the backward
        # Seconds, and bytes kept for weight gradients that are computed later.
        self.after_backward: list[tuple[float, int]] = []
        self.after_microbatch: list[tuple[float, ...]] = []
        expected = {name: count * microbatches for name, count in self.description.contributions.items()}
        chunk_terms = self.description.chunk_terms(self.num_chunks)
        added = {name: expected[name] * chunk_terms.get(name, 1) for name in self.cached_for_step}
        self.device.hold(self.continued_bytes if continued else 0)
        self.gradients = PlannedGradients(
            self.device,
            self.description.parameters,
            self.sizes,
            self.overlap.data,
            self.gradient_bytes,
            self.config.optim.shard_states,
            self.sequence_parallel,
            expected | dict.fromkeys(self.cached_for_step, 1),
            self.description.parameters.keys() - self.cached_for_step if continued else (),
        )
        specs = self.description.parameters
        streamed = {name: self.gradients.elements[name] for name, spec in specs.items() if spec.streamed}
        layers = {0: self.description.layer_weights(self.recompute)}
        order = weight_order(single_stage(microbatches), layers, chunk_terms)
        self.gradients.sums.start_row_gathers()  # of the step before
        whole = self.description.whole_weights
        self.weights = PlannedWeights(self.device, streamed, whole, self.overlap, self.element_bytes, self.gradients)
        self.weights.begin(order, self.cached, self.cached_for_step, {**chunk_terms, **added}, continued)
        for _ in range(microbatches):
            self._microbatch()
            self.after_microbatch.append(self.device.totals())
        self.weights.schedule.finish()
        self.gradients.finish()
        self.gradients.update()
        self._forget_walks()
        return self.device

    def _forget_walks(self) -> None:
        """Break the reference cycles of the walks, so that the garbage collector need not search for them."""
        whole, chunks = self.__dict__.pop("_walks")
        for walk in (whole, *chunks):
            walk.memo.clear()
            walk.plans.clear()

    @cached_property
    def _walks(self) -> tuple[ChunkWalk, list[ChunkWalk]]:
        """The walk through a microbatch outside of the blocks, and the walks through its chunks in the blocks."""
        size = self.micro_batch // self.num_chunks
        chunks = [ChunkWalk(self, size, first=index == 0) for index in range(self.num_chunks)]
        return ChunkWalk(self, self.micro_batch), chunks

    def _microbatch(self) -> None:
        whole, chunks = self._walks
        for walk in (whole, *chunks):
            walk.held = 0  # gradients that the layers have held belong to the step
        for units in self._together:
            run(self._forward(walk, units) for walk in (chunks if units[0].block else [whole]))
        self.after_forward.append((self.device.now, sum(walk.held for walk in (whole, *chunks))))
        for units in reversed(self._together):
            walks = chunks if units[0].block else [whole]
            if self.recompute and units[0].block:
                self._recompute_and_backward(walks, units[0])
            else:
                run(self._backward(walk, units) for walk in reversed(walks))
        self.after_backward.append((self.device.now, sum(delayed.kept for delayed in self.delayed)))
        for delayed in self.delayed:
            self._at(delayed.walk, delayed.unit)
            delayed.compute()
            self.device.release(delayed.kept)
        self.delayed.clear()

    @cached_property
    def _together(self) -> list[list[Unit]]:
        """Units of which chunks may be in different ones at the same time, as gpt4d.parallel.chunks runs them."""
        together: list[list[Unit]] = []
        for unit in self.description.units:
            if unit.block and not self.recompute and together and together[-1][0].block:
                together[-1].append(unit)
            else:
                together.append([unit])
        return together

    @staticmethod
    def _at(walk: ChunkWalk, unit: Unit) -> ChunkWalk:
        walk.unit = unit
        return walk

    async def _forward(self, walk: ChunkWalk, units: list[Unit]) -> None:
        for unit in units:
            before = self._at(walk, unit).held
            if self.recompute and unit.block:
                await cast(BlockCost, unit.layer).forward(walk, keep=False)
            else:
                await unit.layer.forward(walk)
            if more := self.omitted.get(unit.name):
                kept = sum(map(self.weights.kept_bytes, self._weights(unit))) if walk.first else 0
                walk.held_by_omitted[unit.name] = more * (walk.held - before + kept)
                self.device.hold(walk.held_by_omitted[unit.name])

    def _recompute_and_backward(self, walks: list[ChunkWalk], unit: Unit) -> None:
        block = cast(BlockCost, unit.layer)
        gathering = {walk: block.gather_gradient(self._at(walk, unit)) for walk in reversed(walks)}
        run(block.forward(walk, recomputing=True) for walk in walks)
        for walk in reversed(walks):
            self._release_omitted(walk, unit)
        run(block.backward(walk, gathering[walk]) for walk in reversed(walks))
        for walk in walks:
            self._keep_for_omitted(walk, unit)

    async def _backward(self, walk: ChunkWalk, units: list[Unit]) -> None:
        for unit in reversed(units):
            self._release_omitted(walk, unit)
            await unit.layer.backward(self._at(walk, unit))
            self._keep_for_omitted(walk, unit)

    def _release_omitted(self, walk: ChunkWalk, unit: Unit) -> None:
        if unit.name in walk.held_by_omitted:
            self.device.release(walk.held_by_omitted[unit.name])
            if walk.first:
                self._hold_gradients_of_omitted(unit)

    def _keep_for_omitted(self, walk: ChunkWalk, unit: Unit) -> None:
        """Hold what the weight gradients of the blocks that are omitted after this one will read."""
        if (more := self.omitted.get(unit.name)) and self.splits_backwards:
            kept = more * sum(one.kept for one in self.delayed if one.walk is walk and one.unit is unit)
            self.device.hold(kept)
            self.delayed.append(_Delayed(walk, unit, lambda: None, kept))

    @staticmethod
    def _weights(unit: Unit) -> Iterable[str]:
        return map(unit.qualified, unit.layer.weights().forward)

    def _hold_gradients_of_omitted(self, unit: Unit) -> None:
        elements = sum(self.gradients.elements[unit.qualified(name)] for name in unit.layer.parameters())
        if not self.continued:
            self.device.hold(self.omitted[unit.name] * elements * MASTER_BYTES)
