"""The search for an order of least makespan: at random and exhaustively (arXiv 2211.05322, §3.2).

Both give the same answer at every call and on every rank: what limits them is not time but a count of choices looked
at. Jobs between the same hosts that last equally long are of one *kind*: which of them goes first does not matter.
"""

import random
from dataclasses import dataclass, field

from gpt4d.parallel.resharding.bounds import lower_bound, sender_sets
from gpt4d.parallel.resharding.ordering import Sequence, load_balance, makespan, naive
from gpt4d.parallel.resharding.strategies import Job

# Choices looked at for an effort of 1: a few microseconds each.
_GREEDY_CHOICES = 100_000
_DFS_CHOICES = 60_000
_ORDERS = 8  # random ones, for each set of jobs that start at once


@dataclass
class Kind:
    """Jobs that are alike."""

    sender_hosts: tuple[int, ...]
    receiver_hosts: tuple[int, ...]
    duration: int
    jobs: list[int] = field(default_factory=list)


def _kinds(jobs: list[Job]) -> list[Kind]:
    found: dict[tuple, Kind] = {}
    for number, job in enumerate(jobs):
        key = tuple(sorted(job.sender_hosts)), tuple(sorted(job.receiver_hosts)), job.duration
        found.setdefault(key, Kind(*key)).jobs.append(number)
    return list(found.values())


def greedy(jobs: list[Job], seed: int, effort: int = 1) -> Sequence:
    """Whenever hosts are free, starts the jobs that, of all sets found over random orders, matter most.

    What matters is how much the hosts of a job have yet to send and to receive: those with the most must never rest.
    Begins anew, with other orders, until the lower bound is reached or the choices are used up.
    """
    draw, bound = random.Random(seed), lower_bound(jobs)
    best, reached, left = None, 0, effort * _GREEDY_CHOICES
    while best is None or (left > 0 and reached > bound):
        run = _Greedy(jobs, draw)
        sequence = run.sequence()
        left -= run.looked_at
        if best is None or makespan(jobs, sequence) < reached:
            best, reached = sequence, makespan(jobs, sequence)
    return best


class _Greedy:
    """One run from the first job to the last."""

    def __init__(self, jobs: list[Job], draw: random.Random):
        self.draw, self.looked_at, self.now = draw, 0, 0
        self.kinds = [(kind, list(kind.jobs)) for kind in _kinds(jobs)]
        self.sending: dict[int, int] = {}  # until when
        self.receiving: dict[int, int] = {}
        self.to_send: dict[int, float] = {}  # how much each host has yet to
        self.to_receive: dict[int, int] = {}
        for job in jobs:
            self._expect(job, 1)

    def _expect(self, job: Job | Kind, times: int) -> None:
        for host in job.sender_hosts:
            share = times * job.duration / len(job.sender_hosts)
            self.to_send[host] = self.to_send.get(host, 0) + share
        for host in job.receiver_hosts:
            self.to_receive[host] = self.to_receive.get(host, 0) + times * job.duration

    def sequence(self) -> Sequence:
        sequence: Sequence = []
        while self.kinds:
            ready = [entry for entry in self.kinds if self._can_start(entry[0])]
            for (kind, left), host in self._best_set(ready):
                sequence.append((left.pop(0), host))
                self._expect(kind, -1)
                self.sending[host] = self.now + kind.duration
                self.receiving.update(dict.fromkeys(kind.receiver_hosts, self.now + kind.duration))
            self.kinds = [entry for entry in self.kinds if entry[1]]
            self.now = min((t for t in (*self.sending.values(), *self.receiving.values()) if t > self.now), default=0)
        return sequence

    def _can_start(self, kind: Kind) -> bool:
        self.looked_at += 1
        return any(self.sending.get(host, 0) <= self.now for host in kind.sender_hosts) and all(
            self.receiving.get(host, 0) <= self.now for host in kind.receiver_hosts
        )

    def _best_set(self, ready: list[tuple[Kind, list[int]]]) -> list[tuple[tuple[Kind, list[int]], int]]:
        best, weight = [], -1.0
        for attempt in range(_ORDERS if len(ready) > 1 else 1):
            if attempt == 0:
                order = sorted(ready, key=lambda entry: -self._weight(entry[0]))
            else:
                order = self.draw.sample(ready, len(ready))
            found, total = self._maximal_set(order)
            if total > weight:
                best, weight = found, total
        return best

    def _maximal_set(self, order: list[tuple[Kind, list[int]]]):
        """Jobs that do not conflict, taken as they come, and how much they matter together."""
        sending, receiving, found, total = set(), set(), [], 0.0
        for entry in order:
            kind = entry[0]
            self.looked_at += 1
            if not receiving.isdisjoint(kind.receiver_hosts):
                continue
            free = [h for h in kind.sender_hosts if h not in sending and self.sending.get(h, 0) <= self.now]
            if free:
                host = min(free, key=lambda host: (self.to_send[host], host))  # the others have jobs of their own
                found.append((entry, host))
                sending.add(host)
                receiving.update(kind.receiver_hosts)
                total += self.to_send[host] + sum(self.to_receive[h] for h in kind.receiver_hosts)
        return found, total

    def _weight(self, kind: Kind) -> float:
        senders = max(self.to_send[host] for host in kind.sender_hosts)
        return senders + sum(self.to_receive[host] for host in kind.receiver_hosts)


def ensemble(jobs: list[Job], seed: int, effort: int = 1) -> tuple[Sequence, bool]:
    """The better of ``greedy`` and ``dfs``, and whether there is none better than it."""
    return dfs(jobs, effort, greedy(jobs, seed, effort))


