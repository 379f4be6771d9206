"""Strategies for sending one unit task, and how long each occupies the hosts' links (arXiv 2211.05322, §3.1).

Times for A receiving hosts with B devices each, where t is the time of the task's elements over one host's link:

    send_recv         separately to each receiver                                   A·B·t
    local_allgather   once to each host, in B parts that its devices all-gather     A·t
    global_allgather  once, in A·B parts that all receivers all-gather              2·t, or t to a single host
    broadcast         in K chunks, pipelined along a chain of the receivers         t + A·t/K
    signal            a single element, to measure the time without communication   0

Traffic inside a host takes no time here, because links between hosts are far slower.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from gpt4d.parallel.resharding.mesh import StageMesh, UnitTask


@dataclass(frozen=True)
class SendJob:
    """The unit of scheduling: a unit task, or the part of it that serves some of the receivers."""

    task: int  # index of the unit task
    sender_hosts: tuple[int, ...]  # any one of them can send; the host of the lowest-index sender comes first
    receiver_hosts: tuple[int, ...]
    receivers: tuple[int, ...]  # ranks, grouped by host
    duration: int  # how long the job occupies the links of its sender and its receivers, in elements

    @property
    def over_links(self) -> bool:
        return self.duration > 0


def send_jobs(
    tasks: list[UnitTask], strategy: str, source_mesh: StageMesh, destination_mesh: StageMesh
) -> list[SendJob]:
    """Return the jobs of all tasks, in the order of the tasks.

    Meshes may share hosts. Receivers on a host that holds the data get it there, in a job of their own that uses no
    link; the data is sent only to the others. So no job between hosts has the same host as a sender and as a receiver.
    Receiving hosts that also belong to the source mesh come last in a chain, where they need not forward.
    """
    sender_host = dict(zip(source_mesh.devices, source_mesh.hosts, strict=True))
    receiver_host = dict(zip(destination_mesh.devices, destination_mesh.hosts, strict=True))
    sources, jobs = set(source_mesh.hosts), []
    for number, task in enumerate(tasks):
        sender_hosts = tuple(dict.fromkeys(sender_host[device] for device in task.senders))
        by_host: dict[int, list[int]] = {}
        for _, host, device in sorted((receiver_host[d] in sources, receiver_host[d], d) for d in task.receivers):
            by_host.setdefault(host, []).append(device)
        remote = {host: devices for host, devices in by_host.items() if host not in sender_hosts}
        for receivers in _split_receivers(remote, strategy):
            duration = task.elements * _link_passes(strategy, len(receivers))
            jobs.append(SendJob(number, sender_hosts, tuple(receivers), _ranks(receivers), duration))
        local = (_split_receivers({host: by_host[host]}, strategy) for host in by_host if host in sender_hosts)
        jobs += [SendJob(number, tuple(r), tuple(r), _ranks(r), 0) for r in itertools.chain.from_iterable(local)]
    return jobs


def _ranks(receivers: dict[int, list[int]]) -> tuple[int, ...]:
    return tuple(itertools.chain.from_iterable(receivers.values()))


def _split_receivers(receivers: dict[int, list[int]], strategy: str) -> list[dict[int, list[int]]]:
    """Split a task's receivers, by host, into groups that are served separately, possibly by different senders."""
    if strategy == "send_recv":
        return [{host: [device]} for host, devices in receivers.items() for device in devices]
    if strategy == "local_allgather":
        return [{host: devices} for host, devices in receivers.items()]
    return [receivers] if receivers else []


def _link_passes(strategy: str, hosts: int) -> int:
    """Return how many times in succession the task's elements cross the links of a job to ``hosts`` hosts."""
    if strategy == "signal":
        return 0
    return 2 if strategy == "global_allgather" and hosts > 1 else 1


JobSequence = list[tuple[int, int]]


class Slot(NamedTuple):
    """The interval in which a job occupies its links, in elements sent since the start."""

    start: int
    stop: int
    job: int
    sender_host: int


def timetable(jobs: list[SendJob], sequence: JobSequence) -> list[Slot]:
    """Return the slot of each job of a sequence, by start; jobs that start together keep the order of the sequence.

    A host that forwards what it receives does not count as sending: it could have something else to send only if the
    meshes share hosts.
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
    """Return the jobs in the order given, each sent by its lowest-index sender."""
    return [(number, job.sender_hosts[0]) for number, job in enumerate(jobs)]


def load_balance(jobs: list[SendJob]) -> JobSequence:
    """Return the longest jobs first, each sent by the host with the least assigned so far (Eq. 4)."""
    assigned: dict[int, int] = {}
    sequence = []
    for number in sorted(range(len(jobs)), key=lambda number: -jobs[number].duration):
        host = min(jobs[number].sender_hosts, key=lambda host: (assigned.get(host, 0), host))
        assigned[host] = assigned.get(host, 0) + jobs[number].duration
        sequence.append((number, host))
    return sequence


_MAX_SENDER_SETS = 200  # leaving sets out weakens the bound but keeps it valid


def lower_bound(jobs: list[SendJob]) -> int:
    """Return a lower bound of the makespan of ``jobs``, in elements.

    A host receives one job at a time. The jobs that only the hosts of some set can send are at best spread evenly over
    these hosts.
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
    """Return the sets of hosts to bound: the jobs' choices of sender hosts first, then unions of them."""
    distinct = sorted({tuple(sorted(choice)) for choice in choices})
    sets = dict.fromkeys(map(frozenset, distinct))
    for choice in distinct:
        for other in list(sets):
            if len(sets) >= _MAX_SENDER_SETS:
                return list(sets)
            if other & set(choice):  # the union of disjoint sets gives no better bound than the sets
                sets[other | set(choice)] = None
    return list(sets)
