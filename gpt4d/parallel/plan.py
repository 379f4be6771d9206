"""The parallel plan: the value that ``parallel.*`` resolves to. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
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
    """One pipeline stage.

    Attributes:
        ranks: the job's ranks that form it, in grid order.
        sizes: its grid.
        parts: for each of its model chunks, the indices of the first unit and of the one after the last
            (gpt4d.model.description).
    """

    ranks: tuple[int, ...]
    sizes: GridSizes
    parts: tuple[tuple[int, int], ...]


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
        return next(stage for stage in self.stages if rank in stage.ranks)

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
