"""The ATP paper's choice of a mesh (§3.3-3.5): the time of its all-reduces from the hierarchical communication matrix.

DeviceMesh(d1, d2) is d1 groups of d2 neighbouring devices. Its layer is the 4D layer with x = d1, y = d2, z = 1.
"""

from typing import NamedTuple

from gpt4d.config import ClusterConfig, ModelConfig
from gpt4d.planner.topology import Span, crossed, group_bandwidth


class Mesh(NamedTuple):
    d1: int
    d2: int

    def __str__(self) -> str:
        return f"{self.d1}x{self.d2}"


def meshes(devices: int) -> list[Mesh]:
    """All of them, DeviceMesh(N, 1) first: ATP-1, ATP-2…"""
    return [Mesh(devices // d2, d2) for d2 in range(1, devices + 1) if devices % d2 == 0]


def link_bandwidths(cluster: ClusterConfig, mesh: Mesh) -> tuple[float | None, float | None]:
    """B1' and B2' in GB/s (Eq. 3); None for a dimension of one device.

    The slowest of the levels that a dimension crosses. Groups of the first dimension share a level's links as far as
    one member of the level holds devices of several: where each member is one device, as on a switch, none do.
    """

    def slowest(span: Span) -> float | None:
        levels = crossed(cluster, span)
        return min((group_bandwidth(c.level, c.members) / c.sharing for c in levels), default=None)

    return slowest(Span(mesh.d2, mesh.d1)), slowest(Span(1, mesh.d2))


def all_reduce_bandwidths(cluster: ClusterConfig, mesh: Mesh) -> tuple[float | None, float | None]:
    """B1 and B2 in GB/s (Eq. 4), or those that were measured: ``cluster.atp_gb_s``."""
    measured = (cluster.atp_gb_s or {}).get(str(mesh))
    if measured:
        return tuple(measured)
    of_links = link_bandwidths(cluster, mesh)
    return tuple(
        None if bandwidth is None else d / (2 * (d - 1)) * bandwidth
        for d, bandwidth in zip(mesh, of_links, strict=True)
    )


def communication(
    model: ModelConfig, cluster: ClusterConfig, mesh: Mesh, sequences: int, length: int, element: int
) -> tuple[float, float]:
    """T_comm in seconds (Eq. 2), forward and backward: along the first dimension, and along the second.

    ``element``: bytes of one of an activation. Of the second dimension: queries, keys and values (3h) and the MLP's
    first layer (4h); of the first: the two layers that come back to h.
    """
    b1, b2 = all_reduce_bandwidths(cluster, mesh)
    rows = 2 * model.layers * sequences * length * model.hidden * element / 1e9
    return (
        rows * 2 / (mesh.d2 * b1) if b1 else 0.0,
        rows * 7 / (mesh.d1 * b2) if b2 else 0.0,
    )
