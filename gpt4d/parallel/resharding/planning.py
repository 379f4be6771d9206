"""The plan of one resharding: a value that every rank computes alike."""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from gpt4d.parallel.layout import Layout
from gpt4d.parallel.resharding import ordering, search
from gpt4d.parallel.resharding.bounds import lower_bound
from gpt4d.parallel.resharding.mesh import Mesh, Tile
from gpt4d.parallel.resharding.strategies import STRATEGIES, Job, jobs
from gpt4d.parallel.resharding.tasks import UnitTask, unit_tasks

ORDERS = ("ensemble", "naive", "load_balance", "dfs", "greedy")


@dataclass(frozen=True)
class Send:
    """One device sends one tile to one or more, in the way of the plan's strategy."""

    task: int  # which unit task
    tile: Tile
    sender: int  # a rank
    receivers: tuple[int, ...]  # ranks, the devices of a host one after another
    sender_host: int
    receiver_hosts: tuple[int, ...]
    start: Fraction  # of the time that the whole tensor takes over one host's link
    stop: Fraction


@dataclass(frozen=True)
class Plan:
    """Who sends what to whom, in the one order that all ranks follow.

    Times are in units of the whole tensor over one host's link. No order and no choice of senders takes less than
    ``lower_bound`` with this strategy, be tasks broadcast whole or to each host apart; where it equals ``makespan``,
    the plan is optimal. Where meshes share hosts, one that has something to send and to hand on takes longer than told.
    """

    shape: tuple[int, ...]
    source: Layout
    source_mesh: Mesh
    destination: Layout
    destination_mesh: Mesh
    strategy: str
    order: str
    seed: int
    effort: int
    summed: int  # how many leading dims of the shape are added up on arrival: contributions to a gradient
    tasks: tuple[UnitTask, ...]
    sends: tuple[Send, ...]
    makespan: Fraction
    lower_bound: Fraction


@lru_cache(maxsize=128)
def plan(
    shape: tuple[int, ...],
    source: Layout,
    source_mesh: Mesh,
    destination: Layout,
    destination_mesh: Mesh,
    strategy: str = "broadcast",
    order: str = "ensemble",
    seed: int = 0,
    effort: int = 1,
    summed: int = 0,
) -> Plan:
    """The plan for a tensor of ``shape`` between two disjoint meshes (arXiv 2211.05322, §3).

    The order ``ensemble`` is the better of ``greedy``, drawn from ``seed``, and ``dfs``. Both look at a number of
    choices that takes less than a second, or ``effort`` times as many; a first answer for more than about ten thousand
    tasks takes longer. Equal arguments give equal plans, on every rank, and they are kept. ``summed`` is for
    ``transposed``.
    """
    assert strategy in STRATEGIES and order in ORDERS, (strategy, order)
    tasks = unit_tasks(shape, source, source_mesh, destination, destination_mesh)
    ways = [jobs(tasks, strategy, source_mesh, destination_mesh)]
    if strategy == "broadcast" and order == "ensemble":
        # A send to several hosts starts when all are free: now and then it is better to serve each host apart.
        ways.append(jobs(tasks, "local_allgather", source_mesh, destination_mesh))
    pieces, slots, bound = _best(ways, order, seed, effort)
    end = max((slot.stop for slot in slots), default=0)
    # What needs no link goes last: nothing waits for it that could keep a link busy.
    between = [job for job in pieces if job.over_links]
    inside = [job for job in pieces if not job.over_links]
    unit = max(1, math.prod(shape[summed:]))
    devices = _Senders(tasks, source_mesh)
    sends = [
        devices.send(between[slot.job], slot.sender_host, Fraction(slot.start, unit), Fraction(slot.stop, unit))
        for slot in slots
    ]
    sends += [devices.send(job, job.sender_hosts[0], Fraction(end, unit), Fraction(end, unit)) for job in inside]
    return Plan(
        shape,
        source,
        source_mesh,
        destination,
        destination_mesh,
        strategy,
        order,
        seed,
        effort,
        summed,
        tuple(tasks),
        tuple(sends),
        Fraction(end, unit),
        Fraction(bound, unit),
    )


def transposed(forward: Plan, partial: tuple[str, ...] = ()) -> Plan:
    """The plan that brings the gradient of what ``forward`` brought back to its sources.

    A source device gets the gradient of its own tile, whole: replicated sources all get the same. What replicas on
    the destination mesh hold, their layout alone does not say. Along the axes in ``partial``, none of which splits
    the tensor, each has computed with its copy for itself and holds a part of a sum: their gradients are sent as one
    tensor with a leading dim for each of these axes, and a source adds up what it receives, in the same order
    wherever it is. Along all other axes replicas hold the same gradient, as after an all-reduce: the sources get one
    replica's.
    """
    sizes = dict(forward.destination_mesh.axes)
    assert not forward.destination.axes & set(partial), f"{partial} must not split {forward.destination}"
    return plan(
        tuple(sizes[axis] for axis in partial) + forward.shape,
        Layout(*((axis,) for axis in partial), *forward.destination.dims),
        forward.destination_mesh,
        Layout(*(() for _ in partial), *forward.source.dims),
        forward.source_mesh,
        forward.strategy,
        forward.order,
        forward.seed,
        forward.effort,
        len(partial),
    )


def _best(ways: list[list[Job]], order: str, seed: int, effort: int) -> tuple[list[Job], list[ordering.Slot], int]:
    """Of several ways to make jobs of the tasks the one that is over first, when its jobs go, and the bound of all."""
    found = []
    for pieces in ways:
        between = [job for job in pieces if job.over_links]
        sequence, optimal = _ordered(between, order, seed, effort)
        slots = ordering.timetable(between, sequence)
        end = max((slot.stop for slot in slots), default=0)
        bound = lower_bound(between)
        found.append((end, end if optimal else bound, pieces, slots))
        if end == bound:
            break
    end, _, pieces, slots = min(found, key=lambda one: one[0])
    return pieces, slots, min(bound for _, bound, _, _ in found)


def _ordered(pieces: list[Job], order: str, seed: int, effort: int) -> tuple[ordering.Sequence, bool]:
    """A sequence, and whether the search has shown that there is no better one."""
    if order == "naive":
        return ordering.naive(pieces), False
    if order == "load_balance":
        return ordering.load_balance(pieces), False
    if order == "dfs":
        return search.dfs(pieces, effort)
    if order == "greedy":
        return search.greedy(pieces, seed, effort), False
    return search.ensemble(pieces, seed, effort)


class _Senders:
    """Chooses the sending device on a host: of those that have the tile the one that has been given least to send."""

    def __init__(self, tasks: list[UnitTask], mesh: Mesh):
        self.tasks, self.hosts = tasks, dict(zip(mesh.devices, mesh.hosts, strict=True))
        self.given = dict.fromkeys(mesh.devices, 0)

    def send(self, job: Job, host: int, start: Fraction, stop: Fraction) -> Send:
        task = self.tasks[job.task]
        there = [device for device in task.senders if self.hosts[device] == host]
        sender = min(there, key=lambda device: (self.given[device], device))
        self.given[sender] += task.elements
        return Send(job.task, task.tile, sender, job.receivers, host, job.receiver_hosts, start, stop)
