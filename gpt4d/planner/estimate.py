"""Time, bytes and memory of a step on one grid, extrapolated from a few short simulated steps."""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import NamedTuple

from gpt4d.config import Config, GridSizes
from gpt4d.model import registry
from gpt4d.model.description import Description
from gpt4d.model.parts import Unit
from gpt4d.parallel.symbolic.stage import MASTER_BYTES
from gpt4d.planner.device import AXES, Links
from gpt4d.planner.step import StepWalk
from gpt4d.planner.topology import reserved_gib
from gpt4d.planner.workload import compute_bytes, gathered_bytes, splits_backwards, training_state

GIB = 2**30
MAX_WALKED = 64  # maximum number of simulated blocks, over all microbatches; longer steps are extrapolated
_DOUBT = 1.2  # a prediction from a grid that differs in z and data only is too high by less (measured: 1.09 at most)
BLOCKS_PER_KIND = 4  # simulated blocks; each additional block costs as much as the last simulated one


class StepCost(NamedTuple):
    """Time, bytes and memory of a step for each device of a stage.

    Attributes:
        step_time_s: seconds of the step.
        compute_s: seconds of computation.
        comm: bytes, time_s and exposed_s by axis.
        memory: GiB of weights, gradients, optimizer states, memory reserved before the first tensor, and activations.
    """

    step_time_s: float
    compute_s: float
    comm: dict[str, dict[str, float]]
    memory: dict[str, float]

    @property
    def memory_gib(self) -> float:
        return sum(self.memory.values())

    @property
    def exposed_s(self) -> float:
        return sum(axis["exposed_s"] for axis in self.comm.values())

    @property
    def hidden_s(self) -> float:
        """Seconds of overlapped collectives. A wait for late ranks can exceed the collective itself."""
        return sum(max(0.0, axis["time_s"] - axis["exposed_s"]) for axis in self.comm.values())


class Microbatch(NamedTuple):
    """Time and memory that a microbatch between others takes on a device."""

    forward_s: float
    input_gradient_s: float  # input gradients, or the full backward if the schedule does not split it
    weight_gradient_s: float
    kept_bytes: float  # saved activations between the forward and the backward
    delayed_bytes: float  # saved tensors between the input gradients and the weight gradients

    @property
    def seconds(self) -> float:
        return self.forward_s + self.input_gradient_s + self.weight_gradient_s


