"""The ranks of one stage as a (data, z, y, x) grid (4D paper, §III)."""

from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist

from gpt4d.config import GridSizes
from gpt4d.parallel.comm.collectives import Axis, transport_of
from gpt4d.parallel.comm.cpu import hosts
from gpt4d.parallel.layout import Layout

BATCH_AXES = ("data", "z")  # the axes that split the batch, outermost first


class Grid:
    """The grid of a stage, seen from this rank: one ``Axis`` each for x, y, z and data.

    ``rank = ranks[((d·gz + z)·gy + y)·gx + x]``, where ``ranks`` are the stage's ranks in the job, in order.

    Two more axes serve reductions: ``stage`` contains all ranks of this grid, ``world`` all ranks of the job. They have
    the same group if one stage has all ranks.

    Args:
        sizes: devices along each axis; their product is the number of ranks of the stage.
        device_type: ``cpu`` or ``cuda``. On CPUs, ranks of one host exchange data through shared memory.
        ranks: the job's ranks that form the stage, including this one; None for all of them. Only these ranks
            construct the grid. Without a process group only the grid of one device exists.
        timeout: timeout of the axes' process groups; None for torch's default.
    """

    x: Axis
    y: Axis
    z: Axis
    data: Axis
    stage: Axis
    world: Axis

    def __init__(
        self,
        sizes: GridSizes = GridSizes(),  # noqa: B008
        device_type: str = "cpu",
        ranks: Sequence[int] | None = None,
        timeout: timedelta | None = None,
    ):
        self.sizes, self.device_type, self._timeout = sizes, device_type, timeout
        world_size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self.ranks = tuple(range(world_size) if ranks is None else ranks)
        assert len(self.ranks) == sizes.devices, f"a grid of {sizes} does not fit {len(self.ranks)} rank(s)"
        place = self.ranks.index(rank)
        indices = self.coordinates(place, sizes)
        stride = 1
        for name, size in sizes._asdict().items():
            first = place - indices[name] * stride
            members = [self.ranks[first + i * stride] for i in range(size)]
            setattr(self, name, self._axis(name, members, indices[name]))
            stride *= size
        world = dist.group.WORLD if world_size > 1 else None
        self.world = Axis("world", world_size, rank, world, transport_of(world, device_type) if world else None)
        if len(self.ranks) == world_size:
            self.stage = self.world
        else:
            self.stage = self._axis("stage", list(self.ranks), place)

    def _axis(self, name: str, members: list[int], index: int) -> Axis:
        if len(members) == 1:
            return Axis(name)
        # Only the device's own backend, because every rank of a gloo group connects to all ranks of the group. Only
        # members create the group, so that stages can be built concurrently.
        backends = dict(pair.split(":") for pair in dist.get_backend_config().split(","))
        backend = backends[self.device_type]
        group = dist.new_group(members, self._timeout, backend, use_local_synchronization=True)
        if self.device_type == "cpu" and name != "stage":
            # The computation does not wait for the weights and gradients of z and data.
            transport = hosts.connect(group, yielding=name in ("z", "data"))
        else:
            transport = transport_of(group, self.device_type)
        return Axis(name, len(members), index, group, transport)

    @classmethod
    def single_device(cls) -> "Grid":
        """Return the grid of one device, independent of process groups. It serves shapes, not training."""
        grid = cls.__new__(cls)
        grid.sizes, grid.device_type, grid.ranks = GridSizes(), "cpu", (0,)
        for name in (*grid.sizes._fields, "world"):
            setattr(grid, name, Axis(name))
        grid.stage = grid.world
        return grid

    @staticmethod
    def coordinates(place: int, sizes: GridSizes) -> dict[str, int]:
        """Return the index along each axis of the stage's rank number ``place``."""
        indices = {}
        for name, size in sizes._asdict().items():
            place, indices[name] = divmod(place, size)
        return indices

    def __getitem__(self, name: str) -> Axis:
        return getattr(self, name)

    def axis(self, name: str | None) -> Axis:
        """Return the axis with this name, or for None an axis of size 1, for dims that no axis splits."""
        return Axis("none") if name is None else self[name]

    def __iter__(self) -> Iterator[Axis]:
        yield from (self.x, self.y, self.z, self.data)
        if self.stage is not self.world:
            yield self.stage
        yield self.world

    @property
    def active_axes(self) -> dict[str, Axis]:
        """The axes with more than one device, by name."""
        return {axis.name: axis for axis in self if axis.size > 1}

    @property
    def indices(self) -> dict[str, int]:
        return {name: self[name].index for name in self.sizes._fields}

    def local_slices(self, shape: tuple[int, ...], layout: Layout) -> tuple[slice, ...]:
        """Return the slices of a global tensor of ``shape`` that are this rank's shard under ``layout``."""
        return tuple(slice(*r) for r in layout.tile(shape, self.sizes._asdict(), self.indices))

    def local_shape(self, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        return tuple(s.stop - s.start for s in self.local_slices(shape, layout))

    @property
    def batch_shard(self) -> int:
        """Index of this rank's shard of the batch, which has ``sizes.batch_shards`` shards."""
        return self.data.index * self.z.size + self.z.index
