"""The lock of a run directory: one job writes to the directory, any number of processes read it.

The lock is a POSIX record lock (fcntl). It ends with its process, however that process ends, so no stale file can block
a run. It holds across the nodes of a shared file system (NFS, GPFS, Lustre with the mount option ``flock``).
"""

import fcntl
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from gpt4d.config import ConfigError
from gpt4d.runtime import activity
from gpt4d.runtime.errors import warn
from gpt4d.runtime.files import open_regular
from gpt4d.runtime.launchers import number

RUN_LOCK, SWEEP_LOCK = "lock", "sweep.lock"
# A file server releases the locks of a node that has crashed after its lease, which is about 90 s.
_LEASE_S = 150.0
_RETRY_S = 2.0
# struct flock of a 64-bit system: position of l_type, and the format.
_TYPE_INDEX, _FLOCK = (3, "@qqihh") if sys.platform == "darwin" else (0, "@hhqqi0q")


class Holder(NamedTuple):
    """The process that holds a lock, or the last one that held it.

    ``since`` is in seconds since 1970. ``job`` is Slurm's job id and ``restart`` the number of its requeues, if any.
    """

    host: str
    pid: int
    since: float
    job: str | None = None
    restart: int = 0

    @classmethod
    def this_process(cls) -> "Holder":
        restart = number(os.environ, "SLURM_RESTART_COUNT", 0)
        return cls(socket.gethostname(), os.getpid(), time.time(), os.environ.get("SLURM_JOB_ID"), restart)

    def requeued_as(self, other: "Holder") -> bool:
        """Return whether ``other`` is a later start of the same Slurm job: this process cannot exist any more."""
        return self.job is not None and self.job == other.job and self.restart < other.restart

    def __str__(self) -> str:
        return f"{self.host}, pid {self.pid}, since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))}"


class DirectoryLock:
    """A lock on ``directory`` that lasts until ``close`` or the end of this process.

    Raises ConfigError if another process holds it. On a file system without locks, each process gets it with a warning.

    Args:
        directory: the run directory, or the directory of a sweep's runs.
        name: RUN_LOCK or SWEEP_LOCK, the name of the lock file.
        shared: allow other processes that also share the lock.
    """

    def __init__(self, directory: Path, name: str = RUN_LOCK, shared: bool = False):
        self.path, this_process = directory / name, Holder.this_process()
        deadline = time.monotonic() + _LEASE_S
        try:
            self._file: IO[str] = open(  # noqa: SIM115 – closed by close()
                self.path, "a+", encoding="utf-8", opener=open_regular
            )
        except OSError as error:
            raise ConfigError(f"run.dir={directory}: {error.strerror}; use a writable directory") from None
        while not _try_lock(self._file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
            holder = read_holder(self._file)
            if not (holder and holder.requeued_as(this_process)) or time.monotonic() > deadline:
                self._file.close()
                raise _in_use(directory, name, holder)
            time.sleep(_RETRY_S)
            activity.progress()
        self._file.truncate(0)
        self._file.write(json.dumps(this_process._asdict()) + "\n")
        self._file.flush()

    def is_valid(self) -> bool:
        """Return whether other processes see this lock. They do not if the directory was removed or replaced."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except OSError:
            return False

    def close(self) -> None:
        self._file.close()


def check_unused(directory: Path) -> None:
    """Raise ConfigError if another process holds the lock of a run directory, without taking the lock."""
    holder = last_holder(directory)
    if is_locked(directory) and not (holder and holder.requeued_as(Holder.this_process())):
        raise _in_use(directory, RUN_LOCK, holder)


def is_locked(directory: Path, name: str = RUN_LOCK) -> bool:
    """Return whether another process holds the lock of ``directory``. It never delays a process that wants the lock."""
    query = struct.pack(_FLOCK, *([0] * _TYPE_INDEX), fcntl.F_WRLCK, *([0] * (4 - _TYPE_INDEX)))
    try:
        with open(directory / name, encoding="utf-8", opener=open_regular) as file:
            answer = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, query))
    except OSError:  # no such file, or a file system without locks
        return False
    return answer[_TYPE_INDEX] != fcntl.F_UNLCK


def last_holder(directory: Path) -> Holder | None:
    """Return the process that holds or has held the lock of a run directory; None if no process has."""
    try:
        with open(directory / RUN_LOCK, encoding="utf-8", opener=open_regular) as file:
            return read_holder(file)
    except OSError:
        return None


def read_holder(file: IO[str]) -> Holder | None:
    """Return the content of an open lock file; None if a process has just created it, or if it is damaged."""
    file.seek(0)
    try:
        holder = Holder(**json.loads(file.read()))
        known = str(holder) and isinstance(holder.restart, int)  # an impossible time raises an error
    except (ValueError, TypeError, OverflowError, OSError, RecursionError):
        return None
    return holder if known else None


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Wait until no other process is inside this context with ``path``, a file that it creates. Raises OSError."""
    with open(path, "a", encoding="utf-8") as file:
        _try_lock(file, fcntl.LOCK_EX, block=True)
        yield


def _try_lock(file: IO[str], kind: int, block: bool = False) -> bool:
    """Take a lock of ``file``. Return False if another process holds it; with ``block``, wait for that process."""
    try:
        fcntl.lockf(file, kind if block else kind | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows EAGAIN and EACCES
        return False
    except OSError as error:  # a file system without locks, such as Lustre without its mount option flock
        warn(f"{file.name} cannot be locked ({error.strerror}); start no other run in this directory")
    return True


def _in_use(directory: Path, name: str, holder: Holder | None) -> ConfigError:
    user = "sweep" if name == SWEEP_LOCK else "run"
    return ConfigError(
        f"run.dir={directory}: another {user} ({holder or 'which has just started'}) is using it; wait until that "
        f"{user} ends, or set another run.name"
    )
