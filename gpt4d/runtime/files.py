"""Files: checksums and flushes to disk, logs of JSON lines, and files that cannot be read or written."""

import errno
import json
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from gpt4d.runtime import activity
from gpt4d.runtime.errors import ConfigError, warn

_FLUSH_BYTES = 64 << 20  # bytes between two flushes, so that a flush is short on a slow disk and progress is visible
_flush = getattr(os, "fdatasync", os.fsync)  # macOS lacks fdatasync
_LARGEST = 1e100  # limit of numbers in a log
_NUMBER, _NONE = (int, float), type(None)
_TYPES: Mapping[str, tuple[type, ...]] = {  # types of the keys of logs that gpt4d itself reads
    **dict.fromkeys(("time", "elapsed_s", "tokens", "samples", "images"), _NUMBER),
    **dict.fromkeys(("loss", "step_time_s", "_per_s"), (*_NUMBER, _NONE)),
    **dict.fromkeys(("step", "start"), (int,)),
    **dict.fromkeys(("event", "config"), (str,)),
    **dict.fromkeys(("problem", "commit"), (str, _NONE)),
    **dict.fromkeys(("sets", "versions", "hosts", "data"), (dict,)),
    "grids": (list,),
}
_CHUNK_BYTES = 1 << 20  # small enough that a chunk is still in the CPU cache when it is written after its checksum
_NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


class FileEntry(NamedTuple):
    """Size in bytes and XXH3 checksum (128 bits, hexadecimal) of a file."""

    bytes: int
    xxh3_128: str


def counts(values: Iterable) -> tuple[int, ...]:
    """Return values read from JSON as a tuple. Raises ValueError unless all are integers from 0 to 2**63 - 1."""
    values = tuple(values)
    if not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise ValueError(f"{values} are not all counts")
    return values


def open_regular(path: str | Path, flags: int) -> int:
    """Open a regular file, as the ``opener`` of ``open``. Raises OSError for a directory, and for a FIFO."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file; move it away", str(path))
    return descriptor


def open_no_link(path: str | Path, flags: int) -> int:
    """Open a regular file as ``open_regular`` does. Raises OSError also for a link."""
    return open_regular(path, flags | os.O_NOFOLLOW)


def read_regular(path: Path, start: int = 0) -> bytes:
    """Return the content of a regular file from byte ``start``; empty if there is no file. Raises OSError."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            file.seek(start)
            return file.read()
    except FileNotFoundError:
        return b""


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the entries of metrics.jsonl or starts.jsonl; none if there is no file. Raises OSError."""
    return list(json_lines(read_regular(path)))


def json_lines(content: bytes) -> Iterator[dict[str, Any]]:
    """Yield the entries of a log of JSON objects. Other lines, which a crash or a bad disk leaves, are ignored."""
    for line in content.split(b"\n"):
        with suppress(ValueError, RecursionError):
            entry = json.loads(line.decode("utf-8", "replace"))
            if isinstance(entry, dict) and has_types(entry):
                yield entry


def has_types(entry: Mapping[str, Any]) -> bool:
    """Return whether the known keys of a log's entry have values of their types, and finite numbers."""
    for key, value in entry.items():
        types = _TYPES.get("_per_s" if key.endswith("_per_s") else key)
        if types and (type(value) not in types or (isinstance(value, int | float) and not abs(value) < _LARGEST)):
            return False
    return True


class NewFile:
    """A new file that is checksummed while it is written.

    It is a context manager: on exit without an error the file is flushed to disk, and ``entry`` describes it.
    """

    def __init__(self, path: Path):
        self.file = open(path, "xb", buffering=0)  # noqa: SIM115 – closed by __exit__
        self.size, self.unflushed, self.checksum = 0, 0, xxhash.xxh3_128()

    def __enter__(self) -> "NewFile":
        return self

    def write(self, content: bytes | memoryview) -> None:
        content = memoryview(content)
        for start in range(0, len(content), _CHUNK_BYTES):
            chunk = content[start : start + _CHUNK_BYTES]
            self.checksum.update(chunk)
            while chunk:
                written = self.file.write(chunk)
                self.unflushed += written
                chunk = chunk[written:]
            if self.unflushed >= _FLUSH_BYTES:
                _flush(self.file.fileno())
                self.unflushed = 0
            activity.progress()
        self.size += len(content)

    def __exit__(self, kind, *_) -> None:
        with self.file:
            if kind is None:
                os.fsync(self.file.fileno())

    @property
    def entry(self) -> FileEntry:
        return FileEntry(self.size, self.checksum.hexdigest())


