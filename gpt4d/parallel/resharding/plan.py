"""The plan of one resharding: a value that every rank computes identically."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from gpt4d.parallel.layout import Layout
from gpt4d.parallel.resharding import search
from gpt4d.parallel.resharding.jobs import (
    JobSequence,
    SendJob,
    Slot,
    by_host,
    lower_bound,
    send_jobs,
    timetable,
    together,
)
from gpt4d.parallel.resharding.mesh import StageMesh, Tile, UnitTask, unit_tasks

# Shape, then layout and mesh of the source and of the destination
Ends = tuple[tuple[int, ...], Layout, StageMesh, Layout, StageMesh]
Search = Callable[[list[SendJob]], tuple[JobSequence, bool]]  # returns a sequence, and True if it is proved optimal


@dataclass(frozen=True)
class Send:
    """One device sends one tile to one or more receivers, along a chain."""

    task: int  # index of the unit task
    tile: Tile
    sender: int  # a rank
    receivers: tuple[int, ...]  # ranks, grouped by host
    sender_host: int
    receiver_hosts: tuple[int, ...]
    start: Fraction  # relative to the time that the global tensor takes over one host's link
    stop: Fraction


@dataclass(frozen=True)
class ReshardingPlan:
    """The sends of one resharding, in the single order that all ranks follow.

    The unit of time is one transfer of the global tensor over one host's link. No order and no choice of senders takes
    less than ``lower_bound``. The bound holds for broadcasts to all hosts at once and to each host separately. The plan
    is optimal if ``makespan`` equals ``lower_bound``. If the meshes share hosts, a host that both sends and forwards
    takes longer than planned.
    """

    shape: tuple[int, ...]
    source: Layout
    source_mesh: StageMesh
    destination: Layout
    destination_mesh: StageMesh
    num_summed: int  # number of leading dims of ``shape`` with contributions to a gradient, which receivers add up
    tasks: tuple[UnitTask, ...]
    sends: tuple[Send, ...]
    makespan: Fraction
    lower_bound: Fraction

    @property
    def sent_elements(self) -> int:
        """Number of elements that all ranks together send. Every receiver gets each tile that it needs once."""
        return sum(task.elements * len(task.receivers) for task in self.tasks)


@lru_cache(maxsize=128)
def plan(
    shape: tuple[int, ...],
    source: Layout,
    source_mesh: StageMesh,
    destination: Layout,
    destination_mesh: StageMesh,
    num_summed: int = 0,
) -> ReshardingPlan:
    """Return the plan for a tensor of ``shape`` between two disjoint meshes (arXiv 2211.05322, §3).

    The order is the better result of a randomized greedy search and a depth-first search. Both examine a fixed number
    of choices. They take less than a second for up to about ten thousand tasks. Equal arguments give equal plans on
    every rank, and plans are cached. ``num_summed`` is for ``gradient_plan``.
    """
    ends = shape, source, source_mesh, destination, destination_mesh
    tasks = unit_tasks(*ends)
    # A send to several hosts starts only when all hosts are free, so separate sends are sometimes faster.
    alternatives = [send_jobs(tasks, source_mesh, destination_mesh, split) for split in (together, by_host)]
    return ReshardingPlan(*ends, num_summed, tuple(tasks), *schedule(ends, num_summed, tasks, alternatives))


def schedule(
    ends: Ends,
    num_summed: int,
    tasks: list[UnitTask],
    alternatives: list[list[SendJob]],
    find: Search = search.ensemble,
) -> tuple[tuple[Send, ...], Fraction, Fraction]:
    """Return the sends of the alternative that ends first, its makespan, and the lower bound of all alternatives."""
    shape, _, source_mesh, *_ = ends
    jobs, slots, bound = _best_schedule(alternatives, find)
    end = max((slot.stop for slot in slots), default=0)
    # Jobs inside a host go last: no link waits for them.
    between_hosts = [job for job in jobs if job.over_links]
    inside_hosts = [job for job in jobs if not job.over_links]
    unit = max(1, math.prod(shape[num_summed:]))
    senders = _SenderBalance(tasks, source_mesh)
    sends = [
        senders.assign(between_hosts[slot.job], slot.sender_host, Fraction(slot.start, unit), Fraction(slot.stop, unit))
        for slot in slots
    ]
    sends += [
        senders.assign(job, job.sender_hosts[0], Fraction(end, unit), Fraction(end, unit)) for job in inside_hosts
    ]
    return tuple(sends), Fraction(end, unit), Fraction(bound, unit)


def gradient_plan(forward: ReshardingPlan, partial: tuple[str, ...] = ()) -> ReshardingPlan:
    """Return the plan that sends the gradient of the tensor sent by ``forward`` back to its sources.

    Each source device gets the full gradient of its own tile, and replicated sources get the same gradient. The layout
    does not determine the gradients on the replicas of the destination mesh. Along the axes in ``partial``, which must
    not split the tensor, replicas hold partial gradients. These are sent as one tensor with a leading dim per axis, and
    each source adds them in the same order. Along all other axes the replicas hold equal gradients, as after an
    all-reduce, and the sources receive the gradient of one replica.
    """
    return plan(*gradient_ends(forward, partial), len(partial))


def gradient_ends(forward: ReshardingPlan, partial: tuple[str, ...]) -> Ends:
    """Return the shape, layouts and meshes of ``gradient_plan``."""
    sizes = dict(forward.destination_mesh.axes)
    assert not forward.destination.axes & set(partial), f"{partial} must not split {forward.destination}"
    return (
        tuple(sizes[axis] for axis in partial) + forward.shape,
        Layout(*((axis,) for axis in partial), *forward.destination.dims),
        forward.destination_mesh,
        Layout(*(() for _ in partial), *forward.source.dims),
        forward.source_mesh,
    )


def _best_schedule(alternatives: list[list[SendJob]], find: Search) -> tuple[list[SendJob], list[Slot], int]:
    """Return the jobs of the alternative that finishes first, its slots, and the lower bound of all alternatives."""
    schedules = []
    for jobs in alternatives:
        between_hosts = [job for job in jobs if job.over_links]
        sequence, optimal = find(between_hosts)
        slots = timetable(between_hosts, sequence)
        end = max((slot.stop for slot in slots), default=0)
        bound = lower_bound(between_hosts)
        schedules.append((end, end if optimal else bound, jobs, slots))
        if end == bound:
            break
    _, _, jobs, slots = min(schedules, key=lambda found: found[0])
    return jobs, slots, min(bound for _, bound, _, _ in schedules)


class _SenderBalance:
    """Chooses the sending device on a host: the device that holds the tile and has the fewest elements to send."""

    def __init__(self, tasks: list[UnitTask], mesh: StageMesh):
        self.tasks, self.hosts = tasks, dict(zip(mesh.devices, mesh.hosts, strict=True))
        self.assigned = dict.fromkeys(mesh.devices, 0)  # elements

    def assign(self, job: SendJob, host: int, start: Fraction, stop: Fraction) -> Send:
        task = self.tasks[job.task]
        candidates = [device for device in task.senders if self.hosts[device] == host]
        sender = min(candidates, key=lambda device: (self.assigned[device], device))
        self.assigned[sender] += task.elements
        return Send(job.task, task.tile, sender, job.receivers, host, job.receiver_hosts, start, stop)
