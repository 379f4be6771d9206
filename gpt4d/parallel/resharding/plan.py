"""The plan of one resharding: a value that every rank computes identically."""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from gpt4d.config.schema import STRATEGIES
from gpt4d.parallel.layout import Layout
from gpt4d.parallel.resharding import search, strategies
from gpt4d.parallel.resharding.mesh import StageMesh, Tile, UnitTask, unit_tasks
from gpt4d.parallel.resharding.strategies import SendJob, lower_bound, send_jobs

ORDERS = ("ensemble", "naive", "load_balance", "dfs", "greedy")


@dataclass(frozen=True)
class Send:
    """One device sends one tile to one or more receivers, by the strategy of the plan."""

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

    The unit of time is one transfer of the global tensor over one host's link. With this strategy, no order and no
    choice of senders takes less than ``lower_bound``. The bound holds for broadcasts to all hosts at once and to each
    host separately. The plan is optimal if ``makespan`` equals ``lower_bound``. If the meshes share hosts, a host that
    both sends and forwards takes longer than planned.
    """

    shape: tuple[int, ...]
    source: Layout
    source_mesh: StageMesh
    destination: Layout
    destination_mesh: StageMesh
    strategy: str
    order: str
    seed: int
    effort: int
    num_summed: int  # number of leading dims of ``shape`` with contributions to a gradient, which receivers add up
    tasks: tuple[UnitTask, ...]
    sends: tuple[Send, ...]
    makespan: Fraction
    lower_bound: Fraction

    @property
    def sent_elements(self) -> int:
        """Number of elements that all ranks together send. Every receiver gets each tile that it needs once."""
        if self.strategy == "signal":
            return sum(len(send.receivers) for send in self.sends)
        return sum(task.elements * len(task.receivers) for task in self.tasks)


@lru_cache(maxsize=128)
def plan(
    shape: tuple[int, ...],
    source: Layout,
    source_mesh: StageMesh,
    destination: Layout,
    destination_mesh: StageMesh,
    strategy: str = "broadcast",
    order: str = "ensemble",
    seed: int = 0,
    effort: int = 1,
    num_summed: int = 0,
) -> ReshardingPlan:
    """Return the plan for a tensor of ``shape`` between two disjoint meshes (arXiv 2211.05322, §3).

    The order ``ensemble`` is the better result of ``greedy``, randomized by ``seed``, and ``dfs``. Both examine a fixed
    number of choices times ``effort``. With effort 1 they take less than a second for up to about ten thousand tasks.
    Equal arguments give equal plans on every rank, and plans are cached. ``num_summed`` is for ``gradient_plan``.
    """
    assert strategy in STRATEGIES and order in ORDERS, (strategy, order)
    tasks = unit_tasks(shape, source, source_mesh, destination, destination_mesh)
    alternatives = [send_jobs(tasks, strategy, source_mesh, destination_mesh)]
    if strategy == "broadcast" and order == "ensemble":
        # A send to several hosts starts only when all hosts are free, so separate sends are sometimes faster.
        alternatives.append(send_jobs(tasks, "local_allgather", source_mesh, destination_mesh))
    jobs, slots, bound = _best_schedule(alternatives, order, seed, effort)
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
    return ReshardingPlan(
        shape,
        source,
        source_mesh,
        destination,
        destination_mesh,
        strategy,
        order,
        seed,
        effort,
        num_summed,
        tuple(tasks),
        tuple(sends),
        Fraction(end, unit),
        Fraction(bound, unit),
    )


def gradient_plan(forward: ReshardingPlan, partial: tuple[str, ...] = ()) -> ReshardingPlan:
    """Return the plan that sends the gradient of the tensor sent by ``forward`` back to its sources.

    Each source device gets the full gradient of its own tile, and replicated sources get the same gradient. The layout
    does not determine the gradients on the replicas of the destination mesh. Along the axes in ``partial``, which must
    not split the tensor, replicas hold partial gradients. These are sent as one tensor with a leading dim per axis, and
    each source adds them in the same order. Along all other axes the replicas hold equal gradients, as after an
    all-reduce, and the sources receive the gradient of one replica.
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


def _best_schedule(
    alternatives: list[list[SendJob]], order: str, seed: int, effort: int
) -> tuple[list[SendJob], list[strategies.Slot], int]:
    """Return the jobs of the alternative that finishes first, its slots, and the lower bound of all alternatives."""
    schedules = []
    for jobs in alternatives:
        between_hosts = [job for job in jobs if job.over_links]
        sequence, optimal = _sequence(between_hosts, order, seed, effort)
        slots = strategies.timetable(between_hosts, sequence)
        end = max((slot.stop for slot in slots), default=0)
        bound = lower_bound(between_hosts)
        schedules.append((end, end if optimal else bound, jobs, slots))
        if end == bound:
            break
    _, _, jobs, slots = min(schedules, key=lambda schedule: schedule[0])
    return jobs, slots, min(bound for _, bound, _, _ in schedules)


def _sequence(jobs: list[SendJob], order: str, seed: int, effort: int) -> tuple[strategies.JobSequence, bool]:
    """Return a sequence, and True if the search has proved it optimal."""
    if order == "naive":
        return strategies.naive(jobs), False
    if order == "load_balance":
        return strategies.load_balance(jobs), False
    if order == "dfs":
        return search.dfs(jobs, effort)
    if order == "greedy":
        return search.greedy(jobs, seed, effort), False
    return search.ensemble(jobs, seed, effort)


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
