"""Collectives between CPU ranks of one host through shared memory.

In a collective every rank copies its tensor into its slot and notifies its peers. Once all ranks have done so, each
rank computes its result from all slots. Sockets carry the notifications only. The data is copied twice, where a TCP
stack copies it many times, and only the waiting rank itself computes.
"""

import mmap
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from gpt4d.parallel.comm.cpu.gloo import GlooTransport
from gpt4d.parallel.comm.pending import MAX, SUM, Pending
from gpt4d.parallel.comm.transport import Transport

SLOT_BYTES = 64 << 20  # the largest tensor; only the part of a slot that is written takes memory
_MAX_AHEAD = 2  # collectives by which a rank may be ahead of its peers, and may have in flight
_SLOTS = 2 * _MAX_AHEAD
_TIMEOUT_S = 30 * 60  # a rank that is silent for longer is an error, as with gloo

_COMBINE: dict[str, Callable[..., torch.Tensor]] = {SUM: torch.add, MAX: torch.maximum}

Combine = Callable[[torch.Tensor], torch.Tensor]  # computes the result from all ranks' tensors, stacked along dim 0


class SharedMemoryCollective:
    """A collective in flight. ``wait`` returns its result, the same at each call."""

    def __init__(self, memory: "SharedMemory", number: int, like: torch.Tensor, combine: Combine):
        self.memory, self.number, self.like, self.combine = memory, number, like, combine
        self.result: torch.Tensor | None = None
        self._record: Callable[[float], None] | None = None

    def on_end(self, record: Callable[[float], None]) -> None:
        self._record = record  # the collective runs until this rank waits for it

    def wait(self) -> torch.Tensor:
        if self.result is None:
            self.result = self.receive()
            del self.combine, self.like
            self.memory.in_flight.remove(self)  # else the memory object keeps the result alive
            if self._record:
                self._record(time.perf_counter())
        return self.result

    def receive(self) -> torch.Tensor:
        """Wait for the peers and return the combination of all ranks' tensors."""
        self.memory.wait_for_peers(self.number)
        return self.combine(self.memory.slots(self.number, self.like))


class SharedMemory:
    """Memory shared by the ranks of a group on one host. All of them post the same collectives in the same order.

    Args:
        index: index of this rank on its host.
        buffer: the memory.
        peers: sockets to the peers, by index.
    """

    def __init__(self, index: int, buffer: mmap.mmap, peers: dict[int, socket.socket]):
        self.index, self.peers = index, peers
        self.size = len(peers) + 1
        self.bytes = torch.frombuffer(buffer, dtype=torch.uint8).view(_SLOTS, self.size, SLOT_BYTES)
        self.posted = 0
        self.received = dict.fromkeys(peers, 0)  # number of collectives that each peer has posted
        self.in_flight: deque[SharedMemoryCollective] = deque()

    def post(self, tensor: torch.Tensor, combine: Combine) -> SharedMemoryCollective:
        """Start a collective.

        Args:
            tensor: contiguous, of the same shape on all ranks, at most ``SLOT_BYTES``.
            combine: computes the result.
        """
        self.posted += 1
        number = self.posted
        # A slot is reused after _SLOTS collectives, when all ranks must have read it. A rank that has posted
        # collective number - _MAX_AHEAD has read all up to number - _SLOTS, because it finishes them first.
        while self.in_flight and self.in_flight[0].number <= number - _MAX_AHEAD:
            self.in_flight[0].wait()
        self.wait_for_peers(number - _MAX_AHEAD)
        self.slots(number, tensor)[self.index].copy_(tensor)
        for index, peer in self.peers.items():
            with _name_lost_peer(index):
                peer.send(b"\0")
        collective = SharedMemoryCollective(self, number, tensor, combine)
        self.in_flight.append(collective)
        return collective

    def slots(self, number: int, like: torch.Tensor) -> torch.Tensor:
        """Return the slots of collective ``number``: [ranks, *shape of ``like``]."""
        return self.bytes[number % _SLOTS, :, : like.nbytes].view(like.dtype).unflatten(1, like.shape)

    def wait_for_peers(self, number: int) -> None:
        """Return when all peers have posted collective ``number``. Raises RuntimeError if a peer has exited."""
        for index, peer in self.peers.items():
            while self.received[index] < number:
                with _name_lost_peer(index):
                    notifications = peer.recv(_SLOTS)
                    if not notifications:
                        raise ConnectionResetError
                self.received[index] += len(notifications)


