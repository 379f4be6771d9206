"""The sends of a resharding as jobs, and searches for a sequence of minimum makespan (arXiv 2211.05322, §3.1 and §3.2).

A job sends a unit task in K chunks, pipelined along a chain of its receivers. To A hosts it takes the time t + A·t/K,
where t is the time of the task's elements over one host's link. Traffic inside a host takes no time in this model,
because links between hosts are far slower.

Both searches return the same result in every call and on every rank, because a number of examined choices limits them,
not time. Jobs with the same hosts and duration form one *kind*. Their relative order does not matter.
"""

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpt4d.parallel.resharding.mesh import StageMesh, UnitTask

# Choices examined; each takes a few microseconds.
GREEDY_CHOICES = 100_000
DFS_CHOICES = 60_000
_SET_ATTEMPTS = 8  # orders tried for each set of jobs that start together; all orders except the first are random


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


JobSequence = list[tuple[int, int]]  # index of a job, and the host that sends it


class Slot(NamedTuple):
    """The interval in which a job occupies its links. Times are in elements sent since the start."""

    start: int
    stop: int
    job: SendJob
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
        sending[host] = stop = start + job.duration
        receiving |= dict.fromkeys(job.receiver_hosts, stop)
        slots.append(Slot(start, stop, job, host))
    return sorted(slots, key=lambda slot: slot.start)


def makespan(jobs: list[SendJob], sequence: JobSequence) -> int:
    """Return the time at which the last job of the sequence ends, in elements."""
    return max((slot.stop for slot in timetable(jobs, sequence)), default=0)


def naive(jobs: list[SendJob]) -> JobSequence:
    """Return the jobs in the given order. The host of the lowest-index sender sends each job."""
    return [(number, job.sender_hosts[0]) for number, job in enumerate(jobs)]


def load_balance(jobs: list[SendJob]) -> JobSequence:
    """Return the longest jobs first. The host with the minimum assigned load sends each job (Eq. 4)."""
    assigned, sequence = Counter[int](), []
    for number in sorted(range(len(jobs)), key=lambda number: -jobs[number].duration):
        host = min(jobs[number].sender_hosts, key=lambda host: (assigned[host], host))
        assigned[host] += jobs[number].duration
        sequence.append((number, host))
    return sequence


_MAX_SENDER_SETS = 200  # with fewer sets, the bound is weaker but still valid


