"""What one rank does to execute a plan: messages, in rounds. A value, made without torch.

All ranks go through the sends of a plan in its order, and through a send round by round. The messages of a round need
only what earlier rounds brought. A message is in rounds of the same moment on both of its ends, so even where a round
ends only once all its messages have met their other ends, as in NCCL, no ranks wait for each other in a circle.
"""

from dataclasses import dataclass
from typing import NamedTuple

from gpt4d.parallel.layout import Layout
from gpt4d.parallel.resharding.mesh import Tile
from gpt4d.parallel.resharding.planning import Plan, Send

_CHUNKS = 128  # at the most: with A receiving hosts a chain takes A/128 longer than the link alone would
CHUNK_BYTES = {"cpu": 128 * 1024, "cuda": 4 * 1024 * 1024}  # at the least: smaller ones cost more to start than to send


class Message(NamedTuple):
    peer: int  # a rank
    start: int  # elements of the tile, counted in row-major order
    stop: int


class Round(NamedTuple):
    """What a rank sends and receives at one moment."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


@dataclass(frozen=True)
class Step:
    """One send of the plan, as one of its ranks sees it."""

    task: int  # which unit task
    place: tuple[slice, ...]  # of the tile, in this rank's part of the tensor
    shape: tuple[int, ...]
    sending: bool  # this rank has the tile; the others receive it, and hand it on
    rounds: tuple[Round, ...]
    turn_from: int | None = None  # the rank that sends before this one through the same host's link
    turn_to: int | None = None  # the one that sends after it


@dataclass(frozen=True)
class Program:
    """All that one rank does. ``shape`` is its part's; of the tensor it gives or, if ``receives``, the one it gets."""

    shape: tuple[int, ...]
    receives: bool
    steps: tuple[Step, ...]

    @property
    def sent_elements(self) -> int:
        return sum(m.stop - m.start for step in self.steps for one in step.rounds for m in one.sends)


def program(plan: Plan, rank: int, element_bytes: int, device: str = "cpu") -> Program:
    """The part of ``rank``, a device of one of the two meshes, in a plan for a tensor of such elements."""
    receives = rank in plan.destination_mesh.devices
    mesh, layout = (plan.destination_mesh, plan.destination) if receives else (plan.source_mesh, plan.source)
    own = mesh.tiles(plan.shape, layout)[rank]
    steps, turns = [], {} if receives else _turns(plan)
    for number, send in enumerate(plan.sends):
        if rank == send.sender or rank in send.receivers:
            rounds = _rounds(plan, send, rank, CHUNK_BYTES[device] // element_bytes)
            turn = turns.get(number, (None, None))
            steps.append(Step(send.task, _place(send.tile, own), _extents(send.tile), not receives, rounds, *turn))
    return Program(_extents(own), receives, tuple(steps))


def _turns(plan: Plan) -> dict[int, tuple[int | None, int | None]]:
    """For each send over a link the ranks that send before and after it from the same host, unless they are its own.

    The sends of one device follow each other. Those of several would share the link: each would take longer than
    planned, and who waits for the first of them would wait for all.
    """
    by_host: dict[int, list[int]] = {}
    for number, send in enumerate(plan.sends):
        if send.stop > send.start:
            by_host.setdefault(send.sender_host, []).append(number)
    turns = {}
    for numbers in by_host.values():
        senders = [None, *(plan.sends[number].sender for number in numbers), None]
        for number, before, own, after in zip(numbers, senders, senders[1:], senders[2:], strict=False):
            turns[number] = None if before == own else before, None if after == own else after
    return turns


def _rounds(plan: Plan, send: Send, rank: int, least: int) -> tuple[Round, ...]:
    """The messages of one rank in one send. No chunk has fewer than ``least`` elements."""
    elements = plan.tasks[send.task].elements
    if plan.strategy.endswith("allgather"):
        return _all_gather(send, rank, elements)
    if plan.strategy == "signal":
        return _chain(send, rank, [(0, 1)])
    # Even to a single receiver: who expects one message of a send ahead of its time should not expect all of it.
    return _chain(send, rank, _parts(elements, max(1, min(_CHUNKS, elements // max(1, least)))))


def _chain(send: Send, rank: int, chunks: list[tuple[int, int]]) -> tuple[Round, ...]:
    """Each chunk goes from device to device, the next one right behind it (arXiv 2211.05322, §3.1)."""
    chain = (send.sender, *send.receivers)
    place = chain.index(rank)
    found = []
    for moment in range(len(chunks) + len(chain)):
        sends, receives = (), ()
        if place + 1 < len(chain) and 0 <= moment - place < len(chunks):
            sends = (Message(chain[place + 1], *chunks[moment - place]),)
        if place and 0 <= moment - place + 1 < len(chunks):
            receives = (Message(chain[place - 1], *chunks[moment - place + 1]),)
        if sends or receives:
            found.append(Round(sends, receives))
    return tuple(found)


def _all_gather(send: Send, rank: int, elements: int) -> tuple[Round, ...]:
    """Each receiver is sent a part, then all parts go round in a ring."""
    ring, parts = send.receivers, _parts(elements, len(send.receivers))
    if rank == send.sender:
        messages = (Message(device, *part) for device, part in zip(ring, parts, strict=True))
        return (Round(tuple(m for m in messages if m.start < m.stop), ()),)
    place, size = ring.index(rank), len(ring)
    found = [((), [(send.sender, place)])]
    for moment in range(size - 1):
        to, since = ring[(place + 1) % size], ring[place - 1]
        found.append(([(to, (place - moment) % size)], [(since, (place - moment - 1) % size)]))
    messages = [tuple(tuple(Message(peer, *parts[i]) for peer, i in side) for side in one) for one in found]
    return tuple(Round(*(tuple(m for m in side if m.start < m.stop) for side in one)) for one in messages)


def _parts(elements: int, count: int) -> list[tuple[int, int]]:
    """Near-equal, the longer ones first, as everywhere."""
    return [Layout(("part",)).tile((elements,), {"part": count}, {"part": index})[0] for index in range(count)]


def _place(tile: Tile, own: Tile) -> tuple[slice, ...]:
    return tuple(slice(start - a, stop - a) for (start, stop), (a, _) in zip(tile, own, strict=True))


def _extents(tile: Tile) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in tile)