class Estimate:
    """Cost of a step of one configuration on one grid, for any microbatch.

    Args:
        config: the settings; the grid's settings are ignored.
        sizes: the grid.
        description: the model; None to build it from ``config``.
        world: number of devices of all stages, if the grid belongs to a pipeline stage.
        alike: GiB beyond ``bound_gib``, by microbatch, of grids that differ in z and data only, to predict this grid's.
    """

    def __init__(
        self,
        config: Config,
        sizes: GridSizes,
        description: Description | None = None,
        world: int | None = None,
        alike: dict[int, float] | None = None,
    ):
        self.config, self.sizes, self.alike = config, sizes, {} if alike is None else alike
        self.description = description or registry.describe_run(config, [sizes])
        context = config.parallel.context
        self.links = Links(config.cluster, sizes, config.parallel.rank_order, world, context)
        self.reserved_gib = reserved_gib(config, sizes, world or sizes.devices, context)
        self.state = training_state(self.description, sizes, config.optim, compute_bytes(config))
        self.share = config.train.batch_size // sizes.sample_shards(context)
        self.cached = self.description.cached_units(config.parallel.cache_layers)
        self.few = self._first_of_each_kind(BLOCKS_PER_KIND)
        self._known: dict[int, tuple[float, float]] = {}
        self._further: dict[int, tuple[float, ...]] = {}
        self._steps: dict[int, StepCost] = {}

    def least_gib(self) -> float:
        """Return the memory that the training state and the machine take before the first activation."""
        return self.reserved_gib + (self.state["weights"] + self.state["optimizer"]) / GIB

    def bound_gib(self) -> float:
        """Return a lower bound of the memory of a step: the training state between the backward and the update."""
        return self.least_gib() + self.state["gradients"] / GIB

    def likely_gib(self, micro_batch: int) -> float:
        """Return a lower bound of the peak of a step, without a walk: from a similar grid, if one is known."""
        return self.bound_gib() if micro_batch not in self.alike else self.predicted_gib(micro_batch) / _DOUBT

    def predicted_gib(self, micro_batch: int) -> float:
        """Return the peak of a step as a similar grid predicts it; infinity if none is known."""
        return self.bound_gib() + self.alike.get(micro_batch, math.inf)

    def memory_gib(self, micro_batch: int) -> float:
        """Return the peak of a step with microbatches of this many samples."""
        return self._quick(micro_batch)[1]

    def quick_s(self, micro_batch: int) -> float:
        """Return the approximate seconds of a step, to select the grids that ``step`` estimates."""
        return self._quick(micro_batch)[0]

    def _kind(self, block: Unit) -> tuple:
        """Return the kind of a block. Blocks of one kind have the same cost, caching and sharding."""
        whole = block.name in self.description.replicated
        return block.kind, block.name in self.cached, whole

    def _first_of_each_kind(self, limit: int) -> list[Unit]:
        counts: Counter[tuple] = Counter()
        chosen = []
        for block in self.description.blocks:
            counts[self._kind(block)] += 1
            if counts[self._kind(block)] <= limit:
                chosen.append(block)
        return chosen

    def _omitted(self) -> dict[tuple, int]:
        """Return the number of blocks of each kind that ``few`` omits, in the order of each kind's first block."""
        counts = Counter(self._kind(block) for block in self.description.blocks)
        counts.subtract(self._kind(block) for block in self.few)
        return dict(counts)

    def _quick(self, micro_batch: int) -> tuple[float, float]:
        """Return seconds and GiB, from the last microbatch of a few blocks."""
        if micro_batch not in self._known:
            microbatches = self.share // micro_batch
            first = {self._kind(block): block.name for block in reversed(self.few)}
            omitted = {first[kind]: count for kind, count in self._omitted().items() if count}
            step = self.walk(micro_batch, self.few, omitted)
            device = step.run(1, continued=microbatches > 1)
            seconds = device.now * microbatches
            if microbatches > 1 and self.config.parallel.cache_scope == "step":  # a gather and a scatter in a step
                middle = self.walk(micro_batch, self.few)
                middle.run(2, continued=True)
                seconds = self.walk(micro_batch, self.few).run(1).now + middle.after_microbatch[0][0] * (
                    microbatches - 1
                )
            seconds *= len(self.description.blocks) / len(self.few)
            peak_gib = self.least_gib() + device.peak / GIB
            self._known[micro_batch] = seconds, peak_gib
            self.alike.setdefault(micro_batch, peak_gib - self.bound_gib())
        return self._known[micro_batch]

    def step(self, micro_batch: int) -> StepCost:
        """Return the full estimate for microbatches of this many samples."""
        if micro_batch not in self._steps:
            self._steps[micro_batch] = self._step(micro_batch)
        return self._steps[micro_batch]

    def _step(self, micro_batch: int) -> StepCost:
        config, state = self.config, self.state
        blocks = self.description.blocks
        microbatches = self.share // micro_batch
        if len(blocks) * microbatches <= MAX_WALKED:
            totals = self.walk(micro_batch, blocks).run(microbatches).totals()
        else:
            # The first microbatch accumulates no gradients, and accumulation in the last one overlaps reductions.
            walked = min(2, microbatches)
            totals = self.walk(micro_batch, blocks).run(walked).totals()
            totals = _sum(totals, self._further_microbatch(micro_batch)[4:], microbatches - walked)
        seconds, compute_s, *rest = totals
        absent = set() if config.optim.uses_muon else {"stage"}
        if not (config.parallel.expert_data and self.sizes.splits_batch_twice):
            absent.add("batch")
        comm = {
            axis: dict(zip(("bytes", "time_s", "exposed_s"), rest[3 * n : 3 * n + 3], strict=True))
            for n, axis in enumerate(AXES)
            if self.links.sizes[axis] > 1 and axis not in absent
        }
        memory = {kind: nbytes / GIB for kind, nbytes in state.items()}
        memory["reserved"] = self.reserved_gib
        memory["activations"] = self.memory_gib(micro_batch) - sum(memory.values())
        return StepCost(seconds, compute_s, comm, memory)

    def microbatch(self, micro_batch: int) -> Microbatch:
        """Return the time and memory of a microbatch between other microbatches."""
        forward_s, gradient_s, kept, delayed, seconds, *_ = self._further_microbatch(micro_batch)
        if not splits_backwards(self.config):
            gradient_s = seconds - forward_s
        return Microbatch(forward_s, gradient_s, seconds - forward_s - gradient_s, kept, delayed)

    def _further_microbatch(self, micro_batch: int) -> tuple[float, ...]:
        """Return the cost of one more microbatch, extrapolated from a microbatch of a few blocks.

        The result consists of the forward's seconds, the backward's seconds (input gradients only, if the schedule
        splits it), the bytes saved for the backward, the bytes saved for weight gradients, and ``Device.totals``.
        """
        if micro_batch in self._further:
            return self._further[micro_batch]

        def added(blocks: Collection[Unit]) -> tuple[float, ...]:
            step = self.walk(micro_batch, blocks)
            # The first of three microbatches begins with idle links, and the last one reduces gradients.
            step.run(3, continued=True, last=2)
            first, second = step.after_microbatch
            (forward_end_s, kept), (backward_end_s, delayed) = step.after_forward[1], step.after_backward[1]
            seconds = forward_end_s - first[0], backward_end_s - forward_end_s
            return *seconds, kept, delayed, *_sum(second, first, -1)

        base = total = added(self.few)
        for kind, more in self._omitted().items():
            if more:
                one = next(block for block in self.few if self._kind(block) == kind)
                total = _sum(total, _sum(base, added([block for block in self.few if block is not one]), -1), more)
        self._further[micro_batch] = total
        return total

    def walk(self, micro_batch: int, blocks: Collection[Unit], omitted: Mapping[str, int] = {}) -> StepWalk:
        """Return a step with some blocks; ``omitted``: numbers of equal blocks after a block, by its name."""
        return StepWalk(
            self.config,
            self.description,
            self.sizes,
            self.links,
            micro_batch,
            self.cached,
            [block.name for block in blocks],
            omitted,
            self.state["gradients"],
            self._continued_bytes,
        )

    @cached_property
    def _continued_bytes(self) -> int:
        """Bytes in use on a device between two microbatches: gradients and cached unsharded weights."""
        held = self.state["gradients"]
        if self.config.parallel.cache_scope == "step":
            for name in self.description.weights_of(self.cached):
                spec = self.description.parameters[name]
                element = gathered_bytes(self.config, spec)
                parts = self.sizes.z if spec.gathered else 1
                copied = parts > 1 or (element != MASTER_BYTES and not spec.frozen)
                gradient = 0 if spec.frozen else (parts - 1) * MASTER_BYTES
                held += spec.local_elements(self.sizes) * (parts * element * copied + gradient)
        return held


def _sum(one: tuple[float, ...], other: tuple[float, ...], times: int) -> tuple[float, ...]:
    return tuple(a + times * b for a, b in zip(one, other, strict=True))
