"""The messages with which one rank executes a plan, in rounds. They are a value, computed without torch.

All ranks execute the sends of a plan in its order, and each send round by round. The messages of a round need only data
from earlier rounds. Both ends of a message have it in the round of the same time step. With NCCL, a round ends only
when the peers of all its messages have joined. Even then, ranks never wait for each other in a cycle.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpt4d.parallel.layout import CHUNK, Layout
from gpt4d.parallel.resharding.mesh import Tile
from gpt4d.parallel.resharding.plan import ReshardingPlan, Send

_MAX_CHUNKS = 128  # with 128 chunks, a chain to A receiving hosts takes A/128 longer than one link
# Smaller chunks cost more to start than to send. On a GPU a round takes about 120 us of Python and of a kernel's start.
MIN_CHUNK_BYTES = {"cpu": 128 * 1024, "cuda": 16 * 1024 * 1024}


class PeerMessage(NamedTuple):
    """A message to or from one peer: a range of elements of the tile."""

    peer: int  # a rank
    start: int  # elements of the tile in row-major order
    stop: int


class Round(NamedTuple):
    """The messages that a rank sends and receives in one time step."""

    sends: tuple[PeerMessage, ...]
    receives: tuple[PeerMessage, ...]


@dataclass(frozen=True)
class SendStep:
    """One send of the plan, as one of its ranks executes it."""

    task: int  # index of the unit task
    slices: tuple[slice, ...]  # the tile in this rank's local tensor
    shape: tuple[int, ...]  # shape of the tile
    sending: bool  # this rank holds the tile; otherwise it receives and forwards the tile
    rounds: tuple[Round, ...]
    previous_sender: int | None = None  # the rank that sends before this rank over the same host's link
    next_sender: int | None = None  # the rank that sends after this rank over the same host's link


@dataclass(frozen=True)
class RankProgram:
    """All steps of one rank. ``shape``: shape of its local tensor, the result if ``receives``, else the input."""

    shape: tuple[int, ...]
    receives: bool
    steps: tuple[SendStep, ...]


def rank_program(plan: ReshardingPlan, rank: int, element_bytes: int, device_type: str = "cpu") -> RankProgram:
    """Return the program of ``rank``, a device of either mesh, for elements of ``element_bytes``."""
    receives = rank in plan.destination_mesh.devices
    mesh, layout = (plan.destination_mesh, plan.destination) if receives else (plan.source_mesh, plan.source)
    own = [mesh.tiles(plan.shape, layout, chunk)[rank] for chunk in mesh.chunks_of(layout)]
    chunked = next((dim for dim, axes in enumerate(layout.dims) if CHUNK in axes), 0)  # dim of concatenation
    steps, neighbors = [], {} if receives else _sender_neighbors(plan)
    for number, send in enumerate(plan.sends):
        if rank == send.sender or rank in send.receivers:
            nbytes = plan.tasks[send.task].elements * element_bytes
            num_chunks = _num_chunks(nbytes, len(send.receivers), device_type)
            rounds = chain(send, rank, plan.tasks[send.task].elements, num_chunks)
            adjacent = neighbors.get(number, (None, None))
            slices = _local_slices(send.tile, own, chunked)
            steps.append(SendStep(send.task, slices, _tile_shape(send.tile), not receives, rounds, *adjacent))
    shape = list(_tile_shape(own[0]))
    shape[chunked] = sum(_tile_shape(tile)[chunked] for tile in own)
    return RankProgram(tuple(shape), receives, tuple(steps))


def _sender_neighbors(plan: ReshardingPlan) -> dict[int, tuple[int | None, int | None]]:
    """Return, for each send over a link, the ranks that send before and after it from the same host.

    None stands for the sending rank itself, whose sends are sequential without a signal. Concurrent sends of several
    devices share the link. Each then takes longer than planned, and the receivers of the first send wait for all sends.
    """
    by_host: dict[int, list[int]] = {}
    for number, send in enumerate(plan.sends):
        if send.stop > send.start:
            by_host.setdefault(send.sender_host, []).append(number)
    neighbors = {}
    for send_indices in by_host.values():
        senders = [None, *(plan.sends[index].sender for index in send_indices), None]
        for index, before, own, after in zip(send_indices, senders, senders[1:], senders[2:], strict=False):
            neighbors[index] = None if before == own else before, None if after == own else after
    return neighbors


def _num_chunks(nbytes: int, receivers: int, device_type: str) -> int:
    """Return the number of chunks in which a tile of ``nbytes`` travels along a chain of receivers.

    A single receiver on a GPU gets the tile in one message, because it forwards nothing. On a CPU it gets the tile in
    chunks, because a receive that is posted in advance must not cover the complete send.
    """
    if receivers == 1 and device_type != "cpu":
        return 1
    return max(1, min(_MAX_CHUNKS, nbytes // MIN_CHUNK_BYTES[device_type]))


def chain(send: Send, rank: int, elements: int, num_chunks: int) -> tuple[Round, ...]:
    """Return one rank's rounds of a send, whose chunks pass from device to device (arXiv 2211.05322, §3.1)."""
    ranks, chunks = (send.sender, *send.receivers), split(elements, num_chunks)
    place = ranks.index(rank)
    rounds = []
    for time_step in range(len(chunks) + len(ranks)):
        sends, receives = [], []
        if place + 1 < len(ranks) and 0 <= time_step - place < len(chunks):
            sends.append(PeerMessage(ranks[place + 1], *chunks[time_step - place]))
        if place and 0 <= time_step - place + 1 < len(chunks):
            receives.append(PeerMessage(ranks[place - 1], *chunks[time_step - place + 1]))
        if sends or receives:
            rounds.append(Round(tuple(sends), tuple(receives)))
    return tuple(rounds)


def split(elements: int, count: int) -> list[tuple[int, int]]:
    """Split a range into ``count`` near-equal parts, longer parts first, with the rule of ``Layout.tile``."""
    return [Layout(("part",)).tile((elements,), {"part": count}, {"part": index})[0] for index in range(count)]


def _local_slices(tile: Tile, own: Sequence[Tile], chunked: int) -> tuple[slice, ...]:
    """Return the slices of a tile in a local tensor, the concatenation of the tiles ``own`` along dim ``chunked``."""
    before = 0
    for part in own:
        if all(a <= start and stop <= b for (start, stop), (a, b) in zip(tile, part, strict=True)):
            offsets = [a - (before if dim == chunked else 0) for dim, (a, _) in enumerate(part)]
            return tuple(slice(start - o, stop - o) for (start, stop), o in zip(tile, offsets, strict=True))
        before += part[chunked][1] - part[chunked][0]
    raise AssertionError(f"{tile} is not inside one of {own}")


def _tile_shape(tile: Tile) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in tile)
