"""What lies between the devices of a machine, and what of it the groups of a grid's axis have to themselves."""

import sys
from collections.abc import Iterator
from typing import NamedTuple

from gpt4d.config import ClusterConfig, GridSizes, LevelConfig, MeasuredConfig

_HIDDEN = 0.9  # of a collective nobody has measured: what carries it takes its part of a device


class Span(NamedTuple):
    """Where the groups of an axis lie: each joins every ``stride``-th of ``stride·size`` neighbouring ranks."""

    stride: int
    size: int

    def local(self, node: int) -> int:
        """Ranks of a group on one node of ``node`` devices: of the one that has the most of them."""
        return _together(self, node)

    def nodes(self, node: int) -> int:
        """Nodes that a group spans."""
        return -(-self.size // self.local(node))

    def sharing(self, node: int) -> int:
        """Groups that go through the links of one node to the others (4D paper, Eq. 10); 1 if none does."""
        return min(node, self.stride) if self.nodes(node) > 1 else 1


def _together(span: Span, devices: int) -> int:
    """Of a group, the ranks that are among the same ``devices`` neighbours.

    Where the groups would fit, but do not divide them, some lie on both sides of a border: half of them here.
    """
    reach = span.stride * span.size
    if reach <= devices and devices % reach:
        return -(-span.size // 2)
    return max(1, min(span.size, devices // span.stride))


def spans(sizes: GridSizes) -> dict[str, Span]:
    """Of each axis, and of all devices together, ``world``: x is innermost in rank order."""
    found, stride = {}, 1
    for axis, size in sizes._asdict().items():
        found[axis] = Span(stride, size)
        stride *= size
    return found | {"world": Span(1, stride)}


def node_size(cluster: ClusterConfig) -> int:
    """Devices of a node: what the outermost level joins. Where there is one level, all devices are on one node."""
    if len(cluster.levels) == 1:
        return cluster.levels[0].ranks or sys.maxsize
    return dict(_levels(cluster))[0]


def _levels(cluster: ClusterConfig) -> Iterator[tuple[int, int]]:
    """(number, devices of one of the groups it joins) of each level, the innermost first."""
    inside = 1
    for number in range(len(cluster.levels) - 1, -1, -1):
        yield number, inside
        inside *= cluster.levels[number].ranks or 1


def group_bandwidth(level: LevelConfig, members: int) -> float:
    """GB/s that one member of a level has to the ``members - 1`` others of its group (ATP paper, §3.4).

    Its own links together, as far as its links to those others can carry: two devices joined by one link have that.
    """
    if level.pair_gb_s is None:
        return level.group_gb_s
    return min(level.group_gb_s, (members - 1) * level.pair_gb_s)


class Crossed(NamedTuple):
    """A level of links that a group of an axis crosses."""

    level: LevelConfig
    members: int  # of the level, that the group joins
    sharing: int  # groups of the axis that go through the links of one member


def crossed(cluster: ClusterConfig, span: Span) -> list[Crossed]:
    """The levels between the ranks of a group, the innermost first. Empty for a group of one rank."""
    found, reached = [], 1  # members of the group that the levels so far have joined
    for number, inside in _levels(cluster):
        level = cluster.levels[number]
        outside = inside * level.ranks if number else span.stride * span.size * inside
        together = _together(span, outside)
        members = -(-together // reached)
        if members > 1:
            found.append(Crossed(level, members, min(inside, span.stride)))
        reached = together
    return found


class Speed(NamedTuple):
    """What a collective takes: ``latency_s`` + bytes sent · ``s_per_byte``; ``hidden`` of it beside computation."""

    latency_s: float
    s_per_byte: float
    hidden: float
    across: bool  # goes between nodes


NO_TIME = Speed(0.0, 0.0, 1.0, False)


def speed(cluster: ClusterConfig, kind: str, span: Span) -> Speed:
    """Of the collective ``kind`` in the groups of an axis, all groups at once: measured where it was, else by levels.

    A measurement on other numbers of nodes stands for one that is missing: bytes go around a ring at the same rate,
    and each node more is another message.
    """
    if span.size == 1:
        return NO_TIME
    node = node_size(cluster)
    local, nodes, sharing = span.local(node), span.nodes(node), span.sharing(node)
    alike = [m for m in cluster.measured if (m.kind, m.local, m.sharing) == (kind, local, sharing)]
    alike = [m for m in alike if (m.nodes > 1) == (nodes > 1)]
    if alike:
        near = min(alike, key=lambda m: (abs(m.nodes - nodes), -m.nodes))
        messages = (span.size - 1) / (near.local * near.nodes - 1)
        return Speed(near.latency_us / 1e6 * messages, 1e-9 / near.gb_s, near.hidden, nodes > 1)
    return _by_levels(cluster, kind, span)


def _by_levels(cluster: ClusterConfig, kind: str, span: Span) -> Speed:
    """As fast as the slowest links on the way: those of a level, shared by the groups of the axis that cross it."""
    levels = crossed(cluster, span)
    gb_s = min(group_bandwidth(c.level, c.members) / c.sharing for c in levels)
    latency_us = sum(_messages(kind, c.members) * c.level.latency_us for c in levels)
    return Speed(latency_us / 1e6, 1e-9 / gb_s, _HIDDEN, span.nodes(node_size(cluster)) > 1)


def _messages(kind: str, members: int) -> int:
    """One after another: up and down a tree where one serves, else around the ring."""
    return 2 * (members - 1).bit_length() if kind == "all_reduce" else members - 1


def place(cluster: ClusterConfig, span: Span) -> MeasuredConfig:
    """A measurement's keys for the groups of an axis, its figures to be filled in."""
    node = node_size(cluster)
    return MeasuredConfig(local=span.local(node), nodes=span.nodes(node), sharing=span.sharing(node))
