"""Simple choices of senders and order, and the timetable that an order gives (arXiv 2211.05322, §3.2).

A *job sequence* is a list of (index of the job, sender host). Each job starts as soon as its hosts have finished the
jobs before it. Two jobs overlap only if no host sends both and no host receives both; links are full duplex, so sending
and receiving do not conflict.
"""

from typing import NamedTuple

from gpt4d.parallel.resharding.strategies import SendJob

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
