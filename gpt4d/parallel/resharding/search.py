"""Searches for a sequence of minimum makespan: randomized greedy and depth-first (arXiv 2211.05322, §3.2).

Both return the same result in every call and on every rank, because a number of examined choices limits them, not time.
Jobs with the same hosts and duration form one *kind*. Their relative order does not matter.
"""

import random
from dataclasses import dataclass, field

from gpt4d.parallel.resharding.jobs import (
    JobSequence,
    SendJob,
    load_balance,
    lower_bound,
    makespan,
    naive,
    sender_sets,
)

# Choices examined; each takes a few microseconds.
GREEDY_CHOICES = 100_000
DFS_CHOICES = 60_000
_SET_ATTEMPTS = 8  # orders tried for each set of jobs that start together; all orders except the first are random


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
    rng, bound = random.Random(0), lower_bound(jobs)
    best, best_makespan, budget = None, 0, GREEDY_CHOICES
    while best is None or (budget > 0 and best_makespan > bound):
        run = _GreedyRun(jobs, rng)
        sequence = run.sequence()
        budget -= run.num_choices
        if best is None or makespan(jobs, sequence) < best_makespan:
            best, best_makespan = sequence, makespan(jobs, sequence)
    return best


class _GreedyRun:
    """One greedy run, which schedules all jobs."""

    def __init__(self, jobs: list[SendJob], rng: random.Random):
        self.rng, self.num_choices, self.now = rng, 0, 0
        self.kinds = [(kind, list(kind.jobs)) for kind in _group_by_kind(jobs)]
        self.sending: dict[int, int] = {}  # by host, the time at which it stops sending
        self.receiving: dict[int, int] = {}
        self.to_send: dict[int, float] = {}  # by host, the remaining load to send
        self.to_receive: dict[int, int] = {}
        for job in jobs:
            self._add_load(job, 1)

    def _add_load(self, job: SendJob | JobKind, times: int) -> None:
        for host in job.sender_hosts:
            share = times * job.duration / len(job.sender_hosts)
            self.to_send[host] = self.to_send.get(host, 0) + share
        for host in job.receiver_hosts:
            self.to_receive[host] = self.to_receive.get(host, 0) + times * job.duration

    def sequence(self) -> JobSequence:
        sequence: JobSequence = []
        while self.kinds:
            ready = [entry for entry in self.kinds if self._can_start(entry[0])]
            for (kind, remaining), host in self._best_set(ready):
                sequence.append((remaining.pop(0), host))
                self._add_load(kind, -1)
                self.sending[host] = self.now + kind.duration
                self.receiving.update(dict.fromkeys(kind.receiver_hosts, self.now + kind.duration))
            self.kinds = [entry for entry in self.kinds if entry[1]]
            self.now = min((t for t in (*self.sending.values(), *self.receiving.values()) if t > self.now), default=0)
        return sequence

    def _can_start(self, kind: JobKind) -> bool:
        self.num_choices += 1
        return any(self.sending.get(host, 0) <= self.now for host in kind.sender_hosts) and all(
            self.receiving.get(host, 0) <= self.now for host in kind.receiver_hosts
        )

    def _best_set(self, ready: list[tuple[JobKind, list[int]]]) -> list[tuple[tuple[JobKind, list[int]], int]]:
        best, best_weight = [], -1.0
        for attempt in range(_SET_ATTEMPTS if len(ready) > 1 else 1):
            if attempt == 0:
                order = sorted(ready, key=lambda entry: -self._weight(entry[0]))
            else:
                order = self.rng.sample(ready, len(ready))
            chosen, weight = self._maximal_set(order)
            if weight > best_weight:
                best, best_weight = chosen, weight
        return best

    def _maximal_set(self, order: list[tuple[JobKind, list[int]]]):
        """Return a maximal set of jobs without conflicts, in the given order, with sender hosts, and its weight."""
        sending, receiving, chosen, weight = set[int](), set[int](), [], 0.0
        for entry in order:
            kind = entry[0]
            self.num_choices += 1
            if not receiving.isdisjoint(kind.receiver_hosts):
                continue
            free = [h for h in kind.sender_hosts if h not in sending and self.sending.get(h, 0) <= self.now]
            if free:
                # The host with the minimum load, because the remaining hosts have more jobs to send.
                host = min(free, key=lambda host: (self.to_send[host], host))
                chosen.append((entry, host))
                sending.add(host)
                receiving.update(kind.receiver_hosts)
                weight += self.to_send[host] + sum(self.to_receive[h] for h in kind.receiver_hosts)
        return chosen, weight

    def _weight(self, kind: JobKind) -> float:
        senders = max(self.to_send[host] for host in kind.sender_hosts)
        return senders + sum(self.to_receive[host] for host in kind.receiver_hosts)


def ensemble(jobs: list[SendJob]) -> tuple[JobSequence, bool]:
    """Return the better result of ``greedy`` and ``dfs``, and True if it is proved optimal."""
    return dfs(jobs, greedy(jobs))


def dfs(jobs: list[SendJob], initial: JobSequence | None = None) -> tuple[JobSequence, bool]:
    """Search depth-first with pruning; return the best sequence, and True if it is proved optimal.

    The search starts from the best of ``initial`` and the sequences of ``naive`` and ``load_balance``.
    """
    simple = [naive(jobs), load_balance(jobs)]
    initial = min(simple if initial is None else [initial, *simple], key=lambda sequence: makespan(jobs, sequence))
    search = _DepthFirstSearch(jobs, initial, DFS_CHOICES)
    optimal = search.run()
    return search.best, optimal


class _DepthFirstSearch:
    """A search of the tree of sequences whose jobs start in nondecreasing order, so that each schedule occurs once.

    A branch is pruned if some job could end before the next job starts, because that job can run first at no cost. A
    branch is also pruned if its lower bound is no better than the best sequence so far.
    """

    def __init__(self, jobs: list[SendJob], initial: JobSequence, max_choices: int):
        self.kinds, self.max_choices = _group_by_kind(jobs), max_choices
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
        self.bound, self.num_jobs = lower_bound(jobs), len(jobs)
        self.path: list[tuple[int, int, int]] = []  # start, kind, sender host
        self.best, self.best_makespan = initial, makespan(jobs, initial)
        self.num_choices = 0

    def run(self) -> bool:
        """Search the tree; return False if the choices are used up first. Long paths need an explicit stack."""
        stack = [iter(self._choices())]
        undo: list[tuple] = []
        while stack:
            if self.best_makespan <= self.bound or self.num_choices > self.max_choices:
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
        choices, first_stop = [], float("inf")
        for number, kind in enumerate(self.kinds):
            if not self.remaining[number]:
                continue
            received = max(self.receiving[host] for host in kind.receiver_hosts)
            for host in kind.sender_hosts:
                self.num_choices += 1
                start = max(self.sending[host], received)
                stop = start + kind.duration
                first_stop = min(first_stop, stop)
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
        for receiver in kind.receiver_hosts:
            self.receiving[receiver] = start + kind.duration
        self.path.append(choice)
        return before

    def _undo(self, sending: int, receiving: dict[int, int]) -> None:
        _, number, host = self.path.pop()
        self.remaining[number] += 1
        self._add_load(number, self.kinds[number].duration)
        self.sending[host] = sending
        self.receiving.update(receiving)

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
        if end >= self.best_makespan:
            return
        jobs = [iter(kind.jobs) for kind in self.kinds]
        self.best, self.best_makespan = [(next(jobs[number]), host) for _, number, host in self.path], end
