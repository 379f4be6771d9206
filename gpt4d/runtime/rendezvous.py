"""The rendezvous: all ranks of one start of a job, and no other process, connect through a store.

The store is torch's TCPStore, which rank 0 or torchrun serves. Rank 0 listens on the job's interface only. The ranks
have a key that is equal on all ranks of one start and unknown to every other job.
"""

import errno
import hmac
import ipaddress
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from gpt4d.runtime.errors import ConfigError, NodeError, PortTaken
from gpt4d.runtime.files import open_no_link
from gpt4d.runtime.launch import Launch

T = TypeVar("T")
VARIABLE = "GPT4D_SECRET"
_SECRET_BYTES = 32
_TAG_BYTES = 32
WRITTEN_S = 30.0  # timeout for the content of a file that another node has created to appear
PORT_S = 60.0  # timeout for another process to release the port, such as the previous start of a requeued job
ANSWER_S = 10.0  # timeout for a server to prove that it belongs to this job
_RETRY_S = 0.2
SLICE_S = 0.5  # a wait consists of short waits, so that time while the process is suspended does not count
_BACKLOG = 4096  # all ranks connect at the same time
_GREETING = "greeting"  # the key that rank 0 sets first
_START = "gpt4d start "  # the second key, followed by the start's name, which other jobs can read


def job_key(launch: Launch, directory: Path | None = None) -> bytes:
    """Return the key of this start: a hash of the launcher's identification of the start and a secret.

    Args:
        launch: this process's rank in the job and its launcher.
        directory: the directory that contains the secret, on a file system that all ranks share. The first rank creates
            the secret; later starts use the same one. None: the user's cache directory. The variable GPT4D_SECRET
            replaces the file.

    Raises ConfigError if the secret can be neither read nor created, or if others could have written it.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    secret = os.environ.get(VARIABLE) or _shared_secret(directory or Path(cache, "gpt4d"))
    return hmac.digest(os.fsencode(secret), _start_name(launch).encode(), "sha256")


def _start_name(launch: Launch) -> str:
    """Return a public name of this start. It is unique only if the launcher names starts."""
    return f"{launch.start}, sweep job {launch.sweep_job}, {launch.world_size} ranks"


def _shared_secret(directory: Path) -> str:
    """Return the secret in ``directory``, which the first rank creates. Other ranks wait until it is written."""
    path, deadline = directory / ".secret", time.monotonic() + WRITTEN_S
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _create(path)
        while len(secret := _read(path)) < 2 * _SECRET_BYTES and time.monotonic() <= deadline:
            time.sleep(0.05)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; make the directory writable and the file your own, or set {VARIABLE} to one "
            "text on all ranks"
        ) from None
    if len(secret) != 2 * _SECRET_BYTES:
        raise ConfigError(f"{path}: incomplete; remove it, and the next start creates it")
    return secret


def _create(path: Path) -> None:
    """Create the secret unless it exists. Only this user can read it."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(_SECRET_BYTES))
    except OSError:
        path.unlink()
        raise


def _read(path: Path) -> str:
    """Return the content of the secret's file. Raises ConfigError if another user can have written or read it."""
    with open(path, encoding="ascii", errors="replace", opener=open_no_link) as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigError(
                f"{path}: user {found.st_uid} owns it, with mode {found.st_mode & 0o777:04o}, but a secret must be "
                "your own with mode 0600; remove it, and the next start creates it"
            )
        return file.read(2 * _SECRET_BYTES + 1)


