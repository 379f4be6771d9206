"""The ATP paper's choice of a mesh (§3.3-3.5): all-reduce times from the hierarchical communication matrix.

DeviceMesh(d1, d2) has d1 groups of d2 neighboring devices. Its layer is the 4D layer with x = d1, y = d2, z = 1. In
gpt4d's order of ranks, devices along d1 are neighbors (``rank_order`` xy). In the paper's order (yx), devices along d2
are neighbors.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpt4d.config import ClusterConfig, Config, ConfigError, GridSizes, ParallelConfig, divisors, grid_problem
from gpt4d.model.description import Description
from gpt4d.planner.candidates import check_machine, fewest_microbatches, microbatch_numbers
from gpt4d.planner.device import sent_bytes
from gpt4d.planner.options import Level, levels
from gpt4d.planner.topology import RankSpan, crossed_levels, for_devices, group_bandwidth, spans, total_gib
from gpt4d.planner.workload import compute_bytes, product_tflops, products


class AtpMesh(NamedTuple):
    """Sizes of a DeviceMesh."""

    d1: int
    d2: int

    def __str__(self) -> str:
        return f"{self.d1}x{self.d2}"


def meshes(devices: int) -> list[AtpMesh]:
    """Return all meshes of ``devices`` devices, DeviceMesh(N, 1) first: ATP-1, ATP-2, and so on."""
    return [AtpMesh(devices // d2, d2) for d2 in divisors(devices)]


def link_bandwidths(cluster: ClusterConfig, mesh: AtpMesh, rank_order: str = "yx") -> tuple[float | None, float | None]:
    """Return B1' and B2' in GB/s (Eq. 3); None for a dimension of one device.

    Each value is the bandwidth of the slowest level that the dimension crosses. Groups of the first dimension share a
    level's links if one member of the level contains devices of several groups. On a switch, whose members are single
    devices, they share no links. The paper divides by d2 even if a member contains fewer than d2 devices.
    """

    def slowest(span: RankSpan) -> float | None:
        levels = crossed_levels(cluster, span)
        return min((group_bandwidth(c.level, c.members) / c.sharing for c in levels), default=None)

    by_axis = spans(GridSizes(mesh.d1, mesh.d2), rank_order)
    return slowest(by_axis["x"]), slowest(by_axis["y"])


def all_reduce_bandwidths(
    cluster: ClusterConfig, mesh: AtpMesh, rank_order: str = "yx"
) -> tuple[float | None, float | None]:
    """Return B1 and B2 in GB/s: measured in the paper's order (``cluster.atp_gb_s``), otherwise by Eq. 4."""
    measured = (cluster.atp_gb_s or {}).get(str(mesh))
    if measured and rank_order == "yx":
        return tuple(measured)
    links = link_bandwidths(cluster, mesh, rank_order)
    first, second = (
        None if bandwidth is None else d / (2 * (d - 1)) * bandwidth for d, bandwidth in zip(mesh, links, strict=True)
    )
    return first, second


def all_reduced_elements(description: Description, samples: int, length: int) -> tuple[float, float]:
    """Return the elements that are all-reduced along the first and the second dimension, in forward and backward.

    The second dimension all-reduces the outputs of layers that read the residual stream (7h in a GPT-2 block). The
    first dimension all-reduces the outputs of layers that write to it (2h). The paper counts the same for the backward,
    although the layers send slightly less.
    """
    summed = Counter[str | None]()
    for product, blocks in products(description, length):
        summed[product.split.contracted] += blocks * product.output
    return 2 * samples * summed["x"], 2 * samples * summed["y"]


def communication(
    description: Description,
    cluster: ClusterConfig,
    mesh: AtpMesh,
    samples: int,
    length: int,
    element: int,
    rank_order: str = "yx",
) -> tuple[float, float]:
    """Return T_comm in seconds (Eq. 2), forward and backward: along the first dimension and along the second.

    ``element``: bytes per element of an activation.
    """
    bandwidths = all_reduce_bandwidths(cluster, mesh, rank_order)
    elements = all_reduced_elements(description, samples, length)
    first, second = (
        count * element / 1e9 / (other * bandwidth) if bandwidth else 0.0
        for count, other, bandwidth in zip(elements, reversed(mesh), bandwidths, strict=True)
    )
    return first, second


@dataclass
class MeshPlan:
    """A mesh and its predicted step; as in the paper, all communication is exposed.

    Attributes:
        mesh: the mesh.
        settings: the configuration on its grid: x and y are the mesh, z and data its replicas. Its ``rank_order`` is yx
            in the paper, xy by default in gpt4d.
        compute_s: seconds of computation.
        comm: bytes sent, time_s and exposed_s by dimension (d1, d2).
        problem: why the model cannot be split like this, or does not fit; None if it can.
        micro_batch: maximum microbatch of a device, if it is chosen and less than the device's share of the batch.
        memory_gib: memory of a device; None if the model cannot be split like this.
    """

    mesh: AtpMesh
    settings: Config
    compute_s: float
    comm: dict[str, dict[str, float]]
    problem: str | None
    micro_batch: int | None
    memory_gib: float | None

    @property
    def t_comm_s(self) -> float:
        return sum(dimension["time_s"] for dimension in self.comm.values())

    @property
    def rank_order(self) -> str | None:
        return self.settings.parallel.rank_order

    @property
    def overrides(self) -> list[str]:
        settings = {"mode": "atp", "d1": self.mesh.d1, "d2": self.mesh.d2, "rank_order": self.rank_order}
        micro_batch = [f"train.micro_batch_size={self.micro_batch}"] if self.micro_batch else []
        return [*(f"parallel.{key}={value}" for key, value in settings.items()), *micro_batch]

    def __str__(self) -> str:
        consecutive = f" with consecutive ranks along {'d1' if self.rank_order == 'xy' else 'd2'}"
        return f"DeviceMesh({self.mesh.d1}, {self.mesh.d2}){'' if 1 in self.mesh else consecutive}"


