"""Hardware queues of a job's GPUs: the replay of queued operations, which finds deadlocks. No torch here.

A GPU executes the streams of a process in a few hardware queues. Streams that share a queue wait for each other: an
operation begins when all operations that the host has put into the queue earlier have ended.

- The record of an event stands for the computation before it, and ends at once.
- The wait for an event ends after the record of the event.
- A collective, or a batch of messages, ends when all its participants have begun it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

COMPUTE, NORMAL, HIGH = "compute", "normal", "high"


class Stream(NamedTuple):
    """A stream of a rank."""

    name: str  # the stream's purpose
    pool: str  # COMPUTE for the stream of the computation; torch takes all other streams from a pool for each priority
    index: int  # in the pool


class Record(NamedTuple):
    """The record of the event with this number. ``name`` describes the work before it."""

    stream: Stream
    event: int
    name: str

    def __str__(self) -> str:
        return f"record of {self.name}"


class Wait(NamedTuple):
    """A stream's wait for the event with this number. ``name`` describes the work before the event."""

    stream: Stream
    event: int
    name: str

    def __str__(self) -> str:
        return f"wait for {self.name}"


class Meeting(NamedTuple):
    """The number of participants of a collective or of a message, under a name that all participants know."""

    name: Hashable
    participants: int


class Exchange(NamedTuple):
    """A collective, which is one meeting, or a batch of messages, which is one meeting per message."""

    stream: Stream
    name: str
    meetings: tuple[Meeting, ...]

    def __str__(self) -> str:
        return self.name


Operation = Record | Wait | Exchange
QueueOf = Callable[[Stream], Hashable]  # returns the hardware queue of a stream
_Queue = tuple[int, Hashable]  # a rank and one of its hardware queues


class Blocked(NamedTuple):
    """The first operation of a hardware queue, which never ends."""

    rank: int
    queue: Hashable
    operation: Operation

    def __str__(self) -> str:
        return f"rank {self.rank}, queue {self.queue}, stream {self.operation.stream.name}: {self.operation}"


class Deadlock(Exception):
    """Hardware queues that wait for each other.

    ``cycle``: their first operations. Each waits for the queue of the next operation, the last one for the first one.
    If the last operation waits for an operation that no rank queues, there is no cycle, and ``missing`` is its name.
    """

    def __init__(self, cycle: Sequence[Blocked], missing: Hashable = None):
        self.cycle, self.missing = cycle, missing
        lines = [str(blocked) for blocked in cycle]
        super().__init__("\n".join([*lines, f"no rank queues {missing}"] if missing else lines))


class Replay:
    """A job whose hosts have queued all operations: ``ranks`` has those of each rank, in the order of its host.

    By default a GPU has one queue. If it does not deadlock, no number of queues does: further queues only remove waits,
    because the host puts operations into all queues in one order.
    """

    def __init__(self, ranks: Sequence[Sequence[Operation]], queue_of: QueueOf = lambda stream: 0):
        self._queues: defaultdict[_Queue, list[Operation]] = defaultdict(list)
        for rank, operations in enumerate(ranks):
            queues = {operation.stream: queue_of(operation.stream) for operation in operations}
            for operation in operations:
                self._queues[rank, queues[operation.stream]].append(operation)
        self._position = dict.fromkeys(self._queues, 0)  # the number of operations that have ended
        self._recorded: set[tuple[int, int]] = set()  # events, by rank
        self._arrived: Counter[Hashable] = Counter()  # participants, by meeting
        self._begun: set[tuple[_Queue, int]] = set()  # exchanges
        self._waiting: defaultdict[Hashable, list[_Queue]] = defaultdict(list)  # by event or meeting

    def run(self) -> None:
        """Execute all operations. Raises Deadlock if some never end."""
        runnable = list(self._queues)
        while runnable:
            runnable += self._advance(runnable.pop())
        blocked = {queue: place for queue, place in self._position.items() if place < len(self._queues[queue])}
        if blocked:
            raise self._deadlock(blocked)

    def _advance(self, queue: _Queue) -> Iterator[_Queue]:
        """Execute operations of a queue until one does not end, and yield the queues that need not wait any longer."""
        operations = self._queues[queue]
        while (place := self._position[queue]) < len(operations):
            operation = operations[place]
            if isinstance(operation, Record):
                self._recorded.add((queue[0], operation.event))
                yield from self._waiting.pop((queue[0], operation.event), ())
            elif isinstance(operation, Exchange) and (queue, place) not in self._begun:
                self._begun.add((queue, place))
                for meeting in operation.meetings:
                    self._arrived[meeting.name] += 1
                    if self._arrived[meeting.name] == meeting.participants:
                        yield from self._waiting.pop(meeting.name, ())
            if (awaited := self._awaited(queue[0], operation)) is not None:
                self._waiting[awaited].append(queue)
                return
            self._position[queue] += 1

    def _awaited(self, rank: int, operation: Operation) -> Hashable | None:
        """Return the event or the meeting that the first operation of a queue waits for, or None if it ends."""
        if isinstance(operation, Wait):
            event = rank, operation.event
            return None if event in self._recorded else event
        if isinstance(operation, Exchange):
            for meeting in operation.meetings:
                if self._arrived[meeting.name] < meeting.participants:
                    return meeting.name
        return None

    def _deadlock(self, blocked: dict[_Queue, int]) -> Deadlock:
        later: dict[Hashable, _Queue] = {}  # queues with operations that cannot begin, by event or meeting
        for queue, place in blocked.items():
            for operation in self._queues[queue][place + 1 :]:
                if isinstance(operation, Record):
                    later[queue[0], operation.event] = queue
                elif isinstance(operation, Exchange):
                    later |= dict.fromkeys((meeting.name for meeting in operation.meetings), queue)
        chain: dict[_Queue, Blocked] = {}
        queue: _Queue | None = next(iter(blocked))
        while queue is not None and queue not in chain:
            operation = self._queues[queue][blocked[queue]]
            chain[queue] = Blocked(*queue, operation)
            awaited = self._awaited(queue[0], operation)
            queue = later.get(awaited)
        if queue is None:
            return Deadlock([*chain.values()], awaited)
        return Deadlock([*chain.values()][list(chain).index(queue) :])
