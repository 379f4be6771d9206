"""Connections to the job's store. Rank 0 listens on the job's interface only, and no rank joins another job's store."""

import errno
import ipaddress
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from gpt4d.runtime.errors import ConfigError, NodeError, PortTaken
from gpt4d.runtime.identity import VARIABLE, start_name
from gpt4d.runtime.job_store import JobStore
from gpt4d.runtime.launch import Launch

T = TypeVar("T")
PORT_S = 60.0  # timeout for another process to release the port, such as the previous start of a requeued job
ANSWER_S = 10.0  # timeout for a server to prove that it belongs to this job
_RETRY_S = 0.2
_BACKLOG = 4096  # all ranks connect at the same time
_GREETING = "greeting"  # the key that rank 0 sets first
_START = "gpt4d start "  # the second key, followed by the start's name, which other jobs can read


class _OtherServer(Exception):
    """Another process than this job's server uses the port."""


class Connector:
    """Connects this rank to the job's store.

    Args:
        launch: this process's rank in the job and its launcher.
        key: the job's key.
        timeout_s: timeout for rank 0 to start, and for operations of the store.
    """

    def __init__(self, launch: Launch, key: bytes, timeout_s: float):
        assert launch.master, "a single rank needs no store"
        self.launch, self.key, self.timeout_s = launch, key, timeout_s
        self.host, port = launch.master.rsplit(":", 1)
        self.port = int(port)
        # torchrun already runs a server, for all attempts; otherwise rank 0 is the server.
        self.launcher_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def connect(self) -> tuple[JobStore, JobStore]:
        """Return two connections, because an operation can block a connection. Rank 0 starts the server.

        Raises PortTaken if the port belongs to another job, ConfigError if there is no server, NodeError if this rank's
        secret is not rank 0's.
        """
        if self.launch.rank == 0 and not self.launcher_serves:
            server = self.serve()
            first, address = self._greet(server), server.host
        else:
            first, address = self._find()
        return first, JobStore(self._open(address, self.timeout_s), self.key)

    def _greet(self, connection: dist.TCPStore) -> JobStore:
        store = JobStore(connection, self.key)
        store.set(_GREETING, "")
        connection.set(_START + start_name(self.launch), "")
        return store

    def serve(self) -> dist.TCPStore:
        deadline = time.monotonic() + PORT_S
        on_one_host = self.launch.local_world_size == self.launch.world_size
        while True:
            try:
                return serve(self.host, self.port, on_one_host, timedelta(seconds=self.timeout_s))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise ConfigError(
                        f"MASTER_ADDR={self.host}: rank 0 on {socket.gethostname()} cannot listen on port {self.port} "
                        f"({error.strerror}); set MASTER_ADDR to the host of rank 0"
                    ) from None
            if time.monotonic() > deadline:
                raise PortTaken(
                    f"MASTER_PORT={self.port}: another process uses this port of {socket.gethostname()}; set "
                    "MASTER_PORT to a free port"
                )
            time.sleep(_RETRY_S)

    def _find(self) -> tuple[JobStore, str]:
        """Return a connection to this job's server and its address. Wait until the server starts."""
        started, other_since = time.monotonic(), 0.0
        while True:
            try:
                # Use the first address that answers, in the order in which rank 0 tries to listen.
                with socket.create_connection((self.host, self.port), ANSWER_S) as probe:
                    address = probe.getpeername()[0]
                return self._join(address), address
            except OSError as error:
                if time.monotonic() - started > self.timeout_s:
                    raise ConfigError(
                        f"rank {self.launch.rank} on {socket.gethostname()} cannot connect to rank 0 at "
                        f"{self.launch.master} ({error.strerror or error}); check MASTER_ADDR and that rank 0 has "
                        "started"
                    ) from None
            except _OtherServer:
                other_since = other_since or time.monotonic()
                # Rank 0 also waits for the port, so this rank waits longer than rank 0.
                if time.monotonic() - other_since > PORT_S + 2 * ANSWER_S:
                    raise PortTaken(
                        f"MASTER_PORT={self.port}: another job uses this port of {self.host}; set MASTER_PORT to a "
                        "free port (or, if that job is this one, choose a run.dir that all nodes share)"
                    ) from None
            time.sleep(_RETRY_S)

    def _join(self, address: str) -> JobStore:
        start = _START + start_name(self.launch)
        try:
            connection = self._open(address, ANSWER_S)
            store = JobStore(connection, self.key)
            if self.launch.rank == 0:
                return self._greet(connection)
            with suppress(RuntimeError):
                if self.launcher_serves:  # rank 0 may be late
                    connection.wait([start], timedelta(seconds=self.timeout_s))
                else:
                    store.wait([_GREETING], timedelta(seconds=ANSWER_S))
            if store.check([_GREETING]):
                return store
            same_start = bool(self.launch.start) and connection.check([start])
        except RuntimeError:  # not a server of torch
            raise _OtherServer from None
        if same_start:
            raise NodeError(
                f"rank {self.launch.rank} on {socket.gethostname()} has another secret than rank 0; choose a run.dir "
                f"on a file system that all nodes share, or set {VARIABLE} to one text on all ranks"
            )
        if self.launcher_serves:
            return store  # ``wait_for_all_ranks`` reports that rank 0 is missing
        raise _OtherServer

    def _open(self, address: str, connect_s: float) -> dist.TCPStore:
        """Return a connection to the server. Raises RuntimeError if that fails within ``connect_s``."""

        def connect() -> dist.TCPStore:
            timeout = timedelta(seconds=connect_s)
            return dist.TCPStore(address, self.port, is_master=False, timeout=timeout, wait_for_workers=False)

        store = _within(2 * connect_s, connect)
        store.set_timeout(timedelta(seconds=self.timeout_s))
        return store


def _within(timeout_s: float, work: Callable[[], T]) -> T:
    """Return ``work()``. Raises RuntimeError if it blocks for longer, as torch does on a server that never answers."""
    outcome: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((work(), None))
        except Exception as error:
            outcome.put((None, error))

    threading.Thread(target=run, name="connect", daemon=True).start()
    try:
        result, error = outcome.get(timeout=timeout_s)
    except queue.Empty:
        raise RuntimeError(f"no answer within {timeout_s:.0f} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def serve(host: str, port: int, on_one_host: bool, timeout: timedelta) -> dist.TCPStore:
    """Start the server on the address of ``host``, and return a connection to it. Raises OSError."""
    listener = _listen(_own_addresses(host, port, on_one_host))
    if listener is None:
        message = f"no address of MASTER_ADDR={host} can be used on this node; rank 0 listens on all of its interfaces"
        print(f"warning: {message}", file=sys.stderr, flush=True)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        listener = socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
        address = "localhost"
    else:
        address = listener.getsockname()[0]
    # The server closes the socket.
    return dist.TCPStore(
        address, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _own_addresses(host: str, port: int, on_one_host: bool) -> list[tuple]:
    """Return family and socket address of each address of ``host`` at which ranks may look for the server.

    Loopback addresses are valid on one host only: some systems assign one to the host's own name.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    loopback = on_one_host or host == "localhost" or _is_address(host)
    return [(family, at) for family, *_, at in found if loopback or not ipaddress.ip_address(at[0]).is_loopback]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _listen(addresses: Sequence[tuple]) -> socket.socket | None:
    """Listen on the first of ``addresses`` that this node has. Return None if it has none of them."""
    for family, address in addresses:
        try:
            return socket.create_server(address, family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return None