def write_file(path: Path, content: bytes) -> FileEntry:
    """Write a new file, flush it to disk, and return its size and checksum."""
    with NewFile(path) as file:
        file.write(content)
    return file.entry


def sync(path: Path) -> None:
    """Flush a file's content, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(file) -> str:
    """Return the checksum of the rest of ``file``, which must be open in binary mode."""
    checksum, buffer = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK_BYTES))
    while size := file.readinto(buffer):
        checksum.update(buffer[:size])
        activity.progress()
    return checksum.hexdigest()


def file_error(path: Path, error: OSError) -> ConfigError:
    """Return the error of a user whose file ``path``, or the file that ``error`` names, cannot be used."""
    remedy = "; free space, or choose a writable directory" if error.errno in _NOT_WRITABLE else ""
    return ConfigError(f"{error.filename or path}: {error.strerror or error}{remedy}")


@contextmanager
def required_file(path: Path) -> Iterator[None]:
    """Raise ConfigError with a path and a remedy if the body, which writes ``path``, cannot write it."""
    try:
        yield
    except OSError as error:
        raise file_error(path, error) from None


@contextmanager
def optional_file(path: Path) -> Iterator[None]:
    """Print a warning if the body, which writes ``path``, cannot write it: a training must not end for a plot."""
    try:
        yield
    except OSError as error:
        warn(f"{file_error(path, error)}")


@contextmanager
def replace_when_complete(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which is renamed to ``path`` if the block succeeds and removed otherwise.

    If the file cannot be written, print a warning.
    """
    partial = path.with_name(f"partial_{path.name}")
    with optional_file(path):
        try:
            partial.unlink(missing_ok=True)  # a FIFO of this name blocks
            yield partial
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def replace_file(path: Path, content: str) -> None:
    """Replace the content of ``path`` atomically, also if the machine loses power. Raises OSError."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        write_file(partial, content.encode())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the entries of metrics.jsonl or starts.jsonl. Print a warning if other lines are ignored.

    Raises ConfigError if the file cannot be read.
    """
    with required_file(path):
        content = read_regular(path)
    entries = list(json_lines(content))
    if damaged := sum(bool(line.strip()) for line in content.split(b"\n")) - len(entries):
        warn(f"{path}: {damaged:,} damaged line(s) are ignored")
    return entries


class LineLog:
    """A file to which lines are appended. Any thread may append, also after ``close``.

    Lines that cannot be written, because the disk is full for example, wait in memory until the next ``append`` or
    ``close`` writes them. The log prints a warning and raises no error.
    """

    def __init__(self, path: Path):
        """Open ``path`` for appending. Raises ConfigError if it cannot be opened."""
        self.path = path
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._failed = False
        with required_file(path):
            self._open()
            content = read_regular(path)
        self._unwritten = b"\n" if content and not content.endswith(b"\n") else b""  # a crash cut off the last line

    def append(self, line: str) -> None:
        with self._lock:
            self._unwritten += f"{line}\n".encode()
            self._write()

    def close(self) -> None:
        with self._lock:
            if self._unwritten:
                self._write()
            if self._descriptor is not None:
                os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = open_regular(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return self._descriptor

    def _write(self) -> None:
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._open(), self._unwritten) :]
            self._failed = False
        except OSError as error:
            if not self._failed:
                warn(f"{self.path}: {error.strerror or error}; its lines wait in memory until it can be written again")
            self._failed = True