class SharedMemoryTransport(Transport):
    """Exchanges tensors through the memory of a host that has all ranks of the axis.

    Args:
        memory: the memory.
        gloo: sends the tensors that are larger than a slot of the memory.
    """

    copies_at_start = True

    def __init__(self, memory: SharedMemory, gloo: GlooTransport):
        self.memory, self.gloo = memory, gloo

    def start_all_reduce(self, tensor: torch.Tensor, op: str) -> Pending:
        if not fits(tensor):
            return self.gloo.start_all_reduce(tensor, op)
        combine = _COMBINE[op]

        def reduce(slots: torch.Tensor) -> torch.Tensor:
            combine(slots[0], slots[1], out=tensor)  # in the order of the ranks: the same bits on all of them
            for other in slots[2:]:
                combine(tensor, other, out=tensor)
            return tensor

        return self._post(tensor, reduce)

    def start_all_gather(self, shard: torch.Tensor) -> Pending:
        if not fits(shard):
            return self.gloo.start_all_gather(shard)
        return self._post(shard, lambda slots: torch.cat(slots.unbind()))

    def start_reduce_scatter(self, full: torch.Tensor) -> Pending:
        if not fits(full):
            return self.gloo.start_reduce_scatter(full)
        size, index = self.memory.size, self.memory.index
        return self._post(full, lambda slots: slots.chunk(size, 1)[index].sum(0))

    def start_shift(self, tensor: torch.Tensor) -> Pending:
        if not fits(tensor):
            return self.gloo.start_shift(tensor)
        previous = self.memory.index - 1
        return self._post(tensor, lambda slots: slots[previous].clone())

    def start_all_to_all(self, sent: torch.Tensor, sent_rows: Sequence[int], received_rows: Sequence[int]) -> Pending:
        return self.gloo.start_all_to_all(sent, sent_rows, received_rows)

    def _post(self, tensor: torch.Tensor, combine: Combine) -> Pending:
        collective = self.memory.post(tensor, combine)
        return Pending(tensor, collective, lambda _: collective.wait())


def fits(tensor: torch.Tensor) -> bool:
    """Return whether a slot of the memory has room for ``tensor``."""
    return tensor.nbytes <= SLOT_BYTES


@contextmanager
def _name_lost_peer(index: int) -> Iterator[None]:
    try:
        yield
    except ConnectionError:
        raise RuntimeError(f"the rank at index {index} of this host's group has exited") from None
    except BlockingIOError:
        raise RuntimeError(
            f"the rank at index {index} of this host's group was silent for {_TIMEOUT_S // 60} minutes"
        ) from None


def share_memory(index: int, peers: dict[int, socket.socket]) -> SharedMemory:
    """Map the memory file that the first rank of a host creates and sends to its peers."""
    length = _SLOTS * (len(peers) + 1) * SLOT_BYTES
    if index == 0:
        file = os.memfd_create("gpt4d")
        os.ftruncate(file, length)
        for peer in peers.values():
            socket.send_fds(peer, [b"\0"], [file])
    else:
        _, (file, *_), *_ = socket.recv_fds(peers[0], 1, 1)
    for peer in peers.values():
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _TIMEOUT_S, 0))
    buffer = mmap.mmap(file, length)
    os.close(file)
    return SharedMemory(index, buffer, dict(sorted(peers.items())))
