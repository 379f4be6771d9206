"""The plan of one resharding, which every rank computes identically, and the messages with which a rank executes it.

All ranks execute the sends of a plan in its order, and each send round by round. The messages of a round need only data
from earlier rounds. Both ends of a message have it in the round of the same time step. With NCCL, a round ends only
when the peers of all its messages have joined. Even then, ranks never wait for each other in a cycle.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from gpt4d.parallel.layout import CHUNK, Layout
from gpt4d.parallel.resharding.jobs import (
    JobSequence,
    SendJob,
    Slot,
    by_host,
    ensemble,
    lower_bound,
    send_jobs,
    timetable,
    together,
)
from gpt4d.parallel.resharding.mesh import StageMesh, Tile, UnitTask, shape_of, unit_tasks

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
    ends: Ends, num_summed: int, tasks: list[UnitTask], alternatives: list[list[SendJob]], find: Search = ensemble
) -> tuple[tuple[Send, ...], Fraction, Fraction]:
    """Return the sends of the alternative that ends first, its makespan, and the lower bound of all alternatives."""
    schedules = []
    for jobs in alternatives:
        between_hosts = [job for job in jobs if job.over_links]
        sequence, optimal = find(between_hosts)
        slots, bound = timetable(between_hosts, sequence), lower_bound(between_hosts)
        end = max((slot.stop for slot in slots), default=0)
        # Jobs inside a host go last: no link waits for them.
        slots += [Slot(end, end, job, job.sender_hosts[0]) for job in jobs if not job.over_links]
        schedules.append((end, end if optimal else bound, slots))
        if end == bound:
            break
    end, _, slots = min(schedules, key=lambda found: found[0])
    unit, mesh = max(1, math.prod(ends[0][num_summed:])), ends[2]
    hosts, assigned = dict(zip(mesh.devices, mesh.hosts, strict=True)), dict.fromkeys(mesh.devices, 0)
    sends = []
    for start, stop, job, host in slots:
        task = tasks[job.task]
        holders = [device for device in task.senders if hosts[device] == host]
        sender = min(holders, key=lambda device: (assigned[device], device))  # with the fewest elements to send so far
        assigned[sender] += task.elements
        times = Fraction(start, unit), Fraction(stop, unit)
        sends.append(Send(job.task, task.tile, sender, job.receivers, host, job.receiver_hosts, *times))
    return tuple(sends), Fraction(end, unit), Fraction(min(bound for _, bound, _ in schedules), unit)


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


_MAX_CHUNKS = 128  # with 128 chunks, a chain to A receiving hosts takes A/128 longer than one link
# Smaller chunks cost more to start than to send. On a GPU a round takes about 120 us of Python and of a kernel's start.
MIN_CHUNK_BYTES = {"cpu": 128 * 1024, "cuda": 16 * 1024 * 1024}


class PeerMessage(NamedTuple):
    """A message to or from one peer: a range of elements of the tile."""

    peer: int  # a rank
    start: int  # elements of the tile in row-major order
    stop: int


class Round(NamedTuple):
    """The messages that a rank sends and receives in one time step."""

    sends: tuple[PeerMessage, ...]
    receives: tuple[PeerMessage, ...]


@dataclass(frozen=True)
class SendStep:
    """One send of the plan, as one of its ranks executes it."""

    task: int  # index of the unit task
    slices: tuple[slice, ...]  # the tile in this rank's local tensor
    shape: tuple[int, ...]  # shape of the tile
    sending: bool  # this rank holds the tile; otherwise it receives and forwards the tile
    rounds: tuple[Round, ...]
    previous_sender: int | None = None  # the rank that sends before this rank over the same host's link
    next_sender: int | None = None  # the rank that sends after this rank over the same host's link


@dataclass(frozen=True)
class RankProgram:
    """All steps of one rank. ``shape``: shape of its local tensor, the result if ``receives``, else the input."""

    shape: tuple[int, ...]
    receives: bool
    steps: tuple[SendStep, ...]


def rank_program(plan: ReshardingPlan, rank: int, element_bytes: int, device_type: str = "cpu") -> RankProgram:
    """Return the program of ``rank``, a device of either mesh, for elements of ``element_bytes``."""
    receives = rank in plan.destination_mesh.devices
    mesh, layout = (plan.destination_mesh, plan.destination) if receives else (plan.source_mesh, plan.source)
    own = [mesh.tiles(plan.shape, layout, chunk)[rank] for chunk in mesh.chunks_of(layout)]
    chunked = next((dim for dim, axes in enumerate(layout.dims) if CHUNK in axes), 0)  # dim of concatenation
    steps, neighbors = [], {} if receives else _sender_neighbors(plan)
    for number, send in enumerate(plan.sends):
        if rank == send.sender or rank in send.receivers:
            elements, slices = plan.tasks[send.task].elements, _local_slices(send.tile, own, chunked)
            num_chunks = _num_chunks(elements * element_bytes, len(send.receivers), device_type)
            rounds, adjacent = chain(send, rank, elements, num_chunks), neighbors.get(number, (None, None))
            steps.append(SendStep(send.task, slices, shape_of(send.tile), not receives, rounds, *adjacent))
    shape = list(shape_of(own[0]))
    shape[chunked] = sum(shape_of(tile)[chunked] for tile in own)
    return RankProgram(tuple(shape), receives, tuple(steps))


def _sender_neighbors(plan: ReshardingPlan) -> dict[int, tuple[int | None, int | None]]:
    """Return, for each send over a link, the ranks that send before and after it from the same host.

    None stands for the sending rank itself, whose sends are sequential without a signal. Concurrent sends of several
    devices share the link. Each then takes longer than planned, and the receivers of the first send wait for all sends.
    """
    of_host: dict[int, list[int]] = {}
    for number, send in enumerate(plan.sends):
        if send.stop > send.start:
            of_host.setdefault(send.sender_host, []).append(number)
    neighbors = {}
    for send_indices in of_host.values():
        senders = [None, *(plan.sends[index].sender for index in send_indices), None]
        for index, before, own, after in zip(send_indices, senders, senders[1:], senders[2:], strict=False):
            neighbors[index] = None if before == own else before, None if after == own else after
    return neighbors


def _num_chunks(nbytes: int, receivers: int, device_type: str) -> int:
    """Return the number of chunks in which a tile of ``nbytes`` travels along a chain of receivers.

    A single receiver on a GPU gets the tile in one message, because it forwards nothing. On a CPU it gets the tile in
    chunks, because a receive that is posted in advance must not cover the complete send.
    """
    if receivers == 1 and device_type != "cpu":
        return 1
    return max(1, min(_MAX_CHUNKS, nbytes // MIN_CHUNK_BYTES[device_type]))


def chain(send: Send, rank: int, elements: int, num_chunks: int) -> tuple[Round, ...]:
    """Return one rank's rounds of a send, whose chunks pass from device to device (arXiv 2211.05322, §3.1)."""
    ranks, chunks = (send.sender, *send.receivers), split(elements, num_chunks)
    place = ranks.index(rank)
    rounds = []
    for time_step in range(len(chunks) + len(ranks)):
        sends, receives = [], []
        if place + 1 < len(ranks) and 0 <= time_step - place < len(chunks):
            sends.append(PeerMessage(ranks[place + 1], *chunks[time_step - place]))
        if place and 0 <= time_step - place + 1 < len(chunks):
            receives.append(PeerMessage(ranks[place - 1], *chunks[time_step - place + 1]))
        if sends or receives:
            rounds.append(Round(tuple(sends), tuple(receives)))
    return tuple(rounds)


def split(elements: int, count: int) -> list[tuple[int, int]]:
    """Split a range into ``count`` near-equal parts, longer parts first, with the rule of ``Layout.tile``."""
    return [Layout(("part",)).tile((elements,), {"part": count}, {"part": index})[0] for index in range(count)]


def _local_slices(tile: Tile, own: Sequence[Tile], chunked: int) -> tuple[slice, ...]:
    """Return the slices of a tile in a local tensor, the concatenation of the tiles ``own`` along dim ``chunked``."""
    before = 0
    for part in own:
        if all(a <= start and stop <= b for (start, stop), (a, b) in zip(tile, part, strict=True)):
            offsets = [a - (before if dim == chunked else 0) for dim, (a, _) in enumerate(part)]
            return tuple(slice(start - o, stop - o) for (start, stop), o in zip(tile, offsets, strict=True))
        before += part[chunked][1] - part[chunked][0]
    raise AssertionError(f"{tile} is not inside one of {own}")
