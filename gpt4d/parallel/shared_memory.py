"""Collectives between CPU ranks of one host through shared memory.

In a collective every rank copies its tensor into its slot and notifies the others; once all have done so, each computes
its result from all slots. Sockets carry the notifications only. The data is copied twice, where a TCP stack copies it
many times, and only the waiting rank itself computes.
"""

import mmap
import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

SLOT_BYTES = 64 << 20  # the largest tensor; only the part of a slot that is written takes memory
_MAX_AHEAD = 2  # collectives by which a rank may be ahead of the others, and may have in flight
_SLOTS = 2 * _MAX_AHEAD
_CONNECT_S = 60.0  # timeout for the ranks of a host to connect
_TIMEOUT_S = 30 * 60  # a rank that is silent for longer is an error, as with gloo

Combine = Callable[[torch.Tensor], torch.Tensor]  # computes the result from all ranks' tensors, stacked along dim 0


class SharedMemoryCollective:
    """A collective in flight. ``wait`` returns its result, the same at each call."""

    def __init__(self, memory: "SharedMemory", number: int, like: torch.Tensor, combine: Combine):
        self.memory, self.number, self.like, self.combine = memory, number, like, combine
        self.result: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        if self.result is None:
            self.memory.wait_for_peers(self.number)
            self.result = self.combine(self.memory.slots(self.number, self.like))
            del self.combine, self.like
            self.memory.in_flight.remove(self)  # or the memory object would keep the result alive
        return self.result


class SharedMemory:
    """Memory shared by the ranks of a group on one host. All of them post the same collectives in the same order.

    Args:
        index: of this rank on its host.
        buffer: the memory.
        peers: sockets to the others, by their index.
        columns: for each index on a host, the group's ranks that have it, one on each host, in ascending order.
    """

    def __init__(
        self, index: int, buffer: mmap.mmap, peers: dict[int, socket.socket], columns: Sequence[tuple[int, ...]]
    ):
        self.index, self.peers, self.columns = index, peers, columns
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
        # A slot is reused after _SLOTS collectives, when all ranks must have read it. They have once they posted the
        # collective _MAX_AHEAD back, because a rank posts one only after it has finished those _MAX_AHEAD older.
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


def connect(group: dist.ProcessGroup) -> tuple[SharedMemory | None, dist.ProcessGroup | None]:
    """Create memory shared by the ranks of ``group`` on this host, and the group that joins the hosts.

    All ranks of ``group`` must call this. Containers count as separate hosts: a host is identified by its running
    kernel and its network namespace.

    Returns:
        The shared memory: None if this system has none, if every rank is alone on its host, or if the hosts have
        unequal numbers of ranks. The group of the ranks with this rank's index on each host: None if there is no shared
        memory or only one host.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    listener, own_location = _listen(size)
    locations: list = [None] * size
    dist.all_gather_object(locations, own_location, group=group)
    with listener or nullcontext():
        if listener is None or own_location is None or None in locations:
            return None, None
        hosts: dict = {}
        for other, (host, _) in enumerate(locations):
            hosts.setdefault(host, []).append(other)
        local = hosts[own_location[0]]
        if len(local) == 1 or len(local) * len(hosts) != size or len({len(ranks) for ranks in hosts.values()}) > 1:
            return None, None
        index = local.index(rank)
        columns = [tuple(sorted(column)) for column in zip(*hosts.values(), strict=True)]
        memory = _share_memory(listener, [locations[other][1] for other in local], index, columns)
    inter_host_group = None
    if len(hosts) > 1:
        ranks = [dist.get_global_rank(group, other) for other in columns[index]]
        inter_host_group = dist.new_group(ranks, use_local_synchronization=True)
    return memory, inter_host_group


def _share_memory(
    listener: socket.socket, addresses: list[str], index: int, columns: Sequence[tuple[int, ...]]
) -> SharedMemory:
    """Connect the ranks of a host, this one being ``index``, and map the memory file that rank 0 of them creates."""
    peers, size = {}, len(addresses)
    for other, address in enumerate(addresses[:index]):
        peers[other] = socket.socket(socket.AF_UNIX)
        peers[other].connect(address)
        peers[other].send(struct.pack("i", index))
    for _ in range(index + 1, size):
        connection = _accept_from_own_user(listener)
        peers[struct.unpack("i", connection.recv(4))[0]] = connection
    length = _SLOTS * size * SLOT_BYTES
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
    return SharedMemory(index, buffer, dict(sorted(peers.items())), columns)


def _listen(backlog: int) -> tuple[socket.socket | None, tuple | None]:
    """Open a socket for peers on this host and return it with its location (host, address), or Nones without memfd."""
    if not hasattr(os, "memfd_create"):
        return None, None
    with open("/proc/sys/kernel/random/boot_id") as file:
        host = file.read(), os.readlink("/proc/self/ns/net")
    address = f"\0gpt4d-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(backlog)
    listener.settimeout(_CONNECT_S)
    return listener, (host, address)


def _accept_from_own_user(listener: socket.socket) -> socket.socket:
    while True:
        connection, _ = listener.accept()
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user == os.getuid():
            return connection
        connection.close()
