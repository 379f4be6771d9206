"""Files that cannot be written: errors and warnings with the path, and a log that loses no line to a full disk."""

import errno
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpt4d.runtime.errors import ConfigError
from gpt4d.runtime.files import json_lines, open_regular, read_regular, write_file

_NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


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


def warn(problem: str) -> None:
    """Print a warning of one line."""
    print(f"warning: {problem}", file=sys.stderr, flush=True)
