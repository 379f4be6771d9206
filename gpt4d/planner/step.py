"""A walk through a training step on one device: products, collectives and kept activations, layer by layer.

The layers come from a description (gpt4d.model.description); tests compare the walk with what a run counts.
"""

from collections.abc import Collection, Mapping
from typing import cast

from gpt4d.config import Config, GridSizes
from gpt4d.model.costs import MASTER_BYTES
from gpt4d.model.description import BlockCost, Description, Unit
from gpt4d.parallel.order import weight_order
from gpt4d.parallel.pipeline.schedule import single_stage
from gpt4d.planner.device import Device, Links
from gpt4d.planner.stream import PlannedGradients, PlannedStream
from gpt4d.planner.workload import compute_bytes, training_state


class StepWalk:
    """A step of ``config`` on a grid, as gpt4d.model.description.Walk, the protocol that layers use.

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
        self.description, self.sizes, self.omitted = description, sizes, omitted or {}
        self.recompute = config.train.activation_checkpointing == "full"
        self.overlap = config.parallel.overlap
        self.device = device = Device(config.cluster, links)
        self.element_bytes = compute_bytes(config)
        self.length, self.samples = config.train.seq_len, micro_batch
        self.tokens = micro_batch * self.length
        self.shard_states = config.optim.shard_states
        weights = description.weights_of(cached)
        for_step = config.parallel.cache_scope == "step"
        self.cached = frozenset() if for_step else weights
        self.cached_for_step = weights if for_step else frozenset()
        if gradient_bytes is None:
            gradient_bytes = training_state(description, sizes, shard_states=False)["gradients"]
        self.gradient_bytes, self.continued_bytes = gradient_bytes, continued_bytes
        self.compute, self.scratch = device.compute, device.scratch
        self.start, self.wait, self.do = device.start, device.wait, device.do
        self.held = 0  # by layers: not gathered weights, not gradients

    def run(self, microbatches: int, continued: bool = False) -> Device:
        """Walk through microbatches and the update that follows them; ``continued``: the step has had earlier ones."""
        self.continued = continued
        self.after_microbatch: list[tuple[float, ...]] = []
        expected = {name: count * microbatches for name, count in self.description.contributions.items()}
        for_step = {name: expected[name] for name in self.cached_for_step}
        self.device.hold(self.continued_bytes if continued else 0)
        self.gradients = PlannedGradients(
            self.device,
            self.description.parameters,
            self.sizes,
            self.overlap.data,
            self.gradient_bytes,
            self.shard_states,
            expected | dict.fromkeys(for_step, 1),
            self.description.parameters.keys() - for_step if continued else (),
        )
        specs = self.description.parameters
        streamed = {name: self.gradients.elements[name] for name, spec in specs.items() if spec.streamed}
        order = weight_order(single_stage(microbatches), self.description.layer_weights(self.recompute))
        self.gradients.start_param_all_gather()  # of the step before
        self.stream = PlannedStream(
            self.device,
            streamed,
            order,
            self.cached,
            for_step,
            self.description.whole_weights,
            self.overlap,
            self.element_bytes,
            self.gradients,
            continued,
        )
        for _ in range(microbatches):
            self._microbatch()
            self.after_microbatch.append(self.device.totals())
        self.stream.finish()
        self.gradients.finish()
        self.gradients.update()
        return self.device

    def _microbatch(self) -> None:
        held_by_omitted: dict[str, int] = {}
        for unit in self.description.units:
            self.unit, before = unit, self.device.held
            if self.recompute and unit.block:
                cast(BlockCost, unit.layer).forward(self, keep=False)
            else:
                unit.layer.forward(self)
            if more := self.omitted.get(unit.name):
                held_by_omitted[unit.name] = more * (self.device.held - before)
                self.device.hold(held_by_omitted[unit.name])
        for unit in reversed(self.description.units):
            self.unit = unit
            if self.recompute and unit.block:
                cast(BlockCost, unit.layer).forward(self, recomputing=True)
            if unit.name in held_by_omitted:
                self.device.release(held_by_omitted[unit.name])
                self._hold_gradients_of_omitted(unit)
            unit.layer.backward(self)

    def _hold_gradients_of_omitted(self, unit: Unit) -> None:
        elements = sum(self.gradients.elements[unit.qualified(name)] for name in unit.layer.parameters())
        if not self.continued:
            self.device.hold(self.omitted[unit.name] * elements * MASTER_BYTES)

    def size(self, axis: str) -> int:
        return getattr(self.sizes, axis)

    def hold(self, nbytes: int) -> None:
        self.held += nbytes
        self.device.hold(nbytes)

    def release(self, nbytes: int) -> None:
        self.held -= nbytes
        self.device.release(nbytes)

    def gather(self, weight: str) -> None:
        self.stream.gather(self.unit.qualified(weight))

    def multiplied(self) -> None:
        self.stream.multiplied()

    def scatter(self, weight: str) -> None:
        self.stream.scatter(self.unit.qualified(weight))

    def add_gradient(self, parameter: str) -> None:
        name = self.unit.qualified(parameter)
        self.device.hold(self.gradients.elements[name] * MASTER_BYTES)
        self.gradients.add(name)