def rank(config: Config, world_size: int) -> list[MeshPlan]:
    """Return the meshes that ``config.parallel`` allows, sorted by T_comm of a step, each in its faster rank order.

    ``parallel.rank_order`` or a measurement of the mesh determines the order if present. If both orders are equally
    fast, the paper's order is chosen. Raises ConfigError if no mesh has the right size or the machine is too small.
    """
    devices = _devices(config.parallel, world_size)
    given = config.parallel.d1, config.parallel.d2
    if None in given:
        check_machine(config.cluster, world_size)
    config = replace(config, cluster=for_devices(config.cluster, world_size))
    chosen = [mesh for mesh in meshes(devices) if all(size in (None, g) for size, g in zip(given, mesh, strict=True))]
    level = levels(config)[0]
    plans = (_plan(level, mesh, world_size) for mesh in chosen)
    return sorted(plans, key=lambda plan: plan.t_comm_s)


def _devices(parallel: ParallelConfig, world_size: int) -> int:
    """Return the number of devices of a mesh. Raises ConfigError if the settings do not fit ``world_size``."""
    d1, d2, gz, gdata = parallel.d1, parallel.d2, parallel.gz, parallel.gdata
    copies = gz * (gdata or 1)
    if d1 and d2:
        if world_size % (d1 * d2 * copies) or (gdata and d1 * d2 * copies != world_size):
            keys, values = ("·gdata", f"·{gdata}") if gdata else ("", "")
            raise ConfigError(
                f"parallel.d1·d2·gz{keys}={d1}·{d2}·{gz}{values}: does not fit the {world_size} process(es); "
                f"choose a mesh of {_sizes(world_size)} device(s), or leave d1 and d2 out"
            )
        return d1 * d2
    if world_size % copies:
        raise ConfigError(
            f"parallel.gz·gdata={gz}·{gdata or 1}={copies}: does not divide the {world_size} process(es) of this job; "
            f"use one of {_sizes(world_size)}"
        )
    devices = world_size // copies
    for key, size in (("d1", d1), ("d2", d2)):
        if size and devices % size:
            raise ConfigError(
                f"parallel.{key}={size}: does not divide the {devices} device(s) of a mesh; "
                f"use one of {_sizes(devices)}"
            )
    return devices


def _sizes(devices: int) -> str:
    return ", ".join(map(str, divisors(devices)))


def _plan(level: Level, mesh: AtpMesh, world_size: int) -> MeshPlan:
    config, description = level.config, level.description
    parallel, train, cluster, element = config.parallel, config.train, config.cluster, compute_bytes(config)
    copies = world_size // (mesh.d1 * mesh.d2)
    sizes = GridSizes(*mesh, parallel.gz, copies // parallel.gz)
    samples = train.batch_size // max(1, sizes.sample_shards(parallel.context))
    length = train.seq_len // parallel.context
    measured = str(mesh) in (cluster.atp_gb_s or {})
    orders = (parallel.rank_order,) if parallel.rank_order else ("yx",) if measured or 1 in mesh else ("yx", "xy")
    rank_order, times = min(
        ((order, communication(description, cluster, mesh, samples, length, element, order)) for order in orders),
        key=lambda choice: sum(choice[1]),
    )
    first, second = all_reduced_elements(description, samples, length)
    sent = (
        sent_bytes("all_reduce", mesh.d1, first * element / mesh.d2),
        sent_bytes("all_reduce", mesh.d2, second * element / mesh.d1),
    )
    flops = description.training_flops(samples, train.seq_len) / (mesh.d1 * mesh.d2 * parallel.context)
    problem, micro_batch, memory = grid_problem(description.rules, train, parallel, sizes), None, None
    if not problem:
        step = fewest_microbatches(level, (sizes,))
        possible = [step] if step else [level.step((sizes,), number) for number in microbatch_numbers(level, (sizes,))]
        memory = min(step.needed_gib(math.inf) for step in possible)
        if step and step.micro_batch != samples and train.micro_batch_size is None:
            micro_batch = step.micro_batch
            train = replace(train, micro_batch_size=micro_batch)
        elif not step:
            problem = f"it needs {memory:.1f} GiB of a device's {total_gib(cluster):.4g} GiB"
    parallel = parallel.on_grid(sizes, mode="4d", d1=None, d2=None, rank_order=rank_order)
    return MeshPlan(
        mesh=mesh,
        settings=replace(config, parallel=parallel, train=train),
        compute_s=flops / (product_tflops(config) * 1e12),
        comm={
            name: {"bytes": nbytes, "time_s": seconds, "exposed_s": seconds}
            for name, nbytes, seconds in zip(("d1", "d2"), sent, times, strict=True)
        },
        problem=problem,
        micro_batch=micro_batch,
        memory_gib=memory,
    )
