"""Files that are on the disk when they are said to be, with the checksum of what was written."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import xxhash

_PIECE = 1 << 20  # bytes: small enough to stay in a processor's cache between its checksum and its writing


class Entry(NamedTuple):
    """What is to be remembered of a file."""

    bytes: int
    xxh3_128: str


def counts(values: Iterable) -> tuple[int, ...]:
    """Values from JSON that are to be numbers of something. ValueError for any other."""
    values = tuple(values)
    if not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise ValueError(f"{values} are not all counts")
    return values


class NewFile:
    """A file that is checksummed while it is written. Once the ``with`` is over it is on the disk, and has an entry."""

    def __init__(self, path: Path):
        self.file = open(path, "xb", buffering=0)  # noqa: SIM115 – closed by __exit__
        self.size, self.checksum = 0, xxhash.xxh3_128()

    def __enter__(self) -> "NewFile":
        return self

    def write(self, content: bytes | memoryview) -> None:
        content = memoryview(content)
        for start in range(0, len(content), _PIECE):
            piece = content[start : start + _PIECE]
            self.checksum.update(piece)
            while piece:
                piece = piece[self.file.write(piece) :]
        self.size += len(content)

    def __exit__(self, kind, *_) -> None:
        with self.file:
            if kind is None:
                os.fsync(self.file.fileno())

    @property
    def entry(self) -> Entry:
        return Entry(self.size, self.checksum.hexdigest())


def write_file(path: Path, content: bytes) -> Entry:
    with NewFile(path) as file:
        file.write(content)
    return file.entry


def sync(path: Path) -> None:
    """Returns when a file's content, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(file) -> str:
    """Of the rest of a file that was opened unbuffered."""
    checksum, buffer = xxhash.xxh3_128(), memoryview(bytearray(_PIECE))
    while size := file.readinto(buffer):
        checksum.update(buffer[:size])
    return checksum.hexdigest()
