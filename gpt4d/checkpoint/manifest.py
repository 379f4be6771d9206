"""What the files of a checkpoint must be: ``manifest.json`` has the size and the checksum of each. No torch."""

import errno
import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from gpt4d.config import ConfigError
from gpt4d.files import FileEntry, checksum, counts, sync, write_file

T = TypeVar("T")

MANIFEST = "manifest.json"


class Damaged(ConfigError):
    """A checkpoint is not what was written. Names the file."""


def write(directory: Path, entries: Mapping[str, FileEntry]) -> None:
    """The manifest of a directory whose files are all on the disk; then it is too, and the directory."""
    files = {name: entry._asdict() for name, entry in sorted(entries.items())}
    document = {"files": files, "xxh3_128": _checksum_of(files)}
    write_file(directory / MANIFEST, json.dumps(document, indent=1).encode())
    sync(directory)


def read(directory: Path) -> dict[str, FileEntry]:
    """The entries by the files' names. Damaged if there is no manifest, or it is not as it was written."""

    def entries(document: dict) -> dict[str, FileEntry]:
        if document["xxh3_128"] != _checksum_of(document["files"]):
            raise ValueError("its checksum is another")
        return {
            name: FileEntry(*counts([entry["bytes"]]), str(entry["xxh3_128"]))
            for name, entry in document["files"].items()
        }

    return parsed(directory / MANIFEST, entries)


def parsed(path: Path, meaning: Callable[[Any], T]) -> T:
    """What the JSON of a checkpoint's file means. Damaged if it is not there or means nothing.

    ConfigError if only reading it fails: a disk that is out of reach is no damage.
    """
    try:
        with open_regular(path) as file:
            return meaning(json.loads(file.read()))
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path}: damaged ({type(error).__name__}: {error})") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def open_regular(path: Path):
    """A file of a checkpoint, unbuffered. Damaged if it is missing, or a link or a device: it comes from somebody."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(f"{path}: missing") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Damaged(f"{path}: a link; a checkpoint has its files in its directory") from None
        raise ConfigError(f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Damaged(f"{path}: not a file")
    return open(descriptor, "rb", buffering=0)


def check(directory: Path, entries: Mapping[str, FileEntry], names: Iterable[str]) -> None:
    """Damaged unless the named files are there with the size and the checksum of their entries.

    ConfigError if one cannot be read now.
    """
    for name in names:
        path, expected = directory / name, entries[name]
        if Path(name).name != name:
            raise Damaged(f"{directory / MANIFEST}: {name!r} is not the name of a file of this directory")
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected.bytes:
                    raise Damaged(f"{path}: {size:,} bytes long, {expected.bytes:,} were written")
                if checksum(file) != expected.xxh3_128:
                    raise Damaged(f"{path}: damaged, its checksum is not that of what was written")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None


def _checksum_of(files: Mapping) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(files, sort_keys=True).encode())
