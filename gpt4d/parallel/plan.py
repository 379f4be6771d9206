"""The parallel plan: the value that ``parallel.*`` resolves to. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from gpt4d.config import Config, GridSizes
from gpt4d.parallel.pipeline.simulation import Costs


def strides(sizes: GridSizes, innermost: str | None = None) -> dict[str, int]:
    """Return the distance in ranks between neighbors along each axis.

    Neighbors along ``innermost`` (``parallel.innermost``), x by default, have consecutive ranks. y in its place is the
    order of the ATP paper's DeviceMesh(d1, d2), whose d1 is x and whose d2 is y.
    """
    inner = ("y", "x") if innermost == "y" else ("x", "y")
    by_axis, stride = {}, 1
    for axis in (*inner, "z", "data"):
        by_axis[axis] = stride
        stride *= getattr(sizes, axis)
    return by_axis


def ranks_in_grid_order(sizes: GridSizes, innermost: str | None = None) -> tuple[int, ...]:
    """Return the rank at each place of a grid. Places count x first, then y, z and data, whatever is innermost."""
    stride = strides(sizes, innermost)
    places = product(*(range(size) for size in reversed(sizes)))  # data, z, y, x
    axes = GridSizes._fields[::-1]
    return tuple(sum(index * stride[axis] for index, axis in zip(place, axes, strict=True)) for place in places)


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage, on consecutive ranks of the job.

    Attributes:
        index: the position of the stage in the pipeline.
        first_rank: the lowest rank of the stage.
        sizes: its grid.
        parts: for each of its model chunks, the indices of the first unit and of the one after the last
            (gpt4d.model.description).
        innermost: the axis whose neighbors have consecutive ranks (``parallel.innermost``).
    """

    index: int
    first_rank: int
    sizes: GridSizes
    parts: tuple[tuple[int, int], ...]
    innermost: str | None = None

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The job's ranks that form the stage, in grid order."""
        return tuple(self.first_rank + rank for rank in ranks_in_grid_order(self.sizes, self.innermost))

    @property
    def last_rank(self) -> int:
        return self.first_rank + self.sizes.devices - 1


def consecutive_stages(
    sizes: Sequence[GridSizes], parts: Sequence[tuple[tuple[int, int], ...]], innermost: str | None = None
) -> tuple[StagePlan, ...]:
    """Return the stages with these grids and parts of the model, each on the ranks after those of the stage before."""
    stages, first_rank = [], 0
    for index, (grid, own) in enumerate(zip(sizes, parts, strict=True)):
        stages.append(StagePlan(index, first_rank, grid, own, innermost))
        first_rank += grid.devices
    return tuple(stages)


@dataclass(frozen=True)
class ParallelPlan:
    """The stages and settings with which a configuration is trained on a number of devices.

    Attributes:
        config: the configuration with everything that the plan decides filled in.
        stages: the pipeline's stages, first to last.
        microbatches: microbatches of a step on each device.
        crossing: names of the tensors on each edge of the pipeline, by the virtual stages that produce and use them.
        costs: estimated seconds of a microbatch on each virtual stage and edge, by which the stages' programs are
            chosen; None if there is one stage.
        candidates: one line for each plan that was considered, best first; empty if the grid was given.
    """

    config: Config
    stages: tuple[StagePlan, ...]
    microbatches: int
    crossing: Mapping[tuple[int, int], tuple[str, ...]]
    costs: Costs | None
    candidates: tuple[str, ...] = ()

    def stage_of(self, rank: int) -> StagePlan:
        """Return the plan of the stage that has ``rank``."""
        return next(stage for stage in self.stages if rank <= stage.last_rank)

    @property
    def virtual_stages(self) -> int:
        return sum(len(stage.parts) for stage in self.stages)

    @property
    def sizes(self) -> GridSizes:
        """The grid of the first stage, which reads the data."""
        return self.stages[0].sizes

    def micro_batch_size(self, stage: StagePlan) -> int:
        """Return the samples that a device of a stage takes at once."""
        return self.config.train.batch_size // self.microbatches // stage.sizes.batch_shards
