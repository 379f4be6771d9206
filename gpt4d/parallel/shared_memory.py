"""Collectives between CPU ranks of one host, through memory that all of them see.

A collective is a message: every rank copies its tensor into its slot, tells the others, and once all have told, each
takes what it needs from all the slots. Sockets carry only the telling: two copies of the data in place of a TCP
stack's many, and nobody computes for it but the rank that waits.
"""

import mmap
import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

SLOT_BYTES = 64 << 20  # the largest message; only what is written of a slot takes memory
_AHEAD = 2  # messages that a rank may be ahead of the others, and may have open
_SLOTS = 2 * _AHEAD
_MEETING_S = 60.0  # for the ranks of a host to find each other
_TIMEOUT_S = 30 * 60  # then a silent rank is an error: as long as gloo waits


class Message:
    """One collective under way. After ``wait``, ``result`` is what it gave."""

    def __init__(self, memory: "SharedMemory", number: int, like: torch.Tensor, combine):
        self.memory, self.number, self.like, self.combine = memory, number, like, combine
        self.result: torch.Tensor | None = None

    def wait(self) -> None:
        if self.result is None:
            self.memory.await_others(self.number)
            self.result = self.combine(self.memory.slots(self.number, self.like))
            self.combine = self.like = None
            self.memory.open.remove(self)  # or the result would stay in memory as long as this


class SharedMemory:
    """What the ranks of a group on one host share. All of them post the same messages in the same order."""

    def __init__(self, index: int, buffer: mmap.mmap, others: dict[int, socket.socket]):
        self.index, self.others = index, others
        self.size = len(others) + 1
        self.bytes = torch.frombuffer(buffer, dtype=torch.uint8).view(_SLOTS, self.size, SLOT_BYTES)
        self.posted = 0
        self.heard = dict.fromkeys(others, 0)  # messages that each of the others has posted
        self.open: deque[Message] = deque()

    def post(self, tensor: torch.Tensor, combine: Callable[[torch.Tensor], torch.Tensor]) -> Message:
        """Starts a collective of contiguous ``tensor``, of the same shape on all ranks and at most ``SLOT_BYTES``.

        ``combine`` makes its result of the tensors of all ranks, stacked along a new dim 0.
        """
        self.posted += 1
        number = self.posted
        # A slot is written again after _SLOTS messages. By then all must have read it; and they have, once they posted
        # the message _AHEAD back: nobody posts one before it is through with those _AHEAD older.
        while self.open and self.open[0].number <= number - _AHEAD:
            self.open[0].wait()
        self.await_others(number - _AHEAD)
        self.slots(number, tensor)[self.index].copy_(tensor)
        for rank, other in self.others.items():
            with _whoever_ends_is_named(rank):
                other.send(b"\0")
        message = Message(self, number, tensor, combine)
        self.open.append(message)
        return message

    def slots(self, number: int, like: torch.Tensor) -> torch.Tensor:
        """The slots of a message: [ranks, *shape of ``like``]."""
        return self.bytes[number % _SLOTS, :, : like.nbytes].view(like.dtype).unflatten(1, like.shape)

    def await_others(self, number: int) -> None:
        """Returns when all others have posted the message ``number``."""
        for rank, other in self.others.items():
            while self.heard[rank] < number:
                with _whoever_ends_is_named(rank):
                    told = other.recv(_SLOTS)
                    if not told:
                        raise ConnectionResetError
                self.heard[rank] += len(told)


@contextmanager
def _whoever_ends_is_named(rank: int) -> Iterator[None]:
    try:
        yield
    except ConnectionError:
        raise RuntimeError(f"the rank at {rank} of this host's group has ended") from None
    except BlockingIOError:
        raise RuntimeError(
            f"the rank at {rank} of this host's group was silent for {_TIMEOUT_S // 60} minutes"
        ) from None


def between(group: dist.ProcessGroup) -> tuple[SharedMemory | None, dist.ProcessGroup | None]:
    """Memory for the ranks of ``group`` on this host, and the group of those with the same place on every host.

    All ranks of ``group`` call this. No memory (None) where this host has none of the kind, or each rank is on a host
    of its own, or the hosts have unequal numbers of them. No group where there is only one host. Containers count as
    hosts of their own: what tells a host is its kernel and its network.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    listener, mine = _listen(size)
    places: list = [None] * size
    dist.all_gather_object(places, mine, group=group)
    with listener or nullcontext():
        if None in places:
            return None, None
        hosts: dict = {}
        for other, (host, _) in enumerate(places):
            hosts.setdefault(host, []).append(other)
        local = hosts[mine[0]]
        if len(local) == 1 or len(local) * len(hosts) != size or len({len(ranks) for ranks in hosts.values()}) > 1:
            return None, None
        index = local.index(rank)
        memory = _meet(listener, [places[other][1] for other in local], index)
    across = None
    if len(hosts) > 1:
        ranks = [dist.get_global_rank(group, ranks[index]) for ranks in hosts.values()]
        across = dist.new_group(ranks, use_local_synchronization=True)
    return memory, across


def _meet(listener: socket.socket, addresses: list[str], index: int) -> SharedMemory:
    """Connects the ranks of a host, the one at ``index`` being this, and hands round the memory of the first."""
    others, size = {}, len(addresses)
    for other, address in enumerate(addresses[:index]):
        others[other] = socket.socket(socket.AF_UNIX)
        others[other].connect(address)
        others[other].send(struct.pack("i", index))
    for _ in range(index + 1, size):
        connection = _accept_from_own_user(listener)
        others[struct.unpack("i", connection.recv(4))[0]] = connection
    length = _SLOTS * size * SLOT_BYTES
    if index == 0:
        file = os.memfd_create("gpt4d")
        os.ftruncate(file, length)
        for other in others.values():
            socket.send_fds(other, [b"\0"], [file])
    else:
        _, (file, *_), *_ = socket.recv_fds(others[0], 1, 1)
    for other in others.values():
        other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _TIMEOUT_S, 0))
    buffer = mmap.mmap(file, length)
    os.close(file)
    return SharedMemory(index, buffer, dict(sorted(others.items())))


def _listen(backlog: int) -> tuple[socket.socket | None, tuple | None]:
    """A socket for the others of this host to connect to, and where it is: (host, address). None on other systems."""
    if not hasattr(os, "memfd_create"):
        return None, None
    with open("/proc/sys/kernel/random/boot_id") as file:
        host = file.read(), os.readlink("/proc/self/ns/net")
    address = f"\0gpt4d-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(backlog)
    listener.settimeout(_MEETING_S)
    return listener, (host, address)


def _accept_from_own_user(listener: socket.socket) -> socket.socket:
    while True:
        connection, _ = listener.accept()
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user == os.getuid():
            return connection
        connection.close()
