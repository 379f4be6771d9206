"""Ranks that compute on the CPUs of one host, or of several: how they find and reach each other.

On several hosts, a collective has up to three parts: a sum inside each host, communication between the hosts, and an
exchange of the received data inside each host. Its kind decides which parts it needs.
"""

import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import torch.distributed as dist

from gpt4d.parallel.comm.cpu.comm_thread import CommFuture, CommThread
from gpt4d.parallel.comm.cpu.shared_memory import SharedMemory, share_memory
from gpt4d.runtime.consensus import gather_in_group

# The parts of a piece of a collective: one starts the exchange between hosts and returns the handle, one finishes.
Piece = tuple[Callable[[], dist.Work], Callable[[], object]]

_CONNECT_S = 60.0  # timeout for the ranks of a host to connect


class TwoLevelTransport:
    """The ranks of a group on several hosts, seen from this rank.

    Two threads run the parts of collectives, each in the order in which these were started. So the parts of several
    collectives overlap each other and the computation.

    Args:
        before: memory of this host, for the part before the exchange between the hosts.
        after: memory of this host, for the part after it.
        group: the ranks with this rank's index on each host. Only the threads use it.
        columns: for each index on a host, the ranks that have it, one on each host, in ascending order.
    """

    def __init__(
        self, before: SharedMemory, after: SharedMemory, group: dist.ProcessGroup, columns: Sequence[tuple[int, ...]]
    ):
        self.before, self.after, self.group, self.columns = before, after, group, columns
        self.index, self.local_size, self.size = before.index, before.size, len(columns[0])
        self._first, self._second = CommThread("before exchange"), CommThread("after exchange")

    def start(self, pieces: Iterable[Piece]) -> CommFuture:
        """Start a collective whose pieces follow each other through the parts. The task's result is None.

        Args:
            pieces: the first function of each uses ``before`` and ``group``. The second one uses ``after``, when the
                exchange that the first has started is complete.
        """
        tasks = [self._start_piece(*piece) for piece in pieces]

        def check() -> None:
            for task in tasks:
                task.wait()  # it is complete: this raises its error

        return self._second.submit(check)

    def _start_piece(self, start: Callable[[], dist.Work], finish: Callable[[], object]) -> CommFuture:
        exchange = self._first.submit(start)

        def wait_and_finish() -> None:
            exchange.wait().wait()
            finish()

        return self._second.submit(wait_and_finish)


def connect(group: dist.ProcessGroup) -> SharedMemory | TwoLevelTransport | None:
    """Connect the ranks of ``group`` on each host through shared memory. All ranks of the group must call this.

    Containers count as separate hosts: a host is identified by its running kernel and its network namespace. Returns
    None if this system has no shared memory, if every rank is alone on its host, or if the hosts have unequal numbers
    of ranks.
    """
    transport = _connect_hosts(group)
    if not isinstance(transport, TwoLevelTransport):
        # torch names a group after the number of groups that its rank has. Ranks of different groups of one axis, of
        # which only some have hosts, share the groups of the next axis: all need the same number.
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return transport


def _connect_hosts(group: dist.ProcessGroup) -> SharedMemory | TwoLevelTransport | None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    listener, own_location = _listen(2 * size)
    locations = gather_in_group(own_location, group)
    with listener or nullcontext():
        if listener is None or own_location is None or None in locations:
            return None
        hosts: dict = {}
        for other, (host, _) in enumerate(locations):
            hosts.setdefault(host, []).append(other)
        local = hosts[own_location[0]]
        if len(local) == 1 or len({len(ranks) for ranks in hosts.values()}) > 1:
            return None
        index, parts = local.index(rank), min(len(hosts), 2)
        connections = _connect([locations[other][1] for other in local], listener, index, parts)
    memories = [share_memory(index, peers) for peers in connections]
    if len(hosts) == 1:
        return memories[0]
    columns = [tuple(sorted(column)) for column in zip(*hosts.values(), strict=True)]
    ranks = [dist.get_global_rank(group, other) for other in columns[index]]
    before, after = memories
    return TwoLevelTransport(before, after, dist.new_group(ranks, use_local_synchronization=True), columns)


def _connect(addresses: list[str], listener: socket.socket, index: int, count: int) -> list[dict[int, socket.socket]]:
    """Return ``count`` sockets from this rank of a host, which is ``index``, to each peer."""
    connections: list[dict[int, socket.socket]] = [{} for _ in range(count)]
    for other, address in enumerate(addresses[:index]):
        for number, peers in enumerate(connections):
            peers[other] = socket.socket(socket.AF_UNIX)
            peers[other].connect(address)
            peers[other].send(struct.pack("2i", index, number))
    for _ in range(count * (len(addresses) - index - 1)):
        connection = _accept_from_own_user(listener)
        other, number = struct.unpack("2i", connection.recv(8))
        connections[number][other] = connection
    return connections


def _listen(backlog: int) -> tuple[socket.socket | None, list[str] | None]:
    """Open a socket for peers on this host and return it with its location [host, address], or Nones without memfd."""
    if not hasattr(os, "memfd_create"):
        return None, None
    with open("/proc/sys/kernel/random/boot_id") as file:
        host = f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
    address = f"\0gpt4d-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(backlog)
    listener.settimeout(_CONNECT_S)
    return listener, [host, address]


def _accept_from_own_user(listener: socket.socket) -> socket.socket:
    while True:
        connection, _ = listener.accept()
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user == os.getuid():
            return connection
        connection.close()
