"""The work of a microbatch's layers on one device, recorded for a few blocks and replayed for all blocks.

The layers of a model compute on symbolic tensors once. A recording contains their requests: computation, memory,
collectives over x, y and context, gathered weights, gradients. It contains no times. It depends on z and data only if
they split experts. So it is valid for every microbatch, every order of the ranks, and all grids with equal x and y.

A block reuses the recording of another block of the same kind whose neighbors are of the same kinds.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

from gpt4d.config import Config, GridSizes, OverlapConfig
from gpt4d.config.trainer_profiles import PROFILES
from gpt4d.model.description import Description
from gpt4d.model.parts import EdgeTensor, joined, received
from gpt4d.parallel.comm.pending import Pending
from gpt4d.parallel.context import Context, layer_settings
from gpt4d.parallel.engine.prefetch import (
    BACKWARD,
    FORWARD,
    ComputeGradient,
    WeightPlan,
    WeightSchedule,
    weight_order,
)
from gpt4d.parallel.layout import CHUNK
from gpt4d.parallel.pipeline.schedule import single_stage
from gpt4d.parallel.symbolic.costs import Computation
from gpt4d.parallel.symbolic.stage import MASTER_BYTES, SymbolicGrid, SymbolicLayer, SymbolicWeights
from gpt4d.parallel.symbolic.tensor import Storage, SymbolicTensor, backward, leaf
from gpt4d.planner.device import ComputingDevice, Rates
from gpt4d.planner.events import DELAYED, Drop, Event, Gather, Key, Parameter, Scatter, Start, Term, Wait, Work
from gpt4d.planner.workload import compiles, compute_bytes, splits_backwards


class Segment(NamedTuple):
    """The events of a phase from the first weight of a block up to the first weight of the next block.

    ``place`` is the index of the block. The first segment of a phase has no block.
    """

    phase: str
    place: int
    events: list[Event]


class MicrobatchRecording:
    """A microbatch of some blocks.

    Args:
        segments: the recorded segments, possibly of other blocks.
        recorded: number of blocks that were recorded.
        sources: for each block, the index of the recorded block with the same events.
    """

    def __init__(self, segments: Sequence[Segment], recorded: int, sources: Sequence[int]):
        self._events = {(segment.phase, segment.place): segment.events for segment in segments}
        self._recorded, self._sources = recorded, sources

    def phase(self, phase: str) -> Iterator[tuple[int, Sequence[Event]]]:
        """Yield the indices of the blocks and their events in the order of a phase."""
        count = len(self._sources)
        before, source = (-1, -1) if phase == FORWARD else (count, self._recorded)
        yield before, self._events.get((phase, source), ())
        for place in range(count) if phase == FORWARD else reversed(range(count)):
            yield place, self._events.get((phase, self._sources[place]), ())


def surroundings(description: Description) -> list[Hashable]:
    """Return the kind of each block together with the kinds of its neighbors.

    The ends of each part of the model differ. The first block of each kind in a part also differs, because it may
    compute values that other blocks use, such as the angles of a rotary embedding.
    """
    found: list[Hashable] = []
    for number, part in enumerate(description.parts):
        blocks = [unit.kind for unit in part if unit.block]
        kinds = [(kind, place > 0 and kind not in blocks[:place]) for place, kind in enumerate(blocks)]
        sides = [("begins", number), *kinds, ("ends", number)]
        found += zip(sides, kinds, sides[2:], strict=False)
    return found


def few_blocks(description: Description, model: Description) -> list[str]:
    """Return names of blocks of a model whose surroundings cover the surroundings of every block of ``description``.

    They are the first such blocks of the model, so that descriptions with other blocks give the same names.
    """
    around, names = surroundings(description), [unit.name for unit in description.blocks]
    if any(unit.tensors != description.blocks[0].tensors for unit in description.blocks):
        return names  # some blocks pass tensors on to later blocks
    chosen = dict(zip(reversed(around), reversed(description.blocks), strict=True))
    first = [chosen[kinds] for kinds in dict.fromkeys(around)]
    if len(model.parts) == 1:
        candidates = iter(model.blocks)
        few = [next(other.name for other in candidates if other.kind == unit.kind) for unit in first]
    else:
        few = [unit.name for unit in first]
    return few if chosen.keys() <= {*surroundings(model.with_blocks(few))} else names


@dataclass(frozen=True)
class Settings:
    """Settings that a recording depends on. ``layers``: additional arguments of ``Context``."""

    sizes: GridSizes
    context: int  # number of devices that share samples
    micro_batch: int
    length: int  # tokens of a sample on one device
    dtype: str
    rates: Rates
    compiled: bool
    is_cpu: bool
    splits_backwards: bool
    overlaps_sums: bool
    layers: tuple[tuple[str, Any], ...]
    repeated_products: float  # fraction of a forward's products that the trainer's backward repeats in addition
    repeats_last: bool  # the trainer's backward repeats the last product of a block

    @classmethod
    def of(cls, config: Config, sizes: GridSizes, micro_batch: int) -> Settings:
        """Return the settings of a run. ``micro_batch``: samples on one device."""
        trainer, recomputed = PROFILES[config.cluster.trainer], config.train.activation_checkpointing
        return cls(
            sizes,
            config.parallel.context,
            micro_batch,
            config.train.seq_len // config.parallel.context,
            compute_dtype(config),
            Rates.of(config.cluster),
            compiles(config),
            config.cluster.device == "cpu",
            splits_backwards(config),
            config.parallel.overlap.all_reduce,
            tuple(layer_settings(config).items()),
            trainer.recomputed_products if recomputed == "selective" else 0.0,
            trainer.recomputes_all and recomputed == "full",
        )


def compute_dtype(config: Config) -> str:
    """Return the name of the dtype of activations."""
    return "float32" if compute_bytes(config) == MASTER_BYTES else "bfloat16"


class _RecordingDevice(ComputingDevice):
    """A device that records requests. Seconds and memory count from the last event."""

    def __init__(self, settings: Settings, places: dict[str, int], imbalance: float):
        super().__init__(settings.rates, settings.compiled, settings.is_cpu, imbalance)
        self.places = places  # indices of the blocks, by name
        self.sizes = {**settings.sizes._asdict(), "none": 1}
        self.segments: list[Segment] = []
        self.repeated, self.repeats_last = settings.repeated_products, settings.repeats_last
        self.products: defaultdict[int, list[float]] = defaultdict(list)  # seconds in the forward of each block
        self.kept: list[SymbolicTensor] = []  # gradients, whose memory the layers have handed over
        self._in_block = False  # the last gathered weight belongs to a block
        self._keys = 0  # number of keys in the current segment
        self._counts: dict[tuple[str, int], int] = {}  # number of keys in each earlier segment
        self._seconds = 0.0

    def compute(self, computation: Computation) -> None:
        seconds = self.rates.seconds(computation)
        self._seconds += seconds
        if (
            self._in_block
            and computation.flops
            and computation.attention is None
            and self.segments[-1].phase == FORWARD
        ):
            self.products[self.segments[-1].place].append(seconds)

    def start(self, kind: str, axis: str, nbytes: float, received: float = 0.0) -> tuple[str, int, int]:
        key = self._new_key()
        self._add(Start(self._seen(key), kind, axis, nbytes, received))
        return key

    def wait(self, collective: Any) -> None:
        self._add(Wait(self._seen(collective)))

    # ------------------------------------------------------------------------------ weights and gradients

    def begin(self, phase: str, place: int) -> None:
        """End the current segment and begin another one."""
        self._flush()
        if self.segments:
            ended, count = self.segments[-1], self._keys
            self._counts[ended[:2]] = count
            ended.events[:] = [
                event._replace(key=event.key._replace(number=event.key.number - count))
                if isinstance(event, Start | Wait | Gather | Drop) and event.key[:2] == (ended.phase, 0)
                else event
                for event in ended.events
            ]
        self.segments.append(Segment(phase, place, []))
        self._keys = 0
        if phase == BACKWARD and (products := self.products[place]):
            self._seconds += self.repeated * sum(products) + self.repeats_last * products[-1]

    def gather(self, name: str, phase: str, weight: SymbolicTensor) -> SymbolicTensor:
        """Return a gathered weight, whose memory the player counts."""
        self._enter(FORWARD if phase == FORWARD else BACKWARD, name)
        self._in_block = self._place(name) is not None
        key = self._new_key()
        self._add(Gather(self._seen(key), self._parameter(name), phase))
        return SymbolicTensor(self, weight.shape, weight.dtype, _Use(self, key))

    def drop(self, key: tuple) -> None:
        self._add(Drop(self._seen(key)))

    def scatter(self, name: str, compute: ComputeGradient[SymbolicTensor]) -> None:
        """Record the computation of a gradient twice: alone, and with accumulation into an earlier gradient.

        Without accumulation, the player keeps the result. With accumulation, the layers release a result that they have
        computed earlier.
        """
        self._enter(self.segments[-1].phase, name)
        self._flush()
        events = self.segments[-1].events
        first, result, held = self._computed(compute, None)
        assert result.storage is not None
        further, _, more = self._computed(compute, result.like())
        self.held -= more - (held - result.storage.nbytes)
        self._flush(further)
        self.kept.append(result)
        events.append(Scatter(self._parameter(name), first, further, result.shape, result.dtype))

    def _computed(
        self, compute: ComputeGradient[SymbolicTensor], earlier: SymbolicTensor | None
    ) -> tuple[list[Event], SymbolicTensor, int]:
        """Return the events of a computation, its result, and its change of the memory in use in bytes."""
        segment = self.segments[-1]
        inner: list[Event] = []
        self.segments[-1] = segment._replace(events=inner)
        result = compute(earlier)
        self._flush()
        self.segments[-1] = segment
        return inner, result, sum(event.held for event in inner if isinstance(event, Work))

    def term(self, name: str, gradient: SymbolicTensor) -> None:
        self.kept.append(gradient)
        self._add(Term(self._parameter(name), gradient.shape, gradient.dtype))

    # ------------------------------------------------------------------------------------------ segments

    def _add(self, event: Event) -> None:
        self._flush()
        self.segments[-1].events.append(event)

    def _flush(self, events: list[Event] | None = None) -> None:
        if self.segments and (self._seconds or self.held or self.peak):
            events = self.segments[-1].events if events is None else events
            events.append(Work(self._seconds, self.held, self.peak))
        self._seconds, self.held, self.peak = 0.0, 0, 0.0

    def _enter(self, phase: str, name: str) -> None:
        """Begin the segment of the block that owns a weight, unless a later segment of the phase has begun."""
        place, current = self._place(name), self.segments[-1]
        if place is None:
            return
        assert phase == current.phase, f"a {phase} of weight {name} in the {current.phase}"
        if place > current.place if phase == FORWARD else place < current.place:
            self.begin(phase, place)

    def _new_key(self) -> tuple[str, int, int]:
        segment, self._keys = self.segments[-1], self._keys + 1
        return segment.phase, segment.place, self._keys

    def _seen(self, key: tuple[str, int, int]) -> Key:
        """Return a key as the current segment refers to it."""
        phase, place, number = key
        return Key(phase, place - self.segments[-1].place, number - self._counts.get((phase, place), 0))

    def _place(self, name: str) -> int | None:
        return self.places.get(".".join(name.split(".")[:2]))

    def _parameter(self, name: str) -> Parameter:
        place = self._place(name)
        if place is None:
            return Parameter(None, name)
        return Parameter(place - self.segments[-1].place, name.split(".", 2)[2])


class _Use(Storage):
    """Storage of a gathered weight while layers use it. Its end records a ``Drop``."""

    __slots__ = ("key",)
    device: _RecordingDevice

    def __init__(self, recorder: _RecordingDevice, key: tuple[str, int, int]):
        self.device, self.nbytes, self.key = recorder, 0, key

    def __del__(self) -> None:
        self.device.drop(self.key)


class _RecordingSchedule(WeightSchedule[SymbolicTensor, Pending]):
    """Records the uses of weights, which the player gathers and scatters."""

    device: Any

    def gather(self, weight: str, phase: str | None = None) -> SymbolicTensor:
        self.position += 1
        return self.device.device.gather(weight, phase or self.phase, self.device.gathered(weight))

    def scatter(self, weight: str, compute: ComputeGradient[SymbolicTensor]) -> None:
        self.device.device.scatter(weight, compute)


class _RecordingWeights(SymbolicWeights):
    """Weights whose use by layers is recorded."""

    device: _RecordingDevice

    def __init__(self, device: _RecordingDevice, description: Description, settings: Settings):
        overlap = OverlapConfig(all_reduce=settings.overlaps_sums)
        context = Context(
            SymbolicGrid(device, settings.sizes, settings.context), settings.dtype, overlap, **dict(settings.layers)
        )
        parameters = {  # the player gathers weights, so a recording contains only gathered ones
            name: spec.replicated() if spec.gathered else spec for name, spec in description.parameters.items()
        }
        super().__init__(context, parameters)
        layers, chunks = {0: description.layer_weights(context.training.recompute)}, context.training.num_chunks
        self.schedule = _RecordingSchedule(weakref.proxy(self), overlap)
        self.schedule.begin(WeightPlan(weight_order(single_stage(1), layers, description.chunk_contributions(chunks))))

    def accumulate(self, weight: str, part: SymbolicTensor) -> None:
        self.device.term(weight, part)


def recording_of(description: Description, blocks: Collection[str], settings: Settings) -> MicrobatchRecording:
    """Return the recording of a model with some of its blocks."""
    reduced, few, sources, others = represented(description, tuple(blocks))
    settings = replace(settings, sizes=settings.sizes._replace(**others))
    if sources:
        segments, count = recorded_segments(few, settings), len(few.description.blocks)
        if _have_segments(segments, count):
            return MicrobatchRecording(segments, count, sources)
    segments, count = recorded_segments(reduced, settings), len(reduced.description.blocks)
    return MicrobatchRecording(segments, count, range(count))


@dataclass(frozen=True)
class Layers:
    """A model that equals another one with the same work, such as the middle of a pipeline of four or eight stages."""

    description: Description = field(compare=False)
    work: Hashable

    @classmethod
    def of(cls, description: Description) -> Layers:
        """Return the layers of a model or of a part of it."""
        whole = description.replicated
        parts = [
            [(unit.kind, unit.part.begins, unit.part.ends, unit.name in whole, unit.tensors) for unit in part]
            for part in description.parts
        ]
        return cls(description, (description.probe, tuple(map(tuple, parts)), tuple(description.copied)))


@lru_cache(maxsize=1024)
def represented(description: Description, blocks: tuple[str, ...]) -> tuple[Layers, Layers, list[int], dict[str, int]]:
    """Return the model with ``blocks``, the model with few of them, and each block's index among the few.

    There are no indices if few blocks do not represent all. The last value has the sizes of axes that a recording does
    not depend on.
    """
    splitting = {axis for spec, _ in description.parameter_counts if spec.local for axis in spec.layout.axes}
    reduced = description.with_blocks(blocks)
    few = description.with_blocks(few_blocks(reduced, description))
    places = {kinds: place for place, kinds in enumerate(surroundings(few))}
    sources = [places[kinds] for kinds in surroundings(reduced)] if len(places) == len(few.blocks) else []
    return Layers.of(reduced), Layers.of(few), sources, dict.fromkeys({"z", "data"} - splitting, 1)


def _have_segments(segments: Sequence[Segment], count: int) -> bool:
    """Return whether each of ``count`` blocks has its own segment in the forward and in the backward."""
    found = {segment[:2] for segment in segments}
    return found >= {(phase, place) for phase in (FORWARD, BACKWARD) for place in range(count)}


@lru_cache(maxsize=1024)
def recorded_segments(layers: Layers, settings: Settings) -> list[Segment]:
    """Compute a microbatch."""
    description = layers.description
    places = {unit.name: place for place, unit in enumerate(description.blocks)}
    recorder = _RecordingDevice(settings, places, description.imbalance)
    weights = _RecordingWeights(recorder, description, settings)
    model: Any = SymbolicLayer(description.spec, weights)
    recorder.begin(FORWARD, -1)
    computed = []
    for units in description.parts:
        part = joined(units)
        tensors = description.tensors
        given = {name: _received(tensors[name], weights, settings) for name in received(units, tensors)}

        def new(shape: tuple[int, ...], dtype: str) -> SymbolicTensor:
            return SymbolicTensor(recorder, shape, dtype).new()

        batch = model.spec.planned_batch(new, settings.micro_batch, settings.length)
        computed.append(model.spec.compute(model, part, given, *batch))
        del given, batch
    recorder.begin(BACKWARD, len(recorder.places))
    with weights.schedule.delaying_gradients() if settings.splits_backwards else nullcontext():
        while computed:
            produced = computed.pop()
            results = [(out, out.like().new()) for out in produced.values() if out.edge is not None]
            del produced
            backward(results)
            results.clear()
    recorder.begin(DELAYED, len(recorder.places))
    if settings.splits_backwards:
        weights.schedule.compute_delayed_gradients()
    recorder.begin("", 0)
    return recorder.segments


def _received(tensor: EdgeTensor, weights: _RecordingWeights, settings: Settings) -> SymbolicTensor:
    """Return this device's shard of a tensor that another part of the model produces."""
    layout = (weights.context.training.splits_tokens and tensor.sequence_parallel) or tensor.layout
    extents = {**settings.sizes._asdict(), "z": 1, "data": 1, CHUNK: 1}  # a device has the full microbatch
    tile = layout.tile(tensor.shape(settings.micro_batch, settings.length), extents, dict.fromkeys(extents, 0))
    shape, device = tuple(stop - start for start, stop in tile), weights.device
    if not tensor.has_gradient:
        return SymbolicTensor(device, shape, tensor.dtype(settings.dtype)).new()
    new = SymbolicTensor(device, shape, settings.dtype).new()
    kept: list[SymbolicTensor] = []  # the gradient, until it is sent
    return new.alias(leaf(device, shape, settings.dtype, kept.append).edge)
