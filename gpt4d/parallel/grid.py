"""The ranks of one stage as a (data, z, y, x) grid (4D paper, §III)."""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gpt4d.config import GridSizes
from gpt4d.parallel.comm.collectives import Axis, transport_of
from gpt4d.parallel.comm.cpu import hosts
from gpt4d.parallel.layout import Layout

BATCH_AXES = ("data", "z")  # the axes that split the batch, outermost first
_LINK_CHANNELS = 4


class Grid:
    """The grid of a stage, seen from this rank: one ``Axis`` each for x, y, z and data.

    ``rank = ranks[((d·Z + z)·Y + y)·X + x]``, where X, Y and Z are sizes and ``ranks`` the stage's ranks in the job, in
    order.

    The axis ``context`` contains the ranks that share samples and split their tokens: ``context`` ranks with
    consecutive shards of the batch and the same indices on x and y.

    The axis ``batch`` contains all ranks with the same indices on x and y. It exists on a grid with ``expert_data``.

    One more axis, ``world``, contains all ranks of the job. On a GPU, another axis with all ranks of the job uses its
    group: a communicator of NCCL takes more than half a GB. After ``join``, the axis ``stage`` contains all ranks of
    the grid.

    Args:
        sizes: devices along each axis; their product is the number of ranks of the stage.
        device_type: ``cpu`` or ``cuda``. On CPUs, ranks of one host exchange data through shared memory.
        ranks: the job's ranks that form the stage, including this one; None for all of them. Only these ranks
            construct the grid. Without a process group only the grid of one device exists.
        timeout: timeout of the axes' process groups; None for torch's default.
        context: number of ranks that share samples (``parallel.context``). It divides the number of batch shards.
        expert_data: data splits experts too (``parallel.expert_data``).
    """

    x: Axis
    y: Axis
    z: Axis
    data: Axis
    world: Axis
    context: Axis
    batch: Axis
    stage: Axis

    def __init__(
        self,
        sizes: GridSizes = GridSizes(),  # noqa: B008
        device_type: str = "cpu",
        ranks: Sequence[int] | None = None,
        timeout: timedelta | None = None,
        context: int = 1,
        expert_data: bool = False,
    ):
        self.sizes, self.device_type, self._timeout = sizes, device_type, timeout
        self.num_groups = 0  # process groups that this rank has created
        world_size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self.ranks = tuple(range(world_size) if ranks is None else ranks)
        assert len(self.ranks) == sizes.devices, f"a grid of {sizes} does not fit {len(self.ranks)} rank(s)"
        self.index = self.ranks.index(rank)  # this rank's index among the ranks of the stage
        world = dist.group.WORLD if world_size > 1 else None
        self.world = Axis("world", world_size, rank, world, transport_of(world, device_type) if world else None)
        indices = self.coordinates(self.index, sizes)
        stride = 1
        for name, size in sizes._asdict().items():
            first = self.index - indices[name] * stride
            members = [self.ranks[first + i * stride] for i in range(size)]
            setattr(self, name, self._axis(name, members, indices[name]))
            stride *= size
        self.context = self._neighbors("context", context)
        if expert_data and sizes.splits_batch_twice:
            self.batch = self._neighbors("batch", sizes.batch_shards)
        else:
            self.batch = self.data if sizes.z == 1 else self.z

    def _neighbors(self, name: str, count: int) -> Axis:
        """Return an axis of ``count`` ranks with consecutive shards of the batch and the same indices on x and y."""
        first, index = divmod(self.batch_shard, count)
        plane = self.sizes.x * self.sizes.y
        here = self.index % plane
        return self._axis(name, [self.ranks[here + (first * count + place) * plane] for place in range(count)], index)

    def _axis(self, name: str, members: list[int], index: int) -> Axis:
        if len(members) == 1:
            return Axis(name)
        if len(members) == self.world.size and self.device_type != "cpu":
            return Axis(name, len(members), index, self.world.group, self.world.transport)
        # Only members create the group, so that stages can be built concurrently.
        backend = backend_of(self.device_type)
        group = dist.new_group(members, self._timeout, backend, use_local_synchronization=True)
        self.num_groups += 1
        if self.device_type == "cpu":
            # The computation does not wait for the weights and gradients of z and data.
            transport = hosts.connect(group, yielding=name in ("z", "data"))  # creates a second group
            self.num_groups += 1
        else:
            transport = transport_of(group, self.device_type)
        return Axis(name, len(members), index, group, transport)

    def join(self) -> None:
        """Create the axis ``stage`` of all ranks of the grid, which must call this together.

        Its order is the order of the ranks in the job, as in every process group, even if ``parallel.rank_order``
        changes the order on the grid.
        """
        members, world = sorted(self.ranks), self.world
        index = members.index(self.ranks[self.index])
        if len(members) == world.size:
            self.stage = Axis("stage", world.size, index, world.group, world.transport)
        else:
            self.stage = self._axis("stage", members, index)

    @classmethod
    def single_device(cls) -> "Grid":
        """Return the grid of one device, independent of process groups. It serves shapes, not training."""
        grid = cls.__new__(cls)
        grid.sizes, grid.device_type, grid.ranks = GridSizes(), "cpu", (0,)
        for name in (*grid.sizes._fields, "context", "batch", "world"):
            setattr(grid, name, Axis(name))
        grid.index = grid.num_groups = 0
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
        yield from (self.x, self.y, self.z, self.data, self.context, self.world)
        if self.batch.name == "batch":
            yield self.batch
        if hasattr(self, "stage"):
            yield self.stage

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

    @property
    def sample_shard(self) -> int:
        """Index of this rank's shard of the samples, which is the same on all ranks of the axis ``context``."""
        return self.batch_shard // self.context.size

    @property
    def sample_shards(self) -> int:
        """Number of shards of the samples."""
        return self.sizes.sample_shards(self.context.size)


def backend_of(device_type: str) -> str:
    """Return the one backend that a group for tensors of a device needs, such as nccl.

    Every rank of a group with gloo connects to all ranks of the group.
    """
    return dict(pair.split(":") for pair in dist.get_backend_config().split(","))[device_type]


def options_of_links(backend: str, timeout: timedelta | None) -> Any:
    """Return the options of a group of two stages with this backend, or None.

    A receive of NCCL occupies a multiprocessor of the GPU for each channel from its start on, long before its sender
    sends. NCCL uses up to 32 channels for each group. Collectives and exchanges inside a stage need them for the full
    rate of the links, messages between stages do not.
    """
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = _LINK_CHANNELS
    if timeout is not None:
        options._timeout = timeout  # otherwise torch warns that it replaces it
    return options
