"""Unit tasks (arXiv 2211.05322, §2.2): each part of the tensor to send, with the devices that hold and need it."""

import itertools
import math
from dataclasses import dataclass

from gpt4d.parallel.layout import Layout
from gpt4d.parallel.resharding.mesh import StageMesh, Tile


@dataclass(frozen=True)
class UnitTask:
    """One non-empty intersection of a source tile with a destination tile."""

    tile: Tile  # in the global tensor
    senders: tuple[int, ...]  # all devices that hold it, in the order of the source mesh
    receivers: tuple[int, ...]  # all devices that need it

    @property
    def elements(self) -> int:
        return math.prod(stop - start for start, stop in self.tile)


def unit_tasks(
    shape: tuple[int, ...], source: Layout, source_mesh: StageMesh, destination: Layout, destination_mesh: StageMesh
) -> list[UnitTask]:
    """Return the unit tasks of a tensor of ``shape``, ordered by source tile. Each element is in exactly one task.

    An axis splits only one dim, so the tiles are all combinations of the ranges of each dim, and intersecting the
    ranges dim by dim is enough.
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
    # Sort by the source ranges of all dims first: the order of a loop over source tiles around one over destinations.
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
