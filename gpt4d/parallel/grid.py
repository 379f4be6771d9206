"""The ranks of a stage as a (data, z, y, x) grid (4D paper, §III): x innermost, so that its groups share a node."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gpt4d.config import GridSizes
from gpt4d.parallel import shared_memory
from gpt4d.parallel.shared_memory import SharedMemory
from gpt4d.parallel.traffic import Traffic

BATCH_AXES = ("data", "z")  # the axes that split the batch, outermost first


@dataclass(eq=False)
class Axis:
    """One axis of the grid, seen from this rank: how many devices, which of them we are, the group of them."""

    name: str
    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None
    memory: SharedMemory | None = None  # of those on this host, if they compute on its CPUs
    across: dist.ProcessGroup | None = None  # where they are on several hosts: those with our place on each
    traffic: Traffic = field(default_factory=Traffic)


class Grid:
    """This rank's place in the grid: one ``Axis`` for each of x, y, z and data, and one for all of them, world.

    ``rank = ((d·gz + z)·gy + y)·gx + x``. Without a process group there is only the grid of one device.
    """

    def __init__(self, sizes: GridSizes = GridSizes(), device_type: str = "cpu"):  # noqa: B008
        self.sizes, self.device_type = sizes, device_type
        self.mesh: DeviceMesh | None = None
        rank = 0
        if dist.is_initialized():
            rank = dist.get_rank()
            assert dist.get_world_size() == sizes.devices, f"{dist.get_world_size()} ranks are not a grid of {sizes}"
            ranks = torch.arange(sizes.devices).view(sizes.data, sizes.z, sizes.y, sizes.x)
            self.mesh = DeviceMesh(device_type, ranks, mesh_dim_names=("data", "z", "y", "x"))
        else:
            assert sizes.devices == 1, f"a grid of {sizes} needs a process group"
        indices = self.coordinates(rank, sizes)
        for name, size in sizes._asdict().items():
            group = self.mesh.get_group(name) if size > 1 else None
            near = shared_memory.between(group) if size > 1 and device_type == "cpu" else (None, None)
            setattr(self, name, Axis(name, size, indices[name], group, *near))
        self.world = Axis("world", sizes.devices, rank, dist.group.WORLD if sizes.devices > 1 else None)

    x: Axis
    y: Axis
    z: Axis
    data: Axis

    @classmethod
    def alone(cls) -> "Grid":
        """The grid of one device, whatever process group there may be: for shapes, not for training."""
        grid = cls.__new__(cls)
        grid.sizes, grid.device_type, grid.mesh = GridSizes(), "cpu", None
        for name in (*grid.sizes._fields, "world"):
            setattr(grid, name, Axis(name))
        return grid

    @staticmethod
    def coordinates(rank: int, sizes: GridSizes) -> dict[str, int]:
        """The index along each axis of a rank."""
        indices = {}
        for name, size in sizes._asdict().items():
            rank, indices[name] = divmod(rank, size)
        return indices

    def __getitem__(self, name: str) -> Axis:
        return getattr(self, name)

    def __iter__(self) -> Iterator[Axis]:
        return iter((self.x, self.y, self.z, self.data, self.world))

    @property
    def indices(self) -> dict[str, int]:
        return {name: self[name].index for name in self.sizes._fields}

    def local_slices(self, shape: tuple[int, ...], layout) -> tuple[slice, ...]:
        """The part of a global tensor of ``shape`` that this rank holds under ``layout``."""
        return tuple(slice(*r) for r in layout.tile(shape, self.sizes._asdict(), self.indices))

    def local_shape(self, shape: tuple[int, ...], layout) -> tuple[int, ...]:
        return tuple(s.stop - s.start for s in self.local_slices(shape, layout))

    @property
    def batch_shard(self) -> int:
        """Which of the ``sizes.batch_shards`` parts of the batch is this rank's."""
        return self.data.index * self.z.size + self.z.index