def dfs(jobs: list[Job], effort: int = 1, known: Sequence | None = None) -> tuple[Sequence, bool]:
    """A depth-first search with pruning; whether it went through the whole tree, so that there is no better sequence.

    It looks for what is better than ``known`` and than what the simple algorithms find.
    """
    simple = [naive(jobs), load_balance(jobs)]
    known = min(simple if known is None else [known, *simple], key=lambda sequence: makespan(jobs, sequence))
    search = _DepthFirst(jobs, known, effort * _DFS_CHOICES)
    complete = search.run()
    return search.best, complete


class _DepthFirst:
    """The tree of sequences whose jobs start one not before the other: each schedule is met once.

    A branch is left if a job in it could be over before the next one starts: it would go first at no cost. And if its
    lower bound is no better than the best sequence known.
    """

    def __init__(self, jobs: list[Job], known: Sequence, choices: int):
        self.kinds, self.choices = _kinds(jobs), choices
        self.left = [len(kind.jobs) for kind in self.kinds]
        self.sending = {host: 0 for kind in self.kinds for host in kind.sender_hosts}  # until when
        self.receiving = {host: 0 for kind in self.kinds for host in kind.receiver_hosts}
        self.sets = sender_sets(kind.sender_hosts for kind in self.kinds)
        self.sets_of = [[i for i, s in enumerate(self.sets) if s.issuperset(k.sender_hosts)] for k in self.kinds]
        self.to_send, self.to_receive = [0] * len(self.sets), dict.fromkeys(self.receiving, 0)
        for number, kind in enumerate(self.kinds):
            self._leave(number, len(kind.jobs) * kind.duration)
        # What a bound takes, in choices, so that the count is one of time.
        self.bound_choices = (len(self.receiving) + sum(map(len, self.sets))) // 16
        self.bound, self.count = lower_bound(jobs), len(jobs)
        self.path: list[tuple[int, int, int]] = []  # start, kind, sender host
        self.best, self.reached = known, makespan(jobs, known)
        self.looked_at = 0

    def run(self) -> bool:
        """Goes through the tree; False if the choices were used up before. Its own stack: paths can be long."""
        stack = [iter(self._choices())]
        undo: list[tuple] = []
        while stack:
            if self.reached <= self.bound or self.looked_at > self.choices:
                return self.reached <= self.bound
            choice = next(stack[-1], None)
            if choice is None:
                stack.pop()
                if undo:
                    self._take_back(*undo.pop())
                continue
            undo.append(self._take(choice))
            if len(self.path) == self.count:
                self._note()
                self._take_back(*undo.pop())
            elif self._bound() >= self.reached:
                self._take_back(*undo.pop())
            else:
                stack.append(iter(self._choices()))
        return True

    def _choices(self) -> list[tuple[int, int, int]]:
        """(start, kind, sender host) of what may come next: first what can start first, then what lasts longest."""
        since = self.path[-1] if self.path else (0, -1, -1)
        found, first_over = [], None
        for number, kind in enumerate(self.kinds):
            if not self.left[number]:
                continue
            received = max(self.receiving[host] for host in kind.receiver_hosts)
            for host in kind.sender_hosts:
                self.looked_at += 1
                start = max(self.sending[host], received)
                over = start + kind.duration
                first_over = over if first_over is None else min(first_over, over)
                if (start, number, host) > since:
                    found.append((start, number, host))
        found = [choice for choice in found if choice[0] < first_over]
        return sorted(found, key=lambda choice: (choice[0], -self.kinds[choice[1]].duration, choice))

    def _take(self, choice: tuple[int, int, int]) -> tuple[int, dict[int, int]]:
        start, number, host = choice
        kind = self.kinds[number]
        before = self.sending[host], {receiver: self.receiving[receiver] for receiver in kind.receiver_hosts}
        self.left[number] -= 1
        self._leave(number, -kind.duration)
        self.sending[host] = start + kind.duration
        for receiver in kind.receiver_hosts:
            self.receiving[receiver] = start + kind.duration
        self.path.append(choice)
        return before

    def _take_back(self, sending: int, receiving: dict[int, int]) -> None:
        _, number, host = self.path.pop()
        self.left[number] += 1
        self._leave(number, self.kinds[number].duration)
        self.sending[host] = sending
        self.receiving.update(receiving)

    def _leave(self, number: int, more: int) -> None:
        """Of a kind's jobs so much more is left to send and to receive."""
        for place in self.sets_of[number]:
            self.to_send[place] += more
        for host in self.kinds[number].receiver_hosts:
            self.to_receive[host] += more

    def _bound(self) -> int:
        """Of every sequence that goes on from here: all that is left starts no earlier than the last job did."""
        self.looked_at += self.bound_choices
        since = self.path[-1][0]
        received = [max(self.receiving[host], since) + more for host, more in self.to_receive.items() if more]
        bound = max(received, default=0)
        for hosts, to_send in zip(self.sets, self.to_send, strict=True):
            if to_send:
                free = sum(max(self.sending[host], since) for host in hosts)
                bound = max(bound, -(-(free + to_send) // len(hosts)))
        return bound

    def _note(self) -> None:
        over = max(start + self.kinds[number].duration for start, number, _ in self.path)
        if over >= self.reached:
            return
        waiting = [iter(kind.jobs) for kind in self.kinds]
        self.best, self.reached = [(next(waiting[number]), host) for _, number, host in self.path], over