class JobStore(dist.PrefixStore):
    """A private store of one job's ranks on a server that other processes may reach.

    The server answers every client. So each key begins with a hash of the job's key, which other processes cannot
    guess. Each value has an authentication code, and a value without the right code counts as missing. Counters
    (``add``) have no code.

    Args:
        store: the connection to the server.
        key: the job's key (``job_key``).
    """

    def __init__(self, store: dist.Store, key: bytes):
        super().__init__(hmac.digest(key, b"names", "sha256").hex(), store)
        self._key = key

    def for_process_groups(self) -> dist.Store:
        """Return the store of torch's process groups, whose values have no authentication code.

        Threads of torch call it, even while Python shuts down, so it must not run Python code: the calls of another
        store reach the C++ methods of PrefixStore directly.
        """
        return dist.PrefixStore("process groups", self)

    def set(self, key: str, value: str | bytes) -> None:
        super().set(key, self._seal(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Return a value, and wait for it if necessary. Raises RuntimeError if another job has written it."""
        value = self._open(key, super().get(key))
        if value is None:
            raise RuntimeError(f"{key} in the store was not written by this job")
        return value

    def check(self, keys: list[str]) -> bool:
        """Return whether the store contains all ``keys`` with values of this job."""
        return super().check(keys) and all(self._open(key, super(JobStore, self).get(key)) is not None for key in keys)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Set ``key`` if its value is ``expected_value``, where empty means a missing key. Return the stored value."""
        sealed = self._seal(key, desired_value)
        expected = self._seal(key, expected_value) if expected_value else b""
        value = self._open(key, super().compare_set(key, expected, sealed))  # type: ignore[arg-type]
        if value is None:
            super().set(key, sealed)  # type: ignore[arg-type]
            return desired_value.encode()
        return value

    def _seal(self, key: str, value: str | bytes) -> bytes:
        value = value.encode() if isinstance(value, str) else bytes(value)
        return self._tag(key, value) + value

    def _open(self, key: str, sealed: bytes) -> bytes | None:
        tag, value = sealed[:_TAG_BYTES], sealed[_TAG_BYTES:]
        return value if hmac.compare_digest(tag, self._tag(key, value)) else None

    def _tag(self, key: str, value: bytes) -> bytes:
        name = key.encode()
        return hmac.digest(self._key, b"value %d " % len(name) + name + value, "sha256")


class StoreLost(RuntimeError):
    """The store does not answer. ``ended``: its server has closed the connection."""

    def __init__(self, ended: bool):
        super().__init__("the store's server has ended" if ended else "the store does not answer")
        self.ended = ended


class DeadlineStore:
    """The calls of a store that the watchdog needs, each with a deadline. Any thread may call them.

    A client of torch's TCPStore waits forever for a frozen server. Here a separate thread calls the store, so that the
    caller can stop waiting. After the first failure, every call raises StoreLost immediately.

    Args:
        store: the store, which no other code may use.
        deadline_s: time in seconds after which a call has failed.
    """

    def __init__(self, store: dist.Store, deadline_s: float):
        self.deadline_s = deadline_s
        self._store, self._lost = store, dict[str, bool]()
        self._calls: queue.SimpleQueue[tuple[Future, Callable]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        threading.Thread(target=self._answer, name="store", daemon=True).start()

    def add(self, key: str, amount: int) -> int:
        return self._call(lambda: self._store.add(key, amount))

    def get(self, key: str) -> str | None:
        """Return the value of ``key``, or None if the store does not have it."""
        return self._call(lambda: self._store.get(key).decode() if self._store.check([key]) else None)

    def set(self, key: str, value: str) -> None:
        self._call(lambda: self._store.set(key, value))

    def set_first(self, key: str, value: str) -> str:
        """Set ``key`` unless the store has it already. Return its value."""
        return self._call(lambda: self._store.compare_set(key, "", value).decode())

    def _call(self, function: Callable[[], T]) -> T:
        with self._lock:
            if self._lost:
                raise StoreLost(**self._lost)
            answer: Future[T] = Future()
            self._calls.put((answer, function))
            for _ in range(max(1, round(self.deadline_s / SLICE_S))):
                try:
                    return answer.result(min(SLICE_S, self.deadline_s))
                except TimeoutError:
                    continue
                except RuntimeError:
                    self._lost = {"ended": True}
                    raise StoreLost(ended=True) from None
            self._lost = {"ended": False}
            raise StoreLost(ended=False)

    def _answer(self) -> None:
        while True:
            complete(*self._calls.get())


def complete(answer: Future[T], function: Callable[[], T]) -> None:
    """Give ``answer`` the result of ``function()``, or its error, which ``answer.result()`` raises."""
    try:
        answer.set_result(function())
    except BaseException as error:
        answer.set_exception(error)


def claim_rank(store: JobStore, rank: int) -> None:
    """Reserve ``rank`` for this process. Raises ConfigError if another process has it: the job was started twice."""
    process = f"{secrets.token_hex()} {socket.gethostname()}"
    owner = store.compare_set(f"process/{rank}", "", process).decode()
    if owner != process:
        raise ConfigError(f"rank {rank} of this job runs already, on {owner.split()[1]}; wait until that job ends")


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
            server = self._serve()
            first, address = self._greet(server), server.host
        else:
            first, address = self._find()
        return first, JobStore(self._open(address, self.timeout_s), self.key)

    def _greet(self, connection: dist.TCPStore) -> JobStore:
        store = JobStore(connection, self.key)
        store.set(_GREETING, "")
        connection.set(_START + _start_name(self.launch), "")
        return store

    def _serve(self) -> dist.TCPStore:
        """Start the server. Wait until another process releases the port."""
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
        start = _START + _start_name(self.launch)
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
            return store  # the first barrier reports that rank 0 is missing
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
    result: Future[T] = Future()
    threading.Thread(target=complete, args=(result, work), name="connect", daemon=True).start()
    try:
        return result.result(timeout_s)
    except TimeoutError:
        raise RuntimeError(f"no answer within {timeout_s:.0f} s") from None


def serve(host: str, port: int, on_one_host: bool, timeout: timedelta) -> dist.TCPStore:
    """Start the server on the first address of ``host`` that this node has, and return a connection to it.

    Loopback addresses are valid on one host only: some systems assign one to the host's own name. Raises OSError.
    """
    listener = None
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    loopback = on_one_host or host == "localhost" or _is_address(host)
    for family, *_, at in found:
        if listener is None and (loopback or not ipaddress.ip_address(at[0]).is_loopback):
            try:
                listener = socket.create_server(at, family=family, backlog=_BACKLOG)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
    address = listener.getsockname()[0] if listener else "localhost"
    if listener is None:
        message = f"no address of MASTER_ADDR={host} can be used on this node; rank 0 listens on all of its interfaces"
        print(f"warning: {message}", file=sys.stderr, flush=True)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        listener = socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=dual)
    # The server closes the socket.
    return dist.TCPStore(
        address, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False
