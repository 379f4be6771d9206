"""The size and checksum of each file of a checkpoint, stored in ``manifest.json``. Does not import torch."""

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
    """Raised if a checkpoint's files differ from what was written. The message names the file."""


def write(directory: Path, entries: Mapping[str, FileEntry]) -> None:
    """Write and sync the manifest of a directory whose files are on disk, then sync the directory."""
    files = {name: entry._asdict() for name, entry in sorted(entries.items())}
    document = {"files": files, "xxh3_128": _checksum(files)}
    write_file(directory / MANIFEST, json.dumps(document, indent=1).encode())
    sync(directory)


def read(directory: Path) -> dict[str, FileEntry]:
    """Return the entries by file name. Raises Damaged if the manifest is missing or differs from what was written."""

    def entries(document: dict) -> dict[str, FileEntry]:
        if document["xxh3_128"] != _checksum(document["files"]):
            raise ValueError("checksum mismatch")
        if odd := [name for name in document["files"] if Path(name).name != name or not name.isprintable()]:
            raise ValueError(f"{odd[0]!r} is not a file name in this directory")
        return {
            name: FileEntry(counts([entry["bytes"]])[0], str(entry["xxh3_128"]))
            for name, entry in document["files"].items()
        }

    return parse_json(directory / MANIFEST, entries)


def parse_json(path: Path, convert: Callable[[Any], T]) -> T:
    """Read a checkpoint's JSON file and ``convert`` its value.

    Raises Damaged if the file is missing or cannot be converted, ConfigError if it cannot be read: an unreachable disk
    is not damage.
    """
    try:
        with open_regular(path) as file:
            return convert(json.loads(file.read()))
    except ConfigError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path}: damaged ({type(error).__name__}: {error})") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def open_regular(path: Path):
    """Open a checkpoint's file unbuffered. Raises Damaged if it is missing, a link or a device: it may be untrusted."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(f"{path}: missing") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Damaged(f"{path}: a link; replace it with the file itself") from None
        raise ConfigError(f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Damaged(f"{path}: not a regular file")
    return open(descriptor, "rb", buffering=0)


def check(directory: Path, entries: Mapping[str, FileEntry], names: Iterable[str]) -> None:
    """Check the named files against the sizes and checksums of their entries.

    Raises Damaged on a mismatch or a missing file, ConfigError if a file cannot be read.
    """
    for name in names:
        path, expected = directory / name, entries[name]
        if Path(name).name != name:
            raise Damaged(f"{directory / MANIFEST}: {name!r} is not a file name in this directory")
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected.bytes:
                    raise Damaged(f"{path}: {size:,} bytes long, but {expected.bytes:,} were written")
                if checksum(file) != expected.xxh3_128:
                    raise Damaged(f"{path}: damaged, checksum mismatch")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None


def _checksum(files: Mapping) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(files, sort_keys=True).encode())