def lower_bound(jobs: list[SendJob]) -> int:
    """Return a lower bound of the makespan of ``jobs``, in elements.

    A host receives one job at a time. For any set of hosts, the jobs that only these hosts can send are at best spread
    evenly over them.
    """
    receiving = Counter[int]()
    for job in jobs:
        for host in job.receiver_hosts:
            receiving[host] += job.duration
    sending = [
        -(-sum(job.duration for job in jobs if hosts.issuperset(job.sender_hosts)) // len(hosts))
        for hosts in sender_sets(job.sender_hosts for job in jobs)
    ]
    return max([0, *receiving.values(), *sending])


def sender_sets(choices: Iterable[tuple[int, ...]]) -> list[frozenset[int]]:
    """Return the sets of hosts for ``lower_bound``: the jobs' sets of sender hosts first, then unions of these sets."""
    distinct = [frozenset(choice) for choice in sorted({tuple(sorted(choice)) for choice in choices})]
    sets = dict.fromkeys(distinct)
    for choice in distinct:
        for other in list(sets):
            if len(sets) >= _MAX_SENDER_SETS:
                return list(sets)
            if other & choice:  # the bound of a union of disjoint sets is no better than the sets' bounds
                sets[other | choice] = None
    return list(sets)


@dataclass
class JobKind:
    """Interchangeable jobs."""

    sender_hosts: tuple[int, ...]
    receiver_hosts: tuple[int, ...]
    duration: int
    jobs: list[int] = field(default_factory=list)


def _group_by_kind(jobs: list[SendJob]) -> list[JobKind]:
    kinds: dict[tuple, JobKind] = {}
    for number, job in enumerate(jobs):
        key = tuple(sorted(job.sender_hosts)), tuple(sorted(job.receiver_hosts)), job.duration
        kinds.setdefault(key, JobKind(*key)).jobs.append(number)
    return list(kinds.values())


def greedy(jobs: list[SendJob]) -> JobSequence:
    """Return the best of repeated greedy runs: whenever hosts are free, start the set of jobs with the largest weight.

    The weight of a job is the remaining load of its hosts, because hosts with the highest load must never be idle. The
    sets come from random orders. Runs are repeated with other orders until the makespan equals the lower bound or the
    choices are used up.
    """
    rng, bound, budget = random.Random(0), lower_bound(jobs), GREEDY_CHOICES
    best, best_makespan = JobSequence(), math.inf
    while budget > 0 and best_makespan > bound:
        run = _GreedyRun(jobs, rng)
        sequence = run.sequence()
        budget -= run.num_choices
        if (end := makespan(jobs, sequence)) < best_makespan:
            best, best_makespan = sequence, end
    return best


class _GreedyRun:
    """One greedy run, which schedules all jobs."""

    def __init__(self, jobs: list[SendJob], rng: random.Random):
        self.rng, self.num_choices, self.now = rng, 0, 0
        self.kinds = _group_by_kind(jobs)  # of the remaining jobs
        self.sending, self.receiving = defaultdict[int, int](int), defaultdict[int, int](int)  # by host, until then
        self.to_send, self.to_receive = defaultdict[int, float](float), Counter[int]()  # by host, the remaining load
        for job in jobs:
            self._add_load(job, 1)

    def _add_load(self, job: SendJob | JobKind, times: int) -> None:
        for host in job.sender_hosts:
            self.to_send[host] += times * job.duration / len(job.sender_hosts)
        for host in job.receiver_hosts:
            self.to_receive[host] += times * job.duration

    def sequence(self) -> JobSequence:
        sequence: JobSequence = []
        while self.kinds:
            for kind, host in self._best_set([kind for kind in self.kinds if self._can_start(kind)]):
                sequence.append((kind.jobs.pop(0), host))
                self._add_load(kind, -1)
                self.sending[host] = stop = self.now + kind.duration
                self.receiving |= dict.fromkeys(kind.receiver_hosts, stop)
            self.kinds = [kind for kind in self.kinds if kind.jobs]
            self.now = min((t for t in (*self.sending.values(), *self.receiving.values()) if t > self.now), default=0)
        return sequence

    def _can_start(self, kind: JobKind) -> bool:
        self.num_choices += 1
        sends = any(self.sending[host] <= self.now for host in kind.sender_hosts)
        return sends and all(self.receiving[host] <= self.now for host in kind.receiver_hosts)

    def _best_set(self, ready: list[JobKind]) -> list[tuple[JobKind, int]]:
        order = sorted(ready, key=lambda kind: -self._weight(kind, kind.sender_hosts))
        best, best_weight = self._maximal_set(order)
        for _ in range(_SET_ATTEMPTS - 1 if len(ready) > 1 else 0):
            chosen, weight = self._maximal_set(self.rng.sample(ready, len(ready)))
            if weight > best_weight:
                best, best_weight = chosen, weight
        return best

    def _maximal_set(self, order: list[JobKind]) -> tuple[list[tuple[JobKind, int]], float]:
        """Return a maximal set of jobs without conflicts, in the given order, with sender hosts, and its weight."""
        sending, receiving, chosen, weight = set[int](), set[int](), [], 0.0
        for kind in order:
            self.num_choices += 1
            if not receiving.isdisjoint(kind.receiver_hosts):
                continue
            free = [host for host in kind.sender_hosts if host not in sending and self.sending[host] <= self.now]
            if free:
                # The host with the minimum load, because the remaining hosts have more jobs to send.
                host = min(free, key=lambda host: (self.to_send[host], host))
                chosen.append((kind, host))
                sending.add(host)
                receiving.update(kind.receiver_hosts)
                weight += self._weight(kind, (host,))
        return chosen, weight

    def _weight(self, kind: JobKind, senders: Sequence[int]) -> float:
        return max(self.to_send[host] for host in senders) + sum(self.to_receive[host] for host in kind.receiver_hosts)


def ensemble(jobs: list[SendJob]) -> tuple[JobSequence, bool]:
    """Return the better result of ``greedy`` and ``dfs``, and True if it is proved optimal."""
    return dfs(jobs, greedy(jobs))


def dfs(jobs: list[SendJob], *initial: JobSequence) -> tuple[JobSequence, bool]:
    """Search depth-first with pruning; return the best sequence, and True if it is proved optimal.

    The search starts from the best of ``initial`` and the sequences of ``naive`` and ``load_balance``.
    """
    sequences = [*initial, naive(jobs), load_balance(jobs)]
    search = _DepthFirstSearch(jobs, min(sequences, key=lambda sequence: makespan(jobs, sequence)))
    optimal = search.run()
    return search.best, optimal


class _DepthFirstSearch:
    """A search of the tree of sequences whose jobs start in nondecreasing order, so that each schedule occurs once.

    A branch is pruned if some job could end before the next job starts, because that job can run first at no cost. A
    branch is also pruned if its lower bound is no better than the best sequence so far.
    """

    def __init__(self, jobs: list[SendJob], initial: JobSequence):
        self.kinds = _group_by_kind(jobs)
        self.remaining = [len(kind.jobs) for kind in self.kinds]
        self.sending = {host: 0 for kind in self.kinds for host in kind.sender_hosts}  # until this time
        self.receiving = {host: 0 for kind in self.kinds for host in kind.receiver_hosts}
        self.sets = sender_sets(kind.sender_hosts for kind in self.kinds)
        self.sets_of = [[i for i, s in enumerate(self.sets) if s.issuperset(k.sender_hosts)] for k in self.kinds]
        self.to_send, self.to_receive = [0] * len(self.sets), dict.fromkeys(self.receiving, 0)
        for number, kind in enumerate(self.kinds):
            self._add_load(number, len(kind.jobs) * kind.duration)
        # The cost of computing a bound, in choices, so that the number of choices is proportional to time.
        self.bound_choices = (len(self.receiving) + sum(map(len, self.sets))) // 16
        self.bound, self.num_jobs, self.num_choices = lower_bound(jobs), len(jobs), 0
        self.path: list[tuple[int, int, int]] = []  # start, kind, sender host
        self.best, self.best_makespan = initial, makespan(jobs, initial)

    def run(self) -> bool:
        """Search the tree; return False if the choices are used up first. Long paths need an explicit stack."""
        stack = [iter(self._choices())]
        undo: list[tuple] = []
        while stack:
            if self.best_makespan <= self.bound or self.num_choices > DFS_CHOICES:
                return self.best_makespan <= self.bound
            choice = next(stack[-1], None)
            if choice is None:
                stack.pop()
                if undo:
                    self._undo(*undo.pop())
                continue
            undo.append(self._apply(choice))
            if len(self.path) == self.num_jobs:
                self._record()
                self._undo(*undo.pop())
            elif self._bound() >= self.best_makespan:
                self._undo(*undo.pop())
            else:
                stack.append(iter(self._choices()))
        return True

    def _choices(self) -> list[tuple[int, int, int]]:
        """Return the possible next (start, kind, sender host), ordered by earliest start, then longest duration."""
        previous = self.path[-1] if self.path else (0, -1, -1)
        choices, first_stop = [], math.inf
        for number, kind in enumerate(self.kinds):
            if not self.remaining[number]:
                continue
            received = max(self.receiving[host] for host in kind.receiver_hosts)
            for host in kind.sender_hosts:
                self.num_choices += 1
                start = max(self.sending[host], received)
                first_stop = min(first_stop, start + kind.duration)
                if (start, number, host) > previous:
                    choices.append((start, number, host))
        choices = [choice for choice in choices if choice[0] < first_stop]
        return sorted(choices, key=lambda choice: (choice[0], -self.kinds[choice[1]].duration, choice))

    def _apply(self, choice: tuple[int, int, int]) -> tuple[int, dict[int, int]]:
        """Append a choice to the path; return the state for ``_undo``."""
        start, number, host = choice
        kind = self.kinds[number]
        before = self.sending[host], {receiver: self.receiving[receiver] for receiver in kind.receiver_hosts}
        self.remaining[number] -= 1
        self._add_load(number, -kind.duration)
        self.sending[host] = start + kind.duration
        self.receiving |= dict.fromkeys(kind.receiver_hosts, start + kind.duration)
        self.path.append(choice)
        return before

    def _undo(self, sending: int, receiving: dict[int, int]) -> None:
        _, number, host = self.path.pop()
        self.remaining[number] += 1
        self._add_load(number, self.kinds[number].duration)
        self.sending[host] = sending
        self.receiving |= receiving

    def _add_load(self, number: int, duration: int) -> None:
        """Add ``duration`` to the remaining loads of the hosts of a kind."""
        for index in self.sets_of[number]:
            self.to_send[index] += duration
        for host in self.kinds[number].receiver_hosts:
            self.to_receive[host] += duration

    def _bound(self) -> int:
        """Return a lower bound of all sequences that extend the path. No job starts before the path's last job."""
        self.num_choices += self.bound_choices
        earliest = self.path[-1][0]
        received = [max(self.receiving[host], earliest) + load for host, load in self.to_receive.items() if load]
        bound = max(received, default=0)
        for hosts, load in zip(self.sets, self.to_send, strict=True):
            if load:
                free = sum(max(self.sending[host], earliest) for host in hosts)
                bound = max(bound, -(-(free + load) // len(hosts)))
        return bound

    def _record(self) -> None:
        """Store the path as the best sequence if it is better."""
        end = max(start + self.kinds[number].duration for start, number, _ in self.path)
        if end < self.best_makespan:
            jobs = [iter(kind.jobs) for kind in self.kinds]
            self.best, self.best_makespan = [(next(jobs[number]), host) for _, number, host in self.path], end
