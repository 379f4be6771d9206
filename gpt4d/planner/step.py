"""A simulated training step on one device, from the engine's decisions and the recorded layers.

gpt4d.parallel.engine decides about weights and gradients as in a run. Tests compare the step with the counts of a run.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from gpt4d.config import Config, GridSizes
from gpt4d.model.description import Description
from gpt4d.parallel.context import Context, layer_settings
from gpt4d.parallel.engine.prefetch import BACKWARD, FORWARD, weight_order
from gpt4d.parallel.pipeline.schedule import single_stage
from gpt4d.parallel.symbolic.stage import MASTER_BYTES, SymbolicGrid, SymbolicWeights
from gpt4d.parallel.symbolic.tensor import SymbolicTensor
from gpt4d.planner.device import Device, Links
from gpt4d.planner.events import DELAYED, Drop, Event, Gather, Key, Parameter, Scatter, Start, Term, Wait, Work
from gpt4d.planner.recording import Settings, compute_dtype, recording_of
from gpt4d.planner.update import update, update_memory
from gpt4d.planner.workload import compiles, compute_bytes, splits_backwards


class StepWalk:
    """A step of ``config`` on a grid.

    Args:
        config: the settings.
        description: the model.
        sizes: the grid.
        links: the speed of its collectives.
        micro_batch: samples of a microbatch on one device.
        cached: names of the units with cached unsharded weights.
        blocks: names of the blocks to compute.
        omitted: number of equal blocks after a block, by its name. Only their memory is counted.
        gradient_bytes: bytes of all gradients of the model on one device.
        continued_bytes: bytes that the full model keeps in use between two microbatches.
    """

    def __init__(
        self,
        config: Config,
        description: Description,
        sizes: GridSizes,
        links: Links,
        micro_batch: int,
        cached: Collection[str],
        blocks: Collection[str],
        omitted: Mapping[str, int],
        gradient_bytes: int,
        continued_bytes: int,
    ):
        self.recording = recording_of(description, blocks, Settings.of(config, sizes, micro_batch))
        self.config, self.description, self.sizes = config, description.with_blocks(blocks), sizes
        self.device = Device(config.cluster, links, compiles(config))
        names = [unit.name for unit in self.description.blocks]
        self.prefixes = [f"{name}." for name in names]
        self.splits_backwards = splits_backwards(config)
        self.update_bytes = update_memory(description.parameter_counts, sizes, config.optim, compute_bytes(config))
        self.omitted = {names.index(name): count for name, count in omitted.items()}
        weights = self.description.weights_of(cached)
        for_step = config.parallel.cache_scope == "step"
        self.cached = frozenset() if for_step else weights
        self.cached_for_step = weights if for_step else frozenset()
        self.gradient_bytes, self.continued_bytes = gradient_bytes, continued_bytes

    def run(self, microbatches: int, continued: bool = False, last: int | None = None) -> Device:
        """Compute microbatches and the update that follows them.

        Args:
            microbatches: number of microbatches.
            continued: the step has computed earlier microbatches.
            last: the number of the microbatch after which to end, without the update; None: compute all.
        """
        self.continued = continued
        self.after_forward: list[tuple[float, int]] = []  # seconds, and bytes saved for the backward
        # Seconds, and bytes saved for weight gradients that are computed later.
        self.after_backward: list[tuple[float, int]] = []
        self.after_microbatch: list[tuple[float, ...]] = []
        config, description, device, parallel = self.config, self.description, self.device, self.config.parallel
        grid = SymbolicGrid(device, self.sizes)
        context = Context(grid, compute_dtype(config), parallel.overlap, **layer_settings(config))
        self.weights = weights = SymbolicWeights(
            context, description.parameters, self.gradient_bytes, config.optim.shard_states
        )
        self._omitted = {place: _Omitted(self, place, more) for place, more in self.omitted.items()}
        expected = {name: count * microbatches for name, count in description.contributions.items()}
        chunk_contributions = description.chunk_contributions(parallel.chunks)
        added = {name: expected[name] * chunk_contributions.get(name, 1) for name in self.cached_for_step}
        layers = {0: description.layer_weights(context.training.recompute)}
        order = weight_order(single_stage(microbatches), layers, chunk_contributions)
        sums = weights.reduction.sums
        sums.begin(expected | dict.fromkeys(self.cached_for_step, 1))
        sums.start_row_gathers()  # rows that the previous step has updated
        earlier = self._continue() if continued else None
        plan = weights.schedule.plan(order, self.cached, self.cached_for_step)
        weights.schedule.begin(plan, {**chunk_contributions, **added}, earlier)
        for _ in range(last or microbatches):
            self._microbatch()
            self.after_microbatch.append(device.totals())
        if last:
            return device
        weights.schedule.finish()
        weights.reduction.finish()
        device.scratch(self.update_bytes)
        element_bytes, statistics_bytes = compute_bytes(config), description.statistics_bytes
        update(device, description.parameters, self.sizes, config.optim, element_bytes, statistics_bytes)
        return device

    def _continue(self) -> dict[str, tuple[SymbolicTensor, SymbolicTensor]]:
        """Allocate the tensors of earlier microbatches. Return cached unsharded weights with their gradients."""
        weights, earlier, before = self.weights, {}, self.device.held
        for name in self.description.parameters:
            shard = weights.shard(name)
            if name not in self.cached_for_step:
                weights.gradients[name] = shard.like().new()
                continue
            gathered, whole = weights.gathered(name), weights.unsharded(name)
            copied = (gathered.shape, gathered.dtype) != (shard.shape, shard.dtype)
            earlier[name] = gathered.new() if copied else gathered, whole.new()
        self.device.hold(self.continued_bytes - (self.device.held - before))  # blocks that are not simulated
        return earlier

    def layer_bytes(self) -> int:
        """Return the bytes in use without gathered weights."""
        return self.device.held - self.weights.gathered_bytes

    def _microbatch(self) -> None:
        self._known: dict[tuple[str, int, int], Any] = {}  # collectives in flight, and gathered weights in use
        before = self.layer_bytes()
        self._play(FORWARD)
        self.after_forward.append((self.device.now, self.layer_bytes() - before))
        self._play(BACKWARD)
        self.after_backward.append((self.device.now, self.layer_bytes() - before))
        if self.splits_backwards:
            self._play(DELAYED)

    def _play(self, phase: str) -> None:
        for place, events in self.recording.phase(phase):
            omitted = self._omitted.get(place)
            if omitted:
                omitted.begin(phase)
            self._play_events(place, phase, events)
            if omitted:
                omitted.end(phase)

    def _play_events(self, place: int, phase: str, events: Sequence[Event]) -> None:
        device, schedule, known = self.device, self.weights.schedule, self._known
        for event in events:
            if isinstance(event, Work):
                device.work(*event)
            elif isinstance(event, Gather):
                known[_key(event.key, place)] = schedule.gather(self._name(event.weight, place), event.phase)
            elif isinstance(event, Drop):
                del known[_key(event.key, place)]
            elif isinstance(event, Start):
                known[_key(event.key, place)] = device.start(*event[1:])
            elif isinstance(event, Wait):
                device.wait(known[_key(event.key, place)])
            elif isinstance(event, Scatter):
                schedule.scatter(self._name(event.weight, place), partial(self._gradient, place, phase, event))
            else:
                self.weights.accumulate(self._name(event.parameter, place), self._adopted(event))

    def _gradient(self, place: int, phase: str, event: Scatter, earlier: SymbolicTensor | None) -> SymbolicTensor:
        """Return the gradient of a weight, added to ``earlier`` if given."""
        self._play_events(place, phase, event.further if earlier else event.first)
        return earlier or self._adopted(event)

    def _adopted(self, event: Scatter | Term) -> SymbolicTensor:
        """Return a gradient in memory that the layers have allocated."""
        tensor = SymbolicTensor(self.device, event.shape, event.dtype)
        self.device.release(tensor.nbytes)
        return tensor.new()

    def _name(self, parameter: Parameter, place: int) -> str:
        if parameter.offset is None:
            return parameter.name
        return self.prefixes[place + parameter.offset] + parameter.name


def _key(key: Key, place: int) -> tuple[str, int, int]:
    """Return a key with the absolute index of its block."""
    phase, offset, number = key
    return phase, place + offset, number


class _Omitted:
    """Equal blocks after a block. Only their memory is counted."""

    def __init__(self, walk: StepWalk, place: int, more: int):
        self.walk, self.more = walk, more
        weights, prefix = walk.weights, walk.prefixes[place]
        self.weights = walk.description.probe.weights(walk.description.blocks[place]).forward
        trained = (name for name, spec in walk.description.parameters.items() if not spec.frozen)
        elements = sum(weights.elements(name) for name in trained if name.startswith(prefix))
        self.gradient_bytes = 0 if walk.continued else more * elements * MASTER_BYTES
        self.before = self.kept = self.delayed = 0

    def begin(self, phase: str) -> None:
        """Begin a phase. In the backward, release the blocks' saved activations and allocate their gradients."""
        if phase == BACKWARD:
            self.walk.device.release(self.kept)
            self.walk.device.hold(self.gradient_bytes)
        self.before = self.walk.layer_bytes()

    def end(self, phase: str) -> None:
        """End a phase. Allocate activations saved for the backward and tensors saved for weight gradients."""
        device, ready = self.walk.device, self.walk.weights.schedule.ready
        grown = self.more * (self.walk.layer_bytes() - self.before)
        if phase == FORWARD:
            self.kept = grown + self.more * sum(ready[name].nbytes for name in self.weights if name in ready)
            device.hold(self.kept)
        elif phase == DELAYED:
            device.release(self.delayed)
        elif self.walk.splits_backwards:  # in the backward
            self.delayed = grown + self.kept
            device.hold(self.delayed)
