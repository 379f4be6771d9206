"""Links between the devices of a machine, and the speed of collectives in the groups of a grid's axes."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from gpt4d.config import ClusterConfig, Config, GridSizes, LevelConfig, MeasuredConfig
from gpt4d.parallel.stage_plan import strides

ALL_TO_ALL = "all_to_all"
SHIFT = "shift"  # a message of each rank to the next rank of its group
_ALL = sys.maxsize  # devices of a node if the machine has one level of links


class RankSpan(NamedTuple):
    """Placement of an axis's groups: each joins every ``stride``-th of ``stride·size`` neighboring ranks."""

    stride: int
    size: int

    def local(self, devices: int) -> int:
        """Return the maximum number of ranks of a group among ``devices`` neighbors, such as those of a node.

        A group that fits but does not divide ``devices`` may cross a border, so only half of its ranks count.
        """
        reach = self.stride * self.size
        if devices == _ALL:
            return self.size
        if reach <= devices and devices % reach:
            return -(-self.size // 2)
        return max(1, min(self.size, devices // self.stride))

    def nodes(self, node: int) -> int:
        """Return the number of nodes that a group spans."""
        return -(-self.size // self.local(node))

    def sharing(self, node: int) -> int:
        """Return the number of groups that share one node's links to other nodes (4D paper, Eq. 10); at least 1."""
        return min(node, self.stride) if self.nodes(node) > 1 else 1


def spans(
    sizes: GridSizes, rank_order: str | None = None, world: int | None = None, context: int = 1
) -> dict[str, RankSpan]:
    """Return the span of each axis, of the axes ``context`` and ``batch``, and of all devices as ``world``.

    Args:
        sizes: the grid.
        rank_order: x and y, first the axis of neighboring ranks (``parallel.rank_order``).
        world: the number of devices of all stages; None if the grid has all devices.
        context: number of ranks that share samples (``parallel.context``). Their shards of the batch are consecutive.
    """
    by_axis = {axis: RankSpan(stride, getattr(sizes, axis)) for axis, stride in strides(sizes, rank_order).items()}
    shared, batch = (RankSpan(by_axis["z"].stride, size) for size in (context, sizes.batch_shards))
    return by_axis | {"context": shared, "batch": batch, "world": RankSpan(1, world or sizes.devices)}


def node_size(cluster: ClusterConfig) -> int:
    """Return the devices per node: the size of an outermost level's member, or all devices of a single level."""
    if len(cluster.levels) == 1:
        return cluster.levels[0].ranks or _ALL
    return dict(_levels(cluster))[0]


def paper_bandwidths(cluster: ClusterConfig, sizes: GridSizes, rank_order: str | None = None) -> dict[str, float]:
    """Return each axis's bandwidth in GB/s by Eq. 10 of the 4D paper, which knows two levels of links."""
    node, inter, intra = node_size(cluster), *(group_bandwidth(cluster.levels[level], 2) for level in (0, -1))
    return {
        axis: intra if inner * getattr(sizes, axis) <= node else inter / min(node, inner)
        for axis, inner in strides(sizes, rank_order).items()
    }


def for_devices(cluster: ClusterConfig, devices: int) -> ClusterConfig:
    """Return the machine with the memory of each of ``devices`` devices, if the devices of a node share memory.

    Processes on CPUs also share the cores of their node, and therefore its rates.
    """
    if cluster.memory_gib is not None or cluster.host_gib is None:
        return cluster
    number, memory_gib = min(devices, node_size(cluster)), cluster.host_gib
    if cluster.device == "cpu":
        products, memory = cluster.matmul_tflops / number, cluster.memory_gb_s / number
        cluster = replace(cluster, matmul_tflops=products, memory_gb_s=memory)
    return replace(cluster, memory_gib=memory_gib / number)


def usable_gib(cluster: ClusterConfig) -> float:
    """Return the memory of a device that the planner's choices may use, excluding ``cluster.margin``."""
    return (1 - cluster.margin) * total_gib(cluster)


def total_gib(cluster: ClusterConfig) -> float:
    """Return the memory of a device, which ``for_devices`` has set."""
    assert cluster.memory_gib is not None
    return cluster.memory_gib


def reserved_gib(config: Config, sizes: GridSizes, world: int, context: int = 1) -> float:
    """Return the memory that libraries and the groups of the grid and the job take on a device.

    Args:
        config: the machine, and the settings that decide which groups exist.
        sizes: the grid of the device's stage.
        world: number of devices of all stages.
        context: number of ranks that share samples (``parallel.context``).
    """
    cluster, members = config.cluster, [*sizes, context]
    if config.optim.uses_muon:
        members.append(sizes.devices)
    if config.parallel.expert_data and sizes.splits_batch_twice:
        members.append(sizes.batch_shards)
    # An axis with all ranks uses the group of the job (gpt4d.parallel.grid).
    groups = (world > 1) + sum(1 < size < world for size in members)
    return cluster.reserved_gib + groups * cluster.communicator_gib


def _levels(cluster: ClusterConfig) -> Iterator[tuple[int, int]]:
    """Yield (index, devices in each member) of the levels, innermost first."""
    member_devices = 1
    for index in range(len(cluster.levels) - 1, -1, -1):
        yield index, member_devices
        member_devices *= cluster.levels[index].ranks or 1


def group_bandwidth(level: LevelConfig, members: int) -> float:
    """Return the GB/s from one member of a level to the ``members - 1`` peers of its group (ATP paper, §3.4).

    It is the rate of all links of the member, limited by its links to these peers.
    """
    if level.pair_gb_s is None:
        return level.group_gb_s
    return min(level.group_gb_s, (members - 1) * level.pair_gb_s)


class CrossedLevel(NamedTuple):
    """Level of links that a group of an axis crosses."""

    level: LevelConfig
    members: int  # members of the level that the group joins
    sharing: int  # groups of the axis that share the links of one member


def crossed_levels(cluster: ClusterConfig, span: RankSpan) -> list[CrossedLevel]:
    """Return the levels between the ranks of a group, innermost first. Empty for a group of one rank."""
    crossed, joined = [], 1  # joined: ranks of the group that the levels so far connect
    for index, member_devices in _levels(cluster):
        level = cluster.levels[index]
        level_devices = member_devices * (level.ranks or 1) if index else span.stride * span.size * member_devices
        ranks = span.local(level_devices)
        members = -(-ranks // joined)
        if members > 1:
            crossed.append(CrossedLevel(level, members, min(member_devices, span.stride)))
        joined = ranks
    return crossed


class Speed(NamedTuple):
    """Time of a collective: ``latency_s`` + bytes sent · ``s_per_byte``. The share ``hidden`` of it can overlap.

    ``before_s_per_byte`` and ``after_s_per_byte``: the parts inside a node that precede and follow the part between
    nodes, in seconds per byte of the full collective. A long collective is pipelined in pieces through its parts.
    ``local``: ranks per node that take part in the parts inside a node.
    """

    latency_s: float
    s_per_byte: float
    hidden: float
    across: bool  # between nodes
    before_s_per_byte: float = 0.0
    after_s_per_byte: float = 0.0
    local: int = 1

    def parts(self, sent: float) -> tuple[float, float, float]:
        """Return the seconds of the parts that send ``sent`` bytes: inside a node, between nodes, inside a node."""
        seconds = self.latency_s + sent * self.s_per_byte
        if not self.across:
            return seconds, 0.0, 0.0
        return sent * self.before_s_per_byte, seconds, sent * self.after_s_per_byte


NO_TIME = Speed(0.0, 0.0, 1.0, False)


def speed(cluster: ClusterConfig, kind: str, span: RankSpan) -> Speed:
    """Return the speed of the collective ``kind`` when all groups of an axis run it: measured, otherwise by levels."""
    if span.size == 1:
        return NO_TIME
    if measured := _measured_speed(cluster, "all_gather" if kind == SHIFT else kind, span):
        # An all-gather in a ring has ``span.size - 1`` messages in sequence.
        return measured._replace(latency_s=measured.latency_s / (span.size - 1)) if kind == SHIFT else measured
    if kind not in (SHIFT, ALL_TO_ALL):
        return _ring_speed(cluster, kind, span)
    levels, ring = crossed_levels(cluster, span), _ring_speed(cluster, "all_gather", span)
    latency_s = max(crossed.level.latency_us for crossed in levels) / 1e6
    s_per_byte = _s_per_byte(levels) if kind == SHIFT else _exchange_s_per_byte(levels, span.size)
    return Speed(latency_s, s_per_byte, ring.hidden, ring.across)


def _measured_speed(cluster: ClusterConfig, kind: str, span: RankSpan) -> Speed | None:
    """Return the measured speed of a collective, or None.

    A measurement on another number of nodes replaces a missing one: the ring has the same rate, and each additional
    node adds a message. A larger share of an all-to-all leaves a node if there are more nodes.
    """
    node = node_size(cluster)
    local, nodes, sharing = span.local(node), span.nodes(node), span.sharing(node)
    similar = [m for m in cluster.measured if (m.kind, m.local, m.sharing) == (kind, local, sharing)]
    similar = [m for m in similar if (m.nodes > 1) == (nodes > 1)]
    if not similar:
        return None
    nearest = min(similar, key=lambda m: (abs(m.nodes - nodes), -m.nodes))
    messages = (span.size - 1) / (nearest.local * nearest.nodes - 1)
    s_per_byte = 1e-9 / nearest.gb_s
    if kind == ALL_TO_ALL and nodes > 1:
        s_per_byte *= _leaving(local, nodes) / _leaving(local, nearest.nodes)
    return Speed(nearest.latency_us / 1e6 * messages, s_per_byte, nearest.hidden, nodes > 1)


def _leaving(local: int, nodes: int) -> float:
    """Return the share of an all-to-all's bytes to other ranks that leaves a node."""
    return local * (nodes - 1) / (local * nodes - 1)


def _exchange_s_per_byte(levels: list[CrossedLevel], size: int) -> float:
    """Return the seconds of an all-to-all per byte that each of ``size`` ranks sends to other ranks.

    A rank sends equal parts to all ranks concurrently. All devices of a node share the links on which the parts for
    other nodes leave it.
    """
    s_per_byte, near = 0.0, 1  # near: ranks of a group that the levels so far connect
    for level, members, sharing in levels:
        reached = min(near * members, size)
        sent = (reached - near) / (size - 1) * near * sharing  # by a member, for each byte that a device sends
        s_per_byte = max(s_per_byte, 1e-9 * sent / group_bandwidth(level, members))
        near = reached
    return s_per_byte


def _ring_speed(cluster: ClusterConfig, kind: str, span: RankSpan) -> Speed:
    """Return the speed of a ring. The slowest level crossed, whose links the groups of the axis share, determines it.

    On CPUs, ranks of a node exchange data through shared memory, and collectives have separate parts inside a host and
    between hosts (gpt4d.parallel.comm.collectives).
    """
    levels, node = crossed_levels(cluster, span), node_size(cluster)
    local, nodes = span.local(node), span.nodes(node)
    latency_s = sum(_messages(kind, c.members) * c.level.latency_us for c in levels) / 1e6
    if cluster.device == "cpu" and nodes == 1:
        return Speed(latency_s, _s_per_byte(levels), 0.0, False)  # the ranks themselves copy and add
    if cluster.device == "cpu" and len(levels) > 1 and local * nodes == span.size:
        *inside, between = levels
        inside_s, between_s = _s_per_byte(inside), _s_per_byte([between])
        return _speed_by_hosts(kind, local, nodes, inside_s, between_s, latency_s, cluster.hidden)
    return Speed(latency_s, _s_per_byte(levels), cluster.hidden, nodes > 1)


def _s_per_byte(levels: list[CrossedLevel]) -> float:
    return 1e-9 / min(group_bandwidth(c.level, c.members) / c.sharing for c in levels)


def _speed_by_hosts(
    kind: str, local: int, hosts: int, inside: float, between: float, latency_s: float, hidden: float
) -> Speed:
    """Return the speed of a collective of ``local`` ranks on each of several hosts that is split into parts.

    A ring of all ranks sends (local·hosts - 1) / (local·hosts) of the tensor over each host's link, once or, for an
    all-reduce, twice. The split collective sends (hosts - 1) / hosts of it equally often. Inside its host, a rank sends
    (local - 1) / local equally often. A reduction inside the host precedes the part between hosts, a gather follows it.

    Args:
        kind: kind of the collective.
        local: ranks of the group on a host.
        hosts: number of hosts that the group spans.
        inside: seconds per byte inside a host.
        between: seconds per byte of a ring that crosses the hosts' links.
        latency_s: latency of the collective.
        hidden: share of the collective that can overlap.
    """
    ring = local * hosts - 1
    inside *= hosts * (local - 1) / ring
    before = {"all_reduce": 0.5, "reduce_scatter": 1.0, "all_gather": 0.0}[kind]
    s_per_byte = between * local * (hosts - 1) / ring
    return Speed(latency_s, s_per_byte, hidden, True, before * inside, (1 - before) * inside, local)


def _messages(kind: str, members: int) -> int:
    """Return the number of consecutive messages: up and down a tree for an all-reduce, otherwise around the ring."""
    return 2 * (members - 1).bit_length() if kind == "all_reduce" else members - 1


def place(cluster: ClusterConfig, span: RankSpan) -> MeasuredConfig:
    """Return a measurement with the keys of an axis's groups. The caller sets the measured values."""
    node = node_size(cluster)
    return MeasuredConfig(local=span.local(node), nodes=span.nodes(node), sharing=span.sharing(node))
