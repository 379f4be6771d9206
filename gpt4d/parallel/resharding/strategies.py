"""How one unit task is sent, and how long that keeps the links of hosts busy (arXiv 2211.05322, §3.1).

With t for the task's elements once over a host's link, A receiving hosts and B devices on each:

    send_recv         to every receiver                                        A·B·t
    local_allgather   to every host once, in B parts that its devices gather   A·t
    global_allgather  once, in A·B parts that all receivers gather             2·t, or t to a single host
    broadcast         in K chunks, pipelined along a chain of the receivers    t, and A·t/K more
    signal            one element only, to measure what communication costs    0

What stays inside a host takes no time here: links between hosts are slower by far.
"""

import itertools
from dataclasses import dataclass

from gpt4d.parallel.resharding.mesh import Mesh
from gpt4d.parallel.resharding.tasks import UnitTask

STRATEGIES = ("broadcast", "send_recv", "local_allgather", "global_allgather", "signal")


@dataclass(frozen=True)
class Job:
    """What is scheduled as a whole: a unit task, or its part for some of the receivers."""

    task: int  # which unit task
    sender_hosts: tuple[int, ...]  # any of them can send; first the one with the lowest-index sender
    receiver_hosts: tuple[int, ...]
    receivers: tuple[int, ...]  # ranks, host by host
    duration: int  # how long it keeps its sender's and its receivers' links busy, in elements

    @property
    def over_links(self) -> bool:
        return self.duration > 0


def jobs(tasks: list[UnitTask], strategy: str, source_mesh: Mesh, destination_mesh: Mesh) -> list[Job]:
    """The jobs of all tasks, in their order.

    Meshes may share hosts. Receivers on a host that has the data get it there, in a job of their own that needs no
    link; only the others are sent it. So no job between hosts has a host among its senders' and its receivers' alike.
    Hosts that have something to send themselves are the last in a chain: they do not have to hand on.
    """
    sender_host = dict(zip(source_mesh.devices, source_mesh.hosts, strict=True))
    receiver_host = dict(zip(destination_mesh.devices, destination_mesh.hosts, strict=True))
    sources, found = set(source_mesh.hosts), []
    for number, task in enumerate(tasks):
        sender_hosts = tuple(dict.fromkeys(sender_host[device] for device in task.senders))
        by_host: dict[int, list[int]] = {}
        for _, host, device in sorted((receiver_host[d] in sources, receiver_host[d], d) for d in task.receivers):
            by_host.setdefault(host, []).append(device)
        far = {host: devices for host, devices in by_host.items() if host not in sender_hosts}
        for receivers in _shares(far, strategy):
            duration = task.elements * _times(strategy, len(receivers))
            found.append(Job(number, sender_hosts, tuple(receivers), _ranks(receivers), duration))
        near = (_shares({host: by_host[host]}, strategy) for host in by_host if host in sender_hosts)
        found += [Job(number, tuple(r), tuple(r), _ranks(r), 0) for r in itertools.chain.from_iterable(near)]
    return found


def _ranks(receivers: dict[int, list[int]]) -> tuple[int, ...]:
    return tuple(itertools.chain.from_iterable(receivers.values()))


def _shares(receivers: dict[int, list[int]], strategy: str) -> list[dict[int, list[int]]]:
    """The receivers of a task, by host, split into those that are served apart, perhaps by different senders."""
    if strategy == "send_recv":
        return [{host: [device]} for host, devices in receivers.items() for device in devices]
    if strategy == "local_allgather":
        return [{host: devices} for host, devices in receivers.items()]
    return [receivers] if receivers else []


def _times(strategy: str, hosts: int) -> int:
    """How often the task's elements cross the links of a job to so many hosts, one time after another."""
    if strategy == "signal":
        return 0
    return 2 if strategy == "global_allgather" and hosts > 1 else 1
