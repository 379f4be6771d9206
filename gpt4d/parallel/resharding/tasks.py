"""Unit tasks (arXiv 2211.05322, §2.2): what of the tensor is to be sent, who has it and who needs it."""

import itertools
import math
from dataclasses import dataclass

from gpt4d.parallel.layout import Layout
from gpt4d.parallel.resharding.mesh import Mesh, Tile


@dataclass(frozen=True)
class UnitTask:
    """One intersection of a source tile with a destination tile, never empty."""

    tile: Tile  # in the global tensor
    senders: tuple[int, ...]  # every device that has it, in the order of the source mesh
    receivers: tuple[int, ...]  # every device that needs it

    @property
    def elements(self) -> int:
        return math.prod(stop - start for start, stop in self.tile)


def unit_tasks(
    shape: tuple[int, ...], source: Layout, source_mesh: Mesh, destination: Layout, destination_mesh: Mesh
) -> list[UnitTask]:
    """The unit tasks of a tensor of ``shape``, source tile by source tile. Each element is in exactly one.

    An axis splits one dim only, so tiles are all combinations of the ranges of each dim: it is enough to intersect
    ranges, dim by dim.
    """
    shared = set(source_mesh.devices) & set(destination_mesh.devices)
    assert not shared, f"the meshes of a resharding are disjoint, but both have {shared}"
    holders = _devices_of_tiles(source_mesh.tiles(shape, source))
    needers = _devices_of_tiles(destination_mesh.tiles(shape, destination))
    overlaps = []
    for dim in range(len(shape)):
        here, there = ({tile[dim] for tile in tiles} for tiles in (holders, needers))
        overlaps.append([(s, d) for s in sorted(here) for d in sorted(there) if max(s[0], d[0]) < min(s[1], d[1])])
    # By source ranges first, in every dim, as if the two loops over tiles were written out.
    pairs = sorted((tuple(s for s, _ in c), tuple(d for _, d in c)) for c in itertools.product(*overlaps))
    return [UnitTask(_intersection(s, d), holders[s], needers[d]) for s, d in pairs]


def _devices_of_tiles(tiles: dict[int, Tile]) -> dict[Tile, tuple[int, ...]]:
    devices: dict[Tile, list[int]] = {}
    for device, tile in tiles.items():
        devices.setdefault(tile, []).append(device)
    return {tile: tuple(found) for tile, found in devices.items()}


def _intersection(one: Tile, other: Tile) -> Tile:
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
