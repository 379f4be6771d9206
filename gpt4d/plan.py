"""The plan of a run: the value that ``parallel.*`` resolves to. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from gpt4d.config import Config, GridSizes
from gpt4d.config.pipeline import num_microbatches
from gpt4d.model import registry
from gpt4d.model.description import Description
from gpt4d.parallel.pipeline import schedule
from gpt4d.parallel.pipeline.schedule import Action
from gpt4d.parallel.pipeline.simulation import Costs, Program, orders_of, programs
from gpt4d.parallel.stage_plan import StagePlan, consecutive_stages


@dataclass(frozen=True)
class ParallelPlan:
    """The settings, the model and the stages with which a number of devices train.

    Attributes:
        config: the configuration, completed with the plan's decisions.
        description: the full model, padded for the grids of all stages.
        stages: the pipeline's stages, first to last.
        microbatches: microbatches of a step on each device.
        candidates: one line for each plan that was considered, best first; empty if the grid was given.
    """

    config: Config
    description: Description
    stages: tuple[StagePlan, ...]
    microbatches: int
    candidates: tuple[str, ...] = ()

    @property
    def costs(self) -> Costs | None:
        """Seconds of a microbatch on each virtual stage and edge, by which the stages' programs are chosen.

        A plan of several stages is an estimate, which has them (gpt4d.planner.stages.PlanEstimate).
        """
        return None

    @property
    def grids(self) -> tuple[GridSizes, ...]:
        return tuple(stage.sizes for stage in self.stages)

    @property
    def sizes(self) -> GridSizes:
        """The grid of the first stage, which reads the data."""
        return self.stages[0].sizes

    @property
    def devices(self) -> int:
        """Number of devices of all stages."""
        return sum(stage.sizes.devices for stage in self.stages)

    def stage_of(self, rank: int) -> StagePlan:
        """Return the plan of the stage that has ``rank``."""
        return next(stage for stage in self.stages if rank <= stage.last_rank)

    @property
    def virtual_stages(self) -> int:
        return len(self.virtual_parts)

    @cached_property
    def virtual_parts(self) -> list[tuple[StagePlan, tuple[int, int]]]:
        """The stage and the part of the model of each virtual stage."""
        chunks = range(len(self.stages[0].parts))
        return [(stage, stage.parts[chunk]) for chunk in chunks for stage in self.stages]

    @cached_property
    def crossing(self) -> Mapping[tuple[int, int], tuple[str, ...]]:
        """Names of the tensors on each edge of the pipeline, by the virtual stages that produce and use them."""
        return self.description.crossing([part for _, part in self.virtual_parts])

    def microbatches_of(self, batch_size: int) -> int:
        """Return the number of microbatches of a batch of ``train.batch_ramp``.

        A microbatch has the same size in all batches. A smaller batch is one microbatch.
        """
        return max(1, self.microbatches * batch_size // self.config.train.batch_size)

    def micro_batch_size(self, stage: StagePlan) -> int:
        """Return the microbatch of a device of a stage, in samples."""
        shards = stage.sizes.sample_shards(self.config.parallel.context)
        return self.config.train.batch_size // self.microbatches // shards

    def training_program(self, stage: int, microbatches: int) -> Program:
        """Return a stage's program of a training step. Equal arguments give matching programs on all ranks."""
        pipeline = self.config.parallel.pipeline
        if self.virtual_stages == 1:
            return [*schedule.single_stage(microbatches)]
        assert self.costs is not None and pipeline.schedule is not None
        orders = orders_of(pipeline.schedule, len(self.stages), microbatches, self.costs, pipeline.chunks_per_stage)
        problem = schedule.problem(orders, self.virtual_stages, microbatches)
        assert problem is None, problem
        return programs(orders, self.costs)[stage]

    def evaluation_program(self, stage: int, microbatches: int) -> Program:
        """Return a stage's program of an evaluation, the forwards of all microbatches in sequence."""
        own = [range(index, self.virtual_stages, len(self.stages)) for index in range(len(self.stages))]
        orders = [[Action("F", m, place) for m in range(microbatches) for place in places] for places in own]
        if self.virtual_stages == 1:
            return [*orders[stage]]
        assert self.costs is not None
        return programs(orders, self.costs)[stage]


def one_stage(config: Config, sizes: GridSizes = GridSizes()) -> ParallelPlan:  # noqa: B008 (a tuple)
    """Return the plan of a configuration with a complete grid on one stage."""
    description = registry.describe_run(config)
    stages = consecutive_stages([sizes], [((0, len(description.units)),)], config.parallel.rank_order)
    return ParallelPlan(config, description, stages, num_microbatches(config.train, config.parallel, (sizes,)))
