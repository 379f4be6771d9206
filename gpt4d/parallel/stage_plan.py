"""The plan of one pipeline stage: its ranks, its grid and its model chunks. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from gpt4d.config import GridSizes


def strides(sizes: GridSizes, rank_order: str | None = None) -> dict[str, int]:
    """Return the distance in ranks between neighbors along each axis.

    Neighbors along the first axis of ``rank_order`` (``parallel.rank_order``), xy by default, have consecutive ranks.
    With yx the order equals the order of the ATP paper's DeviceMesh(d1, d2), where d1 is x and d2 is y.
    """
    by_axis, stride = {}, 1
    for axis in (*(rank_order or "xy"), "z", "data"):
        by_axis[axis] = stride
        stride *= getattr(sizes, axis)
    return by_axis


def ranks_in_grid_order(sizes: GridSizes, rank_order: str | None = None) -> tuple[int, ...]:
    """Return the rank at each grid position. For any ``rank_order``, positions enumerate x fastest, then y, z, data."""
    stride = strides(sizes, rank_order)
    places = product(*(range(size) for size in reversed(sizes)))  # data, z, y, x
    axes = GridSizes._fields[::-1]
    return tuple(sum(index * stride[axis] for index, axis in zip(place, axes, strict=True)) for place in places)


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage, on consecutive ranks of the job.

    Attributes:
        index: the position of the stage in the pipeline.
        first_rank: the lowest rank of the stage.
        sizes: the sizes of the stage's grid.
        parts: for each model chunk, the index of its first unit and the index after its last unit
            (gpt4d.model.description).
        rank_order: x and y, first the axis whose neighbors have consecutive ranks (``parallel.rank_order``).
    """

    index: int
    first_rank: int
    sizes: GridSizes
    parts: tuple[tuple[int, int], ...]
    rank_order: str | None = None

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The job's ranks that form the stage, in grid order."""
        return tuple(self.first_rank + rank for rank in ranks_in_grid_order(self.sizes, self.rank_order))

    @property
    def last_rank(self) -> int:
        return self.first_rank + self.sizes.devices - 1


def consecutive_stages(
    sizes: Sequence[GridSizes], parts: Sequence[tuple[tuple[int, int], ...]], rank_order: str | None = None
) -> tuple[StagePlan, ...]:
    """Return stages with these grids and model chunks on consecutive ranks of the job, in the order of the stages."""
    stages, first_rank = [], 0
    for index, (grid, own) in enumerate(zip(sizes, parts, strict=True)):
        stages.append(StagePlan(index, first_rank, grid, own, rank_order))
        first_rank += grid.devices
    return tuple(stages)
