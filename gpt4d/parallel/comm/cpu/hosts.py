"""Ranks that compute on the CPUs of one host, or of several: how they find each other and share memory."""

import os
import secrets
import socket
import struct
from contextlib import nullcontext

import torch.distributed as dist

from gpt4d.parallel.comm.cpu.gloo import GlooTransport
from gpt4d.parallel.comm.cpu.shared_memory import SharedMemoryTransport, share_memory
from gpt4d.parallel.comm.cpu.two_level import TwoLevelTransport
from gpt4d.parallel.comm.transport import Transport
from gpt4d.runtime.consensus import gather_in_group

_CONNECT_S = 60.0  # timeout for the ranks of a host to connect


def connect(group: dist.ProcessGroup, yielding: bool) -> Transport:
    """Connect the ranks of ``group`` on each host through shared memory. All ranks of the group must call this.

    Containers count as separate hosts: a host is identified by its running kernel and its network namespace. Ranks use
    gloo alone if this system has no shared memory, if every rank is alone on its host, or if the hosts have unequal
    numbers of ranks.

    Args:
        group: the ranks of an axis.
        yielding: as for GlooTransport.
    """
    transport = _connect_hosts(group, GlooTransport(group, yielding))
    if not isinstance(transport, TwoLevelTransport):
        # torch names a group after the number of groups that its rank has. Ranks of different groups of one axis, of
        # which only some have hosts, share the groups of the next axis: all need the same number.
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return transport


def _connect_hosts(group: dist.ProcessGroup, gloo: GlooTransport) -> Transport:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    listener, own_location = listen(2 * size)
    locations = gather_in_group(own_location, group)
    with listener or nullcontext():
        if listener is None or own_location is None or None in locations:
            return gloo
        hosts: dict = {}
        for other, (host, _) in enumerate(locations):
            hosts.setdefault(host, []).append(other)
        local = hosts[own_location[0]]
        if len(local) == 1 or len({len(ranks) for ranks in hosts.values()}) > 1:
            return gloo
        index, parts = local.index(rank), min(len(hosts), 2)
        connections = _connect([locations[other][1] for other in local], listener, index, parts)
    memories = [share_memory(index, peers) for peers in connections]
    if len(hosts) == 1:
        return SharedMemoryTransport(memories[0], gloo)
    columns = [tuple(sorted(column)) for column in zip(*hosts.values(), strict=True)]
    ranks = [dist.get_global_rank(group, other) for other in columns[index]]
    before, after = memories
    peers = dist.new_group(ranks, use_local_synchronization=True)
    return TwoLevelTransport(before, after, peers, columns, gloo)


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


def listen(backlog: int) -> tuple[socket.socket | None, list[str] | None]:
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
