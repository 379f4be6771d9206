"""The sends of a resharding as jobs, the times of a sequence of jobs, and simple sequences (arXiv 2211.05322, §3.1).

A job sends a unit task in K chunks, pipelined along a chain of its receivers. To A hosts it takes the time t + A·t/K,
where t is the time of the task's elements over one host's link. Traffic inside a host takes no time in this model,
because links between hosts are far slower.
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from gpt4d.parallel.resharding.mesh import StageMesh, UnitTask


@dataclass(frozen=True)
class SendJob:
    """The unit of scheduling: a unit task for all or some of its receivers."""

    task: int  # index of the unit task
    sender_hosts: tuple[int, ...]  # hosts that can send; the host of the lowest-index sender comes first
    receiver_hosts: tuple[int, ...]
    receivers: tuple[int, ...]  # ranks, grouped by host
    duration: int  # time for which the job occupies the links of its sender and its receivers, in elements

    @property
    def over_links(self) -> bool:
        return self.duration > 0


Receivers = dict[int, list[int]]  # ranks, by host


def together(receivers: Receivers) -> list[Receivers]:
    """Send a task to all hosts in one chain."""
    return [receivers] if receivers else []


def by_host(receivers: Receivers) -> list[Receivers]:
    """Send a task to each host separately."""
    return [{host: devices} for host, devices in receivers.items()]


def send_jobs(
    tasks: list[UnitTask],
    source_mesh: StageMesh,
    destination_mesh: StageMesh,
    split: Callable[[Receivers], list[Receivers]],
) -> list[SendJob]:
    """Return the jobs of all tasks, in the order of the tasks. ``split`` gives each job its part of the receivers.

    Meshes may share hosts. If a host with receivers also holds the data, a separate job serves these receivers inside
    the host, without a link. So no job between hosts has the same host as sender and receiver. Receiving hosts that
    also belong to the source mesh come last in a chain, where they need not forward.
    """
    sender_host = dict(zip(source_mesh.devices, source_mesh.hosts, strict=True))
    receiver_host = dict(zip(destination_mesh.devices, destination_mesh.hosts, strict=True))
    sources, jobs = set(source_mesh.hosts), []
    for number, task in enumerate(tasks):
        sender_hosts = tuple(dict.fromkeys(sender_host[device] for device in task.senders))
        receivers: Receivers = {}
        for _, host, device in sorted((receiver_host[d] in sources, receiver_host[d], d) for d in task.receivers):
            receivers.setdefault(host, []).append(device)
        remote = {host: devices for host, devices in receivers.items() if host not in sender_hosts}
        jobs += [SendJob(number, sender_hosts, tuple(r), _ranks(r), task.elements) for r in split(remote)]
        local = (split({host: receivers[host]}) for host in receivers if host in sender_hosts)
        jobs += [SendJob(number, tuple(r), tuple(r), _ranks(r), 0) for r in itertools.chain.from_iterable(local)]
    return jobs


def _ranks(receivers: Receivers) -> tuple[int, ...]:
    return tuple(itertools.chain.from_iterable(receivers.values()))


JobSequence = list[tuple[int, int]]


class Slot(NamedTuple):
    """The interval in which a job occupies its links. Times are in elements sent since the start."""

    start: int
    stop: int
    job: int
    sender_host: int


def timetable(jobs: list[SendJob], sequence: JobSequence) -> list[Slot]:
    """Return the slot of each job of a sequence, by start. Jobs that start together keep the order of the sequence.

    A host that forwards received data does not count as sending. It has other data to send only if the meshes share
    hosts.
    """
    sending: dict[int, int] = {}  # by host, the time at which it stops sending
    receiving: dict[int, int] = {}
    slots = []
    for number, host in sequence:
        job = jobs[number]
        assert host in job.sender_hosts
        start = max(sending.get(host, 0), *(receiving.get(receiver, 0) for receiver in job.receiver_hosts))
        stop = start + job.duration
        sending[host] = stop
        receiving.update(dict.fromkeys(job.receiver_hosts, stop))
        slots.append(Slot(start, stop, number, host))
    return sorted(slots, key=lambda slot: slot.start)


def makespan(jobs: list[SendJob], sequence: JobSequence) -> int:
    """Return the time at which the last job of the sequence ends, in elements."""
    return max((slot.stop for slot in timetable(jobs, sequence)), default=0)


def naive(jobs: list[SendJob]) -> JobSequence:
    """Return the jobs in the given order. The host of the lowest-index sender sends each job."""
    return [(number, job.sender_hosts[0]) for number, job in enumerate(jobs)]


def load_balance(jobs: list[SendJob]) -> JobSequence:
    """Return the longest jobs first. The host with the minimum assigned load sends each job (Eq. 4)."""
    assigned: dict[int, int] = {}
    sequence = []
    for number in sorted(range(len(jobs)), key=lambda number: -jobs[number].duration):
        host = min(jobs[number].sender_hosts, key=lambda host: (assigned.get(host, 0), host))
        assigned[host] = assigned.get(host, 0) + jobs[number].duration
        sequence.append((number, host))
    return sequence


_MAX_SENDER_SETS = 200  # with fewer sets, the bound is weaker but still valid


def lower_bound(jobs: list[SendJob]) -> int:
    """Return a lower bound of the makespan of ``jobs``, in elements.

    A host receives one job at a time. For any set of hosts, the jobs that only these hosts can send are at best spread
    evenly over them.
    """
    receiving: dict[int, int] = {}
    for job in jobs:
        for host in job.receiver_hosts:
            receiving[host] = receiving.get(host, 0) + job.duration
    sending = [
        -(-sum(job.duration for job in jobs if hosts.issuperset(job.sender_hosts)) // len(hosts))
        for hosts in sender_sets(job.sender_hosts for job in jobs)
    ]
    return max([0, *receiving.values(), *sending])


def sender_sets(choices: Iterable[tuple[int, ...]]) -> list[frozenset[int]]:
    """Return the sets of hosts for ``lower_bound``: the jobs' sets of sender hosts first, then unions of these sets."""
    distinct = sorted({tuple(sorted(choice)) for choice in choices})
    sets = dict.fromkeys(map(frozenset, distinct))
    for choice in distinct:
        for other in list(sets):
            if len(sets) >= _MAX_SENDER_SETS:
                return list(sets)
            if other & set(choice):  # the bound of a union of disjoint sets is no better than the sets' bounds
                sets[other | set(choice)] = None
    return list(sets)
