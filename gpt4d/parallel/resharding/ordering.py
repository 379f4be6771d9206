"""Who sends and in what order: the simple algorithms, and what an order amounts to in time (arXiv 2211.05322, §3.2).

A *sequence* is a list of (job, sender host), each job named by its place in the list of jobs. Every job in it starts as
soon as its hosts are through with those before it. Two jobs overlap only if neither host sends both or receives both;
links are full duplex, so sending and receiving do not conflict.
"""

from typing import NamedTuple

from gpt4d.parallel.resharding.strategies import Job

Sequence = list[tuple[int, int]]


class Slot(NamedTuple):
    """When a job keeps its links busy, in elements of the tensor sent since the beginning."""

    start: int
    stop: int
    job: int
    sender_host: int


def timetable(jobs: list[Job], sequence: Sequence) -> list[Slot]:
    """The slot of each job of a sequence, by start; those that start at once in the sequence's order.

    A host that hands on what it receives is not counted as sending: only where meshes share hosts could it have
    anything else to send.
    """
    sending: dict[int, int] = {}  # until when each host does
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


def makespan(jobs: list[Job], sequence: Sequence) -> int:
    return max((slot.stop for slot in timetable(jobs, sequence)), default=0)


def naive(jobs: list[Job]) -> Sequence:
    """The lowest-index sender, in the order given."""
    return [(number, job.sender_hosts[0]) for number, job in enumerate(jobs)]


def load_balance(jobs: list[Job]) -> Sequence:
    """The longest first, each from the host that has been given least to send until then (Eq. 4)."""
    given: dict[int, int] = {}
    sequence = []
    for number in sorted(range(len(jobs)), key=lambda number: -jobs[number].duration):
        host = min(jobs[number].sender_hosts, key=lambda host: (given.get(host, 0), host))
        given[host] = given.get(host, 0) + jobs[number].duration
        sequence.append((number, host))
    return sequence
