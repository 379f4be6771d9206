"""Time and memory of a step on pipeline stages, from an estimate of each stage and a simulation of the schedule."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from gpt4d.config import ClusterConfig, Config, ConfigError, GridSizes, LevelConfig, PipelineConfig
from gpt4d.config.fields import as_overrides
from gpt4d.config.pipeline import DEFAULT_SCHEDULE, items, on_grids
from gpt4d.model.description import Description, copied_parameters
from gpt4d.parallel.layout import Layout, ParameterSpec
from gpt4d.parallel.pipeline.schedule import balanced, peak_of_others
from gpt4d.parallel.pipeline.simulation import Costs, Timeline, link_name, orders_of, simulate
from gpt4d.parallel.stage_plan import StagePlan
from gpt4d.parallel.symbolic.stage import MASTER_BYTES
from gpt4d.plan import ParallelPlan
from gpt4d.planner.estimate import GIB, Estimate, Microbatch, StepCost
from gpt4d.planner.topology import node_size
from gpt4d.planner.workload import compute_bytes, converts_weights, splits_backwards, utilization

_SIMULATED = 4  # microbatches per stage; each additional one adds the time of the slowest stage, and no memory


def stage_parts(config: Config, description: Description) -> list[tuple[tuple[int, int], ...]]:
    """Return the unit ranges (first, stop) of each stage's model chunks. ``stop`` is exclusive.

    Raises ConfigError if the model has too few blocks, or if ``parallel.pipeline.cuts`` are not blocks in order.
    """
    pipeline, units = config.parallel.pipeline, description.units
    stages = pipeline.stages or 1
    count = stages * pipeline.chunks_per_stage
    places = [index for index, unit in enumerate(units) if unit.block][1:]
    if count > len(places) + 1:
        chunks = f"·chunks_per_stage={stages}·{pipeline.chunks_per_stage}"
        raise ConfigError(
            f"parallel.pipeline.stages{chunks if pipeline.chunks_per_stage > 1 else f'={count}'}: the model has "
            f"{len(places) + 1} block(s), and each part needs one; use fewer"
        )
    if pipeline.cuts is None:
        work = [description.probe.flops(unit, config.train.seq_len) for unit in units]
        begins = balanced(work, count, places)
    else:
        begins = [places[block - 1] for block in _cut_blocks(pipeline.cuts, count, len(places) + 1)]
    bounds = [*zip([0, *begins], [*begins, len(units)], strict=True)]
    return [tuple(bounds[stage::stages]) for stage in range(stages)]


def _cut_blocks(cuts: Any, count: int, blocks: int) -> list[int]:
    """Return the first blocks of all parts except the first part. Raises ConfigError unless ``cuts`` lists blocks."""
    numbers = [int(text) if text.isdigit() else -1 for text in items(cuts)]
    setting = f"parallel.pipeline.cuts=[{','.join(items(cuts))}]"
    if numbers != sorted(set(numbers)) or not all(0 < number < blocks for number in numbers):
        raise ConfigError(
            f"{setting}: not blocks in ascending order; use numbers from 1 to {blocks - 1}, such as [{blocks // 2}]"
        )
    if len(numbers) != count - 1:
        raise ConfigError(f"{setting}: {count} parts of the model have {count - 1} cut(s); give as many")
    return numbers


@dataclass
class Known:
    """Values that all estimates of one configuration share.

    Attributes:
        parts: parts of the model on each stage, by the numbers of stages and chunks.
        stages: estimates of stages, by grid and layers.
        alike: GiB of activations, by microbatch, of stages that differ in z and data only.
    """

    parts: dict[tuple[int, int], list[tuple[tuple[int, int], ...]]] = field(default_factory=dict)
    stages: dict[tuple, Estimate] = field(default_factory=dict)
    alike: defaultdict[tuple, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))


@dataclass(frozen=True)
class PlanEstimate(ParallelPlan):
    """A plan with the time, bytes and memory of its step. ``parallel.pipeline`` of its settings is complete.

    Attributes:
        options: settings outside ``parallel`` that the planner has added, by key.
        choice: settings of ``parallel`` that the planner has added.
        known: values that all estimates of these settings share.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    choice: Mapping[str, Any] = field(default_factory=dict)
    known: Known = field(default_factory=Known)

    def with_config(self, config: Config) -> "PlanEstimate":
        """Return the estimate of the same plan with other settings, for the same model."""
        return replace(self, config=config, known=Known())

    # ------------------------------------------------------------------------------------------ the plan's settings

    @property
    def grid(self) -> str:
        """The sizes of the grid, or of the grids of all stages.

        A note follows if ranks share samples, and if y is the axis of neighboring ranks.
        """
        runs = [(sizes, len(list(equal))) for sizes, equal in groupby(self.grids)]
        grids = " + ".join(f"{count} × {sizes}" if count > 1 else str(sizes) for sizes, count in runs)
        parallel = self.config.parallel
        shared = f" with context {parallel.context}" if parallel.context > 1 else ""
        return grids + shared + (" in rank order yx" if parallel.rank_order == "yx" else "")

    @property
    def settings(self) -> Config:
        """The configuration that resolves to this plan."""
        parallel = self.config.parallel
        # A run would cache converted weights if memory allows.
        explicit = replace(parallel, cache_layers=parallel.cache_layers or 0)
        return on_grids(replace(self.config, parallel=explicit), self.grids, self.microbatches)

    @property
    def overrides(self) -> list[str]:
        """The settings that select this plan, as overrides."""
        parallel, choice = self.settings.parallel, dict(self.choice)
        words = [] if parallel.pipeline.stage_grids else self.sizes.overrides
        if len(self.stages) > 1:
            for key, value in asdict(parallel.pipeline).items():
                if value != getattr(PipelineConfig(), key):
                    text = f"[{','.join(map(str, value))}]" if isinstance(value, list) else value
                    words.append(f"parallel.pipeline.{key}={text}")
        elif self.microbatches > 1:
            words.append(f"train.micro_batch_size={self.micro_batch_size(self.stages[0])}")
        if self.config.parallel.cache_layers is None and all(converts_weights(self.config, own) for own in self.grids):
            choice["cache_layers"] = 0
        return words + as_overrides({**{f"parallel.{key}": value for key, value in choice.items()}, **self.options})

    # ------------------------------------------------------------------------------------------ the stages

    def estimate(self, stage: StagePlan, parts: tuple[tuple[int, int], ...] = ()) -> Estimate:
        """Return the estimate of parts of the model on a stage, by default its own. Equal layers share an estimate."""
        parts = parts or stage.parts
        units = [unit for first, stop in parts for unit in self.description.units[first:stop]]
        whole = self.description.replicated
        layers = tuple((unit.kind, unit.part.begins, unit.part.ends, unit.name in whole) for unit in units)
        key = stage.sizes, layers, splits_backwards(self.config), self.devices
        if key not in self.known.stages:
            part = self.description.stage(parts) if len(self.stages) > 1 else self.description
            x, y, z, _ = stage.sizes
            alike = self.known.alike[x, y, z if part.routers else z > 1, *key[1:3]]
            self.known.stages[key] = Estimate(self.config, stage.sizes, part, self.devices, alike)
        return self.known.stages[key]

    @cached_property
    def _microbatches(self) -> list[Microbatch]:
        """Time and memory that a microbatch between others takes on each virtual stage."""
        return [
            self.estimate(stage, (part,)).microbatch(self.micro_batch_size(stage)) for stage, part in self.virtual_parts
        ]

    @cached_property
    def costs(self) -> Costs:
        """Seconds of a microbatch on each virtual stage and edge."""
        tensors = self.description.tensors
        with_gradient = {
            edge: [name for name in names if tensors[name].has_gradient] for edge, names in self.crossing.items()
        }
        transfers = {edge: self._transfer_s(edge, names) for edge, names in self.crossing.items()}
        gradients = {edge: self._transfer_s(edge[::-1], names) for edge, names in with_gradient.items() if names}
        forward, inputs, weights, *_ = zip(*self._microbatches, strict=True)
        return Costs(forward, inputs, weights, transfers, gradients)

    def _transfer_s(self, edge: tuple[int, int], names: Iterable[str]) -> float:
        source, target = (self.virtual_parts[place][0] for place in edge)
        nbytes = sum(self._nbytes(name) for name in names)
        return 0.0 if source is target else transfer_seconds(self.config.cluster, source, target, nbytes)

    def _nbytes(self, name: str) -> int:
        """Return the bytes of a tensor of one microbatch over all devices."""
        train = self.config.train
        samples = train.batch_size // self.microbatches
        return self.description.tensors[name].nbytes(samples, train.seq_len, compute_bytes(self.config))

    @cached_property
    def _timeline(self) -> Timeline:
        """A simulated step with enough microbatches to reach the maximum number in flight."""
        stages, chunks = len(self.stages), len(self.stages[0].parts)
        schedule = self.config.parallel.pipeline.schedule or DEFAULT_SCHEDULE
        count = self.microbatches if schedule == "gpipe" else min(self.microbatches, _SIMULATED * stages)
        return simulate(orders_of(schedule, stages, count, self.costs, chunks), self.costs)

    @cached_property
    def step_time_s(self) -> float:
        """Seconds of a step, from the first forward to the last update."""
        if len(self.stages) == 1:
            return self.of_stage(0).step_time_s
        ends = [spans[-1].stop + self._end_s(stage) for stage, spans in enumerate(self._timeline.stages)]
        return max(ends) + self._further_s

    @property
    def quick_s(self) -> float:
        """Seconds of a step, approximate if there is a single stage, to select the plans that are estimated in full."""
        if len(self.stages) > 1:
            return self.step_time_s
        (stage,) = self.stages
        return self.estimate(stage).quick_s(self.micro_batch_size(stage))

    @property
    def least_s(self) -> float:
        """A lower bound of ``quick_s``: seconds from the first forward to the end of the last backward."""
        return self._timeline.seconds + self._further_s if len(self.stages) > 1 else self.quick_s

    @property
    def predicted_gib(self) -> float:
        """Memory of a device of a single stage as a similar grid predicts it; infinity if none is known."""
        (stage,) = self.stages
        return self.estimate(stage).predicted_gib(self.micro_batch_size(stage))

    @cached_property
    def _further_s(self) -> float:
        """Seconds of the microbatches that are not in the timeline."""
        simulated = sum(span.action.kind == "F" for span in self._timeline.stages[0]) // len(self.stages[0].parts)
        return (self.microbatches - simulated) * max(self._busy_s(stage) for stage in range(len(self.stages)))

    def _busy_s(self, stage: int) -> float:
        """Return the seconds of a microbatch on a stage."""
        costs = self._microbatches[stage :: len(self.stages)]
        return sum(cost.seconds for cost in costs)

    def _end_s(self, stage: int) -> float:
        """Return the seconds of a stage after its last backward: gradient reduction and the update."""
        return self.of_stage(stage).step_time_s - self.microbatches * self._busy_s(stage)

    def of_stage(self, stage: int) -> StepCost:
        """Return the step of a stage that never waits for another stage.

        Its microbatches run sequentially. A schedule that interleaves them may change the number of all-gathers over z,
        because a weight that is used twice in succession is gathered once.
        """
        own = self.stages[stage]
        return self.estimate(own).step(self.micro_batch_size(own))

    @cached_property
    def stage_gib(self) -> list[float]:
        """The peak of each stage in a step."""
        timeline, count, result = self._timeline, len(self.stages), []
        for stage in self.stages:
            own = self._microbatches[stage.index :: count]
            received = {
                edge: sum(self._local_bytes(name, stage.sizes) for name in names)
                for edge, names in self.crossing.items()
            }
            waiting = timeline.peak_waiting(stage.index, received)
            kept = sum(cost.kept_bytes for cost in own) / len(own)
            delayed = sum(cost.delayed_bytes for cost in own) / len(own)
            others = peak_of_others((span.action for span in timeline.stages[stage.index]), kept, delayed)
            others -= (len(own) - 1) * kept  # exclude other model chunks of the same microbatch
            result.append(self._alone_gib(stage) + (waiting + max(0.0, others)) / GIB)
        return result

    def _alone_gib(self, stage: StagePlan) -> float:
        """Return the peak of a stage with one microbatch in flight, a lower bound of the peak in a step."""
        return self.estimate(stage).memory_gib(self.micro_batch_size(stage)) + self._added_gib(stage)

    def _added_gib(self, stage: StagePlan) -> float:
        """Return the memory of links and graphs between a stage and other stages on a device of the stage."""
        return self._links_gib(stage) + self._graph_buffers_gib(stage)

    def _links_gib(self, stage: StagePlan) -> float:
        """Return the memory of the links between a stage and other stages on a device of the stage."""
        return self.config.cluster.communicator_gib * sum(stage.index in pair for pair in self._sent_bytes)

    def _graph_buffers_gib(self, stage: StagePlan) -> float:
        """Return the memory of the buffers between CUDA graphs and other stages (gpt4d.parallel.cuda_graphs)."""
        if not self.config.train.cuda_graphs:
            return 0.0
        count = len(self.stages)
        crossing = [
            sum(self._local_bytes(name, stage.sizes) for name in names)
            for (source, target), names in self.crossing.items()
            if source % count != target % count and stage.index in (source % count, target % count)
        ]
        held = [spec for _, owner, holder, spec in self._copies if stage.index in (owner, holder)]
        elements = sum(spec.local_elements(stage.sizes) for spec in held)
        # A tensor that crosses also has a copy of its buffer.
        return (2 * max(crossing, default=0) + elements * MASTER_BYTES) / GIB

    @property
    def reserved_gib(self) -> list[float]:
        """The memory that libraries and groups of ranks take on a device of each stage before the first tensor."""
        return [self.estimate(stage).reserved_gib + self._links_gib(stage) for stage in self.stages]

    def needed_gib(self, limit: float) -> float:
        """Return the GiB of the fullest stage, or a lower bound if it already exceeds ``limit``.

        Lower bounds are much faster to estimate than a step: the state of a stage, a similar stage, a stage with one
        microbatch in flight, and the first stage with as many microbatches in flight as there are stages.
        """
        bounds = (
            lambda stage: self.estimate(stage).bound_gib() + self._added_gib(stage),
            lambda stage: self.estimate(stage).likely_gib(self.micro_batch_size(stage)),
            self._alone_gib,
        )
        for bound in bounds:
            needed = 0.0
            for stage in self.stages:
                needed = max(needed, bound(stage))
                if needed > limit:
                    return needed
        if len(self.stages) == 1:
            return needed
        first = self.stages[0]
        if len(first.parts) == 1:
            others = min(self.microbatches, len(self.stages)) - 1
            needed = self._alone_gib(first) + others * self._microbatches[0].kept_bytes / GIB
        return needed if needed > limit else max(self.stage_gib)

    def _local_bytes(self, name: str, sizes: GridSizes) -> int:
        """Return the bytes of a tensor of one microbatch on a device of a grid."""
        return self._nbytes(name) // _tiles(self._layout(name), sizes)

    def _layout(self, name: str) -> Layout:
        """Return the layout of a tensor that crosses in training."""
        tensor = self.description.tensors[name]
        return (self.config.parallel.sequence_parallel and tensor.sequence_parallel) or tensor.layout

    @property
    def link_bytes(self) -> dict[str, int]:
        """The bytes that all ranks of each link between stages send in a step, by the link's name."""
        return {link_name(*pair): nbytes for pair, nbytes in self._sent_bytes.items()}

    @cached_property
    def _sent_bytes(self) -> dict[tuple[int, int], int]:
        """The bytes that all ranks of each link send in a step, by sending and receiving stage.

        Every receiving device gets its tile once. Forwards send tensors and backwards send their gradients. Stages with
        copies of weights exchange the weights and the gradients of the copies.
        """
        total: Counter[tuple[int, int]] = Counter()
        count = len(self.stages)

        def send(source: int, target: int, nbytes: int, layout: Layout) -> None:
            sizes = self.stages[target].sizes
            total[source, target] += nbytes * (sizes.devices // _tiles(layout, sizes))

        for (producer, user), names in self.crossing.items():
            source, target = producer % count, user % count
            for name in names if source != target else ():
                nbytes, layout = self.microbatches * self._nbytes(name), self._layout(name)
                send(source, target, nbytes, layout)
                if self.description.tensors[name].has_gradient:
                    send(target, source, nbytes, layout)
        for _, owner, holder, spec in self._copies:
            for source, target in ((owner, holder), (holder, owner)):
                send(source, target, math.prod(spec.shape) * MASTER_BYTES, spec.layout)
        return dict(total)

    @cached_property
    def _copies(self) -> list[tuple[str, int, int, ParameterSpec]]:
        """The weights that several stages use."""
        return copied_parameters([self.description.stage(stage.parts) for stage in self.stages])

    @property
    def states(self) -> list[dict[str, int]]:
        """The bytes of weights, gradients and optimizer states on a device of each stage."""
        return [self.estimate(stage).state for stage in self.stages]

    @property
    def micro_batch(self) -> int:
        """The microbatch of a device of the slowest stage, in samples."""
        return self.micro_batch_size(self.stages[self._slowest])

    @cached_property
    def _slowest(self) -> int:
        return max(range(len(self.stages)), key=self._busy_s) if len(self.stages) > 1 else 0

    @property
    def slowest(self) -> StepCost:
        """The step of the slowest stage without waits for other stages."""
        return self.of_stage(self._slowest)

    @property
    def idle_s(self) -> float:
        """Seconds for which the slowest stage waits for other stages."""
        return self.step_time_s - self.slowest.step_time_s

    @cached_property
    def memory(self) -> dict[str, float]:
        """The memory of a device of the fullest stage in GiB, as in ``StepCost``."""
        if len(self.stages) == 1:
            return self.of_stage(0).memory
        fullest = max(range(len(self.stages)), key=self.stage_gib.__getitem__)
        memory = {kind: nbytes / GIB for kind, nbytes in self.states[fullest].items()}
        memory["reserved"] = self.reserved_gib[fullest]
        return memory | {"activations": self.stage_gib[fullest] - sum(memory.values())}

    @property
    def memory_gib(self) -> float:
        return sum(self.memory.values())

    @cached_property
    def mfu(self) -> float | None:
        """Model FLOPs over the peak, without recomputation; None if the peak is unknown."""
        return utilization(self.config, self.description, self.devices, self.step_time_s)[0]

    @property
    def hfu(self) -> float | None:
        """Model FLOPs and recomputation over the peak; None if the peak is unknown."""
        return utilization(self.config, self.description, self.devices, self.step_time_s)[1]


def _tiles(layout: Layout, sizes: GridSizes) -> int:
    """Return the number of distinct tiles of a tensor on the devices of a grid."""
    return math.prod(getattr(sizes, axis) for axis in layout.axes & {*GridSizes._fields})


def transfer_seconds(cluster: ClusterConfig, source: StagePlan, target: StagePlan, nbytes: int) -> float:
    """Return the seconds in which broadcasts send a tensor of ``nbytes`` in total to another stage.

    Between nodes, the links of the nodes limit it (arXiv 2211.05322, §3): each node of the source sends its share, and
    each node of the target receives every tile that its devices need once. Inside a node, each device receives its
    tile.
    """
    node = node_size(cluster)
    ranks = source.first_rank, source.last_rank, target.first_rank, target.last_rank
    if len({rank // node for rank in ranks}) == 1:
        return _seconds(cluster.levels[-1], nbytes / target.sizes.batch_shards)
    senders = min(-(-source.sizes.devices // node), source.sizes.batch_shards)
    per_node = min(node, target.sizes.devices)
    # Ranks of x and y, which hold the same samples, are neighbors.
    tiles = -(-per_node // (target.sizes.x * target.sizes.y))
    return _seconds(cluster.levels[0], nbytes * max(1 / senders, tiles / target.sizes.batch_shards))


def _seconds(level: LevelConfig, nbytes: float) -> float:
    return level.latency_us / 1e6 + nbytes / 1e9 / level.group_gb_s
