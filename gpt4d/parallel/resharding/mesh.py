"""Meshes of stages and the unit tasks of a resharding (arXiv 2211.05322, §2.2).

A unit task is a tile of the tensor to send, with the devices that hold it and the devices that need it. No torch here.
"""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gpt4d.config import ConfigError, GridSizes
from gpt4d.parallel.layout import CHUNK, Layout

Tile = tuple[tuple[int, int], ...]  # (start, stop) along each dim of the global tensor


@dataclass(frozen=True)
class StageMesh:
    """The mesh of one stage: its axes, outermost first, and the rank and host of each device in row-major order.

    Any device may be on any host, so a mesh can describe every placement of a 4-D grid. If a layout names ``CHUNK``, a
    device has a tile of each of ``chunks`` consecutive chunks.
    """

    axes: tuple[tuple[str, int], ...]  # name and size
    devices: tuple[int, ...]  # ranks
    hosts: tuple[int, ...]
    chunks: int = 1

    def __post_init__(self):
        count = math.prod(size for _, size in self.axes)
        assert len(self.devices) == len(set(self.devices)) == count, f"{self.axes} needs {count} distinct devices"
        assert len(self.hosts) == count, f"{self.axes} needs the host of each of its {count} devices"

    @classmethod
    def of_shape(
        cls, shape: tuple[int, ...], first_device: int = 0, first_host: int = 0, hosts: tuple[int, ...] | None = None
    ) -> "StageMesh":
        """Return a mesh with the axes ``"0"``, ``"1"`` …, as in the paper: (hosts, devices per host).

        The first axis enumerates the hosts for any number of axes, unless ``hosts`` gives the host of each device.
        """
        count = math.prod(shape)
        if hosts is None:
            hosts = tuple(first_host + device // (count // shape[0]) for device in range(count))
        axes = tuple((str(axis), size) for axis, size in enumerate(shape))
        return cls(axes, tuple(range(first_device, first_device + count)), hosts)

    @classmethod
    def of_grid(cls, ranks: Sequence[int], sizes: GridSizes, ranks_per_host: int = 1, chunks: int = 1) -> "StageMesh":
        """Return the mesh (data, z, y, x) of a stage's ``Grid``.

        ``ranks`` are the stage's ranks in the job, in grid order. Rank r is on host ``r // ranks_per_host``.
        """
        axes = tuple(reversed(sizes._asdict().items()))  # GridSizes names the innermost axis first
        return cls(axes, tuple(ranks), tuple(rank // ranks_per_host for rank in ranks), chunks)

    def chunks_of(self, layout: Layout) -> range:
        """Return the indices of the chunks into which ``layout`` splits a tensor on this mesh."""
        return range(self.chunks if CHUNK in layout.axes else 1)

    def tiles(self, shape: tuple[int, ...], layout: Layout, chunk: int = 0) -> dict[int, Tile]:
        """Return each device's tile of a tensor of ``shape``, or of its chunk ``chunk``, under ``layout``."""
        sizes = dict(self.axes)
        extents = {CHUNK: self.chunks, **sizes}
        indices = itertools.product(*(range(size) for size in sizes.values()))
        return {
            device: layout.tile(shape, extents, {CHUNK: chunk, **dict(zip(sizes, index, strict=True))})
            for device, index in zip(self.devices, indices, strict=True)
        }


def parse(key: str, spec: str) -> Layout:
    """Return the layout for a spec such as ``S01RR``: R replicates a dim, S splits it by axes, outermost first.

    Raises ConfigError, with ``key`` in its message, if the spec is not valid.
    """
    letters = re.findall(r"R|S\d+", spec)
    if not letters or "".join(letters) != spec.replace(" ", ""):
        raise ConfigError(f'{key}={spec}: not a layout; use R or S with mesh axes per dim, such as "S01RR" or "RS0R"')
    axes = [axis for letter in letters for axis in letter[1:]]
    if len(axes) != len(set(axes)):
        raise ConfigError(f"{key}={spec}: a mesh axis occurs twice; use each axis at most once")
    return Layout(*(tuple(letter[1:]) for letter in letters))


def notation(layout: Layout) -> str:
    """Return the spec (``S01RR``) of a layout whose axes have one-letter names."""
    return "".join("S" + "".join(axes) if axes else "R" for axes in layout.dims)


@dataclass(frozen=True)
class UnitTask:
    """One non-empty intersection of a source tile with a destination tile."""

    tile: Tile  # in the global tensor
    senders: tuple[int, ...]  # all devices that hold it, in the order of the source mesh
    receivers: tuple[int, ...]  # all devices that need it

    @property
    def elements(self) -> int:
        return math.prod(shape_of(self.tile))


def shape_of(tile: Tile) -> tuple[int, ...]:
    """Return the extents of a tile."""
    return tuple(stop - start for start, stop in tile)


def unit_tasks(
    shape: tuple[int, ...], source: Layout, source_mesh: StageMesh, destination: Layout, destination_mesh: StageMesh
) -> list[UnitTask]:
    """Return the unit tasks of a tensor of ``shape``, ordered by source tile. Each element is in exactly one task.

    An axis splits only one dim, so the tiles are all combinations of the ranges of each dim. It therefore suffices to
    intersect the ranges dim by dim.
    """
    shared = set(source_mesh.devices) & set(destination_mesh.devices)
    assert not shared, f"the meshes of a resharding must be disjoint, but both contain {shared}"
    senders = _devices_by_tile(shape, source, source_mesh)
    receivers = _devices_by_tile(shape, destination, destination_mesh)
    overlaps = []
    for dim in range(len(shape)):
        sources, destinations = ({tile[dim] for tile in tiles} for tiles in (senders, receivers))
        pairs = itertools.product(sorted(sources), sorted(destinations))
        overlaps.append([(s, d) for s, d in pairs if max(s[0], d[0]) < min(s[1], d[1])])
    # Sort by the source ranges of all dims first, so that the order is by source tile and then by destination tile.
    tile_pairs = sorted((tuple(s for s, _ in c), tuple(d for _, d in c)) for c in itertools.product(*overlaps))
    return [UnitTask(_intersection(s, d), senders[s], receivers[d]) for s, d in tile_pairs]


def _devices_by_tile(shape: tuple[int, ...], layout: Layout, mesh: StageMesh) -> dict[Tile, tuple[int, ...]]:
    devices: dict[Tile, list[int]] = {}
    for chunk in mesh.chunks_of(layout):
        for device, tile in mesh.tiles(shape, layout, chunk).items():
            devices.setdefault(tile, []).append(device)
    return {tile: tuple(holders) for tile, holders in devices.items()}


def _intersection(one: Tile, other: Tile) -> Tile:
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
