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
from dataclasses import dataclass

from gpt4d.parallel.resharding.mesh import StageMesh
from gpt4d.parallel.resharding.tasks import UnitTask

STRATEGIES = ("broadcast", "send_recv", "local_allgather", "global_allgather", "signal")


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
