"""What the files of a checkpoint must be: ``manifest.json`` has the size and the checksum of each. No torch."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import xxhash

from gpt4d.config import ConfigError

MANIFEST = "manifest.json"
_PIECE = 1 << 20  # bytes: small enough to stay in a processor's cache between its checksum and its writing


class Damaged(ConfigError):
    """A checkpoint is not what was written. Names the file."""


class Entry(NamedTuple):
    """What the manifest says of a file."""

    bytes: int
    xxh3_128: str


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


def write(directory: Path, entries: Mapping[str, Entry]) -> None:
    """The manifest of a directory whose files are all on the disk; then it is too, and the directory."""
    files = {name: entry._asdict() for name, entry in sorted(entries.items())}
    document = {"files": files, "xxh3_128": _checksum_of(files)}
    write_file(directory / MANIFEST, json.dumps(document, indent=1).encode())
    sync_directory(directory)


def read(directory: Path) -> dict[str, Entry]:
    """The entries by the files' names. Damaged if there is no manifest, or it is not as it was written."""
    try:
        document = json.loads((directory / MANIFEST).read_bytes())
        if document["xxh3_128"] != _checksum_of(document["files"]):
            raise ValueError("its checksum is another")
        return {name: Entry(**entry) for name, entry in document["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"{directory / MANIFEST}: damaged or missing ({error})") from None


def check(directory: Path, entries: Mapping[str, Entry], names: Iterable[str]) -> None:
    """Damaged unless the named files are there with the size and the checksum of their entries."""
    for name in names:
        path, expected = directory / name, entries[name]
        if Path(name).name != name:
            raise Damaged(f"{directory / MANIFEST}: {name!r} is not the name of a file of this directory")
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise Damaged(f"{path}: missing") from None
        if size != expected.bytes:
            raise Damaged(f"{path}: {size:,} bytes long, {expected.bytes:,} were written")
        if _checksum_of_file(path) != expected.xxh3_128:
            raise Damaged(f"{path}: damaged, its checksum is not that of what was written")


def sync_directory(directory: Path) -> None:
    """Returns when the names of a directory are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum_of(files: Mapping) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(files, sort_keys=True).encode())


def _checksum_of_file(path: Path) -> str:
    checksum, buffer = xxhash.xxh3_128(), memoryview(bytearray(_PIECE))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            checksum.update(buffer[:size])
    return checksum.hexdigest()
