"""The ATP paper's choice of a mesh (§3.3-3.5): all-reduce times from the hierarchical communication matrix.

DeviceMesh(d1, d2) has d1 groups of d2 neighboring devices. Its layer is the 4D layer with x = d1, y = d2, z = 1. In our
order of ranks, the devices along d1 are the neighbors: ``innermost`` is x; it is y in the paper's.
"""

from dataclasses import dataclass
from typing import NamedTuple

from gpt4d.config import ClusterConfig, Config, GridSizes, divisors, grid_problem
from gpt4d.model import registry
from gpt4d.model.description import Description
from gpt4d.planner.device import sent_bytes
from gpt4d.planner.estimate import Estimate
from gpt4d.planner.paper_models import linear_layers
from gpt4d.planner.search import check_machine, largest_micro_batch
from gpt4d.planner.topology import RankSpan, crossed_levels, group_bandwidth, spans
from gpt4d.planner.workload import compute_bytes


class AtpMesh(NamedTuple):
    """Sizes of a DeviceMesh."""

    d1: int
    d2: int

    def __str__(self) -> str:
        return f"{self.d1}x{self.d2}"


def meshes(devices: int) -> list[AtpMesh]:
    """Return all meshes of ``devices`` devices, DeviceMesh(N, 1) first: ATP-1, ATP-2…"""
    return [AtpMesh(devices // d2, d2) for d2 in divisors(devices)]


def link_bandwidths(cluster: ClusterConfig, mesh: AtpMesh, innermost: str = "y") -> tuple[float | None, float | None]:
    """Return B1' and B2' in GB/s (Eq. 3); None for a dimension of one device.

    Each is the bandwidth of the slowest level that the dimension crosses. Groups of the first dimension share a
    level's links where one member of the level holds devices of several groups; on a switch, whose members are single
    devices, they share nothing. The paper divides by d2 even if a member holds fewer than d2 devices.
    """

    def slowest(span: RankSpan) -> float | None:
        levels = crossed_levels(cluster, span)
        return min((group_bandwidth(c.level, c.members) / c.sharing for c in levels), default=None)

    by_axis = spans(GridSizes(mesh.d1, mesh.d2), innermost)
    return slowest(by_axis["x"]), slowest(by_axis["y"])


def all_reduce_bandwidths(
    cluster: ClusterConfig, mesh: AtpMesh, innermost: str = "y"
) -> tuple[float | None, float | None]:
    """Return B1 and B2 in GB/s: measured in the paper's order (``cluster.atp_gb_s``), or else by Eq. 4."""
    measured = (cluster.atp_gb_s or {}).get(str(mesh))
    if measured and innermost == "y":
        return tuple(measured)
    links = link_bandwidths(cluster, mesh, innermost)
    first, second = (
        None if bandwidth is None else d / (2 * (d - 1)) * bandwidth for d, bandwidth in zip(mesh, links, strict=True)
    )
    return first, second


def all_reduced_elements(description: Description, samples: int, length: int) -> tuple[float, float]:
    """Return the elements that linear layers sum along the first and the second dimension, over forward and backward.

    The second dimension sums the outputs of layers that leave the residual stream (7h in a GPT-2 block), the first
    those of layers that return to it (2h).
    """
    out = {False: 0, True: 0}
    for layer, blocks, _ in linear_layers(description):
        out[layer.transposed] += blocks * layer.out_features * (layer.num_fused or 1)
    return 2 * samples * length * out[True], 2 * samples * length * out[False]


def communication(
    description: Description,
    cluster: ClusterConfig,
    mesh: AtpMesh,
    samples: int,
    length: int,
    element: int,
    innermost: str = "y",
) -> tuple[float, float]:
    """Return T_comm in seconds (Eq. 2), forward and backward: along the first dimension and along the second.

    ``element``: bytes per element of an activation.
    """
    bandwidths = all_reduce_bandwidths(cluster, mesh, innermost)
    elements = all_reduced_elements(description, samples, length)
    first, second = (
        count * element / 1e9 / (other * bandwidth) if bandwidth else 0.0
        for count, other, bandwidth in zip(elements, reversed(mesh), bandwidths, strict=True)
    )
    return first, second


@dataclass
class MeshPlan:
    """A mesh and its predicted step; as in the paper, all communication is exposed."""

    mesh: AtpMesh
    innermost: str  # axis whose ranks are neighbors: y in the paper's order, x in ours
    compute_s: float
    comm: dict[str, dict[str, float]]  # by dimension (d1, d2): bytes sent, time_s, exposed_s
    problem: str | None  # why the model cannot be split like this, or does not fit
    memory_gib: float | None  # per device; None if the model cannot be split like this

    @property
    def t_comm_s(self) -> float:
        return sum(dimension["time_s"] for dimension in self.comm.values())

    @property
    def overrides(self) -> list[str]:
        mesh = [f"parallel.d1={self.mesh.d1}", f"parallel.d2={self.mesh.d2}"]
        return ["parallel.mode=atp", *mesh, f"parallel.innermost={self.innermost}"]

    def __str__(self) -> str:
        mesh = f"DeviceMesh({self.mesh.d1}, {self.mesh.d2})"
        return mesh if 1 in self.mesh else f"{mesh} with {'d1' if self.innermost == 'x' else 'd2'} innermost"


def rank(config: Config, devices: int, copies: int = 1) -> list[MeshPlan]:
    """Return all meshes of ``devices`` devices by T_comm of a step, each in the faster order of ranks.

    The order is ``parallel.innermost`` if that is set, and the paper's if both are equally fast. ``copies``: number of
    meshes that the batch is split over. Raises ConfigError if the machine is too small.
    """
    check_machine(config.cluster, devices * copies)
    orders = (config.parallel.innermost,) if config.parallel.innermost else ("y", "x")

    def t_comm_s(plan: MeshPlan) -> float:
        return plan.t_comm_s

    plans = (min((_plan(config, mesh, order, copies) for order in orders), key=t_comm_s) for mesh in meshes(devices))
    return sorted(plans, key=t_comm_s)


def _plan(config: Config, mesh: AtpMesh, innermost: str, copies: int) -> MeshPlan:
    description, train, element = registry.describe(config.model), config.train, compute_bytes(config)
    samples = train.batch_size // copies
    times = communication(description, config.cluster, mesh, samples, train.seq_len, element, innermost)
    first, second = all_reduced_elements(description, samples, train.seq_len)
    sent = (
        sent_bytes("all_reduce", mesh.d1, first * element / mesh.d2),
        sent_bytes("all_reduce", mesh.d2, second * element / mesh.d1),
    )
    flops = description.training_flops(samples, train.seq_len) / (mesh.d1 * mesh.d2)
    sizes = GridSizes(mesh.d1, mesh.d2, config.parallel.gz, copies // config.parallel.gz)
    problem, memory = grid_problem(description.rules, train, sizes), None
    if not problem:
        micro_batch, memory = largest_micro_batch(Estimate(config, sizes))
        if micro_batch is None:
            problem = f"it needs {memory:.1f} GiB of a device's {config.cluster.memory_gib:g} GiB"
    return MeshPlan(
        mesh=mesh,
        innermost=innermost,
        compute_s=flops / (config.cluster.matmul_tflops * 1e12),
        comm={
            name: {"bytes": nbytes, "time_s": seconds, "exposed_s": seconds}
            for name, nbytes, seconds in zip(("d1", "d2"), sent, times, strict=True)
        },
        problem=problem,
        memory_gib=memory,
    )
